"""Decides whose word a fetched state needs before it is taken, and remembers rejected commits and equivocations.

A state comes with its *lineage*: the commits that led to it, as far as its donor's log reaches, all signed and checked.
A peer stands by a state if a head that it has told of itself is that state's, or lies in its lineage.

Rules of this file:
1. A newcomer has nothing to compare with: it takes what more than half of the peers that have states stand by. If for
   long there is no such state, the run has fallen apart and the newcomer may be all that holds it together: it takes
   one by which as many stand as by any other. Who stands by what lies before a head may have refused the head, so its
   maker's word alone is none. Where the founder is there it, or most others, must have the head; where it is not, what
   most have not is taken after a while, later while a run is young. Whoever is in doubt asks all the others anew.
2. A peer that has a state takes another whose lineage meets the heads that it came by: it was seen where they part. One
   that does not (a long absence, a deep fork, a chain that somebody made up) it takes unless more than half of all,
   itself included, stand by its own; who has told nothing of late is asked before.
   What led to a state outlives a restart: else forks that grew while a peer restarted would not meet.
3. What was approved once is not judged again: a long download outlives what peers told when it began.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from p2pdiloco.protocol.events import Convictions
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Equivocation, Head, HeadsRequest
from p2pdiloco.protocol.state import Core

# -- Equivocations: two commits of one owner on one parent -------------------------------------------------------------
# Rules of this file:
# 1. The two are a proof that nobody can forge and everybody can check. It is kept, and told to all who are connected
#    and all who connect later.
# 2. Who is proved to have done it owns nothing for TERM versions of that shard's chain, which everybody counts alike;
#    its commits are not taken from itself. From others they are: what has been built on is not taken apart.
# 3. The honest never do it (``OwnCommitLog``). Where nobody else can own it owns all the same.


TERM = 1000
"""Versions."""
PROOFS_MOST = 64
"""Owners of whom a proof is kept; the latest."""


class Equivocations:
    """Proofs, one an owner."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.proofs: dict[PeerId, Equivocation] = {}
        self._refused: dict[PeerId, tuple[ShardId, int]] = {}
        """Owners of commits that were refused here, with shard and version: see ``RejectedCommits``."""

    def add_proof(self, proof: Equivocation, sender: PeerId | None = None) -> None:
        """Keep a proof, whose signatures were checked, and pass it on."""
        core = self.core
        if not proof.is_one or proof.first.shard >= len(core.chains) or self._is_served(proof):
            return
        known = self.proofs.get(proof.owner)
        if known is not None and not self._is_served(known):
            return
        while len(self.proofs) >= PROOFS_MOST:
            del self.proofs[next(iter(self.proofs))]
        self.proofs[proof.owner] = proof
        core.note(
            "warning",
            "equivocation",
            f"{proof.owner} has signed two commits of version {proof.first.version} of shard {proof.first.shard}: it "
            f"owns nothing for {TERM} versions",
        )
        self.expire()
        core.send(tuple(peer for peer in core.membership.live if peer != sender), proof)

    def bar(self, owner: PeerId, shard: ShardId, version: int) -> None:
        """Exclude the owner of a commit that every peer rejects which can judge it."""
        self._refused.pop(owner, None)
        self._refused[owner] = (shard, version)
        if len(self._refused) > PROOFS_MOST:
            del self._refused[next(iter(self._refused))]
        self.expire()

    def convictions(self) -> Convictions:
        """Return all that is known of excluded owners, for the disk."""
        return Convictions(tuple(self.proofs.values()), tuple((owner, *at) for owner, at in self._refused.items()))

    def restore(self, earlier: Convictions) -> None:
        """Take over what an earlier life of this peer knew."""
        for proof in earlier.proofs:
            self.add_proof(proof)
        for owner, shard, version in earlier.refused:
            if shard < len(self.core.chains):
                self.bar(owner, shard, version)

    def expire(self) -> None:
        """Drop the owners whose term is over."""
        if not self.proofs and not self._refused:
            self.core.membership.owners.barred = frozenset()
            return
        self.proofs = {owner: proof for owner, proof in self.proofs.items() if not self._is_served(proof)}
        self._refused = {owner: at for owner, at in self._refused.items() if not self._is_over(*at)}
        self.core.membership.owners.barred = frozenset((*self.proofs, *self._refused))

    def send_proofs(self, peer: PeerId) -> None:
        """Send all proofs to a peer that has connected."""
        for proof in self.proofs.values():
            self.core.send((peer,), proof)

    def _is_served(self, proof: Equivocation) -> bool:
        return self._is_over(proof.first.shard, proof.first.version)

    def _is_over(self, shard: ShardId, version: int) -> bool:
        head = self.core.chains[shard].head
        return head is not None and head.version >= version + TERM


