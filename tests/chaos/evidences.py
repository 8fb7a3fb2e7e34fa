"""A chaos run that kept every promise, made up, for tests that break one promise at a time."""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdiloco.protocol.manifest import InnerConfig, ModelConfig, RunConfig
from tests.chaos.evidence import Commit, Evidence, LearnerLife, Left, Life, PeerEvidence, Struck, Twin
from tests.chaos.schedule import Fault, Plan, Schedule

BEGAN = 1000.0
SETTLING, SETTLED, OVER = BEGAN + 60.0, BEGAN + 80.0, BEGAN + 90.0
SHARDS = 2
TOKENS = 80_000
SAID = "another process takes part with this peer's identity (12D3..., at /ip4/...)"
RUN = RunConfig(name="made-up", model=ModelConfig(context=100), inner=InnerConfig(batch=10, steps=1000))
PLAN = Plan(name="made-up", peers=3, seconds=60.0, settle_s=20.0, run=RUN)


def commits() -> tuple[Commit, ...]:
    """One version of every shard a second."""
    return tuple(
        Commit(time=BEGAN + version, shard=shard, version=version, head=f"head-{shard}-{version}")
        for version in range(1, 86)
        for shard in range(SHARDS)
    )


def peer(name: str) -> PeerEvidence:
    """One that lived from the start to the end."""
    return PeerEvidence(
        name=name,
        lives=(
            Life(began=BEGAN - 20, trained=BEGAN, ended=OVER, status=0, is_expected=True, blocked_s=0.1, trained_s=80),
        ),
        commits=commits(),
        learners=(LearnerLife(learner=f"{name}/1", tokens=TOKENS, compute_s=72.0),),
        left=Left(
            versions=(85,) * SHARDS,
            heads=tuple(f"head-{shard}-85" for shard in range(SHARDS)),
            digests=tuple(f"digest-{shard}-85" for shard in range(SHARDS)),
            tokens_unmerged=0,
            tokens_merged=3 * TOKENS,
            learner=f"{name}/1",
            learner_tokens=TOKENS,
        ),
        marks={f"{other}/1": (TOKENS,) * SHARDS for other in PLAN.names},
        journal_events=1000,
        chains=tuple(frozenset(f"head-{shard}-{version}" for version in range(1, 86)) for shard in range(SHARDS)),
    )


def struck(number: int, kind: Any, peers: tuple[str, ...], began: float, ended: float) -> Struck:
    """A fault, by seconds from the beginning."""
    return Struck(number=number, kind=kind, peers=peers, began=BEGAN + began, ended=BEGAN + ended)


def evidence(**changes: Any) -> Evidence:
    """The whole run; ``changes`` replace fields of it."""
    faults = (struck(1, "cut", ("A",), 10.0, 15.0), struck(2, "stop-learner", ("B",), 30.0, 34.0))
    schedule = Schedule(
        seed=1,
        plan=PLAN,
        faults=tuple(
            Fault(
                number=f.number, at=f.began - BEGAN, kind=f.kind, peers=f.peers, duration_s=round(f.ended - f.began, 2)
            )
            for f in faults
        ),
    )
    whole = Evidence(
        schedule=schedule,
        began=BEGAN,
        settling=SETTLING,
        settled=SETTLED,
        faults=faults,
        skipped=0,
        twins=(Twin(peer="A", given_s=60.0, status=2, said=SAID),),
        peers=tuple(peer(name) for name in PLAN.names),
        last="C",
        leftovers=(),
    )
    return msgspec.structs.replace(whole, **changes)


def with_peer(name: str, **changes: Any) -> Evidence:
    """The run in which one peer's evidence is otherwise."""
    whole = evidence()
    peers = tuple(msgspec.structs.replace(p, **changes) if p.name == name else p for p in whole.peers)
    return msgspec.structs.replace(whole, peers=peers)
