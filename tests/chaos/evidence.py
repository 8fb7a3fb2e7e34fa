"""The evidence of a chaos run, read from its folder: schedule, happenings, and each peer's event log, report,
checkpoint and journals. The judge and the timeline see nothing else.

Rules of this file:
1. Lines that a kill or a full disk has torn are left out; a file that is missing is nothing.
2. A life is one process of a peer. Which line belongs to which life follows from when the processes were started.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.protocol.machine import Machine
from p2pdiloco.util.files import older
from p2pdiloco.wire.control_messages import StateProof
from tests.chaos.changed_peers import SENT_LIES
from tests.chaos.event_log import Happening
from tests.chaos.schedule import Fault, Kind, Schedule
from tests.machine_sim.journal import JournalError, effects_crc, read_journal


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was done."""

    number: int
    kind: Kind
    peers: tuple[str, ...]
    began: float
    """Unix times; what was killed ends when all of it trains again."""
    ended: float


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a peer took."""

    time: float
    shard: int
    version: int
    head: str
    contributors: dict[str, int] = {}
    """Tokens by learner."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a peer."""

    began: float
    trained: float | None = None
    """First word of its learner."""
    ended: float
    status: int | None
    is_expected: bool
    """Whether it was killed, or asked to leave."""
    blocked_s: float = 0.0
    """Time that its learners waited for somebody."""
    trained_s: float = 0.0
    """From its learners' first word to their last."""
    leave_s: float | None = None
    """Duration of leaving, if it was asked to leave during the run."""
    lost_tokens: int = 0
    """Unmerged when it left."""


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a peer's folder that was started beside it."""

    peer: str
    given_s: float
    """Time that it had."""
    status: int | None
    """None: it had not ended."""
    said: str


