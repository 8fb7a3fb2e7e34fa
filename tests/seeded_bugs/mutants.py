"""Deliberate bugs: each replaces one small decision of the protocol, and the seeds of the normal test run must find it.

A check that cannot fail is a defect. Nothing here is reachable from a real peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from p2pdiloco.protocol import (
    aggregation,
    chain,
    contributions,
    gathering,
    heartbeat,
    machine,
    replication,
    shutdown,
    waiting,
)
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.contributions import Ledger, Walk
from p2pdiloco.protocol.effects import PauseLearner
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Contribution, Contributor, Head

Patch = tuple[Any, str, Any]
"""Owner, attribute, replacement."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug ``name`` is in the protocol while this lasts.

    Raises:
        KeyError: there is no such bug.
    """
    patches = MUTANTS[name]()
    originals = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, replacement in patches:
        setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def _no_parent_check() -> list[Patch]:
    def extends(self: chain.Chain, header: CommitHeader) -> bool:
        return self.head is not None and header.version == self.head.version + 1

    return [(chain.Chain, "extends", extends)]


def _never_merged(self: chain.Chain, contributor: Contributor) -> bool:
    return False


def _counted_twice_after_a_takeover() -> list[Patch]:
    on_head_changed = contributions.Contributions.on_head_changed

    def keeps_pending(self: contributions.Contributions, change: chain.HeadChange) -> None:
        shard = change.shard
        pending = self.pending.get(shard)
        on_head_changed(self, change)
        if pending is not None and pending.rank > 0:
            pending.contribution = msgspec.structs.replace(pending.contribution, base=self.core.head(shard))
            self.pending[shard] = pending
            self._offer(shard)

    return [(contributions.Contributions, "on_head_changed", keeps_pending), (chain.Chain, "is_merged", _never_merged)]


def _stale_accepted() -> list[Patch]:
    def is_on_head(contribution: Contribution, head: Head) -> bool:
        return contribution.base.version <= head.version

    return [(aggregation, "is_on_head", is_on_head), (chain.Chain, "is_merged", _never_merged)]


def _no_tie_break() -> list[Patch]:
    def is_heavier(a: Head, b: Head) -> bool:
        return a.tokens > b.tokens

    return [(replication, "is_heavier", is_heavier)]


def _takeover_forgets() -> list[Patch]:
    due = contributions.Contributions.on_takeover_due

    def forgets(self: contributions.Contributions, shard: ShardId) -> None:
        self.ledgers[shard].edges.clear()
        due(self, shard)

    return [(contributions.Contributions, "on_takeover_due", forgets)]


def _carry_drops_progress() -> list[Patch]:
    def walk(self: contributions.DeltaReconciliation, shard: ShardId, to_tokens: int) -> Walk | None:
        return None

    return [(contributions.DeltaReconciliation, "walk", walk)]


def _unbounded_log() -> list[Patch]:
    init = chain.Chain.__init__

    def unbounded(self: chain.Chain, *arguments: Any) -> None:
        init(self, *arguments)
        self.log, self.log_ids = deque(), deque()

    return [(chain.Chain, "__init__", unbounded)]


def _newcomer_seeds() -> list[Patch]:
    started = machine.Machine._on_started

    def seeds(self: machine.Machine, event: ev.Started) -> None:
        states = event.shards or tuple(
            ev.ShardState(chain.genesis_head(self.core.config.run, c.shard, Digest("fresh")), 0, ())
            for c in self.core.chains
        )
        started(self, ev.Started(states, event.lineages))

    return [(machine.Machine, "_on_started", seeds)]


def _endless_grace() -> list[Patch]:
    def endless(**_: float) -> float:
        return 1e9

    return [(gathering, "grace_window_s", endless)]


def _quorum_too_small() -> list[Patch]:
    def decide(view: waiting.QuorumView) -> waiting.Decision:
        return waiting.decide(view._replace(min_quorum=view.min_quorum - 1))

    return [(gathering, "decide", decide)]


def _quorum_too_large() -> list[Patch]:
    def decide(view: waiting.QuorumView) -> waiting.Decision:
        return waiting.decide(view._replace(min_quorum=view.min_quorum + 1))

    return [(gathering, "decide", decide)]


def _fork_without_restore() -> list[Patch]:
    walk = Ledger.walk

    def forwards(self: Ledger, old: int, new: int) -> Walk | None:
        found = walk(self, old, new)
        return None if found is None else Walk(found.settled, ())

    return [(Ledger, "walk", forwards)]


def _payloads_forgotten() -> list[Patch]:
    def payloads(self: machine.Machine, shard: ShardId) -> set[Digest]:
        return self.aggregation.payloads(shard) | self.replication.payloads(shard)

    return [(machine.Machine, "payloads", payloads)]


def _learner_waits() -> list[Patch]:
    ask = contributions.Contributions._ask_for_snapshot

    def pauses(self: contributions.Contributions, fragment: FragmentId) -> None:
        ask(self, fragment)
        self.core.effects.append(PauseLearner())

    return [(contributions.Contributions, "_ask_for_snapshot", pauses)]


def _joiner_gives_up() -> list[Patch]:
    def seek(self: replication.Replication) -> None:
        return None

    ask = replication.Replication.request_heads

    def ask_once(self: replication.Replication, peers: tuple[PeerId, ...]) -> None:
        asked = self.__dict__.setdefault("asked_once", set())
        ask(self, tuple(peer for peer in peers if self.core.is_current or peer not in asked))
        asked.update(peers)

    return [(replication.Replication, "find_donors", seek), (replication.Replication, "request_heads", ask_once)]


def _leaves_at_once() -> list[Patch]:
    def flush(self: shutdown.Shutdown) -> None:
        self._leave_now("info", "at once")

    return [(shutdown.Shutdown, "_flush", flush)]


def _heads_never_compared() -> list[Patch]:
    def saw(self: replication.Replication, peer: str, theirs: Head) -> None:
        return None

    return [(replication.Replication, "on_head", saw)]


def _round_never_over() -> list[Patch]:
    def announced_once(self: contributions.Contributions, fragment: int, step: int, *, is_mine: bool) -> None:
        if not self.rounds[fragment].open:
            opened(self, FragmentId(fragment), step, is_mine=is_mine)

    opened = contributions.Contributions.open
    return [(contributions.Contributions, "open", announced_once)]


def _one_way_connections_stay() -> list[Patch]:
    return [(heartbeat, "DEAF_BEATS", 10**9)]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "no parent check": _no_parent_check,
    "contribution counted twice after a takeover": _counted_twice_after_a_takeover,
    "stale contribution accepted": _stale_accepted,
    "fork rule without the tie break": _no_tie_break,
    "takeover that forgets a contribution": _takeover_forgets,
    "carry that drops the snapshot's progress": _carry_drops_progress,
    "unbounded log": _unbounded_log,
    "newcomer seeds a run": _newcomer_seeds,
    "grace window that never ends": _endless_grace,
    "quorum off by one, too small": _quorum_too_small,
    "quorum off by one, too large": _quorum_too_large,
    "fork that does not restore contributions": _fork_without_restore,
    "payloads forgotten too early": _payloads_forgotten,
    "learner waits for its turn": _learner_waits,
    "joiner asks only once": _joiner_gives_up,
    "leaves without contributing": _leaves_at_once,
    "heads are never compared": _heads_never_compared,
    "round announced only when all shards are done": _round_never_over,
    "connections that carry one way stay": _one_way_connections_stay,
}
