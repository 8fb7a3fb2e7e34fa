"""Islands: real torchrun, two ranks a peer over gloo, two peers; DDP and FSDP2; a rank that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripts import (
    END_S,
    FOUND,
    QUICKLY,
    START_S,
    events,
    held,
    kill_node,
    report,
    until_founded,
    until_merged,
    until_ready,
)
from swarm import swarm_in
from waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "peers" / "island.py"
RANKS = 2
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torch 2.13's second life dials the first one's gloo ports
}


def start(state: Path, *arguments: str, ranks: int = RANKS, restarts: int = 0) -> subprocess.Popen[str]:
    state.mkdir(parents=True)
    with open(state / "script.log", "w") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
                *("--max-restarts", str(restarts), str(SCRIPT), "--state", str(state), *QUICKLY, *arguments),
            ],
            stdout=output,
            stderr=output,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        )


def finish(islands: Sequence[subprocess.Popen[str]], folders: Sequence[Path], timeout_s: float) -> None:
    """Wait for all in order; whatever happens, nothing stays."""
    try:
        statuses = [island.wait(timeout_s) for island in islands]
    finally:
        for island, folder in zip(islands, folders, strict=True):
            if island.poll() is None:
                island.terminate()
                island.wait(60)
            end_node(folder)
    said = [(folder / "script.log").read_text()[-3000:] for folder in folders]
    logs = [path.read_text()[-3000:] for folder in folders if (path := folder / "node.log").exists()]
    assert statuses == [0] * len(islands), (said, logs)


def end_node(folder: Path) -> None:
    try:
        node = psutil.Process(int((folder / "node.pid").read_text()))
        if str(folder) in node.cmdline():
            node.kill()
    except (OSError, psutil.Error):
        pass


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.timeout(900)
def test_islands_of_ddp_and_of_fsdp_train_one_model_and_a_rank_dies(tmp_path: Path) -> None:
    """Peer a: DDP. Peer b: FSDP2, and its rank 1 kills itself; torchrun starts it again, and the same node, thus the
    same peer, goes on."""
    a, b = tmp_path / "a", tmp_path / "b"
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        islands = [start(a, "--run-name", "sines", "--peer", address, *FOUND, "--steps", "400")]
        try:
            until_founded(a)
            joins = ("--run-name", "sines", "--peer", address, "--seed", "1", "--shard", "--die-at", "100")
            with held(islands[0].pid, SCRIPT.name):
                islands.append(start(b, *joins, restarts=2))
                until_ready(b)
            wait_until(lambda: events(b, "learner-lost"), START_S, "the death of a rank")
            with held(islands[0].pid, SCRIPT.name):
                until_ready(b, lives=2)
        finally:
            finish(islands, [a, b][: len(islands)], END_S)
    found = [results(a), results(b)]
    assert len({one["sum"] for peer in found for one in peer}) == 1, "the same global parameters at all four ranks"
    assert all(one["step"] >= 400 for peer in found for one in peer)
    assert all(one["last"] < 0.5 * one["first"] for one in found[0])
    assert [one["life"] for one in found[1]] == [1, 1], "torchrun has started it again"
    assert found[1][0]["steps"] == found[1][1]["steps"], "ranks end at the same step"
    reports = [report(a), report(b)]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert len(list(b.glob("*/report.json"))) == 1
    assert len(events(b, "learner-lost")) == 1
    assert len(events(b, "learner-ready")) == 2, "the same node has had both lives"
    assert all(one["tokens_unmerged"] == 0 for one in reports)
    assert reports[0]["tokens_trained"] == found[0][0]["steps"] * 16 * RANKS, "the tokens of all ranks count"
    merged_of_b = reports[0]["tokens_merged"] - reports[0]["tokens_trained"]
    assert merged_of_b >= found[1][0]["steps"] * 16 * RANKS, "and both lives' are merged"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_island_whose_node_dies_trains_on_and_gets_it_back(tmp_path: Path) -> None:
    a = tmp_path / "a"
    with swarm_in(tmp_path / "swarm") as swarm:
        island = start(
            a,
            "--run-name",
            "sines",
            "--peer",
            swarm.start_bootstrap(),
            "--found",
            "--access",
            "open",
            "--steps",
            "100000",
            "--shard",
        )
        try:
            until_merged(a, of=a)
            ranks = [p for p in psutil.Process(island.pid).children(recursive=True) if str(SCRIPT) in p.cmdline()]
            assert len(ranks) == RANKS
            kill_node(a)
            log = a / "script.log"
            wait_until(lambda: "training continues while it restarts" in log.read_text(), 60, what="word of it")
            used = [p.cpu_times().user for p in ranks]
            wait_until(
                lambda: all(p.cpu_times().user > u + 0.2 for p, u in zip(ranks, used, strict=True)),
                60,
                what="both ranks to train on",
            )
            until_ready(a, lives=2)
            until_merged(a, of=a)
            assert all(p.is_running() for p in ranks), "they are the same ranks"
            assert len({event["peer"] for event in events(a, "started")}) == 1, "and the same peer"
        finally:
            island.terminate()
            island.wait(60)
            end_node(a)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_sharded_model_on_a_single_rank_trains_as_well(tmp_path: Path) -> None:
    """As a script of several GPUs is tried on a machine with one."""
    a = tmp_path / "a"
    finish(
        [start(a, "--run-name", "sines", "--found", "--shard", "--steps", "30", "--step-s", "0", ranks=1)], [a], END_S
    )
    told = json.loads((a / "result-0.json").read_text())
    assert told["step"] >= 30
    assert report(a)["tokens_unmerged"] == 0
