"""Commits of a swarm, read from a peer's event log."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco.protocol.manifest import Layout, Manifest


class Commits(NamedTuple):
    """What one peer took within some time."""

    versions: int
    """Of all shards."""
    shards: int
    learners: float
    """Whose progress a commit holds, in the mean; 0 without commits."""


def events(state: Path) -> list[dict[str, Any]]:
    """All whole lines of the peer's event log."""
    found = []
    for path in sorted(state.glob("*/metrics.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the last one is being written
                found.append(json.loads(text))
    return found


def shard_count(state: Path) -> int:
    """Of the run in the peer's folder."""
    path = next(state.glob("*/manifest.msgpack"))
    return len(Layout.of(msgspec.msgpack.decode(path.read_bytes(), type=Manifest)).shards)


def commits_between(state: Path, begin_unix: float, end_unix: float) -> Commits:
    """Those of the peer in ``state``."""
    found = [e for e in events(state) if e["event"] == "commit" and begin_unix <= e["time"] < end_unix]
    learners = sum(len(e["contributors"]) for e in found) / max(1, len(found))
    return Commits(len(found), shard_count(state), learners)
