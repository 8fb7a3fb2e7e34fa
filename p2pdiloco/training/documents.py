"""Documents: reads the texts of a user's files (text, JSON lines, a JSON array, Parquet), as other programs write them.

Rules of this file:
1. The text of a row is in its column, as a text or as chat messages. Without a column ``text``, the usual columns of
   chats are taken: ``messages``, ``conversations``, or ``instruction``, ``input`` and ``output`` (Alpaca).
2. Messages have ``role`` and ``content``, or ``from`` and ``value`` (ShareGPT). They become a text by the chat template
   of the model's tokenizer.
3. Rows whose text is null or blank are skipped and counted. Anything else that is no text is an error, which names the
   row: a template renders nothing of keys that it does not know, and nobody would see it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.training.dataset_files import BROKEN, CorpusError, ReadingProgress, is_array, log, open_file
from p2pdiloco.training.huggingface import EXTRA

MAX_ROW_BYTES = 1 << 26
MAX_ARRAY_BYTES = 1 << 29
# Amount of a text file that is encoded at once. It is cut at a line end.
TEXT_BYTES = 1 << 20
_ROWS = 256
_CHATS = ("messages", "conversations")
_ALPACA = ("instruction", "input", "output")
# ``from`` in ShareGPT, by role.
_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system", "tool")}}

Messages = list[dict[str, Any]]


class Document(NamedTuple):
    """A document, or a piece of one."""

    name: str
    text: str
    is_end: bool


class Documents:
    """The documents of ``files``, each in one piece or several. Iterate over it once.

    Args:
        config: kind and column of the data.
        root: folder of the files.
        option: the user's way of naming the column, for messages.
        render: makes a text of chat messages; None: rows with messages are refused.

    Raises:
        CorpusError: while iterating: a file cannot be read, or a row is broken.
    """

    def __init__(
        self,
        config: DataConfig,
        root: Path,
        files: Sequence[Path],
        *,
        option: str = "data.column",
        render: Callable[[Messages], str] | None = None,
    ) -> None:
        self._config, self._root, self._files = config, root, files
        self._option, self._render = option, render
        self.rows, self.skipped = 0, 0
        """Documents that were read; rows that were skipped because they have no text."""

    def __iter__(self) -> Iterator[Document]:
        progress = ReadingProgress("reading-data", sum(file.stat().st_size for file in self._files))
        for file in self._files:
            name = file.relative_to(self._root).as_posix()
            try:
                for document in self._text(file, name) if self._config.kind == "text" else self._rows(file, name):
                    if document.text.count("\0") * 4 > len(document.text):
                        raise _no_text(document.name)
                    progress.add(len(document.text))
                    self.rows += document.is_end
                    yield document
            except BROKEN as error:
                raise CorpusError(f"{file} cannot be read ({error}): repair it or move it away") from error
        if self.skipped:
            log.warning(f"{self.skipped:,} rows of {self._root} have no text (null or blank) and are skipped")

    def _text(self, file: Path, name: str) -> Iterator[Document]:
        with io.TextIOWrapper(open_file(file), encoding="utf-8", errors="replace") as stream:
            piece = stream.read(TEXT_BYTES) + stream.readline(TEXT_BYTES)
            while piece:
                following = stream.read(TEXT_BYTES) + stream.readline(TEXT_BYTES)
                yield Document(name, piece, not following)
                piece = following

    def _rows(self, file: Path, name: str) -> Iterator[Document]:
        if self._config.kind == "parquet":
            rows = self._parquet(file)
        else:
            rows = _array(file) if is_array(file) else self._json_lines(file)
        for index, row in rows:
            text = text_of(row, self._config.column, f"{file}, row {index + 1}", self._option, self._render)
            if text is None:
                self.skipped += 1
            else:
                yield Document(f"{name}#{index}", text, True)

    def _json_lines(self, file: Path) -> Iterator[tuple[int, Any]]:
        column = self._config.column
        with open_file(file) as stream:
            for index in range(1 << 62):
                line = stream.readline(MAX_ROW_BYTES)
                if not line:
                    return
                if b"\0" in line:
                    raise _no_text(f"{file}, line {index + 1}")
                if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                    raise CorpusError(
                        f"{file}, line {index + 1}, is longer than {MAX_ROW_BYTES >> 20} MiB: divide this row into "
                        "several, or name a file with one JSON object on each line"
                    )
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    columns_of(row, column)
                except UnicodeDecodeError as error:
                    raise CorpusError(
                        f"{file}, line {index + 1}, is not UTF-8: convert it (for example iconv -f latin1 -t utf8)"
                    ) from error
                except (ValueError, KeyError, TypeError) as error:
                    raise CorpusError(
                        f"{file}, line {index + 1}, is not a JSON object with key {column!r}: repair it, or set "
                        f"{self._option}"
                    ) from error
                yield index, row

    def _parquet(self, file: Path) -> Iterator[tuple[int, Any]]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise CorpusError(f"the data are Parquet: {EXTRA}") from error
        index = 0
        try:
            with parquet.ParquetFile(file) as table:
                names = table.schema_arrow.names
                try:
                    columns = columns_of(names, self._config.column)
                except KeyError:
                    raise CorpusError(
                        f"{file} has no column {self._config.column!r}: set {self._option} to one of {names}"
                    ) from None
                for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        yield index, row
                        index += 1
        except pyarrow.ArrowInvalid as error:
            raise CorpusError(f"{file} is not a Parquet file: {error}") from error


def _array(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON array. It is read as a whole."""
    with open_file(file) as stream:
        content = stream.read(MAX_ARRAY_BYTES + 1)
    remedy = "write one object on each line instead: jq -c '.[]' FILE > FILE.jsonl"
    if len(content) > MAX_ARRAY_BYTES:
        raise CorpusError(f"{file} is a JSON array of more than {MAX_ARRAY_BYTES >> 20} MiB: {remedy}")
    try:
        yield from enumerate(json.loads(content))
    except ValueError as error:
        raise CorpusError(f"{file} is not a JSON array ({error}): repair it, or {remedy}") from error


