"""What comes out is what was trained: every kind of run in every format, loaded again by other libraries."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not all(map(find_spec, ("transformers", "peft", "gguf"))),
        reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
    ),
]


@pytest.mark.usefixtures("own_logging")
def test_logits_are_those_of_the_swarms_model_in_every_format(tmp_path: Path) -> None:
    from benchmarks.exports import FORMATS, KINDS, REFUSED, cells

    found = list(cells(tmp_path))
    assert len(found) == len(KINDS) * len(FORMATS)
    assert {(cell["kind"], cell["format"]) for cell in found if cell["refused"]} == REFUSED
    assert all("--format" in str(cell["reason"]) for cell in found if cell["refused"]), "the remedy"
    wrong = [cell for cell in found if not cell["refused"] and not float(str(cell["logit_error"])) <= 1e-5]
    assert not wrong
