"""Peers that lie: some of their messages are changed on their way out into anything that is well formed.

Rules of this file:
1. A lie is a real message with one or more fields changed, often to an extreme, or an earlier message of anybody. What
   would not decode is not sent: honest peers drop it before the machine hears of it.
2. So are commits that do not bear their owner's signature, and payloads that are not what was announced: the driver's
   checks are taken as given.
3. Without signed contributions a lie within the bounds is believed (docs/protocol.md, P). What is demanded of honest
   peers is that nothing breaks, the run does not end, versions go on, and heads become equal.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import msgspec

from p2pdiloco.protocol.identifiers import Digest
from p2pdiloco.protocol.messages import Commit, Contribution, Heads, Message, commit_id

REMEMBERED = 200
EXTREMES = (0, 1, 2, 1000, 2**20, 2**40, 2**55, 2**56)
PHASES = ("joining", "training", "following", "finished", "leaving")
KEPT = frozenset({"payload", "payload_bytes"})
"""Fields that the driver compares with what came."""
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Liars:
    """All lies of one world."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"lies {seed}")
        self.heard: deque[Message] = deque(maxlen=REMEMBERED)
        self.signed: set[Digest] = set()
        """Commits by whose owner they were sent."""
        self.told = 0
        self.believed = 0
        """What would be a violation, were all peers honest."""

    def said(self, name: str, message: Message, lies: float) -> list[Message]:
        """What ``name`` sends instead of ``message``; ``lies`` is the share that it changes."""
        self.heard.append(message)
        said = [message]
        if lies and self.random.random() < lies:
            lie = self.lie(message)
            said = [message, lie] if self.random.random() < 0.5 else [lie]
            self.told += 1
        for one in said:
            if isinstance(one, Commit) and one.header.owner == name:
                self.signed.add(commit_id(one.header))
        return said

    def lie(self, message: Message) -> Message:
        """``message``, changed; what cannot be changed into something well formed stays as it is."""
        random = self.random
        if random.random() < 0.1:
            earlier = random.choice(self.heard)
            return message if isinstance(earlier, Commit | Contribution) else earlier
        if random.random() < 0.1 and not isinstance(message, Commit | Contribution):
            return Heads((), random.choice(EXTREMES))
        lie: Message = message
        for _ in range(random.choice((1, 1, 2, 4))):
            try:
                lie = _decoder.decode(msgspec.msgpack.encode(self._changed(lie)))
            except (msgspec.ValidationError, OverflowError):
                continue
        return lie

    def is_passed(self, message: Message) -> bool:
        """Whether the receiver's driver hands it on."""
        return not isinstance(message, Commit) or commit_id(message.header) in self.signed

    def _changed(self, value: Any) -> Any:
        """Another value of the same kind."""
        random = self.random
        match value:
            case bool():
                return not value
            case int():
                return max(0, random.choice((*EXTREMES, value + 1, value - 1, 2 * value)))
            case float():
                return random.choice((0.0, 1e-9, 1.0, 1e6, 1e9, 2.0 * value))
            case str():
                return random.choice((value[::-1], *PHASES))
            case tuple():
                return self._changed_items(value)
            case msgspec.Struct():
                names = [name for name in value.__struct_fields__ if name not in KEPT]
                if not names:
                    return value
                name = random.choice(names)
                return msgspec.structs.replace(value, **{name: self._changed(getattr(value, name))})
            case _:
                return value

    def _changed_items(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        random = self.random
        if not items:
            return items
        at = random.randrange(len(items))
        how = random.choice(("change", "change", "drop", "twice", "turn round"))
        match how:
            case "change":
                return (*items[:at], self._changed(items[at]), *items[at + 1 :])
            case "drop":
                return (*items[:at], *items[at + 1 :])
            case "twice":
                return (*items, items[at])
            case _:
                return items[::-1]
