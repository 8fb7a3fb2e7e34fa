"""``p2pdiloco.DiLoCo`` in two training scripts of users: processes of their own, with their own models and loops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from forked import run
from scripts import (
    END_S,
    FOUND,
    QUICKLY,
    START_S,
    events,
    heed_interrupts,
    held,
    invite_of,
    kill_node,
    report,
    until_founded,
    until_merged,
    until_ready,
)
from swarm import PEER, printed, swarm_in
from torch import nn
from waiting import wait_until

from p2pdiloco import load_into, script_lifecycle
from p2pdiloco.cli.main import main
from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.training.parameters import BUFFERS
from p2pdiloco.util.status_pipe import Invited

SCRIPT = Path(__file__).parents[2] / "peers" / "own_script.py"


HOW_TO_JOIN = "to join from another machine"
ALONE = f"{script_lifecycle.NOT_BEGUN}. This script trains alone"
NOTEBOOK = """
import copy, sys, time, torch, p2pdiloco

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
said = []

def cell():
    options = {"run": "cells", "state": sys.argv[1], "total_steps": 10**6, "sync_every": 10, "tokens_per_step": 4}
    return p2pdiloco.DiLoCo(model, optimizer, node_options=sys.argv[2:], **options)

def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)

outer = cell()
optimizer.register_step_post_hook(lambda *_: None)  # torch calls it after what says that nothing was begun
step()
outer.start()
average = copy.deepcopy(model)
average(torch.zeros(1, 8))
try:
    outer.start()
except p2pdiloco.DiLoCoError as error:
    said.append("already begun" * ("already" in str(error)))
for _ in range(20):
    step()
again = cell()
try:
    again.load_global()
except p2pdiloco.DiLoCoError as error:
    said.append("not begun" * ("not started" in str(error)))
step()
again.start()
print(*said, sep=", ", flush=True)
while True:
    step()
"""


DOUBTFUL = """
import copy, sys, time, torch, p2pdiloco

class MasterWeights(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().clone())
            master.sub_(p.grad, alpha=0.02)
            p.copy_(master)

