"""Chains: what extends one, what wins over it, what it keeps."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import msgspec
import pytest

from p2pdiloco import protocol
from p2pdiloco.protocol.chain import MARK_LIFE_LOGS, Chain, HeadListener, genesis_head, is_heavier
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.ids import Digest, LearnerId, PeerId, RunId, ShardId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from tests.machine_sim.scenarios import base_config

SHARD = ShardId(0)
A, B = LearnerId("a/1"), LearnerId("b/1")


def founded(length: int = 4) -> Chain:
    chain = Chain(SHARD, length)
    chain.replace(ShardState(genesis_head(RunId("r"), SHARD, Digest("0")), 0, ()))
    return chain


def child(chain: Chain, *contributors: Contributor) -> CommitHeader:
    assert chain.head is not None
    tokens, counts = chain.count(contributors or [given(A, 0, 1)], ())
    return CommitHeader(
        shard=SHARD,
        version=chain.head.version + 1,
        parent=chain.head.id,
        step=8,
        owner=PeerId("a"),
        contributors=contributors,
        tokens=chain.head.tokens + tokens,
        payload=Digest("p"),
        result=Digest("r"),
        record=chain.record_after(chain.head.version + 1, contributors),
        counts=counts,
    )


def given(learner: LearnerId, start: int, stop: int) -> Contributor:
    return Contributor(learner, start, stop, start, stop)


def test_a_child_of_the_head_extends_it() -> None:
    chain = founded()
    header = child(chain, given(A, 0, 10), given(B, 0, 5))
    assert chain.problem(header) is None
    chain.advance(header, commit_id(header))
    assert chain.head == Head(SHARD, 1, commit_id(header), 15)
    assert chain.marks == {A: Mark(10, 10, 1), B: Mark(5, 5, 1)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parent": Digest("x")}, "parent"),
        ({"version": 7}, "parent"),
        ({"tokens": 99}, "cumulative"),
        ({"contributors": ()}, "no contributors"),
        ({"contributors": (given(B, 0, 5), given(A, 0, 5))}, "not sorted"),
        ({"contributors": (given(A, 0, 5), given(A, 5, 10))}, "not sorted"),
        ({"contributors": (given(A, 0, 0),)}, "empty range"),
    ],
)
def test_what_does_not_extend_a_chain(changes: dict[str, object], told: str) -> None:
    chain = founded()
    header = msgspec.structs.replace(child(chain, given(A, 0, 10)), **changes)
    problem = chain.problem(header)
    assert problem is not None
    assert told in problem


def test_tokens_are_merged_once() -> None:
    chain = founded()
    header = child(chain, given(A, 0, 10))
    chain.advance(header, commit_id(header))
    problem = chain.problem(child(chain, given(A, 5, 15)))
    assert problem is not None
    assert "merged already" in problem


def test_the_heavier_head_wins_and_the_larger_id_breaks_the_tie() -> None:
    light, heavy = Head(SHARD, 9, Digest("f"), 10), Head(SHARD, 2, Digest("a"), 11)
    assert is_heavier(heavy, light)
    assert not is_heavier(light, heavy)
    tied = Head(SHARD, 9, Digest("e"), 10)
    assert is_heavier(light, tied)
    assert not is_heavier(tied, light)
    assert not is_heavier(light, light)


def test_version_0_is_named_by_the_run() -> None:
    assert genesis_head(RunId("r"), SHARD, Digest("0")) != genesis_head(RunId("s"), SHARD, Digest("0"))


def test_logs_and_marks_are_bounded() -> None:
    chain = founded(length=4)
    first = child(chain, given(A, 0, 1))
    chain.advance(first, commit_id(first))
    for i in range(MARK_LIFE_LOGS * 4 + 2):
        header = child(chain, given(B, i, i + 1))
        chain.advance(header, commit_id(header))
    assert len(chain.log) == len(chain.log_ids) == 4
    assert A not in chain.marks
    assert B in chain.marks


def test_commits_after_a_head() -> None:
    chain = founded()
    assert chain.head is not None
    start = chain.head.id
    headers = []
    for i in range(3):
        header = child(chain, given(A, i, i + 1))
        chain.advance(header, commit_id(header))
        headers.append(header)
    assert chain.commits_after(start) == headers
    assert chain.commits_after(commit_id(headers[1])) == headers[2:]
    assert chain.commits_after(commit_id(headers[2])) == []
    assert chain.commits_after(Digest("of another fork")) is None


def test_each_component_that_follows_heads_is_told_of_them() -> None:
    """One that is missing from the machine's list would keep what it knew of the last head."""
    modules = [import_module(f"p2pdiloco.protocol.{found.name}") for found in iter_modules(protocol.__path__)]
    classes = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    following = {item for item in classes if "on_head_changed" in vars(item)} - {HeadListener}
    assert len(following) > 5
    assert {type(listener) for listener in Machine(base_config()).replication.listeners} == following
