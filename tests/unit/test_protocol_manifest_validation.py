"""A stranger's manifest costs little, whatever it says."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, digest_of
from p2pdiloco.protocol.manifest import (
    BlockSpec,
    DataConfig,
    InnerConfig,
    Layout,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.protocol.manifest_validation import MAX_MANIFEST_BYTES, config_problems, decode_manifest, without_places

QUICKLY_S = 3.0
MEMORY = 96 << 20
"""What decoding MAX_MANIFEST_BYTES of the smallest objects may take, many times over."""

Raw = dict[str, Any]


def manifest() -> Manifest:
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=(64, 32), merge="direct" if i == 0 else "rda", fragment=FragmentId(i % 2))
        for i in range(6)
    )
    config = RunConfig(
        name="sound",
        model=ModelConfig(width=32, depth=1, heads=2, context=16),
        inner=InnerConfig(batch=4),
        schedule=ScheduleConfig(fragments=2, sync_every=4, overlap=2, max_shard=1024),
    )
    layout = Layout.of(Manifest(founder=PeerId("f"), config=config, tensors=tensors, genesis=(Digest("0" * 40),)))
    return Manifest(
        founder=PeerId("f"),
        config=config,
        tensors=tensors,
        genesis=tuple(Digest("0" * 40) for _ in layout.shards),
        blocks=BlockSpec(number=40, samples=8, data=Digest("0" * 40)),
    )


def decode(data: bytes) -> Manifest:
    return decode_manifest(data, RunId(digest_of(data)))


def altered(change: Callable[[Raw], object]) -> bytes:
    """A manifest that is sound but for ``change``, as its bytes."""
    raw: Raw = msgspec.msgpack.decode(manifest().encode())
    change(raw)
    return msgspec.msgpack.encode(raw)


def put(*path: str | int, to: object) -> Callable[[Raw], object]:
    def change(raw: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = to

    return change


def many_tensors(raw: Raw, count: int = 2**16) -> None:
    """As many fragments as tensors, which some code might go through fragment by fragment."""
    raw["tensors"] = [{"name": f"t{i}", "shape": [], "merge": "rda", "fragment": i} for i in range(count)]
    raw["config"]["schedule"] |= {"fragments": count, "sync_every": count}


def huggingface(**config: object) -> Callable[[Raw], object]:
    model = {"kind": "huggingface", "config": {"model_type": "llama", "vocab_size": 1000} | config}
    return lambda raw: raw["config"].update(model=model)


def test_a_sound_one_is_taken_as_it_is() -> None:
    assert decode(manifest().encode()) == manifest()


def test_a_run_whose_embedding_is_cut_is_taken() -> None:
    """Its shards are counted part by part."""
    sound = manifest()
    where = tuple(FragmentId(f) for f in (1, 0, 1))
    cut = msgspec.structs.replace(sound.tensors[1], fragments=where)
    found = msgspec.structs.replace(sound, tensors=(sound.tensors[0], cut, *sound.tensors[2:]))
    found = msgspec.structs.replace(found, genesis=(Digest("0" * 40),) * 13)
    assert decode(found.encode()) == found
    assert len(Layout.of(found).shards) == 13
    assert len(Layout.of(sound).shards) == 12


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put("tensors", 0, "shape", to=[2**40, 2**40]), "parameters, at most"),
        (put("tensors", 0, "shape", to=[2**40] * 8), "parameters, at most"),
        (put("tensors", 0, "shape", to=[2**36, 1]), "parameters, at most"),
        (put("tensors", 0, "shape", to=[2**30]), "does not fit its shards"),
        (put("tensors", 0, "shape", to=[1] * 9), "length <= 8"),
        (put("tensors", 0, "name", to="x" * 257), "length <= 256"),
        (put("tensors", 0, "name", to="t1"), "names a tensor twice"),
        (put("tensors", 0, "fragment", to=2), "fragment that does not exist"),
        (put("tensors", 0, "fragment", to=-1), "fragment that does not exist"),
        (put("tensors", 0, "fragments", to=[0, 2]), "fragment that does not exist"),
        (put("tensors", 0, "fragments", to=[1, 0]), "contradicts itself"),
        (put("tensors", 0, "fragments", to=[0] * 65), "more parts than it has rows"),
        (put("tensors", 0, "fragments", to=[0] * 4097), "length <= 4096"),
        (put("tensors", 0, "fragments", to=[0] * 64), "does not fit its shards"),
        (put("tensors", to=[]), "length >= 1"),
        (many_tensors, "does not fit its shards"),
        (put("genesis", to=["0" * 40] * 2**16), "does not fit its shards"),
        (put("genesis", 0, to="0" * 1000), "length <= 40"),
        (put("founder", to="x" * 129), "length <= 128"),
        (put("config", "name", to="\x1b[2J"), "matching regex"),
        (put("config", "name", to="sound\n"), "matching regex"),
        (put("config", "name", to=".."), "matching regex"),
        (put("config", "name", to="../home"), "matching regex"),
        (put("config", "seed", to=-1), ">= 0"),
        (put("config", "model", "width", to=2**40), "<= 65536"),
        (put("config", "model", "depth", to=2**40), "<= 4096"),
        (put("config", "model", "heads", to=2**40), "<= 4096"),
        (put("config", "model", "context", to=2**40), "<= 1048576"),
        (lambda raw: raw["config"]["model"].update(width=2**16, heads=1, context=2**20), "model.context = 1048576"),
        (put("config", "model", "vocabulary", to=2**40), "<= 1048576"),
        (put("config", "inner", "batch", to=2**40), "<= 1048576"),
        (
            lambda raw: raw["config"]["inner"].update(batch=2**20) or raw["config"]["model"].update(context=2**8),
            "tokens a step",
        ),
        (put("config", "inner", "learning_rate", to=float("nan")), "> 0.0"),
        (put("config", "inner", "steps", to=2**60), "<= 1099511627776"),
        (put("config", "schedule", "fragments", to=2**40), "<= 65536"),
        (put("config", "schedule", "max_shard", to=1), ">= 1024"),
        (put("config", "evaluation", "samples", to=2**40), "<= 65536"),
        (put("config", "data", "pattern", to="../../.ssh/*"), "leaves the data folder"),
        (put("config", "data", "pattern", to="/etc/*"), "leaves the data folder"),
        (put("held_out", to={"symbol": 1, "samples": bytes(18)}), "samples are cut short"),
        (put("held_out", to={"symbol": 4, "samples": bytes(17)}), "samples are cut short"),
        (put("held_out", to={"symbol": 2, "samples": bytes(34)}), "enum value 2"),
        (put("held_out", to={"symbol": 1, "samples": b""}), "length >= 1"),
        (put("held_out", to={"symbol": 1, "samples": bytes(17 << 16)}), "length <= 1048576"),
        (put("blocks", "number", to=2**40), "<= 65536"),
        (put("blocks", "samples", to=7), "not a multiple of the batch"),
        (put("blocks", "samples", to=0), "not a multiple of the batch"),
        (huggingface(nested={"a": {"b": {"c": {"d": {"e": 1}}}}}), "nested deeper"),
        (huggingface(hidden_size=2**40), "at most"),
        (huggingface(num_hidden_layers=4096, num_local_experts=4096), "layers times experts"),
        (huggingface(text_config={"num_hidden_layers": 4096, "num_experts": 17}), "layers times experts"),
        (huggingface(layer_types=["x"] * 2000), "more than 1024 items"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_impossible_or_too_much_is_refused_at_once(change: Callable[[Raw], object], told: str) -> None:
    data = altered(change)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ValueError, match=told):
            decode(data)
        assert time.process_time() - began < QUICKLY_S
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_it_is_not_read_if_it_is_too_long_or_too_deep() -> None:
    with pytest.raises(ValueError, match=f"more than the {MAX_MANIFEST_BYTES} allowed"):
        decode(b"\x00" * (MAX_MANIFEST_BYTES + 1))
    raw = manifest().encode()
    name = msgspec.msgpack.encode("config") + b"\x80"
    at = raw.index(msgspec.msgpack.encode("config") + b"\x80")  # the model's empty one
    deep = raw[:at] + name[:-1] + b"\x81" + msgspec.msgpack.encode("a") + b"\x91" * 1_000_000 + raw[at + len(name) :]
    with pytest.raises(ValueError, match="nested too deeply"):
        decode(deep)


@pytest.mark.timeout(30)
def test_the_most_tensors_and_fragments_are_laid_out_quickly() -> None:
    def change(raw: Raw) -> None:
        many_tensors(raw, 40_000)
        raw["genesis"] = ["0" * 40] * 40_000

    began = time.process_time()
    assert len(Layout.of(decode(altered(change))).shards) == 40_000
    assert time.process_time() - began < QUICKLY_S


def test_experts_that_people_use_are_not_too_many() -> None:
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
    assert decode(altered(huggingface(**deepseek))).config.model.config["n_routed_experts"] == 256


def test_what_a_founder_wrote_of_its_own_machine_does_not_travel() -> None:
    data = DataConfig(kind="jsonl", path="/home/ann/private", tokenizer="/home/ann/tok", column="body")
    model = ModelConfig(kind="huggingface", folder="/home/ann/base", context=8)
    config = without_places(RunConfig(name="x", data=data, model=model))
    assert b"ann" not in msgspec.msgpack.encode(config)
    assert (config.data.column, config.model.context) == ("body", 8)


def test_only_a_script_has_a_fingerprint_of_frozen_parameters() -> None:
    about: Raw = {"frozen_digest": "0" * 40, "frozen_norms": "0" * 40, "frozen_name": "org/Base-1B"}
    for kind, number in (("external", 0), ("transformer", 1)):
        problems = config_problems(RunConfig(name="story", model=ModelConfig(kind=kind, **about)))
        assert sum("are for training scripts: leave them out" in problem for problem in problems) == number
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"frozen_name": "\x1b[2J"}, ModelConfig)
