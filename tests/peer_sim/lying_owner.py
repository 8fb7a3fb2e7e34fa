"""Owners whose merges are wrong, in a simulated world of whole peers: of honest length, and signed like all others.

The liar's program is the real one, but for what it encodes as the merge, so that nothing but an audit can find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from p2pdiloco.codec import merge
from p2pdiloco.peer.model_state import MergeResult
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader

if TYPE_CHECKING:
    from p2pdiloco.peer.peer import Peer

Lie = Literal["", "value", "noise", "dropped"]
"""One value is changed; all are noise as long as the merge; the last contribution is named and not merged."""
LIES: tuple[Lie, ...] = get_args(Lie)[1:]


class LyingOwners:
    """What they have done so far."""

    def __init__(self) -> None:
        self._wrong: set[Digest] = set()
        """Payloads of wrong merges."""
        self._taken: set[Digest] = set()
        self.wrong: Counter[PeerId] = Counter()
        """Wrong commits of each that others have applied,"""
        self.caught: dict[PeerId, int] = {}
        """and how many these were when the first of the others found it."""

    def is_wrong(self, payload: Digest) -> bool:
        """Whether a commit's payload is a lie."""
        return payload in self._wrong

    def applied(self, peer: PeerId, header: CommitHeader) -> None:
        """A peer has applied a commit."""
        merges = [(header.owner, header.payload)]
        merges += [(part.collector, Digest(part.payload.hex())) for part in header.parts]
        for maker, payload in merges:
            if maker != peer and payload in self._wrong and payload not in self._taken:
                self._taken.add(payload)
                self.wrong[maker] += 1

    def begin(self, peer: Peer, lie: Lie, seed: int) -> None:
        """From now on this peer lies in every merge that can be told from an honest one."""
        sound, random = peer.state.merge, Random(f"{seed}/lies")

        def lying(shard: Any, base: Any, version: int, given: Sequence[Any], *rest: Any, **options: Any) -> MergeResult:
            honest = sound(shard, base, version, given, *rest, **options)
            if not honest.length:
                return honest
            if lie == "dropped" and len(given) > 1:
                found = sound(shard, base, version, given[:-1], *rest, **options)._replace(factors=())
            else:
                encode = merge.encode
                merge.encode = _changing(encode, _noise if lie == "noise" else _value, random)
                try:
                    found = sound(shard, base, version, given, *rest, **options)
                finally:
                    merge.encode = encode
            if found.payload_digest != honest.payload_digest:
                self._wrong.add(found.payload_digest)
            return found

        peer.state.merge = lying  # type: ignore[method-assign]


def _changing(encode: Callable[..., Any], change: Callable[[torch.Tensor, Random], None], random: Random) -> Any:
    def changed(how: Any, merged: torch.Tensor, *rest: Any) -> Any:
        change(merged, random)
        return encode(how, merged, *rest)

    return changed


def _value(merged: torch.Tensor, random: Random) -> None:
    merged[random.randrange(len(merged))] += 0.5 * float(merged.norm())


def _noise(merged: torch.Tensor, random: Random) -> None:
    drawn = torch.randn(len(merged), generator=torch.Generator().manual_seed(random.getrandbits(32)))
    merged.copy_(drawn.mul_(float(merged.norm()) / float(drawn.norm())))
