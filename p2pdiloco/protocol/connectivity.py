"""Reachability of each peer as the others report it. Where some pairs never connect, the best connected peers own.

A heartbeat lists the peers that its sender hears, as fingerprints, whenever that list has changed.

Rules of this file:
1. A peer's own claim is not enough. "X reaches Z" counts if X says that it hears Z and, where this peer hears Z, Z says
   that it hears X, or fewer than half of all lists lack X. A minority must not make its victims the worst connected.
2. A peer that only others hear is *indirect*. It is believed to exist if an invite has a place for it here, and tokens
   of its learner, under its signature, were merged recently; in a run's first versions the place is enough. Otherwise a
   peer could become owner by inventing names that it claims to hear.
3. The best connected peers that all hear each other are *fit* to own. Two peers that are both indirect are assumed to
   hear each other, so that no peer takes itself for the best by mistake.
4. A peer that was fit stays fit for a while, because lists differ briefly when peers come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from struct import unpack

from p2pdiloco.protocol.events import Mark
from p2pdiloco.protocol.ids import FINGERPRINT_BYTES, LearnerId, PeerId, fingerprint, peer_of
from p2pdiloco.protocol.ownership import Candidates

SETTLING_BEATS = 8
"""Own heartbeats for which a peer stays fit that is no longer among the best. All peers need less time to lose the same
dead peer and to report that."""
TOLERANCE = 16
"""A peer that reaches a sixteenth fewer than the best is as good, so that large swarms do not rely on a few peers."""
LATELY = 16
"""Versions of shard 0 for which a contribution proves that its peer is there."""


def listed(prints: Iterable[int]) -> bytes:
    """Encode fingerprints as heartbeats carry them: sorted, four bytes each, big-endian."""
    return b"".join(one.to_bytes(FINGERPRINT_BYTES, "big") for one in sorted(prints))


def prints_in(data: bytes) -> set[int]:
    """Decode the fingerprints in a list; an incomplete one at the end is ignored."""
    whole = len(data) // FINGERPRINT_BYTES
    return set(unpack(f">{whole}I", data[: whole * FINGERPRINT_BYTES]))


class Connectivity:
    """Reachability matrix of the swarm as this peer knows it."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.lists: dict[PeerId, set[int]] = {me: set()}
        """Peers that each peer, this one included, says it hears. A peer without a list is assumed to hear all. Only
        ``on_goodbye`` changes a list, since N new lists for each of N goodbyes would take N^3 steps."""
        self.told_from = 1
        """Sequence number of the first own heartbeat that carries the current list."""
        self._own_list = b""
        """The current own list, encoded."""
        self.givers: frozenset[int] | None = None
        """Fingerprints of peers whose tokens were merged recently; None: the run is young."""
        self.admitted: frozenset[int] | None = None
        """Fingerprints of the peers that have a place here; None: every peer has."""
        self.indirect: frozenset[int] = frozenset()
        """Fingerprints of peers that only others hear."""
        self.best: frozenset[int] = frozenset()
        """Fingerprints of the best connected peers, here or indirect."""
        self.tiers: dict[PeerId, int] = {}
        """Candidates that are not fit: 1 if they hear one of the best, else 2."""
        self._fit: tuple[PeerId, ...] = ()
        """Candidates that are among the best."""
        self._fit_until: dict[PeerId, float] = {}
        self._counted: dict[int, set[int]] = {}
        """The lists of this peer and the live ones, by fingerprint, that ``_listed`` counts."""
        self._listed: dict[int, int] = {}
        """How many of these lists have each fingerprint, so that a judgement takes N steps and not N^2."""
        self._judged: tuple[object, ...] = ()
        """Inputs from which ``best`` was computed."""
        self._changes = 0
        self._version = -1
        """Version of shard 0 for which ``givers`` was computed."""

    # -- lists ---------------------------------------------------------------------------------------------------------

    def update_list(self, peer: PeerId, data: bytes | None) -> bool:
        """Store the list that ``peer`` sent (None: unchanged). Return whether it differs from the last one."""
        if data is None:
            return False
        prints = prints_in(data)
        if self.lists.get(peer) == prints:
            return False
        self.lists[peer] = prints
        self._changes += 1
        return True

    def update_own_list(self, live: Iterable[PeerId], sequence: int) -> None:
        """Update this peer's own list after it has sent ``sequence`` heartbeats."""
        self.lists[self.me] = prints = set(map(fingerprint, live))
        self._own_list = listed(prints)
        self.told_from = sequence + 1

    def list_for(self, echoed: int) -> bytes | None:
        """Return the own list for a peer that has seen own heartbeat ``echoed``, or None if it has the list already."""
        return None if echoed >= self.told_from else self._own_list

    def forget(self, peer: PeerId) -> None:
        """Forget a peer whose connection has ended."""
        self.lists.pop(peer, None)
        self._fit_until.pop(peer, None)

    def on_goodbye(self, peer: PeerId) -> frozenset[int]:
        """Remove a peer that says goodbye from all lists. Return its fingerprint and those of the peers it heard."""
        gone = fingerprint(peer)
        for other, prints in self.lists.items():
            if gone in prints:
                prints.discard(gone)
                self._changes += 1
                if self._counted.get(fingerprint(other)) is prints:
                    self._count_once_less(gone)
        return frozenset((gone, *self.lists.get(peer, ())))

    def update_givers(self, version: int, marks: Mapping[LearnerId, Mark]) -> None:
        """Recompute the recent contributors when shard 0 reaches ``version``."""
        if version == self._version:
            return
        self._version = version
        if version < LATELY:
            self.givers = None
        else:
            recent = (peer_of(learner) for learner, mark in marks.items() if mark.version > version - LATELY)
            self.givers = frozenset(map(fingerprint, recent))

    # -- reachability --------------------------------------------------------------------------------------------------

    def judge(
        self, now: float, live: Sequence[PeerId], willing: Candidates, settling_s: float, far: Sequence[PeerId] = ()
    ) -> None:
        """Determine which of the candidates ``willing`` are fit to own. ``far``: live peers that are not judged."""
        found_from = (self._changes, live, willing, self.givers, self.admitted, far)
        if found_from != self._judged:
            self._judged = found_from
            able = {peer: fingerprint(peer) for peer, _ in willing}
            self._find_best(live, able.values(), set(map(fingerprint, far)))
            self._fit = tuple(peer for peer, one in able.items() if one in self.best)
        self._fit_until.update(dict.fromkeys(self._fit, now + settling_s))
        self.tiers = {}
        if len(self._fit) < len(willing):
            for peer, _ in willing:
                if now > self._fit_until.get(peer, -1.0):
                    prints = self.lists.get(peer)
                    self.tiers[peer] = 1 if prints is None or prints & self.best else 2

    def _find_best(self, live: Sequence[PeerId], able: Collection[int], far: Set[int]) -> None:
        me = fingerprint(self.me)
        here = {fingerprint(peer): self.lists.get(peer) for peer in (self.me, *live)}
        self._count({x: prints for x, prints in here.items() if prints is not None})
        indirect = frozenset(self._listed.keys() - here.keys() - far)
        for believed in (self.givers, self.admitted):
            indirect = indirect if believed is None else indirect & believed
        self.indirect = indirect
        # A live peer hears this one, whether its list says so or not.
        lacking = {y: lists for y in (*indirect, *here) if y != me and (lists := self._lacking(y))}
        apart = _apart(lacking, self._counted)
        fewest = min((len(apart.get(x, ())) for x in (*able, *indirect)), default=0)
        bearable = fewest + (len(here) + len(indirect) - 1 - fewest) // TOLERANCE
        enough = [x for x in (*able, *indirect) if len(apart.get(x, ())) <= bearable]
        best: set[int] = set()
        for x in sorted(enough, key=lambda x: (len(apart.get(x, ())), x)):
            if best.isdisjoint(apart.get(x, ())):
                best.add(x)
        self.best = frozenset(best)

    def _count(self, lists: dict[int, set[int]]) -> None:
        """Count ``lists`` in ``_listed`` instead of those that were counted before."""
        nobody = set[int]()
        for x in self._counted.keys() | lists.keys():
            old, new = self._counted.get(x, nobody), lists.get(x, nobody)
            if old is not new:
                for y in new - old:
                    self._listed[y] = self._listed.get(y, 0) + 1
                for y in old - new:
                    self._count_once_less(y)
        self._counted = lists

    def _count_once_less(self, y: int) -> None:
        self._listed[y] -= 1
        if not self._listed[y]:
            del self._listed[y]

    def _lacking(self, y: int) -> int:
        """Return how many of the counted lists, without its own, lack ``y``."""
        own = self._counted.get(y)
        others = self._listed.get(y, 0) - (own is not None and y in own)
        return len(self._counted) - (own is not None) - others


def _apart(lacking: Mapping[int, int], lists: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Return, for each peer, the peers that it does not meet; nothing for a peer that meets all.

    Two peers meet if each of them lists the other. A peer without a list is assumed to hear all. A peer whose own list
    has those that lack it meets them, too, if they are a minority. ``lacking``: how many lists lack a peer, if any do.
    """
    apart: dict[int, set[int]] = {}
    for x, prints in lists.items():
        if unheard := lacking.keys() - prints - {x}:
            apart.setdefault(x, set()).update(unheard)
            for y in unheard:
                if y not in lists or 2 * lacking[y] >= len(lists):
                    apart.setdefault(y, set()).add(x)
    return apart
