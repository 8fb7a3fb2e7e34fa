"""The results of runs on this machine: found by a folder, or by the run's name in the state folder. A running peer is
not disturbed: checkpoints appear whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from p2pdiloco.node.run_folder import RunStore
from p2pdiloco.peer.checkpoint import Checkpoint, CheckpointError, best_of, load_all, places
from p2pdiloco.peer.ema import RunningAverage, span
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.swarm.run_index import peers_below
from p2pdiloco.training.export import About, Format
from p2pdiloco.util import logs
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import PeerStatus

log = logs.get("session")

TRIES = 3
"""How often a checkpoint is looked for that a running peer replaces while it is read."""


class Result(NamedTuple):
    """A run's state."""

    checkpoint: Checkpoint
    step: int
    tokens: int
    """Merged tokens, averaged over the shards by their size."""
    folders: tuple[Path, ...]
    """Where the checkpoint was found."""
    averaged: int = 0
    """Over how many versions the model is averaged; 0: it is the newest version."""

    def about(self, wanted: Format) -> About:
        """The description that an export in that format carries."""
        manifest = self.checkpoint.manifest
        return About(
            run=manifest.run,
            name=manifest.config.name,
            step=self.step,
            tokens=self.tokens,
            averaged=self.averaged,
            format=wanted,
            model=manifest.config.model,
        )


def find_result(source: str, state: Path, wanted: str | None) -> Result:
    """The heaviest state of the run that is meant by ``source``: a folder (a peer's state, a run's), or a run's name or
    the beginning of its id, looked for in ``state``; where there is none, in the state folders of other peers in it.

    Raises:
        CheckpointError: there is none, or there are several runs; the message says what to do.
    """
    is_folder = Path(source).is_dir() and not _is_export_of(source, state)
    if not is_folder and not state.is_dir():
        raise CheckpointError(_nothing(source, state))
    folders = [Path(source) if is_folder else state]
    below = peers_below(folders[0])
    name = wanted if is_folder else source
    if below and not RunStore(*folders).standings(name) and RunStore(*below).standings(name):
        folders = below
    try:
        manifest = RunStore(*folders).choose(name)
    except CheckpointError as error:
        raise CheckpointError(str(error) if is_folder else f"{_nothing(source, state)} ({error})") from error
    for left in reversed(range(TRIES)):
        try:
            return _result(best_of(load_all(folders, manifest.run)), folders)
        except CheckpointError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _is_export_of(source: str, state: Path) -> bool:
    """Whether a folder has no run, and is called as one in ``state`` is: ``p2pdiloco export`` makes such folders."""
    return not RunStore(Path(source)).standings() and bool(RunStore(state, *peers_below(state)).standings(source))


def average_of(result: Result) -> RunningAverage | None:
    """The running average with the most looks that lies where ``result`` was found; None if there is none."""
    manifest = result.checkpoint.manifest
    layout, found = Layout.of(manifest), []
    for place in places(result.folders):
        average = RunningAverage(manifest.run, layout)
        try:
            average.load(place, LOCAL)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("a running average cannot be used", folder=place, reason=str(error))
            continue
        found.append(average)
    return max(found, key=lambda average: sum(average.looks), default=None)


def model_of(result: Result, *, is_averaged: bool) -> tuple[Result, Tensor]:
    """The parameters that are meant, float32 [all], and what they are.

    Raises:
        CheckpointError: the average is meant, and there is none.
    """
    if not is_averaged:
        return result, result.checkpoint.theta
    average = average_of(result)
    if average is None:
        raise CheckpointError(
            "no running average of this run lies here: followers keep one (p2pdiloco join INVITE --follow), and peers "
            "with --average, from when they begin"
        )
    return result._replace(averaged=span(min(average.looks))), average.theta


def farewell(status: PeerStatus, folder: Path, *, is_scripts: bool = False) -> list[str]:
    """Lines for the user at the run's end: the result, where it lies, what to do with it. Only training scripts
    generate text with the model of their run (``is_scripts``)."""
    is_complete = status.step >= status.total_steps and not status.participating
    stands = "is complete:" if is_complete else "as it is now:"
    loss = "" if status.held_out_loss is None else f"held-out loss {status.held_out_loss:.3f} nats a token, "
    step = min(status.step, status.total_steps)
    return [
        f"run {status.name} {stands} step {step}, {loss}{status.tokens_merged:,} tokens merged",
        f"  the model lies in   {folder}",
        *([] if is_scripts else [f"  have it write       p2pdiloco generate {folder}"]),
        f"  make files of it    p2pdiloco export {folder} --out {status.name}",
    ]


def finished_message(manifest: Manifest, folder: Path) -> str:
    """A sentence for the user who continues a run that is finished: where its model is, and what to do with it."""
    is_scripts = manifest.config.model.kind == "external"
    use = "make files of it: p2pdiloco export" if is_scripts else "have it write: p2pdiloco generate"
    return (
        f"run {manifest.config.name} ({manifest.run[:12]}) is finished, all {manifest.config.inner.steps} steps of it, "
        f"and its model lies in {folder}. To {use} {folder}. To serve it to others for an "
        f"hour: p2pdiloco resume {folder} --stay-s 3600. To train another one: give it another name"
    )


def _result(checkpoint: Checkpoint, folders: Sequence[Path]) -> Result:
    layout = Layout.of(checkpoint.manifest)
    tokens = sum(p.state.counts.merged * layout.shards[p.state.head.shard].elements for p in checkpoint.shards)
    step = min(max(p.state.step for p in checkpoint.shards), checkpoint.manifest.config.inner.steps)  # of the run
    return Result(checkpoint, step, tokens // layout.elements, tuple(folders))


def _nothing(source: str, state: Path) -> str:
    return (
        f"{source} is not a folder, and {state} has no run of that name: give a peer's state folder (a training "
        "script's is its state=), name that with --state, or get the run from its peers: p2pdiloco fetch ADDR"
    )
