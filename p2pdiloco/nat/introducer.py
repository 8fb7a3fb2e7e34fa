"""A meeting point's side of introductions, without I/O: who is introduced to whom, and what is said on their lines.

    ask(asker, wanted)  ->  a ticket for each            the wanted one is called, and says no: ``withdraw``
    opened(line)        when a line has shown a ticket   both there: each is told of both (nat/messages.py)
    received(line)      RELAY from both: Joined, if a place is free

Rules of this file:
1. Bytes and times in, events out: nobody is called, nothing waits.
2. Bounded whatever anybody does: pairs at once, in all and of a peer; introductions a minute, of a machine and of
   whoever is called; PAIR_S seconds for each pair; a byte at a time from a line. A ticket serves once.
3. An address is told to nobody but the two, and only after both have opened a line: nobody is made to dial whom he does
   not expect, or who does not expect him.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator

from msgspec import Struct

from p2pdiloco.nat.messages import RELAY, RELAYED, Seen, encode_refusal, encode_seen
from p2pdiloco.net.abuse_limits import machine_of
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.timing import RateLimiter

PAIRS = 256
PAIRS_OF_PEER = 8
ASKED_BURST, ASKED_PER_S = 20, 40 / 60
"""Introductions that peers of one machine get: never more than 60 in a minute."""
CALLED_BURST, CALLED_PER_S = 20, 40 / 60
"""Introductions to one peer: never more than 60 in a minute."""
PAIR_S = 15.0
"""From the introduction to a direct connection, or to the relay."""


class NotIntroducedError(Exception):
    """There will be no introduction; the text says why."""


class Say(Struct, frozen=True):
    """Write this to the line."""

    line: Hashable
    data: bytes


class Hang(Struct, frozen=True):
    """Close the line, after what was said."""

    line: Hashable


class Joined(Struct, frozen=True):
    """Carry bytes between the two from now on, until either ends; then say ``parted``."""

    lines: tuple[Hashable, Hashable]


class _Pair(Struct, eq=False):
    peers: tuple[PeerId, PeerId]
    tickets: tuple[bytes, bytes]
    until: float
    lines: list[Hashable | None]
    hosts: list[tuple[str, int, int]]
    """As seen: host, port, and the port that the line says it has."""
    wants_relay: list[bool]


class Introducer:
    """See the module's rules. ``relays``: pairs that may be joined at once."""

    def __init__(self, relays: int) -> None:
        self._places = relays
        self._waiting: dict[bytes, tuple[_Pair, int]] = {}
        """By ticket: the pair and which of the two; until its line is there."""
        self._lines: dict[Hashable, tuple[_Pair, int]] = {}
        self._pairs: dict[_Pair, None] = {}
        """Not joined yet, oldest first."""
        self._joined: set[frozenset[Hashable]] = set()
        self._of_peer: Counter[PeerId] = Counter()
        self._asked: RateLimiter[str] = RateLimiter(burst=ASKED_BURST, per_s=ASKED_PER_S)
        """By machine of the asker."""
        self._called: RateLimiter[PeerId] = RateLimiter(burst=CALLED_BURST, per_s=CALLED_PER_S)
        self._events: deque[Say | Hang | Joined] = deque()
        self.introduced = 0

    @property
    def joined(self) -> int:
        """Pairs that are carried now."""
        return len(self._joined)

    def ask(
        self, asker: PeerId, host: str, wanted: PeerId, tickets: tuple[bytes, bytes], now: float
    ) -> tuple[bytes, bytes]:
        """Introduce ``asker``, which comes from ``host``, to ``wanted``. ``tickets``: fresh random bytes, for each.

        Raises:
            NotIntroducedError: too many of something.
        """
        self.wake(now)
        machine = machine_of(host)
        if asker == wanted:
            raise NotIntroducedError("that is you")
        if self._asked.available(machine, now) < 1.0 or self._called.available(wanted, now) < 1.0:
            raise NotIntroducedError("too many introductions; try again in a minute")
        if len(self._pairs) >= PAIRS or max(self._of_peer[asker], self._of_peer[wanted]) >= PAIRS_OF_PEER:
            raise NotIntroducedError("too many introductions at once; try again in some seconds")
        self._asked.take(machine, now)
        self._called.take(wanted, now)
        pair = _Pair((asker, wanted), tickets, now + PAIR_S, [None, None], [("", 0, 0)] * 2, [False, False])
        self._pairs[pair] = None
        for side in (0, 1):
            self._waiting[tickets[side]] = (pair, side)
            self._of_peer[pair.peers[side]] += 1
        return tickets

    def withdraw(self, ticket: bytes, now: float) -> None:
        """Nothing comes of that introduction."""
        self.wake(now)
        if (found := self._waiting.get(ticket)) is not None:
            self._end(found[0])

    def opened(self, line: Hashable, ticket: bytes, host: str, port: int, local_port: int, now: float) -> bool:
        """A line has shown its ticket; it comes from ``host`` and ``port``, and says that it has ``local_port``.
        False: the ticket is not good, and the line is refused."""
        self.wake(now)
        found = self._waiting.pop(ticket, None)
        if found is None:
            self._refuse(line, "this ticket is not, or no longer, good")
            return False
        pair, side = found
        self._lines[line] = found
        pair.lines[side], pair.hosts[side] = line, (host, port, local_port)
        if None not in pair.lines:
            self.introduced += 1
            is_hopeful = all(seen == own for _, seen, own in pair.hosts)
            for here, there in ((0, 1), (1, 0)):
                own, other = pair.hosts[here][:2], pair.hosts[there][:2]
                self._events.append(Say(pair.lines[here], encode_seen(Seen(*own, *other, is_hopeful))))
        return True

    def received(self, line: Hashable, data: bytes, now: float) -> None:
        """The line said ``data``."""
        self.wake(now)
        found = self._lines.get(line)
        if found is None:
            return
        pair, side = found
        if data != RELAY or None in pair.lines or pair.wants_relay[side]:
            self._end(pair)
            return
        pair.wants_relay[side] = True
        if all(pair.wants_relay):
            self._join(pair)

    def closed(self, line: Hashable, now: float) -> None:
        """The line is gone, by whomever."""
        self.wake(now)
        if (found := self._lines.pop(line, None)) is not None:
            found[0].lines[found[1]] = None
            self._end(found[0])

    def parted(self, lines: tuple[Hashable, Hashable]) -> None:
        """Nothing is carried between the two any more."""
        self._joined.discard(frozenset(lines))

    def next_deadline(self) -> float | None:
        """When ``wake`` is due."""
        return next(iter(self._pairs)).until if self._pairs else None

    def wake(self, now: float) -> None:
        """Time has passed."""
        while self._pairs and (pair := next(iter(self._pairs))).until <= now:
            self._end(pair)

    def events(self) -> Iterator[Say | Hang | Joined]:
        """What is to be done, in order."""
        while self._events:
            yield self._events.popleft()

    def _join(self, pair: _Pair) -> None:
        first, second = pair.lines
        assert first is not None
        assert second is not None
        if len(self._joined) >= self._places:
            reason = "relays nothing" if not self._places else f"relays {self._places} pairs already"
            for line in (first, second):
                self._refuse(line, f"this meeting point {reason}")
            self._end(pair, hangs=False)
            return
        self._joined.add(frozenset((first, second)))
        self._end(pair, hangs=False)
        self._events += [Say(first, RELAYED), Say(second, RELAYED), Joined((first, second))]

    def _refuse(self, line: Hashable, text: str) -> None:
        self._events += [Say(line, encode_refusal(text)), Hang(line)]

    def _end(self, pair: _Pair, *, hangs: bool = True) -> None:
        """Forget it, and close what lines it has."""
        if pair not in self._pairs:
            return
        del self._pairs[pair]
        for side in (0, 1):
            self._waiting.pop(pair.tickets[side], None)
            self._of_peer[pair.peers[side]] -= 1
            if not self._of_peer[pair.peers[side]]:
                del self._of_peer[pair.peers[side]]
            if (line := pair.lines[side]) is not None:
                self._lines.pop(line, None)
                if hangs:
                    self._events.append(Hang(line))
