"""The seven invariants of docs/protocol.md, omniscient, one method each, called at every event that could break it.

A violation is a sentence; the first one ends the run, since what follows would only be its echo.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, NamedTuple

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, ShardId, peer_of
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Equivocation, GroupMerge, Head
from tests.machine_sim.integer_shards import GlobalShard, tokens_in, value_of
from tests.machine_sim.learner import Copy
from tests.simulation.topologies import pair_of, parts

if TYPE_CHECKING:
    from tests.machine_sim.learner import Learner
    from tests.machine_sim.process import Process
    from tests.machine_sim.world import World


class Known(NamedTuple):
    """One commit, as the omniscient checker knows it."""

    version: int
    parent: Digest
    value: GlobalShard
    header: CommitHeader | None


class Checks:
    """What was seen so far, and what was wrong with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[str] = []
        self.tokens_lost = 0
        self.is_over = False
        self.commits: dict[tuple[ShardId, Digest], Known] = {}
        self.heaviest: dict[ShardId, int] = {}
        """Tokens of each shard's heaviest head,"""
        self.newest: dict[ShardId, int] = {}
        """and its version. A fork that lost may have had more of them."""
        self.advanced_at: dict[ShardId, float] = {}
        """When that was reached."""
        self.versions = 0
        self.forks = 0
        self.children: dict[tuple[ShardId, Digest], int] = {}
        self.tokens_merged = 0
        self.honesty = Honesty()
        self.group_merges: set[tuple[ShardId, Digest, GroupMerge]] = set()
        """Groups' merges as their collectors have signed them, with the shard and the head that each is relative to."""
        self.finished: dict[LearnerId, list[tuple[int, Block]]] = {}
        """By learner, the blocks of data that it has trained, with its tokens at their ends."""

    def violated(self, invariant: int, sentence: str) -> None:
        """Note a violation and stop."""
        self.violations.append(f"invariant {invariant}, at {self.world.now:.3f} s: {sentence}")
        self.is_over = True

    # -- 1: one digest for one version of one chain, and only children of the head are applied -------------------------

    def founded(self, state: ev.ShardState, value: GlobalShard) -> None:
        """Version 0."""
        self.commits[state.head.shard, state.head.id] = Known(0, Digest(""), value, None)
        self.heaviest[state.head.shard] = self.newest[state.head.shard] = 0
        self.advanced_at[state.head.shard] = 0.0

    def applied(
        self, process: Process, header: CommitHeader, commit: Digest, base: GlobalShard, value: GlobalShard
    ) -> None:
        """A process took a commit on top of its head."""
        shard = header.shard
        known = self.commits.get((shard, commit))
        if known is None:
            known = self._new_commit(process, header, commit, base, value)
        if known.value.digest != value.digest:
            self.violated(1, f"{process.name} has another state at {commit[:8]} than others have")
        self._values_fit(process, value)
        # A commit may have been made before: when all who had it lost their disks, its owner makes the same one again.
        if header.tokens > self.heaviest[shard] and not value.is_wild:
            self.heaviest[shard], self.newest[shard] = header.tokens, header.version
            self.advanced_at[shard] = self.world.now

    def installed(self, process: Process, state: ev.ShardState, value: GlobalShard) -> None:
        """A process took a fetched state."""
        known = self.commits.get((state.head.shard, state.head.id))
        if known is None:
            self.violated(1, f"{process.name} installs {state.head.id[:8]} of shard {state.head.shard}, made by nobody")
        elif known.value.digest != value.digest:
            self.violated(1, f"{process.name} has another state at {state.head.id[:8]} than others have")
        self._values_fit(process, value)
        shard = state.head.shard  # it may have left a heavier chain for that of most (H3f)
        self.heaviest[shard] = min(self.heaviest[shard], max(self._living_tokens(shard, process), state.head.tokens))

    def _living_tokens(self, shard: ShardId, but: Process | None = None) -> int:
        """Return the tokens of the heaviest head of the living, ``but`` one."""
        cores = [process.machine.core for process in self.world.living() if process is not but]
        heads = [head for core in cores if (head := core.chains[shard].head) and head.id not in core.abandoned]
        return max((head.tokens for head in heads), default=0)

    def _values_fit(self, process: Process, value: GlobalShard) -> None:
        if value.is_wild and not process.setting.lies:
            self.violated(1, f"{process.name} has taken values that a liar made up")

    def _new_commit(
        self, process: Process, header: CommitHeader, commit: Digest, base: GlobalShard, value: GlobalShard
    ) -> Known:
        shard = header.shard
        known = self.commits[shard, commit] = Known(header.version, header.parent, value, header)
        parent = self.commits.get((shard, header.parent))
        if parent is None or parent.version + 1 != header.version or parent.value.digest != base.digest:
            self.violated(1, f"{process.name} commits {commit[:8]} of shard {shard} on a parent that nobody has")
        if value.is_wild:
            return known  # a liar's own affair
        self.versions += 1
        siblings = self.children[shard, header.parent] = self.children.get((shard, header.parent), 0) + 1
        self.forks += siblings > 1
        self.merged_once(process, header, base, value)
        return known

    def made(self, name: PeerId, header: CommitHeader) -> None:
        """A peer makes a commit."""
        if not self.honesty.made(header) and not self.world.settings[name].lies:
            self.violated(1, f"{name} makes two commits of version {header.version} of shard {header.shard}")
        for group in () if self.world.settings[name].lies else header.groups():
            is_signed = (header.shard, header.parent, group) in self.group_merges
            if not is_signed and not self.world.settings[group.collector].lies:
                self.violated(1, f"{name} commits another merge of {group.collector} than that which it has signed")

    def contradicted(self, owner: PeerId) -> None:
        """Two commits of one owner on one parent were seen."""
        if not self.world.settings[owner].lies and not self.honesty.is_excused(owner):
            self.violated(1, f"{owner}, which is honest, is proved to have made two commits of one version")

    # -- 2: no token is merged twice -----------------------------------------------------------------------------------

    def merged_once(self, process: Process, header: CommitHeader, base: GlobalShard, value: GlobalShard) -> None:
        """Along a chain each learner's token range is merged at most once, and is the range that the commit names (its
        end, if that is as long as a contribution may be)."""
        if header.shard == 0:
            self.blocks_travel(header)
        if process.machine.core.config.is_overwrite or self.world.has_gone_back:
            return  # a learner that is reset gives fewer tokens than its range names
        most_steps = process.machine.core.chains[header.shard].limits.range_steps
        for c in self._honest(header):
            self.tokens_merged += c.tokens
            held = tokens_in(base.of(c.learner))
            is_whole = held == c.tokens_from or (held < c.tokens_from and c.steps == most_steps)
            is_held = base.of(c.learner) == value_of(held) and value.of(c.learner) == value_of(c.tokens_to)
            if not (is_whole and is_held):
                self.violated(
                    2,
                    f"commit {header.version} of shard {header.shard} by {header.owner} says it takes {c.learner} from "
                    f"{c.tokens_from} to {c.tokens_to}, but holds {tokens_in(base.of(c.learner))} to "
                    f"{tokens_in(value.of(c.learner))}",
                )

    def _honest(self, header: CommitHeader) -> list[Contributor]:
        """Those who tell the truth of themselves."""
        return [c for c in header.contributors if not self.world.settings[peer_of(c.learner)].lies]

    def blocks_travel(self, header: CommitHeader) -> None:
        """A commit of shard 0 carries just the blocks that its learners finished within their ranges."""
        for c in self._honest(header):
            finished = self.finished.get(c.learner, [])
            expected = tuple(sorted(b for tokens, b in finished if c.tokens_from < tokens <= c.tokens_to))
            if c.blocks != expected:
                self.violated(2, f"commit {header.version} holds blocks {c.blocks} of {c.learner}, not {expected}")

    # -- 3: a living learner's tokens are merged or in its delta -------------------------------------------------------

    def moved(self, learner: Learner, shard: ShardId, own: int) -> None:
        """A learner was moved in its own component: a token vanished from it, or is there twice."""
        if learner.process.setting.lies:
            return  # it has not trained what it said
        view = learner.process.machine.core.learner
        if view is not None and view.floors[shard].tokens:
            return  # the run has gone back: what it had trained before is discarded
        tokens = tokens_in(own)
        self.tokens_lost += max(1, -tokens)
        self.violated(3, f"{learner.name} is moved by {tokens} of its own tokens in shard {shard}")

    def lost(self, learner: Learner, shard: ShardId, tokens: int) -> None:
        """A learner was reset while it held progress."""
        if tokens and not learner.process.setting.lies and not self.world.has_gone_back:
            self.tokens_lost += abs(tokens)
            self.violated(3, f"{learner.name} is reset in shard {shard} and loses {tokens} tokens")

    def conserved(self, learner: Learner, values: list[GlobalShard]) -> None:
        """At the end: what is merged plus the learner's delta is all that it trained."""
        view = learner.process.machine.core.learner
        assert view is not None
        if self.world.has_gone_back:
            return
        for shard, value in enumerate(values):
            mark = view.marks[shard].tokens
            if value.of(learner.name) != value_of(mark):
                missing = mark - tokens_in(value.of(learner.name))
                self.tokens_lost += abs(missing)
                self.violated(3, f"shard {shard} lacks {missing} tokens of {learner.name}, which holds them for merged")

    # -- 4: heads become equal -----------------------------------------------------------------------------------------

    def heads_equal(self) -> None:
        """At rest, all living peers that are connected, through others if need be, have the same heads."""
        if different := self.different_heads():
            self.violated(4, different)

    def different_heads(self) -> str | None:
        """Which shard has several among peers that are connected, through others if need be; None if none has."""
        for part in self.together():
            for shard in range(len(part[0].states.heads)):
                found: dict[Digest | None, list[str]] = {}
                for process in part:
                    found.setdefault(process.states.heads[shard], []).append(process.name)
                if len(found) > 1:
                    told = "; ".join(f"{str(head)[:8]} at {', '.join(names)}" for head, names in found.items())
                    return f"shard {shard} has {len(found)} heads: {told}"
        return None

    def together(self) -> list[list[Process]]:
        """The living peers that have all states, by the parts in which they can reach each other."""
        current = {p.name: p for p in self.world.living() if p.machine.core.is_current}
        return [[current[name] for name in sorted(part)] for part in parts(current, self.world.network.apart)]

    def joined(self) -> None:
        """After the healing, every living peer has all states, if it can reach somebody who has."""
        reached = [p.name for part in self.together() for p in part]
        apart = self.world.network.apart
        for process in self.world.living():
            is_near = any(pair_of(process.name, name) not in apart for name in reached)
            if not process.machine.core.is_current and is_near:
                missing = [c.shard for c in process.machine.core.chains if c.head is None]
                self.violated(4, f"{process.name} has still no state of shards {missing}")

    # -- 5: versions advance -------------------------------------------------------------------------------------------

    def progress_begins(self) -> None:
        """From now on what grows beyond the heaviest head of the living is progress: heavier ones may have died."""
        for shard in self.advanced_at:
            self.heaviest[shard] = self._living_tokens(shard)
            self.advanced_at[shard] = max(self.advanced_at[shard], self.world.now)

    def went_back(self, head: Head) -> None:
        """The run goes on from ``head``, or from a later one: what grows beyond it is progress."""
        self.heaviest[head.shard] = min(self.heaviest[head.shard], head.tokens)

    def merging(self, process: Process, contributions: int) -> None:
        """Nobody merges less than the quorum: K, or all who participate and stay if they are fewer."""
        core = process.machine.core
        stay = sum(not core.membership.is_departing(peer) for peer in core.membership.participating)
        stay += core.is_participating() and not core.departure
        quorum = min(core.config.min_quorum, stay)
        if contributions < quorum:
            self.violated(5, f"{process.name} merges {contributions} contributions, the quorum is {quorum}")

    def closing_in_time(self, process: Process) -> None:
        """With the quorum in, a version waits for nobody longer than the takeover time of each owner before. An own
        commit that cannot be applied is tried again and again (E1c)."""
        core = process.machine.core
        if process.paused_until > self.world.now - 2.0:
            return
        for shard, collection in enumerate(process.machine.aggregation.collections):
            is_due = process.machine.aggregation.own_commits.not_before(ShardId(shard)) <= core.now
            if collection.quorum_at is not None and not collection.is_closed and is_due:
                longest_s = (len(core.membership.owners.candidates) + 1) * core.config.takeover_ceiling_s + 1.0
                if core.now - collection.quorum_at > longest_s:
                    self.violated(
                        5, f"{process.name} has had the quorum for shard {shard} since {collection.quorum_at}"
                    )

    def left(self, process: Process) -> None:
        """An orderly leave while nothing fails has merged everything."""
        if self.world.conditions.are_leaves_whole and process.learner is not None:
            view = process.machine.core.learner
            if view is not None and process.machine.core.unmerged_tokens():
                self.violated(5, f"{process.name} leaves with {process.machine.core.unmerged_tokens()} tokens unmerged")

    # -- 6: everything is bounded --------------------------------------------------------------------------------------

    def after_events(self, process: Process) -> None:
        """The machine's own invariants and bounds; every few events of a process."""
        try:
            process.machine.check_invariants()
        except AssertionError as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            self.violated(6, f"{process.name}: {line.line}: {error}")
        self.bounded(process)
        self.known_heads(process)
        self.closing_in_time(process)

    def known_heads(self, process: Process) -> None:
        """The machine's heads are the driver's, and somebody made them (invariant 1)."""
        for chain, head in zip(process.machine.core.chains, process.states.heads, strict=True):
            if chain.head is not None and (chain.head.id != head or (chain.shard, chain.head.id) not in self.commits):
                self.violated(
                    1, f"{process.name} claims head {chain.head.id[:8]} of shard {chain.shard}, which is not so"
                )

    def bounded(self, process: Process) -> None:
        """Queues of the driver that only the machine can fill."""
        shards = len(process.states.heads)
        peers = len(self.world.settings)
        if len(process.jobs) > 8 * shards:
            self.violated(6, f"{process.name} has {len(process.jobs)} jobs waiting")
        if len(process.store) > 200 + shards * (3 * process.machine.core.config.log_length + 2 * peers):
            self.violated(6, f"{process.name} holds {len(process.store)} payloads")
        if process.learner is not None:
            copies = sum(isinstance(command, Copy) for command in process.learner.commands)
            if copies > len(process.machine.core.config.fragments):
                self.violated(6, f"{process.name} has asked for {copies} snapshots at once")

    # -- 7: the learner never waits ------------------------------------------------------------------------------------

    def pausing(self, process: Process) -> None:
        """The node stops a learner only when the peer is on its way out, or the run's budget is spent."""
        if not process.machine.core.departure and not process.machine.contributions.budget.is_spent:
            self.violated(7, f"{process.name} stops its learner")


