"""Copies between a real CUDA device and the vectors shared with the node; skipped where there is no such device.

The tests in ``tests/unit/test_training_cuda_copies.py`` replace CUDA's runtime and check the order of the work. These
check that a real device computes the same.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training import cuda_copies
from p2pdiloco.training.parameters import FlatParameters, trainable
from p2pdiloco.training.step_check import UNREAD, StepCheck

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH = 512


def model_on(device: str, dtype: torch.dtype) -> tuple[nn.Module, FlatParameters]:
    """The same model on each device, and its parameters as one vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype).to(device)
    named = trainable(model)
    specs = tensor_specs([(name, p.shape, False) for name, p in named], 2)
    return model, FlatParameters(named, specs, make_layout(specs, 2, 65536, "direct"))


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_those_of_a_cpu_to_the_bit(
    dtype: torch.dtype, *, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while kernels that change the parameters are queued before and after each copy, and with little room."""
    monkeypatch.setattr(cuda_copies, "BATCH_BYTES", 1 << 18)
    monkeypatch.setattr(cuda_copies, "STAGED_BYTES", 1 << 20)
    results = {}
    for device in ("cpu", "cuda"):
        model, flat = model_on(device, dtype)
        generator = torch.Generator().manual_seed(1)
        vectors = [torch.randn(flat.layout.elements, generator=generator) for _ in range(2)]
        taken = [torch.empty(flat.layout.elements) for _ in range(3)]
        if is_pinned:
            flat.pin([*vectors, *taken])
        finished = []
        for copy, vector in zip((flat.add_from, flat.copy_from), vectors, strict=True):
            finished.append(copy(vector, flat.everything))
            finished.append(flat.copy_to(taken[len(finished) // 2], flat.everything))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        finished.append(flat.copy_to(taken[2], flat.everything))
        if device == "cuda":
            torch.cuda.synchronize()
        assert all(one is None or one() for one in finished)
        if is_pinned:
            flat.unpin([*vectors, *taken])
        results[device] = taken
    for ours, theirs in zip(results["cpu"], results["cuda"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_step_check_hardly_ever_waits_for_the_device(*, is_fused: bool) -> None:
    """Waiting in each step would cost what asynchronous launches gain. What is trained stays the same."""
    weights, waits = [], 0
    for is_checked in (False, True):
        model, _ = model_on("cuda", torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_fused)
        data = torch.randn(8, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        if is_checked:
            check = StepCheck(model, [optimizer], list(model.named_parameters()))
            optimizer.register_step_pre_hook(lambda *_, check=check: check.before())
            optimizer.register_step_post_hook(lambda *_, check=check: check.after())
            optimizer.register_step_post_hook(lambda *_, check=check: check.rest())
            check.rest()
        for _ in range(2 * UNREAD):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                model(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.set_sync_debug_mode("default")
            waits += any("synchronizing" in str(one.message) for one in caught)
        if is_checked:
            assert check.problem() == ""
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert waits <= 4, "when results are read"
