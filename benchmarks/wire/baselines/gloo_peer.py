"""Peer that averages with torch.distributed's all-reduce over gloo, as the gradients of a data-parallel step.

In bf16 it does what torch's ``bf16_compress_hook`` does: each rank rounds its share of the mean, the shares are added
up in bf16, and the sum is widened again. Rounding is part of the timed work.
"""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")

from benchmarks.wire import line  # noqa: E402
from benchmarks.wire.baselines.vector import Averaged  # noqa: E402

TIMEOUT = timedelta(minutes=10)
BYTES = {"bf16": 2, "fp32": 4}


def main() -> None:
    config = line.begin()
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    import torch
    from torch import distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    index, peers, parameters, codec = config["index"], config["peers"], int(config["parameters"]), config["codec"]
    averaged = Averaged(index, peers, parameters)
    vector = averaged.vector
    store = TCPStore(config["host"], 0, peers, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    line.answer(address=f"{config['host']}:{store.port}")
    for command in line.commands():
        match command["do"]:
            case "connect":
                if index:
                    host, _, port = command["addresses"][0].rpartition(":")
                    store = TCPStore(host, int(port), peers, is_master=False, timeout=TIMEOUT)
                dist.init_process_group("gloo", store=store, rank=index, world_size=peers, timeout=TIMEOUT)
                line.answer(ok=True)
            case "prepare":
                averaged.fill()
                line.forget_peak()
                line.answer(**line.counters(config["interface"]))
            case "go":
                began = time.monotonic()
                if codec == "bf16":
                    narrow = vector.to(torch.bfloat16).div_(peers)
                    dist.all_reduce(narrow)
                    vector.copy_(narrow)
                else:
                    dist.all_reduce(vector)
                    vector /= peers
                line.answer(ok=True, reason="", began=began, ended=time.monotonic())
            case "check":
                peak = line.memory("VmHWM")
                error = averaged.error()
                payload = 2 * (peers - 1) / peers * parameters * BYTES[codec]
                line.answer(**line.counters(config["interface"]), peak=peak, error=error, digest="", payload=payload)
    os._exit(0)


if __name__ == "__main__":
    main()
