"""Decides which fetched states to accept, and remembers rejected commits and barred owners.

A state comes with its *lineage*: the signed and checked commits that led to it, as far back as its donor's log reaches.
A peer *stands by* a state if it has reported that state's head, or a head in the state's lineage.

Rules of this file:
1. A newcomer has no state to compare with. It takes a state that more than half of the peers with states stand by.
   - If there is no such state for a long time, the run has fallen apart. The newcomer then takes a state that at least
     as many peers stand by as any other.
   - A peer that stands by an ancestor may still have refused the head. So the word of the commit's maker alone is not
     enough. While the founder is present, the founder or most other peers must have the head. Without the founder, a
     head that most peers lack is accepted after a delay, which is longer while a run is young.
   - A newcomer in doubt asks all other peers for their heads again.
2. A peer that has a state takes that of a fork whose lineage leaves its own ancestry, if learners can have made so many
   versions since then. It takes any other state unless more than half of all peers, itself included, stand by its own:
   a long absence, a deep fork, a fabricated chain, or commits that follow its own head, of which it needs the payloads
   to see what was merged. It first asks peers that have not reported lately. The ancestry is stored, because otherwise
   forks that grew during a restart would not meet.
3. A state that was approved is not judged again, because a long download outlives the reports it was judged by.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from p2pdiloco.protocol.chain import Chain, HeadChange, is_heavier
from p2pdiloco.protocol.events import Convictions, ShardState
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import (
    CommitHeader,
    Equivocation,
    Head,
    HeadsRequest,
    Proof,
    WrongMerge,
    commit_id,
)
from p2pdiloco.protocol.state import Core

# -- Barred owners: what they did was proved, or refused here ----------------------------------------------------------
# Rules of this section:
# 1. Two commits of one owner on one parent are a proof that cannot be forged and that every peer can check. A wrong
#    merge is one, too, for whoever makes the merge again (``audits``). A peer keeps a proof and sends it to all peers
#    that are connected or connect later. The driver checks every proof before the machine hears of it.
# 2. A barred peer owns nothing, of any shard, for TERM versions of that shard's chain, which every peer counts alike.
#    Its commits are not accepted from itself. They are accepted from other peers, because those have built on them.
# 3. Honest peers never equivocate (``OwnCommitLog``), and their merges are right. A barred peer still owns where no
#    other peer can.


TERM = 1000
"""Versions for which an excluded peer owns nothing."""
PROOFS_MOST = 64
"""Maximum number of owners whose proofs are kept; the latest stay."""
EVIDENCE_MOST = 4
"""Number of the latest wrong merges whose payloads are kept, so that other peers can make these merges again."""


class BarredOwners:
    """Owners that own nothing for a while: proofs, one for each owner, and owners of commits that were rejected."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.proofs: dict[PeerId, Proof] = {}
        self._refused: dict[PeerId, tuple[ShardId, int]] = {}
        """Owners of commits that were rejected here, with shard and version (see ``RejectedCommits``)."""

    def add_proof(self, proof: Proof, sender: PeerId | None = None) -> None:
        """Store a proof that has been checked, and forward it."""
        core = self.core
        if isinstance(proof, Equivocation) and not proof.is_one:
            return
        if proof.shard >= len(core.chains) or self._is_served(proof):
            return
        known = self.proofs.get(proof.owner)
        if known is not None and not self._is_served(known):
            return
        self.proofs.pop(proof.owner, None)
        while len(self.proofs) >= PROOFS_MOST:
            del self.proofs[self._least_needed(self.proofs)]
        self.proofs[proof.owner] = proof
        core.note("warning", "equivocation" if isinstance(proof, Equivocation) else "wrong-merge", _sentence(proof))
        self.expire()
        core.send(tuple(peer for peer in sorted(core.membership.peers) if peer != sender), proof)

    def bar(self, owner: PeerId, shard: ShardId, version: int) -> None:
        """Exclude the owner of a commit that every peer with its parent's state rejects."""
        self._refused.pop(owner, None)
        self._refused[owner] = (shard, version)
        if len(self._refused) > PROOFS_MOST:
            del self._refused[self._least_needed(self._refused)]
        self.expire()

    def convictions(self) -> Convictions:
        """Return all exclusions, for storage on disk."""
        refused = tuple((owner, *at) for owner, at in self._refused.items())
        return Convictions(tuple(self.proofs.values()), refused)

    def restore(self, earlier: Convictions) -> None:
        """Restore the exclusions that an earlier run of this peer stored."""
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

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that prove the latest wrong merges of a shard."""
        return set().union(*(audited_payloads(header) for header in self._evidence(shard)))

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of a shard's latest wrong commits."""
        return {commit_id(header) for header in self._evidence(shard)}

    def _evidence(self, shard: ShardId) -> list[CommitHeader]:
        wrong = [proof.header for proof in self.proofs.values() if isinstance(proof, WrongMerge)]
        return [header for header in wrong[-EVIDENCE_MOST:] if header.shard == shard]

    def _least_needed(self, owners: Iterable[PeerId]) -> PeerId:
        """Return the first of ``owners`` that is not connected, else the first. A peer can make as many keys as it
        likes, and proofs against them."""
        owners, peers = tuple(owners), self.core.membership.peers
        return next((owner for owner in owners if owner not in peers), owners[0])

    def _is_served(self, proof: Proof) -> bool:
        return self._is_over(proof.shard, proof.version)

    def _is_over(self, shard: ShardId, version: int) -> bool:
        head = self.core.chains[shard].head
        return head is not None and head.version >= version + TERM


