"""The laboratory's arithmetic: against the plain model, against the node, against theory; and that it is repeatable."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.quality import data, runner, sparse
from benchmarks.quality.data import Stream
from benchmarks.quality.exchange import Exchange, pack
from benchmarks.quality.laboratory import Laboratory, Result
from benchmarks.quality.settings import Setting, from_row, learning_rate, to_row
from benchmarks.quality.stacked import Stack
from p2pdiloco.codec.merge import token_weight
from p2pdiloco.peer.learner_updates import Moves
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.protocol.ids import FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.models import build_model, loss
from p2pdiloco.training.optimizers import inner_optimizers
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors

SMALL = Setting(
    width=16,
    depth=1,
    heads=2,
    context=16,
    batch=8,
    learners=4,
    steps=24,
    warmup=4,
    fragments=3,
    sync_every=6,
    overlap=2,
)
WORDS = b"def merge(self, peers): return sum(peer.weight for peer in peers)\n# one model, many learners\n"


def text() -> Corpus:
    raw = torch.frombuffer(bytearray(WORDS * 60), dtype=torch.uint8)
    return Corpus(train=raw, held_out=raw[: 64 * 17].clone())


def run(**changes: Any) -> Result:
    return Laboratory(msgspec.structs.replace(SMALL, **changes), text()).run()


def test_the_same_setting_gives_the_same_bits_and_another_seed_does_not() -> None:
    first, again, other = run(), run(), run(seed=2)
    assert torch.equal(first.theta, again.theta)
    assert torch.equal(first.losses, again.losses)
    assert not torch.equal(first.theta, other.theta)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stacked_learners_train_like_plain_ones(kind: Literal["adamw", "muon"]) -> None:
    """Losses and parameters of three learners, each with data of its own, against the model and loop of a peer."""
    setting = msgspec.structs.replace(SMALL, learners=2, depth=2, inner=kind, vocabulary=300)
    inner = setting.inner_config
    stack = Stack(setting, build_model(setting.model_config, 1), 3, 4, is_compiled=False)
    plain = [build_model(setting.model_config, 1) for _ in range(3)]
    optimizers = [inner_optimizers(model, inner) for model in plain]
    stream = stream_of(learners=3, batch=12)
    for step in range(6):
        batch = stream.next()
        measured = stack.step(batch, step, step)
        for index, (model, own) in enumerate(zip(plain, optimizers, strict=True)):
            value = loss(model, batch[index])
            assert float(value.detach()) == pytest.approx(float(measured[index]), rel=1e-5)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            for optimizer in own:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(inner, step, step)
                optimizer.step()
                optimizer.zero_grad()
    laboratory = Laboratory(setting, text())
    for index, model in enumerate(plain):
        ours, theirs = (torch.empty(laboratory.layout.elements) for _ in range(2))
        flat = stack.flat(index, laboratory.specs, laboratory.layout)
        flat.copy_to(ours, flat.everything)
        FlatParameters(model.named_parameters(), laboratory.specs, laboratory.layout).copy_to(theirs, flat.everything)
        assert torch.allclose(ours, theirs, atol=2e-5)


def stream_of(learners: int, batch: int, *, first: int = 0, k: int = 0, is_parted: bool = False) -> Stream:
    return Stream(
        text().train,
        seed=1,
        batch=batch,
        context=16,
        learners=learners,
        first=first,
        k=k or learners,
        is_parted=is_parted,
    )


def test_however_many_learners_share_a_step_it_has_the_same_samples() -> None:
    whole = stream_of(learners=1, batch=8).next()
    assert torch.equal(stream_of(learners=4, batch=8).next().flatten(0, 1), whole.flatten(0, 1))
    assert torch.equal(stream_of(learners=4, batch=8, first=2, k=1).next()[0], whole.view(4, 2, -1)[2])


def test_learners_with_parts_read_nothing_of_the_others() -> None:
    numbers = torch.arange(250, dtype=torch.uint8)
    for part in range(2):
        stream = Stream(numbers, seed=1, batch=64, context=16, learners=2, first=part, k=1, is_parted=True)
        batch = stream.next()
        assert int(batch.min()) >= 125 * part
        assert int(batch.max()) < 125 * (part + 1)


@pytest.mark.parametrize("adopt", ["carry", "overwrite"])
def test_one_learner_with_outer_rate_1_and_no_momentum_is_plain_training(adopt: str) -> None:
    """Theta - (Theta - theta) = theta, whatever H; with overwrite only if nothing is under way (overlap 0)."""
    settings = {
        "learners": 1,
        "up": "fp32",
        "down": "fp32",
        "outer_rate": 1.0,
        "outer_momentum": 0.0,
        "merge": "direct",
    }
    parallel = run(method="parallel", learners=1)
    for sync_every in (3, 6, 12):
        overlap = 2 if adopt == "carry" else 0
        outer = run(**settings, sync_every=sync_every, overlap=overlap, adopt=adopt)
        assert torch.allclose(outer.theta, parallel.theta, atol=1e-5)
    assert not torch.allclose(run(**{**settings, "outer_rate": 0.5}, adopt=adopt).theta, parallel.theta, atol=1e-3)


def test_overwrite_loses_the_overlap_and_carry_does_not() -> None:
    exact = {"learners": 1, "up": "fp32", "down": "fp32", "outer_rate": 1.0, "outer_momentum": 0.0}
    carried, overwritten = run(**exact), run(**exact, adopt="overwrite")
    assert not torch.allclose(carried.theta, overwritten.theta, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speeds": (1.0, 1.0, 2.0, 4.0), "steps": 48},
        {"absent": 0.5, "steps": 200},
        {"join_at": 0.5},
        {"cut": (0.3, 0.6)},
        {"sync_every": 3, "overlap": 2, "quorum": 4, "speeds": (1.0, 1.0, 1.0, 4.0)},
    ],
)
def test_every_token_of_a_living_learner_is_merged_at_the_end(changes: dict[str, Any]) -> None:
    laboratory = Laboratory(msgspec.structs.replace(SMALL, **changes), text())
    laboratory.run()
    for member in laboratory.members:
        assert member.tokens > 0
        if member.is_present:
            assert all(mark == (member.steps, member.tokens) for mark in member.marks)


def test_with_fp32_and_carry_all_learners_end_at_the_global_parameters() -> None:
    """What was sent leaves the delta: with exact payloads nothing but the global parameters is left after the end."""
    for changes in (
        {},
        {"max_shard": 100},
        {"speeds": (1.0, 1.0, 2.0, 4.0)},
        {"cut": (0.3, 0.6)},
        {"join_at": 0.5},
    ):
        laboratory = Laboratory(msgspec.structs.replace(SMALL, up="fp32", down="fp32", **changes), text())
        result = laboratory.run()
        for member in laboratory.members:
            laboratory.take(member, 1e18)
            theta = torch.empty_like(result.theta)
            member.flat.copy_to(theta, member.flat.everything)
            assert torch.allclose(theta, result.theta, atol=1e-5)


def test_the_grace_window_lets_slow_learners_in() -> None:
    settings = {"speeds": (1.0, 1.0, 2.0, 4.0), "steps": 60}
    with_grace = run(**settings, grace=0.7, overlap=4).figures["smallest_share_of_turns"]
    without = run(**settings, grace=0.0, overlap=4).figures["smallest_share_of_turns"]
    everyone = run(**settings, quorum=4, overlap=4).figures["smallest_share_of_turns"]
    assert without < with_grace < everyone


def test_owners_wait_for_learners_that_usually_answer_within_half_a_round() -> None:
    def smallest_share(slowest: float, **changes: Any) -> float:
        return run(speeds=(1.0, slowest), learners=2, steps=96, sync_every=12, **changes).figures[
            "smallest_share_of_turns"
        ]

    assert smallest_share(0.25, waits=True) == smallest_share(0.25, quorum=2) > smallest_share(0.25)
    assert smallest_share(0.05, waits=True) < 0.5 * smallest_share(0.05, quorum=2)


@dataclasses.dataclass
class Node:
    """One peer's global state, with a learner whose movements are ours."""

    learner: LearnerId
    state: ModelState
    vectors: SharedVectors

    def encode(self, snapshot: Tensor) -> bytes:
        self.state.shifts.begin_snapshot(FragmentId(0))
        self.vectors.snapshot.copy_(snapshot)
        self.state.shifts.complete_snapshot(FragmentId(0))
        head = self.state.heads[0]
        assert head is not None
        return self.state.encode(ShardId(0), head)[0]