# -- Rejected commits --------------------------------------------------------------------------------------------------
# Rules of this file:
# 1. What makes a commit unfit (counts, record, length, values) follows from its parent's state alone, so everybody who
#    has that state refuses it, and for good. It is remembered by its id, and so are its children: nothing that has one
#    of them in its lineage is taken.
# 2. If more than half of all go on from it all the same, it is this peer that errs (its arithmetic, its release), and
#    it takes their state.
# 3. Its owner signed it: here it owns nothing for ``TERM`` versions, as if it were proved to all. Whoever built on it
#    is not blamed.


REFUSED_MOST = 4096
"""The latest, over all shards."""


class RejectedCommits:
    """Commits that this peer has rejected, by id."""

    def __init__(self, core: Core, equivocations: Equivocations) -> None:
        self.core = core
        self.equivocations = equivocations
        self._ids: dict[Digest, None] = {}
        """The oldest first."""

    def add(self, header: CommitHeader, commit: Digest, sender: PeerId | None, reason: str) -> None:
        """``header`` extends the head here, and is not taken."""
        self.note(header, sender, reason)
        self.remember(commit)
        if header.owner != self.core.config.peer:
            self.equivocations.bar(header.owner, header.shard, header.version)

    def note(self, header: CommitHeader, sender: PeerId | None, reason: str) -> None:
        """Say that it is not taken."""
        origin = sender or header.owner
        self.core.note("warning", "commit", f"shard {header.shard} commit of {origin} not taken: {reason}")

    def is_refused(self, header: CommitHeader, commit: Digest) -> bool:
        """Whether it, or what it extends, was not taken."""
        if not self._ids:
            return False
        if commit not in self._ids and header.parent in self._ids:
            self.remember(commit)
        return commit in self._ids

    def holds(self, head: Digest, lineage: Iterable[Digest] = ()) -> bool:
        """Whether a chain has a commit in it that was not taken."""
        return bool(self._ids) and (head in self._ids or not self._ids.keys().isdisjoint(lineage))

    def forget(self, head: Digest, lineage: Iterable[Digest]) -> None:
        """Forget rejected commits that were taken after all, since most peers stand by them."""
        if self._ids:
            for commit in (head, *lineage):
                self._ids.pop(commit, None)

    def remember(self, commit: Digest) -> None:
        """Remember a rejected commit: what extends it is rejected, too."""
        while len(self._ids) >= REFUSED_MOST:
            del self._ids[next(iter(self._ids))]
        self._ids[commit] = None


# -- Ancestry check: whose word a state needs --------------------------------------------------------------------------


DIVIDED_REQUESTS = 2
"""Times ``request_s`` for which a newcomer looks for what more than half stand by."""
FAR_REQUESTS = 4
"""Times ``request_s`` for which, while a run is young, a newcomer waits to meet those whom others hear. Without
it a newcomer that hears two liars first believes them (seed 10205900 of ``--scenario liars``). It makes joins in
simulated meshes longer: 4.5 instead of 3.9 s in the mean (benchmarks/notes.md)."""


class ReportedHead(NamedTuple):
    """The head that a peer reported of one shard."""

    head: Digest
    earlier: Digest
    """The head that it told of before."""
    at: float


class JudgedState(NamedTuple):
    """A state that was offered."""

    head: Digest
    lineage: tuple[Digest, ...]
    problem: str | None


