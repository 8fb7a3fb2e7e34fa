"""Comparison of the laboratory with real processes: the same run over real sockets, and in the laboratory.

The swarm is started with the commands that a user types. Its founder's learner is paused until the others have joined.
The laboratory gets what the swarm's clocks made of the settings: the merged tokens, the turns they were merged in (so
its H), who trained alone for how long, and each learner's speed. What still differs is order and timing: other samples,
and commits that come sooner or later than ``overlap`` steps.

Both final models are evaluated by the same code on the same windows. The verdict compares the difference of the means
with its standard error over seeds.
"""

from __future__ import annotations

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
from benchmarks.quality.data import corpus, held_out_losses
from benchmarks.quality.laboratory import Laboratory
from benchmarks.quality.settings import Setting, to_row
from p2pdiloco.demo.local_swarm import Member, Swarm, SwarmError, marked_processes
from p2pdiloco.peer.checkpoint import load
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training import NAME
from p2pdiloco.training.models import build_model
from p2pdiloco.training.parameters import FlatParameters

SETTING = Setting(learners=2, batch=64, steps=960, warmup=96, fragments=6, overlap=4)
POLL_S = 0.2
START_S = 60.0
TOML = """name = "tie"
seed = {seed}
[model]
width = {width}
depth = {depth}
heads = {heads}
context = {context}
[inner]
steps = {steps}
batch = {learner_batch}
learning_rate = {learning_rate}
final_share = {final_share}
warmup = {warmup}
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
    turns: int
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


def tie(out: Path, seeds: Sequence[int], rows: Path | None, time_limit_s: float) -> bool:
    """Run both for every seed, print and append what came out; whether the means are within the noise.

    Raises:
        SwarmError: a peer failed, or the run took too long.
    """
    real: list[float] = []
    lab: list[float] = []
    for seed in seeds:
        setting = msgspec.structs.replace(SETTING, seed=seed)
        measured = run_swarm(setting, out / str(seed), time_limit_s)
        same = msgspec.structs.replace(
            setting,
            steps=(steps := round(measured.merged_tokens / setting.step_tokens)),
            sync_every=round(steps / measured.turns),
            join_at=measured.alone if measured.alone > 0.01 else 0.0,
            speeds=measured.speeds,
        )
        loss = Laboratory(same).run().figures["loss"]
        print(
            f"seed {seed}: swarm {measured.loss:.4f}, laboratory {loss:.4f} nats a byte; {measured.merged_tokens:,} "
            f"tokens merged in {measured.turns} turns ({setting.steps // setting.sync_every} were due), "
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
    is_tied = abs(mean) <= max(2.0 * error, 0.005 * statistics.fmean(lab))
    print(
        f"swarm - laboratory: {mean:+.4f} +- {error:.4f} nats ({mean / statistics.fmean(lab):+.2%}): "
        f"{'within' if is_tied else 'NOT within'} two standard errors or 0.5 %"
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
    path.write_text(TOML.format(**to_row(setting), learner_batch=setting.batch // setting.learners))
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
        checkpoint = None if folder is None else load(folder / "checkpoint")
        if checkpoint is None:
            raise SwarmError("the founder saved no checkpoint")
    finally:
        swarm.stop()
        swarm.kill_leftovers()
    torch.set_num_threads(1)
    model = build_model(setting.model_config, setting.seed)
    flat = FlatParameters(model.named_parameters(), checkpoint.manifest.tensors, Layout.of(checkpoint.manifest))
    flat.copy_from(checkpoint.theta, flat.everything)
    loss = float(held_out_losses(model, corpus(), setting.context).double().mean())
    view = founder.view
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