def columns_of(names: Any, column: str) -> list[str]:
    """Return the columns, of those with these names, that hold a row's text.

    Raises:
        KeyError: there are none.
        TypeError: ``names`` is a JSON value without names.
    """
    if isinstance(names, str):
        raise TypeError("a text has no columns")
    if column in names:
        return [column]
    if column == "text":
        found = [name for name in _CHATS if name in names][:1]
        if found or {"instruction", "output"} <= set(names):
            return found or [name for name in _ALPACA if name in names]
    raise KeyError(column)


def text_of(row: Any, column: str, place: str, option: str, render: Callable[[Messages], str] | None) -> str | None:
    """Return the text of a row; None if it is null or blank. ``place`` and ``option`` are for messages.

    Raises:
        CorpusError: the row has no such column, or no text in it.
    """
    if not isinstance(row, Mapping):
        raise CorpusError(f"{place} is not a JSON object: repair it")
    if column in row or column != "text":
        value = row.get(column, ...)
    elif chat := next((name for name in _CHATS if name in row), None):
        column, value = chat, row[chat]
    else:
        question, answer = (row.get(name, ...) for name in ("instruction", "output"))
        value = None if answer is None else ...
        if isinstance(question, str) and isinstance(answer, str):
            question = f"{question}\n\n{row['input']}" if row.get("input") else question
            value = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        value = value.decode() if isinstance(value, bytes) else value  # as some programs write texts to Parquet
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place}: {column!r} is not UTF-8: convert it") from error
    if value is None or isinstance(value, str):
        return value if value and not value.isspace() else None
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        messages = [_message(message, place) for message in value]
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            raise CorpusError(f"{place}: {column!r} has no message that is not empty: remove the row")
        if render is None:
            raise CorpusError(
                f"{place} has chat messages: pass tokenizer=, a tokenizer of transformers with a chat template"
            )
        try:
            text = render(messages)
        except CorpusError:
            raise
        except Exception as error:  # templates and transformers raise many types of errors
            raise CorpusError(f"{place}: the chat template cannot render the messages: {error}") from error
        if not text or text.isspace():
            raise CorpusError(f"{place}: the chat template makes no text of the messages: use another template")
        return text
    raise CorpusError(f"{place}: {column!r} is not a text: repair it, or set {option}")


def _message(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a chat message with its role and content. Raises CorpusError if it is in no known form."""
    told = {key: value for key, value in given.items() if value is not None}  # Parquet adds null for missing keys
    if "role" in told and ("content" in given or "tool_calls" in told):
        return dict(given)
    if "value" in told and (role := _ROLES.get(str(told.get("from")))):
        return {"role": role, "content": told["value"]}
    has = ", ".join(f"{key} = {str(value)[:20]!r}" for key, value in told.items()) or "no keys"
    raise CorpusError(
        f"{place}: a chat message has {has}, but neither role and content, nor from ({', '.join(_ROLES)}) and value: "
        "rename its keys"
    )


def _no_text(place: str) -> CorpusError:
    return CorpusError(
        f"{place} has many NUL bytes, so it is not UTF-8 text but a file with holes, binary data or UTF-16: convert it "
        "(iconv -f utf-16 -t utf-8), download it again, or move it away"
    )