def _sentence(proof: Proof) -> str:
    """Return what the owner did, what follows, and what a person can do."""
    if isinstance(proof, Equivocation):
        deed = f"{proof.owner} has signed two commits of version {proof.version} of shard {proof.shard}"
    else:
        deed = (
            f"{proof.owner} has put other values into version {proof.version} of shard {proof.shard} than its "
            "contributors gave"
        )
    return f"{deed}: it owns nothing for {TERM} versions. To remove it: p2pdiloco members ban {proof.owner}"


def audited_payloads(header: CommitHeader) -> set[Digest]:
    """Return the payloads that are needed to make a commit's merge again: its own, and those of its contributions."""
    return {header.payload, *(Digest(c.payload.hex()) for c in header.contributors if c.payload)}


# -- Rejected commits --------------------------------------------------------------------------------------------------
# Rules of this file:
# 1. Whether a commit is invalid (counts, record, length, values) follows from its parent's state alone. So every peer
#    with that state rejects it permanently. Its id is remembered, and so are its children. No state with one of them in
#    its lineage is accepted.
# 2. If more than half of all peers build on it all the same, this peer is the one in error (its arithmetic or its
#    release), and it takes their state.
# 3. The owner signed the commit, so here it owns nothing for ``TERM`` versions, as if equivocation had been proved. A
#    peer that built on the commit is not blamed.


REFUSED_MOST = 4096
"""Maximum number of remembered ids over all shards; the latest stay."""


