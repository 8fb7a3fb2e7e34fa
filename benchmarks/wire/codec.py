"""Bytes, error and speed of every codec, beside their bounds.

    python -m benchmarks.wire.codec --json out/codec.json --plot out/codec.png

- Size: the payload's bytes per parameter beside the bound: Shannon entropy of each chunk's symbols, plus two bytes per
  scale. The symbols of bf16 are its two bytes, each with an entropy of its own.
- Error: ||x - decoded|| / ||x||.
- Speed: GB of float32 per second of one thread's CPU time, the fastest and the median of ``--repeat``. (Other work
  costs no waiting time this way, but still takes caches, memory bandwidth and clock rate.) Measured in turns with it:
  memcpy of the same vector chunk by chunk, zstd alone on the same bodies, the quantizer alone, and the digest of the
  vector's bytes (a state has twice as many: parameters and momentum).

Data: ``gradient`` is a real outer gradient, base minus parameters after H steps of the tiny transformer on Python's
standard library, trained here. ``bell`` is Gaussian, ``tails`` Student's t with 3 degrees of freedom.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import bench
from benchmarks.wire import plots
from p2pdiloco.codec import formats, native
from p2pdiloco.codec.compression import compress, decompress, join, split
from p2pdiloco.codec.digests import chunk_digest
from p2pdiloco.codec.formats import FORMATS, HEADER
from p2pdiloco.codec.quantization import CHUNK, LARGEST_BODY, Recipe, chunk_count, decode_chunks, encode_vector, recipe
from p2pdiloco.protocol.manifest import DataConfig, ModelConfig
from p2pdiloco.training.corpus import Batches, load_corpus
from p2pdiloco.training.models import build_model, loss

RECIPES = (
    recipe("bf16"),
    recipe("int8"),
    recipe("int8", 0.1),
    recipe("int4", 0.335),
    recipe("int4"),
    recipe("int4", 0.0),
    recipe("int4", 0.0, 64),
    recipe("int4", 0.5),
    recipe("int4", 0.75),
    recipe("int4", 1.0),
    recipe("int4", 1.5),
    recipe("e3m0"),
    recipe("int2"),
)
SYNTHETIC = 1 << 22
MODEL = ModelConfig(width=256, depth=4, heads=4, context=64)
BATCH = 4
LEARNING_RATE = 2e-3
WARMUP = 24
Work = Mapping[str, Callable[[], object]]


def outer_gradient(rounds: int, steps: int) -> Tensor:
    """Base minus parameters of the last of ``rounds`` rounds of ``steps`` inner steps each."""
    model = build_model(MODEL, seed=0)
    batches = Batches(load_corpus(DataConfig()), MODEL.context, BATCH, "benchmark")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    base = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(rounds * steps):
        if step % steps == 0:
            base = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        loss(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return base - flat


def data(rounds: int, steps: int) -> dict[str, Tensor]:
    """See the module."""
    generator = torch.Generator().manual_seed(0)
    bell = torch.randn(SYNTHETIC, generator=generator)
    chi = torch.randn(3, SYNTHETIC, generator=generator).square_().mean(0).sqrt_()
    return {
        "gradient": outer_gradient(rounds, steps),
        "bell": bell * 1e-3,
        "tails": torch.randn(SYNTHETIC, generator=generator) / chi * 1e-3,
    }


# ------------------------------------------------------------------------------------------------------------ bounds


def entropy_bytes(body: bytes) -> float:
    """The fewest bytes that an order-0 coder needs for a body's symbols, and two bytes for each scale."""
    header: tuple[int, int, int, int] = HEADER.unpack_from(body)
    _, number, block, elements = header
    form = next(form for form in FORMATS.values() if form.number == number)
    payload = torch.frombuffer(bytearray(body), dtype=torch.uint8)[HEADER.size :]
    if not block:
        return (_entropy(payload[:elements]) + _entropy(payload[elements:])) / 8
    scales = 2 * -(-elements // block)
    packed = payload[:-scales].view(torch.int8)
    symbols = torch.empty(packed.numel() * 8 // form.bits, dtype=torch.int8)
    formats.unpack(packed, form.bits, symbols)
    return _entropy(symbols[:elements].view(torch.uint8)) / 8 + scales


def _entropy(symbols: Tensor) -> float:
    """Bits of all ``symbols`` (uint8) together."""
    counts = torch.bincount(symbols.int(), minlength=256).double()
    counts = counts[counts > 0]
    return float(-(counts * (counts / symbols.numel()).log2()).sum())


# ------------------------------------------------------------------------------------------------------------- speed


def speeds(work: Work, gigabytes: float, repeat: int) -> dict[str, float]:
    """GB/s of each: the fastest, and as ``<name>_median``. All are run once in every repetition."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 1):
        for name, function in work.items():
            began = time.thread_time()
            function()
            if turn:  # the first warms up
                taken[name].append(time.thread_time() - began)
    best = {name: round(gigabytes / min(times), 3) for name, times in taken.items()}
    return best | {f"{name}_median": round(gigabytes / median(times), 3) for name, times in taken.items()}


def measure(how: Recipe, x: Tensor, repeat: int) -> dict[str, float]:
    """One row's figures."""
    elements = x.numel()
    bodies = [bytes(body) for body in encode_vector(how, x)]
    payload = join(bodies)
    frames = [bytes(frame) for frame in _frames(payload, len(bodies))]
    out, room = torch.empty_like(x), torch.empty(CHUNK)
    pieces = [x[start : start + CHUNK] for start in range(0, elements, CHUNK)]
    work: Work = {
        "memcpy": lambda: [room[: piece.numel()].copy_(piece) for piece in pieces],
        "digest": lambda: [chunk_digest(piece, piece[:0]) for piece in pieces],
        "quantize": lambda: encode_vector(how, x),
        "zstd": lambda: [len(compress(body)) for body in bodies],
        "encode": lambda: join(encode_vector(how, x)),
        "unzstd": lambda: [len(decompress(frame, LARGEST_BODY)) for frame in frames],
        "dequantize": lambda: decode_chunks(bodies, out),
        "decode": lambda: decode_chunks(split(payload, chunk_count(elements), LARGEST_BODY), out),
    }
    figures = speeds(work, 4 * elements / 1e9, repeat)
    bound = sum(map(entropy_bytes, bodies))
    return {
        "bytes_per_parameter": round(len(payload) / elements, 5),
        "bound_bytes_per_parameter": round(bound / elements, 5),
        "over_bound": round(len(payload) / bound - 1, 5),
        "relative_error": round(float((x - out).norm() / x.norm()), 5),
        **figures,
    }


def _frames(payload: bytes, count: int) -> list[bytes]:
    at = 4 * (1 + count)
    frames = []
    for size in struct.unpack_from(f"<{count}I", payload, 4):
        frames.append(payload[at : at + size])
        at += size
    return frames


# -------------------------------------------------------------------------------------------------------------- main


def name_of(how: Recipe) -> str:
    """Short, for tables."""
    if how.codec in ("bf16", "e3m0"):
        return how.codec
    return f"{how.codec} {f'rms {how.step:g}' if how.step else 'absmax'}" + (
        f" B{how.block}" if how.block != 256 else ""
    )


COLUMNS = (
    ("bytes/p", "bytes_per_parameter", ".4f"),
    ("bound", "bound_bytes_per_parameter", ".4f"),
    ("over", "over_bound", "+.1%"),
    ("error", "relative_error", ".4f"),
    *(
        (name, name, ".1f")
        for name in ("encode", "quantize", "zstd", "decode", "dequantize", "unzstd", "memcpy", "digest")
    ),
)


def main() -> None:
    """See the module."""
    parser = bench.parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9, help="repetitions of each measurement")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds to train for the outer gradient; the last is taken"
    )
    parser.add_argument("--steps", type=int, default=24, help="inner steps in a round (H)")
    options = parser.parse_args()
    vectors = data(options.rounds, options.steps)
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    rows = []
    for data_name, x in vectors.items():
        results[data_name] = {}
        for how in RECIPES:
            figures = measure(how, x, options.repeat)
            results[data_name][name_of(how)] = figures
            settings = {
                "name": name_of(how),
                "data": data_name,
                "elements": x.numel(),
                "chunk": CHUNK,
                "repeat": options.repeat,
                "kernels": native.is_used,
                **{key: value for key, value in how._asdict().items() if value != math.inf},
            }
            rows.append(bench.write(options, "wire/codec", settings, figures))
        print(f"\n{data_name}: GB/s of float32, one thread, fastest run")
        print(bench.table("codec", COLUMNS, results[data_name]), flush=True)
    if options.plot:
        plots.codec(options.plot, rows)


if __name__ == "__main__":
    main()
