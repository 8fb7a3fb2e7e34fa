"""``python -m tests.machine_sim.replay``: Tell a peer's journal (``recorder`` writes one) as lines that a person can
read: when, what the peer was told, and what it decided, with reasons."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from p2pdiloco.cli.errors import FAILED, CommandError, as_command_errors
from p2pdiloco.cli.main import program
from p2pdiloco.protocol.effects import Effect
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.state import ProtocolConfig
from p2pdiloco.util.logs import printable, short
from tests.machine_sim.journal import Entry, JournalError, effects_crc, read_journal
from tests.machine_sim.transcript import tell

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m tests.machine_sim.replay", __doc__, add_arguments, run, argv)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    sub.add_argument("journal", type=Path, metavar="JOURNAL", help="STATE/RUN/journal.bin")
    sub.add_argument(
        "--check", action="store_true", help="print nothing but the first difference from what the peer decided then"
    )
    sub.add_argument("--full", action="store_true", help="heartbeats, and steps without effect, too")


async def run(arguments: argparse.Namespace) -> int:
    """Print or check the whole journal."""
    with as_command_errors(JournalError):
        config, entries = read_journal(arguments.journal)
        if arguments.check:
            print(_check(config, entries))
        else:
            _tell(config, entries, is_full=arguments.full)
    return 0


def replay(config: ProtocolConfig, entries: Iterator[Entry]) -> Iterator[tuple[int, Entry, list[Effect]]]:
    """Every entry, counted from 1, and the effects that a fresh machine answers it with."""
    machine = Machine(config)
    for number, entry in enumerate(entries, start=1):
        yield number, entry, machine.handle(entry.event, entry.now)


def _tell(config: ProtocolConfig, entries: Iterator[Entry], *, is_full: bool) -> None:
    began: float | None = None
    for _, entry, effects in replay(config, entries):
        began = entry.now if began is None else began
        for line in _lines(entry.now - began, config, entry, effects, is_full=is_full):
            print(line)


def _check(config: ProtocolConfig, entries: Iterator[Entry]) -> str:
    """One line about a journal that replays as it was recorded.

    Raises:
        CommandError: it does not; the line tells where.
    """
    number, began, last = 0, 0.0, 0.0
    for number, entry, effects in replay(config, entries):
        began, last = began or entry.now, entry.now
        if effects_crc(effects) != entry.effects_crc:
            told = "\n".join(_lines(entry.now - began, config, entry, effects, is_full=True))
            raise CommandError(
                f"event {number} has other effects than the peer recorded: was the journal written by another release? "
                f"This release answers:\n{told}",
                FAILED,
            )
    return f"{number:,} events over {last - began:.1f} s replay to the same effects"


def _lines(at: float, config: ProtocolConfig, entry: Entry, effects: list[Effect], *, is_full: bool) -> list[str]:
    """One event and its effects, with peer ids by their last characters, as in the logs. Reasons in them may be other
    peers' words."""
    told = tell(at, short(config.peer), entry.event, effects, is_full=is_full)
    return [printable(PEER_ID.sub(lambda found: short(found.group()), line)) for line in told]


if __name__ == "__main__":
    sys.exit(main())
