"""Index of the runs that have folders on this machine, for commands that do not join a run.

Rule of this file: a state folder may contain state folders of other peers, as the default one contains those of
training scripts. Runs of the folder itself come first. A run in a nested folder belongs to the peer of that folder, and
is used with its key.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.transport.identity import KEY_FILE
from p2pdiloco.util import logs
from p2pdiloco.util.errors import UserError
from p2pdiloco.util.files import read_regular

log = logs.get("session")

NAME_LETTERS = 12


class ConfigError(UserError):
    """The configuration or a state folder cannot be used. The message names it, and what is allowed."""


class KeptRun(NamedTuple):
    """A run that has a folder on this machine."""

    state: Path
    """State folder of the peer that takes part in the run."""
    manifest: Manifest

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return folder_of(self.state, self.manifest.run)


def is_meant(wanted: str | None, name: str, run: RunId) -> bool:
    """Return whether ``wanted`` is the run's name or the beginning of its id. None matches any run."""
    return wanted is None or name == wanted or run.startswith(wanted)


def folder_of(state: Path, run: RunId) -> Path:
    """Return the folder of ``run`` inside a peer's state folder."""
    return state / run[:NAME_LETTERS]


def manifests_here(state: Path) -> list[Manifest]:
    """Return the manifests of all runs that have a folder in ``state``."""
    found = []
    for path in sorted(state.glob(f"*/{MANIFEST}")):
        try:
            data = read_regular(path)
            found.append(decode_manifest(data, RunId(digest_of(data))))
        except (OSError, ValueError) as error:
            log.warning("the manifest in a run's folder cannot be read", folder=path.parent, reason=str(error))
    return sorted(found, key=lambda manifest: (manifest.config.name, manifest.run))


def peers_below(state: Path) -> list[Path]:
    """Return the state folders of other peers inside ``state``."""
    return sorted(path.parent for path in state.glob(f"*/{KEY_FILE}"))


def kept_runs(state: Path) -> list[KeptRun]:
    """Return the runs that have a folder in ``state``, then those of other peers inside it."""
    return [KeptRun(place, manifest) for place in (state, *peers_below(state)) for manifest in manifests_here(place)]


def kept_run(state: Path, wanted: str | None) -> KeptRun:
    """Return the run with the name ``wanted``, or whose id begins with it; None: the only run.

    Raises:
        ConfigError: there is none, or there are several.
    """
    fitting = [kept for kept in kept_runs(state) if is_meant(wanted, kept.manifest.config.name, kept.manifest.run)]
    chosen = [kept for kept in fitting if kept.state == state] or fitting
    if not chosen:
        what = "no run" if wanted is None else f"no run {wanted}"
        raise ConfigError(
            f"{state} has {what}: is --state the folder of the peer that founded or joined it (a training script's is "
            "its state=)?"
        )
    if len(chosen) > 1:
        names = ", ".join(f"{k.manifest.config.name} ({k.manifest.run[:12]}, in {k.state})" for k in chosen)
        raise ConfigError(f"there are several runs ({names}): name one with --run, or its peer's folder with --state")
    return chosen[0]
