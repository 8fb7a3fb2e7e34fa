"""Quantizers: error bounds, lengths, streams of chunks, and bodies from hostile peers."""

import functools
import math
import struct
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.codec import native
from p2pdiloco.codec.compression import join, payload_limit, split
from p2pdiloco.codec.formats import HEADER
from p2pdiloco.codec.quantization import (
    BLOCK,
    CHUNK,
    LARGEST_BODY,
    Recipe,
    add_chunk,
    chunk_count,
    decode_chunk,
    decode_chunks,
    encode_chunk,
    encode_vector,
    recipe,
    squared_norm,
    sum_of_squares,
)
from p2pdiloco.protocol.manifest import Codec

CODECS: list[Codec] = ["int4", "int8", "bf16", "int2", "e3m0"]
SCALED: list[Codec] = ["int4", "int8", "int2", "e3m0"]
LENGTHS = [0, 1, 2, 255, 256, 257, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]
RECIPES = [
    *(recipe(codec) for codec in CODECS),
    *(recipe("int4", step) for step in (0.0, 0.335, 1.0)),
    *(recipe("int4", 0.4, block) for block in (64, 1024, 4096)),
    *(recipe("int8", step) for step in (0.01, 0.1, 2.0)),
    recipe("int2", 0.0),
]
recipes = st.sampled_from(RECIPES)


def bell(elements: int, seed: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * scale


def encode(how: Recipe, x: torch.Tensor) -> list[bytes]:
    return [bytes(body) for body in encode_vector(how, x)]


def body_of(codec: Codec, x: torch.Tensor) -> bytes:
    [body] = encode(recipe(codec), x)
    return body


def there_and_back(how: Recipe, x: torch.Tensor) -> torch.Tensor:
    return decode_chunks(encode(how, x), torch.full_like(x, math.nan))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / x.norm())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", LENGTHS)
def test_round_trip_of_a_bell(codec: Codec, elements: int) -> None:
    x = bell(elements, elements)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        payload = join(encode_vector(recipe(codec), x))
        y = decode_chunks(split(payload, chunk_count(elements), LARGEST_BODY), torch.full_like(x, math.nan))
    assert len(payload) <= payload_limit(elements)
    assert len(encode(recipe(codec), x)) == chunk_count(elements)
    bound = {"int4": 0.13, "int8": 0.009, "bf16": 0.0024, "int2": 0.46, "e3m0": 0.21}[codec]
    if elements >= BLOCK:
        assert relative_error(x, y) < bound


@pytest.mark.parametrize(
    ("step", "most_bytes", "most_error"), [(0.335, 0.46, 0.118), (0.4, 0.435, 0.123), (1, 0.28, 0.3)]
)
def test_a_coarser_step_trades_bytes_for_error(step: float, most_bytes: float, most_error: float) -> None:
    x, how = bell(CHUNK, 1), recipe("int4", step)
    assert len(join(encode_vector(how, x))) / CHUNK < most_bytes
    assert relative_error(x, there_and_back(how, x)) < most_error


