"""Peers with changed code: ours, with a method replaced for each lie that a plan's ``hostile`` names, in this process.

All else of such a peer is honest, so that it stays in the run for as long as the others let it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from p2pdiloco.peer import cargo, signatures
from p2pdiloco.protocol import merges, presence, workload
from p2pdiloco.protocol.adoption import Adoption
from p2pdiloco.protocol.identifiers import Digest
from p2pdiloco.protocol.messages import MAX_CLAIMS, Contributor, Head, Heads
from p2pdiloco.tensors import merge, quantizers
from p2pdiloco.tensors.shard_bodies import Bodies

LARGE = 1e34
TINY = 1e-40


def tell(names: Sequence[str]) -> None:
    """From now on.

    Raises:
        KeyError: there is no such lie.
    """
    for name in names:
        LIES[name]()


def _values() -> None:
    """As an owner it merges what nobody gave, says that it is short, and goes on from it."""
    sound = merge.encode

    def encode(how: quantizers.Recipe, merged: torch.Tensor, _: float, room: int) -> tuple[Bodies, float]:
        bodies, _length = sound(how, merged.fill_(LARGE), math.inf, room)
        return bodies, 1e-3

    _put(merge, "encode", encode)


def _tokens() -> None:
    """What its learner gives counts for 2^56 tokens more."""
    sound = signatures.signed

    def signed(identity: Any, run: Any, shard: Any, base: Any, given: Contributor, payload: Any) -> Contributor:
        return sound(identity, run, shard, base, replace(given, tokens_to=2**56), payload)

    _put(cargo, "signed", signed)


def _others() -> None:
    """Its commits name a learner of the first contributor's peer with 2^50 tokens."""
    sound = merges.Merges.commit

    def commit(self: merges.Merges, event: Any) -> Any:
        header = sound(self, event)
        if header is None:
            return None
        first = header.contributors[0]
        return replace(header, contributors=(replace(first, tokens_to=first.tokens_from + 2**50),))

    _put(merges.Merges, "commit", commit)


def _steps() -> None:
    """Whoever asks for its heads is told that the run is at step 2^55."""
    _put(Adoption, "heads", lambda self: Heads((), 2**55))


def _heads() -> None:
    """Whoever asks for its heads is told of some that are 1,000 versions ahead."""
    sound = Adoption.heads

    def heads(self: Adoption) -> Heads:
        ahead = (Head(h.shard, h.version + 1000, Digest(h.id[::-1]), h.tokens + 2**40) for h in sound(self).heads)
        return Heads(tuple(ahead), self.core.step)

    _put(Adoption, "heads", heads)


def _blocks() -> None:
    """It claims as many blocks of data as a message holds."""
    _put(workload.Workload, "claims", lambda self: tuple(range(MAX_CLAIMS)))


def _weight() -> None:
    """It asks to own all that there is, and never merges."""
    sound = presence.Presence.greet

    def greet(self: presence.Presence, views: Any) -> None:
        honest = self.core.config
        self.core.config = replace(honest, weight=1e12)
        sound(self, views)
        self.core.config = honest

    _put(presence.Presence, "greet", greet)
    _put(merges.Merges, "consider", lambda self, shard: None)


def _tiny() -> None:
    """What its learner gives is one value of 1e-40."""
    sound = quantizers.encode_vector

    def encode_vector(
        how: quantizers.Recipe, x: torch.Tensor, less: torch.Tensor | None = None, room: int = 0
    ) -> Bodies:
        if less is None:
            return sound(how, x, room=room)
        values = torch.zeros(x.numel())
        values[0] = TINY
        return sound(quantizers.recipe("bf16"), values, room=room)

    _put(quantizers, "encode_vector", encode_vector)


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


LIES: dict[str, Callable[[], None]] = {
    "values": _values,
    "tokens": _tokens,
    "others": _others,
    "steps": _steps,
    "heads": _heads,
    "blocks": _blocks,
    "weight": _weight,
    "tiny": _tiny,
}
