"""A model that shows other parameters than its own for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training.parameters import FlatParameters, trainable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_shows_a_vector_and_is_itself_again(dtype: torch.dtype) -> None:
    """Without a copy where that can be, also if what is done meanwhile fails; views of it know no difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    named = trainable(model)
    specs = tensor_specs([(name, p.shape, False) for name, p in named], 2)
    layout = make_layout(specs, 2, 16, "direct")
    flat = FlatParameters(named, specs, layout)
    vector, own = torch.randn(layout.elements), torch.empty(layout.elements)
    flat.copy_to(own, flat.everything)
    places = [parameter.data_ptr() for parameter in model.parameters()]

    def look() -> None:
        with flat.showing(vector):
            shown = sorted(v for p in model.parameters() for v in p.detach().float().flatten().tolist())
            assert shown == sorted(vector.to(dtype).float().tolist())
            begin, end = vector.data_ptr(), vector.data_ptr() + 4 * vector.numel()
            assert {begin <= p.data_ptr() < end for p in model.parameters()} == {dtype == torch.float32}
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="failed"):
        look()
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    again = torch.empty(layout.elements)
    flat.copy_to(again, flat.everything)
    assert torch.equal(again, own)
