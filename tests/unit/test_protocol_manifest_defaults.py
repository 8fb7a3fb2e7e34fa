"""Settings that follow from a run's size, and old manifests that do not have them."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from p2pdiloco.peer.options import PeerOptions, protocol_config
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, digest_of
from p2pdiloco.protocol.manifest import (
    InnerConfig,
    LoraConfig,
    Manifest,
    ModelConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.protocol.manifest_defaults import (
    MOST_LOGGED,
    completed,
    describe_rounds,
    expected_gap,
    few_rounds,
    in_rounds,
    log_length,
    with_usual_inner,
    without_left_out,
)
from p2pdiloco.protocol.manifest_validation import config_problems, decode_manifest
from p2pdiloco.training.models import build_model, named_tensors

LARGE = ModelConfig(width=768, depth=8)


def manifest(**schedule: object) -> Manifest:
    """A run of one small shard."""
    tensors = (TensorSpec(name="w", shape=(16,), merge="direct", fragment=FragmentId(0)),)
    config = RunConfig(name="run", schedule=msgspec.structs.replace(ScheduleConfig(fragments=1), **schedule))
    return Manifest(founder=PeerId("f"), config=config, tensors=tensors, genesis=(Digest("0" * 40),))


@pytest.mark.parametrize(
    ("sync_every", "shards", "versions"),
    [(24, 24, 32), (500, 10, 32), (12, 24, 64), (1, 24, 768), (1, 960, MOST_LOGGED // 960), (1, 1 << 16, 32)],
)
def test_a_log_reaches_as_far_back_in_steps_at_any_h_as_far_as_there_is_room(
    sync_every: int, shards: int, versions: int
) -> None:
    assert log_length(sync_every, shards) == versions


def test_what_is_left_out_is_filled_in_and_what_is_said_is_kept() -> None:
    config = RunConfig(name="run", schedule=ScheduleConfig(fragments=4, sync_every=4))
    assert (completed(config, 4).schedule.heartbeat_s, completed(config, 4).schedule.log_length) == (1.0, 192)
    said = msgspec.structs.replace(config, schedule=ScheduleConfig(heartbeat_s=3.0, log_length=7))
    outer = OuterConfig(bias_correction=False, momentum_type="float32")
    said = msgspec.structs.replace(said, outer=outer, inner=InnerConfig(optimizer="adamw", decay_share=0.5))
    assert completed(said, 4) == said
    assert without_left_out(completed(config, 4), config) == config
    assert without_left_out(completed(config, 4), said) == completed(config, 4)


def test_a_budget_of_tokens_fills_in_the_bound_on_steps_and_the_decay() -> None:
    """Twice what one learner alone needs, since what is lost is trained again."""
    written = RunConfig(name="run", inner=InnerConfig(tokens=100_000, batch=8), model=ModelConfig(context=64))
    founded = completed(written, 4)
    assert (founded.inner.steps, founded.inner.decay_share) == (2 * 196, 0.2)
    assert without_left_out(founded, written) == written
    assert completed(RunConfig(name="run"), 4).inner.decay_share == 0.95


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (ModelConfig(), "muon"),
        (ModelConfig(kind="huggingface", lora=LoraConfig()), "adamw"),
        (ModelConfig(kind="external"), "adamw"),
    ],
)
def test_muon_is_for_whole_matrices_that_a_built_in_learner_trains(model: ModelConfig, optimizer: str) -> None:
    assert completed(RunConfig(name="run", model=model), 4).inner.optimizer == optimizer


def test_a_run_of_few_rounds_is_warned_of_and_told_what_would_do() -> None:
    def told(steps: int, **schedule: int) -> str:
        return few_rounds(RunConfig(name="run", inner=InnerConfig(steps=steps), schedule=ScheduleConfig(**schedule)))

    assert told(960) == ""
    assert "480 steps has only 20 rounds" in told(480, fragments=12)
    assert "schedule.sync_every = 12 or inner.steps = 960" in told(480, fragments=12)
    assert "sync_every =" not in told(480, fragments=24)


@pytest.mark.parametrize(
    ("written", "steps", "schedule"),
    [
        ({}, 4800, (24, 24)),
        ({}, 1759, (10, 10)),
        ({}, 960, (6, 6)),
        ({}, 959, (5, 5)),
        ({}, 100, (3, 3)),
        ({"overlap": 8}, 100, (15, 15)),
        ({"fragments": 12}, 960, (12, 12)),
        ({"fragments": 4}, 960, (4, 4)),
        ({"fragments": 4}, 1440, (4, 8)),
        ({"fragments": 7}, 4800, (7, 21)),
        ({"fragments": 36}, 480, (36, 36)),
        ({"fragments": 12, "sync_every": 24}, 480, (12, 24)),
    ],
)
@pytest.mark.parametrize("model", [LARGE, ModelConfig(kind="external")])
def test_what_a_founder_leaves_out_of_the_schedule_gives_a_short_run_rounds_enough(
    written: dict[str, int], steps: int, schedule: tuple[int, int], model: ModelConfig
) -> None:
    """A script's optimizer counts as AdamW, with which half as many rounds are enough."""
    steps = steps // 2 if model.kind == "external" else steps
    config = RunConfig(name="run", inner=InnerConfig(steps=steps), schedule=ScheduleConfig(**written), model=model)
    found = in_rounds(config, written)
    assert (found.schedule.fragments, found.schedule.sync_every) == schedule
    assert not config_problems(found)
    assert not few_rounds(found) or steps < 240 or "sync_every" in written or written["fragments"] > 24


