"""Entropy coding of payloads with zstd's Huffman coder. For fast links, bodies are stored uncompressed.

A payload has an index before its frames (all integers little-endian)::

    frames uint32           number of frames, plus STORED if they are uncompressed bodies
    sizes  uint32[frames]   bytes of each frame
    frames, one after the other; each is a body, or one zstd frame that states its content's size

Rules of this file:
1. Quantized symbols are independent draws, so their order carries no information. Chance matches that zstd finds among
   them cost bytes and time. Its fast matcher therefore gets 64 entries and looks for 7 bytes: enough for runs of zeros.
   On outer gradients the size is within 0.5 % of the symbols' entropy (int2: 2.5 %). Level 1 was 6 % above it at int4's
   step 1.5, and three times slower.
2. Each chunk of a shard is a frame of its own. A chunk is thus compressed while it is in the cache, and chunks can be
   sent, received and decoded one by one. This costs four bytes a chunk.
3. Every frame states its content's size. A frame without it, or with more than the caller allows, is refused before
   anything is allocated. So is an index that does not fit. A peer cannot make the receiver allocate more than it asked
   for.
4. zstd's contexts are not thread-safe, so each thread has its own. Both directions run without the GIL.
5. Stored bodies are neither copied nor inspected here. They are written in their final place in the payload (``store``)
   and read from there.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer


Body = bytes | memoryview
"""Uncompressed content of a frame; not to be modified."""

_WINDOW_LOG: Final = 19
_LARGEST_WINDOW: Final = 1 << 20
"""Maximum window of a peer's frame in bytes; our own frames look back at most 512 KiB."""
_COUNT: Final = struct.Struct("<I")
STORED: Final = 1 << 31
_PARAMETERS: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(body: Buffer) -> bytes:
    """Return ``body`` as one zstd frame that states its content's size."""
    return _contexts.compressor.compress(cast(bytes, body))


def decompress(data: Buffer, max_bytes: int) -> Body:
    """Return the content of one zstd frame.

    Raises:
        ValueError: ``data`` is not a single whole frame, or its content has more than ``max_bytes`` or an unknown size.
    """
    frame = memoryview(data).cast("B")
    out = _room(_stated_size(frame, max_bytes))
    _take(frame, out)
    return out


def _room(size: int) -> memoryview:
    return np.empty(size, np.uint8).data


def _stated_size(frame: memoryview, max_bytes: int) -> int:
    """Return the stated size of the content. Raises ValueError if it is missing or not allowed."""
    try:
        stated = zstandard.get_frame_parameters(cast(bytes, frame))
    except zstandard.ZstdError as error:
        raise ValueError(f"the payload is not a zstd frame: {error}") from error
    if stated.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise ValueError("the payload does not state its size")
    if stated.content_size > max_bytes:
        raise ValueError(f"the payload would have {stated.content_size} bytes, at most {max_bytes} are allowed")
    if stated.window_size > max(max_bytes, _LARGEST_WINDOW):
        raise ValueError(f"the payload needs a window of {stated.window_size} bytes, more than allowed")
    if stated.dict_id:
        raise ValueError("the payload needs a dictionary")
    return stated.content_size


def _take(frame: memoryview, out: memoryview) -> None:
    """Decompress ``frame`` into ``out``, which has the stated size. Raises ValueError."""
    try:
        content = _contexts.decompressor.decompress(cast(bytes, frame), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"the payload is not a zstd frame: {error}") from error
    if len(content) != len(out):
        raise ValueError(f"the payload has {len(content)} bytes where it stated {len(out)}")
    out[:] = content


def join(bodies: Iterable[Buffer]) -> bytes:
    """Return one payload of ``bodies``. Each body is compressed before the next one is requested."""
    frames = [compress(body) for body in bodies]
    return b"".join((struct.pack(f"<{1 + len(frames)}I", len(frames), *map(len, frames)), *frames))


def index_bytes(bodies: int) -> int:
    """Return the length of the index of this many bodies."""
    return _COUNT.size * (1 + bodies)


def store(payload: memoryview, sizes: Sequence[int]) -> memoryview:
    """Write the index of uncompressed bodies to the beginning of ``payload`` and return it.

    The bodies have these ``sizes`` and lie after the first ``index_bytes`` bytes.
    """
    struct.pack_into(f"<{1 + len(sizes)}I", payload, 0, STORED | len(sizes), *sizes)
    return payload


def split(payload: Buffer, bodies: int, max_bytes: int) -> Iterator[Body]:
    """Yield the bodies of a payload. Each body is decompressed when it is requested.

    Raises:
        ValueError: the index is not that of ``bodies`` frames that fill the payload, or a frame is malformed or has
            more than ``max_bytes``.
    """
    whole, sizes, is_stored = _opened(payload, bodies, max_bytes)
    for frame in _cut(whole, sizes):
        yield frame if is_stored else decompress(frame, max_bytes)


def unpack(payload: Buffer, bodies: int, max_bytes: int) -> tuple[memoryview, list[int]]:
    """Return the bodies of a payload, concatenated, and the end of each. Stored bodies share the payload's memory.

    Raises:
        ValueError: as for ``split``.
    """
    whole, sizes, is_stored = _opened(payload, bodies, max_bytes)
    if is_stored:
        return whole, list(itertools.accumulate(sizes))
    frames = list(_cut(whole, sizes))
    ends = list(itertools.accumulate(_stated_size(frame, max_bytes) for frame in frames))
    out, begin = _room(ends[-1] if ends else 0), 0
    for frame, end in zip(frames, ends, strict=True):
        _take(frame, out[begin:end])
        begin = end
    return out, ends


def _opened(payload: Buffer, bodies: int, max_bytes: int) -> tuple[memoryview, Sequence[int], bool]:
    """Return the frames, their sizes, and whether they are stored uncompressed. Raises ValueError."""
    whole = memoryview(payload).cast("B")
    begin = index_bytes(bodies)
    count = _COUNT.unpack_from(whole)[0] if len(whole) >= begin else None
    if count not in (bodies, bodies | STORED):
        raise ValueError(f"the payload does not consist of {bodies} frames")
    sizes = struct.unpack_from(f"<{bodies}I", whole, _COUNT.size)
    if begin + sum(sizes) != len(whole):
        raise ValueError(f"the payload has {len(whole)} bytes, its index says {begin + sum(sizes)}")
    is_stored = count != bodies
    if is_stored and max(sizes, default=0) > max_bytes:
        raise ValueError(f"the payload has a body of {max(sizes)} bytes, at most {max_bytes} are allowed")
    return whole[begin:], sizes, is_stored


def _cut(whole: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    begin = 0
    for size in sizes:
        yield whole[begin : begin + size]
        begin += size


def payload_limit(elements: int) -> int:
    """Return the maximum size in bytes of an honest payload of ``elements`` parameters, with any codec.

    The sum covers two bytes for each element of whole blocks (at most 4 Ki elements), and a scale of two bytes for
    every 64. For each chunk of 256 Ki it adds zstd's worst case (ZSTD_compressBound), a header, and an index entry.
    """
    body = 2 * (elements + 4096) + 2 * (elements // 64 + 1)
    return body + (body >> 8) + (1 + (elements >> 18)) * 128 + 64
