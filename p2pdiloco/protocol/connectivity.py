"""Connectivity of each peer as the others report it: where some pairs never connect, the best connected peers own
shards.

Heartbeats tell whom their sender hears, as fingerprints, when that has changed. Rules of this file:
1. Nobody's word for itself is enough: that X reaches Z counts if X says that it hears Z and, where we hear Z ourselves,
   Z says that it hears X.
2. Whom only others hear, *afar*, is believed to be there if tokens of its learner came into the chain of late, under
   its signature; in a run's first versions, always. Else a list of names that nobody bears would make its author owner.
3. The best connected who all hear each other are *fit* to own. Where we do not know whether two meet who are both afar
   we take it that they do, so that nobody takes itself for the best by mistake.
4. Who was fit stays so for a while: when peers come and go, lists differ for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import unpack

from p2pdiloco.protocol.events import Mark
from p2pdiloco.protocol.ids import LearnerId, PeerId, peer_of
from p2pdiloco.protocol.ownership import Candidates

FINGERPRINT_BYTES = 4
SETTLING_BEATS = 8
"""Own heartbeats for which a peer stays fit that is among the best no more: longer than all need to lose the same dead
peer and to say so."""
TOLERANCE = 16
"""Who reaches a sixteenth fewer than the best is as good, so that in a large swarm no few peers do all the work."""
LATELY = 16
"""Versions of shard 0 for which a contribution shows that its giver is there."""


@lru_cache(maxsize=16384)
def fingerprint(peer: PeerId) -> int:
    """Return the number that stands for a peer in lists."""
    return int.from_bytes(blake2b(peer.encode(), digest_size=FINGERPRINT_BYTES).digest(), "big")


def listed(prints: Iterable[int]) -> bytes:
    """Encode a list as heartbeats carry it."""
    return b"".join(one.to_bytes(FINGERPRINT_BYTES, "big") for one in sorted(prints))


def prints_in(data: bytes) -> frozenset[int]:
    """The fingerprints in a list; what is left of a broken one is nobody's."""
    whole = len(data) // FINGERPRINT_BYTES
    return frozenset(unpack(f">{whole}I", data[: whole * FINGERPRINT_BYTES]))