@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        ({}, (3, 3)),
        ({"overlap": 3}, (5, 5)),
        ({"overlap": 4}, (7, 7)),
        ({"fragments": 2}, (2, 4)),
        ({"fragments": 4}, (4, 4)),
        ({"fragments": 6}, (6, 6)),
        ({"fragments": 12}, (12, 12)),
        ({"sync_every": 12}, (24, 12)),
    ],
)
def test_a_small_model_has_frequent_rounds_however_long_its_run_unless_its_founder_says_otherwise(
    written: dict[str, int], schedule: tuple[int, int]
) -> None:
    inners = [InnerConfig(steps=960), InnerConfig(steps=10**6), InnerConfig(tokens=10**6)]
    configs = [RunConfig(name="run", inner=inner, schedule=ScheduleConfig(**written)) for inner in inners]
    for found in (in_rounds(config, written) for config in configs):
        assert (found.schedule.fragments, found.schedule.sync_every) == schedule
        assert (found.outer.merge == "direct") == ("sync_every" not in written)


@pytest.mark.parametrize(("width", "depth", "sync_every"), [(128, 4, 3), (256, 6, 4), (384, 6, 8), (512, 8, 19)])
def test_in_a_long_run_h_grows_with_the_model_whose_size_is_known_within_a_tenth(
    width: int, depth: int, sync_every: int
) -> None:
    model = ModelConfig(width=width, depth=depth)
    elements = sum(math.prod(shape) for _, shape, _ in named_tensors(build_model(model, 1)))
    guess = 12 * depth * width**2 + 2 * 256 * width
    assert guess == pytest.approx(elements, rel=0.1)
    config = RunConfig(name="run", inner=InnerConfig(steps=10**6), model=model)
    assert in_rounds(config, {}).schedule.sync_every == sync_every


@pytest.mark.parametrize(
    ("model", "share", "sync_every"),
    [
        (ModelConfig(kind="external"), 1.0, 24),
        (ModelConfig(kind="external"), 0.126, 24),
        (ModelConfig(kind="external"), 0.125, 3),
        (ModelConfig(kind="huggingface", folder="base"), None, 6),
        (ModelConfig(kind="huggingface", folder="base", lora=LoraConfig()), None, 3),
    ],
)
def test_adapters_of_any_size_have_frequent_rounds(model: ModelConfig, share: float | None, sync_every: int) -> None:
    found = in_rounds(RunConfig(name="run", model=model), {}, parameters=10**9, share=share)
    assert found.schedule.sync_every == sync_every


