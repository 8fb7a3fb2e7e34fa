"""Comparison of the laboratory with real processes: the same run over real sockets, and in the laboratory.

The swarm is started with the commands that a user types. Its founder's learner is paused until the others have joined.
The laboratory gets what the swarm's clocks made of the settings: the merged tokens, the rounds they were merged in (so
its H), who trained alone for how long, and each learner's speed. What still differs is order and timing: other samples,
and commits that come sooner or later than ``overlap`` steps.

Both final models are evaluated by the same code on the same windows. The verdict compares the difference of the means
with its standard error over seeds.

With ``--line`` the processes are those of a small model with the shipped defaults, each behind a line of its own
(benchmarks.netbed; needs root). Their steps are shorter than a round trip, so many commits come later than the
``overlap`` that the laboratory counts with.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import torch

from benchmarks import record
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.data import corpus, held_out_losses
from benchmarks.quality.laboratory import Laboratory
from benchmarks.quality.questions import EVERY_THREE
from benchmarks.quality.settings import Setting, to_row
from benchmarks.wan import homes, sites
from p2pdiloco.demo.local_swarm import Member, Swarm, SwarmError, View, marked_processes
from p2pdiloco.peer.checkpoint import load
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training import NAME
from p2pdiloco.training.models import build_model
from p2pdiloco.training.parameters import FlatParameters

SETTING = Setting(learners=2, batch=64, steps=960, warmup=96, fragments=6, overlap=4, bounded=True, agreement=True)
SMALL = as_shipped(**{**EVERY_THREE, "learning_rate": 14.4e-3}, steps=960, warmup=50)
"""Small model with the defaults that a founder gets who sets its size and the number of steps."""
LEARNER_BATCH = 16
POLL_S = 0.2
START_S = 60.0
TOML = """name = "tie"
access = "open"
seed = {seed}
[model]
width = {width}
depth = {depth}
heads = {heads}
context = {context}
[inner]
optimizer = "{inner}"
steps = {steps}
batch = {learner_batch}
learning_rate = {learning_rate}
final_share = {final_share}
{decay}warmup = {warmup}
[schedule]
fragments = {fragments}
sync_every = {sync_every}
overlap = {overlap}
max_shard = {max_shard}
[outer]
learning_rate = {outer_rate}
momentum = {outer_momentum}
merge = "{merge}"
adopt = "{adopt}"
[codec]
up = "{up}"
down = "{down}"
[evaluation]
every = 0
"""


class Real(NamedTuple):
    """What a swarm of processes came to."""

    loss: float
    merged_tokens: int
    rounds: int
    """Versions of the first shard, but for the one that merges what is left at the end."""
    alone: float
    """Share of the merged tokens that the others had trained before the last learner began."""
    tokens: tuple[int, ...]
    """Merged, by learner; the last to begin is last."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of the learners while all of them trained."""
        *others, last = self.tokens
        together = [max(1.0, count - self.alone * self.merged_tokens / len(others)) for count in others]
        return (*together, float(last))


class Line(NamedTuple):
    """Lines between so many peers, all alike."""

    rate: str
    """Up and down, as "20mbit"."""
    round_trip_ms: float
    peers: int


