"""The examples in ``peers/`` and ``bootstrap/``, as far as a machine without their schedulers can run them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from p2pdiloco.access.invite_code import VARIABLE
from p2pdiloco.cli.main import _parse
from p2pdiloco.node.dashboard import split_place
from p2pdiloco.observability.web_server import PROBES, TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/x"


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_the_slurm_script_becomes_one_peer_an_element_and_is_queued_again_when_its_time_is_up(tmp_path: Path) -> None:
    script = ROOT / "peers" / "slurm.sh"
    for name, text in (
        ("told", 'trap "exit 7" USR1; trap "exit 8" TERM; printf "%s\\n" "$@" > "$TOLD"; while :; do sleep 0.1; done'),
        ("scontrol", 'echo "$@" > "$QUEUED"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    told, queued = tmp_path / "words", tmp_path / "queued"
    environment = {"P2PDILOCO": str(tmp_path / "told"), "STATE": str(tmp_path), "SLURM_ARRAY_TASK_ID": "3"}
    environment |= {"SLURM_JOB_ID": "41", "TOLD": str(told), "QUEUED": str(queued), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for number, status, is_queued in ((signal.SIGTERM, 8, False), (signal.SIGUSR1, 7, True)):
        told.unlink(missing_ok=True)
        process = subprocess.Popen([script], env={**environment, VARIABLE: ADDRESS})
        wait_until(lambda: told.exists() and told.read_text().endswith("cuda\n"), 60.0, "the peer")
        process.send_signal(number)
        assert process.wait(60) == status
        assert queued.exists() is is_queued, "SLURM itself queues what it preempts"
    assert queued.read_text() == "requeue 41\n"
    asked = _parse([*told.read_text().splitlines(), ADDRESS])
    assert (asked.command, asked.state) == ("join", tmp_path / "slurm-3")
    silent = subprocess.run([script], env=environment, capture_output=True, text=True, check=False, timeout=20)
    assert silent.returncode != 0
    assert "export P2PDILOCO_INVITE=" in silent.stderr
    limits = dict(re.findall(r"#SBATCH --(\w[\w-]*)=(\S+)", script.read_text()))
    before_s = int(limits["signal"].removeprefix("B:USR1@"))
    assert before_s > asked.leave_s + 20, "what is written at the end, and SLURM's own slack"


@pytest.mark.parametrize("path", ["peers/peer.service", "bootstrap/p2pdiloco-bootstrap.service"])
def test_the_services_type_what_there_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ADDRESS)
    text = (ROOT / path).read_text()
    command = re.search(r"(?m)^ExecStart=\S*p2pdiloco (.*)$", text)
    assert command is not None
    asked = _parse(shlex.split(command[1]))
    if asked.command == "join":
        stop_s = re.search(r"(?m)^TimeoutStopSec=(\d+)$", text)
        assert stop_s is not None
        assert int(stop_s[1]) > asked.leave_s + 20


def test_the_pods_type_what_there_is_and_need_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ADDRESS)
    pod = yaml.safe_load((ROOT / "peers" / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    (peer,) = pod["containers"]
    asked = _parse(peer["args"])
    assert (asked.command, asked.address) == ("join", [ADDRESS])
    assert pod["terminationGracePeriodSeconds"] > asked.leave_s + 60
    assert str(asked.state) in [mount["mountPath"] for mount in peer["volumeMounts"]]
    assert {"/tmp", "/dev/shm"} < {mount["mountPath"] for mount in peer["volumeMounts"]}, "the root is read-only"
    assert {one["name"] for one in peer["env"] if "secretKeyRef" in one["valueFrom"]} == {VARIABLE, TOKEN_VARIABLE}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"], "it owns its volume"
    probed = {peer[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probed == set(PROBES)
    assert split_place(asked.page) == ("0.0.0.0", peer["ports"][0]["containerPort"])


def test_a_rented_machine_types_what_there_is_and_is_asked_to_leave_when_its_hours_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the peer, to which SIGUSR1 means: leave."""
    monkeypatch.setenv(VARIABLE, ADDRESS)
    task = yaml.safe_load((ROOT / "peers" / "skypilot.yaml").read_text())
    assert set(task["secrets"]) == {VARIABLE}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOURS": "0.00005"}
    program = tmp_path / "p2pdiloco"
    program.touch(mode=0o755)
    leaves = f"trap 'echo \"$@\" > {tmp_path}/words; exit 0' USR1; while :; do sleep 0.05; done"
    for does, status in ((leaves, 0), ("exit 3", 3)):
        program.write_text(f"#!/bin/bash\n{does}\n")
        assert (
            subprocess.run(["bash", "-c", task["run"]], env=environment, timeout=20, check=False).returncode == status
        )
    asked = _parse((tmp_path / "words").read_text().split())
    assert (asked.command, asked.address) == ("join", [ADDRESS])


@pytest.mark.parametrize("path", ["peers/Dockerfile", "bootstrap/Dockerfile"])
def test_images_copy_what_there_is_and_run_as_a_user(path: str) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / path).read_text())
    for stage in re.split(r"(?m)^FROM ", text)[1:]:
        for words in re.findall(r"(?m)^COPY (?!--from)(.*)$", stage):
            assert all((ROOT / word).exists() for word in words.split()[:-1]), words
        if "ENTRYPOINT" in stage:
            assert re.search(r"(?m)^USER (?!root|0)\w+$", stage)
            assert json.loads(stage.split("ENTRYPOINT ")[1])[0] == "p2pdiloco"
    pinned = re.search(r"TORCH|torch==([\d.]+)", (ROOT / "Makefile").read_text())
    assert pinned is not None
    assert set(re.findall(r"torch==([\d.]+)", text)) == {pinned[1]}


def test_make_tells_each_group_of_packages_that_it_installs_and_its_time(tmp_path: Path) -> None:
    """And it ends where one cannot be installed."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("python", "pip"):
        (commands / name).write_text('#!/bin/sh\ncase "$*" in *"$FAILS"*) exit 1; esac\n')
        (commands / name).chmod(0o755)
    ready = tmp_path / ".ready"

    def made(fails: str) -> tuple[int, list[str]]:
        asked = ["make", "-C", str(ROOT), f"VENV={tmp_path}", f"PYTHON={sys.executable}", str(ready)]
        ended = subprocess.run(
            asked, env={**os.environ, "FAILS": fails}, capture_output=True, text=True, check=False, timeout=60
        )
        return ended.returncode, [line for line in ended.stdout.splitlines() if line.startswith("  ")]

    status, told = made("p2pdiloco[dev]")
    assert status != 0
    assert not ready.exists()
    assert not told[-1].endswith(" s")
    status, told = made("nothing at all")
    assert status == 0
    assert ready.exists()
    assert [re.sub(r" \.\.\. \d+ s$", "", line) for line in told] == [
        "  torch",
        "  p2pdiloco with its C library and what it needs",
        "  tools of the tests; Hugging Face and Lightning; plots",
    ]