def test_an_inner_rate_that_is_left_out_follows_the_width_of_a_small_model_with_muon() -> None:
    def rate(said: Collection[str] = (), optimizer: Any = UNSET, **model: Any) -> float:
        config = RunConfig(name="run", inner=InnerConfig(optimizer=optimizer), model=ModelConfig(**model))
        return with_usual_inner(config, said).inner.learning_rate

    assert (rate(), rate(width=256), rate(width=16)) == (0.0088, 0.0063, 0.016)
    others = [rate(["learning_rate"]), rate(optimizer="adamw"), rate(width=512, depth=8), rate(kind="huggingface")]
    assert set(others) == {1e-3}


def test_adamw_from_scratch_warms_up_for_three_tenths_of_a_run() -> None:
    def warmup(said: Collection[str] = (), *, inner: Any = UNSET, steps: int = 2000, **rest: Any) -> int:
        tokens = rest.pop("tokens", UNSET)
        config = RunConfig(name="run", inner=InnerConfig(optimizer=inner, steps=steps, tokens=tokens), **rest)
        return with_usual_inner(config, said).inner.warmup

    assert (warmup(inner="adamw"), warmup(inner="adamw", steps=100)) == (600, 30)
    assert warmup(inner="adamw", tokens=10**9) == 2000, "it is at most the steps that validation sees"
    adapters = {"model": ModelConfig(kind="huggingface", folder="base", lora=LoraConfig())}
    trained = {"model": ModelConfig(kind="huggingface", folder="base")}
    others = [warmup(), warmup(["warmup"], inner="adamw"), warmup(**adapters), warmup(inner="adamw", **trained)]
    assert set(others) == {50}


def test_a_short_run_whose_file_says_nothing_of_merging_takes_the_mean_often() -> None:
    """What its founder has written stands, and a long run of a model that is not small, or one of few rounds by its own
    word, has what it had."""

    def outer(steps: int, said: dict[str, int], said_outer: Collection[str] = (), **rest: Any) -> OuterConfig:
        inner, schedule = InnerConfig(steps=steps, **rest), ScheduleConfig(**said)
        config = RunConfig(name="run", inner=inner, schedule=schedule, model=LARGE)
        found = in_rounds(config, said, said_outer)
        assert completed(found, 4).outer.merge == found.outer.merge
        return found.outer

    mean = OuterConfig(merge="direct", learning_rate=1.0, momentum=0.0)
    with_momentum = OuterConfig(merge="direct", learning_rate=0.7, momentum=0.6)
    assert outer(480, {}) == outer(1439, {}) == outer(480, {}, tokens=100_000) == mean
    assert outer(1440, {}) == outer(3839, {}) == outer(480, {"fragments": 23}) == with_momentum
    assert outer(3840, {}) == outer(480, {"sync_every": 24}) == outer(480, {"fragments": 24}) == OuterConfig()
    assert outer(480, {}, ("adopt",)) == outer(480, {}, tokens=10**8) == OuterConfig()
    assert outer(959, {}, optimizer="adamw") == outer(800, {"fragments": 23}, optimizer="adamw") == mean
    assert outer(960, {}, optimizer="adamw") == OuterConfig()


def test_a_budget_of_tokens_is_planned_for_eight_learners() -> None:
    def sync_every(steps: int) -> int:
        inner = InnerConfig(steps=50, tokens=steps * 16 * 32 * 8)
        config = RunConfig(name="run", inner=inner, model=msgspec.structs.replace(LARGE, context=32))
        return in_rounds(config, ()).schedule.sync_every

    assert (sync_every(959), sync_every(960), sync_every(10_000)) == (5, 6, 24)