def tie(out: Path, seeds: Sequence[int], rows: Path | None, time_limit_s: float, line: Line | None = None) -> bool:
    """Run both for every seed, print and append what came out; whether the means are within the noise (with ``line``:
    within 1 %).

    Raises:
        SwarmError: a peer failed, or the run took too long.
        HomesError, TestbedError: the same behind lines, or the lines cannot be made.
    """
    real: list[float] = []
    lab: list[float] = []
    for seed in seeds:
        setting = msgspec.structs.replace(SETTING if line is None else SMALL, seed=seed)
        if line is None:
            measured = run_swarm(setting, out / str(seed), time_limit_s)
        else:
            setting = msgspec.structs.replace(setting, learners=line.peers, batch=LEARNER_BATCH * line.peers)
            measured = run_behind_lines(setting, line, out / str(seed), time_limit_s)
        same = msgspec.structs.replace(
            setting,
            steps=(steps := round(measured.merged_tokens / setting.step_tokens)),
            sync_every=round(steps / measured.rounds),
            join_at=measured.alone if measured.alone > 0.01 else 0.0,
            speeds=measured.speeds,
            waits=True,
        )
        loss = Laboratory(same).run().figures["loss"]
        print(
            f"seed {seed}: swarm {measured.loss:.4f}, laboratory {loss:.4f} nats a byte; {measured.merged_tokens:,} "
            f"tokens merged in {measured.rounds} rounds ({setting.steps // setting.sync_every} were due), "
            f"{measured.alone:.0%} of them before the last learner began; by learner "
            f"{' and '.join(f'{count:,}' for count in measured.tokens)}",
            flush=True,
        )
        real.append(measured.loss)
        lab.append(loss)
        if rows is not None:
            figures = {"swarm_loss": measured.loss, "laboratory_loss": loss, "merged_tokens": measured.merged_tokens}
            record.append(rows, [record.row("quality-tie", to_row(same), figures)])
    differences = [r - x for r, x in zip(real, lab, strict=True)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    share = mean / statistics.fmean(lab)
    is_tied = abs(share) <= 0.01 if line else abs(mean) <= max(2.0 * error, 0.005 * statistics.fmean(lab))
    print(
        f"swarm - laboratory: {mean:+.4f} +- {error:.4f} nats ({share:+.2%}): "
        f"{'within' if is_tied else 'NOT within'} {'1 %' if line else 'two standard errors or 0.5 %'}"
    )
    return is_tied


def run_swarm(setting: Setting, out: Path, time_limit_s: float) -> Real:
    """Found, join, wait for the end, evaluate the founder's checkpoint.

    Raises:
        SwarmError: see ``tie``.
    """
    out.mkdir(parents=True, exist_ok=True)
    out = Path(tempfile.mkdtemp(prefix="run-", dir=out))  # what an earlier tie left there is another run
    path = out / "run.toml"
    path.write_text(_toml(setting))
    swarm = Swarm(out)
    try:
        address = swarm.start_bootstrap()
        founder = swarm.start_founder("0", path, address)
        first = _learner_of(founder, swarm)
        first.suspend()
        others = [swarm.join(str(index), address) for index in range(1, setting.learners)]
        began, is_whole = time.monotonic(), False
        while any(member.is_running for member in swarm.members):
            for member in swarm.members:
                member.refresh()
                if member.ended_badly:
                    raise SwarmError(f"peer {member.name} ended with status {member.status}, see {member.log_path}")
            if not is_whole and all(member.view.current_at for member in others):
                is_whole = True
                first.resume()
            if time.monotonic() - began > time_limit_s:
                raise SwarmError(f"the run is not over after {time_limit_s:.0f} s, at step {founder.view.step}")
            time.sleep(POLL_S)
        founder.refresh()
        folder = founder.run_folder()
    finally:
        swarm.stop()
        swarm.kill_leftovers()
    return _real(setting, founder.view, folder)


def run_behind_lines(setting: Setting, line: Line, out: Path, time_limit_s: float) -> Real:
    """The same with a line for each peer. Nobody trains before all are connected.

    Raises:
        HomesError, SwarmError, TestbedError: see ``tie``.
    """
    count = setting.learners + 1  # one for the bootstrap node
    trips = dict.fromkeys(itertools.combinations(range(count), 2), line.round_trip_ms)
    toml = sites.topology_toml("tie", [(line.rate, line.rate)] * count, trips)
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    with sites.network(toml) as made, homes.gathered(made, folder, run=_toml(setting), rests=True) as those:
        for home in those.homes:
            home.rest(False)
        homes.wait_for(
            lambda: all(home.process.poll() is not None for home in those.homes), those.homes, time_limit_s, "the end"
        )
        view, founder = View(), those.homes[0]
        for event in founder.events():
            view.apply(event)
    return _real(setting, view, next(founder.folder.glob("state/*/metrics.jsonl")).parent)


def _toml(setting: Setting) -> str:
    """The run's configuration, with which the product does what the laboratory does with ``setting``."""
    decay = f"decay_share = {setting.decay_share}\ntokens = {setting.steps * setting.step_tokens}\n"
    changes = {"learner_batch": setting.batch // setting.learners, "decay": decay if setting.decay_share else ""}
    return TOML.format(**to_row(setting), **changes)


def _real(setting: Setting, view: View, folder: Path | None) -> Real:
    """What a swarm came to, by its founder's event log and folder."""
    checkpoint = None if folder is None else load(folder / "checkpoint")
    if checkpoint is None:
        raise SwarmError("the founder saved no checkpoint")
    torch.set_num_threads(1)
    model = build_model(setting.model_config, setting.seed)
    flat = FlatParameters(model.named_parameters(), checkpoint.manifest.tensors, Layout.of(checkpoint.manifest))
    flat.copy_from(checkpoint.theta, flat.everything)
    loss = float(held_out_losses(model, corpus(), setting.context).double().mean())
    return Real(loss, view.merged_tokens, view.version - 1, *shared_out([c["contributors"] for c in view.commits]))


def shared_out(commits: Sequence[Mapping[str, int]]) -> tuple[float, tuple[int, ...]]:
    """See ``Real``: from the tokens of each learner in each commit of one shard.

    Raises:
        SwarmError: one learner trained alone.
    """
    total: Counter[str] = Counter()
    first_at: dict[str, int] = {}
    for commit in commits:
        total.update(commit)
        others = total.total()
        for learner, tokens in commit.items():  # what others merged before it began, had all been equally fast since
            first_at.setdefault(learner, max(0, others - len(commit) * tokens))
    if len(total) < 2:
        raise SwarmError("only one learner's tokens were merged: there is nothing to compare")
    last = max(first_at, key=lambda learner: (first_at[learner], -total[learner]))
    return first_at[last] / total.total(), (*(n for learner, n in total.items() if learner != last), total[last])


def _learner_of(founder: Member, swarm: Swarm) -> psutil.Process:
    """The founder's learner.

    Raises:
        SwarmError: there is none.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for process in marked_processes(swarm.mark):
            if process.name() == NAME and founder.process.pid in (p.pid for p in process.parents()):
                return process
        time.sleep(POLL_S)
    raise SwarmError("the founder has no learner")
