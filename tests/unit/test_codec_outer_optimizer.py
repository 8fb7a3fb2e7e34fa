"""The outer step against one done by hand, and against numpy bit for bit."""

import numpy as np
import pytest
import torch

from p2pdiloco.codec import native, quantization
from p2pdiloco.codec.outer_optimizer import (
    Factors,
    outer_step,
    outer_step_by_torch,
    rate_at,
    round_to,
    step_aside,
    step_shard,
)
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.protocol.manifest import Codec

TYPES = (torch.float32, torch.bfloat16)


def test_two_steps_by_hand() -> None:
    theta, momentum = torch.tensor([1.0, -2.0]), torch.zeros(2)
    outer_step(theta, momentum, torch.tensor([0.5, 1.0]), learning_rate=0.5, momentum_factor=0.5)
    # m = (0.5, 1); theta -= 0.5 * (Delta + 0.5 m) = (0.375, 0.75)
    assert momentum.tolist() == [0.5, 1.0]
    assert theta.tolist() == [0.625, -2.75]
    outer_step(theta, momentum, torch.tensor([0.25, 0.0]), learning_rate=0.5, momentum_factor=0.5)
    # m = (0.25 + 0.25, 0.5); theta -= 0.5 * (0.25 + 0.25, 0.25)
    assert momentum.tolist() == [0.5, 0.5]
    assert theta.tolist() == [0.375, -2.875]


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.7, 0.9, 0.999])
def test_a_corrected_rate_makes_up_for_what_momentum_does_not_hold_yet(momentum: float) -> None:
    held = 0.0
    for version in range(1, 200):
        held = momentum * held + 1.0
        gone = rate_at(version, 0.4, momentum) * (1.0 + momentum * held)
        assert gone == pytest.approx(0.4 / (1.0 - momentum), rel=1e-9)
    assert rate_at(1 << 50, 0.4, momentum) == 0.4


@pytest.mark.parametrize("elements", [1, 1000, (1 << 18) + 17])
def test_every_operation_rounds_on_its_own(elements: int) -> None:
    draw = np.random.default_rng(7)
    theta, momentum, delta = (draw.standard_normal(elements, dtype=np.float32) for _ in range(3))
    lr, mu = np.float32(0.7), np.float32(0.9)
    expected_momentum = momentum * mu + delta
    expected_theta = theta - (expected_momentum * mu + delta) * lr
    t, m = torch.from_numpy(theta.copy()), torch.from_numpy(momentum.copy())
    outer_step(t, m, torch.from_numpy(delta), learning_rate=0.7, momentum_factor=0.9)
    assert np.array_equal(m.numpy().view(np.uint32), expected_momentum.view(np.uint32))
    assert np.array_equal(t.numpy().view(np.uint32), expected_theta.view(np.uint32))


