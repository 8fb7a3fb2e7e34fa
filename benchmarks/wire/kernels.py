"""Speed of the codec's C library against torch, which an installation without a compiler uses.

    python -m benchmarks.wire.kernels --elements 1e7 --json out/kernels.json

Milliseconds of one thread's CPU time for one int4 shard, the fastest of ``--repeat``: encoding, decoding, checking a
contribution (its norm), merging four contributions, and the outer step with an own contribution taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks import bench
from p2pdiloco.codec import merge, native, outer_optimizer, quantization
from p2pdiloco.codec.formats import CHUNK

CONTRIBUTIONS = 4
FACTORS = outer_optimizer.Factors(learning_rate=0.4, momentum_factor=0.9)
COLUMNS = tuple((name, name, ".1f") for name in ("encode", "decode", "norm", "merge", "step_float32", "step_bfloat16"))


def work(elements: int) -> dict[str, Callable[[], object]]:
    """The operations that are measured, on vectors of ``elements``."""
    drawn = torch.Generator().manual_seed(0)
    x, less, theta = (torch.randn(elements, generator=drawn) * size for size in (1e-3, 1e-4, 1.0))
    out, buffer, how = torch.empty(elements), torch.zeros(elements), quantization.recipe("int4")
    bodies = quantization.encode_vector(how, x, less)
    gradients = [merge.EncodedGradient(bodies, elements) for _ in range(CONTRIBUTIONS)]
    weights, steps = [1.0] * CONTRIBUTIONS, [32] * CONTRIBUTIONS

    def step(momentum: torch.Tensor) -> None:
        if outer_optimizer.step_shard(bodies, bodies, theta, momentum, buffer, False, FACTORS):
            return
        for body, start in zip(bodies, range(0, elements, CHUNK), strict=True):
            span = slice(start, start + CHUNK)
            change = quantization.decode_chunk(body, out[span])
            outer_optimizer.outer_step(theta[span], momentum[span], change, **FACTORS)
            quantization.add_chunk(body, 1.0, change)
            buffer[span].copy_(change)

    wide, narrow = torch.zeros(elements), torch.zeros(elements, dtype=torch.bfloat16)
    return {
        "encode": lambda: quantization.encode_vector(how, x, less),
        "decode": lambda: quantization.decode_chunks(bodies, out),
        "norm": lambda: merge.EncodedGradient(bodies, elements),
        "merge": lambda: merge.merge("rda", gradients, weights, steps, 32, out),
        "step_float32": lambda: step(wide),
        "step_bfloat16": lambda: step(narrow),
    }


def measure(elements: int, repeat: int) -> dict[str, float]:
    """Milliseconds of each operation, the fastest of ``repeat`` after one that warms up."""
    found = {}
    for name, function in work(elements).items():
        taken = []
        for _ in range(repeat + 1):
            began = time.thread_time()
            function()
            taken.append(time.thread_time() - began)
        found[name] = round(1e3 * min(taken[1:]), 2)
    return found


def main() -> None:
    """See the module."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--elements", type=float, default=1e7, help="parameters of the shard")
    parser.add_argument("--repeat", type=int, default=9, help="repetitions of each measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in ("C", "torch") if native.LIBRARY is not None else ("torch",):
        native.is_used = name == "C"
        results[name] = measure(int(options.elements), options.repeat)
        bench.write(options, "wire/kernels", {"by": name}, results[name])
    print(bench.table("ms a shard", COLUMNS, results))


if __name__ == "__main__":
    main()
