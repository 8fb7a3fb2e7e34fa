"""A merge made again is the same to the bit, with the C library and without it; one that differs is found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.codec import compression, merge, native
from p2pdiloco.codec.agreement import AgreementHistory, Judgement
from p2pdiloco.codec.bitrate_ladder import downward_recipes
from p2pdiloco.codec.compression import index_bytes
from p2pdiloco.codec.formats import CHUNK, HEADER, Recipe, recipe
from p2pdiloco.codec.quantization import LARGEST_BODY, decode_chunks, encode_vector
from p2pdiloco.peer.audit import LostPayloadError, merge_problem
from p2pdiloco.peer.model_state import ModelState, payload_of
from p2pdiloco.peer.payload_store import Held
from p2pdiloco.protocol.group_merges import merged_parts
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Codec, CodecConfig, MergeRule, OuterConfig, Shard, TensorSpec, make_layout
from p2pdiloco.protocol.messages import (
    CommitHeader,
    Contribution,
    Contributor,
    GroupMerge,
    Head,
    WrongMerge,
    part_as_one,
)
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.util.files import LocalDisk

ROUND = 24
AUTO = CodecConfig(down="auto", coarsest="int2")
ZERO = digest_of(b"version 0")


@contextlib.contextmanager
def library(*, is_used: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_used", is_used and native.LIBRARY is not None)
        yield


class Made(NamedTuple):
    """A commit, and what is needed to make its merge again."""

    header: CommitHeader
    payloads: dict[Digest, Any]
    piece: Shard
    recipes: list[Recipe]

    def problem(self, on_disk: int = 0, part: int = -1, **changes: Any) -> str | None:
        """``on_disk``: how many of the payloads are not in memory; ``part``: which group's merge is made again."""
        header, disk = msgspec.structs.replace(self.header, **changes), Shelf(self.payloads)
        held = {digest: Held(digest, payload) for digest, payload in self.payloads.items()}
        for each in list(held.values())[:on_disk]:
            each.data, each.path = None, Path(each.digest)
        return merge_problem(WrongMerge(header, b"", part), held, self.piece, ROUND, self.recipes, disk)


class Shelf(LocalDisk):
    """A disk with one file for each payload."""

    def __init__(self, payloads: dict[Digest, Any]) -> None:
        self.files = {digest: bytes(payload) for digest, payload in payloads.items()}

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        return self.files[Digest(path.name)]


def made(
    vectors: list[torch.Tensor],
    ups: list[Recipe],
    counts: list[tuple[int, int]],
    *,
    rule: MergeRule = "rda",
    config: CodecConfig = AUTO,
    how: Recipe | None = None,
    longest: float = 0.0,
    is_coded: bool = True,
) -> Made:
    """What an owner makes of these contributions, with its real code. ``counts``: tokens and steps of each."""
    owner = model(vectors[0].numel(), rule, config)
    contributors, payloads = contributed(vectors, ups, counts, is_coded=is_coded)
    named = [(c, payloads[Digest(c.payload.hex())]) for c in contributors]
    found = owner.merge(ShardId(0), ZERO, 1, named, how, longest or math.inf, is_coded=is_coded)
    payloads[found.payload_digest] = found.payload
    header = CommitHeader(
        ShardId(0), 1, ZERO, 4, PeerId("p0"), tuple(contributors), 1, found.payload_digest, ZERO, ZERO, found.length
    )
    header = msgspec.structs.replace(header, factors=found.factors, longest=longest)
    return Made(header, payloads, owner.layout.shards[0], downward_recipes(config))


def model(elements: int, rule: MergeRule, config: CodecConfig) -> ModelState:
    """A peer's state of one shard at version 0."""
    layout = make_layout((TensorSpec(name="t", shape=(elements,), merge=rule, fragment=FragmentId(0)),), 1, 2**30, rule)
    state = ModelState(layout, OuterConfig(), config, SharedVectors.create(elements), round_steps=ROUND)
    state.put(ShardId(0), ZERO, torch.zeros(elements), torch.zeros(elements, dtype=state.momentum.dtype))
    return state


