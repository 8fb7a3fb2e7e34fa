"""Decides which states of other peers to believe, from the heads that peers have reported.

A state comes with its *lineage*: the signed and checked commits that led to it, as far back as its donor's log reaches.
A peer *stands by* a state if it has reported that state's head, or a head in the state's lineage. The table in
``support`` says how many must stand by which state.

A state that was approved is not judged again, because a long download outlives the reports it was judged by.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Literal, NamedTuple

from p2pdiloco.protocol.chain import Chain, is_heavier
from p2pdiloco.protocol.head_reports import HeadReports, ReportedHead
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import Head, HeadsRequest
from p2pdiloco.protocol.rejected_commits import RejectedCommits
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.version_pace import LATE_ROUNDS, VersionPace

DIVIDED_REQUESTS = 2
"""Multiple of ``request_s`` for which a newcomer looks for a state that more than half of the peers stand by."""
FAR_REQUESTS = 4
"""Multiple of ``request_s`` for which, in a young run, a newcomer waits to meet the peers that others hear. Without it,
a newcomer that hears two liars first believes them (seed 10205900 of ``--scenario liars``). It makes joins in
simulated meshes longer: 4.5 instead of 3.9 s in the mean (benchmarks/notes.md)."""


Claim = Literal["doubted", "torn", "left", "deserted"]
"""A claim that may hold of a shard for some time.

