"""A stage on which two groups merge. By their keys, peers a, c and e are of one group, b, d and j of the other."""

from __future__ import annotations

from typing import Any

import msgspec
from stage import SHARD, B, C, D, Stage, merged_by, run_owned, tokens, with_payload

from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.group_merges import merged_parts
from p2pdiloco.protocol.ids import PeerId

E, J = PeerId("e"), PeerId("i")
FIRST = (tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40))
"""Contributors of version 1: three learners, so that two groups make version 2."""


def grouped(*others: PeerId, owners: str = "abcd", **changes: Any) -> Stage:
    """Return a stage whose next merge, version 2, is made by two groups. ``owners``: their order, but for the first of
    each group."""
    stage = Stage(*(others or (B, C, D)), **{"run": run_owned(owners, version=2, bits=1), "together": 2, **changes})
    stage.take(stage.commit(*FIRST))
    assert stage.machine.core.chains[SHARD].group_bits == 1
    return stage


def given(stage: Stage, collector: PeerId, *peers: PeerId, **changes: Any) -> msg.Contribution:
    """Return a group's merge for version 2, as its collector sends it to the owner."""
    parts = [with_payload(tokens(peer, 40, 80), f"of {peer}") for peer in peers]
    group = merged_by(collector, *parts, **changes)
    return msg.Contribution(SHARD, stage.head(), 8, msg.part_as_one(group), 100, group)


def header_of(stage: Stage, *contributions: msg.Contribution, **changes: Any) -> msg.CommitHeader:
    """Return a sound commit that merges these groups' merges."""
    contributions = tuple(sorted(contributions, key=lambda one: one.giver))
    parts = merged_parts(contributions, changes.pop("factors", ()))
    bare = stage.commit(*parts["contributors"], owner=contributions[0].giver, factors=parts["factors"])
    whole = msgspec.structs.replace(bare, **parts)
    count, counts = stage.machine.core.chains[SHARD].count(whole.contributors, whole.counted_factors)
    return msgspec.structs.replace(whole, tokens=stage.head().tokens + count, counts=counts, **changes)
