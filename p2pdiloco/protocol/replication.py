"""Takes in other peers' commits and states: in order, heaviest chain first, from any peer that has them.

Rules of this file:
1. A commit is applied only on top of its parent. A shard applies one thing at a time. Early children wait.
2. A peer obtains another head only if it is heavier. It asks for commits first. It fetches the whole state of the shard
   only if its head is not in the donor's log (a fork, a long absence), or if it has no state yet.
3. When the head changes, the learner's own marks decide which payloads leave its delta and which return to it
   (``DeltaReconciliation``). Other components follow the new head in ``on_head_changed``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.barred_owners import TERM
from p2pdiloco.protocol.chain import HeadChange, HeadListener, is_heavier
from p2pdiloco.protocol.commit_relay import relay_commit
from p2pdiloco.protocol.contributions import Contributions, DeltaReconciliation
from p2pdiloco.protocol.effects import Apply, BecameCurrent, Fetch, Install
from p2pdiloco.protocol.events import Fetched, ShardState
from p2pdiloco.protocol.head_reports import HeadReports
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import (
    Commit,
    CommitHeader,
    CommitsRequest,
    FetchAdvised,
    Head,
    Heads,
    HeadsRequest,
    commit_id,
)
from p2pdiloco.protocol.rejected_commits import RejectedCommits
from p2pdiloco.protocol.state import Core, ProtocolConfig, mark_bits
from p2pdiloco.protocol.state_acceptance import StateAcceptance
from p2pdiloco.protocol.version_pace import VersionPace

# -- Catch-up server: commits of the log, or the advice to download the state ------------------------------------------
# Rules of this file:
# 1. A peer that is asked while it applies a commit answers when it has finished. Its earlier head would be of no use,
#    and the asking peer would wait until its deadline.


MAX_COMMITS_SENT = 32


class LogRequests:
    """Requests for the commits after a head, and their answers."""

    def __init__(self, core: Core, applying: Container[ShardId]) -> None:
        self.core = core
        self._applying = applying
        """Shards to which a commit or state is being applied."""
        self._askers: dict[ShardId, dict[PeerId, CommitsRequest]] = {}
        """Peers that asked in the meantime, with the latest request of each."""

    def on_request(self, peer: PeerId, request: CommitsRequest) -> None:
        """Send the commits after the requested head, or advise to fetch the state."""
        if request.shard in self._applying:
            self._askers.setdefault(request.shard, {})[peer] = request
            return
        chain = self.core.chains[request.shard]
        if chain.head is None:
            return
        commits = chain.commits_after(request.head)
        if commits is None:
            self.core.send((peer,), FetchAdvised(request.shard, chain.head))
            return
        for header in commits[:MAX_COMMITS_SENT]:
            self.core.send((peer,), Commit(header))

    def answer(self, shard: ShardId) -> None:
        """Answer the postponed requests for ``shard``, since its work is done or has failed."""
        for peer, request in self._askers.pop(shard, {}).items():
            if peer in self.core.membership.peers:
                self.on_request(peer, request)


# -- Out-of-order commits ----------------------------------------------------------------------------------------------


class Orphans:
    """Commits of all shards that wait for their parents."""

    def __init__(self, config: ProtocolConfig) -> None:
        self._config = config
        self.waiting: dict[ShardId, dict[Digest, CommitHeader]] = {}
        """By shard and parent."""

    def add(self, header: CommitHeader, head: Head | None) -> None:
        """Keep a commit until its parent is here, or there are too many.

        A newcomer keeps the newest, since its state is on the way. A peer with a ``head`` keeps those that come next:
        nobody must displace them by commits of parents that nobody has.
        """
        waiting = self.waiting.setdefault(header.shard, {})
        if head is not None and header.version > head.version + self._config.log_length:
            return
        if len(waiting) >= self._config.log_length:
            choose = min if head is None else max
            last = choose(waiting, key=lambda parent: waiting[parent].version)
            if head is not None and header.version >= waiting[last].version:
                return
            del waiting[last]
        elif sum(map(len, self.waiting.values())) >= self._config.waiting_most:
            return  # the sender is asked again once the waiting commits are applied
        other = waiting.get(header.parent)
        if other is None or (header.tokens, commit_id(header)) > (other.tokens, commit_id(other)):
            waiting[header.parent] = header

    def of_shard(self, shard: ShardId) -> list[CommitHeader]:
        """Return all commits of a shard that wait."""
        return list(self.waiting.get(shard, {}).values())

    def descendants(self, shard: ShardId, commit: Digest) -> set[Digest]:
        """Return ``commit`` and the ids of the commits that wait and follow it."""
        waiting, found = self.waiting.get(shard, {}), {commit}
        while (child := waiting.get(commit)) is not None and (commit := commit_id(child)) not in found:
            found.add(commit)
        return found

    def is_followed(self, head: Head) -> bool:
        """Return whether a child of ``head`` waits."""
        return head.id in self.waiting.get(head.shard, ())

    def pop_child(self, head: Head) -> tuple[CommitHeader | None, list[CommitHeader]]:
        """Remove and return the child of ``head``, and the commits that ``head`` has overtaken."""
        waiting = self.waiting.get(head.shard)
        if not waiting:
            return None, []
        child = waiting.pop(head.id, None)
        return child, [waiting.pop(parent) for parent in [p for p, h in waiting.items() if h.version <= head.version]]


# -- Replication -------------------------------------------------------------------------------------------------------


MAX_FETCHES = 4
"""Maximum number of states that a newcomer fetches at once, over all shards."""
MOST_ENTRIES = 256
"""Commits of which it is remembered where they came into this group."""


class Replication:
    """Manages commits and states on their way into this peer's chains."""

    def __init__(
        self,
        core: Core,
        aggregation: Aggregation,
        contributions: Contributions,
        delta: DeltaReconciliation,
        refusals: RejectedCommits,
        listeners: Sequence[HeadListener],
    ) -> None:
        self.core = core
        self.refusals = refusals
        self.aggregation = aggregation
        self.contributions = contributions
        self.delta = delta
        pace = VersionPace(core)
        self.reports = HeadReports(core)
        self.acceptance = StateAcceptance(core, self.reports, pace, refusals)
        self.listeners = (pace, *listeners)
        """Components that follow each new head, in this order."""
        self.applying: dict[ShardId, tuple[Digest, CommitHeader | ShardState]] = {}
        """Each shard's next head and the commit or state that leads to it, while it is being applied."""
        self.log_requests = LogRequests(core, self.applying)
        self.orphans = Orphans(core.config)
        self.repairing: set[ShardId] = set()
        """Shards whose state does not match their head (see ``Repair``)."""
        self.staged: dict[ShardId, ShardState] = {}
        """Fetched states that arrived while something else was being applied."""
        self.asked: dict[ShardId, PeerId] = {}
        """Peers that were asked for commits or a state."""
        self.wanted: dict[ShardId, tuple[PeerId, Head]] = {}
        """Heavier heads that were reported, with the reporting peer. Usually their commits are on the way already."""
        self.announced: dict[ShardId, tuple[Digest, float]] = {}
        """The newest head of each shard that was reported before its commit came, and when."""
        self._entries: dict[Digest, PeerId] = {}
        """The peers at which commits of other groups came into this one."""
        self.turned_down: set[ShardId] = set()
        """Shards of which a state was refused, or did not come, since the head moved: no commit is on its way."""
        self.offers: dict[PeerId, dict[ShardId, Head]] = {}
        """While joining: heads that donors reported."""

    # -- commits -------------------------------------------------------------------------------------------------------

    def on_commit(self, sender: PeerId, header: CommitHeader, entry: PeerId | None = None) -> None:
        """Apply another peer's commit, keep it until its parent is here, or settle a fork.

        ``entry``: the peer at which it came into this group, as the sender says.
        """
        shard, core = header.shard, self.core
        if sender == header.owner and core.membership.owners.is_excluded(sender):
            return  # other peers' copies of its commits are accepted: see ``BarredOwners``
        chain = core.chains[shard]
        new_id = commit_id(header)
        if self._is_first(shard, sender, new_id):
            entry = core.config.peer
        if entry is not None:
            self._entries[new_id] = entry
            if len(self._entries) > MOST_ENTRIES:
                del self._entries[next(iter(self._entries))]
        if chain.head is None:
            self.orphans.add(header, None)
            if sender == header.owner and core.participation.is_donor(sender, shard):
                head = Head(shard, header.version, new_id, header.tokens)
                self.reports.record(sender, head, header.parent)
                self.offers.setdefault(sender, {})[shard] = head
                self.fetch_missing()
            return
        if sender not in core.membership.peers and sender != core.config.peer:  # its goodbye overtook its last commits
            self.orphans.add(header, chain.head)
            if shard not in self.applying:
                self._next(shard)
            return
        announced, at = self.announced.get(shard, (None, 0.0))
        if announced == new_id and self.asked.get(shard) != sender:
            del self.announced[shard]
            self.aggregation.record_arrival(core.now - at)
        applying = self.applying.get(shard)
        if new_id == chain.head.id or new_id in chain.log_ids or (applying is not None and applying[0] == new_id):
            return
        if self.refusals.is_refused(header, new_id):
            self.reports.record(sender, Head(shard, header.version, new_id, header.tokens))
            if (
                shard not in self.asked
                and core.participation.is_donor(sender, shard)
                and self.acceptance.is_outvoted(shard)
            ):
                self.fetch(shard, sender)  # most peers have accepted the commit, so this peer is in error
            else:
                self.on_bad_commit(shard, sender)
        elif applying is not None:
            self.orphans.add(header, chain.head)
        elif chain.extends(header):
            self._apply_if_sound(sender, header, new_id)
            self._record_delivery(shard, sender)
        else:
            if header.version > chain.head.version + 1:
                self.orphans.add(header, chain.head)
            self.on_head(sender, Head(shard, header.version, new_id, header.tokens))

    def _is_first(self, shard: ShardId, sender: PeerId, commit: Digest) -> bool:
        """Return whether a peer of another group sends this commit unasked, and nobody of the own group reports it."""
        participation = self.core.participation
        if participation.is_near(shard, sender) or self.asked.get(shard) == sender:
            return False
        told = (self.reports.of(peer, shard) for peer in participation.near(shard))
        return all(report is None or report.head != commit for report in told)

    def _apply_if_sound(self, sender: PeerId | None, header: CommitHeader, new_id: Digest) -> None:
        if (problem := self.core.chains[header.shard].problem(header)) is not None:
            self.refusals.add(header, new_id, sender, problem)
        elif (problem := self.delta.problem(header)) is not None:
            self.refusals.note(header, sender, problem)
        elif (due_at := self._take_turn(header, new_id)) > self.core.now:
            self.orphans.add(header, self.core.head(header.shard))
            self.core.alarms.set(("turn", header.shard), due_at)
        else:
            self.apply(header, new_id)

    def _take_turn(self, header: CommitHeader, new_id: Digest) -> float:
        """Return when to apply ``header``: now if most other peers have, else when its owner may merge.

        A suspected owner comes last from now on.
        """
        core, shard, aggregation = self.core, header.shard, self.aggregation
        descendants = self.orphans.descendants(shard, new_id)
        if header.owner == core.config.peer or self.reports.support(shard, descendants).is_most:
            aggregation.use_turn(shard, is_unusual=False)
            return core.now
        due = aggregation.due(header)
        aggregation.use_turn(shard, is_unusual=due.is_unusual)
        if due.is_suspect:
            core.membership.on_takeover_missed(header.owner, core.now, aggregation.waits().takeover_s)
        return due.at

    def on_turn(self, shard: ShardId) -> None:
        """Apply the commit that waited for its owner's turn."""
        if shard not in self.applying:
            self._next(shard)

    def apply(self, header: CommitHeader, new_id: Digest) -> None:
        """Start to apply a valid commit on top of the head."""
        shard, learner = header.shard, self.core.learner
        mine = None if learner is None else next((c for c in header.contributors if c.learner == learner.id), None)
        moves = self.delta.moves(shard, None if mine is None else mine.tokens_to)
        self.applying[shard] = (new_id, header)
        self.aggregation.close(shard)
        self.core.effects.append(Apply(header, new_id, *moves))

    def on_applied(self, shard: ShardId, head_id: Digest) -> None:
        """Make the applied commit or state the shard's head, and notify all listeners."""
        core = self.core
        entry = self.applying.get(shard)
        if entry is None or entry[0] != head_id:
            return
        del self.applying[shard]
        self.turned_down.discard(shard)
        _, target = entry
        chain = core.chains[shard]
        old = chain.head
        self.repairing.discard(shard)
        if old is not None and old.id == head_id:
            self.aggregation.on_repaired(shard)  # the head is unchanged, only its state was repaired
            self._next(shard)
            return
        if isinstance(target, CommitHeader):
            chain.advance(target, head_id)
        else:
            chain.replace(target, self.acceptance.lineage_of(target.head))
            self.refusals.forget(head_id, chain.ancestry)
        head = core.head(shard)
        core.heads_mark ^= mark_bits(head.id) ^ (0 if old is None else mark_bits(old.id))
        self._forget_request(shard, head)
        if core.is_current:
            self.contributions.adopt_step(chain.step)
        change = HeadChange(shard, old, head, target)
        for listener in self.listeners:
            listener.on_head_changed(change)
        is_followed = self.orphans.is_followed(head)
        self.aggregation.collections[shard].is_catching_up = is_followed
        if isinstance(target, CommitHeader) and target.owner != core.config.peer and not is_followed:
            relay_commit(core, self.reports, head_id, target, self._entries.pop(head_id, None))
        self._next(shard)

    def _next(self, shard: ShardId) -> None:
        """Continue the work that waited for this head: requests, a staged state, early commits."""
        self.log_requests.answer(shard)
        staged = self.staged.pop(shard, None)
        if staged is not None and not self.refusals.holds(staged.head.id, self.acceptance.lineage_of(staged.head)):
            self.install(staged)
        if shard not in self.applying:
            header, rivals = self.orphans.pop_child(self.core.head(shard))
            for rival in rivals:
                if rival.owner in self.core.participation.peers(shard):
                    self.on_head(rival.owner, Head(shard, rival.version, commit_id(rival), rival.tokens))
            if header is not None and not self.refusals.is_refused(header, commit_id(header)):
                self._apply_if_sound(None, header, commit_id(header))

    def on_apply_failed(self, shard: ShardId, reason: str) -> None:
        """Fetch the state from another peer: a commit gave another digest, or a state was unsuitable."""
        entry = self.applying.pop(shard, None)
        if entry is not None and isinstance(entry[1], CommitHeader):
            self.aggregation.on_commit_failed(entry[1])
        self.core.note("warning", "repair", f"shard {shard}: {reason}; fetching its state from another peer")
        donors = self.core.participation.donors(shard)
        if entry is not None and donors:
            self.fetch(shard, donors[len(self.asked) % len(donors)])
        self.log_requests.answer(shard)
        self.fetch_missing()
        if self.core.is_current:
            self.aggregation.reopen(shard)

    def reject(self, shard: ShardId, reason: str) -> None:
        """Reject a commit with invalid values.

        Every peer that can judge the commit rejects it, so the shard continues without it.
        """
        new_id, target = self.applying.pop(shard)
        if isinstance(target, CommitHeader):
            self.refusals.add(target, new_id, None, reason)
            self.aggregation.on_commit_failed(target)
        elif shard not in self.repairing:
            self.refusals.remember(new_id)
            text = f"shard {shard}: the state of version {target.head.version} is not taken: {reason}"
            self.core.note("warning", "fetch", text)
        self._next(shard)
        if shard not in self.applying and shard not in self.repairing:  # ``Repair`` reopens a shard in repair
            self.aggregation.reopen(shard)

    # -- other heads ---------------------------------------------------------------------------------------------------

    def on_head(self, peer: PeerId, theirs: Head) -> None:
        """Get a peer's head if it is heavier than this peer's; send this peer's if theirs is a lighter fork."""
        core, shard = self.core, theirs.shard
        if peer == core.config.peer:
            return  # an own commit of an earlier run, which is not on this chain
        self.reports.record(peer, theirs)
        if ("turn", shard) in core.alarms:  # a commit waits here, and most others may have applied it
            core.alarms.set(("turn", shard), core.now)
        chain = core.chains[shard]
        if chain.head is None or shard in self.applying:
            return
        self._confirm(shard)
        if is_heavier(theirs, chain.head):
            if core.now < core.membership.peers[peer].ignored_until:
                return
            known = self.wanted.get(shard)
            if shard not in self.asked and (known is None or is_heavier(theirs, known[1])):
                self.wanted[shard] = (peer, theirs)
                self.announced[shard] = theirs.id, core.now
                is_fork = theirs.version <= chain.head.version  # no child of the own head is on its way
                if core.is_current and (known is None or is_fork):  # a newcomer needs states before commits
                    most_s = core.membership.beat_s() if shard in self.turned_down else math.inf
                    is_urgent = is_fork or core.departure == "leaving"  # the time of who leaves is short
                    wait_s = 0.0 if is_urgent else min(most_s, self.aggregation.waits().commit_s)
                    core.alarms.set(("want", shard), core.now + wait_s)
        elif self._is_lighter_fork(theirs):
            core.send((peer,), Heads((chain.head,), core.step))
            self._follow_most(peer, shard)

    def _is_lighter_fork(self, theirs: Head) -> bool:
        """Return whether ``theirs``, which is not heavier, is not on this peer's chain, as far as its log reaches."""
        chain = self.core.chains[theirs.shard]
        assert chain.head is not None
        return theirs.id != chain.head.id and theirs.id not in chain.log_ids and theirs.version > 0

    def _follow_most(self, peer: PeerId, shard: ShardId) -> None:
        """Get the lighter chain that ``peer`` has, if most peers have long gone on with one."""
        if self.acceptance.is_left(shard) and shard not in self.asked and shard not in self.applying:
            self.fetch(shard, peer)

    def _confirm(self, shard: ShardId) -> None:
        """Allow merges on a head that was restored from disk, once most other peers report none that is heavier."""
        if self.aggregation.own_commits.is_unsure(shard) and self.reports.is_newest(shard):
            self.aggregation.confirm_head(shard)

    def request_wanted(self, shard: ShardId) -> None:
        """Request a heavier head that was reported but has not arrived by itself."""
        told_by, _ = self.wanted.pop(shard)
        peer = self._reporter(shard, told_by)
        if peer is not None and shard not in self.asked and shard not in self.applying:
            self._request_commits(shard, peer)
            self._ask_another_later(shard)

    def _request_commits(self, shard: ShardId, peer: PeerId) -> None:
        self.asked[shard] = peer
        self.core.alarms.set(("asked", shard), self.core.now + self.core.config.request_s)
        self.core.send((peer,), CommitsRequest(shard, self.core.head(shard).id))

    def _ask_another_later(self, shard: ShardId) -> None:
        self.core.alarms.set(("other", shard), self.core.now + self.aggregation.waits().commit_s)

    def on_fetch_advised(self, peer: PeerId, advice: FetchAdvised) -> None:
        """Fetch the shard's state, since the donor's log does not hold this peer's head."""
        head = self.core.chains[advice.shard].head
        if self.asked.get(advice.shard) == peer and head is not None and is_heavier(advice.head, head):
            self.fetch(advice.shard, peer)

    def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Download the shard's state, starting with ``peer``."""
        for topic in ("asked", "other"):  # a fetch ends by itself, in Fetched or Failed
            self.core.alarms.cancel((topic, shard))
        self.asked[shard] = peer
        self.core.effects.append(Fetch(shard, peer))

    def _forget_request(self, shard: ShardId, head: Head) -> None:
        if shard in self.asked and ("asked", shard) in self.core.alarms and not self.orphans.is_followed(head):
            self._end_request(shard)

    def _end_request(self, shard: ShardId) -> None:
        """Forget a request, or a fetch; of two fetches, the first may end after the second, and after a request."""
        self.asked.pop(shard, None)
        for topic in ("asked", "other"):
            self.core.alarms.cancel((topic, shard))

    def on_bad_commit(self, shard: ShardId, sender: PeerId | None) -> None:
        """Ask ``sender`` no more for now, if it was asked for the commits of this shard: one of them is invalid."""
        if self.asked.get(shard) == sender and ("asked", shard) in self.core.alarms:
            self.on_request_timeout(shard)

    def on_request_timeout(self, shard: ShardId) -> None:
        """Ignore a peer's heads for a while, since its answer did not come in time or was of no use."""
        peer = self.asked.get(shard)
        if peer is not None:
            self._end_request(shard)
            if (view := self.core.membership.peers.get(peer)) is not None:
                view.ignore_heads(self.core.now, self.core.config.request_s)

    def ask_another(self, shard: ShardId) -> None:
        """Ask the next peer for commits that have not come yet. That one has all its time, so that a thin line is not
        filled with answers of many."""
        if ("asked", shard) not in self.core.alarms:
            return
        if shard in self.applying or (other := self._reporter(shard)) is None:
            self._ask_another_later(shard)
        else:
            if ("turn", shard) in self.core.alarms:
                self._end_request(shard)  # what came waits for its owner's turn
            else:
                self.on_request_timeout(shard)
            self._request_commits(shard, other)

    def _reporter(self, shard: ShardId, *connected: PeerId) -> PeerId | None:
        """Return which donor, or other ``connected`` peer, to ask for a heavier head: who has reported one the longest,
        of those that deliver, and is not being asked."""
        head, found = self.core.head(shard), []
        for peer in (*self.core.participation.donors(shard), *connected):
            told, view = self.reports.of(peer, shard), self.core.membership.peers.get(peer)
            if told is None or view is None or (told.tokens, told.head) <= (head.tokens, head.id):
                continue
            if peer != self.asked.get(shard) and self.core.now >= view.ignored_until:
                found.append((view.ignored_s, told.moved_at, peer))
        return min(found)[-1] if found else None

    def _record_delivery(self, shard: ShardId, sender: PeerId) -> None:
        """Believe the next heads of a peer that was asked for what leads to one, if it has delivered that."""
        if self.asked.get(shard) == sender and (view := self.core.membership.peers.get(sender)) is not None:
            view.ignored_s = 0.0

    def on_fetched(self, event: Fetched) -> None:
        """Install a fetched state if it is still better than the own one."""
        peer, state = event.peer, event.state
        shard = state.head.shard
        problem = self.core.chains[shard].state_problem(state) or self.delta.problem(state)
        problem = problem or self.acceptance.judge(peer, state.head, event.lineage, event.owner)
        if problem is not None:
            self.on_fetch_failed(shard, peer, problem)
            return
        self._record_delivery(shard, peer)
        self._end_request(shard)
        if shard in self.applying:
            self.staged[shard] = state
        else:
            self.install(state)
        self.fetch_missing()

    def install(self, state: ShardState) -> None:
        """Start to replace the shard's state by a heavier one, or by a repaired one."""
        core, shard = self.core, state.head.shard
        head = core.chains[shard].head
        is_repair = head is not None and shard in self.repairing and state.head.id == head.id
        is_back = head is not None and head.id in core.abandoned
        is_better = is_back or head is None or is_heavier(state.head, head) or self.acceptance.is_left(shard)
        if not is_better and not is_repair:
            core.note("debug", "fetch", f"shard {shard}: fetched version {state.head.version} is not heavier, dropped")
            return
        learner = core.learner
        moves = self.delta.moves(shard, None if learner is None else self.delta.mark_in(learner, state).tokens)
        if is_back:
            moves = (None if learner is None else learner.id, (), (), True)
        if head is not None and not is_repair:
            core.note("info", "fork", f"shard {shard}: a fork with {state.head.tokens} tokens replaces {head.tokens}")
        lineage = self.acceptance.lineage_of(state.head)
        is_outvoted = self.acceptance.is_outvoted_for(state.head, lineage)
        farthest = math.inf if is_outvoted or is_back else core.chains[shard].farthest(state.head, lineage)
        self.applying[shard] = (state.head.id, state)
        self.aggregation.close(shard)
        core.effects.append(Install(state, *moves, farthest))

    def on_fetch_failed(self, shard: ShardId, peer: PeerId | None, reason: str) -> None:
        """Try another donor, since this one did not deliver."""
        self.core.note("info", "fetch", f"shard {shard} from {peer}: {reason}")
        self._end_request(shard)
        if peer is not None and peer in self.offers:
            self.offers[peer].pop(shard, None)
        self.turned_down.add(shard)
        self.fetch_missing()

    # -- heads, joining ------------------------------------------------------------------------------------------------

    def heads(self) -> Heads:
        """Return the heads of all shards that have one."""
        return Heads(tuple(c.head for c in self.core.chains if c.head is not None), self.core.step)

    def on_heads(self, peer: PeerId, message: Heads) -> None:
        """Compare heads with a peer's, and catch up where theirs are heavier."""
        self.contributions.adopt_step(message.step)
        for theirs in message.heads:
            self.reports.record(peer, theirs)
        if not self.core.is_current:
            self.offers.setdefault(peer, {}).update({h.shard: h for h in message.heads})
            self.fetch_missing()
        for theirs in message.heads:
            ours = self.core.chains[theirs.shard].head
            if ours is not None and is_heavier(theirs, ours):
                self.on_head(peer, theirs)
            elif ours is not None:
                self._confirm(theirs.shard)
                if self._is_lighter_fork(theirs):
                    self._follow_most(peer, theirs.shard)

    def fetch_missing(self) -> None:
        """Start a newcomer's next fetches, spread over the donors."""
        if self.core.is_current:
            return
        for chain in self.core.chains:
            shard = chain.shard
            if len(self.asked) >= MAX_FETCHES:
                return
            if chain.head is None and shard not in self.asked and shard not in self.applying:
                donors = sorted(p for p, heads in self.offers.items() if shard in heads)
                if donors and self.reports.is_known(shard):
                    founder = self.core.config.founder
                    is_asked = founder in donors and self.acceptance.is_doubted(shard)
                    self.fetch(shard, founder if is_asked else donors[shard % len(donors)])

    def become_current(self) -> None:
        """Start to take part in the run once every shard has a state."""
        core = self.core
        if not core.is_current and all(chain.head is not None for chain in core.chains):
            core.is_current = True
            self._want_what_was_offered()
            core.membership.owners.own_weight = core.weight
            self.contributions.on_current()
            core.note("info", "join", f"all {len(core.chains)} shards have arrived, at global step {core.step}")
            core.effects.append(BecameCurrent())

    def _want_what_was_offered(self) -> None:
        """Request the heads that were offered while joining.

        Peers do not send commits to a newcomer, so later commits are not on their way.
        """
        for peer, heads in self.offers.items():
            for head in heads.values():
                self.on_head(peer, head)
        self.offers.clear()
        for shard in self.wanted:
            self.core.alarms.set(("want", shard), self.core.now)

    def request_heads(self, peers: tuple[PeerId, ...]) -> None:
        """Ask ``peers`` for their heads."""
        self.core.send(tuple(filter(self.core.participation.is_donor, peers)), HeadsRequest())

    def find_donors(self) -> None:
        """While joining, ask the live peers for their heads, one after the other; earlier offers may be missing."""
        peers = self.core.participation.peers()
        if peers:
            self.fetch_missing()
            self.request_heads((peers[self.core.membership.sequence % len(peers)],))

    def on_peers_lost(self, lost: tuple[PeerId, ...]) -> None:
        """Drop requests to lost peers; fetches end by themselves."""
        for peer in lost:
            self.offers.pop(peer, None)
            self.reports.forget(peer)
        for shard in [s for s, p in self.asked.items() if p in lost and ("asked", s) in self.core.alarms]:
            self._end_request(shard)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads of commits that wait or are being applied."""
        held = {header.payload for header in self.orphans.of_shard(shard)}
        _, target = self.applying.get(shard, (None, None))
        return held | {target.payload} if isinstance(target, CommitHeader) else held

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of commits that wait or are being applied, and of the lineages of incoming states (H3e)."""
        found = {commit_id(header) for header in self.orphans.of_shard(shard)}
        commit, target = self.applying.get(shard, (None, None))
        for state in (target, self.staged.get(shard)):
            if isinstance(state, ShardState):
                found.update((state.head.id, *self.acceptance.lineage_of(state.head)))
        return found if commit is None else found | {commit}