def contributed(
    vectors: list[torch.Tensor], ups: list[Recipe], counts: list[tuple[int, int]], *, is_coded: bool = True
) -> tuple[list[Contributor], dict[Digest, Any]]:
    """What learners give, and their payloads."""
    room, payloads, contributors = index_bytes(-(-vectors[0].numel() // CHUNK)), dict[Digest, Any](), []
    for number, (vector, up, (tokens, steps)) in enumerate(zip(vectors, ups, counts, strict=True)):
        payload = payload_of(encode_vector(up, vector, room=room), up, is_coded)
        digest = digest_of(payload)
        payloads[digest] = payload
        contributors.append(Contributor(LearnerId(f"p{number}/1"), 0, tokens, 0, steps, (), bytes.fromhex(digest)))
    return contributors, payloads


def made_of_groups(
    vectors: list[torch.Tensor],
    ups: list[Recipe],
    counts: list[tuple[int, int]],
    *,
    rule: MergeRule = "rda",
    config: CodecConfig = AUTO,
    how: Recipe | None = None,
    longest: float = 0.0,
    is_coded: bool = True,
) -> Made:
    """What an owner makes of the merges of two groups, whose collectors have each its own state and code: the even
    contributions are of one group, the odd ones of the other."""
    contributors, payloads = contributed(vectors, ups, counts, is_coded=is_coded)
    given_ = list[Contribution]()
    for group in range(2):
        members, collector = contributors[group::2], model(vectors[0].numel(), rule, config)
        named = [(c, payloads[Digest(c.payload.hex())]) for c in members]
        found = collector.merge(ShardId(0), ZERO, 1, named, how, math.inf, is_coded=is_coded, is_group=True)
        payloads[found.payload_digest] = found.payload
        digest = bytes.fromhex(found.payload_digest)
        merged = GroupMerge(PeerId(f"collector {group}"), tuple(members), digest, found.factors)
        given_.append(Contribution(ShardId(0), Head(ShardId(0), 0, ZERO, 0), 4, part_as_one(merged), 1, merged))
    owner = model(vectors[0].numel(), rule, config)
    named = [(one.contributor, payloads[one.payload]) for one in given_]
    sizes = [len(one.contributors) for one in given_]
    limit = longest or math.inf
    found = owner.merge(ShardId(0), ZERO, 1, named, how, limit, is_coded=is_coded, members=sizes)
    payloads[found.payload_digest] = found.payload
    header = CommitHeader(
        shard=ShardId(0),
        version=1,
        parent=ZERO,
        step=4,
        owner=PeerId("p0"),
        **merged_parts(given_, found.factors),
        tokens=1,
        payload=found.payload_digest,
        result=ZERO,
        record=ZERO,
        length=found.length,
        longest=longest,
    )
    return Made(header, payloads, owner.layout.shards[0], downward_recipes(config))


def drawn(seed: int, elements: int, number: int) -> list[torch.Tensor]:
    """Contributions that agree a little, of unequal lengths, some of them zeros in part or as a whole."""
    random = torch.Generator().manual_seed(seed)
    common, found = torch.randn(elements, generator=random), []
    for each in range(number):
        vector = common + 2.0 * torch.randn(elements, generator=random)
        if (seed + each) % 3 == 0:
            vector *= torch.rand(elements, generator=random) < 0.4
        if (seed + each) % 7 == 6:
            vector.zero_()
        found.append(vector * 10.0 ** float(torch.randint(-6, 3, (), generator=random)))
    return found


CODECS: list[Codec] = ["int4", "int8", "bf16", "int2", "e3m0"]


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 31, 300, 5000, 20_001]),
    st.lists(st.tuples(st.sampled_from(CODECS), st.integers(1, 4000), st.integers(1, 60)), min_size=1, max_size=8),
    st.sampled_from(["rda", "direct"]),
    st.sampled_from(downward_recipes(AUTO)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whoever_has_the_contributions_makes_the_same_merge(
    seed: int,
    elements: int,
    given_: list[tuple[Codec, int, int]],
    rule: MergeRule,
    how: Recipe,
    is_short: bool,
    is_coded: bool,
    is_native: bool,
) -> None:
    """V5a: of any codecs, both rules, zeros, merges that are scaled down, and where one of the two has no library."""
    vectors = drawn(seed, elements, len(given_))
    longest = 0.3 * float(vectors[0].norm()) if is_short else 0.0
    ups, counts = [recipe(codec) for codec, _, _ in given_], [(tokens, steps) for _, tokens, steps in given_]
    with library(is_used=is_native):
        commit = made(vectors, ups, counts, rule=rule, how=how, longest=longest, is_coded=is_coded)
    for is_used in (True, False):
        with library(is_used=is_used):
            assert commit.problem() is None
            assert commit.problem(on_disk=seed % (len(commit.payloads) + 1)) is None


@pytest.mark.parametrize("is_used", [True, False])
def test_a_shard_of_several_chunks_is_merged_again(is_used: bool) -> None:
    """V5a."""
    vectors = drawn(5, CHUNK + 777, 3)
    with library(is_used=True):
        commit = made(vectors, [recipe("int4")] * 3, [(100, 10)] * 3, config=CodecConfig())
    with library(is_used=is_used):
        assert commit.problem() is None
        assert commit.problem(on_disk=4) is None
        assert "not the merge" in str(commit.problem(on_disk=4, length=2.0 * commit.header.length))


def test_a_disk_that_alters_a_payload_convicts_nobody() -> None:
    """V5d: nothing is known of the merge then."""
    commit = made(drawn(1, 300, 2), [recipe("int4")] * 2, [(100, 10)] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shelf, "read", lambda *_: b"nonsense")
        with pytest.raises(LostPayloadError, match="altered"):
            commit.problem(on_disk=1)


def test_a_merge_that_is_another_is_found() -> None:
    """V5a: one value, a contribution that is left out, other factors, another limit or length, a codec of its own."""
    vectors = drawn(1, 3000, 4)
    commit = made(vectors, [recipe("int8")] * 4, [(100, 10)] * 4, config=CodecConfig(), longest=1e6)
    assert commit.problem() is None
    wrong = "not the merge"
    assert wrong in str(commit.problem(length=2.0 * commit.header.length))
    assert wrong in str(commit.problem(longest=0.5 * commit.header.length))
    assert wrong in str(commit.problem(factors=(100, 10, 100, 100)))
    assert wrong in str(commit.problem(contributors=commit.header.contributors[:3], factors=commit.header.factors[:3]))
    first = msgspec.structs.replace(commit.header.contributors[0], payload=b"")
    assert "without values" in str(commit.problem(contributors=(first, *commit.header.contributors[1:])))
    assert "cannot be merged" in str(commit.problem(factors=(50,)))
    [body] = map(bytearray, _bodies(commit))
    other = next(i for i in range(HEADER.size + 1, HEADER.size + 100) if body[i] != body[HEADER.size])
    body[HEADER.size], body[other] = body[other], body[HEADER.size]  # of one block: the length stays
    payload = compression.join([body])
    lie = commit._replace(payloads={**commit.payloads, digest_of(payload): payload})
    assert wrong in str(lie.problem(payload=digest_of(payload)))
    values = decode_chunks(_bodies(commit), torch.empty(3000))
    for how, index, change in ((recipe("int4"), 2999, float(values.norm())), (recipe("int4", 0.335), 0, 0.0)):
        changed = values.clone()
        changed[index] += change
        bodies, length = merge.encode(how, changed, math.inf, index_bytes(1))
        payload = payload_of(bodies, how, True)
        lie = commit._replace(payloads={**commit.payloads, digest_of(payload): payload})
        assert wrong in str(lie.problem(payload=digest_of(payload), length=length))


def test_an_owner_that_counts_others_for_less_than_their_agreement_gives_is_found() -> None:
    """V4c, V5a: the merge is right for the factors that the owner states."""
    vectors = honest(4)
    own = merge_factors(vectors, (100, 10, 10, 10))
    assert "counts 10 % of what p1/1 gave" in str(own.problem())
    assert merge_factors(vectors, (100, 60, 100, 100)).problem() is None, "its memory may say so"
    vectors[3] = -vectors[3]
    assert merge_factors(vectors, (100, 100, 100, 10)).problem() is None
    assert merge_factors(vectors, (100, 100, 100, 100)).problem() is None, "so may its memory"
    assert merge_factors(vectors[:2], (100, 10)).problem() is None, "nobody can tell which of two is right"


def honest(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    common = torch.randn(3000, generator=random)
    return [common + 2.0 * torch.randn(3000, generator=random) for _ in range(count)]


def merge_factors(vectors: list[torch.Tensor], factors: tuple[int, ...]) -> Made:
    """The merge of an owner that states these factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgreementHistory, "judge", lambda *_: Judgement([*factors], []))
        return made(vectors, [recipe("int8")] * len(vectors), [(100, 10)] * len(vectors), config=CodecConfig())


def test_a_contribution_that_nobody_can_merge_is_not_in_a_right_merge() -> None:
    """V5a."""
    commit = made(drawn(1, 300, 2), [recipe("int4")] * 2, [(100, 10)] * 2)
    digest = Digest(commit.header.contributors[0].payload.hex())
    spoilt = commit._replace(payloads={**commit.payloads, digest: b"nonsense"})
    assert "cannot be merged" in str(spoilt.problem())


def _bodies(commit: Made) -> list[memoryview]:
    payload = commit.payloads[commit.header.payload]
    return [memoryview(body) for body in compression.split(payload, 1, LARGEST_BODY)]


# -- groups ------------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 31, 300, 5000, 20_001]),
    st.lists(st.tuples(st.sampled_from(CODECS), st.integers(1, 4000), st.integers(1, 60)), min_size=2, max_size=9),
    st.sampled_from(["rda", "direct"]),
    st.sampled_from(downward_recipes(AUTO)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_groups_merge_is_made_again(
    seed: int,
    elements: int,
    given_: list[tuple[Codec, int, int]],
    rule: MergeRule,
    how: Recipe,
    is_short: bool,
    is_coded: bool,
    is_native: bool,
) -> None:
    """V5a: that of each group, and that of the groups' merges, where one of the two has no library."""
    vectors = drawn(seed, elements, len(given_))
    longest = 0.3 * float(vectors[0].norm()) if is_short else 0.0
    ups, counts = [recipe(codec) for codec, _, _ in given_], [(tokens, steps) for _, tokens, steps in given_]
    with library(is_used=is_native):
        commit = made_of_groups(vectors, ups, counts, rule=rule, how=how, longest=longest, is_coded=is_coded)
    for is_used in (True, False):
        with library(is_used=is_used):
            for part in (-1, 0, 1):
                assert commit.problem(part=part) is None
                assert commit.problem(on_disk=seed % (len(commit.payloads) + 1), part=part) is None


@pytest.mark.parametrize("is_used", [True, False])
def test_a_groups_merge_that_is_another_is_found(is_used: bool) -> None:
    """V5a: one value, the merge of the other group, other factors or members; the commit's own merge is another then.

    A group's merge depends on no limit, and the commit's own one on no member's factor."""
    commit = made_of_groups(drawn(1, 3000, 5), [recipe("int8")] * 5, [(100, 10)] * 5, config=CodecConfig(), longest=1e6)
    first, second = commit.header.parts
    wrong = "not the merge"
    with library(is_used=is_used):
        assert [commit.problem(part=part) for part in (-1, 0, 1)] == [None] * 3
        payload = bytes.fromhex(changed(commit, Digest(first.payload.hex())))
        for other in (payload, second.payload):
            parts = (msgspec.structs.replace(first, payload=other), second)
            assert wrong in str(commit.problem(part=0, parts=parts))
            assert wrong in str(commit.problem(parts=parts))
            assert commit.problem(part=1, parts=parts) is None
        members = (second.members, first.members)
        swapped = [msgspec.structs.replace(p, members=m) for p, m in zip((first, second), members, strict=True)]
        assert wrong in str(commit.problem(part=0, parts=tuple(swapped)))
        assert commit.problem(longest=0.5 * commit.header.length, part=0) is None
        assert wrong in str(commit.problem(longest=0.5 * commit.header.length))
        factors = list(commit.header.factors or [100] * 5)
        factors[first.members[0]] //= 2
        assert wrong in str(commit.problem(part=0, factors=tuple(factors)))
        assert commit.problem(factors=tuple(factors)) is None
        half = msgspec.structs.replace(first, factor=first.factor // 2)
        assert wrong in str(commit.problem(parts=(half, second)))
        assert commit.problem(part=0, parts=(half, second)) is None


def test_a_collector_that_counts_a_member_for_less_than_its_agreement_gives_is_found() -> None:
    """V4c, V5a: the group's merge is right for the factors that it states."""
    factors = (100, 10, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgreementHistory, "judge", lambda _, givers, *rest: Judgement([*factors[: len(givers)]], []))
        commit = made_of_groups(honest(6), [recipe("int8")] * 6, [(100, 10)] * 6, config=CodecConfig())
    assert "counts 10 % of what p2/1 gave" in str(commit.problem(part=0))
    assert "counts 10 % of what p3/1 gave" in str(commit.problem(part=1))
    assert commit.problem() is None, "nobody can tell which of two groups is right"


def changed(commit: Made, payload: Digest) -> Digest:
    """The same payload, but for one value; it is among the commit's payloads."""
    [body] = (bytearray(body) for body in compression.split(commit.payloads[payload], 1, LARGEST_BODY))
    other = next(i for i in range(HEADER.size + 1, HEADER.size + 100) if body[i] != body[HEADER.size])
    body[HEADER.size], body[other] = body[other], body[HEADER.size]
    joined = compression.join([body])
    commit.payloads[digest := digest_of(joined)] = joined
    return digest
