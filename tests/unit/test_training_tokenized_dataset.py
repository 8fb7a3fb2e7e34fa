"""Documents as tokens: kept for the next start, and made anew where anything is different."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch

from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training import tokenized_dataset
from p2pdiloco.training.corpus import Corpus
from p2pdiloco.training.export import byte_tokenizer
from p2pdiloco.training.tokenized_dataset import load_tokens

pytestmark = pytest.mark.skipif(not find_spec("tokenizers"), reason="needs the extra hf: pip install '.[hf]'")
CONFIG = DataConfig(kind="text", held_out_share=0.2)
DOCUMENTS = 40
LETTERS = 50


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Corpus]:
    """Load the documents in ``tmp_path / texts`` by a configuration and a number of bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(DOCUMENTS):
        (folder / f"{number}.txt").write_text(chr(ord("0") + number) * LETTERS)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))

    def load(config: DataConfig = CONFIG, max_bytes: int = 10**6) -> Corpus:
        return load_tokens(config, str(folder), None, max_bytes, 4)

    return load


def numbers(split: torch.Tensor) -> set[int]:
    """The documents of a split of tokens, int32 [n]."""
    return {int(token) for token in split}


def test_each_document_is_in_one_split_and_the_share_that_is_held_out_decides(load: Callable[..., Corpus]) -> None:
    """Also when the same documents were loaded with another share before."""
    for share in (0.2, 0.5, 0.2):
        found = load(msgspec.structs.replace(CONFIG, held_out_share=share))
        assert len(found.train) + len(found.held_out) == DOCUMENTS * LETTERS
        assert not numbers(found.train) & numbers(found.held_out)
        assert len(found.held_out) == pytest.approx(share * DOCUMENTS * LETTERS, rel=0.5)


def test_tokens_are_made_once_and_anew_for_other_documents_settings_and_lengths(
    load: Callable[..., Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = [], tokenized_dataset._write

    def counted(folder: Path, *rest: object) -> None:
        made.append(folder)
        write(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenized_dataset, "_write", counted)
    first = load()
    assert torch.equal(load().train, first.train)
    assert len(made) == 1
    assert len(load(max_bytes=DOCUMENTS * LETTERS // 2).train) < len(first.train)
    assert len(made) == 2
    os.utime(tmp_path / "texts" / "0.txt", (1, 1))
    load()
    (tmp_path / "texts" / "more.txt").write_text("!" * LETTERS)
    found = load()
    assert len(found.train) + len(found.held_out) == (DOCUMENTS + 1) * LETTERS
    assert len(set(made)) == len(made) == 4