@pytest.mark.parametrize(
    ("up", "down", "merge", "correction"), [("int4", "int4", "rda", True), ("int2", "bf16", "direct", False)]
)
def test_the_exchange_is_the_nodes(up: Any, down: Any, merge: Any, correction: bool) -> None:
    """Three peers' real nodes and the laboratory's exchange make three rounds with the same learners: the same bits."""
    elements, shard = 3000, ShardId(0)
    setting = Setting(learners=2, up=up, down=down, outer_rate=0.7, outer_momentum=0.4, merge=merge)
    setting = msgspec.structs.replace(setting, correction=correction, bounded=True, agreement=True)
    tensors = (TensorSpec(name="all", shape=(elements,), merge="rda", fragment=FragmentId(0)),)
    layout = make_layout(tensors, 1, 1 << 20, merge)
    random = torch.Generator().manual_seed(5)
    start = torch.randn(elements, generator=random)
    exchange = Exchange(setting, layout, start.clone())
    nodes = []
    for name in ("a", "b", "c"):
        vectors = SharedVectors.create(elements)
        outer = OuterConfig(learning_rate=0.7, momentum=0.4, merge=merge, bias_correction=correction)
        node = Node(
            LearnerId(f"{name}/1"),
            ModelState(layout, outer, CodecConfig(up=up, down=down), vectors, round_steps=24),
            vectors,
        )
        node.state.put(shard, digest_of(b"version 0"), start, torch.zeros(elements))
        node.state.shifts.load(node.learner)
        node.state.shifts.acknowledge((shard,))
        nodes.append(node)
    learners = [start.clone() for _ in nodes]
    counts = [(1, 64), (2, 128), (4, 1024)]  # steps and tokens of each
    for version in range(1, 4):
        for learner in learners:
            learner.add_(1e-3 * torch.randn(elements, generator=random))
        parcels = [exchange.contribute(shard, learner) for learner in learners]
        payloads = [node.encode(learner) for node, learner in zip(nodes, learners, strict=True)]
        weights = [token_weight(tokens, steps) for steps, tokens in counts]
        steps = [steps for steps, _ in counts]
        change = exchange.commit(shard, [0, 1, 2], [parcel.gradient for parcel in parcels], weights, steps)
        contributors = [Contributor(n.learner, 0, t, 0, s) for n, (s, t) in zip(nodes, counts, strict=True)]
        head = nodes[0].state.heads[0]
        assert head is not None
        merged = nodes[0].state.merge(shard, head, version, list(zip(contributors, payloads, strict=True)))
        result = digest_of(merged.digests)
        header = CommitHeader(
            shard, version, head, 0, PeerId("a"), (), 0, merged.payload_digest, result, result, merged.length
        )
        for node, learner, payload, parcel in zip(nodes, learners, payloads, parcels, strict=True):
            moves = Moves(node.learner, (payload,), (), False)
            node.state.apply(header, digest_of(result.encode()), merged.payload, merged.digests, moves)
            assert torch.equal(node.state.theta, exchange.theta)
            assert torch.equal(node.state.momentum, exchange.momentum)
            assert torch.equal(node.vectors.shift, change + parcel.values)
            learner.add_(node.vectors.shift)
            node.state.shifts.acknowledge((shard,))
    assert not torch.equal(exchange.theta, start)


