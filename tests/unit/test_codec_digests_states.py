"""How states lie in bytes, with a momentum of either type."""

import pytest
import torch

from p2pdiloco.codec.digests import StateForm, digest_list, packed
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.protocol.manifest import OuterConfig

FORMS = (StateForm(torch.float32), StateForm(torch.bfloat16))


def test_the_form_is_the_manifests_and_float32_in_those_that_say_nothing() -> None:
    assert StateForm.of(OuterConfig()) == StateForm(torch.float32)
    assert StateForm.of(OuterConfig(momentum_type="bfloat16")) == StateForm(torch.bfloat16)
    assert [form.width for form in FORMS] == [8, 6]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("elements", [1, 999, CHUNK, 2 * CHUNK + 5])
def test_what_was_packed_comes_back_with_the_digests_of_its_chunks(form: StateForm, elements: int) -> None:
    theta = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    momentum = torch.randn(elements, generator=torch.Generator().manual_seed(2)).to(form.momentum)
    data = packed(theta, momentum)
    assert len(data) == sum(form.chunk_sizes(elements)) == form.width * elements
    into = torch.empty(elements), form.still(elements)
    assert form.unpacked(bytes(data), *into) == form.listed(data) == digest_list(theta, momentum)
    assert torch.equal(into[0], theta)
    assert torch.equal(into[1], momentum)
    at = 0
    for number, size in enumerate(form.chunk_sizes(elements)):
        chunk = data[at : at + size]
        at += size
        for part in (chunk, bytes(chunk)):
            found = form.vectors(part)
            assert torch.equal(found[0], theta[number * CHUNK : (number + 1) * CHUNK])
            assert torch.equal(found[1], momentum[number * CHUNK : (number + 1) * CHUNK])
    with pytest.raises(ValueError, match="bytes, not"):
        form.unpacked(bytes(data)[:-1], *into)
