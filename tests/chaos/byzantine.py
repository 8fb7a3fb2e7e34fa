"""Peers with changed code: ours, with a method replaced for each lie that a plan's ``hostile`` names, in this process.

All else of such a peer is honest, so that it stays in the run for as long as the others let it. A lie counts as sent
once a message that bears it has left for another peer: what the liar's own code refuses harms nobody and proves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from p2pdiloco.codec import merge, quantization
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.protocol import aggregation, block_assignment, heartbeat
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.config import BATCH_ROOM, RANGE_TURNS
from p2pdiloco.protocol.contributions import Contributions, DeltaReconciliation
from p2pdiloco.protocol.ids import Digest
from p2pdiloco.protocol.messages import MAX_CLAIMS, Head, Heads
from p2pdiloco.transport.transport import Transport
from p2pdiloco.wire.control_messages import decode_message

LARGE = 1e34
TINY = 1e-40
SHORT = 1e-3
MANY_TOKENS = 2**50
LATE_STEP = 2**55
FAR_VERSIONS, HEAVIER = 1000, 2**40
HEAVY = 1e12
NOISE_TIMES = 30.0
NOISE_SHARE = 0.5


class Lie(NamedTuple):
    """A change of this process's code."""

    begin: Callable[[], None]
    is_in: Callable[[msg.Message], bool]
    """Whether a message bears it."""


def tell(names: Sequence[str], sent: Path) -> None:
    """From now on. The name of each lie is added to the file ``sent`` when it has left for another peer first.

    Raises:
        KeyError: there is no such lie.
    """
    for name in names:
        LIES[name].begin()
    waiting = set(names)
    sound = Transport.send

    def send(self: Transport, peer: Any, body: bytes, *rest: Any, **options: Any) -> bool:
        is_sent = sound(self, peer, body, *rest, **options)
        if is_sent and waiting:
            message = decode_message(body)
            for name in [name for name in waiting if LIES[name].is_in(message)]:
                waiting.remove(name)
                with open(sent, "a") as file:
                    file.write(f"{name}\n")
        return is_sent

    _put(Transport, "send", send)


def _values() -> None:
    """As an owner it merges what nobody gave, says that it is short, and goes on from it."""
    sound = merge.encode

    def encode(how: quantization.Recipe, merged: torch.Tensor, _: float, room: int) -> tuple[Bodies, float]:
        bodies, _length = sound(how, merged.fill_(LARGE), math.inf, room)
        return bodies, SHORT

    _put(merge, "encode", encode)


def _merges() -> None:
    """As an owner it adds noise to each merge, half as long as what was given: within all bounds."""
    sound = merge.encode

    def encode(how: quantization.Recipe, merged: torch.Tensor, longest: float, room: int) -> tuple[Bodies, float]:
        drawn = torch.randn_like(merged)
        merged += drawn.mul_(NOISE_SHARE * float(merged.norm()) / float(drawn.norm()))
        bodies, length = sound(how, merged, longest, room)
        wrong_lengths.add(length)
        return bodies, length

    _put(merge, "encode", encode)


wrong_lengths: set[float] = set()
"""Of this process's wrong merges."""


def _tokens() -> None:
    """What its learner gives is said to be of as many steps and tokens as honest peers believe."""
    sound = Contributions.on_snapshot

    def snapshotted(self: Contributions, event: Any) -> None:
        many = replace(event, steps=event.steps * RANGE_TURNS, tokens=event.tokens * RANGE_TURNS * BATCH_ROOM)
        sound(self, many)

    _put(Contributions, "on_snapshot", snapshotted)


def _is_many_tokens(message: msg.Message) -> bool:
    """Whether a contribution declares as many steps as the lie does at least."""
    return isinstance(message, msg.Contribution) and message.contributor.steps >= RANGE_TURNS


def _others() -> None:
    """Its commits name a learner of the first contributor's peer with 2^50 tokens."""
    sound = aggregation.Aggregation.commit

    def commit(self: aggregation.Aggregation, event: Any) -> Any:
        header = sound(self, event)
        if header is None:
            return None
        first = header.contributors[0]
        return replace(header, contributors=(replace(first, tokens_to=first.tokens_from + MANY_TOKENS),))

    _put(aggregation.Aggregation, "commit", commit)


def _steps() -> None:
    """With each heartbeat all are told that the run is at step 2^55."""
    _tell_all(lambda _: Heads((), LATE_STEP))


