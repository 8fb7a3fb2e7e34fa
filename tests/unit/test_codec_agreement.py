"""Contributions that most others disagree with weigh less; nothing is judged where nothing can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.plain_gradient import Vector
from p2pdiloco.codec import agreement
from p2pdiloco.codec.agreement import JUDGED, AgreementHistory, Judgement, least_factors
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.codec.merge import merge
from p2pdiloco.protocol.config import LEAST_FACTOR

ELEMENTS = 1 << 15


def honest(count: int, seed: int, elements: int = ELEMENTS, spread: float = 2.0) -> list[Tensor]:
    """Vectors with a direction in common, and noise of their own: cosines of 1 / (1 + spread ** 2)."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(elements, generator=generator)
    return [common + spread * torch.randn(elements, generator=generator) for _ in range(count)]


def judged(history: AgreementHistory, vectors: list[Tensor], sample: bytes = b"") -> Judgement:
    names = [f"learner {index}" for index in range(len(vectors))]
    return history.judge(names, [Vector(v) for v in vectors], sample=sample)


def test_honest_contributions_count_in_full() -> None:
    history = AgreementHistory()
    for sync_round in range(20):
        assert judged(history, honest(5, sync_round)).factors == []


def test_a_contribution_that_points_away_from_the_others_keeps_a_tenth() -> None:
    vectors = honest(3, 1)
    lie = -sum(vectors, torch.zeros(ELEMENTS))
    found = judged(AgreementHistory(), [*vectors, lie])
    assert found.factors == [100, 100, 100, LEAST_FACTOR]
    assert found.agreements[3] < 0.0 < min(found.agreements[:3])


def test_liars_that_are_fewer_than_half_of_the_others_lower_nobody_honest() -> None:
    """Three of seven that agree with each other entirely, and with nobody else."""
    drift = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(20))
    factors = judged(AgreementHistory(), [*honest(4, 2), drift, drift, drift]).factors
    assert factors[:4] == [100] * 4
    assert max(factors[4:]) < 50


def test_liars_that_are_half_of_the_others_lower_nobody_honest() -> None:
    """One of three: the larger of two agreements is that with the other honest one."""
    first, second = honest(2, 10)
    factors = judged(AgreementHistory(), [first, second, -first - second]).factors
    assert factors == [100, 100, LEAST_FACTOR]


def test_two_contributions_are_not_judged() -> None:
    v = honest(1, 3)[0]
    assert judged(AgreementHistory(), [v, -v]) == Judgement([], [])


def test_vectors_without_anything_in_common_are_not_judged() -> None:
    generator = torch.Generator().manual_seed(4)
    assert judged(AgreementHistory(), [torch.randn(ELEMENTS, generator=generator) for _ in range(6)]).factors == []


def test_a_contribution_of_zeros_is_nobodys_other() -> None:
    zeros, vectors = torch.zeros(ELEMENTS), honest(3, 5)
    found = judged(AgreementHistory(), [zeros, *vectors])
    assert found.factors == [LEAST_FACTOR, 100, 100, 100], "it would make the step shorter"
    assert found.agreements[0] == 0.0
    assert found.agreements[1:] == judged(AgreementHistory(), vectors).agreements


def test_a_good_past_forgives_one_merge_and_not_many() -> None:
    history = AgreementHistory()
    for sync_round in range(30):
        judged(history, honest(4, sync_round))
    factors = []
    for sync_round in range(30, 60):
        *vectors, last = honest(4, sync_round)
        factors.append(judged(history, [*vectors, -last]).factors)
    assert factors[0] == [], "one bad batch"
    assert factors[-1] == [100, 100, 100, LEAST_FACTOR]


def test_where_too_few_can_be_compared_the_past_decides() -> None:
    history = AgreementHistory()
    for sync_round in range(10):
        *vectors, last = honest(4, sync_round)
        judged(history, [*vectors, -last])
    liar, fine, unknown = "learner 3", "learner 0", "another"
    lie, v = Vector(honest(1, 20)[0]), Vector(honest(1, 21)[0])
    assert history.judge([liar], [lie]).factors == [LEAST_FACTOR]
    assert history.judge([fine, liar], [v, lie]).factors == [100, LEAST_FACTOR]
    assert history.judge([fine, unknown], [v, lie]).factors == []