how, state, *node_options = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
made = MasterWeights if how == "master weights" else torch.optim.SGD
optimizer = made(model.parameters(), lr=0.02)
trained = copy.deepcopy(model) if how == "a copy" else model
options = {"run": "doubt", "state": state, "total_steps": 10**6, "sync_every": 20, "n_fragments": 2}
options["tokens_per_step"] = 16
with p2pdiloco.DiLoCo(model, optimizer, node_options=node_options, **options) as outer:
    for step in range(10**6):
        if how == "replaced" and step == 3:
            model[1].weight = torch.nn.Parameter(model[1].weight.detach().clone())
        x = torch.randn(16, 8)
        (trained(x).squeeze(1) - x.sum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


STAYING = """
import sys, time, torch, p2pdiloco

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
options = {"run": "stays", "state": sys.argv[1], "total_steps": 20, "sync_every": 10, "stay_s": 300}
options["tokens_per_step"] = 4
with p2pdiloco.DiLoCo(model, optimizer, node_options=sys.argv[2:], **options) as outer:
    while not outer.is_complete:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


def start(state: Path, *arguments: str) -> subprocess.Popen[str]:
    state.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--state", str(state), *QUICKLY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
    )


def start_text(program: str, state: Path) -> subprocess.Popen[str]:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", program, str(state), *PEER]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts)


def test_without_a_run_the_script_trains_alone(tmp_path: Path) -> None:
    script = start(tmp_path / "a")
    out, _ = script.communicate(timeout=120)
    assert script.returncode == 0, out
    assert json.loads((tmp_path / "a" / "result.json").read_text())["step"] == 0


@pytest.mark.usefixtures("own_logging")
@pytest.mark.timeout(900)
def test_two_scripts_train_one_model(tmp_path: Path) -> None:
    """The run takes members only, as it is founded if nothing else is said: the other one has an invite."""
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        founder = start(tmp_path / "a", "--run", "sines", "--peer", address, "--found", "--steps", "400")
        until_founded(tmp_path / "a")
        invite = invite_of(tmp_path / "a")
        with held(founder.pid, SCRIPT.name):
            other = start(tmp_path / "b", "--run", "sines", "--peer", invite, "--seed", "1")
            until_ready(tmp_path / "b")
        outputs = [script.communicate(timeout=END_S)[0] for script in (founder, other)]
        logs = [(tmp_path / name / "node.log").read_text()[-3000:] for name in "ab"]
        assert [script.returncode for script in (founder, other)] == [0, 0], (outputs, logs)
    told = [
        ("frozen parameters" in out, "ends at step 400, and this script's total_steps=200 is ignored" in out)
        for out in outputs
    ]
    assert told == [(False, False), (False, True)], "the other one has 200 steps"
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in "ab"]
    assert results[0]["sum"] == results[1]["sum"], "the same global parameters"
    assert all(result["loss"] < 0.1 * results[0]["first"] for result in results)
    assert all(result["step"] >= 400 for result in results)
    reports = [report(tmp_path / name) for name in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)
    assert sum(one["tokens_trained"] for one in reports) == reports[0]["tokens_merged"]
    for name, result in zip("ab", results, strict=True):
        assert exported(tmp_path / name) == pytest.approx(result["evaluated"], abs=1e-5), "with BatchNorm's statistics"
    assert results[0]["evaluated"] != pytest.approx(results[1]["evaluated"], abs=1e-5), "each peer's own"


def batches_of(state: Path) -> int:
    """How many batches the saved statistics of a script's model are from; 0: none are saved."""
    path = state / BUFFERS
    return int(safetensors.torch.load_file(path)["1.num_batches_tracked"]) if path.exists() else 0


def exported(state: Path) -> list[float]:
    """What the script's model answers in evaluation mode, made anew from its machine's export."""
    torch.manual_seed(0)
    frozen, out = nn.Linear(32, 32), str(state / "out")
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), frozen, nn.Tanh(), nn.Linear(32, 1))
    assert main(["export", str(state), "--out", out]) == 0
    load_into(model, out)
    with torch.no_grad():
        answers: list[float] = model.eval()(torch.linspace(-2, 2, 64).view(8, 8)).flatten().tolist()
    return answers


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_script_without_a_with_statement_leaves_in_order(tmp_path: Path) -> None:
    """As of a notebook, or in the Hugging Face Trainer: a cell that is run again takes over, Ctrl+C loses nothing."""
    script = start_text(NOTEBOOK, tmp_path / "a")
    try:
        until_ready(tmp_path / "a", lives=2)
        node = int((tmp_path / "a" / "node.pid").read_text())
        wait_until(lambda: any(one["steps"] > 20 for one in events(tmp_path / "a", "progress")), START_S, "steps")
        script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=END_S)
    finally:
        script.kill()
    assert (out, script.returncode) == ("already begun, not begun\n", -signal.SIGINT), err
    told = [err.index(words) for words in (ALONE, "takes part with", "KeyboardInterrupt", "the script ends")]
    assert told == sorted(told), err
    assert not psutil.pid_exists(node)
    assert events(tmp_path / "a", "ended")[-1]["status"] == 0
    assert report(tmp_path / "a")["tokens_unmerged"] == 0
    assert report(tmp_path / "a")["tokens_trained"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_script_that_stays_takes_its_node_along_when_it_is_told_to_end(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script = start_text(STAYING, tmp_path / "a")
    log = tmp_path / "a" / "node.log"
    try:
        wait_until(lambda: log.exists() and "serving the final model" in log.read_text(), START_S, "its stay")
        node = int((tmp_path / "a" / "node.pid").read_text())
        script.send_signal(number)
        _, err = script.communicate(timeout=END_S)
    finally:
        script.kill()
    assert script.returncode == status, err
    wait_until(lambda: not psutil.pid_exists(node), 30.0, "the node's end")
    assert events(tmp_path / "a", "ended")[-1]["status"] == 0


def test_what_cannot_be_joined_is_told(tmp_path: Path) -> None:
    script = start(
        tmp_path / "a",
        "--run",
        "sines",
        "--peer",
        "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWFSxUGZZjFqcpQ45DybQHngVbUqSdcw7BTBmba9W7aYfj",
    )
    out, _ = script.communicate(timeout=120)
    assert script.returncode != 0
    assert "DiLoCoError: the node ended with status 3" in out
    assert "none of the initial peers answers" in out


@pytest.mark.timeout(900)
def test_a_node_that_was_killed_comes_back_to_its_script_as_the_same_peer(tmp_path: Path) -> None:
    """The script trains meanwhile, and what it trained then is merged, too."""
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        founder = start(tmp_path / "a", "--run", "sines", "--peer", address, *FOUND, "--steps", "1000000")
        until_founded(tmp_path / "a")
        other = start(tmp_path / "b", "--run", "sines", "--peer", address, "--seed", "1")
        scripts = {"a": founder, "b": other}
        try:
            for name, script in scripts.items():
                folder = tmp_path / name
                until_merged(tmp_path / "a", of=folder)
                peer = events(folder, "started")[0]["peer"]
                lives = len(events(folder, "learner-ready"))
                began = kill_node(folder)
                until_ready(folder, lives=lives + 1)
                until_merged(tmp_path / "a", of=folder)
                print(f"node of {name}: back after {events(folder, 'learner-ready')[-1]['time'] - began:.1f} s")
                assert {event["peer"] for event in events(folder, "started")} == {peer}
                assert script.poll() is None
            kill_node(tmp_path / "b")
            used = psutil.Process(other.pid).cpu_times().user
            wait_until(lambda: psutil.Process(other.pid).cpu_times().user > used + 0.1, START_S, "training alone")
        finally:
            outputs = []
            for script in (other, founder):  # the founder is there for what the other gives last
                for _ in range(2):  # of a terminal, and of a wrapper that forwards it
                    script.send_signal(signal.SIGINT)
                outputs.insert(0, script.communicate(timeout=END_S)[0])
    for out in outputs:
        assert "training continues while it restarts" in out
        assert "the node is back" in out
        assert "run sines as it is now: step " in out
        assert "go on               the same script again" in out
    assert f'{HOW_TO_JOIN}:  initial_peers=["/ip4/' in outputs[0], "the founder tells how to join"
    last = report(tmp_path / "b")
    merged = [one for one in events(tmp_path / "b", "commit") if last["learner"] in one["contributors"]]
    assert merged, "who is interrupted without a node waits for it, and gives what was trained meanwhile"
    assert last["tokens_unmerged"] == 0


@pytest.mark.timeout(900)
def test_a_script_whose_loss_is_not_finite_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        sound = start(tmp_path / "a", "--run", "sines", "--peer", address, *FOUND, "--steps", "1000000")
        until_founded(tmp_path / "a")
        spoiled = (
            "--spoil-at",
            "40",
            "--leave-s",
            "2",
            "--base-seed",
            "1",
        )  # what is not finite would keep it until then
        spoilt = start(tmp_path / "b", "--run", "sines", "--peer", address, "--seed", "1", *spoiled)
        try:
            wait_until(lambda: events(tmp_path / "b", "learner-unable"), START_S, "word of it")
            seen = len(events(tmp_path / "a", "commit"))
            wait_until(lambda: len(events(tmp_path / "a", "commit")) >= seen + 6, START_S, "versions without it")
            status = run("status", address, timeout_s=START_S)
            assert "is in trouble: the loss is nan at step" in status.stdout, status
        finally:
            for script in (sound, spoilt):
                script.send_signal(signal.SIGINT)
            outputs = [script.communicate(timeout=END_S)[0] for script in (sound, spoilt)]
    assert "nothing that is trained here is merged" in outputs[1]
    assert "nothing that is trained here is merged" not in outputs[0]
    assert ["trains on the frozen parameters of Sequential" in out for out in outputs] == [False, True]
    assert "the node ended with status 1" in outputs[1]
    ending = report(tmp_path / "b")["ending"]
    assert ending["status"] == 1
    assert "lower learning rate" in ending["reason"]
    assert report(tmp_path / "a")["ending"]["status"] == 0
    last = events(tmp_path / "a", "commit")[-1]["contributors"]
    assert not any(learner.startswith(report(tmp_path / "b")["peer"]) for learner in last)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("master weights", "restores its own copy of the parameters"),
        pytest.param("a copy", "changed no parameter of the model", marks=pytest.mark.long),
        pytest.param("replaced", "parameter 1.weight was replaced in the model", marks=pytest.mark.long),
    ],
)
def test_what_does_not_train_the_models_parameters_is_told_and_not_merged(
    tmp_path: Path, how: str, reason: str
) -> None:
    """It is finite, and would count as much as what the others train."""
    pipe, leaving = subprocess.PIPE, ("--leave-s", "2")
    command = [sys.executable, "-c", DOUBTFUL, how, str(tmp_path / "a"), *PEER, *leaving]
    script = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_interrupts)

    def said() -> str:
        log = tmp_path / "a" / "node.log"
        return log.read_text() if log.exists() else ""

    try:
        wait_until(lambda: "rounds in a row" in said(), START_S, "two rounds")
        script.send_signal(signal.SIGINT)
        _, err = script.communicate(timeout=END_S)
    finally:
        script.kill()
    (told,) = events(tmp_path / "a", "learner-unable")
    assert reason in told["reason"]
    assert err.count(reason) == 2, "when it is seen, and why the node ended"
    merged = [one for one in events(tmp_path / "a", "commit") if one["contributors"]]
    if how == "master weights":  # seen when it has undone the first merges
        merged = [one for one in merged if one["time"] > told["time"]]
    assert not merged
    ending = report(tmp_path / "a")["ending"]
    assert ending["status"] == 1
    assert reason in ending["reason"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_script_that_is_started_after_the_end_finds_the_result(tmp_path: Path) -> None:
    """Of a run for members: its own, when nobody else is there any more; then of another's folder that is served."""
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        founder = start(tmp_path / "a", "--run", "sines", "--peer", address, "--found", "--steps", "60")
        until_founded(tmp_path / "a")
        invite = invite_of(tmp_path / "a")
        with held(founder.pid, SCRIPT.name):
            other = start(tmp_path / "b", "--run", "sines", "--peer", invite, "--seed", "1")
            until_ready(tmp_path / "b")
        for script in (founder, other):
            assert script.communicate(timeout=END_S)[0] is not None
        total = json.loads((tmp_path / "a" / "result.json").read_text())["sum"]

    def gets_it(name: str, *words: str) -> None:
        (tmp_path / name / "result.json").unlink(missing_ok=True)
        batches = batches_of(tmp_path / name)
        again = start(tmp_path / name, "--run", "sines", *words, "--steps", "60", "--seed", "2")
        out, _ = again.communicate(timeout=END_S)
        assert again.returncode == 0, (out, (tmp_path / name / "node.log").read_text()[-2000:])
        found = json.loads((tmp_path / name / "result.json").read_text())
        assert (found["sum"], found["step"] >= 60) == (total, True)
        assert "run sines is complete at step 60: " in out, "its loop makes a step all the same"
        assert ("do not fit the run's parameters" in out) == (name == "c")
        assert batches_of(tmp_path / name) == (0 if name == "c" else batches + 1), "BatchNorm's statistics go on"
        assert HOW_TO_JOIN not in out

    gets_it("a", "--peer", address, "--found")  # the bootstrap node has gone, too
    gets_it("b", "--peer", invite)
    with swarm_in(tmp_path / "later") as swarm:
        command = ("resume", str(tmp_path / "a"), "--stay-s", "300", *PEER)
        serving = Member("A", command, tmp_path / "a", swarm.mark)  # by the founder: nobody else is a member here
        swarm.members.append(serving)
        wait_until(lambda: printed(serving, "serving the final model"), START_S, "somebody who serves")
        gets_it("c", "--peer", serving.wait_for(Invited, START_S).invite)


@pytest.mark.timeout(900)
def test_a_script_that_was_killed_comes_back_as_the_same_peer(tmp_path: Path) -> None:
    """Its node waits for it; another script on the same folder is refused meanwhile."""
    arguments = ("--run", "sines", *FOUND, "--steps", "100000")
    first = start(tmp_path / "a", *arguments)
    try:
        until_ready(tmp_path / "a")
        node = int((tmp_path / "a" / "node.pid").read_text())
        command = [sys.executable, str(SCRIPT), "--state", str(tmp_path / "a"), *arguments]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=170)
        assert "is in use by another training script" in refused.stderr
        wait_until(lambda: any(event["steps"] > 20 for event in events(tmp_path / "a", "progress")), START_S, "steps")
        first.kill()
        first.communicate()
        second = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
        )
        try:
            until_ready(tmp_path / "a", lives=2)
            assert int((tmp_path / "a" / "node.pid").read_text()) == node, "no other node was started"
            lost = len(events(tmp_path / "a", "progress"))
            wait_until(lambda: len(events(tmp_path / "a", "progress")) > lost + 1, START_S, "training")
            steps = [event["step"] for event in events(tmp_path / "a", "progress")]
            assert steps == sorted(steps), "the run goes on where it was"
        finally:
            second.send_signal(signal.SIGINT)
            second.wait(END_S)
        assert not psutil.pid_exists(node), "a script that is interrupted takes its node along"
    finally:
        if first.poll() is None:
            first.kill()
            first.communicate()