@pytest.mark.parametrize("elements", [1, 1000, (1 << 18) + 17])
def test_every_operation_with_a_bfloat16_momentum_rounds_on_its_own(elements: int) -> None:
    """As numpy has it: what rounding takes off the momentum goes to the parameters, multiplied by what it would have
    moved them by later."""
    draw = np.random.default_rng(8)
    theta, wide, delta = (draw.standard_normal(elements, dtype=np.float32) for _ in range(3))
    lr, mu, carried = np.float32(0.7), np.float32(0.9), np.float32(0.9 * 0.9 / (1.0 - 0.9))
    momentum = nearest(wide)
    exact = momentum * mu + delta
    kept = nearest(exact)
    expected = theta - ((exact * mu + delta) + (exact - kept) * carried) * lr
    t, m = torch.from_numpy(theta.copy()), torch.from_numpy(momentum).bfloat16()
    outer_step(t, m, torch.from_numpy(delta.copy()), learning_rate=0.7, momentum_factor=0.9)
    assert np.array_equal(m.float().numpy().view(np.uint32), kept.view(np.uint32))
    assert np.array_equal(t.numpy().view(np.uint32), expected.view(np.uint32))


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each float32, ties to even, by comparing both neighbours."""
    bits = x.view(np.uint32).astype(np.uint64)
    down = bits & 0xFFFF0000
    up, rest = down + 0x10000, bits & 0xFFFF
    is_up = (rest > 0x8000) | ((rest == 0x8000) & ((down >> 16) & 1 == 1))
    return np.where(is_up, up, down).astype(np.uint32).view(np.float32)


def test_rounding_to_bfloat16_is_that_of_torch_also_at_ties_and_at_the_ends() -> None:
    exact = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00008000, 0x00018000, 0x80000001 - (1 << 32),
         0xBF808000 - (1 << 32), 0xBF818000 - (1 << 32), 0x7F7FFFFF, 0x7F800000, 0xFF800000 - (1 << 32), 0],
        dtype=torch.int32,
    ).view(torch.float32)  # fmt: skip
    many = torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(-30, 20).repeat(2000)
    for values in (exact, many):
        found = torch.empty(values.numel(), dtype=torch.bfloat16)
        round_to(found, values)
        assert torch.equal(found.view(torch.int16), values.bfloat16().view(torch.int16))


@pytest.mark.parametrize("factor", [0.3, 0.7, 0.9, 0.99])
def test_where_parameters_end_does_not_depend_on_what_momentum_is_kept_in(factor: float) -> None:
    """Without further gradients; each step rounds, and nothing of what it takes off is lost."""
    draw = torch.Generator().manual_seed(4)
    start, vectors = torch.randn(500, generator=draw).double(), []
    for dtype in TYPES:
        draw.manual_seed(5)
        theta, momentum = start.float(), torch.zeros(500, dtype=dtype)
        for sync_round in range(2000):
            delta = torch.randn(500, generator=draw) * 1e-3 if sync_round < 20 else torch.zeros(500)
            outer_step(theta, momentum, delta, learning_rate=0.4, momentum_factor=factor)
        vectors.append((theta.double() - start).clone())
    exact, found = vectors
    assert float((found - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("elements", [1, 1000, (1 << 18) + 17])
def test_kernel_and_torch_give_the_same_bits_and_the_change(elements: int, dtype: torch.dtype) -> None:
    before = [torch.randn(elements, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    before[1] = before[1].to(dtype)
    theta, momentum, change = (v.clone() for v in before)
    outer_step(theta, momentum, change, learning_rate=0.7, momentum_factor=0.9)
    by_torch = [v.clone() for v in before]
    outer_step_by_torch(by_torch[0], by_torch[1], by_torch[2], 0.7, 0.9)
    assert all(torch.equal(a, b) for a, b in zip((theta, momentum, change), by_torch, strict=True))
    assert torch.equal(change, theta - before[0])


def test_a_slice_of_a_longer_vector_is_updated_in_place() -> None:
    theta, momentum = torch.ones(4), torch.zeros(4)
    outer_step(theta[1:3], momentum[1:3], torch.ones(2), learning_rate=1.0, momentum_factor=0.0)
    assert theta.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert momentum.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_wrong_types_are_refused() -> None:
    with pytest.raises(ValueError, match="gradient"):
        outer_step(torch.ones(2), torch.ones(2), torch.ones(3), learning_rate=1.0, momentum_factor=0.0)
    with pytest.raises(ValueError, match="momentum"):
        outer_step(torch.ones(2), torch.ones(2).double(), torch.ones(2), learning_rate=1.0, momentum_factor=0.0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("elements", [1, 300, 5 * 256 + 7, (1 << 18) - 100])
@pytest.mark.parametrize("codec", ["int4", "int8", "bf16", "int2"])
def test_a_body_is_taken_and_looked_at_with_the_same_bits(elements: int, codec: Codec, dtype: torch.dtype) -> None:
    """With and without an own contribution, handed over anew or added; against decoding, stepping, adding."""
    vectors = [torch.randn(elements, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    theta, momentum, gradient, contribution, buffer = vectors
    momentum = momentum.to(dtype)
    body, own = (bytes(quantization.encode_chunk(quantization.recipe(codec), v)) for v in (gradient, contribution))
    change = quantization.decode_chunk(body, torch.empty(elements))
    new_theta, new_momentum = theta.clone(), momentum.clone()
    outer_step(new_theta, new_momentum, change, learning_rate=0.7, momentum_factor=0.9)
    aside = torch.empty(elements), torch.empty(elements, dtype=dtype)
    step_aside(body, theta, momentum, aside, learning_rate=0.7, momentum_factor=0.9)
    assert torch.equal(aside[0], new_theta)
    assert torch.equal(aside[1], new_momentum)
    for mine, is_added in ((None, False), (own, False), (own, True)):
        moved = change + quantization.decode_chunk(own, torch.empty(elements)) if mine else change
        expected = buffer + moved if is_added else moved
        t, m, to = theta.clone(), momentum.clone(), buffer.clone()
        ours = None if mine is None else Bodies.of(mine)
        factors = Factors(learning_rate=0.7, momentum_factor=0.9)
        is_done = step_shard(Bodies.of(body), ours, t, m, to, is_added, factors)
        assert is_done == (native.is_used and codec in ("int4", "int8", "bf16"))
        assert torch.equal(t, new_theta if is_done else theta)
        assert torch.equal(m, new_momentum if is_done else momentum)
        assert torch.equal(to, expected if is_done else buffer)