class AncestryCheck:
    """Decides which offered states are taken, by the heads that peers have reported."""

    def __init__(self, core: Core, refusals: RejectedCommits) -> None:
        self.core = core
        self._refusals = refusals
        self._reported: dict[PeerId, dict[ShardId, ReportedHead]] = {}
        """By connected peer."""
        self._judged: dict[ShardId, JudgedState] = {}
        """The state that was offered last."""
        self._doubted_at: dict[ShardId, float] = {}
        """When a state was refused first because too few stand by it, or have it."""
        self._asked_at = -math.inf

    def record_head(self, peer: PeerId, head: Head) -> None:
        """Record the head that ``peer`` reports."""
        mine = self._reported.setdefault(peer, {})
        before = mine.get(head.shard, ReportedHead(head.id, head.id, 0.0))
        earlier = before.earlier if before.head == head.id else before.head
        mine[head.shard] = ReportedHead(head.id, earlier, self.core.now)

    def record_commit(self, peer: PeerId, head: Head, parent: Digest) -> None:
        """``peer`` made the commit ``head`` itself, so it was at ``parent``."""
        self._reported.setdefault(peer, {})[head.shard] = ReportedHead(head.id, parent, self.core.now)

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer that is gone has reported."""
        self._reported.pop(peer, None)

    def is_known(self, shard: ShardId) -> bool:
        """Whether more than half of those who have states have told of theirs."""
        donors = self._donors()
        return 2 * sum(shard in self._reported.get(peer, ()) for peer in donors) > len(donors)

    def is_doubted(self, shard: ShardId) -> bool:
        """Whether a state was refused because too few stand by it, or have it: the founder's word would do."""
        return shard in self._doubted_at

    def refusal(self, head: Head) -> str | None:
        """Why the state at ``head``, which was offered just now, is not to be downloaded, or None."""
        judged = self._judged.get(head.shard)
        is_it = judged is not None and judged.head == head.id
        return judged.problem if judged is not None and is_it else "another state was offered meanwhile"

    def lineage_of(self, head: Head) -> tuple[Digest, ...]:
        """Return the lineage of the state at ``head``, if that was offered last."""
        judged = self._judged.get(head.shard)
        return judged.lineage if judged is not None and judged.head == head.id else ()

    def restore(self, head: Head, lineage: Sequence[Digest]) -> None:
        """This peer begins with the state at ``head``, to which ``lineage`` led: its own checkpoint is not judged."""
        self._judged[head.shard] = JudgedState(head.id, tuple(lineage), None)

    def judge(self, peer: PeerId, head: Head, lineage: Sequence[Digest], owner: PeerId) -> str | None:
        """Why the state at ``head``, which ``owner`` made and whose ancestors are ``lineage``, is not taken from
        ``peer``, or None."""
        before = self._judged.get(head.shard)
        if self._refusals.holds(head.id, lineage) and not self.is_outvoted(head.shard):
            self._leave_alone(peer)
            self._judged[head.shard] = JudgedState(
                head.id, tuple(lineage), "it has a commit in it that was not taken here"
            )
        elif before is None or before.head != head.id or before.problem is not None:
            self._judged[head.shard] = JudgedState(head.id, tuple(lineage), self._problem(peer, head, lineage, owner))
        return self._judged[head.shard].problem

    def _problem(self, peer: PeerId, head: Head, lineage: Sequence[Digest], owner: PeerId) -> str | None:
        shard, chain = head.shard, self.core.chains[head.shard]
        theirs, donors = {head.id, *lineage}, self._donors()
        if not head.version:
            return None
        if chain.head is None:
            problem = self._unbacked(peer, owner, head, lineage, donors)
            if problem is not None:
                self._doubted_at.setdefault(shard, self.core.now)
                self._ask(set(donors).difference((peer,)))
            return problem
        if chain.head.id not in theirs and theirs.isdisjoint(chain.ancestry):
            ours = {chain.head.id, *chain.ancestry}
            if 2 * sum(self._is_fresh(donor, shard) for donor in donors) <= len(donors):
                self.core.send(tuple(donors), HeadsRequest())
                return "its lineage does not meet ours, and the others are asked for their heads first"
            stand = 1 + sum(self._is_at(donor, shard, ours) for donor in donors)
            if 2 * stand > len(donors) + 1:
                self._leave_alone(peer)
                return f"its lineage does not meet ours, by which {stand} of {len(donors) + 1} peers stand"
        return None

    def _unbacked(
        self, peer: PeerId, owner: PeerId, head: Head, lineage: Sequence[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Why a newcomer does not take ``head``, which ``owner`` made: too few stand by it, or have it."""
        shard, theirs = head.shard, {head.id, *lineage}
        stand = sum(self._was_at(donor, shard, theirs) for donor in donors)
        founder = self.core.config.founder
        is_half = 2 * stand == len(donors) and founder in donors and self._was_at(founder, shard, theirs)
        is_backed = is_half or 2 * stand > len(donors)
        if not is_backed and not self._is_divided(shard, stand, theirs, donors):
            return f"{stand} of {len(donors)} peers stand by it, and more than half must"
        if not is_backed and founder not in donors:
            return None  # the run has fallen apart, and each made its own head
        return self._doubt(peer, owner, head, lineage, donors)

    def is_outvoted(self, shard: ShardId) -> bool:
        """Whether more than half of all, this peer included, tell of heads that follow what was refused here."""
        donors = self._donors()
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        return 2 * sum(one is not None and self._refusals.holds(one.head) for one in told) > len(donors) + 1

    def _is_divided(self, shard: ShardId, stand: int, theirs: Container[Digest], donors: Sequence[PeerId]) -> bool:
        """Whether for long there was nothing by which most stand and, if the founder is not there, whose word counts
        then, nothing has more than these ``stand``."""
        is_founders = self.core.config.founder in donors
        is_enough = is_founders or 0 < stand >= self._rivals(shard, theirs, donors)
        return is_enough and self._is_long(shard, DIVIDED_REQUESTS)

    def _rivals(self, shard: ShardId, theirs: Container[Digest], donors: Sequence[PeerId]) -> int:
        """How many tell of the head, other than ``theirs``, of which most tell."""
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        return max(Counter(one.head for one in told if one is not None and one.head not in theirs).values(), default=0)

    def _is_long(self, shard: ShardId, requests: int) -> bool:
        """Whether a state was refused first so many ``request_s`` ago because too few stand by it, or have it."""
        now = self.core.now
        return now - self._doubted_at.get(shard, now) >= requests * self.core.config.request_s

    def _doubt(
        self, peer: PeerId, owner: PeerId, head: Head, lineage: Sequence[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Why a newcomer waits for others' words on ``head`` itself: who stands by what lies before it may have refused
        it."""
        founder, others, itself = self.core.config.founder, [donor for donor in donors if donor != owner], (head.id,)
        words = [donor for donor in others if donor == peer or self._was_at(donor, head.shard, itself)]
        if founder in (owner, *words):
            return None
        is_most, few = 2 * len(words) > len(others), f"{len(words)} of {len(others)} have it but its maker"
        if not is_most and (founder in donors or owner in self.core.membership.owners.barred):
            return f"{few}, and the founder has not"
        is_young = len(lineage) >= head.version and founder not in ("", self.core.config.peer, *donors)
        requests = FAR_REQUESTS if self.core.membership.connectivity.afar else 1
        if is_young and len(words) < 2 and not self._is_long(head.shard, requests):
            return "its lineage reaches back to version 0, so the founder may come, and one or two peers alone have it"
        if is_most or not others:
            return None
        if not words:
            return "only its maker has it"
        is_beaten = 1 + len(words) < self._rivals(head.shard, itself, [d for d in donors if d not in words])
        return few if is_beaten or not self._is_long(head.shard, requests=1) else None

    def _ask(self, peers: Iterable[PeerId]) -> None:
        """For their heads, once a heartbeat: who has what is doubted can offer it, too."""
        if self.core.now - self._asked_at >= self.core.membership.beat_s():
            self._asked_at = self.core.now
            self.core.send(tuple(sorted(peers)), HeadsRequest())

    def _donors(self) -> list[PeerId]:
        """Live peers that say they have all states."""
        peers = self.core.membership.peers
        views = ((peer, peers[peer].beat) for peer in self.core.membership.live)
        return [peer for peer, beat in views if beat is not None and beat.phase != "joining"]

    def _is_at(self, peer: PeerId, shard: ShardId, heads: Container[Digest]) -> bool:
        told = self._reported.get(peer, {}).get(shard)
        return told is not None and told.head in heads

    def _was_at(self, peer: PeerId, shard: ShardId, heads: Container[Digest]) -> bool:
        told = self._reported.get(peer, {}).get(shard)
        return told is not None and (told.head in heads or told.earlier in heads)

    def _is_fresh(self, peer: PeerId, shard: ShardId) -> bool:
        told = self._reported.get(peer, {}).get(shard)
        return told is not None and self.core.now - told.at <= self.core.config.request_s

    def _leave_alone(self, peer: PeerId) -> None:
        """Do not ask the peer again for a while for what it says it has."""
        view = self.core.membership.peers.get(peer)
        if view is not None:
            view.ignored_until = self.core.now + self.core.config.request_s