def test_a_past_decides_from_the_third_judged_merge_on() -> None:
    history, factors = AgreementHistory(), []
    for sync_round in range(JUDGED):
        *vectors, last = honest(4, sync_round)
        judged(history, [*vectors, -last])
        factors.append(history.judge(["learner 3"], [Vector(last)]).factors)
    assert factors == [[], [], [LEAST_FACTOR]]


def test_honest_work_in_one_shard_is_no_excuse_in_others() -> None:
    history, names = AgreementHistory(), [f"learner {index}" for index in range(4)]
    for sync_round in range(30):
        *vectors, last = honest(4, sync_round)
        for shard in range(4):
            given = [Vector(v) for v in (*vectors, -last if shard else last)]
            factors = history.judge(names, given, shard).factors
            assert factors == ([100, 100, 100, LEAST_FACTOR] if shard else [])
    assert history.dissenters() == {"learner 3": 120}
    assert history.judge(["learner 3"], [Vector(honest(1, 40)[0])], 9).factors == [LEAST_FACTOR], "a new shard"
    assert history.judge(["learner 3"], [Vector(honest(1, 40)[0])], 0).factors == []


@pytest.mark.parametrize("rule", ["direct", "rda"])
def test_a_contribution_alone_with_a_low_factor_counts_as_a_short_one(rule: str) -> None:
    v = honest(1, 22)[0]
    merged = torch.empty(ELEMENTS)
    merge(rule, [Vector(v)], [1.0], [4], 4, merged, [0.1])  # type: ignore[arg-type]
    assert torch.allclose(merged, 0.1 * v, rtol=1e-5)
    merge(rule, [Vector(1000.0 * v)], [1.0], [4], 4, merged, [0.1], float(v.norm()))  # type: ignore[arg-type]
    assert torch.allclose(merged, 0.1 * v, rtol=1e-5), "its length does not make up for the factor"


def test_a_bad_past_is_no_penalty_once_a_learner_agrees() -> None:
    history = AgreementHistory()
    for sync_round in range(30):
        *vectors, last = honest(4, sync_round)
        judged(history, [*vectors, -last])
    assert judged(history, honest(4, 30)).factors == []


def test_a_learner_that_long_disagrees_is_named_until_it_agrees_again() -> None:
    history, named = AgreementHistory(), []
    for sync_round in range(30):
        *vectors, last = honest(4, sync_round)
        judged(history, [*vectors, -last if sync_round < 16 else last])
        named.append(history.dissenters())
    assert named[10] == {}, "eleven are too few"
    assert named[11] == {"learner 3": 12}
    assert named[15] == {"learner 3": 16}
    assert named[29] == {}


def test_nobody_is_named_where_nothing_can_be_judged() -> None:
    history, generator = AgreementHistory(), torch.Generator().manual_seed(12)
    for _ in range(30):
        judged(history, [torch.randn(ELEMENTS, generator=generator) for _ in range(5)])
    assert history.dissenters() == {}


@pytest.mark.parametrize("place", [0, 3, 4])
def test_a_lie_in_any_chunk_of_a_large_shard_is_seen(place: int) -> None:
    """The sample of each merge is another one; all 40 see the chunk, or none does, once in 10 million."""
    elements = 5 * CHUNK + 1000
    vectors = honest(4, 6, elements)
    span = slice(place * CHUNK, (place + 1) * CHUNK)
    vectors[3][span] = -20.0 * vectors[3][span].abs()
    history = AgreementHistory()
    lowest = [min(found.agreements) for found in (judged(history, vectors, bytes([n])) for n in range(40))]
    assert min(lowest) < 0.05 < max(lowest), "in some merges it is looked at, in others it is not"


def test_a_sample_says_what_all_elements_say() -> None:
    vectors = honest(4, 7, 6 * CHUNK)
    expected = 1.0 / (1.0 + 2.0**2)
    assert judged(AgreementHistory(), vectors).agreements == pytest.approx([expected] * 4, abs=0.02)


