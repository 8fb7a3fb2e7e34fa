"""The plan ``liars``: what members that lie do to a run of honest ones. Real processes, some with changed code.

A *group* of a plan is a number of peers, of which some lie, and the attacks that are tried on them one after the other:
lies of ``byzantine.py``, joined by "+", which every liar tells. Each attack is a run of its own. It is compared with
runs of the honest peers alone.

Rules of this file:
1. What honest peers believe is no evidence: the loss is measured here, with the model in the founder's last checkpoint.
2. The loss without the liars is that of a run with as many honest tokens. It is interpolated between runs of the honest
   peers alone, each with its own token budget, because the learning rate falls at the end of a budget.
3. An attack that no liar has sent fails.
4. During each run a follower joins. It has to get the state.
5. Access is as by default: honest peers are the founder's own machines, which share its invite, and each liar has an
   invite for one person.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from p2pdiloco.demo.local_swarm import Member, Swarm, SwarmError
from p2pdiloco.node.run_folder import CHECKPOINT
from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.convictions import FILE as CONVICTIONS
from p2pdiloco.protocol.events import Convictions
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.protocol.manifest import DataConfig, RunConfig
from p2pdiloco.protocol.manifest_validation import config_problems
from p2pdiloco.training.corpus import load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.export import built
from p2pdiloco.util.status_pipe import Invited
from p2pdiloco.wire.control_messages import decode_as
from tests.chaos.changed_peers import SENT_LIES, launch
from tests.chaos.evidence import read_events
from tests.chaos.reaper import reaper
from tests.chaos.runner import write_toml
from tests.chaos.schedule import LIES, PlanError

MOST_RATIO = 1.02
MAYBE_CHANCE = 1.1
"""A run's loss varies by one or two per cent from run to run. A larger ratio is no chance."""
LEAST_SPREAD = 1e-3
"""Between the runs without liars, of the logarithms of their tokens: with less they have the same budget."""
HARDER_MORE = 0.03
"""Allowed beyond that beside a liar that hides behind what honest peers find, or if more than a quarter lie."""
HIDING = frozenset({"hidden"})
LEAST_HONEST_SHARE = 0.98
"""Share of the honest peers' part of the token budget that must be trained before the run ends."""
MOST_STANDSTILL_S = 10.0
NAMED_FOR = ("agreement", "wrong-merge")
"""Topics of notes that name a liar: of its contributions, and of its merges."""
WINDOWS = 1024
"""Held-out samples of a measurement."""
NEWCOMER_AT = 0.15
"""Share of the honest peers' part of the budget that is merged when the follower joins."""
POLL_S = 0.2
MISSED_S = 12.0
"""A peer that is gone for longer, or from longer before its end, was lost."""
NO_LOSS = 1e6
"""Stands for a loss that is no number, or for a model that is not there."""
MERGES: dict[str, dict[str, dict[str, Any]]] = {
    "direct": {"outer": {"merge": "direct", "learning_rate": 1.0, "momentum": 0.0}},
    "rda": {"outer": {"merge": "rda"}, "schedule": {"sync_every": 24, "fragments": 6}},
}
"""The merge rules, with the settings that runs have by default that use them: small ones the plain mean, others RDA."""


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attacks on one swarm."""

    peers: Annotated[int, Meta(ge=3, le=26)]
    """All of them, liars included."""
    liars: Annotated[int, Meta(ge=1, le=12)]
    steps: Annotated[int, Meta(ge=20, le=100_000)]
    """Inner steps of each peer that the token budget is for."""
    attacks: Annotated[tuple[str, ...], Meta(min_length=1)]
    references: tuple[float, ...] = ()
    """Instead of the plan's."""
    tries: Annotated[int, Meta(ge=0, le=100)] = 0
    """Instead of the plan's; 0: as the plan says."""


class LiarsPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML file."""

    name: Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z0-9-]+\Z")]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    references: Annotated[tuple[float, ...], Meta(min_length=1)] = (1.0,)
    """Token budgets of the runs without liars, as multiples of the honest peers' part of a group's budget."""
    timeout_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 300.0
    """Time limit of one run."""
    most_ratio: Annotated[float, Meta(ge=1.0)] = MOST_RATIO
    """Allowed held-out loss, as a multiple of that without the liars. A short run cannot be measured as exactly as a
    long one."""
    tries: Annotated[int, Meta(ge=1, le=100)] = 1
    """Most runs of an attack: it is tried again, and the mean counts, if its loss is beyond its bound by little."""
    run: dict[str, Any]
    """The run's configuration, without its budget. What is left out has the product's defaults."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one attack came to."""

    attack: str
    liars: int
    peers: int
    held_out: float
    """Held-out loss of the honest founder's model at the end."""
    held_out_honest: float
    """The same without the liars, with as many honest tokens."""
    ratio: float
    honest_share: float
    """Tokens of honest peers that were merged, as a multiple of their part of the budget."""
    ended_early: bool
    standstill_s: float
    """Longest time for which an honest peer took no new version of any shard."""
    shard_standstill_s: float
    """Longest time for which an honest peer took no new version of one shard."""
    honest_banned: int
    """Honest peers that another honest peer excluded from ownership, counted a fault of, or lost while they ran."""
    newcomer_s: float | None
    """Time in which an honest follower that joined got the state; None: it did not."""
    honest_counted: float
    """Tokens of honest peers that were merged, per token that counted for the budget."""
    contributors: float
    """Mean number of contributors of a version."""
    owned: float
    """Share of the versions that liars own. An owner that misses its time, as on a busy machine, owns few from then on:
    a lie of owners was not tried where this is small."""
    named: tuple[str, ...]
    """Peers that the log of an honest peer names, of whichever kind."""
    sent: bool
    """Whether each liar has sent each of its lies."""
    seconds: float
    tries: int = 1
    problems: tuple[str, ...] = ()
    """What is beyond its bound."""


class Reference(msgspec.Struct, frozen=True):
    """The end of a run without liars."""

    tokens: int
    loss: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    loss: float
    tokens: int
    """Of honest peers."""
    counted: int
    """Tokens of all peers, as far as they counted for the budget."""
    contributors: float
    owned: float
    standstill_s: float
    shard_standstill_s: float
    banned: tuple[str, ...]
    newcomer_s: float | None
    named: tuple[str, ...]
    unsent: tuple[str, ...]
    """Lies that did not leave, as sentences."""
    failures: tuple[str, ...]
    """What went wrong with the honest peers, as sentences."""
    seconds: float


def is_liars_plan(path: Path) -> bool:
    """Whether the file is a plan of this module."""
    try:
        return "groups" in msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False


def read_liars_plan(
    path: Path,
    *,
    attacks: Sequence[str] = (),
    peers: int | None = None,
    liars: int | None = None,
    merge: str = "",
    seed: int = 1,
) -> LiarsPlan:
    """Decode and check a plan.

    Args:
        attacks: the only ones, on one swarm.
        peers: of that swarm; None: as in the first group. With ``liars`` the group that has as many.
        liars: of these; None: as in the first group.
        merge: the merge rule, "rda" or "direct", with the settings of runs that use it; empty: as the plan says.
        seed: of the run.

    Raises:
        PlanError: no such file, not TOML, an unknown key or lie, a value out of bounds.
    """
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=LiarsPlan)
        if attacks or peers or liars:
            first = plan.groups[0]
            size = (peers or first.peers, liars or first.liars)
            near = next((group for group in plan.groups if (group.peers, group.liars) == size), first)
            group = replace(near, peers=size[0], liars=size[1], attacks=tuple(attacks) or near.attacks)
            plan = replace(plan, groups=(group,))
        run = {**plan.run, "seed": seed}
        for table, values in MERGES.get(merge, {}).items():
            run[table] = {**run.get(table, {}), **values}
        config = msgspec.convert(configured(run, 1), RunConfig)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    problems = config_problems(config)
    for group in plan.groups:
        if 2 * group.liars >= group.peers:
            problems.append(f"{group.liars} of {group.peers} peers lie: more than half must be honest")
        unknown = {name for attack in group.attacks for name in attack.split("+")} - LIES
        problems += [f"there is no lie {name!r}: use {', '.join(sorted(LIES))}" for name in sorted(unknown)]
    if problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in problems))
    return replace(plan, run=run)