# -- Repair of a corrupted shard ---------------------------------------------------------------------------------------
# The component that finds the corruption reports ``Failed("state")``. Until another peer has sent the shard's state,
# this peer neither merges nor contributes to the shard.


TRIES = 8
"""Attempts, at least a heartbeat apart, after which no peer is expected to have a corrupted shard's head. This peer
then goes on with its own state."""


class Repair:
    """Repairs corrupted shards with the states of other peers."""

    def __init__(self, core: Core, replication: Replication, aggregation: Aggregation) -> None:
        self.core = core
        self.replication = replication
        self.aggregation = aggregation
        self.tries: dict[ShardId, int] = {}
        """Attempts since the shard was last intact."""

    def start(self, shard: ShardId, reason: str) -> None:
        """Ask a donor for the state, if there may be one. Contributions that are here wait."""
        replication = self.replication
        self.core.note("warning", "repair", f"shard {shard}: {reason}")
        self.aggregation.drop_job(shard)
        tries = self.tries[shard] = self.tries.get(shard, 0) + 1
        donors = self._donors(shard, tries)
        is_busy = shard in replication.asked or shard in replication.applying
        if donors or is_busy:
            replication.repairing.add(shard)
        if donors and not is_busy:
            replication.fetch(shard, donors[self.core.membership.sequence % len(donors)])
        elif not donors:
            replication.repairing.discard(shard)
            self.aggregation.reopen(shard)

    def _donors(self, shard: ShardId, tries: int) -> tuple[PeerId, ...]:
        """Return the peers that may be asked. The head's owner may have signed another state than its commit gives, and
        only it can supply that: it is asked only if there is no other."""
        donors = self.core.participation.donors(shard) if tries <= TRIES else ()
        log = self.core.chains[shard].log
        others = tuple(p for p in donors if not log or p != log[-1].owner)
        return others or donors

    def blame_owner(self, shard: ShardId, witness: PeerId | None) -> None:
        """Go on with the state here, and bar the owner of the head: another peer has the same state, so this is what
        its commit gives, and not what it signed."""
        log = self.core.chains[shard].log
        if log and log[-1].owner != self.core.config.peer:
            owner, version = log[-1].owner, log[-1].version
            text = (
                f"{owner} has signed other digests for version {version} of shard {shard} than its values give, as "
                f"{witness} has found, too: it owns nothing for {TERM} versions. This peer goes on with its own state. "
                f"To remove that owner: p2pdiloco members ban {owner}"
            )
            self.core.note("warning", "commit", text)
            self.replication.refusals.barred_owners.bar(owner, shard, version)
        self.replication.repairing.discard(shard)
        self.aggregation.reopen(shard)

    def retry(self) -> None:
        """Ask again for states that have not come: the last donor did not have them, or has left."""
        self.tries = {shard: tries for shard, tries in self.tries.items() if shard in self.replication.repairing}
        for shard in sorted(self.replication.repairing):
            if shard not in self.replication.asked and shard not in self.replication.applying:
                self.start(shard, "its state has not arrived yet")
