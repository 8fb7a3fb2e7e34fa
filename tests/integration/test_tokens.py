"""Documents as tokens: every kind gives the same tokens; what is wrong is said; a tokenizer must be the run's."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import msgspec
import pytest
import torch
from documents import VOCABULARY, make_texts, write_documents, write_tokenizer

from p2pdiloco.protocol.manifest import DataConfig, RunConfig
from p2pdiloco.training import documents, tokenized_dataset
from p2pdiloco.training.corpus import data_digest, load_corpus
from p2pdiloco.training.data_sources import tell_sources
from p2pdiloco.training.dataset_files import Corpus, CorpusError
from p2pdiloco.training.tokenized_dataset import with_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra hf: pip install '.[hf]'")
pytest.importorskip("pyarrow", reason="needs the extra hf: pip install '.[hf]'")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "p2pdiloco" / "tokens"


def config(kind: str, **changes: object) -> DataConfig:
    return msgspec.convert({"kind": kind, "held_out_share": 0.3, **changes}, DataConfig)


def load(folder: Path, settings: DataConfig, max_bytes: int = 1 << 30, context: int = 1) -> Corpus:
    return load_corpus(settings, str(folder / settings.kind), str(folder / "tok"), max_bytes, context=context)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_documents_become_tokens_once(tmp_path: Path, kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(300)
    write_tokenizer(tmp_path / "tok")
    write_documents(tmp_path / kind, kind, texts)
    settings = config(kind, separator="</s>")
    corpus = load(tmp_path, settings, context=16)
    total = sum(len(text.split()) + 1 for text in texts)
    assert len(corpus.train) + len(corpus.held_out) == total, "every word and every separator, once"
    assert 0.15 < len(corpus.held_out) / total < 0.45
    assert int(corpus.train.max()) < VOCABULARY
    assert corpus.train.dtype == torch.int32
    assert int((corpus.train == 1).sum() + (corpus.held_out == 1).sum()) == len(texts)
    assert len(list(cache.iterdir())) == 1, "nothing temporary stays"
    digest = data_digest(corpus)

    def fail(*_: object) -> None:
        raise AssertionError("it was tokenized before")

    monkeypatch.setattr(tokenized_dataset, "_write", fail)
    assert data_digest(load(tmp_path, settings, context=16)) == digest


def test_a_long_text_is_one_document_though_it_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "TEXT_BYTES", 1000)
    write_tokenizer(tmp_path / "tok")
    for name in ("a", "b", "c", "d"):  # "b" is held out
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{name}.txt").write_text("\n".join(make_texts(100)))
    corpus = load(tmp_path, config("text", separator="</s>", held_out_share=0.5), context=16)
    assert int((corpus.train == 1).sum() + (corpus.held_out == 1).sum()) == 4
    words = sum(len(text.split()) for text in make_texts(100))
    assert len(corpus.train) % (words + 1) == 0, "each file as a whole went to one split"


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    write_documents(tmp_path / "jsonl", "jsonl", make_texts(2000))
    whole = load(tmp_path, config("jsonl"))
    part = load(tmp_path, config("jsonl"), max_bytes=40_000)
    assert len(part.train) < 0.6 * len(whole.train)


def test_a_run_on_chats_trains_on_what_the_template_beside_its_tokenizer_makes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From compressed rows, some without messages, which are counted. A changed template makes other tokens."""
    write_tokenizer(tmp_path / "tok")
    texts = make_texts(100)
    chats = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]} for text in texts]
    content = "".join(json.dumps(chat) + "\n" for chat in [*chats, {"messages": None}]).encode()
    (tmp_path / "jsonl").mkdir()
    (tmp_path / "jsonl" / "chats.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "jsonl" / "LICENSE.txt").write_text("data.kind chooses")
    with pytest.raises(CorpusError, match=r"has no chat template: copy chat_template\.jinja there"):
        load(tmp_path, config("jsonl"))
    template = tmp_path / "tok" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    with caplog.at_level(logging.INFO, "p2pdiloco"):
        found = load(tmp_path, config("jsonl"))
    total = sum(len(text.split()) + 1 for text in texts)
    assert len(found.train) + len(found.held_out) == total
    (told,) = [record.__dict__["fields"] for record in caplog.records if record.message == "data-read"]
    assert {name: told[name] for name in ("files", "rows", "skipped")} == {"files": 1, "rows": 100, "skipped": 1}
    assert told["tokens"] + told["held_out"] == total
    template.write_text("{% for m in messages %}{{ m['content'] }} x {% endfor %}")
    found = load(tmp_path, config("jsonl"))
    assert len(found.train) + len(found.held_out) == total + 200


def test_a_joiner_needs_the_runs_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    write_documents(tmp_path / "jsonl", "jsonl", make_texts(50))
    settings = with_tokenizer(config("jsonl"), str(tmp_path / "jsonl"), str(tmp_path / "tok"))
    assert len(settings.tokenizer_digest) == 40
    elsewhere = write_documents(tmp_path / "elsewhere", "jsonl", make_texts(50))
    with pytest.raises(CorpusError, match=r"no tokenizer\.json in .*nowhere or .*elsewhere.*--tokenizer"):
        load_corpus(settings, str(elsewhere), str(tmp_path / "nowhere"))
    assert len(load_corpus(settings, str(elsewhere), str(tmp_path / "tok")).train) > 0
    write_tokenizer(elsewhere)
    assert len(load_corpus(settings, str(elsewhere)).train) > 0
    (elsewhere / "tokenizer.json").write_text((elsewhere / "tokenizer.json").read_text() + " ")
    with pytest.raises(CorpusError, match="copy the founder's"):
        load_corpus(settings, str(elsewhere))
    with pytest.raises(CorpusError, match="copy the founder's"):
        tell_sources(RunConfig(name="x", data=settings), str(elsewhere), None, None)


@pytest.mark.parametrize(
    ("kind", "name", "content", "told"),
    [
        ("jsonl", "0.jsonl", '{"text": "a"}\n{"body": "a"}\n', "line 2, is not a JSON object with key 'text'"),
        ("jsonl", "0.jsonl", "not json\n", "line 1, is not a JSON"),
        ("jsonl", "0.jsonl", b'{"text": "caf\xe9"}\n', "line 1, is not UTF-8: convert it"),
        ("jsonl", "0.jsonl", '{"text": 3}\n', "row 1: 'text' is not a text"),
        ("parquet", "0.parquet", "PAR1 not really", "is not a Parquet file"),
        ("text", "0.doc", "text", "no file that matches '\\*.txt'"),
        ("text", "0.txt", "one word", "a sample needs"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, kind: str, name: str, content: str | bytes, told: str) -> None:
    write_tokenizer(tmp_path / "tok")
    (tmp_path / kind).mkdir()
    (tmp_path / kind / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CorpusError, match=told):
        load(tmp_path, config(kind), context=16)
    assert not list((tmp_path / "cache" / "p2pdiloco" / "tokens").glob("*.*")), "no half of a corpus stays"


def test_a_column_and_a_separator_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    write_documents(tmp_path / "parquet", "parquet", make_texts(50))
    with pytest.raises(CorpusError, match=r"no column 'body': set data.column to one of \['number', 'text'\]"):
        load(tmp_path, config("parquet", column="body"))
    with pytest.raises(CorpusError, match="is not a token of the tokenizer"):
        load(tmp_path, config("parquet", separator="<eos>"))


def test_what_a_killed_process_had_half_written_is_swept(tmp_path: Path, cache: Path) -> None:
    write_tokenizer(tmp_path / "tok")
    write_documents(tmp_path / "jsonl", "jsonl", make_texts(300))
    dead, alive = cache / f"{'0' * 40}.4194304", cache / f"{'0' * 40}.1"  # no process has a number beyond 2^22
    for half in (dead, alive):
        half.mkdir(parents=True)
        (half / "train.i32").write_bytes(b"half")
    load(tmp_path, config("jsonl"))
    assert not dead.exists()
    assert alive.exists(), "somebody writes it now"
