"""The finest codec that fits."""

from __future__ import annotations

import pytest
import torch

from p2pdiloco.codec.bitrate_ladder import LADDER, choose, downward, fixed, is_dense
from p2pdiloco.codec.compression import compress
from p2pdiloco.codec.formats import Recipe
from p2pdiloco.codec.quantization import decode_chunk, encode_chunk, recipe
from p2pdiloco.protocol.manifest import CodecConfig, RunConfig
from p2pdiloco.protocol.manifest_validation import config_problems

M = 1_000_000


def test_the_ladder_goes_down_in_bytes_and_up_in_error() -> None:
    assert sorted(LADDER, key=lambda rung: -rung.bytes_per_parameter) == list(LADDER)
    assert sorted(LADDER, key=lambda rung: rung.relative_error) == list(LADDER)


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"),
    [(None, "bf16"), (2.0 * M, "bf16"), (1.0 * M, "int8"), (0.5 * M, "int4"), (0.3 * M, "int4-coarse"), (1.0, "int2")],
)
def test_the_finest_that_fits(bytes_per_s: float | None, expected: str) -> None:
    assert choose(M, bytes_per_s=bytes_per_s, time_s=1.0, coarsest="int2").name == expected
    if bytes_per_s is not None:
        assert choose(M, bytes_per_s=bytes_per_s * 2, time_s=0.5, coarsest="int2").name == expected
        assert choose(2 * M, bytes_per_s=bytes_per_s * 2, time_s=1.0, coarsest="int2").name == expected


@pytest.mark.parametrize("how", [*(rung.recipe for rung in LADDER), downward(LADDER[-1]).recipe, recipe("e3m0")])
def test_dense_symbols_are_those_of_which_huffman_codes_save_little(how: Recipe) -> None:
    body = bytes(encode_chunk(how, torch.randn(1 << 16, generator=torch.Generator().manual_seed(7))))
    saved = 1.0 - len(compress(body)) / len(body)
    assert is_dense(how) == (saved < 0.2 and how.codec != "e3m0")


def test_nothing_coarser_than_allowed() -> None:
    assert choose(M, bytes_per_s=1.0, time_s=1.0, coarsest="int4").name == "int4"
    assert choose(M, bytes_per_s=1.0, time_s=1.0, coarsest="bf16").name == "bf16"


def test_owners_have_rungs_of_their_own_where_a_learners_would_cut_values_off() -> None:
    assert downward(LADDER[0]) == LADDER[0]
    assert downward(LADDER[-1]).name == LADDER[-1].name
    assert downward(LADDER[-1]).recipe.codec == "int4"


def test_who_is_alone_sends_nothing_and_may_send_it_well() -> None:
    assert choose(0.0, bytes_per_s=1.0, time_s=0.0, coarsest="int2").name == "bf16"


def test_errors_are_about_what_the_ladder_says() -> None:
    gradient = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    for rung in [*LADDER, downward(LADDER[-1])]:
        body = bytes(encode_chunk(rung.recipe, gradient))
        found = torch.empty_like(gradient)
        decode_chunk(body, found)
        error = float((found - gradient).norm() / gradient.norm())
        assert rung.relative_error / 2 < error < rung.relative_error * 2


def test_the_runs_fixed_choice() -> None:
    assert fixed("int8", 0.1) == recipe("int8", 0.1)
    assert fixed("auto", None) == recipe("int4")


def test_a_step_with_auto_is_a_mistake() -> None:
    problems = config_problems(RunConfig(name="x", codec=CodecConfig(up="auto", up_step=0.5, down="auto")))
    assert [problem for problem in problems if "codec.up_step" in problem]
    assert not [problem for problem in problems if "codec.down_step" in problem]