def test_a_cell_that_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.quality.laboratory.text_of", lambda *_: text())
    path = tmp_path / "rows.jsonl"
    settings = [SMALL, msgspec.structs.replace(SMALL, method="parallel", learners=1), SMALL]
    runner.work(settings, path, is_compiled=False)
    runner.work(settings, path, is_compiled=False)
    assert len(path.read_text().splitlines()) == 2
    assert set(runner.rows(path)) == set(settings)


def test_a_row_leads_back_to_its_setting() -> None:
    setting = Setting(learners=4, speeds=(1.0, 1.0, 2.0, 4.0), cut=(0.1, 0.2), up="int4@1.0")
    assert from_row(msgspec.json.decode(msgspec.json.encode(to_row(setting)))) == setting


def test_rows_of_decided_questions_are_left_out() -> None:
    """Else such a row would be taken for the cell that it is without what was asked."""
    row = to_row(Setting())
    assert from_row({**row, "memory": 1.0}) == Setting()
    assert from_row({**row, "memory": 4.0}) is None
    assert from_row({**row, "adopt": "blend"}) is None


def test_a_codec_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no codec 'int3'"):
        pack("int3", torch.zeros(8))


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        Setting(learners=3, batch=32)


def test_a_flattened_merge_has_equal_singular_values_and_its_length() -> None:
    """And what lies between is between; other tensors are as they were."""
    text_ = text()
    changes: dict[str, Any] = {"up": "fp32", "down": "fp32", "outer_rate": 1.0, "outer_momentum": 0.0, "learners": 1}
    found = {}
    for power in (1.0, 0.5, 0.0):
        laboratory = Laboratory(msgspec.structs.replace(SMALL, **changes, spectrum=power), text_)
        exchange, layout = laboratory.exchange, laboratory.layout
        snapshot = exchange.theta + torch.randn(layout.elements, generator=torch.Generator().manual_seed(1))
        for shard in layout.shards:
            parcel = exchange.contribute(shard.shard, snapshot)
            exchange.commit(shard.shard, [0], [parcel.gradient], [1.0], [1])
        at = {laboratory.specs[i].name: start for i, start in zip(layout.order, layout.starts, strict=True)}
        moved = exchange.theta - Laboratory(laboratory.setting, text_).exchange.theta
        matrix = next(spec for spec in laboratory.specs if "blocks" in spec.name and len(spec.shape) == 2)
        start = at[matrix.name]
        found[power] = moved[start : start + matrix.elements].view(matrix.shape), moved.norm()
    values = {power: torch.linalg.svdvals(moved) for power, (moved, _) in found.items()}
    assert float(values[0.0].max() / values[0.0].min()) == pytest.approx(1.0, rel=1e-3)
    assert 1.1 < float(values[0.5].max() / values[0.5].min()) < float(values[1.0].max() / values[1.0].min())
    assert all(float(length) == pytest.approx(float(found[1.0][1]), rel=1e-3) for _, length in found.values())


