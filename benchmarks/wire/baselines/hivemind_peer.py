"""Peer that averages with hivemind's DecentralizedAverager; runs in a virtual environment of its own.

Timed is the all-reduce alone; matchmaking takes seconds and is reported apart. hivemind only averages: no outer step,
no digest, no signature. Its memory lies in several processes and is not measured.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from hivemind import DHT  # noqa: E402
from hivemind.averaging import DecentralizedAverager  # noqa: E402
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization  # noqa: E402

from benchmarks.wire import line  # noqa: E402

CODECS = {
    "fp32": NoCompression,
    "fp16": Float16Compression,
    "uint8": Uniform8BitQuantization,
}
TENSORS = 16
BLOCK = 1 << 20


def main() -> None:
    config = line.begin()
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        sys.exit("hivemind's 8-bit codecs average wrongly with numpy 2.4 and later")
    torch.set_num_threads(1)
    times = multiprocessing.Array("d", 2)
    _time_allreduce(times)
    index, peers, parameters = config["index"], config["peers"], int(config["parameters"])
    address = f"/ip4/{config['host']}/tcp/0"
    joined = None
    if index == 0:
        joined = DHT(start=True, host_maddrs=[address], nat_port_map=False, auto_nat=False, use_relay=False)
    line.answer(address=str(joined.get_visible_maddrs()[0]) if joined else "")
    averager = None
    for command in line.commands():
        match command["do"]:
            case "connect":
                dht = joined or DHT(
                    initial_peers=[command["addresses"][0]],
                    start=True,
                    host_maddrs=[address],
                    nat_port_map=False,
                    auto_nat=False,
                    use_relay=False,
                )
                averager = DecentralizedAverager(
                    [torch.zeros(parameters // TENSORS) for _ in range(TENSORS)],
                    dht,
                    start=True,
                    prefix="exchange",
                    target_group_size=peers,
                    min_group_size=peers,
                    min_matchmaking_time=3.0,
                    request_timeout=2.0,
                    compression=CODECS[config["codec"]](),
                    allreduce_timeout=300.0,
                    next_chunk_timeout=60.0,
                    sender_timeout=60.0,
                    reducer_timeout=120.0,
                )
                line.answer(ok=True)
            case "prepare":
                assert averager is not None
                with averager.get_tensors() as tensors:
                    for tensor in tensors:
                        _fill(tensor, index)
                line.answer(**line.counters(config["interface"]))
            case "go":
                assert averager is not None
                began, reason = time.monotonic(), ""
                try:
                    group = averager.step(timeout=400.0)
                    is_ok = group is not None and len(group) == peers
                except Exception as failure:  # noqa: BLE001
                    is_ok, reason = False, repr(failure)[:200]
                line.answer(
                    ok=is_ok, reason=reason, began=times[0], ended=times[1], with_matchmaking_s=time.monotonic() - began
                )
            case "check":
                assert averager is not None
                with averager.get_tensors() as tensors:
                    error = max(_error(tensor, peers) for tensor in tensors[:2])
                line.answer(
                    **line.counters(config["interface"]),
                    peak=0,
                    error=error,
                    digest="",
                    payload=2 * (peers - 1) / peers * parameters * _bytes(config["codec"]),
                )


def _time_allreduce(times: object) -> None:
    """Let the averager's process note when its all-reduce began and ended."""
    original = DecentralizedAverager._run_allreduce_inplace_

    async def timed(self: object, *arguments: object, **named: object) -> object:
        times[0] = time.monotonic()  # type: ignore[index]
        try:
            return await original(self, *arguments, **named)
        finally:
            times[1] = time.monotonic()  # type: ignore[index]

    DecentralizedAverager._run_allreduce_inplace_ = timed


def block_of(index: int) -> torch.Tensor:
    """The gradient of peer ``index``, one block of it."""
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(index)) * 1e-3


def _fill(tensor: torch.Tensor, index: int) -> None:
    block = block_of(index)
    for start in range(0, tensor.numel(), BLOCK):
        piece = tensor[start : start + BLOCK]
        piece.copy_(block[: piece.numel()])


def _error(tensor: torch.Tensor, peers: int) -> float:
    mean = torch.stack([block_of(i) for i in range(peers)]).mean(dim=0)
    found = tensor[:BLOCK]
    return float((found - mean[: found.numel()]).norm() / mean[: found.numel()].norm())


def _bytes(codec: str) -> int:
    return {"fp32": 4, "fp16": 2}.get(codec, 1)


if __name__ == "__main__":
    main()
