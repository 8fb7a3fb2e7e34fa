"""An example of an island: several processes under torchrun are one peer, with DDP or FSDP2 (``fully_shard``)::

    p2pdiloco bootstrap --listen /ip4/127.0.0.1/tcp/31337
    torchrun --nproc-per-node 2 peers/island.py --state a --run-name sines --peer ADDRESS --found    # prints an INVITE
    torchrun --nproc-per-node 2 --max-restarts 3 peers/island.py --state b --run-name sines --peer INVITE \\
        --shard --seed 1

Every rank runs the same code; rank 0 talks to the node. The death of a rank ends the island. torchrun then restarts it,
and it continues as the same peer. (With torch 2.13 and gloo, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or the restarted
ranks dial the ports of the previous ones.) It uses gloo on the CPU, nccl on GPUs. The integration tests run this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import p2pdiloco


def main() -> int:
    """Train, and write the results of each rank to ``result-RANK.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-name")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--access", choices=["open", "invite", "list"], default="invite")
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--die-at", type=int, default=0, help="rank 1 of the first life kills itself at this step")
    parser.add_argument("--step-s", type=float, default=0.04, help="what a larger model would take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, life = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model: nn.Module = network
    if options.shard:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        fully_shard(network[2], mesh=mesh)
        fully_shard(network, mesh=mesh)
    else:
        model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1000 * options.seed + 10 * life + rank)  # each rank's own data
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
    with p2pdiloco.DiLoCo(
        model,
        optimizer,
        run=options.run_name,
        initial_peers=options.peer,
        found=options.found,
        access=options.access,
        tokens_per_step=16,
        total_steps=options.steps,
        sync_every=10,
        n_fragments=2,
        state=options.state,
        node_options=loopback,
    ) as outer:
        first = last = 0.0
        for step in range(100 * options.steps):
            x = torch.randn(16, 8, device=device)
            loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
            loss.backward()
            outer.count(16, loss)
            optimizer.step()
            optimizer.zero_grad()
            last = float(loss.detach())
            first = first or last
            if options.die_at == step + 1 and life == 0 and rank == 1:
                os.abort()
            time.sleep(options.step_s)
            if outer.is_complete or (options.run_name is None and step >= 5):
                break
    outer.load_global()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    total = float(sum(p.detach().double().sum() for p in whole))
    report = {"first": first, "last": last, "sum": total, "step": outer.global_step, "life": life, "steps": step + 1}
    options.state.mkdir(parents=True, exist_ok=True)
    (options.state / f"result-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads can abort an interpreter that is taken down (pytorch/pytorch#179291): all is done