Doubted: a newcomer found too few peers that stand by a state. Torn: a heavier state has as much support as any other,
of at most half. Left: most peers have a lighter chain. Deserted: others have what this peer abandoned."""


class JudgedState(NamedTuple):
    """The verdict on a state that was offered."""

    head: Digest
    lineage: tuple[Digest, ...]
    problem: str | None


class StateAcceptance:
    """Judges offered states."""

    def __init__(self, core: Core, reports: HeadReports, pace: VersionPace, rejected: RejectedCommits) -> None:
        self.core = core
        self.reports = reports
        self.pace = pace
        self._rejected = rejected
        self._judged: dict[ShardId, JudgedState] = {}
        """By shard: the verdict on the state that was offered last."""
        self._since: dict[tuple[Claim, ShardId], float] = {}
        """Claims that hold, and since when."""
        self._asked_at = -math.inf

    # -- for how long a claim has held ---------------------------------------------------------------------------------

    def _update(self, claim: Claim, shard: ShardId, *, holds: bool) -> None:
        if holds:
            self._since.setdefault((claim, shard), self.core.now)
        else:
            self._since.pop((claim, shard), None)

    def _lasts_s(self, claim: Claim, shard: ShardId) -> float:
        return self.core.now - self._since.get((claim, shard), self.core.now)

    def _is_long(self, shard: ShardId, requests: int) -> bool:
        """Return whether a state was first refused at least ``requests * request_s`` seconds ago."""
        return self._lasts_s("doubted", shard) >= requests * self.core.config.request_s

    def is_doubted(self, shard: ShardId) -> bool:
        """Return whether a state was refused because too few peers stand by it; the founder's report would suffice."""
        return ("doubted", shard) in self._since

    def patience_s(self, shard: ShardId) -> float:
        """Return for how long most peers must have gone another way, in seconds."""
        return max(DIVIDED_REQUESTS * self.core.config.request_s, LATE_ROUNDS * self.pace.round_s(shard))

    # -- where the others are ------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Note, at each heartbeat, which shards the others have gone on with on other chains."""
        for chain in self.core.chains:
            if chain.head is not None:
                lighter = self.reports.off_chain(chain.shard, are_heavier=False)
                self._update("left", chain.shard, holds=self._of_all(chain.shard, lighter).is_most)
                heavier = self.reports.off_chain(chain.shard, are_heavier=True) if self.core.abandoned else []
                self._update("deserted", chain.shard, holds=self._of_all(chain.shard, heavier).is_leading)

    def is_left(self, shard: ShardId) -> bool:
        """Return whether most of all peers have had a lighter chain for long, and have gone on with it."""
        return self._lasts_s("left", shard) >= self.patience_s(shard) and self._have_moved("left", shard).is_most

    def is_deserted(self, shard: ShardId) -> bool:
        """Return whether at least half of all peers have gone on with a heavier chain than this peer's for very long:
        the run did not go back with this peer."""
        is_long = self._lasts_s("deserted", shard) >= 2 * self.patience_s(shard)
        return is_long and self._have_moved("deserted", shard).is_leading

    def _have_moved(self, claim: Claim, shard: ShardId) -> Support:
        """Return how many of all peers have moved on, on chains like that, since the claim holds."""
        since = self._since[claim, shard]
        there = self.reports.off_chain(shard, are_heavier=claim == "deserted")
        return self._of_all(shard, [one for one in there if one.moved_at > since])

    def _of_all(self, shard: ShardId, those: Sequence[ReportedHead]) -> Support:
        """Return the support of ``those`` donors among all, this peer and all others standing against them."""
        total = len(self.core.participation.donors(shard)) + 1 if those else 1  # for nobody it need not be counted
        return Support(len(those), total, total - len(those))

    def is_outvoted(self, shard: ShardId, heads: Container[Digest] | None = None) -> bool:
        """Return whether most of all peers stand by one of ``heads`` (None: of the commits that were rejected here)."""
        rejected = self._rejected.ids if heads is None else heads
        support = self.reports.support(shard, rejected, rivals=self.core.chains[shard].heads())
        return support._replace(of=support.of + 1).is_most

    def is_outvoted_for(self, head: Head, lineage: Sequence[Digest]) -> bool:
        """Return whether most peers have a commit that leads to the state at ``head`` and that was rejected here."""
        rejected = self._rejected.ids.keys() & {head.id, *lineage}
        return bool(rejected) and self.is_outvoted(head.shard, rejected)

    # -- judging -------------------------------------------------------------------------------------------------------

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
        self._rejected.follow(lineage, head.id)
        # What the owner of a rejected commit shows may be what it signed, and not what most have.
        is_its_own = peer == owner and self._rejected.holds(head.id)
        if is_its_own or (self._rejected.holds(head.id, lineage) and not self.is_outvoted_for(head, lineage)):
            self._leave_alone(peer)
            self._judged[head.shard] = JudgedState(
                head.id, tuple(lineage), "it contains a commit that was rejected here"
            )
        elif before is None or before.head != head.id or before.problem is not None:
            self._judged[head.shard] = JudgedState(head.id, tuple(lineage), self._problem(peer, head, lineage, owner))
        return self._judged[head.shard].problem

    def _problem(self, peer: PeerId, head: Head, lineage: Sequence[Digest], owner: PeerId) -> str | None:
        shard, chain = head.shard, self.core.chains[head.shard]
        theirs, donors = {head.id, *lineage}, self.core.participation.donors(head.shard)
        if not head.version or head == chain.head:
            return None
        if chain.head is None:
            problem = self._newcomers_problem(peer, owner, head, lineage, donors)
            if problem is not None:
                self._update("doubted", shard, holds=True)
                self._ask(set(donors).difference((peer,)))
            return problem
        if chain.head.id in self.core.abandoned:
            return self._problem_after_going_back(peer, chain, theirs, donors)
        if self.is_left(shard) and self.is_outvoted(shard, theirs):
            return None
        if not is_heavier(head, chain.head):
            return "it is lighter than ours, and not what most peers have"
        parted = chain.versions_since(theirs)
        if parted is not None and self.pace.is_plausible(chain, parted, head.version):
            return None
        problem = self._problem_of_heavier(peer, chain, theirs, donors)
        if problem is None:
            return None
        if parted is None:
            return f"its lineage does not meet ours{problem}"
        if parted:
            return f"it has more versions than learners can have made since it left our chain{problem}"
        return f"its commits follow our head{problem}"

    def _problem_of_heavier(
        self, peer: PeerId, chain: Chain, theirs: set[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a peer does not believe a heavier state that time does not explain, or None."""
        shard, ours, reports = chain.shard, chain.heads(), self.reports
        if not reports.is_fresh(shard, donors, peer):
            self.core.send(tuple(donors), HeadsRequest())
            return "; the other peers are asked for their heads first"
        beyond = theirs - ours
        stand = sum(donor == peer or reports.stands_by(donor, shard, beyond, ours) for donor in donors)
        loyal = 1 + sum(donor != peer and reports.stands_by(donor, shard, ours, theirs) for donor in donors)
        support = Support(stand, len(donors), max(loyal, reports.most_elsewhere(shard, beyond, donors)))
        if support.is_most:
            return None
        self._update("torn", shard, holds=support.is_leading)
        if not support.is_leading:
            self._leave_alone(peer)
            return f", and {loyal} of {len(donors) + 1} peers stand by ours, {stand} by it"
        if self._lasts_s("torn", shard) < self.patience_s(shard):
            return f", and only {stand} of {len(donors)} other peers stand by it so far"
        self._update("torn", shard, holds=False)
        return None

    def _problem_after_going_back(
        self, peer: PeerId, chain: Chain, theirs: set[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a peer whose own head is abandoned does not accept a state from before, or None.

        It must lead on from this peer's own chain. Those that still report abandoned heads have no say.
        """
        shard, back = chain.shard, [donor for donor in donors if self.reports.is_back(donor, chain.shard)]
        if theirs.isdisjoint(chain.ancestry):
            return "its lineage does not meet ours"
        support = Support(
            sum(donor == peer or self.reports.stands_by(donor, shard, theirs) for donor in back), len(back)
        )
        if not support.is_most:
            return f"{support.stand} of {support.of} peers that went back stand by it, but more than half are needed"
        is_enough = support.stand > 1 or self._is_long(shard, DIVIDED_REQUESTS)
        self._update("doubted", shard, holds=not is_enough)
        return None if is_enough else "only one peer has it"

    def _newcomers_problem(
        self, peer: PeerId, owner: PeerId, head: Head, lineage: Sequence[Digest], donors: Sequence[PeerId]
    ) -> str | None:
        """Return why a newcomer does not accept ``head``, made by ``owner``: too few peers stand by it or have it.

        A peer that stands by an ancestor of ``head`` may have refused ``head``.
        """
        shard, founder, reports, theirs = head.shard, self.core.config.founder, self.reports, {head.id, *lineage}
        support = reports.support(shard, theirs, donors)
        is_tie = founder in donors and 2 * support.stand == support.of
        if not support.is_most and not (is_tie and reports.stands_by(founder, shard, theirs)):
            # In a divided run the founder decides if it is there: what it has follows below.
            rivals = 0 if founder in donors else reports.most_elsewhere(shard, theirs, donors)
            if not (support._replace(against=rivals).is_leading and self._is_long(shard, DIVIDED_REQUESTS)):
                return f"{support.stand} of {support.of} peers stand by it, but more than half are needed"
            if founder not in donors:
                return None  # the run has fallen apart, and each made its own head
        others, only_head = [donor for donor in donors if donor != owner], (head.id,)
        holders = [donor for donor in others if donor == peer or reports.stands_by(donor, shard, only_head)]
        if founder in (owner, *holders):
            return None
        is_most = Support(len(holders), len(others)).is_most
        told = f"{len(holders)} of {len(others)} peers besides its maker have it"
        if not is_most and (founder in donors or owner in self.core.membership.owners.barred):
            return f"{told}, and the founder does not"
        is_young = len(lineage) >= head.version and founder not in ("", self.core.config.peer, *donors)
        requests = FAR_REQUESTS if self.core.membership.connectivity.indirect else 1
        if is_young and len(holders) < 2 and not self._is_long(shard, requests):
            return "its lineage reaches back to version 0, so the founder may come, and only one or two peers have it"
        if is_most or not others:
            return None
        if not holders:
            return "only its maker has it"
        rivals = reports.most_elsewhere(shard, only_head, [donor for donor in donors if donor not in holders])
        with_owner = Support(1 + len(holders), len(donors), rivals)
        return None if with_owner.is_leading and self._is_long(shard, requests=1) else told

    def _ask(self, peers: Iterable[PeerId]) -> None:
        """Ask peers for their heads, at most once a heartbeat. Their reports also show who else can offer a state."""
        if self.core.now - self._asked_at >= self.core.membership.beat_s():
            self._asked_at = self.core.now
            self.core.send(tuple(sorted(peers)), HeadsRequest())

    def _leave_alone(self, peer: PeerId) -> None:
        """Ask this peer for no states for a while."""
        view = self.core.membership.peers.get(peer)
        if view is not None:
            view.ignore_heads(self.core.now, self.core.config.request_s)