MEAN: dict[str, Any] = {"merge": "direct", "outer_rate": 1.0, "outer_momentum": 0.0, "up": "fp32", "down": "fp32"}


def test_momentum_that_is_sent_becomes_the_learners_mean_as_parameters_do() -> None:
    """A single learner's is its own; of several, all have the same if nobody trains after the last merge."""
    alone = {**MEAN, "learners": 1, "inner": "muon"}
    plain = run(**alone).theta
    assert torch.allclose(run(**alone, sends_momentum=True).theta[: len(plain)], plain, atol=1e-5)
    laboratory = Laboratory(msgspec.structs.replace(SMALL, **MEAN, inner="muon", sends_momentum=True), text())
    result = laboratory.run()
    everything = laboratory.members[0].flat.everything
    sent = [laboratory.exchange.span(shard) for part in laboratory.layout.fragments[3:] for shard in part]
    assert sum(span.stop - span.start for span in sent) == 16 * 16 * 16
    for member in laboratory.members:
        laboratory.take(member, 1e18)
        theta = torch.empty_like(result.theta)
        member.flat.copy_to(theta, everything)
        for span in sent:
            assert theta[span].any()
            assert torch.allclose(theta[span], result.theta[span], atol=1e-6)
    with pytest.raises(ValueError, match="plain mean"):
        run(inner="muon", sends_momentum=True)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_learners_that_pool_their_gradients_are_data_parallel(inner: Any) -> None:
    """And if they pool less, or only for a while, they are not."""
    parallel = run(**MEAN, inner=inner, method="parallel", learners=1).theta
    pooled = run(**MEAN, inner=inner, pools="gradients").theta
    assert torch.allclose(pooled, parallel, atol=2e-5)
    for what in ("matrices", "rest", "momentum", "moments") if inner == "muon" else ("momentum", "moments"):
        assert not torch.allclose(run(**MEAN, inner=inner, pools=what).theta, parallel, atol=1e-3)
    assert not torch.allclose(run(**MEAN, inner=inner, pools="gradients", pools_until=0.5).theta, parallel, atol=1e-3)


def test_the_inner_momentum_of_a_setting_is_that_of_its_optimizer() -> None:
    usual = {"adamw": 0.9, "muon": 0.95}
    for inner, momentum in usual.items():
        shape: dict[str, Any] = {**MEAN, "inner": inner}
        assert torch.equal(run(**shape).theta, run(**shape, inner_momentum=momentum).theta)
        assert not torch.equal(run(**shape).theta, run(**shape, inner_momentum=0.5).theta)


def test_embeddings_head_and_norms_have_a_rate_of_their_own() -> None:
    shape: dict[str, Any] = {**MEAN, "inner": "muon"}
    assert not torch.equal(run(**shape).theta, run(**shape, rest_rate=2.0).theta)
    with pytest.raises(ValueError, match="rate of their own"):
        run(**MEAN, inner="adamw", rest_rate=2.0)