@given(recipes, st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=600))
@settings(max_examples=300, deadline=None)
def test_error_is_bounded_for_any_values(how: Recipe, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = there_and_back(how, x)
    for at in range(0, len(values), how.block or BLOCK):
        a, b = (v[at : at + (how.block or BLOCK)].double() for v in (x, y))
        bound = float(a.abs().max()) * {"int8": 1.01, "bf16": 2.0**-8}.get(how.codec, 1.01)
        if how.step == 0.0:
            # Half a step within the range; E3M0 is a third of the value off at most, and 3/4 of its smallest step.
            bound *= {"int4": 0.5 / 7, "int8": 0.5 / 127, "int2": 0.5, "e3m0": 0.34, "bf16": 1.0}[how.codec]
        else:  # what is beyond the symbols' range is clipped to it, never thrown further off than it was
            bound = max(bound, how.step * float(a.norm()) / math.sqrt(len(a)))
        assert float((a - b).abs().max()) <= bound + 1.3e-28


@pytest.mark.parametrize("codec", SCALED)
def test_one_rare_value_is_not_clipped(codec: Codec) -> None:
    x = torch.zeros(4 * BLOCK)
    x[BLOCK + 3] = 5.0
    assert there_and_back(recipe(codec), x)[BLOCK + 3] == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("how", [h for h in RECIPES if h.step and h.codec != "int8"])
@pytest.mark.parametrize("size", [3.0, 5.0, 8.0, 15.0, 30.0, 200.0])
def test_a_heavy_tail_is_clipped_or_scaled_whichever_costs_less(how: Recipe, size: float) -> None:
    x = bell(16 * how.block, 8, 1.0)
    x[:: how.block] = size
    clipping = relative_error(x, there_and_back(how._replace(tail=math.inf), x))
    scaling = relative_error(x, there_and_back(recipe(how.codec, 0.0, how.block), x))
    assert relative_error(x, there_and_back(how, x)) <= 1.12 * clipping
    if size == 200.0:
        assert relative_error(x, there_and_back(how, x)) <= 1.12 * min(clipping, scaling)


@pytest.mark.parametrize("how", RECIPES)
def test_the_scale_of_a_short_last_block_ignores_the_padding(how: Recipe) -> None:
    block = how.block or BLOCK
    x = bell(block + 20, 5)
    whole = torch.cat((x[:block], x[block:].repeat(-(-block // 20))[:block]))
    tail = slice(block, block + 20)
    here, there = there_and_back(how, x)[tail], there_and_back(how, whole)[tail]
    assert relative_error(x[tail], here) < relative_error(x[tail], there) + 0.02


@pytest.mark.parametrize("how", RECIPES)
def test_zeros_and_the_smallest_numbers(how: Recipe) -> None:
    tiny = torch.full((300,), 1e-45)
    for x in (torch.zeros(300), -torch.zeros(300), tiny, tiny * 1e10):
        y = there_and_back(how, x)
        assert bool(torch.isfinite(y).all())
        assert float((x - y).abs().max()) <= 1e-29


@pytest.mark.parametrize("how", RECIPES)
def test_blocks_of_zeros_among_others_stay_zeros(how: Recipe) -> None:
    block = how.block or BLOCK
    x = bell(8 * block, 2)
    x[block : 3 * block] = 0.0
    x[5 * block : 6 * block] = 1e-25  # its squares vanish in float32
    y = there_and_back(how, x)
    assert not y[block : 3 * block].any()
    assert float(y[5 * block]) == pytest.approx(1e-25, rel=0.01)
    assert relative_error(x, y) < 0.9


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("at", [0, 299, CHUNK + 5])
def test_what_is_not_finite_is_not_encoded(how: Recipe, bad: float, at: int) -> None:
    x = torch.ones(300 if at < 300 else CHUNK + 6)
    x[at] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(how, x)


@pytest.mark.parametrize("how", RECIPES)
def test_the_largest_values_stay_decodable(how: Recipe) -> None:
    assert bool(torch.isfinite(there_and_back(how, torch.full((300,), 6e35))).all())


@pytest.mark.parametrize("codec", SCALED)
def test_dequantizing_is_one_float32_multiply(codec: Codec) -> None:
    """Against a decoder written from the format's description, element by element."""
    x = bell(5 * BLOCK + 7, 9)
    body = body_of(codec, x)
    bits = {"int4": 4, "int8": 8, "int2": 2, "e3m0": 4}[codec]
    padded = 6 * BLOCK
    packed = np.frombuffer(body, np.uint8, padded * bits // 8, HEADER.size)
    scales = (np.frombuffer(body, "<u2", 6, HEADER.size + len(packed)).astype(np.uint32) << 16).view(np.float32)
    parts = 8 // bits
    expected = np.empty(len(x), np.float32)
    for i in range(len(x)):
        part, at = divmod(i, padded // parts)
        code = int(packed[at]) >> (bits * part) & (2**bits - 1)
        symbol = code - 2**bits if code >= 2 ** (bits - 1) else code
        if codec == "e3m0":
            symbol = (-1 if code & 8 else 1) * (0, 1, 2, 4, 8, 16, 32, 64)[code & 7]
        expected[i] = np.float32(symbol) * scales[i // BLOCK]
    decoded = decode_chunk_of(body, len(x)).numpy()
    assert np.array_equal(decoded + 0.0, expected + 0.0)  # a zero's sign does not matter
    assert np.array_equal(np.abs(decoded).view(np.uint32), np.abs(expected).view(np.uint32))


def decode_chunk_of(body: bytes | bytearray | memoryview, elements: int) -> torch.Tensor:
    """And the other way to read a body accepts and refuses the same."""
    out = torch.full((elements,), math.nan)
    try:
        squared_norm(body, elements)
    except ValueError:
        with pytest.raises(ValueError):
            decode_chunk(body, out)
    decode_chunk(body, out)
    return out


def test_int4_packs_halves_of_a_chunk() -> None:
    x = torch.cat((torch.full((BLOCK,), 1.0), torch.full((BLOCK,), -1.0)))
    [body] = encode(recipe("int4", 0.335), x)
    assert set(body[HEADER.size : HEADER.size + BLOCK]) == {(3 | (-3 & 15) << 4)}  # 1 / 0.335 rounds to 3


@pytest.mark.parametrize("codec", CODECS)
def test_decodes_into_a_slice(codec: Codec) -> None:
    x, whole = bell(1000, 1), torch.zeros(1200)
    body = body_of(codec, x)
    decode_chunk(body, whole[100:1100])
    assert torch.equal(whole[100:1100], decode_chunk_of(body, 1000))
    assert not whole[:100].any()
    assert not whole[1100:].any()


@pytest.mark.parametrize("codec", CODECS)
def test_the_source_is_not_touched_and_any_buffer_decodes(codec: Codec) -> None:
    x = bell(3000, 1)
    kept = x.clone()
    body = body_of(codec, x)
    assert torch.equal(x, kept)
    for kind in (bytes, bytearray, memoryview):
        assert torch.equal(decode_chunk_of(kind(body), 3000), decode_chunk_of(body, 3000))


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("is_used", [native.is_used, False])
def test_what_is_subtracted_counts_as_if_the_difference_were_given(
    how: Recipe, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a last block that is not full, one of zeros, and, where a norm's square vanishes, one left to torch."""
    monkeypatch.setattr(native, "is_used", is_used)
    for x in (bell(3000, 1), bell(3000, 1) * torch.logspace(-20, 0, 3000)):
        less = bell(3000, 2) * x.abs()
        x[256:512] = less[256:512]
        kept = x.clone(), less.clone()
        body = bytes(encode_chunk(how, x, less))
        assert body == bytes(encode_chunk(how, x - less))
        assert torch.equal(x, kept[0])
        assert torch.equal(less, kept[1])


@pytest.mark.parametrize("how", RECIPES)
def test_threads_do_not_share_scratch(how: Recipe) -> None:
    vectors = [bell(CHUNK + 77, seed) for seed in range(4)]
    expected = [there_and_back(how, x) for x in vectors]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(3):
            got[i] = there_and_back(how, vectors[i])

    threads = [threading.Thread(target=functools.partial(work, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], expected[i]) for i in range(4))


def test_impossible_recipes_say_so() -> None:
    for step, block in ((-1.0, 256), (17.0, 256), (math.nan, 256), (1e-9, 256), (0.4, 100)):
        with pytest.raises(ValueError, match="must be"):
            recipe("int4", step, block)


@pytest.mark.skipif(not native.is_used, reason="no library of these sources is there: pip install -e .")
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.335, 0.4, 1.0]),
    st.sampled_from([64, 256]),
    st.integers(1, 9),
    st.integers(0, 63),
)
@settings(deadline=None)
def test_the_library_encodes_and_decodes_to_the_same_bits(
    seed: int, step: float, block: int, blocks: int, cut_off: int
) -> None:
    """Whoever merges again compares what it encodes with what the owner has encoded, perhaps without the library."""
    x = (bell(blocks * block, seed) * torch.logspace(-20, 20, blocks).repeat_interleave(block))[cut_off:].clone()
    x[:: 3 * block] *= 50  # some heavy tails
    x[-1] *= 50
    how, out = recipe("int4", step, block), bell(len(x), seed + 1)

    def read(body: bytes) -> tuple[list[int], float]:
        added = out.clone()
        add_chunk(body, 0.3, added)
        vectors = (decode_chunk_of(body, len(x)), added)
        return [v for y in vectors for v in y.view(torch.int32).tolist()], squared_norm(body, len(x))

    [body] = encode(how, x)
    found, norm = read(body), sum_of_squares(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_used", False)
        assert encode(how, x) == [body]
        assert (read(body), sum_of_squares(x)) == (found, norm)


@pytest.mark.parametrize("how", RECIPES)
def test_what_is_computed_from_a_body_is_that_of_its_values(how: Recipe) -> None:
    body = encode(how, bell(700, 3))[0]
    y, sum_ = decode_chunk_of(body, 700), bell(700, 4)
    expected = sum_ + y * 0.7
    add_chunk(body, 0.7, sum_)
    assert torch.equal(sum_, expected)
    assert squared_norm(body, 700) == pytest.approx(float(y.double().square().sum()), rel=1e-9)


# ------------------------------------------------------------------------------------------------------ hostile bodies


@given(st.binary(max_size=400), st.integers(1, 300))
@settings(deadline=None)
def test_noise_is_refused_or_finite(body: bytes, elements: int) -> None:
    try:
        y = decode_chunk_of(body, elements)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())


@given(recipes, st.integers(1, 700), st.data())
@settings(max_examples=300, deadline=None)
def test_an_altered_body_is_refused_or_finite(how: Recipe, elements: int, data: st.DataObject) -> None:
    body = bytearray(encode(how, bell(elements, 3))[0])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        y = decode_chunk_of(body, elements)
    except ValueError:
        return
    assert y.shape == (elements,)
    assert bool(torch.isfinite(y).all())


@given(st.sampled_from(SCALED), st.data())
@settings(deadline=None)
def test_any_symbols_are_finite(codec: Codec, data: st.DataObject) -> None:
    body = bytearray(body_of(codec, torch.full((2 * BLOCK,), 6e35)))
    symbols = len(body) - HEADER.size - 4
    body[HEADER.size : HEADER.size + symbols] = data.draw(st.binary(min_size=symbols, max_size=symbols))
    assert bool(torch.isfinite(decode_chunk_of(body, 2 * BLOCK)).all())


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    body = body_of(codec, bell(600, 4))
    for wrong in (b"", body[:5], body[:-1], body + b"\0"):
        with pytest.raises(ValueError, match="bytes"):
            decode_chunk_of(wrong, 600)
    with pytest.raises(ValueError, match="claims 600 elements"):
        decode_chunk_of(body, 601)


def test_missing_and_additional_chunks_are_refused() -> None:
    bodies = encode(recipe("int2"), bell(CHUNK + 9, 4))
    for wrong in (bodies[:1], [*bodies, bodies[1]], bodies[::-1], []):
        with pytest.raises(ValueError, match=r"bodies|claims"):
            decode_chunks(wrong, torch.empty(CHUNK + 9))


def test_wrong_headers_are_refused() -> None:
    body = body_of("int8", bell(300, 4))
    for header, says in (
        ((9, 2, 256, 300), "version"),
        ((2, 9, 256, 300), "codec"),
        ((2, 2, 63, 300), "blocks"),
        ((2, 2, 0, 300), "blocks"),
        ((2, 3, 256, 300), "blocks"),
        ((2, 2, 256, 2**31), "claims"),
    ):
        with pytest.raises(ValueError, match=says):
            decode_chunk_of(struct.pack("<BBHI", *header) + body[HEADER.size :], 300)


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
def test_wild_scales_are_refused(codec: Codec, scale: float) -> None:
    body = bytearray(body_of(codec, bell(300, 4)))
    body[-2:] = np.array([scale], "<f4").tobytes()[2:]
    with pytest.raises(ValueError, match="scale"):
        decode_chunk_of(body, 300)
