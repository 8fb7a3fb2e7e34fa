"""Event logs as they grow, and the schema of what stands in them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from event_lines import described, faults_of
from test_house import modules
from test_observability_history import ANN, BOB, commit, progress
from test_observability_log_reader_playback import started, write

from p2pdiloco.cli.main import main
from p2pdiloco.observability.event_schema import BY_NAME, EVENTS
from p2pdiloco.observability.log_reader import Choice, LoggedEvent, RecordingError, Tail, Tails, describe
from p2pdiloco.util.files import rotate

ROOT = Path(__file__).parents[2]
FIELDS_ELSEWHERE = {"joining", "transfer", "evaluation"}
"""Their fields come from a function."""


def append(log: Path, *events: dict[str, Any]) -> None:
    with open(log, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def test_what_is_logged_while_one_looks_is_told_once_and_in_order(tmp_path: Path) -> None:
    ann = write(tmp_path / "a" / "run" / "metrics.jsonl", started(100.0, ANN), commit(110.0, 1, BOB, ann=5))
    tails = Tails(tmp_path)
    append(ann, progress(111.0, 5))
    assert [event.at for event in tails.before()] == [100.0, 110.0], "what comes later is for new()"
    bob = write(tmp_path / "b" / "run" / "metrics.jsonl", started(105.0, BOB))
    assert [(event.at, event.source) for event in tails.new()] == [(105.0, BOB), (111.0, ANN)]
    with open(ann, "ab") as file:
        file.write(b'{"time": 112.0, "event"')
    assert tails.new() == []
    with open(ann, "ab") as file:
        file.write(b': "peers", "live": 2}\n[1]\nnonsense\n')
    assert [event.line["live"] for event in tails.new()] == [2]
    append(bob, progress(113.0, 5))
    assert [event.source for event in tails.new()] == [BOB]


def test_a_log_that_is_moved_aside_is_read_to_its_end_first(tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", started(1.0, ANN))
    tail = Tail(log)
    append(log, progress(2.0, 5))
    rotate(log, keep=3, most_bytes=1 << 20)
    append(log, progress(3.0, 5))
    assert [line["time"] for line in tail.new()] == [2.0, 3.0]
    assert tail.new() == []
    tail.close()


def test_a_line_that_never_ends_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdiloco.observability.log_reader.LONGEST_LINE", 100)
    log = write(tmp_path / "metrics.jsonl", started(1.0, ANN))
    tail = Tail(log)
    with open(log, "ab") as file:
        file.write(b"x" * 1000)
    assert tail.new() == []
    append(log, {}, progress(2.0, 5))
    assert [line["time"] for line in tail.new() if "time" in line] == [2.0]


def test_events_are_chosen_and_told_in_sentences(tmp_path: Path) -> None:
    came = {"time": 103.0, "event": "joined", "peer": BOB, "live": 2}
    evil = {"time": 104.0, "event": "note", "level": "info", "topic": "fork", "text": "\x1b[2J\n" + "w" * 999}
    write(tmp_path / "metrics.jsonl", started(100.0, ANN), came, evil, {"time": 105.0, "event": "joined"})
    events = list(Tails(tmp_path).before())
    assert [event.at for event in events if Choice(kinds=["joined"]).has(event)] == [103.0, 105.0]
    assert [event.at for event in events if Choice(peer=ANN[-6:], since=104.0).has(event)] == [104.0, 105.0]
    assert not any(Choice(peer=BOB[-6:]).has(event) for event in events)
    assert describe(events[1]).endswith("AAAAAA  joined            BBBBBB joined; 2 peers are live")
    assert all("\x1b" not in describe(event) and "\n" not in describe(event) for event in events)


def test_the_command_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "metrics.jsonl", started(100.0, ANN), progress(101.0, 5))
    assert main(["watch", "--events", str(tmp_path), "--kind", "progress", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {**progress(101.0, 5), "source": ANN}
    assert main(["watch", "--events", str(tmp_path), "--kind", "progres"]) == 2
    assert "did you mean progress?" in capsys.readouterr().err
    assert main(["watch", "--events", str(tmp_path / "nothing")]) == 2
    assert "no peer has logged anything" in capsys.readouterr().err


def test_where_nothing_is_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordingError):
        Tails(tmp_path)


def test_every_kind_is_told_in_words() -> None:
    examples = {"text": "12D3KooW" + "w" * 44, "integer": 3, "number": 1.5, "boolean": False}
    for kind in EVENTS:
        filled = {field.name: examples.get(field.form, {f"{ANN}/abc": 1500}) for field in kind.fields}
        nulls = {field.name: None for field in kind.fields if field.or_null}
        for fields in (filled, {**filled, **nulls}):
            words = describe(LoggedEvent(100.0, ANN, {"time": 100.0, "event": kind.name, **fields}))
            assert kind.name in words
            assert "None" not in words, words
            assert not any(f"{name}=" in words for name in fields), f"{kind.name} is shown as it is logged: {words}"
    given = {"shard": 3, "version": 7, "step": 1200, "owner": BOB, "contributors": {f"{ANN}/abc": 1500}}
    merged = describe(LoggedEvent(100.0, ANN, {"event": "commit", **given}))
    assert merged.endswith("shard 3 is at version 7, step 1,200, merged by BBBBBB; tokens of AAAAAA (1.50 k)")
    huge = {"event": "fetched", "shard": 1, "version": 1, "bytes": 10**400}
    assert f"bytes=1{'0' * 50}" in describe(LoggedEvent(100.0, ANN, huge)), "no division of it is a number"
    assert describe(LoggedEvent(100.0, ANN, {"event": "later", "x": 1})).endswith("later             x=1")


# -- the schema --------------------------------------------------------------------------------------------------------


def written() -> list[tuple[str, set[str], bool]]:
    """Of each call that writes an event its kind, its fields, and whether there may be more."""
    found = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            kind = node.args[0].value
            if name == "write" and isinstance(kind, str) and "\n" not in kind and "planted" not in module:
                fields = {keyword.arg for keyword in node.keywords}
                found.append((kind, {field for field in fields if field}, None in fields))
    return [one for one in found if re.fullmatch(r"[a-z-]+", one[0])]


def test_every_event_that_is_written_has_the_fields_of_the_schema() -> None:
    calls = written()
    assert len(calls) > 20
    for kind, fields, has_more in calls:
        known = {field.name for field in BY_NAME[kind].fields}
        assert fields <= known, kind
        assert fields == known or (has_more and kind in FIELDS_ELSEWHERE), kind
    assert {kind for kind, _, _ in calls} | {"sample"} == set(BY_NAME)


def test_what_a_test_or_a_recording_makes_up_is_as_the_schema_says() -> None:
    assert not list(faults_of(commit(1.0, 1, ANN, ann=1)))
    assert not list(faults_of(progress(1.0, 1, loss=None)))
    assert not list(faults_of(started(1.0, ANN)))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"time": 1.0, "event": "sing"}, "unknown kind"),
        ({"event": "learner-able"}, "no time"),
        ({"time": 1.0, "event": "learner-able", "why": "x"}, "unknown field why"),
        ({"time": 1.0, "event": "current"}, "no field step"),
        ({"time": 1.0, "event": "current", "step": True}, "step is bool"),
        ({"time": 1.0, "event": "current", "step": None}, "step is NoneType"),
        ({"time": 1.0, "event": "checkpoint", "is_last": 1}, "is_last is int"),
    ],
)
def test_what_is_otherwise_is_named(line: dict[str, Any], fault: str) -> None:
    assert any(fault in found for found in faults_of(line))


def test_the_document_lists_the_events() -> None:
    text = (ROOT / "docs" / "watching.md").read_text().partition("## Events")[2]
    assert re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE) == [
        (event.name, event.help, described(event)) for event in EVENTS
    ]
