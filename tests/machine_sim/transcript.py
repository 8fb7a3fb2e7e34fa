"""A run told in lines that a person can read: what each peer was told, and what it answered.

One line for each event, one indented line for each effect. Digests are cut to six digits. The descriptions serve
journals of real peers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg

if TYPE_CHECKING:
    from tests.machine_sim.process import Process

ROUTINE = (ev.Woke, ev.Stepped)
"""Told only if they have an effect worth telling."""


class Transcript:
    """Lines, as a run writes them."""

    def __init__(self, *, is_full: bool = True) -> None:
        self.lines: list[str] = []
        self.is_full = is_full
        """Details, and steps and wake-ups without effect, too."""

    def say(self, line: str) -> None:
        """A line of the world's own."""
        self.lines.append(f"-- {line}")

    def write(self, process: Process, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        """What ``process`` was told, and what it answers."""
        self.lines.extend(tell(process.world.now, process.name, event, effects, is_full=self.is_full))


def tell(now: float, peer: str, event: ev.Event, effects: Sequence[ef.Effect], *, is_full: bool) -> list[str]:
    """One event and its effects; without heartbeats, notes for debugging, audits that are only drawn, and what has no
    effect, unless ``is_full``."""
    told = [f"{'':12}{describe_effect(effect)}" for effect in effects if is_full or not _is_detail(effect)]
    is_routine = isinstance(event, ROUTINE) or (
        isinstance(event, ev.Received) and isinstance(event.message, msg.Heartbeat)
    )
    if is_routine and not told and not is_full:
        return []
    return [f"{now:8.3f} {peer}: {describe_event(event)}", *told]


def _is_detail(effect: ef.Effect) -> bool:
    """Whether no decision of the protocol is in it."""
    match effect:
        case ef.Send():
            return isinstance(effect.message, msg.Heartbeat)
        case ef.Note():
            return effect.level == "debug"
        case _:
            return isinstance(effect, ef.Audit)


def describe_event(event: ev.Event) -> str:
    """One line."""
    match event:
        case ev.Received():
            return f"from {event.peer}: {describe_message(event.message)}"
        case ev.Started():
            return f"started with {', '.join(head_text(s.head) for s in event.shards) or 'nothing'}"
        case ev.PeerConnected():
            return f"connected to {event.peer}"
        case ev.PeerDisconnected():
            return f"lost the connection to {event.peer}: {event.reason}"
        case ev.Stepped():
            return f"step {event.steps}, {event.tokens} tokens"
        case ev.Snapshotted():
            return f"snapshot of fragment {event.fragment} for round {event.step} at {event.tokens} tokens"
        case ev.Encoded():
            return f"encoded shard {event.shard} on {event.base[:6]}: payload {event.contributor.payload.hex()[:6]}"
        case ev.Merged():
            return f"merged shard {event.shard} on {event.base[:6]}: payload {event.payload[:6]}"
        case ev.Applied():
            return f"applied shard {event.shard}: now {event.head[:6]}"
        case ev.Fetched():
            return f"fetched {head_text(event.state.head)} from {event.peer}"
        case ev.Failed():
            return f"{event.work} of shard {event.shard} failed: {event.reason}"
        case _:
            return _fields(event)


def describe_message(message: msg.Message) -> str:
    """One line."""
    match message:
        case msg.Heartbeat():
            return f"heartbeat {message.sequence} ({message.phase}, step {message.step})"
        case msg.Round():
            heads = ", ".join(head_text(head) for head in message.heads)
            return f"round of fragment {message.fragment}, step {message.step}; heads: {heads}"
        case msg.Contribution():
            return f"contribution to shard {message.shard} on {head_text(message.base)}: {_range(message.contributor)}"
        case msg.Refused():
            return f"refused for shard {message.shard}: {message.reason}; head {head_text(message.head)}"
        case msg.Commit():
            return f"commit {header_text(message.header)}"
        case msg.HeadsRequest():
            return "heads?"
        case msg.Heads():
            return f"heads {', '.join(head_text(head) for head in message.heads)}"
        case msg.CommitsRequest():
            return f"commits of shard {message.shard} after {message.head[:6]}?"
        case msg.WrongMerge():
            return f"wrong merge: {header_text(message.header)}"
        case msg.FetchAdvised():
            return f"fetch shard {message.shard} instead: {head_text(message.head)}"
        case _:
            return _fields(message)


def describe_effect(effect: ef.Effect) -> str:
    """One line."""
    match effect:
        case ef.Send():
            return f"to {', '.join(effect.peers)}: {describe_message(effect.message)}"
        case ef.Note():
            return f"({effect.topic}: {effect.reason})"
        case ef.Snapshot():
            return f"snapshot fragment {effect.fragment} for round {effect.step}"
        case ef.Encode():
            return f"encode shard {effect.shard} on {effect.base.id[:6]}: {_range(effect.contributor)}"
        case ef.Merge():
            ranges = ", ".join(_range(c.contributor) for c in effect.contributions)
            return f"merge shard {effect.shard} on {effect.base.id[:6]}: {ranges}"
        case ef.Apply():
            return f"apply {header_text(effect.header)}{_carry(effect)}"
        case ef.Install():
            return f"install {head_text(effect.state.head)}{_carry(effect)}"
        case ef.Fetch():
            return f"fetch shard {effect.shard} from {effect.peer}"
        case ef.Audit():
            return f"audit {effect.commit[:6]} of shard {effect.shard} with a chance of {effect.chance:.3g}"
        case ef.AdoptStep():
            return f"adopt step: {effect.step}{f', {effect.tokens} tokens merged' if effect.tokens else ''}"
        case _:
            return _fields(effect)


def head_text(head: msg.Head) -> str:
    """``s0v3 4f2a10 (120 tokens)``."""
    return f"s{head.shard}v{head.version} {head.id[:6]} ({head.tokens} tokens)"


def header_text(header: msg.CommitHeader) -> str:
    """A commit without its payload."""
    ranges = ", ".join(_range(c) for c in header.contributors)
    return (
        f"s{header.shard}v{header.version} {msg.commit_id(header)[:6]} on {header.parent[:6]} by {header.owner} "
        f"({header.tokens} tokens): {ranges}"
    )


def _range(contributor: msg.Contributor) -> str:
    return f"{contributor.learner} {contributor.tokens_from}..{contributor.tokens_to}"


def _carry(effect: ef.Apply | ef.Install) -> str:
    settled = "".join(f", settles {digest[:6]}" for digest in effect.settled)
    restored = "".join(f", restores {digest[:6]}" for digest in effect.restored)
    return settled + restored + (", resets the learner" if effect.is_reset else "")


def _fields(thing: Any) -> str:
    """Name and fields of a small struct."""
    name = type(thing).__name__
    words = "".join(f" {c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
    values = ", ".join(str(getattr(thing, field)) for field in thing.__struct_fields__)
    return f"{words}: {values}" if values else words
