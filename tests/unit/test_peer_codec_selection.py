"""What a sender reckons with when the run leaves it the codec."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.codec.bitrate_ladder import FAST_BYTES_PER_S
from p2pdiloco.peer.codec_selection import CodecChoice, Direction
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.protocol.ids import FragmentId, ShardId
from p2pdiloco.protocol.manifest import CodecConfig, RunConfig, ScheduleConfig, TensorSpec, make_layout

M = 1_000_000
TENSORS = tuple(
    TensorSpec(name=str(index), shape=(M,), merge="direct", fragment=FragmentId(index % 2)) for index in range(4)
)
LAYOUT = make_layout(TENSORS, 2, M, "rda")
"""Two fragments of two million parameters."""
OWN, OTHER = ShardId(0), ShardId(1)


def choice(
    metrics: Metrics,
    rate: float | None,
    *,
    line: float | None = None,
    live: int = 1,
    step_s: float = 1.0,
    **changes: Any,
) -> CodecChoice:
    view = SimpleNamespace(
        me="me",
        live=("x",) * live,
        fastest_step_time_s=lambda: step_s,
        next_owner=lambda shard: "me" if shard == OWN else "x",
    )
    schedule = ScheduleConfig(fragments=2, sync_every=8, overlap=2)
    codec = CodecConfig(**{"up": "auto", "down": "auto", "coarsest": "int2", **changes})
    config = RunConfig(name="x", schedule=schedule, codec=codec)
    return CodecChoice(config, LAYOUT, cast(Any, view), metrics, lambda: rate, lambda: line)


def name(one: CodecChoice, direction: Any = "up") -> str | None:
    rung = one.choose(direction, ShardId(0))
    return rung.name if rung is not None else None


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("rate", "live", "expected"),
    [
        (None, 1, "bf16"),
        (1.4 * M, 1, "bf16"),
        (1.0 * M, 1, "int8"),
        (0.45 * M, 1, "int4"),
        (0.45 * M, 3, "int4-coarse"),
        (0.1 * M, 1, "int2"),
        (0.1 * M, 0, "bf16"),
    ],
)
def test_half_the_overlap_and_what_leaves_us_decide(
    metrics: Metrics, rate: float | None, live: int, expected: str
) -> None:
    one = choice(metrics, rate, live=live)
    assert name(one, "up") == name(one, "down") == expected


def test_what_is_sent_decides_how_fast_a_line_is(metrics: Metrics) -> None:
    """O1c: it fills half, or an eighth."""
    need = 0.25 * M
    lines = [None, *(need / share for share in (0.4, 0.55, 0.45, 0.6, 0.3, 0.14, 0.1, 0.14, 0.2, 0.6)), math.inf]
    one, found = choice(metrics, None), []
    for line in lines:
        one._line = partial(next, iter([line]))
        before, has_changed = one.line_speed, one.judge_line(need)
        assert has_changed == (one.line_speed != before)
        found.append(one.line_speed[0])
    assert "".join(found) == "uusssuuffusf"


def test_at_the_lowest_end_an_owner_cuts_nothing_off(metrics: Metrics) -> None:
    one = choice(metrics, 1.0, coarsest="int2")
    up, down = one.choose("up", ShardId(0)), one.choose("down", ShardId(0))
    assert up is not None
    assert down is not None
    assert (up.recipe.codec, down.recipe.codec) == ("int2", "int4")


def test_what_is_not_known_is_not_too_slow(metrics: Metrics) -> None:
    assert name(choice(metrics, 1.0, step_s=0.0)) == "bf16"


def test_a_fixed_codec_is_left_alone(metrics: Metrics) -> None:
    one = choice(metrics, 1.0, up="int8")
    assert name(one, "up") is None
    assert name(one, "down") == "int2"


def test_huffman_codes_are_left_out_where_the_line_is_known_to_be_fast(metrics: Metrics) -> None:
    lines = (None, 1e6, FAST_BYTES_PER_S - 1, FAST_BYTES_PER_S, math.inf)

    def is_coded(line: float | None, direction: Direction = "up", **of: int) -> bool:
        return choice(metrics, 1.0, line=line, **of).is_coded(direction, OTHER)

    assert [is_coded(line) for line in lines] == [True, True, True, False, False]
    lines = (3 * FAST_BYTES_PER_S - 3, 3 * FAST_BYTES_PER_S, math.inf)
    assert [is_coded(line, live=3) for line in lines] == [True, False, False]
    assert not any(is_coded(line, "down", live=0) for line in lines), "nobody is sent anything"
    assert not is_coded(None, "down", live=0)
    assert not is_coded(4 * FAST_BYTES_PER_S, live=30), "a commit goes to four"


def test_what_a_peer_gives_to_itself_is_not_huffman_coded(metrics: Metrics) -> None:
    one = choice(metrics, 1.0)
    assert [one.is_coded("up", shard) for shard in (OWN, OTHER)] == [False, True]
    assert one.is_coded("down", OWN)


def test_the_choice_is_a_metric(metrics: Metrics, tmp_path: Path) -> None:
    one = choice(metrics, None)
    rung = one.choose("up", ShardId(1))
    assert rung is not None
    with metrics:
        one.record("up", ShardId(1), rung, 1234, 0.00161)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {key: line[key] for key in ("event", "direction", "shard", "codec", "bytes", "error")} == {
        "event": "codec",
        "direction": "up",
        "shard": 1,
        "codec": "bf16",
        "bytes": 1234,
        "error": 0.00161,
    }
