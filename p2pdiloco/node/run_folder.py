"""The folder of a run, ``STATE/RUN``, where RUN is the beginning of the run's id.

Rules of this file:
1. One process at a time uses the folder (``hold``). A second one fails with the first one's process id, and writes
   nothing.
2. A peer starts from the heaviest state (most merged tokens) anywhere below its state folder and those that the user
   names: for each shard, the heaviest head. So the order of commands does not matter, and no peer continues from an
   older state than it has, which would create a second chain with the same key.
3. A founder finds its run by the manifests in the folders.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from p2pdiloco.node.run_creation import is_founded_from
from p2pdiloco.peer import state_client
from p2pdiloco.peer.checkpoint import (
    CheckpointError,
    Index,
    best_of,
    indices,
    load,
    load_all,
    places,
    read_manifest,
)
from p2pdiloco.peer.checkpoint import sweep_halves as sweep_checkpoints
from p2pdiloco.peer.host import sweep
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import MANIFEST, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import end_of
from p2pdiloco.swarm.credentials import MemberFiles
from p2pdiloco.swarm.run_index import folder_of, is_meant
from p2pdiloco.util import logs
from p2pdiloco.util.errors import UserError
from p2pdiloco.util.files import (
    LOCAL,
    LockedError,
    lock,
    make_private_folder,
    make_state_folder,
    read_regular,
    write_atomically,
)
from p2pdiloco.wire.control_messages import StateProof

log = logs.get("session")

CHECKPOINT = "checkpoint"
LOCK = "lock"


class FolderInUseError(UserError):
    """Another process uses the run's folder. The message says which, and what to do."""


class NameTakenError(UserError):
    """The run cannot be founded under its name. The message says why, and what to do."""


class SavedRun(NamedTuple):
    """A run with checkpoints here, and its progress by the heaviest of them."""

    manifest: Manifest
    weight: int
    """Merged tokens of all shards together in that checkpoint."""
    step: int
    last_step: int
    """Step at which the run ends, as far as that folder knows."""

    @property
    def is_finished(self) -> bool:
        """True if no steps are left to train."""
        return self.step >= self.last_step


@contextlib.contextmanager
def hold(state: Path, manifest: Manifest) -> Iterator[Path]:
    """Create and lock the run's folder for this process while entered.

    Raises:
        FolderInUseError: another process uses it.
        OSError: it cannot be created or written.
    """
    folder = folder_of(state, manifest.run)
    make_state_folder(state)
    make_private_folder(folder)
    try:
        descriptor = lock(folder / LOCK)
    except LockedError as error:
        raise FolderInUseError(
            f"the folder {folder} of run {manifest.config.name} is in use by process {error}: stop that one "
            f"(kill {error}), or give this peer a folder of its own with --state"
        ) from error
    try:
        if not (folder / MANIFEST).is_file() or read_regular(folder / MANIFEST) != manifest.encode():
            write_atomically(folder / MANIFEST, manifest.encode())  # a spare for checkpoints with a damaged manifest
        swept = sweep(LOCAL, folder) + sweep_checkpoints(folder / CHECKPOINT)
        if swept:
            log.info("removed files that a crash had left incomplete", folder=folder, files=len(swept))
        yield folder
    finally:
        os.close(descriptor)