class LearnerLife(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a learner."""

    learner: str
    tokens: int
    """Trained, by its last line."""
    compute_s: float
    """Duration of its steps, by its last line."""


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a peer's last life."""

    versions: tuple[int, ...]
    heads: tuple[str, ...]
    digests: tuple[str | None, ...]
    tokens_unmerged: int
    tokens_merged: int
    learner: str | None
    learner_tokens: int


class PeerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence of one peer."""

    name: str
    lives: tuple[Life, ...] = ()
    commits: tuple[Commit, ...] = ()
    learners: tuple[LearnerLife, ...] = ()
    left: Left | None = None
    marks: dict[str, tuple[int, ...]] = {}
    """Learner -> merged tokens by shard, in its last checkpoint."""
    absences: tuple[float, ...] = ()
    """When it told that it cannot start a learner,"""
    starts: tuple[float, ...] = ()
    """and when a learner of it was ready."""
    told_of_clock: int = 0
    """Lives that were told that their machine's clock is wrong."""
    charged: int = 0
    """Number of times that an honest peer charged it with a wrong merge or a false accusation."""
    journal_events: int = 0
    journal_problem: str = ""
    """The first journal that does not replay, and why."""
    chains: tuple[frozenset[str], ...] = ()
    """By shard: the heads of its chain at its end, forks left out, as far back as the newest journal's replay knows."""


class HostilePeer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer with changed code."""

    name: str
    peer: str
    """Its id; empty if it never started."""
    faults: int
    """How often others have counted what it sent as a fault."""
    sent: tuple[str, ...]
    """Its lies that have left for another peer."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    schedule: Schedule
    began: float
    """Unix time at which all trained."""
    settling: float
    settled: float
    faults: tuple[Struck, ...]
    skipped: int
    twins: tuple[Twin, ...]
    peers: tuple[PeerEvidence, ...]
    """The honest ones."""
    hostile: tuple[HostilePeer, ...] = ()
    """The others."""
    last: str
    """The name of the peer that left last."""
    leftovers: tuple[str, ...]


CHARGES = frozenset({"merge", "accusation"})
"""Faults with which nobody is charged by mistake. A peer that was rolled back may make two commits of one version."""


class EvidenceError(Exception):
    """The run did not come to its end, so there is nothing to judge."""


def read_evidence(out: Path) -> Evidence:
    """Read a run's folder.

    Raises:
        EvidenceError: the run did not come to its end.
    """
    schedule = msgspec.json.decode((out / "schedule.json").read_bytes(), type=Schedule)
    lines = (out / "happened.jsonl").read_bytes().splitlines()
    happened = [msgspec.json.decode(line, type=Happening) for line in lines]
    first = {line.what: line for line in reversed(happened)}
    for what in ("began", "settling", "settled", "over"):
        if what not in first:
            raise EvidenceError(f"the run in {out} broke off: nothing is said of {what!r}")
    leaves: dict[str, set[int]] = {}
    for fault in schedule.faults:
        if fault.kind == "leave":
            leaves.setdefault(fault.peers[0], set()).add(fault.number)
    honest = [name for name in schedule.plan.names if not schedule.plan.lies(name)]
    faults = [line for name in honest for line in read_events(out / f"peer-{name}") if line["event"] == "fault"]
    return Evidence(
        schedule=schedule,
        began=first["began"].time,
        settling=first["settling"].time,
        settled=first["settled"].time,
        faults=tuple(_struck(schedule.faults, happened)),
        skipped=sum(line.what == "skipped" for line in happened),
        twins=tuple(_twins(happened)),
        peers=tuple(_peer(out, name, happened, leaves, schedule.plan.clock_off_s(name), faults) for name in honest),
        hostile=tuple(_hostile(out, name) for name in schedule.plan.names if schedule.plan.lies(name)),
        last=[line.peer for line in happened if line.what == "leaving"][-1],
        leftovers=tuple(json.loads(first["over"].text)),
    )


def _struck(faults: tuple[Fault, ...], happened: list[Happening]) -> Iterator[Struck]:
    ends: dict[int, float] = {}
    for line in happened:
        if line.what in ("undone", "back"):
            ends[line.fault] = max(ends.get(line.fault, 0.0), line.time)
    by_number = {fault.number: fault for fault in faults}
    for line in happened:
        if line.what == "struck":
            fault = by_number[line.fault]
            ended = ends.get(fault.number, line.time)
            yield Struck(number=fault.number, kind=fault.kind, peers=fault.peers, began=line.time, ended=ended)


def _twins(happened: list[Happening]) -> Iterator[Twin]:
    began = {line.fault: line.time for line in happened if line.what == "struck"}
    for line in happened:
        if line.what == "twin":
            yield Twin(peer=line.peer, given_s=line.time - began[line.fault], status=line.status, said=line.text)


def _peer(
    out: Path,
    name: str,
    happened: list[Happening],
    leaves: dict[str, set[int]],
    clock_off_s: float,
    faults: list[dict[str, Any]],
) -> PeerEvidence:
    """``leaves``: the numbers of the faults that asked each peer to leave; ``faults``: what honest peers counted."""
    folder = out / f"peer-{name}"
    events = sorted(read_events(folder, clock_off_s), key=lambda line: line["time"])
    asked = [line.time for line in happened if line.what == "struck" and line.fault in leaves.get(name, ())]
    lives = list(_lives(name, happened, events, asked, _reports(folder)))
    events_read, problem, chains = _replay_all(folder)
    report = _newest(folder, "*/report.json", lives[-1].began if lives else 0.0)
    return PeerEvidence(
        name=name,
        lives=tuple(lives),
        commits=tuple(msgspec.convert(line, Commit) for line in events if line["event"] == "commit" and "head" in line),
        learners=tuple(_learners(events)),
        left=None if report is None else msgspec.json.decode(report.read_bytes(), type=Left),
        marks=_marks(folder),
        absences=tuple(line["time"] for line in events if line["event"] == "learner-not-started"),
        starts=tuple(line["time"] for line in events if line["event"] == "learner-ready"),
        told_of_clock=_told_of_clock(folder),
        charged=sum(line["what"] in CHARGES and line["peer"] in _ids(folder) for line in faults),
        journal_events=events_read,
        journal_problem=problem,
        chains=chains,
    )


def _hostile(out: Path, name: str) -> HostilePeer:
    folder = out / f"peer-{name}"
    ids = _ids(folder)
    others = (one for one in out.glob("peer-*") if one != folder)
    counted = sum(line["event"] == "fault" and line["peer"] in ids for one in others for line in read_events(one))
    path = folder / SENT_LIES
    sent = path.read_text().split() if path.exists() else ()
    return HostilePeer(name=name, peer=min(ids, default=""), faults=counted, sent=tuple(sorted({*sent})))


def _ids(folder: Path) -> set[str]:
    """A peer's id, if it ever started."""
    return {line["peer"] for line in read_events(folder) if line["event"] == "started"}


def _told_of_clock(folder: Path) -> int:
    path = folder / "log.txt"
    return path.read_text(errors="replace").count("this machine's clock is ") if path.exists() else 0


def read_events(folder: Path, clock_off_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """Read the event logs in a peer's folder, with times as they were if its clock was ahead."""
    for path in (file for last in folder.glob("*/metrics.jsonl") for file in [*older(last), last]):
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "time" in event and "event" in event:
                yield {**event, "time": event["time"] - clock_off_s}


def _reports(folder: Path) -> list[tuple[float, Left]]:
    """Every life's report, with the time at which it was written."""
    paths = folder.glob("*/report*.json")
    return [(path.stat().st_mtime, msgspec.json.decode(path.read_bytes(), type=Left)) for path in paths]


def _lives(
    name: str,
    happened: list[Happening],
    events: list[dict[str, Any]],
    asked: list[float],
    reports: list[tuple[float, Left]],
) -> Iterator[Life]:
    """``asked``: when it was asked to leave."""
    mine = [line for line in happened if line.peer == name and line.what in ("launched", "ended")]
    for index, line in enumerate(mine):
        if line.what != "launched":
            continue
        end = next((other for other in mine[index + 1 :] if other.what == "ended"), None)
        until = happened[-1].time if end is None else end.time
        leave = next((at for at in asked if line.time <= at <= until), None)
        lost = sum(left.tokens_unmerged for at, left in reports if line.time <= at <= until + 1.0)
        said = [e for e in events if e["event"] == "progress" and line.time <= e["time"] <= until + 1.0]
        yield Life(
            began=line.time,
            trained=said[0]["time"] if said else None,
            ended=until,
            status=None if end is None else end.status,
            is_expected=end is not None and end.is_expected,
            blocked_s=said[-1]["blocked_s"] if said else 0.0,
            trained_s=said[-1]["time"] - said[0]["time"] if said else 0.0,
            leave_s=None if leave is None else until - leave,
            lost_tokens=0 if leave is None else lost,
        )


def _learners(events: list[dict[str, Any]]) -> Iterator[LearnerLife]:
    """Counts in the event log are a process's; a learner that is started again goes on from where they stand."""
    learner = ""
    start = now = (0, 0.0)

    def life() -> Iterator[LearnerLife]:
        if learner and now != start:
            yield LearnerLife(learner=learner, tokens=now[0] - start[0], compute_s=now[1] - start[1])

    for line in events:
        match line["event"]:
            case "started":
                yield from life()
                learner, start, now = "", (0, 0.0), (0, 0.0)
            case "learner-ready":
                yield from life()
                learner, start = line.get("learner") or "", now
            case "progress":
                now = line["tokens"], line["compute_s"]
            case _:
                pass
    yield from life()


class _Index(msgspec.Struct, frozen=True):
    shards: tuple[StateProof, ...]


def _marks(folder: Path) -> dict[str, tuple[int, ...]]:
    path = _newest(folder, "*/checkpoint/state-*.json", 0.0)
    if path is None:
        return {}
    shards = msgspec.json.decode(path.read_bytes(), type=_Index).shards
    marks = [{str(learner): mark.tokens for learner, mark in proof.state.marks} for proof in shards]
    learners = sorted({learner for mark in marks for learner in mark})
    return {learner: tuple(mark.get(learner, 0) for mark in marks) for learner in learners}


def _newest(folder: Path, pattern: str, since: float) -> Path | None:
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    return found[-1] if found and found[-1].stat().st_mtime >= since else None


def _replay_all(folder: Path) -> tuple[int, str, tuple[frozenset[str], ...]]:
    """Events in the peer's journals, the first that a fresh machine answers in another way, and the last one's
    chains."""
    total, chains = 0, tuple[frozenset[str], ...]()
    for path in sorted(folder.glob("*/journal*.bin"), key=lambda path: path.stat().st_mtime):
        try:
            config, entries = read_journal(path)
            machine = Machine(config)
            for number, entry in enumerate(entries, start=1):
                total += 1
                if effects_crc(machine.handle(entry.event, entry.now)) != entry.effects_crc:
                    return total, f"{re.sub('.*/peer-', 'peer-', str(path))}: event {number} has other effects", chains
            chains = tuple(frozenset(map(str, chain.heads())) for chain in machine.core.chains)
        except JournalError as error:
            if path.stat().st_size:
                return total, str(error), chains
    return total, "", chains
