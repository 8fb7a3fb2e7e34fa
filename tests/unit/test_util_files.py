"""The last few files of a kind are kept, within a bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.peer import event_journal
from p2pdiloco.peer.event_journal import Journal, read_journal
from p2pdiloco.protocol.events import LeaveRequested
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.state import ProtocolConfig
from p2pdiloco.util.files import older, rotate

CONFIG = ProtocolConfig(
    run=RunId("r"),
    peer=PeerId("p"),
    fragments=((ShardId(0),),),
    sync_every=1,
    overlap=1,
    min_quorum=1,
    grace_share=0.5,
    total_steps=1,
)


def texts(path: Path) -> list[str]:
    return [other.read_text() for other in older(path)]


def test_the_newest_few_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rotate(path, keep=3, most_bytes=100)
    assert older(path) == []
    for word in ("one", "two", "three", "four", "five"):
        path.write_text(word)
        rotate(path, keep=3, most_bytes=100)
        assert not path.exists()
    assert texts(path) == ["three", "four", "five"]
    assert older(tmp_path / "other.jsonl") == []


def test_they_stay_within_the_bound_but_for_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    for size in (10, 20, 30):
        path.write_text("x" * size)
        rotate(path, keep=3, most_bytes=55)
    assert [len(text) for text in texts(path)] == [20, 30]
    path.write_text("x" * 1000)
    rotate(path, keep=3, most_bytes=55)
    assert [len(text) for text in texts(path)] == [1000]


def events_in(path: Path) -> list[str]:
    return [entry.event.reason for entry in read_journal(path)[1] if isinstance(entry.event, LeaveRequested)]


def test_a_journal_is_not_overwritten_by_the_life_after_the_crash_that_it_explains(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    for life in range(event_journal.KEPT + 3):
        with Journal(path, CONFIG) as writer:
            writer.record(0.0, LeaveRequested(f"life {life}"), [])
    lives = [events_in(other) for other in [*older(path), path]]
    assert lives == [[f"life {life}"] for life in range(2, event_journal.KEPT + 3)]


def test_a_journal_ends_where_it_is_full_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a gap could not be replayed."""
    monkeypatch.setattr(event_journal, "MOST_BYTES", 2000)

    def fill(writer: Journal) -> None:
        for number in range(1000):
            writer.record(0.0, LeaveRequested(f"event {number}"), [])

    with Journal(tmp_path / "journal.bin", CONFIG) as writer, pytest.raises(OSError, match="2,000 bytes"):
        fill(writer)
    assert (tmp_path / "journal.bin").stat().st_size <= 2000
    assert events_in(tmp_path / "journal.bin")[:2] == ["event 0", "event 1"]
