"""What is wrong in a configuration is said with its keys and values, and with what may stand there."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.training.config_errors import in_words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'the key name is missing: add it, such as name = "story"'),
        ("name = 'x'\ncolour = 'red'", "there is no key colour: there are name, access, seed, model"),
        ("name = 'x'\n[shedule]\na = 1", "there is no key shedule: did you mean schedule?"),
        ("name = 'x'\ninner.step = 3", "there is no key inner.step: did you mean inner.steps?"),
        ("name = 'a b'", "name = 'a b': write a text of letters, digits, dots, dashes and underscores"),
        (f"name = '{'x' * 65}'", "write a text with a length of at most 64"),
        ("name = 3", "name = 3: write a text"),
        ("name = 'x'\ninner = 3", "inner = 3: write a table"),
        ("name = 'x'\ninner.steps = 0", "inner.steps = 0: write a whole number of at least 1"),
        ("name = 'x'\ninner.batch = 'many'", "inner.batch = 'many': write a whole number"),
        ("name = 'x'\ninner.learning_rate = 0", "inner.learning_rate = 0: write a number above 0.0"),
        ("name = 'x'\nouter.momentum = 3.0", "outer.momentum = 3.0: write a number below 1.0"),
        ("name = 'x'\ncodec.up_step = 'x'", "codec.up_step = 'x': write a number"),
        ("name = 'x'\nmodel.lora.targets = 'q'", "model.lora.targets = 'q': write a list"),
        ("name = 'x'\naccess = 'all'", "access = 'all': choose one of invite, list, open"),
        ("name = 'x'\ninner.optimizer = 'adam'", "inner.optimizer = 'adam': choose one of adamw, muon"),
    ],
)
def test_a_misprint_is_said_in_the_file_s_own_words(text: str, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.toml.decode(text.encode(), type=RunConfig)
    assert said in in_words(error.value, msgspec.toml.decode(text), RunConfig)