class RejectedCommits:
    """Commits that this peer has rejected, by id."""

    def __init__(self, core: Core, barred_owners: BarredOwners) -> None:
        self.core = core
        self.barred_owners = barred_owners
        self._ids: dict[Digest, None] = {}
        """Ids of rejected commits, oldest first; the dict serves as an ordered set."""

    def add(self, header: CommitHeader, commit: Digest, sender: PeerId | None, reason: str) -> None:
        """Reject ``header``, which extends the head here, and exclude its owner."""
        self.note(header, sender, reason)
        self.remember(commit)
        if header.owner != self.core.config.peer:
            self.barred_owners.bar(header.owner, header.shard, header.version)

    def note(self, header: CommitHeader, sender: PeerId | None, reason: str) -> None:
        """Log that a commit was rejected."""
        origin = sender or header.owner
        self.core.note("warning", "commit", f"shard {header.shard} commit of {origin} rejected: {reason}")

    def is_refused(self, header: CommitHeader, commit: Digest) -> bool:
        """Return whether the commit or its parent was rejected or abandoned."""
        if header.parent in self.core.abandoned:
            self.core.abandon(commit)
        if commit in self.core.abandoned:
            return True
        if not self._ids:
            return False
        if commit not in self._ids and header.parent in self._ids:
            self.remember(commit)
        return commit in self._ids

    def follow(self, lineage: Sequence[Digest], head: Digest) -> None:
        """Remember the commits after a rejected one in ``lineage``, oldest first, which is proved and ends at ``head``.
        This peer may not have heard them: it drops what a barred owner sends."""
        if self._ids:
            chain = (*lineage, head)
            first = next((at for at, commit in enumerate(chain) if commit in self._ids), len(chain))
            for commit in chain[first + 1 :]:
                self.remember(commit)

    def holds(self, head: Digest, lineage: Iterable[Digest] = ()) -> bool:
        """Return whether a chain contains a rejected or abandoned commit."""
        return any(
            bool(ids) and (head in ids or not ids.keys().isdisjoint(lineage))
            for ids in (self._ids, self.core.abandoned)
        )

    def is_invalid(self, commit: Digest) -> bool:
        """Return whether the commit was rejected for its values or header, and not only abandoned (``going_back``)."""
        return commit in self._ids

    def among(self, heads: Iterable[Digest]) -> set[Digest]:
        """Return those of ``heads`` that are rejected commits."""
        return {head for head in heads if head in self._ids}

    def forget(self, head: Digest, lineage: Iterable[Digest]) -> None:
        """Forget rejected commits that were accepted after all because most peers stand by them."""
        if self._ids:
            for commit in (head, *lineage):
                self._ids.pop(commit, None)

    def remember(self, commit: Digest) -> None:
        """Remember a rejected commit, so that its descendants are rejected, too."""
        while len(self._ids) >= REFUSED_MOST:
            del self._ids[next(iter(self._ids))]
        self._ids[commit] = None


# -- Ancestry check: which peers must stand by a state before it is accepted -------------------------------------------


DIVIDED_REQUESTS = 2
"""Multiple of ``request_s`` for which a newcomer looks for a state that more than half of the peers stand by."""
FAR_REQUESTS = 4
"""Multiple of ``request_s`` for which, in a young run, a newcomer waits to meet the peers that others hear. Without it,
a newcomer that hears two liars first believes them (seed 10205900 of ``--scenario liars``). It makes joins in
simulated meshes longer: 4.5 instead of 3.9 s in the mean (benchmarks/notes.md)."""


FORK_PACE = 1.25
"""Versions of a fork that are believed for each turn since it left the chain here. Others may be faster than the
learners that this peer knows."""
PACE_VERSIONS = 8
"""Versions that came here from which a pace is measured."""
LATE_TURNS = 3
"""Turns without a commit before a peer takes a state that follows its head, or the lighter chain of most peers."""


class ReportedHead(NamedTuple):
    """The head of one shard that a peer reported last."""

    head: Digest
    earlier: Digest
    """The head that it reported before."""
    at: float
    tokens: int
    moved_at: float
    """When it reported this head first."""


class JudgedState(NamedTuple):
    """The verdict on a state that was offered."""

    head: Digest
    lineage: tuple[Digest, ...]
    problem: str | None


