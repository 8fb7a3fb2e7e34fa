"""``python -m tests.machine_sim.replay``: a journal told and checked."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.effects import Effect
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim import journal
from tests.machine_sim.journal import Journal, read_journal
from tests.machine_sim.replay import main

pytestmark = pytest.mark.usefixtures("own_logging")

ME = PeerId("12D3KooWFBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvC")
OTHER = PeerId("12D3KooWHBqHtZsnYhFyqTpV8N2Ynw3YwMxt2TDXZqKpY2Y4RgvD")
RUN = RunId("a" * 40)
HOSTILE = "\x1b]0;mine\x07\x9b2J\u202eok\r\u2028999.000 forged\n999.000 forged"
CONFIG = ProtocolConfig(
    run=RUN,
    peer=ME,
    fragments=((ShardId(0),),),
    sync_every=4,
    overlap=1,
    min_quorum=1,
    grace_share=0.5,
    total_steps=9,
)


def write(path: Path, *, wrong_at: int | None = None) -> None:
    """A founder that starts, and leaves again; the effects of one event may be recorded wrongly."""
    state = ev.ShardState(genesis_head(RUN, ShardId(0), Digest("b" * 40)), 0, ())
    events: list[ev.Event] = [ev.Started((state,)), ev.Woke(), ev.LeaveRequested("enough")]
    machine = Machine(CONFIG)
    with Journal(path, CONFIG) as written:
        for number, event in enumerate(events):
            effects: list[Effect] = machine.handle(event, 100.0 + number)
            written.record(100.0 + number, event, effects[:-1] if number == wrong_at else effects)


def test_a_journal_is_told_in_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "journal.bin")
    assert main([str(tmp_path / "journal.bin")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("   0.000 Y4RgvC: started with s0v0")
    assert "(join: all 1 shards have arrived, at global step 0)" in lines[1]
    assert lines[-1].strip() == "leave: enough"
    assert not any("12D3KooW" in line for line in lines)


def hostile(path: Path, *, wrong_at: int | None = None) -> None:
    """A journal in which other peers' words and an error's stand."""
    head = genesis_head(RUN, ShardId(0), Digest("b" * 40))
    refused = msg.Refused(ShardId(0), head.id, HOSTILE, head)
    events: list[ev.Event] = [
        ev.Started((ev.ShardState(head, 0, ()),)),
        ev.PeerConnected(OTHER),
        ev.Received(OTHER, refused),
        ev.Failed("merge", ShardId(0), OTHER, HOSTILE),
        ev.PeerDisconnected(OTHER, HOSTILE),
        ev.LeaveRequested(HOSTILE),
    ]
    machine = Machine(CONFIG)
    with Journal(path, CONFIG) as written:
        for number, event in enumerate(events):
            effects: list[Effect] = machine.handle(event, 100.0 + number)
            written.record(100.0 + number, event, effects[:-1] if number == wrong_at else effects)


@pytest.mark.parametrize("option", [[], ["--full"], ["--check"]])
def test_other_peers_words_steer_no_terminal_and_forge_no_line(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile(tmp_path / "journal.bin", wrong_at=5)
    assert main([*option, str(tmp_path / "journal.bin")]) == (1 if option == ["--check"] else 0)
    captured = capsys.readouterr()
    lines = (captured.out + captured.err).split("\n")
    assert sum("ok" in line for line in lines) >= (1 if option == ["--check"] else 4)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("999.000") for line in lines)


def test_a_journal_that_was_cut_by_a_kill_is_told_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.bin"
    write(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["--check", str(path)]) == 0
    assert capsys.readouterr().out.startswith("2 events over 1.0 s replay to the same effects")


def test_the_first_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.bin"
    write(path, wrong_at=2)
    assert main(["--check", str(path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("p2pdiloco: event 3 has other effects than the peer recorded")
    assert "Y4RgvC: leave requested: enough" in told[1]


def test_an_entry_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.bin"
    write(path)
    path.write_bytes(path.read_bytes() + b"\0\0\0\2\x92\x01")
    assert main([str(path)]) == 2
    assert "entry 4 cannot be read" in capsys.readouterr().err


def test_a_disk_that_is_full_at_the_end_costs_entries_not_the_peer(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with Journal(path, CONFIG) as written:
            written.record(1.0, ev.Woke(), [])
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
            written.record(2.0, ev.Woke(), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(read_journal(path)[1])) < 2


def events_in(path: Path) -> list[str]:
    return [entry.event.reason for entry in read_journal(path)[1] if isinstance(entry.event, ev.LeaveRequested)]


def test_a_journal_is_not_overwritten_by_the_life_after_the_crash_that_it_explains(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    for life in range(3):
        with Journal(path, CONFIG) as writer:
            writer.record(0.0, ev.LeaveRequested(f"life {life}"), [])
    lives = [events_in(tmp_path / name) for name in ("journal-1.bin", "journal-2.bin", "journal.bin")]
    assert lives == [["life 0"], ["life 1"], ["life 2"]]


def test_a_journal_ends_where_it_is_full_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a gap could not be replayed."""
    monkeypatch.setattr(journal, "MOST_BYTES", 2000)

    def fill(writer: Journal) -> None:
        for number in range(1000):
            writer.record(0.0, ev.LeaveRequested(f"event {number}"), [])

    with Journal(tmp_path / "journal.bin", CONFIG) as writer, pytest.raises(OSError, match="2,000 bytes"):
        fill(writer)
    assert (tmp_path / "journal.bin").stat().st_size <= 2000
    assert events_in(tmp_path / "journal.bin")[:2] == ["event 0", "event 1"]