# -- Rule E1, omniscient: an honest owner makes one commit of a parent, in all its lives; no proof says o --------------


class Honesty:
    """Of all peers of a world."""

    def __init__(self) -> None:
        self._made: dict[tuple[PeerId, Digest], CommitHeader] = {}
        """By owner and parent."""
        self._seen: dict[tuple[PeerId, PeerId, Digest], CommitHeader] = {}
        """Signed commits by who has them, owner and parent."""
        self._forgetful: set[PeerId] = set()
        """Peers that lost their disk."""

    def made(self, header: CommitHeader) -> bool:
        """Whether what an honest owner makes now is the only commit of its parent that it has made."""
        return self._made.setdefault((header.owner, header.parent), header) == header

    def forgot(self, peer: PeerId) -> None:
        """Its disk is gone, and what it made with it."""
        self._made = {key: header for key, header in self._made.items() if key[0] != peer}
        self._forgetful.add(peer)

    def compared(self, peer: PeerId, header: CommitHeader) -> Equivocation | None:
        """``peer`` has a signed commit: what it proves with another one that it has."""
        first = self._seen.setdefault((peer, header.owner, header.parent), header)
        return None if first == header else Equivocation(first, header, b"", b"")

    def is_excused(self, peer: PeerId) -> bool:
        """Whether an honest peer may have made two commits of one parent."""
        return peer in self._forgetful
