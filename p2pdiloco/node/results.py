"""Finds the results of runs on this machine, by a folder, or by the run's name in the state folder.

A running peer is not disturbed, since checkpoints appear atomically."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from p2pdiloco.node.run_folder import RunStore, known_end
from p2pdiloco.peer.checkpoint import Checkpoint, CheckpointError, best_of, load_all, places
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.manifest_defaults import budget
from p2pdiloco.swarm.run_index import peers_below
from p2pdiloco.training.export import About, Format, export
from p2pdiloco.training.model_card import Facts, model_card
from p2pdiloco.training.parameters import BUFFERS, read_buffers
from p2pdiloco.util.files import read_regular
from p2pdiloco.util.status_pipe import Farewell
from p2pdiloco.wire.control_messages import PeerStatus

# Number of attempts to read a checkpoint, since a running peer may replace it meanwhile.
TRIES = 3


class Result(NamedTuple):
    """A run's state."""

    checkpoint: Checkpoint
    step: int
    last_step: int
    """Step at which the run ends, as far as the folders know."""
    tokens: int
    """Merged tokens, averaged over the shards by their size."""
    folders: tuple[Path, ...]
    """Folders in which the checkpoint was found."""

    @property
    def peers(self) -> int:
        """Number of peers whose tokens the chains have merged in their last versions."""
        learners = {learner for shard in self.checkpoint.shards for learner, _ in shard.state.marks}
        return len({learner.partition("/")[0] for learner in learners})

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers, as a training script has saved them here last; empty: none has.

        Raises:
            ValueError: a file of buffers is damaged.
        """
        states = {place.parent.parent for place in places(self.folders)}
        written = [state for state in states if (state / BUFFERS).is_file()]
        newest = sorted(written, key=lambda state: (state / BUFFERS).stat().st_mtime, reverse=True)
        return next(filter(None, (read_buffers(state, self.checkpoint.manifest.run) for state in newest)), {})

    def held_out_loss(self) -> tuple[float, int] | None:
        """Return the last held-out loss of the peer that ended with this very state, and its step; None: not known."""
        heads = [shard.state.head.id for shard in self.checkpoint.shards]
        for place in places(self.folders):
            with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
                report = json.loads(read_regular(place.parent / "report.json"))
                if report.get("heads") == heads and isinstance(report.get("held_out_loss"), float):
                    return report["held_out_loss"], int(report["held_out_step"])
        return None

    def write(
        self,
        folder: Path,
        wanted: Format,
        *,
        base: str | None = None,
        tokenizer: str | None = None,
        like: str | None = None,
        license: str = "",
    ) -> list[str]:
        """Export the model with its card into ``folder``; return the names of the written files.

        Args and errors as of ``training.export.export``; ``license`` is for the card.
        """
        manifest = self.checkpoint.manifest
        about = About(
            run=manifest.run,
            name=manifest.config.name,
            step=self.step,
            tokens=self.tokens,
            format=wanted,
            model=manifest.config.model,
        )
        facts = Facts(
            step=self.step,
            last_step=self.last_step,
            tokens=self.tokens,
            format=wanted,
            base=base or like or "",
            held_out_loss=self.held_out_loss(),
            peers=self.peers,
            license=license,
        )
        return export(
            manifest,
            self.checkpoint.theta,
            folder,
            about,
            base=base,
            tokenizer=tokenizer,
            like=like,
            buffers=self.buffers(),
            card=model_card(manifest, facts),
        )


def find_result(source: str, state: Path, wanted: str | None) -> Result:
    """Return the heaviest state (most merged tokens) of a run.

    source: a folder (a peer's state folder, or a run's); or a run's name, or the beginning of its id.
    state: where to look for a name: in this state folder, then in those of other peers inside it.
    wanted: the run's name if ``source`` is a folder with several runs.

    Raises:
        CheckpointError: there is no state, or there are several runs. The message says what to do.
    """
    is_folder = Path(source).is_dir() and not _is_export_of(source, state)
    if not is_folder and not state.is_dir():
        raise CheckpointError(_nothing(source, state))
    folders = [Path(source) if is_folder else state]
    below = peers_below(folders[0])
    name = wanted if is_folder else source
    if below and not RunStore(*folders).saved_runs(name) and RunStore(*below).saved_runs(name):
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
    """Return whether a folder has no run, but the name of a run in ``state``, as ``p2pdiloco export`` makes them."""
    return not RunStore(Path(source)).saved_runs() and bool(RunStore(state, *peers_below(state)).saved_runs(source))


def farewell(status: PeerStatus, folder: Path, *, is_scripts: bool = False, has_budget: bool = False) -> Farewell:
    """Return a message for the user at the end of a run or a peer: the result, its folder, and the next commands.

    is_scripts: the run is one of training scripts, whose model ``p2pdiloco generate`` cannot build.
    has_budget: it ends by tokens."""
    is_complete = status.step >= status.total_steps and not status.participating
    stands = "is complete:" if is_complete else "as it is now:"
    loss = "" if status.held_out_loss is None else f"held-out loss {status.held_out_loss:.3f} nats a token, "
    step = min(status.step, status.total_steps)
    again = f"  go on               {'the same script' if is_scripts else 'the same command'} again"
    lines = (
        f"run {status.name} {stands} step {step}, {loss}{status.tokens_merged:,} tokens merged",
        f"  model folder        {folder}",
        *(() if is_scripts else (f"  generate text       p2pdiloco generate {folder}",)),
        f"  export it           p2pdiloco export {folder} --out {status.name}",
        f"  train it longer     {_prolong(folder, has_budget=has_budget)}" if is_complete else again,
    )
    return Farewell("\n".join(lines))


def finished_message(manifest: Manifest, folder: Path) -> str:
    """Return a message for a user who continues a finished run: its model's folder, and the next commands."""
    is_scripts = manifest.config.model.kind == "external"
    use = "export it: p2pdiloco export" if is_scripts else "generate text: p2pdiloco generate"
    return (
        f"run {manifest.config.name} ({manifest.run[:12]}) has finished all {known_end(manifest, folder).steps} "
        f"steps; its model is in {folder}. To {use} {folder}. To serve it to others for an "
        f"hour: p2pdiloco resume {folder} --stay-s 3600. To train it longer, as its founder or an admin: "
        f"{_prolong(folder, has_budget=budget(manifest.config.inner) > 0)}. To train another run, give that another "
        "name"
    )


def _prolong(folder: Path, *, has_budget: bool) -> str:
    """Return the command that prolongs the run in this folder."""
    return f"p2pdiloco prolong {folder} {'--tokens' if has_budget else '--steps'} N"


def _result(checkpoint: Checkpoint, folders: Sequence[Path]) -> Result:
    layout = Layout.of(checkpoint.manifest)
    tokens = sum(p.state.counts.merged * layout.shards[p.state.head.shard].elements for p in checkpoint.shards)
    # The protocol may run a round or two beyond the last step of the run.
    ends = [known_end(checkpoint.manifest, place.parent).steps for place in places(folders)]
    last_step = max([checkpoint.manifest.config.inner.steps, *ends])
    step = min(max(p.state.step for p in checkpoint.shards), last_step)
    return Result(checkpoint, step, last_step, tokens // layout.elements, tuple(folders))


def _nothing(source: str, state: Path) -> str:
    return (
        f"{source} is not a folder, and {state} has no run of that name: give a peer's state folder (a training "
        "script's is its state=), name that with --state, or get the run from its peers: p2pdiloco fetch ADDR"
    )