def test_learners_begin_with_the_weights_of_one_that_trained_alone() -> None:
    """It has only its own part of the batches, all of its tokens count, and all inner optimizers are fresh then."""
    laboratory = Laboratory(msgspec.structs.replace(SMALL, **MEAN, alone_until=31), text())
    figures = laboratory.run().figures
    assert [group.stack.steps for group in laboratory._groups if isinstance(group.stack, Stack)] == [17]
    alone, together = 31 * SMALL.step_tokens // 4, 17 * SMALL.step_tokens
    assert (figures["trained_tokens"], figures["global_steps"]) == (alone + together, 31 + 17)
    assert figures["smallest_share_of_turns"] == 1.0
    with pytest.raises(ValueError, match="in step"):
        run(alone_until=4, absent=0.5)


def test_a_prediction_is_taken_back_when_the_commit_comes() -> None:
    laboratory = Laboratory(msgspec.structs.replace(SMALL, **MEAN, predicts=0.5), text())
    theta = laboratory.run().theta
    for member in laboratory.members:
        laboratory.take(member, 1e18)
        found = torch.empty_like(theta)
        member.flat.copy_to(found, member.flat.everything)
        assert torch.allclose(found, theta, atol=1e-5)
    assert not torch.allclose(theta, run(**MEAN).theta, atol=1e-4)
    with pytest.raises(ValueError, match="in step"):
        run(predicts=0.5, adopt="overwrite")


def test_gossip_of_two_is_the_plain_mean_of_two() -> None:
    gossip = run(**MEAN, learners=2, method="gossip", feedback=False)
    assert torch.allclose(gossip.theta, run(**MEAN, learners=2, feedback=False).theta, atol=1e-5)
    four, mean = run(**MEAN, method="gossip", feedback=False), run(**MEAN, feedback=False)
    assert not torch.allclose(four.theta, mean.theta, atol=1e-4)
    with pytest.raises(ValueError, match="gossip"):
        run(method="gossip")


def test_primal_averaging_without_an_average_is_the_plain_mean() -> None:
    plain = run(**MEAN)
    assert torch.allclose(run(**MEAN, outer="primal").theta, plain.theta, atol=1e-6)
    exchange = of_two(outer="primal", outer_momentum=0.75)
    committed(exchange, 1.0, 3.0)
    assert torch.allclose(exchange.average[:2], 0.25 * torch.tensor([0.5, 1.5]), atol=1e-6)
    assert torch.allclose(exchange.theta[:2], (0.25 + 0.75 * 0.25) * torch.tensor([0.5, 1.5]), atol=1e-6)


def of_two(**changes: Any) -> Exchange:
    """An exchange of one shard between two learners."""
    tensors = (TensorSpec(name="all", shape=(1000,), merge="direct", fragment=FragmentId(0)),)
    setting = Setting(**MEAN | {"learners": 2} | changes)
    return Exchange(setting, make_layout(tensors, 1, 1 << 20, "direct"), torch.zeros(1000))


def committed(exchange: Exchange, first: float, second: float) -> Tensor:
    """Return the change by a commit, after the learners have moved by ``first`` and ``second``, on an axis each."""
    snapshots = torch.zeros(2, 1000)
    snapshots[0, 0], snapshots[1, 1] = first, second
    parcels = [exchange.contribute(ShardId(0), snapshot) for snapshot in snapshots]
    return exchange.commit(ShardId(0), [0, 1], [parcel.gradient for parcel in parcels], [1.0, 1.0], [1, 1])


def test_a_longer_contribution_weighs_less_with_the_penalty() -> None:
    weights = torch.softmax(torch.tensor([-1.0, -3.0]), 0)
    change = committed(of_two(penalty=True), 1.0, 3.0)
    assert torch.allclose(change[:2], weights * torch.tensor([1.0, 3.0]), atol=1e-6)


def of_four(moves: Tensor, **changes: Any) -> Tensor:
    """Return the change by a commit, after four learners have moved by the rows of ``moves``."""
    exchange = of_two(learners=4, **changes)
    parcels = [exchange.contribute(ShardId(0), row) for row in moves]
    return exchange.commit(ShardId(0), [0, 1, 2, 3], [one.gradient for one in parcels], [1.0, 1.0, 1.0, 3.0], [1] * 4)