class AncestryCheck:
    """Decides which offered states to accept, from the heads that peers have reported."""

    def __init__(self, core: Core, refusals: RejectedCommits) -> None:
        self.core = core
        self._refusals = refusals
        self._reported: dict[PeerId, dict[ShardId, ReportedHead]] = {}
        """Reported heads of each connected peer."""
        self._judged: dict[ShardId, JudgedState] = {}
        """By shard: the verdict on the state that was offered last."""
        self._doubted_at: dict[ShardId, float] = {}
        """By shard: the time at which a state was first refused because too few peers stand by it or have it."""
        self._asked_at = -math.inf
        self._had_at: dict[ShardId, dict[Digest, float]] = {}
        """By shard: when this peer came to its latest heads."""
        self._left_at: dict[ShardId, tuple[float, float]] = {}
        """By shard: since when most peers have had a lighter chain, and when this was last found."""
        self._torn_at: dict[ShardId, float] = {}
        """By shard: since when a heavier state of at most half of the others has had as much support as any other."""
        self._deserted_at: dict[ShardId, float] = {}
        """By shard: since when at least half of all peers have had a heavier chain."""

    def record_head(self, peer: PeerId, head: Head) -> None:
        """Record the head that ``peer`` reports."""
        mine = self._reported.setdefault(peer, {})
        now = self.core.now
        before = mine.get(head.shard, ReportedHead(head.id, head.id, 0.0, head.tokens, now))
        earlier, moved_at = (before.earlier, before.moved_at) if before.head == head.id else (before.head, now)
        mine[head.shard] = ReportedHead(head.id, earlier, now, head.tokens, moved_at)

    def record_commit(self, peer: PeerId, head: Head, parent: Digest) -> None:
        """Record that ``peer`` made the commit ``head``, and so was at ``parent`` before."""
        now = self.core.now
        self._reported.setdefault(peer, {})[head.shard] = ReportedHead(head.id, parent, now, head.tokens, now)

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer that is gone has reported."""
        self._reported.pop(peer, None)

    def is_back(self, peer: PeerId, shard: ShardId) -> bool:
        """Return whether ``peer`` reports a head that is not abandoned, as far as is known here."""
        told = self._reported.get(peer, {}).get(shard)
        return told is not None and told.head not in self.core.abandoned

    def is_known(self, shard: ShardId) -> bool:
        """Return whether more than half of the peers with states have reported their head of ``shard``."""
        donors = self.core.participation.donors(shard)
        return 2 * sum(shard in self._reported.get(peer, ()) for peer in donors) > len(donors)

    def is_newest(self, shard: ShardId) -> bool:
        """Return whether more than half of the other peers with states report no heavier head of ``shard`` than this
        peer's."""
        head, donors = self.core.head(shard), self.core.participation.donors(shard)
        told = (self._reported.get(peer, {}).get(shard) for peer in donors)
        lighter = [one for one in told if one is not None and (one.tokens, one.head) <= (head.tokens, head.id)]
        return 2 * len(lighter) > len(donors)

    def is_doubted(self, shard: ShardId) -> bool:
        """Return whether a state was refused because too few peers stand by it; the founder's report would suffice."""
        return shard in self._doubted_at

    def refusal(self, head: Head) -> str | None:
        """Return why the state at ``head``, offered just now, must not be downloaded, or None."""
        judged = self._judged.get(head.shard)
        is_it = judged is not None and judged.head == head.id
        return judged.problem if judged is not None and is_it else "another state was offered meanwhile"

    def lineage_of(self, head: Head) -> tuple[Digest, ...]:
        """Return the lineage of the state at ``head``, or an empty tuple if another state was offered last."""
        judged = self._judged.get(head.shard)
        return judged.lineage if judged is not None and judged.head == head.id else ()

    def restore(self, head: Head, lineage: Sequence[Digest]) -> None:
        """Approve the state at ``head`` with ``lineage`` without judging it: it is this peer's own checkpoint."""
        self._judged[head.shard] = JudgedState(head.id, tuple(lineage), None)

    def judge(self, peer: PeerId, head: Head, lineage: Sequence[Digest], owner: PeerId) -> str | None:
        """Return why this peer does not accept the state at ``head`` from ``peer``, or None.

        ``owner`` made the commit at ``head``; ``lineage`` holds its ancestors.
        """
        before = self._judged.get(head.shard)
        self._refusals.follow(lineage, head.id)
        # What the owner of a rejected commit shows may be what it signed, and not what most have.
        is_its_own = peer == owner and self._refusals.holds(head.id)
        if is_its_own or (self._refusals.holds(head.id, lineage) and not self.is_outvoted_for(head, lineage)):
            self._leave_alone(peer)
            self._judged[head.shard] = JudgedState(
                head.id, tuple(lineage), "it contains a commit that was rejected here"
            )
        elif before is None or before.head != head.id or before.problem is not None:
            self._judged[head.shard] = JudgedState(head.id, tuple(lineage), self._problem(peer, head, lineage, owner))
        return self._judged[head.shard].problem

    def _problem(self, peer: PeerId, head: Head, lineage: Sequence[Digest], owner: PeerId) -> str | None:
        shard, chain = head.shard, self.core.chains[head.shard]
        theirs, donors = {head.id, *lineage}, self.core.participation.donors(shard)
        if not head.version or head == chain.head:
            return None
        if chain.head is not None and chain.head.id in self.core.abandoned:
            return self._unbacked_return(peer, shard, theirs, donors)
        if chain.head is None:
            problem = self._unbacked(peer, owner, head, lineage, donors)
            if problem is not None:
                self._doubted_at.setdefault(shard, self.core.now)
                self._ask(set(donors).difference((peer,)))
            return problem
        if self.is_left(shard) and self._is_most_peers(shard, theirs):
            return None
        if not is_heavier(head, chain.head):
            return "it is lighter than ours, and not what most peers have"
        parted = chain.versions_since(theirs)
        if parted is None:
            meeting = "its lineage does not meet ours"
        elif self._is_plausible(chain, parted, head.version):
            return None
        elif parted:
            meeting = "it has more versions than learners can have made since it left our chain"
        else:
            meeting = "its commits follow our head"
        ours = {chain.head.id, *chain.ancestry}
        if 2 * sum(donor == peer or self._is_fresh(donor, shard) for donor in donors) <= len(donors):
            self.core.send(tuple(donors), HeadsRequest())
            return f"{meeting}; the other peers are asked for their heads first"
        stand = 1 + sum(donor != peer and self._stands_by(donor, shard, ours, theirs) for donor in donors)
        beyond = theirs - ours
        support = sum(donor == peer or self._stands_by(donor, shard, beyond, ours) for donor in donors)
        if 2 * support > len(donors):
            return None
        if 2 * stand > len(donors) + 1 or support < max(stand, self._most_elsewhere(shard, beyond, donors)):
            self._torn_at.pop(shard, None)
            self._leave_alone(peer)
            return f"{meeting}, and {stand} of {len(donors) + 1} peers stand by ours, {support} by it"
        if self.core.now - self._torn_at.setdefault(shard, self.core.now) < self.patience_s(shard):
            return f"{meeting}, and only {support} of {len(donors)} other peers stand by it so far"
        del self._torn_at[shard]
        return None

    def _most_elsewhere(self, shard: ShardId, heads: Container[Digest], donors: Sequence[PeerId]) -> int:
        """Return how many peers have lately reported the most common head that is not in ``heads``."""
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        others = (head for one in told if one is not None for head in {one.head, one.earlier} if head not in heads)
        return max(Counter(others).values(), default=0)

    def _unbacked_return(
        self, peer: PeerId, shard: ShardId, theirs: set[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a peer whose own head is abandoned does not accept a state from before, or None.

        It must lead on from this peer's own chain. Those that still report abandoned heads have no say.
        """
        chain, back = self.core.chains[shard], [donor for donor in donors if self.is_back(donor, shard)]
        if theirs.isdisjoint(chain.ancestry):
            return "its lineage does not meet ours"
        stand = sum(donor == peer or self._was_at(donor, shard, theirs) for donor in back)
        if 2 * stand <= len(back):
            return f"{stand} of {len(back)} peers that went back stand by it, but more than half are needed"
        if stand > 1 or self._is_long(shard, DIVIDED_REQUESTS):
            self._doubted_at.pop(shard, None)
            return None
        self._doubted_at.setdefault(shard, self.core.now)
        return "only one peer has it"

    def _is_plausible(self, chain: Chain, parted: int, version: int) -> bool:
        """Return whether a chain that left this one ``parted`` versions ago may have come to ``version`` by now.

        If it follows the head here (0), the commits themselves should come, unless nothing has come for long.
        """
        assert chain.head is not None
        common = (*chain.ancestry, chain.head.id)[-1 - parted]
        since_s = self.core.now - self._had_at.get(chain.shard, {}).get(common, self.core.now)
        turn_s, versions = self._turn_s(chain.shard), version - chain.head.version + parted
        return versions * turn_s <= FORK_PACE * since_s and (parted > 0 or since_s >= LATE_TURNS * turn_s)

    def is_left(self, shard: ShardId) -> bool:
        """Return whether more than half of all peers have had a lighter chain for long, and have gone on with it."""
        chain, donors, now = self.core.chains[shard], self.core.participation.donors(shard), self.core.now
        assert chain.head is not None
        own, tokens = {chain.head.id, *chain.ancestry}, chain.head.tokens
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        gone = [one for one in told if one is not None and one.tokens < tokens and one.head not in own]
        patience_s = self.patience_s(shard)
        since, last = self._left_at.pop(shard, (now, now))
        if 2 * len(gone) <= len(donors) + 1:
            return False
        since = since if now - last < patience_s else now
        self._left_at[shard] = since, now
        return now - since >= patience_s and 2 * sum(one.moved_at > since for one in gone) > len(donors) + 1

    def _turn_s(self, shard: ShardId) -> float:
        """Return the usual time between two versions of a shard, in seconds.

        It is the mean of those that came here, or, while they are few, the time in which learners make ``sync_every``
        steps. No single peer's claim shortens it.
        """
        core, own_s = self.core, self.core.step_time_s()
        median_s = core.membership.median_step_s(own_s)
        trained_s = core.config.sync_every * (min(own_s, median_s) if own_s else median_s)
        times = tuple(self._had_at.get(shard, {}).values())
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > PACE_VERSIONS else trained_s

    def on_head_changed(self, change: HeadChange) -> None:
        """Record when this peer came to its head. Each version before a fetched state took one turn."""
        chain, now, times = self.core.chains[change.shard], self.core.now, self._had_at.setdefault(change.shard, {})
        if isinstance(change.taken, ShardState):
            turn_s, lineage = self._turn_s(change.shard), tuple(chain.ancestry)
            known = {head: now - turn_s * (len(lineage) - at) for at, head in enumerate(lineage)}
            times = self._had_at[change.shard] = known | {head: times[head] for head in lineage if head in times}
        times[change.head.id] = now
        while len(times) > chain.length + 1:
            del times[next(iter(times))]

    def _unbacked(
        self, peer: PeerId, owner: PeerId, head: Head, lineage: Sequence[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a newcomer does not accept ``head``, made by ``owner``: too few peers stand by it or have it."""
        shard, theirs = head.shard, {head.id, *lineage}
        stand = sum(self._was_at(donor, shard, theirs) for donor in donors)
        founder = self.core.config.founder
        is_half = 2 * stand == len(donors) and founder in donors and self._was_at(founder, shard, theirs)
        is_backed = is_half or 2 * stand > len(donors)
        if not is_backed and not self._is_divided(shard, stand, theirs, donors):
            return f"{stand} of {len(donors)} peers stand by it, but more than half are needed"
        if not is_backed and founder not in donors:
            return None  # the run has fallen apart, and each made its own head
        return self._doubt(peer, owner, head, lineage, donors)

    def is_followed_by_most(self, shard: ShardId, heads: Container[Digest]) -> bool:
        """Return whether more than half of the other peers report one of ``heads``."""
        donors = self.core.participation.donors(shard)
        return 2 * sum(self._is_at(donor, shard, heads) for donor in donors) > len(donors)

    def is_outvoted(self, shard: ShardId) -> bool:
        """Return whether more than half of all peers, this one included, report heads that follow a rejected commit."""
        donors = self.core.participation.donors(shard)
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        return 2 * sum(one is not None and self._refusals.is_invalid(one.head) for one in told) > len(donors) + 1

    def is_deserted(self, shard: ShardId) -> bool:
        """Return whether at least half of all peers have gone on with a heavier chain than this peer's for very long:
        the run did not go back with this peer."""
        chain, donors, now = self.core.chains[shard], self.core.participation.donors(shard), self.core.now
        assert chain.head is not None
        own, tokens = {chain.head.id, *chain.ancestry}, chain.head.tokens
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        others = [one for one in told if one is not None and one.tokens > tokens and one.head not in own]
        if 2 * len(others) < len(donors) + 1:
            self._deserted_at.pop(shard, None)
            return False
        since = self._deserted_at.setdefault(shard, now)
        are_moving = 2 * sum(one.moved_at > since for one in others) >= len(donors) + 1
        return are_moving and now - since >= 2 * self.patience_s(shard)

    def has_left(self, peer: PeerId) -> bool:
        """Return whether ``peer`` reports a head that is lighter than this peer's and not on its chain."""
        for shard, told in self._reported.get(peer, {}).items():
            chain = self.core.chains[shard]
            if chain.head is not None and told.tokens < chain.head.tokens and told.head not in chain.ancestry:
                return True
        return False

    def patience_s(self, shard: ShardId) -> float:
        """Return for how long most peers must have gone another way, in seconds."""
        return max(DIVIDED_REQUESTS * self.core.config.request_s, LATE_TURNS * self._turn_s(shard))

    def is_outvoted_for(self, head: Head, lineage: Sequence[Digest]) -> bool:
        """Return whether most peers have a commit that leads to the state at ``head`` and that was rejected here."""
        rejected = self._refusals.among((head.id, *lineage))
        return self.is_outvoted(head.shard) and self._is_most_peers(head.shard, rejected)

    def _is_most_peers(self, shard: ShardId, heads: Container[Digest]) -> bool:
        """Return whether more than half of all peers, this one included, have lately reported one of ``heads``."""
        donors = self.core.participation.donors(shard)
        return 2 * sum(self._was_at(donor, shard, heads) for donor in donors) > len(donors) + 1

    def _is_divided(self, shard: ShardId, stand: int, theirs: Container[Digest], donors: Sequence[PeerId]) -> bool:
        """Return whether the run has been divided for long enough to accept a state without a majority.

        If the founder is present, its report counts later (``_doubt``). Otherwise no other head may have more
        supporters than these ``stand``.
        """
        is_founders = self.core.config.founder in donors
        is_enough = is_founders or 0 < stand >= self._rivals(shard, theirs, donors)
        return is_enough and self._is_long(shard, DIVIDED_REQUESTS)

    def _rivals(self, shard: ShardId, theirs: Container[Digest], donors: Sequence[PeerId]) -> int:
        """Return how many peers report the most common head that is not in ``theirs``."""
        told = (self._reported.get(donor, {}).get(shard) for donor in donors)
        return max(Counter(one.head for one in told if one is not None and one.head not in theirs).values(), default=0)

    def _is_long(self, shard: ShardId, requests: int) -> bool:
        """Return whether a state was first refused at least ``requests * request_s`` seconds ago."""
        now = self.core.now
        return now - self._doubted_at.get(shard, now) >= requests * self.core.config.request_s

    def _doubt(
        self, peer: PeerId, owner: PeerId, head: Head, lineage: Sequence[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a newcomer waits for reports on ``head`` itself, or None.

        A peer that stands by an ancestor of ``head`` may have refused ``head``.
        """
        founder, others, only_head = self.core.config.founder, [donor for donor in donors if donor != owner], (head.id,)
        holders = [donor for donor in others if donor == peer or self._was_at(donor, head.shard, only_head)]
        if founder in (owner, *holders):
            return None
        is_most = 2 * len(holders) > len(others)
        support = f"{len(holders)} of {len(others)} peers besides its maker have it"
        if not is_most and (founder in donors or owner in self.core.membership.owners.barred):
            return f"{support}, and the founder does not"
        is_young = len(lineage) >= head.version and founder not in ("", self.core.config.peer, *donors)
        requests = FAR_REQUESTS if self.core.membership.connectivity.afar else 1
        if is_young and len(holders) < 2 and not self._is_long(head.shard, requests):
            return "its lineage reaches back to version 0, so the founder may come, and only one or two peers have it"
        if is_most or not others:
            return None
        if not holders:
            return "only its maker has it"
        is_beaten = 1 + len(holders) < self._rivals(head.shard, only_head, [d for d in donors if d not in holders])
        return support if is_beaten or not self._is_long(head.shard, requests=1) else None

    def _ask(self, peers: Iterable[PeerId]) -> None:
        """Ask peers for their heads, at most once a heartbeat. Their reports also show who else can offer a state."""
        if self.core.now - self._asked_at >= self.core.membership.beat_s():
            self._asked_at = self.core.now
            self.core.send(tuple(sorted(peers)), HeadsRequest())

    def _stands_by(self, peer: PeerId, shard: ShardId, ours: Container[Digest], theirs: Container[Digest]) -> bool:
        """Return whether the last head that ``peer`` reported is in ``ours``, or the one before if the last is unknown:
        this peer may not have applied it yet, because versions follow each other fast."""
        return self._is_at(peer, shard, ours) or (
            self._was_at(peer, shard, ours) and not self._is_at(peer, shard, theirs)
        )

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
        """Ask this peer for no states for a while."""
        view = self.core.membership.peers.get(peer)
        if view is not None:
            view.ignore_heads(self.core.now, self.core.config.request_s)
