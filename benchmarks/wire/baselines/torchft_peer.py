"""Peer that averages with the all-reduce of torchft's ProcessGroupGloo in float32; runs in an environment of its own.

torchft gathers its peers through a lighthouse, which is not timed: the group is set up once, and each round is one
all-reduce of the whole vector, as torchft's DiLoCo does for a fragment.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")

from benchmarks.wire import line  # noqa: E402
from benchmarks.wire.baselines.vector import Averaged  # noqa: E402


def main() -> None:
    config = line.begin()
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    import torch
    from torch.distributed import ReduceOp
    from torchft import ProcessGroupGloo
    from torchft.process_group import ReconfigureOptions

    torch.set_num_threads(1)
    index, peers, parameters = config["index"], config["peers"], int(config["parameters"])
    averaged = Averaged(index, peers, parameters)
    vector = averaged.vector
    group = ProcessGroupGloo(timeout=timedelta(seconds=600))
    handle = json.loads(group.get_reconfigure_handle())
    store = str(handle["store"])
    handle["store"] = f"{config['host']}:{store.rpartition(':')[2]}"
    line.answer(address=json.dumps(handle))
    for command in line.commands():
        match command["do"]:
            case "connect":
                group.reconfigure(ReconfigureOptions(uuid=1, handles=command["addresses"])).wait()
                line.answer(ok=True)
            case "prepare":
                averaged.fill()
                line.forget_peak()
                line.answer(**line.counters(config["interface"]))
            case "go":
                began = time.monotonic()
                group.allreduce([vector], ReduceOp.SUM).wait()
                vector /= peers
                line.answer(ok=True, reason="", began=began, ended=time.monotonic())
            case "check":
                peak = line.memory("VmHWM")
                error = averaged.error()
                payload = 2 * (peers - 1) / peers * parameters * 4
                line.answer(**line.counters(config["interface"]), peak=peak, error=error, digest="", payload=payload)
    os._exit(0)


if __name__ == "__main__":
    main()
