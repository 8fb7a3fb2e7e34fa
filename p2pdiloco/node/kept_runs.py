"""The runs that have folders here, by their manifests: what commands need that look, and take no part."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.protocol.identifiers import RunId, digest_of
from p2pdiloco.protocol.manifest import MANIFEST, Manifest
from p2pdiloco.protocol.soundness import decode_manifest
from p2pdiloco.runtime import logs

log = logs.get("session")

NAME_LETTERS = 12


class ConfigError(Exception):
    """The configuration, or what lies here, cannot be used; the message names it, and what is allowed."""


def folder_of(state: Path, run: RunId) -> Path:
    """Where a peer with this state folder keeps ``run``."""
    return state / run[:NAME_LETTERS]


def manifests_here(state: Path) -> list[Manifest]:
    """Of all runs that have a folder in ``state``."""
    found = []
    for path in sorted(state.glob(f"*/{MANIFEST}")):
        try:
            data = path.read_bytes()
            found.append(decode_manifest(data, RunId(digest_of(data))))
        except (OSError, ValueError) as error:
            log.warning("a run's folder without a manifest that can be read", folder=path.parent, reason=str(error))
    return sorted(found, key=lambda manifest: (manifest.config.name, manifest.run))


def manifest_here(state: Path, wanted: str | None) -> Manifest:
    """Of the run of that name, or whose id begins so, with a folder in ``state``; None: of the only one.

    Raises:
        ConfigError: there is none, or there are several.
    """
    every = manifests_here(state)
    chosen = [m for m in every if wanted in (None, m.config.name) or m.run.startswith(wanted or "")]
    if not chosen:
        what = "no run" if wanted is None else f"no run {wanted}"
        raise ConfigError(f"{state} has {what}: is --state the folder of the peer that founded or joined it?")
    if len(chosen) > 1:
        names = ", ".join(f"{m.config.name} ({m.run[:12]})" for m in chosen)
        raise ConfigError(f"{state} has several runs ({names}): name one with --run")
    return chosen[0]