def configured(run: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The run's configuration with a budget of ``tokens``."""
    return {**run, "inner": {**run.get("inner", {}), "tokens": tokens}}


def run_plan(plan: LiarsPlan, out: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    """Try all attacks, one after the other, in folders below ``out``. ``tell`` gets a line before each run.

    Raises:
        SwarmError: a run without liars did not come to its end.
    """
    for group in plan.groups:
        honest = group.peers - group.liars
        share = honest * group.steps * step_tokens(plan)
        alone = []
        for number, times in enumerate(group.references or plan.references):
            tell(f"{honest} honest peers alone, {times:g} of their budget")
            folder = out / f"{group.peers}-alone-{number}"
            found = _run(plan, folder, honest, (), round(times * share), share)
            if found.failures:
                raise SwarmError(f"without liars, {found.failures[0]}; see {folder}")
            alone.append(Reference(found.tokens, found.loss))
        for attack in group.attacks:
            rows = list[Row]()
            while not rows or (len(rows) < (group.tries or plan.tries) and _is_only_the_loss(plan, rows)):
                tell(f"{group.liars} of {group.peers} peers: {attack}")
                lies = [attack] * group.liars
                budget = group.peers * group.steps * step_tokens(plan)
                found = _run(plan, out / f"{group.peers}-{attack}-{len(rows)}", honest, lies, budget, share)
                rows.append(_row(group, attack, found, loss_alone(alone, found.tokens), found.tokens / share))
            yield _together(plan, rows)


def step_tokens(plan: LiarsPlan) -> int:
    """Tokens of a learner's step: samples times context."""
    config = msgspec.convert(plan.run, RunConfig)
    return config.inner.batch * config.model.context


def loss_alone(alone: Sequence[Reference], tokens: int) -> float:
    """The held-out loss that runs without liars end with after ``tokens``: by the straight line over the logarithm of
    the tokens that fits them best."""
    at, losses = [math.log(one.tokens) for one in alone], [one.loss for one in alone]
    middle, level = statistics.fmean(at), statistics.fmean(losses)
    spread = sum((x - middle) ** 2 for x in at)
    if spread < LEAST_SPREAD:
        return level
    slope = sum((x - middle) * (loss - level) for x, loss in zip(at, losses, strict=True)) / spread
    nearest = min(max(math.log(max(1, tokens)), min(at)), max(at))
    return level + slope * (nearest - middle)


def _row(group: Group, attack: str, found: Outcome, alone: float, share: float) -> Row:
    return Row(
        attack=attack,
        liars=group.liars,
        peers=group.peers,
        held_out=found.loss,
        held_out_honest=alone,
        ratio=found.loss / alone,
        honest_share=share,
        ended_early=share < LEAST_HONEST_SHARE,
        standstill_s=found.standstill_s,
        shard_standstill_s=found.shard_standstill_s,
        honest_banned=len(found.banned),
        newcomer_s=found.newcomer_s,
        honest_counted=found.tokens / max(1, found.counted),
        contributors=found.contributors,
        owned=found.owned,
        named=found.named,
        sent=not found.unsent,
        seconds=found.seconds,
        problems=(*found.failures, *found.unsent),
    )


def _together(plan: LiarsPlan, rows: Sequence[Row]) -> Row:
    """One row for all tries of an attack: mean losses, and the worst of the rest."""
    newcomers = [row.newcomer_s for row in rows if row.newcomer_s is not None]
    held_out, alone = statistics.fmean(row.held_out for row in rows), statistics.fmean(r.held_out_honest for r in rows)
    share = min(row.honest_share for row in rows)
    whole = replace(
        rows[0],
        held_out=held_out,
        held_out_honest=alone,
        ratio=held_out / alone,
        honest_share=share,
        ended_early=share < LEAST_HONEST_SHARE,
        standstill_s=max(row.standstill_s for row in rows),
        shard_standstill_s=max(row.shard_standstill_s for row in rows),
        honest_banned=max(row.honest_banned for row in rows),
        newcomer_s=max(newcomers) if len(newcomers) == len(rows) else None,
        honest_counted=min(row.honest_counted for row in rows),
        contributors=min(row.contributors for row in rows),
        owned=max(row.owned for row in rows),
        named=min((row.named for row in rows), key=len),
        sent=all(row.sent for row in rows),
        seconds=sum(row.seconds for row in rows),
        tries=len(rows),
        problems=tuple(problem for row in rows for problem in row.problems),
    )
    return replace(whole, problems=(*whole.problems, *problems_of(plan, whole)))


def _is_only_the_loss(plan: LiarsPlan, rows: Sequence[Row]) -> bool:
    """Whether all that is beyond its bound is the loss, by so little that it may be chance."""
    whole = _together(plan, rows)
    return len(whole.problems) == 1 and _most_ratio(plan, whole) < whole.ratio < MAYBE_CHANCE


def _most_ratio(plan: LiarsPlan, row: Row) -> float:
    is_harder = bool(HIDING.intersection(row.attack.split("+"))) or 4 * row.liars > row.peers
    return plan.most_ratio + (HARDER_MORE if is_harder else 0.0)


def problems_of(plan: LiarsPlan, row: Row) -> Iterator[str]:
    """What is beyond its bound in a row, as sentences."""
    most = _most_ratio(plan, row)
    if not row.ratio <= most:
        yield f"the held-out loss is {row.ratio:.3f} times that without the liars; allowed are {most:.2f}"
    if row.ended_early:
        yield f"the run ended when {row.honest_share:.0%} of the honest budget was trained"
    if row.standstill_s >= MOST_STANDSTILL_S:
        yield f"an honest peer took no version for {row.standstill_s:.1f} s"
    if row.honest_banned:
        yield f"honest peers that others excluded: {row.honest_banned}"
    if row.newcomer_s is None:
        yield "an honest newcomer did not get the state"


# -- One run -----------------------------------------------------------------------------------------------------------


def _run(plan: LiarsPlan, out: Path, honest: int, lies: Sequence[str], budget: int, share: int) -> Outcome:
    """``honest`` peers, whose part of the budget is ``share``, beside one liar for each of ``lies``, until ``budget``
    tokens are merged.

    Raises:
        SwarmError: the honest peers did not come up.
    """
    out.mkdir(parents=True)
    write_toml(out / "run.toml", configured(plan.run, budget))
    swarm, failures = Swarm(out), list[str]()
    began = time.monotonic()
    with reaper(swarm.mark):
        try:
            address = swarm.start_bootstrap()
            founder = swarm.launch("A", ["start", str(out / "run.toml"), "--bootstrap", address])
            invited = founder.wait_for(Invited)
            assert isinstance(invited, Invited)
            members = [founder, *(swarm.join(chr(ord("B") + i), invited.invite) for i in range(honest - 1))]
            _wait_until_current(members, began + plan.timeout_s)
            liars = [
                launch(swarm, f"liar-{i}", ["join", _invite_for_a_person(founder)], lies=names)
                for i, names in enumerate(lies)
            ]
            newcomer = None
            while any(member.is_running for member in members):
                if time.monotonic() > began + plan.timeout_s:
                    failures.append(f"the run was not over after {plan.timeout_s:g} s")
                    break
                time.sleep(POLL_S)
                for member in members:
                    member.refresh()
                if newcomer is None and _honest_tokens(founder, (m.view.peer for m in members)) > share * NEWCOMER_AT:
                    newcomer = swarm.join("newcomer", invited.invite, "--follow")
            failures += [f"{member.name} ended with status {member.status}" for member in members if member.ended_badly]
        finally:
            swarm.stop()
            swarm.kill_leftovers()
    seconds = time.monotonic() - began
    unsent = [problem for liar, names in zip(liars, lies, strict=True) for problem in _unsent(liar, names)]
    logs = {member.view.peer: list(read_events(member.folder)) for member in members}
    gaps = [_gaps(lines) for lines in logs.values()]
    saved, versions = _last_checkpoint(founder), _versions(founder)
    return Outcome(
        loss=_held_out_loss(saved),
        tokens=_honest_tokens(founder, logs.keys()),
        counted=0 if saved is None else saved.shards[0].state.head.tokens,
        contributors=_mean(map(len, versions.values())),
        owned=_mean(
            line["owner"] in {liar.view.peer for liar in liars} for line in logs[founder.view.peer] if _is_commit(line)
        ),
        standstill_s=max(most for most, _ in gaps),
        shard_standstill_s=max(most for _, most in gaps),
        banned=tuple(sorted(excluded(members, logs))),
        newcomer_s=None if newcomer is None else _joined_s(newcomer),
        named=tuple(
            one.name
            for one in [*members, *liars]
            if any(_names(line, one.view.peer) for lines in logs.values() for line in lines)
        ),
        unsent=tuple(unsent),
        failures=tuple(failures),
        seconds=seconds,
    )


def _invite_for_a_person(founder: Member) -> str:
    command = [sys.executable, "-P", "-m", "p2pdiloco", "members", "add", "--state", str(founder.folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _wait_until_current(members: Sequence[Member], deadline: float) -> None:
    """Wait until all honest peers have the state. A liar that met the founder alone would be half of the run.

    Raises:
        SwarmError: they did not come up.
    """
    while not all(member.view.current_at for member in members):
        if time.monotonic() > deadline or any(member.ended_badly for member in members):
            raise SwarmError(f"the honest peers did not come up, see {members[0].folder.parent}")
        time.sleep(POLL_S)
        for member in members:
            member.refresh()


def _unsent(liar: Member, names: str) -> Iterator[str]:
    path = liar.folder / SENT_LIES
    sent = path.read_text().split() if path.exists() else ()
    yield from (f"{liar.name} never sent its lie {name!r}" for name in names.split("+") if name not in sent)


def _honest_tokens(founder: Member, honest: Iterable[str]) -> int:
    """Tokens of honest peers that the founder's chain of shard 0 has merged."""
    given = [item for contributors in _versions(founder).values() for item in contributors.items()]
    known = set(honest)
    return sum(tokens for learner, tokens in given if peer_of(LearnerId(learner)) in known)


def _versions(founder: Member) -> dict[int, dict[str, int]]:
    """The tokens that learners declared, by version of the founder's chain of shard 0."""
    return {commit["version"]: commit["contributors"] for commit in founder.view.commits}


def _gaps(lines: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """The longest times without a version of any shard, and without one of a single shard."""
    times: dict[int, list[float]] = {}
    for line in lines:
        if _is_commit(line):
            times.setdefault(line["shard"], []).append(line["time"])
    every = sorted(time for one in times.values() for time in one)
    return _longest(every), max((_longest(sorted(one)) for one in times.values()), default=math.inf)


def _is_commit(line: dict[str, Any]) -> bool:
    return bool(line["event"] == "commit")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _longest(times: Sequence[float]) -> float:
    return max((after - before for before, after in pairwise(times)), default=math.inf)


def excluded(members: Sequence[Member], logs: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    """Honest peers that another one has excluded from ownership, counted a fault of, or lost for long while they
    ran."""
    ends = {peer: max((line["time"] for line in lines), default=0.0) for peer, lines in logs.items()}
    found = set[str]()
    for member in members:
        folder = member.run_folder()
        path = None if folder is None else folder / CONVICTIONS
        if path is not None and path.exists():
            known = decode_as(path.read_bytes(), Convictions)
            found.update(proof.owner for proof in known.proofs)
            found.update(owner for owner, *_ in known.refused)
    for me, lines in logs.items():
        found.update(line["peer"] for line in lines if line["event"] == "fault" and line["peer"] != me)
        lost: dict[str, float] = {}
        for line in lines:
            if line["event"] == "joined" and line["time"] < lost.get(line["peer"], math.inf) + MISSED_S:
                lost.pop(line["peer"], None)
            elif line["event"] == "left":
                lost.setdefault(line["peer"], line["time"])
        found.update(peer for peer, at in lost.items() if at + MISSED_S < min(ends.get(peer, 0.0), ends[me]))
    yield from found.intersection(logs)


def _joined_s(newcomer: Member) -> float | None:
    """The time in which it got the state."""
    newcomer.refresh()
    return newcomer.view.current_at - newcomer.began_unix if newcomer.view.current_at else None


def _names(line: dict[str, Any], peer: str) -> bool:
    return bool(line["event"] == "note" and line["topic"] in NAMED_FOR and peer and peer in line["text"])


def _last_checkpoint(founder: Member) -> checkpoint.Checkpoint | None:
    folder = founder.run_folder()
    return None if folder is None else checkpoint.load(folder / CHECKPOINT)


def _held_out_loss(found: checkpoint.Checkpoint | None) -> float:
    """The loss of a checkpoint's model."""
    if found is None:
        return NO_LOSS
    config = found.manifest.config
    model = built(found.manifest, found.theta)
    loss = held_out_loss(model, _corpus(msgspec.json.encode(config.data)), config.model.context, WINDOWS, "cpu")
    return min(loss, NO_LOSS) if math.isfinite(loss) else NO_LOSS


@cache
def _corpus(data: bytes) -> Corpus:
    return load_corpus(msgspec.json.decode(data, type=DataConfig), None)
