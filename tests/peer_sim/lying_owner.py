"""Owners whose commits are wrong, in a simulated world of whole peers: of honest length, and signed like all others.

The liar's program is the real one. Either it encodes another merge, which nothing but an audit can find, or it names
contributions that do not bear their peers' signatures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from msgspec.structs import replace

from p2pdiloco.codec import merge
from p2pdiloco.peer.model_state import MergeResult
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader, Contribution, commit_id

if TYPE_CHECKING:
    from p2pdiloco.peer.peer import Peer

Lie = Literal["", "value", "noise", "dropped", "unsigned"]
"""One value is changed; all are noise as long as the merge; the last contribution is named and not merged; others'
contributions are not signed by them."""
LIES: tuple[Lie, ...] = get_args(Lie)[1:]
UNSIGNED = bytes(64)


class LyingOwners:
    """What they have done so far."""

    def __init__(self) -> None:
        self._wrong: set[Digest] = set()
        """Payloads of wrong merges."""
        self._taken: set[Digest] = set()
        """Wrong commits that others have applied."""
        self.names: set[PeerId] = set()
        self.wrong: Counter[PeerId] = Counter()
        """Wrong commits of each that others have applied,"""
        self.caught: dict[PeerId, int] = {}
        """and how many these were when the first of the others found it."""

    def is_wrong(self, header: CommitHeader) -> bool:
        """Whether a commit is a lie."""
        return header.payload in self._wrong or any(c.signature == UNSIGNED for c in header.contributors)

    def applied(self, header: CommitHeader) -> None:
        """Somebody else has applied a commit."""
        if self.is_wrong(header) and (commit := commit_id(header)) not in self._taken:
            self._taken.add(commit)
            self.wrong[header.owner] += 1

    def begin(self, peer: Peer, lie: Lie, seed: int) -> None:
        """From now on this peer lies in every merge that can be told from an honest one."""
        self.names.add(peer.config.peer)
        if lie == "unsigned":
            _take_as_unsigned(peer)
            return
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


def _take_as_unsigned(peer: Peer) -> None:
    """What others contribute loses its signature on its way to the machine."""
    feed = peer.driver.feed

    def changed(event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, Contribution):
            contributor = replace(event.message.contributor, signature=UNSIGNED)
            event = replace(event, message=replace(event.message, contributor=contributor))
        feed(event)

    peer.driver.feed = changed  # type: ignore[method-assign]


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