def test_lengths_do_not_matter() -> None:
    vectors = honest(4, 8)
    scaled = [v * scale for v, scale in zip(vectors, (1e-20, 1.0, 1e15, 3.0), strict=True)]
    assert judged(AgreementHistory(), scaled).agreements == pytest.approx(
        judged(AgreementHistory(), vectors).agreements
    )


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "REMEMBERED", 5)
    history = AgreementHistory()
    for sync_round in range(10):
        names = [f"learner {sync_round} {index}" for index in range(3)]
        history.judge(names, [Vector(v) for v in honest(3, sync_round)])
    assert len(history) == 5


@pytest.mark.parametrize("rule", ["direct", "rda"])
def test_factors_multiply_weights_within_their_bounds(rule: str) -> None:
    """Weight is bounded by what the others declare, not by what agreement leaves of it."""
    vectors = [Vector(v) for v in honest(4, 9)]
    merged, expected = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
    merge(rule, vectors, [1.0, 1.0, 1.0, 50.0], [4] * 4, 4, merged, [1.0, 1.0, 0.1, 1.0])  # type: ignore[arg-type]
    merge(rule, vectors, [1.0, 1.0, 1.0, 1.0], [4] * 4, 4, expected, [1.0, 1.0, 0.1, 1.0])  # type: ignore[arg-type]
    assert torch.equal(merged, expected)
    merge(rule, vectors, [1.0] * 4, [4] * 4, 4, expected)  # type: ignore[arg-type]
    assert not torch.allclose(merged, expected)


LEAST = [
    # contributions, what an honest owner states without a past, and the least that it can state with any past
    (lambda: honest(5, 12), [], [50] * 5),
    (lambda: [*honest(3, 1), -sum(honest(3, 1))], [100, 100, 100, 10], [50, 50, 50, 10]),
    (lambda: [torch.zeros(ELEMENTS), *honest(3, 5)], [10, 100, 100, 100], [10, 50, 50, 50]),
    (lambda: honest(2, 5), [], [10, 10]),
]


@pytest.mark.parametrize("case", LEAST)
def test_half_of_what_the_contributions_give_is_the_least_factor(case: Any) -> None:
    """V4c: whatever an owner says of its memory. Fewer than three contributions, and zeros, prove nothing."""
    vectors, stated, least = case
    assert judged(AgreementHistory(), vectors()).factors == stated
    assert least_factors([Vector(v) for v in vectors()], b"") == least


def test_vectors_without_anything_in_common_count_in_full() -> None:
    """V4c: nothing can be judged, so an owner that counts some of them for less has made it up."""
    generator = torch.Generator().manual_seed(11)
    vectors = [torch.randn(ELEMENTS, generator=generator) for _ in range(6)]
    assert least_factors([Vector(v) for v in vectors], b"") == [50] * 6


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 2, 7, 40, 600, CHUNK + 40]),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3, 2.0, 30.0, 1e3]),
    st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_no_honest_owner_states_less_than_the_least_factor(
    seed: int, elements: int, count: int, spread: float, past: int
) -> None:
    """V4c: few or many elements and contributions, samples, noise, zeros, lies, any past, and with other rounding."""
    history, generator = AgreementHistory(), torch.Generator().manual_seed(seed)
    for merge_number in range(past + 1):
        vectors = honest(count, seed + merge_number, elements, spread)
        for vector in vectors:
            kind = int(torch.randint(0, 6, (), generator=generator))
            vector *= (1.0, 1.0, 1e-9, 1e9, -1.0, 0.0)[kind]
        sample = bytes([merge_number])
        stated = judged(history, vectors, sample).factors or [100] * count
        elsewhere = [v * (1.0 + 1e-6 * torch.randn(v.shape, generator=generator)) for v in vectors]
        for those in (vectors, elsewhere):
            least = least_factors([Vector(v) for v in those], sample)
            assert all(factor >= lowest for factor, lowest in zip(stated, least, strict=True))
