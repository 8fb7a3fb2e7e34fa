"""Texts for training scripts, from files as other programs write them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import zstandard

from p2pdiloco.integrations.datasets import load_texts
from p2pdiloco.training.dataset_files import CorpusError
from p2pdiloco.training.documents import MAX_ROW_BYTES, Messages, columns_of, text_of
from p2pdiloco.training.export import byte_tokenizer

TEXTS = ["one\u2028two\x85three", "naïve ☃", "b\n"]


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """With a byte order mark, Windows line ends, and empty lines at the end."""
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\n")
    assert list(load_texts(str(tmp_path / "texts.jsonl"))) == TEXTS
    assert list(load_texts(str(tmp_path))) == TEXTS, "a folder of such files"


def test_a_text_file_is_one_text_however_long(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("line\n" * 500_000)
    assert [len(text) for text in load_texts(str(tmp_path / "book.txt"))] == [2_500_000]


def lines(texts: Sequence[str | None]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


COMPRESSED = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_files_are_read_whole_or_not_at_all(ending: str, tmp_path: Path) -> None:
    """Before: "line 1 is not UTF-8: iconv"."""
    compress = COMPRESSED[ending]
    texts = [os.urandom(100).hex() for _ in range(2000)]
    content = compress(lines(texts[:1000])) + compress(lines(texts[1000:]))  # as parallel compressors write it
    (tmp_path / f"texts.jsonl.{ending}").write_bytes(content)
    assert list(load_texts(str(tmp_path))) == texts
    (tmp_path / f"texts.jsonl.{ending}").write_bytes(content[:-100])
    with pytest.raises(CorpusError, match=r"cannot be read .*repair it"):
        list(load_texts(str(tmp_path)))
    (tmp_path / f"texts.jsonl.{ending}").rename(tmp_path / "unnamed")
    (tmp_path / "unnamed").write_bytes(compress(lines(["a"])))
    assert list(load_texts(str(tmp_path / "unnamed"))) == ["a"]


def test_a_folder_of_several_kinds_is_an_error_until_one_is_chosen(tmp_path: Path) -> None:
    """Before, 300 rows beside one LICENSE.txt were left out without a word."""
    (tmp_path / "texts.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "LICENSE.txt").write_text("license")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"text: LICENSE.txt; jsonl: texts.jsonl\): choose one of them with kind="):
        list(load_texts(str(tmp_path)))
    assert list(load_texts(str(tmp_path), kind="jsonl")) == TEXTS
    assert list(load_texts(str(tmp_path), kind="text")) == ["license"]
    (tmp_path / "LICENSE.txt").unlink()
    (tmp_path / "README.md").write_text("about")
    assert list(load_texts(str(tmp_path))) == TEXTS, "a tokenizer and a README are no data"


def test_rows_without_a_text_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "texts.jsonl").write_bytes(lines(["a", None, "b", "", " \n"]))
    assert list(load_texts(str(tmp_path))) == ["a", "b"]
    assert "3 rows of" in caplog.text


def test_a_line_that_is_too_long_and_one_of_nuls_are_told_as_such(tmp_path: Path) -> None:
    """Before: "is not a JSON object"."""
    with (tmp_path / "texts.jsonl").open("wb") as file:
        file.write(b'{"text": "' + b"a" * MAX_ROW_BYTES + b'"}')
    with pytest.raises(CorpusError, match=r"line 1, is longer than 64 MiB: divide"):
        list(load_texts(str(tmp_path)))
    (tmp_path / "texts.jsonl").write_bytes(lines(["a"]) + b"\0" * 1000)
    with pytest.raises(CorpusError, match=r"line 2 has many NUL bytes"):
        list(load_texts(str(tmp_path)))
    (tmp_path / "texts.jsonl").rename(tmp_path / "texts.txt")
    (tmp_path / "texts.txt").write_text("text " * 1000, encoding="utf-16")
    with pytest.raises(CorpusError, match=r"texts.txt has many NUL bytes"):
        list(load_texts(str(tmp_path)))
    os.truncate(tmp_path / "texts.txt", 0)
    os.truncate(tmp_path / "texts.txt", 1 << 40)
    with pytest.raises(CorpusError, match=r"texts.txt has many NUL bytes"):
        list(load_texts(str(tmp_path)))


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ALPACA = [
    {"instruction": "Add", "input": "1 2", "output": "3"},
    {"instruction": "Greet", "input": "", "output": "Hello"},
    {"instruction": "Say nothing", "input": "", "output": None},
]
TEMPLATE = "<s>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}</s>\n"


@pytest.mark.heavy
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the extra hf")
def test_chats_become_texts_by_the_chat_template(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, bos_token="<s>", eos_token="</s>")
    (tmp_path / "alpaca.json").write_text(json.dumps(ALPACA, indent=1))
    with pytest.raises(CorpusError, match="row 1 has chat messages: pass tokenizer="):
        list(load_texts(str(tmp_path)))
    with pytest.raises(CorpusError, match=r"row 1: the chat template cannot render .*chat_template is not set"):
        list(load_texts(str(tmp_path), tokenizer=tokenizer))
    tokenizer.chat_template = TEMPLATE
    alpaca = ["<s>[user]Add\n\n1 2[assistant]3", "<s>[user]Greet[assistant]Hello"]
    assert list(load_texts(str(tmp_path), tokenizer=tokenizer)) == alpaca, "a script adds the end, as to any text"
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": CHAT}) + "\n")
    assert list(load_texts(str(chat), tokenizer=tokenizer)) == ["<s>[user]Hi[assistant]Hello"]
    chat.write_text(json.dumps({"talk": CHAT}) + "\n")
    assert len(list(load_texts(str(chat), tokenizer=tokenizer, column="talk"))) == 1


def say(*said: tuple[str, object], keys: tuple[str, str] = ("from", "value")) -> list[dict[str, object]]:
    return [dict(zip(keys, one, strict=True)) for one in said]


SHAREGPT = say(("system", "Be kind"), ("human", "Hi"), ("gpt", "Hello"))


def render(messages: Messages) -> str:
    """As templates do: they write nothing for keys that they do not know."""
    return "".join(f"[{message.get('role', '')}]{message.get('content') or ''}" for message in messages)


def chat(row: dict[str, object]) -> str | None:
    return text_of(row, "text", "row 7", "column=", render)


def test_the_messages_of_sharegpt_are_read() -> None:
    """They became "[][][]": a text without a word of theirs."""
    assert chat({"id": "0", "conversations": SHAREGPT}) == "[system]Be kind[user]Hi[assistant]Hello"
    filled = [message | {"role": None, "content": None} for message in SHAREGPT]  # by Parquet, if other rows have them
    assert chat({"conversations": filled}) == chat({"conversations": SHAREGPT})
    assert columns_of(["id", "conversations", "input"], "text") == ["conversations"]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    assert chat({"messages": [*CHAT, call]}) == "[user]Hi[assistant]Hello[assistant]"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (say(("user", "Hi"), keys=("role", "text")), "a chat message has role = 'user', text = 'Hi', but neither"),
        (say(("observation", "3")), "a chat message has from = 'observation', value = '3', but"),
        (
            say(("user", ["Hi"]), keys=("speaker", "says")),
            r"has speaker = 'user', says = \"\['Hi'\]\", but neither role and",
        ),
        ([{}], "a chat message has no keys, but"),
        (say(("human", ""), ("gpt", "")), "'conversations' has no message that is not empty: remove the row"),
        (say(("user", None), keys=("role", "content")), "has no message that is not empty"),
        ([], "has no message that is not empty"),
    ],
)
def test_messages_that_a_template_would_not_see_are_refused_with_row_and_keys(said: object, told: str) -> None:
    with pytest.raises(CorpusError, match=f"row 7: .*{told}"):
        chat({"conversations": said})


def test_a_template_that_renders_nothing_is_named() -> None:
    with pytest.raises(CorpusError, match="row 7: the chat template makes no text of the messages"):
        text_of({"messages": CHAT}, "text", "row 7", "column=", lambda messages: "\n")


@pytest.mark.skipif(not find_spec("pyarrow"), reason="needs the extra hf")
def test_every_type_of_text_in_parquet_is_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    texts = pyarrow.array(["a", None, "b", "a"])
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"text": texts.cast(kind)}), tmp_path / "texts.parquet")
        assert list(load_texts(str(tmp_path))) == ["a", "b", "a"], kind
    binary = pyarrow.array([b"a", "naïve ☃".encode()])
    parquet.write_table(pyarrow.table({"text": binary}), tmp_path / "texts.parquet")
    assert list(load_texts(str(tmp_path))) == ["a", "naïve ☃"]
    chats = pyarrow.array([CHAT, None])
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "texts.parquet")
    with pytest.raises(CorpusError, match="row 1 has chat messages: pass tokenizer="):
        list(load_texts(str(tmp_path)))


@pytest.mark.skipif(not find_spec("pyarrow"), reason="needs the extra hf")
def test_parquet_is_read_by_its_column(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "texts.parquet")
    assert list(load_texts(str(tmp_path / "texts.parquet"), column="body")) == TEXTS
    with pytest.raises(CorpusError, match=r"no column 'text': set column= to one of \['body'\]"):
        list(load_texts(str(tmp_path / "texts.parquet")))


def test_what_is_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(CorpusError, match=r"line 2, is not a JSON object with key 'text': repair it, or set column="):
        list(load_texts(str(tmp_path / "texts.jsonl")))


def test_a_place_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CorpusError, match=r"missing\.jsonl is not a file"):
        list(load_texts(str(tmp_path / "missing.jsonl")))
