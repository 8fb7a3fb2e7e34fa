"""Participation: the peers that each rule counts, asks or waits for.

The questions are about one shard. Every peer holds all shards. In a large run a peer knows its group (``groups``) and a
few peers of each other: who votes is a sample of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.groups import drawn_groups, group_of
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId, peer_of
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.ownership import Candidates, ranked_owners


class ThisPeer(Protocol):
    """This peer's own part in the run (``Core``)."""

    @property
    def departure(self) -> str:
        """How it leaves: empty, "leaving" or "finished"."""
        ...

    def is_participating(self) -> bool:
        """Return whether its learner can contribute."""
        ...


class Participation:
    """The peers that take part in a shard, as this peer sees them. ``shard`` None: in any shard."""

    __slots__ = ("_chains", "_membership", "_run", "_this_peer")

    def __init__(self, run: RunId, membership: Membership, chains: Sequence[Chain], this_peer: ThisPeer) -> None:
        self._run = run
        self._membership = membership
        self._chains = chains
        self._this_peer = this_peer

    def peers(self, shard: ShardId | None = None) -> tuple[PeerId, ...]:
        """Return the live peers, sorted, without this one."""
        return self._membership.live

    def donors(self, shard: ShardId | None = None) -> tuple[PeerId, ...]:
        """Return the live peers that have the shard's state, sorted, without this one."""
        return self._membership.roles().donors

    def weights(self, shard: ShardId) -> Candidates:
        """Return the same peers with the weights that they ask for."""
        return self._membership.roles().weights

    def newcomers(self, shard: ShardId) -> frozenset[PeerId]:
        """Return the live peers that report to lack the shard's state."""
        return self._membership.roles().newcomers

    def is_donor(self, peer: PeerId, shard: ShardId | None = None) -> bool:
        """Return whether a connected peer, live or not, reports to have the shard's state."""
        view = self._membership.peers.get(peer)
        return view is not None and view.beat is not None and view.beat.phase != "joining"

    def participants(self, shard: ShardId | None = None) -> frozenset[PeerId]:
        """Return the peers whose learners can contribute, with this one if its learner can."""
        others = self._membership.participating
        return others | {self._membership.me} if self._this_peer.is_participating() else others

    def entitled(self, shard: ShardId) -> frozenset[PeerId]:
        """Return the peers that may take part in a commit: participants, and learners that stopped at the run's end.

        Otherwise a learner that has not stopped would be most participants by itself.
        """
        finished = set(self._membership.roles().finished)
        if self._this_peer.departure == "finished":
            finished.add(self._membership.me)
        if finished:
            finished.intersection_update(map(peer_of, self._chains[shard].marks))
        return self.participants(shard) | finished

    def candidates(self, shard: ShardId | None = None) -> Candidates:
        """Return the peers that may own the shard's next version, this one included, with their weights."""
        return self._membership.owners.candidates

    def ranked_owners(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the candidates in the order in which they may merge the shard's next version.

        With groups, the first peers of all groups come first: only its own group knows which peer of it that is, and
        passes on what another one gets.
        """
        candidates, bits = self.candidates(shard), self._chains[shard].group_bits
        ranked = self._ranked(shard, candidates)
        if not bits:
            return ranked
        here = _divided(candidates, bits)
        firsts = [
            self._ranked(shard, here[group])[0] for group in self.group_order(shard, self._next(shard)) if group in here
        ]
        return (*firsts, *(peer for peer in ranked if peer not in firsts))

    def group_order(self, shard: ShardId, version: int) -> tuple[int, ...]:
        """Return the groups in the order in which their first peers may merge this version of the shard."""
        return drawn_groups(f"{self._run}/{shard}/{version}", self._chains[shard].group_bits)

    def is_near(self, shard: ShardId, peer: PeerId) -> bool:
        """Return whether a peer is of this peer's group."""
        bits = self._chains[shard].group_bits
        return not bits or group_of(peer, bits) == group_of(self._membership.me, bits)

    def near(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the live peers of this peer's group, sorted."""
        return tuple(peer for peer in self.peers(shard) if self.is_near(shard, peer))

    def bridges(self, shard: ShardId, text: str) -> dict[int, PeerId]:
        """Return a donor of each other group, drawn by ``text``: one that weighs as much as most donors, if there is
        one. A peer behind a slow line asks for less weight (O1c)."""
        weights = dict(self.weights(shard))
        usual = sorted(weights.values())[len(weights) // 2] if weights else 0.0
        far = [peer for peer in weights if not self.is_near(shard, peer)]
        draws = {peer: blake2b(f"{text}/{peer}".encode(), digest_size=8).digest() for peer in far}
        found = sorted(far, key=lambda peer: (weights[peer] >= usual, draws[peer]))
        return {self.group(shard, peer): peer for peer in found}

    def receivers(self, shard: ShardId) -> tuple[PeerId, ...]:
        """Return the peers that may merge this peer's contribution to the shard's next version, in this order."""
        return self.collectors(shard, self.group(shard, self._membership.me))

    def group(self, shard: ShardId, peer: PeerId) -> int:
        """Return the group in which a peer's contribution to the shard's next version is merged."""
        return group_of(peer, self._chains[shard].group_bits)

    def members(self, shard: ShardId, group: int) -> frozenset[PeerId]:
        """Return the participants of a group."""
        return frozenset(peer for peer in self.participants(shard) if self.group(shard, peer) == group)

    def collectors(self, shard: ShardId, group: int) -> tuple[PeerId, ...]:
        """Return the candidates of a group in the order in which they may merge its contributions to the shard's next
        version: if it has none, its participants; without groups, or if nobody is there, the owners."""
        bits = self._chains[shard].group_bits
        if not bits:
            return self.ranked_owners(shard)
        here = _divided(self.candidates(shard), bits).get(group, ())
        here = here or tuple((peer, 1.0) for peer in sorted(self.members(shard, group)))
        return self._ranked(shard, here) if here else self.ranked_owners(shard)

    def rank(self, peer: PeerId, shard: ShardId) -> int:
        """Return a peer's rank as another peer may see it; 1 if it is no candidate here.

        Missed takeover times are this peer's own experience, which the other may not share.
        """
        if not self.is_near(shard, peer):
            return self.group_order(shard, self._next(shard)).index(self.group(shard, peer))
        rankings = (self.ranked_owners(shard), self._ranked(shard, self._membership.owners.willing))
        return min((ranked.index(peer) for ranked in rankings if peer in ranked), default=1)

    def _ranked(self, shard: ShardId, candidates: Candidates) -> tuple[PeerId, ...]:
        return ranked_owners(self._run, shard, self._next(shard), candidates)

    def _next(self, shard: ShardId) -> int:
        """Return the number of the shard's next version."""
        head = self._chains[shard].head
        assert head is not None
        return head.version + 1

    def is_departing(self, peer: PeerId) -> bool:
        """Return whether a live peer, or this one, is leaving or has finished."""
        is_own = peer == self._membership.me
        return bool(self._this_peer.departure) if is_own else self._membership.is_departing(peer)

    def leaving(self) -> frozenset[PeerId]:
        """Return the live peers that leave before the run's end, without this one."""
        return self._membership.roles().leaving

    def is_any_leaving(self) -> bool:
        """Return whether this peer, or a live peer that participates, is leaving before the run's end."""
        return self._this_peer.departure == "leaving" or not self.leaving().isdisjoint(self._membership.participating)


@lru_cache(maxsize=64)
def _divided(candidates: Candidates, bits: int) -> dict[int, Candidates]:
    """Return the candidates of each group that has some."""
    found: dict[int, Candidates] = {}
    for candidate in candidates:
        group = group_of(candidate[0], bits)
        found[group] = (*found.get(group, ()), candidate)
    return found
