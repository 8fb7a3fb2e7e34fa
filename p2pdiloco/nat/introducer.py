"""State machine of a rendezvous server, without I/O: introduces pairs of peers and decides which pairs are relayed.

    ask(asker, wanted)      issues a ticket to each peer; if the wanted peer refuses the call: ``withdraw``
    handle_opened(line)     a line has sent its ticket; once both lines are open, each peer gets both addresses
    handle_data(line)       once both lines have sent RELAY: ``Joined``, if a relay place is free

Rules of this file:
1. Bytes and times in, events out: no callbacks, no waiting.
2. Everything is bounded: concurrent pairs, in total and per peer; introductions a minute, per asking host and per
   wanted peer; PAIR_S seconds for each pair; one byte at a time from a line. A ticket is valid once.
3. Addresses go only to the two peers, and only after both have opened a line. So no peer is made to dial another one
   that does not expect it.
4. Beyond ``room`` pairs, an asker is refused once for each peer that it wants, so that it tries its other servers. If
   it asks again within AGAIN_S, it has found no better one, and the pair is relayed if a place is free.
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
# Introductions requested from one host: at most 60 in any minute (burst plus rate).
ASKED_BURST, ASKED_PER_S = 20, 40 / 60
# Introductions to one wanted peer: at most 60 in any minute.
CALLED_BURST, CALLED_PER_S = 20, 40 / 60
# Lifetime of a pair, from the introduction to a direct connection or a relay.
PAIR_S = 15.0
# Longer than an asker takes to try all of its servers and to ask again (PeerManager: pauses of up to 30 s).
AGAIN_S = 120.0


class NotIntroducedError(Exception):
    """An introduction is refused; the message gives the reason."""


class Say(Struct, frozen=True):
    """Output: write ``data`` to the line."""

    line: Hashable
    data: bytes


class Hang(Struct, frozen=True):
    """Output: close the line once the data written to it is sent."""

    line: Hashable


class Joined(Struct, frozen=True):
    """Output: relay bytes between the two lines until either ends; then call ``handle_relay_ended``."""

    lines: tuple[Hashable, Hashable]


class _Pair(Struct, eq=False):
    peers: tuple[PeerId, PeerId]
    tickets: tuple[bytes, bytes]
    until: float
    lines: list[Hashable | None]
    hosts: list[tuple[str, int, int]]
    """For each line: observed host, observed port, and the local port that its peer claims."""
    wants_relay: list[bool]


class Introducer:
    """The state machine. ``relays`` is the maximum number of concurrently relayed pairs, ``room`` what there is at
    first."""

    def __init__(self, relays: int, room: int = PAIRS) -> None:
        self._places = relays
        self.room = room
        """Number of relayed pairs for which there is room; the next ones only if they find no other relay."""
        # Pairs, asker first, that were refused for want of room, oldest first, and when.
        self._refused: dict[tuple[PeerId, PeerId], float] = {}
        # Unused tickets: the pair and the side (0 or 1) whose line has not been opened yet.
        self._waiting: dict[bytes, tuple[_Pair, int]] = {}
        self._lines: dict[Hashable, tuple[_Pair, int]] = {}
        # Pairs that are not relayed yet, oldest first, so that the first one expires next.
        self._pairs: dict[_Pair, None] = {}
        self._joined: set[frozenset[Hashable]] = set()
        self._of_peer: Counter[PeerId] = Counter()
        # By the asking host, so that one host with many identities shares one limit.
        self._asked: RateLimiter[str] = RateLimiter(burst=ASKED_BURST, per_s=ASKED_PER_S)
        self._called: RateLimiter[PeerId] = RateLimiter(burst=CALLED_BURST, per_s=CALLED_PER_S)
        self._events: deque[Say | Hang | Joined] = deque()

    @property
    def pairs_most(self) -> int:
        """Number of relayed pairs for which there are room and places, those that are relayed now included."""
        return min(self.room, self._places)

    @property
    def relayed_pairs(self) -> int:
        """Number of pairs that are being relayed."""
        return len(self._joined)

    def ask(self, asker: PeerId, host: str, wanted: PeerId, tickets: tuple[bytes, bytes], now: float) -> None:
        """Introduce ``asker``, connected from ``host``, to ``wanted``. ``tickets``: fresh random bytes for each.

        Raises:
            NotIntroducedError: a limit is reached, or both are the same peer.
        """
        self.wake(now)
        machine = machine_of(host)
        if asker == wanted:
            raise NotIntroducedError("a peer cannot be introduced to itself")
        if self._asked.available(machine, now) < 1.0 or self._called.available(wanted, now) < 1.0:
            raise NotIntroducedError("introduction rate limit reached; retry in one minute")
        if len(self._pairs) >= PAIRS or max(self._of_peer[asker], self._of_peer[wanted]) >= PAIRS_OF_PEER:
            raise NotIntroducedError("too many introductions in progress; retry in a few seconds")
        self._asked.take(machine, now)
        self._called.take(wanted, now)
        pair = _Pair((asker, wanted), tickets, now + PAIR_S, [None, None], [("", 0, 0)] * 2, [False, False])
        self._pairs[pair] = None
        for side in (0, 1):
            self._waiting[tickets[side]] = (pair, side)
            self._of_peer[pair.peers[side]] += 1

    def withdraw(self, ticket: bytes, now: float) -> None:
        """Cancel the introduction with this ticket."""
        self.wake(now)
        if (found := self._waiting.get(ticket)) is not None:
            self._end(found[0])

    def handle_opened(self, line: Hashable, ticket: bytes, host: str, port: int, local_port: int, now: float) -> bool:
        """Handle the ticket of a new line from ``host`` and ``port``, whose peer claims ``local_port``.

        Returns False, and refuses the line, if the ticket is not valid."""
        self.wake(now)
        found = self._waiting.pop(ticket, None)
        if found is None:
            self._refuse(line, "this ticket is invalid or has expired")
            return False
        pair, side = found
        self._lines[line] = found
        pair.lines[side], pair.hosts[side] = line, (host, port, local_port)
        if None not in pair.lines:
            is_hopeful = all(seen == own for _, seen, own in pair.hosts)
            for here, there in ((0, 1), (1, 0)):
                own, other = pair.hosts[here][:2], pair.hosts[there][:2]
                self._events.append(Say(pair.lines[here], encode_seen(Seen(*own, *other, is_hopeful))))
        return True

    def handle_data(self, line: Hashable, data: bytes, now: float) -> None:
        """Handle ``data`` received from the line. Anything but the first RELAY ends the pair."""
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
            self._join(pair, now)

    def handle_closed(self, line: Hashable, now: float) -> None:
        """Handle the end of a line, closed by either side."""
        self.wake(now)
        if (found := self._lines.pop(line, None)) is not None:
            found[0].lines[found[1]] = None
            self._end(found[0])

    def handle_relay_ended(self, lines: tuple[Hashable, Hashable]) -> None:
        """Free the place of a relay that has ended."""
        self._joined.discard(frozenset(lines))

    def next_deadline(self) -> float | None:
        """Return the time at which ``wake`` is due, or None."""
        return next(iter(self._pairs)).until if self._pairs else None

    def wake(self, now: float) -> None:
        """End the pairs that have expired by ``now``."""
        while self._pairs and (pair := next(iter(self._pairs))).until <= now:
            self._end(pair)

    def events(self) -> Iterator[Say | Hang | Joined]:
        """Yield the outputs since the last call, in order."""
        while self._events:
            yield self._events.popleft()

    def _has_room(self, pair: _Pair, now: float) -> bool:
        """Return whether to relay the pair; if not, it may ask again."""
        if len(self._joined) >= self._places:
            return False
        refused_at = self._refused.pop(pair.peers, -AGAIN_S)
        if len(self._joined) < self.room or now - refused_at < AGAIN_S:
            return True
        if len(self._refused) >= PAIRS:
            del self._refused[next(iter(self._refused))]
        self._refused[pair.peers] = now
        return False

    def _join(self, pair: _Pair, now: float) -> None:
        first, second = pair.lines
        assert first is not None
        assert second is not None
        if not self._has_room(pair, now):
            reason = "does not relay" if not self._places else f"relays {len(self._joined)} pairs, and has no room"
            for line in (first, second):
                self._refuse(line, f"this rendezvous server {reason}")
            self._end(pair, hangs=False)
            return
        self._joined.add(frozenset((first, second)))
        self._end(pair, hangs=False)
        self._events += [Say(first, RELAYED), Say(second, RELAYED), Joined((first, second))]

    def _refuse(self, line: Hashable, text: str) -> None:
        self._events += [Say(line, encode_refusal(text)), Hang(line)]

    def _end(self, pair: _Pair, *, hangs: bool = True) -> None:
        """Forget the pair; with ``hangs``, also close its lines."""
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
