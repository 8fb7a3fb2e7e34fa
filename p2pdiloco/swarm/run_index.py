"""The runs that have folders on this machine, by their manifests: for commands that do not take part.

Rule of this file: a state folder may have other peers' state folders in it, as the default one has those of training
scripts. A run that it has itself comes first; one of theirs is theirs, with their key.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Manifest
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.transport.identity import KEY_FILE
from p2pdiloco.util import logs

log = logs.get("session")

NAME_LETTERS = 12


class ConfigError(Exception):
    """The configuration, or what lies here, cannot be used; the message names it, and what is allowed."""


class KeptRun(NamedTuple):
    """A run that has a folder here."""

    state: Path
    """The state folder of the peer that takes part in it."""
    manifest: Manifest

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return folder_of(self.state, self.manifest.run)


def is_meant(wanted: str | None, name: str, run: RunId) -> bool:
    """Whether a user who writes ``wanted`` means this run: its name, or the beginning of its id. None means any run."""
    return wanted is None or name == wanted or run.startswith(wanted)


def folder_of(state: Path, run: RunId) -> Path:
    """The folder in which a peer with this state folder keeps ``run``."""
    return state / run[:NAME_LETTERS]


def manifests_here(state: Path) -> list[Manifest]:
    """The manifests of all runs that have a folder in ``state``."""
    found = []
    for path in sorted(state.glob(f"*/{MANIFEST}")):
        try:
            data = path.read_bytes()
            found.append(decode_manifest(data, RunId(digest_of(data))))
        except (OSError, ValueError) as error:
            log.warning("a run's folder without a manifest that can be read", folder=path.parent, reason=str(error))
    return sorted(found, key=lambda manifest: (manifest.config.name, manifest.run))


def peers_below(state: Path) -> list[Path]:
    """State folders of other peers in ``state``."""
    return sorted(path.parent for path in state.glob(f"*/{KEY_FILE}"))


def kept_runs(state: Path) -> list[KeptRun]:
    """The runs that have a folder in ``state``, then those of other peers in it."""
    return [KeptRun(place, manifest) for place in (state, *peers_below(state)) for manifest in manifests_here(place)]


def kept_run(state: Path, wanted: str | None) -> KeptRun:
    """The run of that name, or whose id begins so; None: the only one.

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
