"""Direct mean and radial-directional averaging against small cases done by hand."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.plain_gradient import Vector
from p2pdiloco.codec.merge import (
    MOST,
    EncodedGradient,
    counted_lengths,
    counted_weights,
    direct_mean,
    merge,
    radial_directional,
    token_weight,
)
from p2pdiloco.codec.quantization import decode_chunks, encode_vector, recipe
from p2pdiloco.protocol.manifest import Codec, MergeRule

RULES: tuple[MergeRule, ...] = ("direct", "rda")


def rda(gradients: list[Tensor], weights: list[float]) -> Tensor:
    out = torch.full_like(gradients[0], math.nan)
    radial_directional([Vector(v) for v in gradients], weights, out)
    return out


def test_weight_is_tokens_times_tokens_per_step() -> None:
    assert token_weight(100, 4) == 2500.0
    assert token_weight(0, 0) == 0.0


def test_as_many_as_like_may_be_as_long_as_is_allowed() -> None:
    """Ten tenths in float32 are more than one."""
    longest = torch.tensor([MOST, 0.0])
    for rule in RULES:
        out = torch.empty(2)
        merge(rule, [Vector(longest)] * 10, [1.0] * 10, [1] * 10, 1, out)
        assert float(out[0]) == pytest.approx(MOST)
        assert decode_chunks(encode_vector(recipe("int4", 0.0), out), torch.empty(2))[0] == pytest.approx(
            MOST, rel=0.01
        )


def test_direct_mean_by_hand() -> None:
    out = torch.empty(2)
    direct_mean([Vector(torch.tensor([1.0, 0.0])), Vector(torch.tensor([0.0, 4.0]))], [3.0, 1.0], out)
    assert out.tolist() == [0.75, 1.0]


def test_identical_contributions_are_unchanged() -> None:
    v = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(rda([v, v, v], [1.0, 2.0, 5.0]), v, rtol=1e-5)


def test_orthogonal_contributions_keep_the_mean_length() -> None:
    merged = rda([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 5.0])], [1.0, 1.0])
    # length (3 + 5) / 2, direction (1, 1): a plain mean would have length 2.9
    assert torch.allclose(merged, torch.full((2,), 4 / math.sqrt(2)))


def test_weights_bend_length_and_direction() -> None:
    merged = rda([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 5.0])], [3.0, 1.0])
    assert torch.allclose(merged, torch.tensor([3.0, 1.0]) / math.sqrt(10) * (3 * 3 + 5) / 4)


def test_swapping_contributions_with_their_weights_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1000, generator=generator) for _ in range(4)]
    weights = [1.0, 2.0, 3.0, 4.0]
    turned = rda(gradients[::-1], weights[::-1])
    assert torch.allclose(rda(gradients, weights), turned, atol=1e-6)
    assert not torch.allclose(rda(gradients, weights[::-1]), turned, atol=1e-3)


def test_zeros_have_no_direction() -> None:
    zero, v = torch.zeros(2), torch.tensor([0.0, 2.0])
    assert rda([zero, zero], [1.0, 1.0]).tolist() == [0.0, 0.0]
    assert rda([zero, v], [1.0, 1.0]).tolist() == [0.0, 1.0]  # half the mean length, v's direction
    assert rda([v, -v], [1.0, 1.0]).tolist() == [0.0, 0.0]


def test_no_weight_moves_nothing() -> None:
    v = torch.tensor([1.0, 2.0])
    assert rda([v, v], [0.0, 0.0]).tolist() == [0.0, 0.0]
    assert rda([v * 9, v], [0.0, 1.0]).tolist() == pytest.approx([1.0, 2.0])


def test_vectors_longer_than_a_chunk() -> None:
    v = torch.randn((1 << 18) + 3, generator=torch.Generator().manual_seed(3))
    w = torch.randn((1 << 18) + 3, generator=torch.Generator().manual_seed(4))
    out = torch.empty_like(v)
    merge("direct", [Vector(v), Vector(w)], [1.0, 1.0], [1, 1], 1, out)
    assert torch.allclose(out, (v + w) / 2, atol=1e-6)
    merge("rda", [Vector(v), Vector(w)], [1.0, 1.0], [1, 1], 1, out)
    assert float(out.double().norm()) == pytest.approx(float(v.double().norm() + w.double().norm()) / 2, rel=1e-5)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        rda([torch.ones(2), torch.ones(2)], weights)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="length"):
        rda([torch.ones(2), torch.ones(3)], [1.0, 1.0])


@pytest.mark.parametrize("codec", ["int4", "int8", "bf16", "int2", "e3m0"])
def test_encoded_gradients_are_merged_as_what_they_decode_to(codec: Codec) -> None:
    elements = (1 << 18) + 700
    encoded, decoded = [], []
    for seed in range(3):
        x = torch.randn(elements, generator=torch.Generator().manual_seed(seed))
        bodies = [bytes(body) for body in encode_vector(recipe(codec), x)]
        encoded.append(EncodedGradient(bodies, elements))
        decoded.append(Vector(decode_chunks(bodies, torch.empty(elements))))
        assert encoded[-1].norm() == pytest.approx(decoded[-1].norm(), rel=1e-12)
    one, other = torch.empty(elements), torch.empty(elements)
    direct_mean(encoded, [1.0, 2.0, 3.0], one)
    direct_mean(decoded, [1.0, 2.0, 3.0], other)
    assert torch.equal(one, other)
    radial_directional(encoded, [1.0, 2.0, 3.0], one)
    radial_directional(decoded, [1.0, 2.0, 3.0], other)
    assert torch.allclose(one, other, rtol=1e-6)


def test_a_missing_body_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bodies"):
        EncodedGradient([], 1)


@pytest.mark.parametrize("rule", ["rda", "direct"])
def test_one_of_four_that_sends_noise_does_not_lengthen_the_step(rule: MergeRule) -> None:
    generator = torch.Generator().manual_seed(5)
    honest = [torch.randn(1000, generator=generator) for _ in range(4)]
    noise = 100.0 * torch.randn(1000, generator=generator)
    alone, beside = torch.empty(1000), torch.empty(1000)
    merge(rule, [Vector(v) for v in honest], [1.0] * 4, [24] * 4, 24, alone)
    merge(rule, [Vector(v) for v in (*honest[:3], noise)], [1.0] * 4, [24] * 4, 24, beside)
    assert float(beside.norm()) < 1.5 * float(alone.norm())


def test_a_contribution_is_at_most_half_as_long_again_as_the_others_median() -> None:
    assert counted_lengths([1.0, 2.0, 3.0, 100.0], [24] * 4, 24) == [1.0, 2.0, 3.0, 3.0]
    assert counted_lengths([1.0, 3.0, 100.0], [24] * 3, 24) == [1.0, 3.0, 4.5]
    assert counted_lengths([1.0, 100.0], [24] * 2, 24) == [1.0, 1.5]
    assert counted_lengths([100.0], [24], 24) == [100.0]


def test_declared_steps_lengthen_a_contribution_to_a_rounds_at_most() -> None:
    """Whoever declares the steps of 64 rounds goes no farther than whoever declares those of one."""
    assert counted_lengths([1.0, 1.0, 1.0, 40.0], [24, 24, 24, 64 * 24], 24) == [1.0, 1.0, 1.0, 1.5]
    assert counted_lengths([1.0, 5.0], [4, 24], 24) == [1.0, 5.0], "a newcomer's first contribution is no measure"
    assert counted_lengths([0.0, 0.0, 3.0], [24, 24, 24], 24) == [0.0, 0.0, 3.0]
    assert counted_lengths([2.0, 3.0], [0, 0], 24) == [2.0, 3.0]


def test_a_weight_counts_for_the_median_of_the_others_at_most() -> None:
    """Each has one vote: what one declares does not make it the median."""
    assert counted_weights([3.0, 4.0, 5.0, 1e12]) == [3.0, 4.0, 4.0, 4.0]
    assert counted_weights([4.0, 1e12]) == [4.0, 4.0]
    assert counted_weights([1e12]) == [1e12]
    assert counted_weights([0.0, 7.0]) == [0.0, 7.0]
    assert counted_weights([1.0, 1.0, 1.0, 1e12, 1e12]) == [1.0, 1.0, 1.0, 1.0, 1.0], "nor two of five"


@pytest.mark.parametrize("rule", ["rda", "direct"])
@pytest.mark.parametrize("liars", [1, 2])
def test_a_minority_that_declares_most_tokens_and_turns_round_does_not_turn_the_merge(
    rule: MergeRule, liars: int
) -> None:
    """One of four, and two of eight, send the opposite of what they found, declare any weight and the steps of many
    rounds, and are 30 times as long as the others."""
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(1000, generator=generator)
    found = [common + torch.randn(1000, generator=generator) for _ in range(4 * liars)]
    sent = [*found[liars:], *(-30.0 * v for v in found[:liars])]
    honest, merged = torch.empty(1000), torch.empty(1000)
    steps, weights = [24] * len(sent), [500.0] * len(sent)
    merge(rule, [Vector(v) for v in found], weights, steps, 24, honest)
    claims, many = [500.0] * (3 * liars) + [1e12] * liars, [24] * (3 * liars) + [64 * 24] * liars
    merge(rule, [Vector(v) for v in sent], claims, many, 24, merged)
    cosine = float(honest @ merged / (honest.norm() * merged.norm()))
    assert cosine > 0.3
    assert float(merged.norm()) < 1.6 * float(honest.norm())


@pytest.mark.parametrize("rule", ["rda", "direct"])
def test_the_mean_cosine_of_contributions_is_told(rule: MergeRule) -> None:
    """Of equal weights it is that of all pairs; a weight counts a pair as often as it says."""
    generator = torch.Generator().manual_seed(6)
    vectors = [v / v.norm() for v in (torch.randn(50, generator=generator) + 0.5 for _ in range(3))]
    pairs = [float(vectors[a] @ vectors[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    out, given = torch.empty(50), [Vector(v) for v in vectors]
    equal, unequal = (
        merge(rule, given, [2.0] * 3, [1] * 3, 1, out),
        merge(rule, given, [1.0, 3.0, 3.0], [1] * 3, 1, out),
    )
    assert equal.cosine == pytest.approx(sum(pairs) / 3, abs=1e-5)
    assert unequal.cosine == pytest.approx((3 * pairs[0] + 3 * pairs[1] + 9 * pairs[2]) / 15, abs=1e-5)
    assert merge(rule, given[:1], [1.0], [1], 1, out).cosine is None
    assert merge(rule, [*given, Vector(9 * vectors[0])], [1.0] * 4, [1] * 4, 1, out).shortened == 1