class RunStore:
    """The runs that have checkpoints in or below some folders. All methods block on the disk."""

    def __init__(self, *folders: Path) -> None:
        """``folders``: state folders, the peer's own one first."""
        self._folders = folders

    def saved_runs(self, wanted: str | None = None) -> dict[RunId, SavedRun]:
        """Return the runs that match ``wanted``. Reads only the indices of checkpoints."""
        found: dict[RunId, SavedRun] = {}
        for place in places(self._folders):
            for _, index in indices(place):
                saved = _saved_run(place, index)
                if saved is not None and (index.run not in found or saved.weight > found[index.run].weight):
                    found[index.run] = saved
        return {run: one for run, one in found.items() if is_meant(wanted, one.manifest.config.name, run)}

    def is_finished(self, run: RunId) -> bool:
        """Return whether there is a state of the run after its last step."""
        saved = self.saved_runs().get(run)
        return saved is not None and saved.is_finished

    def choose(self, wanted: str | None) -> Manifest:
        """Return the manifest of the run that matches ``wanted``.

        Raises:
            CheckpointError: there is none, or there are several.
        """
        found = self.saved_runs(wanted)
        if not found:
            every = self.saved_runs()
            if not every:
                load_all(self._folders)  # raises if there are checkpoints that cannot be read
            raise CheckpointError(f"there is no checkpoint of a run {wanted!r}: --run is one of {_names(every)}")
        if len(found) > 1:
            raise CheckpointError(f"the checkpoints are of several runs ({_names(found)}): name one with --run")
        return next(iter(found.values())).manifest

    def founded_from(self, config: RunConfig) -> Manifest | None:
        """Return the run of this configuration: the most advanced unfinished one, else the most advanced; or None.

        Raises:
            NameTakenError: there is an unfinished run of that name with another configuration.
        """
        alike = [s for s in self.saved_runs().values() if s.manifest.config.name == config.name]
        same = [s for s in alike if is_founded_from(s.manifest.config, config)]
        if same:
            return max(same, key=lambda s: (not s.is_finished, s.weight)).manifest
        for other in alike:
            if not other.is_finished:
                run, state = other.manifest.run, self._folders[0]
                raise NameTakenError(
                    f"{folder_of(state, run)} holds run {config.name} ({run[:12]}) of another configuration, at step "
                    f"{other.step} of {other.last_step}. To go on with that one: p2pdiloco resume "
                    f"{state} --run {run[:12]}. To found this one beside it: add --name {config.name}-2"
                )
        return None

    def load_state(self, manifest: Manifest) -> InitialState | None:
        """Return the heaviest state of the run, else the download of an interrupted join, or None.

        Such a download is looked for only in the first folder, whose run folder the caller holds.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
        """
        own = folder_of(self._folders[0], manifest.run)
        if manifest.run in self.saved_runs():
            best = best_of(load_all(self._folders, manifest.run))
            LOCAL.remove_folder(own / state_client.INCOMING)  # an older download, which nothing would read again
            return InitialState(best.shards, best.theta, best.momentum)
        load(own / CHECKPOINT, run=manifest.run)  # raises if there are checkpoints that cannot be read
        kept = state_client.load(own / state_client.INCOMING, manifest)
        return None if kept is None else InitialState(kept.shards, kept.theta, kept.momentum)


def has_finished(manifest: Manifest, shards: Iterable[StateProof], folder: Path) -> bool:
    """Return whether a run is complete at these heads, as far as the run's ``folder`` knows."""
    return max((proof.state.step for proof in shards), default=0) >= known_end(manifest, folder).steps


def known_end(manifest: Manifest, folder: Path) -> RunEnd:
    """Return the run's end, as far as its ``folder`` knows. Blocks on the disk."""
    return end_of(manifest.config, MemberFiles(folder).prolonged_to(manifest))


def describe_state(manifest: Manifest, state: InitialState) -> str:
    """Return a sentence for the user about the state from which a peer continues."""
    heads = [proof.state.head for proof in state.shards]
    versions = f"{min(h.version for h in heads)} to {max(h.version for h in heads)}"
    return (
        f"continuing run {manifest.config.name} ({manifest.run[:12]}) from versions {versions} of its shards, "
        f"{max(proof.state.counts.merged for proof in state.shards):,} tokens"
    )


def _names(found: dict[RunId, SavedRun]) -> str:
    return ", ".join(sorted(f"{one.manifest.config.name} ({run[:12]})" for run, one in found.items()))


def _saved_run(place: Path, index: Index) -> SavedRun | None:
    try:
        manifest = read_manifest(place, index.run)
    except (OSError, ValueError) as error:
        log.warning("checkpoints without a readable manifest are ignored", folder=place, reason=str(error))
        return None
    step = max(proof.state.step for proof in index.shards)
    return SavedRun(manifest, index.weight, step, known_end(manifest, place.parent).steps)
