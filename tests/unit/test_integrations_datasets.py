"""Texts for training scripts, from files as other programs write them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from p2pdiloco.integrations.datasets import load_texts
from p2pdiloco.training.dataset_files import CorpusError

TEXTS = ["one\u2028two\x85three", "naïve ☃", ""]


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """With a byte order mark, Windows line ends, and empty lines at the end."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\n")
    assert list(load_texts(str(tmp_path / "texts.jsonl"))) == TEXTS
    assert list(load_texts(str(tmp_path))) == TEXTS, "a folder of such files"


def test_a_text_file_is_one_text_however_long(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("line\n" * 500_000)
    assert [len(text) for text in load_texts(str(tmp_path / "book.txt"))] == [2_500_000]


@pytest.mark.skipif(not find_spec("pyarrow"), reason="needs the extra hf")
def test_parquet_is_read_by_its_column(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "texts.parquet")
    assert list(load_texts(str(tmp_path / "texts.parquet"), column="body")) == TEXTS
    with pytest.raises(CorpusError, match="no column 'text'"):
        list(load_texts(str(tmp_path / "texts.parquet")))


def test_what_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(CorpusError, match=r"line 2, is not a JSON object with key 'text'"):
        list(load_texts(str(tmp_path / "texts.jsonl")))


def test_a_place_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CorpusError, match=r"missing\.jsonl is not a file"):
        list(load_texts(str(tmp_path / "missing.jsonl")))
