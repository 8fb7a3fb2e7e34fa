"""Bin-packing of tensors into fragments."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.tensors.fragments import assign_fragments, tensor_specs


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