def _heads() -> None:
    """With each heartbeat all are told of heads that are 1,000 versions ahead."""

    def ahead(self: heartbeat.Heartbeats) -> Heads:
        known = (self.core.head(chain.shard) for chain in self.core.chains if chain.head is not None)
        heads = (Head(h.shard, h.version + FAR_VERSIONS, Digest(h.id[::-1]), h.tokens + HEAVIER) for h in known)
        return Heads(tuple(heads), self.core.step)

    _tell_all(ahead)


def _tell_all(message: Callable[[heartbeat.Heartbeats], msg.Message]) -> None:
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        known = list(views)
        sound(self, known)
        self.core.send(tuple(view.peer for view in known), message(self))

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)


def _blocks() -> None:
    """It claims as many blocks of data as a message holds."""
    _put(block_assignment.BlockAssignment, "claims", lambda self: tuple(range(MAX_CLAIMS)))


def _weight() -> None:
    """It asks to own all that there is, and never merges."""
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        honest = self.core.config
        self.core.config = replace(honest, weight=HEAVY)
        sound(self, views)
        self.core.config = honest

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)
    _put(aggregation.Aggregation, "merge_if_due", lambda self, shard: None)


def _tiny() -> None:
    """What its learner gives is one value of 1e-40."""

    def tiny(found: torch.Tensor) -> torch.Tensor:
        values = torch.zeros_like(found)
        values[0] = TINY
        return values

    _give(tiny, quantization.recipe("bf16"))


def _flip() -> None:
    """What its learner gives is the opposite of what it has found."""
    _give(torch.neg)


def _noise() -> None:
    """What its learner gives is noise, 30 times as long as what it has found."""

    def noise(found: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn_like(found)
        return drawn.mul_(NOISE_TIMES * float(found.norm()) / float(drawn.norm()))

    _give(noise)


def _give(values: Callable[[torch.Tensor], torch.Tensor], how: quantization.Recipe | None = None) -> None:
    """Outer gradients are ``values`` of what the learner has found, float32 [elements]. It begins anew from each
    version, since what it gave is not what it has."""
    sound, moves = quantization.encode_vector, DeltaReconciliation.moves

    def encode_vector(
        honest: quantization.Recipe, x: torch.Tensor, less: torch.Tensor | None = None, room: int = 0
    ) -> Bodies:
        if less is None:
            return sound(honest, x, room=room)
        return sound(how or honest, values(x - less), room=room)

    def reset(self: DeltaReconciliation, *arguments: Any) -> Any:
        learner, *_ = moves(self, *arguments)
        return learner, (), (), True

    _put(quantization, "encode_vector", encode_vector)
    _put(DeltaReconciliation, "moves", reset)


def _is_given(message: msg.Message) -> bool:
    """Whether it is a contribution of values."""
    return isinstance(message, msg.Contribution) and bool(message.payload)


def _put(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: the lie would change nothing"
    setattr(owner, name, value)


def _is_commit(message: msg.Message, is_changed: Callable[[msg.CommitHeader], bool]) -> bool:
    return isinstance(message, msg.Commit) and is_changed(message.header)


def _is_heads(message: msg.Message, is_changed: Callable[[Heads], bool]) -> bool:
    return isinstance(message, Heads) and is_changed(message)


def _is_heartbeat(message: msg.Message, is_changed: Callable[[msg.Heartbeat], bool]) -> bool:
    return isinstance(message, msg.Heartbeat) and is_changed(message)


LIES: dict[str, Lie] = {
    "values": Lie(_values, lambda m: _is_commit(m, lambda header: header.length == SHORT)),
    "merges": Lie(_merges, lambda m: _is_commit(m, lambda header: header.length in wrong_lengths)),
    "tokens": Lie(_tokens, _is_many_tokens),
    "others": Lie(_others, lambda m: _is_commit(m, lambda h: any(c.tokens == MANY_TOKENS for c in h.contributors))),
    "steps": Lie(_steps, lambda m: _is_heads(m, lambda heads: heads.step == LATE_STEP)),
    "heads": Lie(_heads, lambda m: _is_heads(m, lambda heads: any(h.tokens >= HEAVIER for h in heads.heads))),
    "blocks": Lie(_blocks, lambda m: _is_heartbeat(m, lambda beat: len(beat.claims) == MAX_CLAIMS)),
    "weight": Lie(_weight, lambda m: _is_heartbeat(m, lambda beat: beat.weight == HEAVY)),
    "tiny": Lie(_tiny, _is_given),
    "flip": Lie(_flip, _is_given),
    "noise": Lie(_noise, _is_given),
}
