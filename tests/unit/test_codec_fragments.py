"""Bin-packing of tensors into fragments."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from p2pdiloco.codec.fragments import assign_fragments, tensor_specs
from p2pdiloco.protocol.manifest import make_layout


def test_largest_first_by_hand() -> None:
    # 7 -> bin 0, 6 -> bin 1, 5 -> bin 1 (11), 4 -> bin 0 (11), 3 -> bin 0 (tie, lower number)
    assert assign_fragments([3, 7, 4, 6, 5], 2) == [0, 0, 0, 1, 1]


def test_ties_go_by_index() -> None:
    assert assign_fragments([5, 5, 5, 5], 4) == [0, 1, 2, 3]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_no_bin_is_empty_and_none_overflows(sizes: list[int], fragments: int) -> None:
    assigned = assign_fragments(sizes, fragments)
    if fragments <= len(sizes):
        assert set(assigned) == set(range(fragments))
    loads = [sum(s for s, f in zip(sizes, assigned, strict=True) if f == bin_) for bin_ in range(fragments)]
    assert max(loads) <= sum(sizes) / fragments + max(sizes)  # Graham's bound for any greedy assignment


def test_specs_keep_the_models_order_and_mark_embeddings() -> None:
    specs = tensor_specs([("embedding", torch.Size([4, 2]), True), ("head", torch.Size([2, 4]), False)], 2)
    assert [(s.name, s.shape, s.merge, s.fragment) for s in specs] == [
        ("embedding", (4, 2), "direct", 0),
        ("head", (2, 4), "rda", 1),
    ]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=4, max_size=12),
    st.integers(1, 4),
    st.integers(200, 5000),
)
def test_no_fragment_is_larger_than_one_and_a_half_times_the_mean_where_rows_allow(
    shapes: list[tuple[int, int]], fragments: int, max_shard: int
) -> None:
    """Whatever is cut: each parameter is in one shard, of the fragment that the manifest says; shards are in order."""
    named = [(f"t{i}", torch.Size(shape), i % 3 == 0) for i, shape in enumerate(shapes)]
    specs = tensor_specs(named, fragments)
    layout = make_layout(specs, fragments, max_shard, "rda")
    assert layout.elements == sum(rows * row for rows, row in shapes)
    assert [0, *(s.stop for s in layout.shards)] == [*(s.start for s in layout.shards), layout.elements]
    assert sorted(s for shards in layout.fragments for s in shards) == list(range(len(layout.shards)))
    assert all(layout.shards[s].fragment == f for f, shards in enumerate(layout.fragments) for s in shards)
    loads = [sum(layout.shards[s].elements for s in shards) for shards in layout.fragments]
    mean = layout.elements / fragments
    assert min(loads) > 0
    coarsest = max(row for _, row in shapes)  # a part may be larger than asked for by one row
    assert max(loads) <= max(1.5 * mean, mean + mean / 2 + coarsest)
    starts = dict(zip(layout.order, layout.starts, strict=True))
    for index, spec in enumerate(specs):
        for fragment, first, last in spec.parts():
            inside = range(starts[index] + first, starts[index] + last)
            found = {s.fragment for s in layout.shards if s.start < inside.stop and inside.start < s.stop}
            assert found == {fragment}


def test_an_embedding_is_cut_by_rows_and_nothing_is_where_that_is_not_needed() -> None:
    named = [("embedding", torch.Size([1000, 4]), True), *((f"w{i}", torch.Size([10, 10]), False) for i in range(8))]
    embedding, *rest = tensor_specs(named, 4)
    assert embedding.fragments is not UNSET
    assert [last - first for _, first, last in embedding.parts()] == [1000] * 4
    assert set(embedding.fragments) == {0, 1, 2, 3}
    assert all(spec.fragments is UNSET for spec in rest)
    assert all(spec.fragments is UNSET for spec in tensor_specs(named, 4, largest=4.0))
    assert all(spec.fragments is UNSET for spec in tensor_specs(named[1:], 4))
