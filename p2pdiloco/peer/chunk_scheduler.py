"""Chunk scheduler: decides which chunk of a state is requested from which donor.

Every chunk of the shards that are being fetched is wanted until it has arrived. Each donor is kept busy with as many
bytes as it delivers in ``AHEAD_S``. Donors thus share the load by their measured rates, whatever limits them.

Rules of this file:
1. Pure: time is a parameter, and nothing depends on hash order.
2. A donor first serves the shards that it offered, because it keeps copies of those for us. Other donors are asked for
   the rest. A donor that does not have a shard is not asked for it again.
3. A chunk is requested from a second donor only when the first is overdue: after OVERDUE times the expected time, or,
   when no shards follow, if an idle donor would deliver it in an eighth of the time left. It is never requested from a
   third.
4. Dropping a donor (disconnected, or caught with wrong data) costs only what was requested from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from p2pdiloco.protocol.ids import PeerId, ShardId

# Longer than a round trip on nearly any path, plus the time that a busy donor needs to react.
AHEAD_S = 0.3
# Fewer than a peer answers at once (``ConnectionLimits.answers``).
AHEAD_LEAST_CHUNKS, AHEAD_MOST_CHUNKS = 2, 12
# Assumed bytes per second of a donor that has delivered nothing yet.
FIRST_RATE = 1e6
SMOOTHING = 0.25
OVERDUE = 4.0
OVERDUE_LEAST_S = 2.0
HURRY = 8.0


class Piece(NamedTuple):
    """One chunk of one shard."""

    shard: ShardId
    chunk: int


class Ask(NamedTuple):
    """One request: which chunk, from which donor."""

    piece: Piece
    donor: PeerId


class _Donor(Struct, eq=False):
    """State of one donor."""

    rate: float | None = None
    last_at: float = float("-inf")
    """Time of the last delivery from this donor."""
    asked: dict[Piece, float] = {}
    """Outstanding requests with the time of each, oldest first."""


class _Shard(Struct, eq=False):
    """One shard that is being fetched."""

    sizes: Sequence[int]
    offered_by: PeerId
    wanted: dict[int, None]
    """Chunks that have not arrived, in order."""
    unable: set[PeerId] = set()


class ChunkPlan:
    """Plans the requests for all shards that are being fetched, by the rules of this module."""

    def __init__(self) -> None:
        self._donors: dict[PeerId, _Donor] = {}
        self._shards: dict[ShardId, _Shard] = {}

    @property
    def is_idle(self) -> bool:
        """True if nothing is wanted."""
        return not self._shards

    def rates(self) -> dict[PeerId, float]:
        """Return the bytes per second of each donor that has delivered something."""
        return {peer: donor.rate for peer, donor in self._donors.items() if donor.rate is not None}

    def begin(self, shard: ShardId, sizes: Sequence[int], offered_by: PeerId) -> None:
        """Start fetching all chunks of ``shard``; ``sizes`` are their bytes. The peer ``offered_by`` keeps a copy for
        us."""
        self._shards[shard] = _Shard(sizes, offered_by, dict.fromkeys(range(len(sizes))))

    def end(self, shard: ShardId) -> list[Ask]:
        """Stop fetching ``shard``; return the requests to cancel."""
        self._shards.pop(shard, None)
        return self._withdraw(lambda piece: piece.shard == shard)

    def add(self, peer: PeerId) -> None:
        """Add a donor that may have what is wanted. A known donor keeps its rate."""
        self._donors.setdefault(peer, _Donor())

    def drop(self, peer: PeerId) -> list[Ask]:
        """Remove a donor and return its requests, which are to be cancelled. Their chunks are requested from others."""
        donor = self._donors.pop(peer, None)
        return [] if donor is None else [Ask(piece, peer) for piece in donor.asked]

    def can_end(self, shard: ShardId) -> bool:
        """Return whether any donor is left that may have ``shard``."""
        return bool(self._donors.keys() - self._shards[shard].unable)

    def arrived(self, ask: Ask, now: float) -> list[Ask]:
        """Record a chunk that arrived and was verified; return the requests to cancel."""
        donor, shard = self._donors.get(ask.donor), self._shards.get(ask.piece.shard)
        size = shard.sizes[ask.piece.chunk] if shard is not None else 0
        if shard is not None:
            shard.wanted.pop(ask.piece.chunk, None)
        if donor is not None and (asked_at := donor.asked.pop(ask.piece, None)) is not None:
            rate = size / max(now - max(asked_at, donor.last_at), 1e-3)
            donor.rate = rate if donor.rate is None else donor.rate + SMOOTHING * (rate - donor.rate)
            donor.last_at = now
        return self._withdraw(lambda piece: piece == ask.piece)

    def failed(self, ask: Ask, *, is_unable: bool) -> None:
        """Record a failed request. ``is_unable``: this donor does not have the shard."""
        donor, shard = self._donors.get(ask.donor), self._shards.get(ask.piece.shard)
        if donor is not None:
            donor.asked.pop(ask.piece, None)
        if shard is not None and is_unable:
            shard.unable.add(ask.donor)

    def next(self, now: float, *, is_ending: bool) -> list[Ask]:
        """Return the requests to send now. Donors that will be idle first come first. ``is_ending``: no shards
        follow."""
        asks: list[Ask] = []
        while (ask := self._next(now, is_ending=is_ending)) is not None:
            self._donors[ask.donor].asked[ask.piece] = now
            asks.append(ask)
        return asks

    def _next(self, now: float, *, is_ending: bool) -> Ask | None:
        for peer in self._by_load():
            if (ask := self._next_of(peer, now, is_ending=is_ending)) is not None:
                return ask
        return None

    def _by_load(self) -> list[PeerId]:
        """Return the donors that can take more requests, the one that will be idle first in front."""
        free = [peer for peer, donor in self._donors.items() if self._has_room(donor)]
        return sorted(free, key=lambda peer: (self._left_s(self._donors[peer]), peer))

    def _has_room(self, donor: _Donor) -> bool:
        if len(donor.asked) < AHEAD_LEAST_CHUNKS:
            return True
        rate = donor.rate or FIRST_RATE
        return len(donor.asked) < AHEAD_MOST_CHUNKS and self._asked_bytes(donor) < rate * AHEAD_S

    def _next_of(self, peer: PeerId, now: float, *, is_ending: bool) -> Ask | None:
        able = [(number, shard) for number, shard in self._shards.items() if peer not in shard.unable]
        able.sort(key=lambda item: item[1].offered_by != peer)
        asked = self._asked_times()
        for number, shard in able:
            for chunk in shard.wanted:
                piece = Piece(number, chunk)
                if piece not in asked:
                    return Ask(piece, peer)
        for number, shard in able:
            for chunk in shard.wanted:
                piece = Piece(number, chunk)
                if len(asked[piece]) == 1 and self._is_late(piece, asked[piece][0], peer, now, is_ending=is_ending):
                    return Ask(piece, peer)
        return None

    def _asked_times(self) -> dict[Piece, list[PeerId]]:
        asked: dict[Piece, list[PeerId]] = {}
        for peer, donor in self._donors.items():
            for piece in donor.asked:
                asked.setdefault(piece, []).append(peer)
        return asked

    def _is_late(self, piece: Piece, holder: PeerId, other: PeerId, now: float, *, is_ending: bool) -> bool:
        """Return whether to request ``piece``, which ``holder`` was asked for, from ``other`` too. Called when
        ``other`` has nothing else to do."""
        donor, helper = self._donors[holder], self._donors[other]
        if holder == other:
            return False
        waited_s = now - max(donor.asked[piece], donor.last_at)
        promised_s = self._left_s(donor)
        if waited_s > max(OVERDUE_LEAST_S, OVERDUE * promised_s):
            return True
        if not is_ending or helper.rate is None or helper.asked:
            return False
        return promised_s - waited_s > HURRY * self._shards[piece.shard].sizes[piece.chunk] / helper.rate

    def _left_s(self, donor: _Donor) -> float:
        """Return the expected seconds until this donor has delivered all that it was asked for."""
        return self._asked_bytes(donor) / (donor.rate or FIRST_RATE)

    def _asked_bytes(self, donor: _Donor) -> int:
        return sum(self._shards[p.shard].sizes[p.chunk] for p in donor.asked if p.shard in self._shards)

    def _withdraw(self, matches: Callable[[Piece], bool]) -> list[Ask]:
        found = [Ask(piece, peer) for peer, donor in self._donors.items() for piece in donor.asked if matches(piece)]
        for ask in found:
            del self._donors[ask.donor].asked[ask.piece]
        return found