class Connectivity:
    """Which peers hear which, as this peer knows it."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.lists: dict[PeerId, frozenset[int]] = {me: frozenset()}
        """Whom each peer says it hears, this one included. Who has told nothing is taken to hear everybody."""
        self.told_from = 1
        """The first of our heartbeats that carries our list as it is."""
        self._own_list = b""
        """It, as heartbeats carry it."""
        self.givers: frozenset[int] | None = None
        """Whose tokens were merged lately; None: the run is young."""
        self.afar: frozenset[int] = frozenset()
        """Those whom only others hear."""
        self.best: frozenset[int] = frozenset()
        """The best connected, here or afar."""
        self.tiers: dict[PeerId, int] = {}
        """Of those who may own and are not fit: 1 if they hear one of the best, else 2."""
        self._fit: tuple[PeerId, ...] = ()
        """Of those who may own, the best."""
        self._fit_until: dict[PeerId, float] = {}
        self._judged: tuple[object, ...] = ()
        """What ``best`` was found from."""
        self._met_at: dict[PeerId, float] = {}
        """When each peer told a list first."""
        self._changes = 0
        self._version = -1
        """Of shard 0, when ``givers`` was found."""

    # -- lists ---------------------------------------------------------------------------------------------------------

    def update_list(self, peer: PeerId, data: bytes | None, now: float) -> bool:
        """``peer`` says whom it hears (None: as before); True if that is another list."""
        if data is None:
            return False
        prints = prints_in(data)
        self._met_at.setdefault(peer, now)
        if self.lists.get(peer) == prints:
            return False
        self.lists[peer] = prints
        self._changes += 1
        return True

    def update_own_list(self, live: Iterable[PeerId], sequence: int) -> None:
        """Update this peer's own list after it has sent ``sequence`` heartbeats."""
        self.lists[self.me] = prints = frozenset(map(fingerprint, live))
        self._own_list = listed(prints)
        self.told_from = sequence + 1

    def list_for(self, echoed: int) -> bytes | None:
        """Our list for a peer that has seen our heartbeat ``echoed``, unless it has it."""
        return None if echoed >= self.told_from else self._own_list

    def forget(self, peer: PeerId) -> None:
        """The connection has ended."""
        self.lists.pop(peer, None)
        self._fit_until.pop(peer, None)
        self._met_at.pop(peer, None)

    def on_goodbye(self, peer: PeerId) -> frozenset[int]:
        """``peer`` says goodbye: whoever has not noticed hears it no more. Returns it, and whom it heard."""
        gone = frozenset((fingerprint(peer),))
        for other, prints in self.lists.items():
            if gone <= prints:
                self.lists[other] = prints - gone
                self._changes += 1
        return gone | self.lists.get(peer, frozenset())

    def update_givers(self, version: int, marks: Mapping[LearnerId, Mark]) -> None:
        """Shard 0 is at this version."""
        if version == self._version:
            return
        self._version = version
        if version < LATELY:
            self.givers = None
        else:
            recent = (peer_of(learner) for learner, mark in marks.items() if mark.version > version - LATELY)
            self.givers = frozenset(map(fingerprint, recent))

    # -- who reaches whom ----------------------------------------------------------------------------------------------

    def hears(self, peer: PeerId, other: PeerId) -> bool:
        """Whether ``peer`` says that it hears ``other``, or tells nothing."""
        return peer not in self.lists or self.has_listed(peer, other)

    def has_listed(self, peer: PeerId, other: PeerId) -> bool:
        """Whether ``peer`` says that it hears ``other``."""
        return fingerprint(other) in self.lists.get(peer, ())

    def is_afar(self, peer: PeerId) -> bool:
        """Whether a peer that we do not hear is heard by somebody whom we do."""
        return fingerprint(peer) in self.afar

    def forwards_to(self, speaker: PeerId, live: Sequence[PeerId], met_before: float) -> tuple[PeerId, ...]:
        """Of ``live`` those who do not hear ``speaker``, and to whom, of all who hear both, this peer hands on. Who
        came after ``met_before`` may still be about to meet others."""
        found = []
        if self._met_at.get(speaker, met_before) > met_before:
            return ()
        for peer in live:
            if peer == speaker or self.hears(peer, speaker) or self._met_at[peer] > met_before:
                continue
            others = (p for p in live if self.has_listed(p, speaker) and self.has_listed(peer, p))
            if fingerprint(self.me) <= min(map(fingerprint, others), default=1 << 64):
                found.append(peer)
        return tuple(found)

    def judge(self, now: float, live: Sequence[PeerId], willing: Candidates, settling_s: float) -> None:
        """Who is fit to own, of those who may and are here (``willing``, this peer perhaps among them)."""
        found_from = (self._changes, live, willing, self.givers)
        if found_from != self._judged:
            self._judged = found_from
            able = {peer: fingerprint(peer) for peer, _ in willing}
            self._find_best(live, able.values())
            self._fit = tuple(peer for peer, one in able.items() if one in self.best)
        self._fit_until.update(dict.fromkeys(self._fit, now + settling_s))
        self.tiers = {}
        if len(self._fit) < len(willing):
            for peer, _ in willing:
                if now > self._fit_until.get(peer, -1.0):
                    prints = self.lists.get(peer)
                    self.tiers[peer] = 1 if prints is None or prints & self.best else 2

    def _find_best(self, live: Sequence[PeerId], able: Collection[int]) -> None:
        me = fingerprint(self.me)
        here: dict[int, frozenset[int] | None] = {me: self.lists[self.me]}
        for peer in live:  # hears us, whether it has said so or not
            prints = self.lists.get(peer)
            here[fingerprint(peer)] = prints if prints is None or me in prints else prints | {me}
        lists = [prints for prints in here.values() if prints is not None]
        afar = frozenset().union(*lists) - here.keys()
        self.afar = afar = afar if self.givers is None else afar & self.givers
        if not afar and all(prints is None or here.keys() - prints <= {x} for x, prints in here.items()):
            self.best = frozenset(able)
            return
        everybody = afar | here.keys()

        def met_by(x: int) -> set[int]:
            """Whom it meets: both say so, as far as they are here."""
            theirs = here.get(x)
            named = everybody if theirs is None else everybody & theirs
            return {y for y in named if y != x and ((others := here.get(y)) is None or x in others)}

        meets = {x: met_by(x) for x in (*able, *afar)}
        most = max(map(len, meets.values()), default=0)
        enough = [x for x, met in meets.items() if len(met) >= most - most // TOLERANCE]
        best: set[int] = set()
        for x in sorted(enough, key=lambda x: (-len(meets[x]), x)):
            if best <= meets[x]:
                best.add(x)
        self.best = frozenset(best)