def test_a_founder_is_told_what_training_apart_costs_and_what_half_of_h_would() -> None:
    """The law of ``benchmarks.quality scale``, by hand: at its reference, and with half of the learners."""

    def config(steps: int, **changes: Any) -> RunConfig:
        run = RunConfig(name="run", inner=InnerConfig(steps=steps), model=LARGE)
        return in_rounds(msgspec.structs.replace(run, **changes), {})

    assert expected_gap(config(1000), 1e5, 8) == pytest.approx(7.8)
    assert expected_gap(config(1000), 1e5, 4) == pytest.approx(7.8 * 0.5**1.17)
    assert expected_gap(config(1000), 1e5, 64) == pytest.approx(7.8 * 2**1.17 * 4**0.55), "more slowly beyond 16"
    assert expected_gap(config(4000), 1e5, 8) == pytest.approx(12.9 * 4**-0.85)
    assert expected_gap(config(1000), 2.8e6, 8) == expected_gap(config(1000), 1e12, 8)
    told = describe_rounds(config(1000), 1e5)
    assert "every 6 steps; 8 learners end roughly 7.8 % above" in told
    mean = 'outer.merge = "direct", learning_rate = 1.0, momentum = 0.0'
    assert told.endswith(f"With schedule.sync_every = 3 and {mean}: 5.5 %, for up to twice the traffic")
    twelve = describe_rounds(config(4000), 1e5)
    assert "8 learners end roughly 4 % above" in twelve
    assert "learning_rate = 0.7, momentum = 0.6: 3.4 %" in twelve
    assert expected_gap(config(1000), 1e5, 1) is None
    assert "With" not in describe_rounds(config(480), 1e5)
    for unknown in (InnerConfig(optimizer="adamw"), None):
        model = LARGE if unknown else ModelConfig(kind="huggingface", folder="base")
        run = config(1000, inner=unknown or InnerConfig(), model=model)
        every = 24 if unknown else 6
        assert describe_rounds(run, 1e9) == f"peers exchange each part of the model every {every} steps"
    seldom = msgspec.structs.replace(config(1000), schedule=ScheduleConfig(sync_every=48))
    assert expected_gap(seldom, 1e5, 8) is None


@pytest.mark.parametrize(
    ("rate", "momentum", "steps", "is_corrected"),
    [
        (0.4, 0.7, 480, True),
        (0.7, 0.0, 480, True),
        (0.7, 0.9, 480, False),
        (0.4, 0.7, 959, True),
        (0.4, 0.7, 960, False),
    ],
)
def test_the_bias_of_momentum_is_corrected_in_short_runs_where_a_round_does_not_go_too_far(
    rate: float, momentum: float, steps: int, is_corrected: bool
) -> None:
    outer = OuterConfig(learning_rate=rate, momentum=momentum)
    config = RunConfig(name="run", inner=InnerConfig(steps=steps), outer=outer)
    assert completed(config, 4).outer.bias_correction is is_corrected


@pytest.mark.parametrize(("momentum", "kept"), [(0.0, "bfloat16"), (0.7, "bfloat16"), (0.995, "float32")])
def test_momentum_is_kept_in_two_bytes_unless_it_is_long_or_the_founder_says_so(momentum: float, kept: str) -> None:
    config = RunConfig(name="run", outer=OuterConfig(momentum=momentum))
    assert completed(config, 1).outer.momentum_type == kept
    said = msgspec.structs.replace(config, outer=OuterConfig(momentum=momentum, momentum_type="float32"))
    assert completed(said, 1).outer.momentum_type == "float32"


def test_a_run_lives_by_its_manifest() -> None:
    data = manifest(heartbeat_s=2.5, log_length=100).encode()
    config = protocol_config(
        decode_manifest(data, RunId(digest_of(data))), PeerOptions(folder=Path("state")), PeerId("p")
    )
    assert (config.heartbeat_s, config.log_length) == (2.5, 100)


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"heartbeat_s": 0.0}, ">= 0.1"), ({"heartbeat_s": 1e9}, "<= 60"), ({"log_length": 3}, ">= 4")],
)
def test_what_no_run_can_live_with_is_refused(changes: dict[str, object], told: str) -> None:
    data = manifest(**changes).encode()
    with pytest.raises(ValueError, match=told):
        decode_manifest(data, RunId(digest_of(data)))


def test_logs_that_have_no_room_are_refused() -> None:
    shards = 1 << 10
    tensors = tuple(
        TensorSpec(name=f"w{i}", shape=(1024,), merge="direct", fragment=FragmentId(0)) for i in range(shards)
    )
    schedule = ScheduleConfig(fragments=1, max_shard=1024, log_length=1 + MOST_LOGGED // shards)
    sound = Manifest(
        founder=PeerId("f"),
        config=RunConfig(name="run", schedule=schedule),
        tensors=tensors,
        genesis=(Digest("0" * 40),) * shards,
    )
    data = sound.encode()
    with pytest.raises(ValueError, match="must be at most 256 with 1024 shards"):
        decode_manifest(data, RunId(digest_of(data)))