def test_without_codecs_and_bounds_the_mean_of_groups_is_the_mean_of_all() -> None:
    moves = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    flat, grouped = of_four(moves), of_four(moves, groups=2)
    assert torch.allclose(flat, (torch.tensor([1.0, 1.0, 1.0, 3.0]) @ moves) / 6.0, atol=1e-5)
    assert torch.allclose(grouped, flat, atol=1e-5)
    with pytest.raises(ValueError, match="equal size"):
        of_four(moves, groups=3)


def test_a_groups_merge_is_bounded_and_quantized_as_a_contribution_is() -> None:
    """Of four learners that agree, one moves a hundred times as far: its group of two counts with its own rule."""
    moves = torch.ones(4, 1000) + 0.1 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    moves[3] *= 100.0
    rounded = of_four(moves, groups=2, up="int4")
    assert float((rounded - of_four(moves, groups=2)).norm()) > 1.0
    bounded = of_four(moves, groups=2, bounded=True)
    first = moves[:2].mean(0)
    second = (moves[2] + 1.5 * moves[2].norm() / moves[3].norm() * moves[3]) / 2.0
    assert torch.allclose(bounded, (first + second) / 2.0, rtol=1e-3)


def test_byte_pairs_stand_for_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is cut, and where it is not ASCII."""
    words = " ".join(f"word{i % 40} \u00e9t\u00e9" for i in range(6000)).encode()
    raw = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    made = Corpus(train=raw, held_out=raw[: 64 * 17].clone())
    monkeypatch.setitem(data.TEXTS, "english", lambda: made)
    data.byte_pairs.cache_clear()
    try:
        found = data.text_of("english", 300)
    finally:
        data.byte_pairs.cache_clear()
    assert found.train.dtype == torch.int32
    assert int(found.train.max()) < 300
    assert 2 * found.train.numel() < raw.numel(), "one token for several bytes"
    assert data.text_of("english", data.BYTES) is made


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.03, 1.0])
def test_a_sparse_contribution_has_the_bytes_that_its_values_are_read_from(share: float) -> None:
    """Read as the module says, they give the values: the largest ones, each with its sign and one of two levels."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)) ** 3
    chunks, values = sparse.encode(share, x)
    for body, given, found in zip(chunks, x.split(4096), values.split(4096), strict=True):
        count = sparse.kept_of(share, given.numel())
        levels = torch.frombuffer(bytearray(body[:4]), dtype=torch.bfloat16).float()
        bits = iter(np.unpackbits(np.frombuffer(body[5:], np.uint8)).tolist())
        places, at = [], -1
        for _ in range(count):
            ones = next(i for i in itertools.count() if not next(bits))
            at += 1 + (ones << body[4]) + sum(next(bits) << place for place in reversed(range(body[4])))
            places.append(at)
        signs = [1 - 2 * next(bits) for _ in places]
        read = torch.zeros_like(given)
        read[places] = torch.tensor([sign * levels[next(bits)] for sign in signs])
        assert len(list(bits)) < 8
        assert torch.equal(read, found)
        assert set(places) == set(given.abs().topk(count).indices.tolist())
        assert torch.equal(found[places].sign(), given[places].sign())
    if share == 0.03:
        assert sum(map(len, chunks)) < 0.036 * 5000, "6.5 bits for a place, 2 for a value, and 5 bytes for a chunk"


def test_what_a_sparse_codec_leaves_out_stays_with_the_node_and_comes_later() -> None:
    tensor = TensorSpec(name="w", shape=(8,), merge="direct", fragment=FragmentId(0))
    layout = make_layout((tensor,), 1, 1 << 20, "direct")
    setting = Setting(learners=2, up="top@0.125", kept=0.5, feedback=False)
    exchange = Exchange(setting, layout, torch.zeros(8))
    still, moved = torch.zeros(8), torch.tensor([-8.0, 4.0, 0, 0, 0, 0, 0, 0])
    sent = [exchange.contribute(ShardId(0), snapshot, 1).values for snapshot in (moved, still, still)]
    assert [one.tolist()[:2] for one in sent] == [[8.0, 0.0], [0.0, -2.0], [0.0, 0.0]]
    assert not exchange.contribute(ShardId(0), still, 0).values.any(), "of another learner"
    with pytest.raises(ValueError, match="with its node"):
        Setting(kept=0.5)
