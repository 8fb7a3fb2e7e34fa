"""Peers that lie: some of their messages are changed on their way out into anything that is well formed.

Rules of this file:
1. A lie is a real message with one or more fields changed, often to an extreme, or an earlier message of anybody. What
   would not decode is not sent: honest peers drop it before the machine hears of it.
2. A signature is a value that only its peer can make: a liar signs whatever it says of itself, and nothing in another's
   name. What does not bear its signatures, or comes with another payload than it names, goes no further: the driver's
   checks are taken as given.
3. A commit's values are the merge of the contributions that it names, or such as no step gives, which drivers notice:
   what lies between, nothing proves.
4. All is demanded that is demanded without liars; only of what liars said of themselves nothing.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import msgspec

from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import (
    Commit,
    CommitHeader,
    Contribution,
    Contributor,
    Equivocation,
    GroupMerge,
    Heads,
    Message,
    commit_id,
    part_as_one,
)
from tests.machine_sim.integer_shards import Payload, merged, payload_digest

REMEMBERED = 200
EXTREMES = (0, 1, 2, 1000, 2**20, 2**40, 2**55, 2**56)
PHASES = ("joining", "training", "following", "finished", "done", "leaving")
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
        self.given: set[tuple[ShardId, Digest, Contributor]] = set()
        """Contributions that their learners' peers signed, by shard and the head that they are relative to."""
        self.groups: set[tuple[ShardId, Digest, GroupMerge]] = set()
        """Groups' merges that their collectors signed, in the same way."""
        self.payloads: dict[bytes, Payload] = {}
        """Theirs."""
        self.told = 0
        self.refused = 0
        """Of lies, those that did not bear the signatures that they need."""

    def signs(self, name: PeerId, shard: ShardId, base: Digest, given: Contributor, payload: Payload) -> None:
        """``name`` gives this to the shard's next version."""
        assert peer_of(given.learner) == name
        self.given.add((shard, base, given))
        self.payloads[given.payload] = payload

    def said(self, name: str, message: Message, lies: float) -> list[Message]:
        """What ``name`` sends instead of ``message``; ``lies`` is the share that it changes."""
        self.heard.append(message)
        said = [message]
        if lies and self.random.random() < lies:
            lie = self.lie(message)
            said = [message, lie] if self.random.random() < 0.5 else [lie]
            self.told += 1
        for one in said:
            self._sign(name, one)
        return said

    def _sign(self, name: str, message: Message) -> None:
        """Whatever is said in the speaker's own name bears its signature."""
        match message:
            case Contribution(shard=shard, base=base, group=GroupMerge() as group):
                if group.collector == name:
                    self.groups.add((shard, base.id, group))
                    own = (c for c in group.contributors if peer_of(c.learner) == name)
                    self.given.update((shard, base.id, c) for c in own)
            case Contribution(shard=shard, base=base, contributor=mine) if peer_of(mine.learner) == name:
                self.given.add((shard, base.id, mine))
            case Commit(header=header) if header.owner == name:
                self.signed.add(commit_id(header))
                own = (c for c in header.contributors if peer_of(c.learner) == name)
                self.given.update((header.shard, header.parent, c) for c in own)
                merges = (group for group in header.groups() if group.collector == name)
                self.groups.update((header.shard, header.parent, group) for group in merges)
            case _:
                pass

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
            except (ValueError, OverflowError):
                continue
        return lie

    def is_passed(self, message: Message) -> bool:
        """Whether the receiver's driver hands it on."""
        match message:
            case Contribution(group=GroupMerge() as group):
                shard, base = message.shard, message.base.id
                is_sound = (shard, base, group) in self.groups and message.contributor == part_as_one(group)
                is_sound = is_sound and all((shard, base, c) in self.given for c in group.contributors)
                is_sound = is_sound and message.payload == self._merged(shard, base, group.contributors)
            case Contribution() if message.payload:
                is_sound = (message.shard, message.base.id, message.contributor) in self.given
            case Commit(header=header):
                is_signed = commit_id(header) in self.signed
                is_given = all((header.shard, header.parent, c) in self.given for c in header.contributors)
                are_merged = all((header.shard, header.parent, group) in self.groups for group in header.groups())
                is_sound = is_signed and is_given and are_merged and self._is_merged(header)
            case Equivocation(first=first, second=second):
                is_sound = {commit_id(first), commit_id(second)} <= self.signed
            case _:
                return True
        self.refused += not is_sound
        return is_sound

    def _merged(self, shard: ShardId, base: Digest, contributors: tuple[Contributor, ...]) -> Digest:
        given = [self.payloads.get(c.payload, ()) for c in contributors]
        return payload_digest(shard, base, merged(given))

    def _is_merged(self, header: CommitHeader) -> bool:
        """Whether its payload is that of the contributions that it names, or such as everybody refuses (rules V)."""
        given = [self.payloads.get(c.payload, ()) for c in header.contributors]
        payloads = (merged(given), merged(given, is_wild=True))
        return header.payload in (payload_digest(header.shard, header.parent, payload) for payload in payloads)

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
