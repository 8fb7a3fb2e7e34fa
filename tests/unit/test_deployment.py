"""The examples in ``peers/`` and ``bootstrap/``, as far as a machine without their schedulers can run them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from p2pdiloco.cli.main import _parse

ROOT = Path(__file__).parents[2]
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/x"


def test_the_slurm_script_becomes_one_peer_an_element(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text('#!/bin/sh\nprintf "%s\\n" "$$" "$@"\n')
    told.chmod(0o755)
    script = ROOT / "peers" / "slurm.sh"
    environment = {"P2PDILOCO": str(told), "STATE": str(tmp_path), "SLURM_ARRAY_TASK_ID": "3", "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([script], env={**environment, "ADDR": ADDRESS}, stdout=subprocess.PIPE, text=True)
    pid, *words = process.communicate(timeout=20)[0].splitlines()
    assert int(pid) == process.pid, "SLURM's signal reaches the peer itself"
    asked = _parse(words)
    assert (asked.command, asked.address, asked.state) == ("join", [ADDRESS], tmp_path / "slurm-3")
    silent = subprocess.run([script], env=environment, capture_output=True, text=True, check=False, timeout=20)
    assert silent.returncode != 0
    assert "--export=ALL,ADDR=" in silent.stderr
    limits = dict(re.findall(r"#SBATCH --(\w[\w-]*)=(\S+)", script.read_text()))
    before_s = int(limits["signal"].removeprefix("B:USR1@"))
    assert before_s > asked.leave_s + 20, "what is written at the end, and SLURM's own slack"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


@pytest.mark.parametrize("path", ["peers/peer.service", "bootstrap/p2pdiloco-bootstrap.service"])
def test_the_services_type_what_there_is(path: str) -> None:
    text = (ROOT / path).read_text()
    command = re.search(r"(?m)^ExecStart=\S*p2pdiloco (.*)$", text)
    assert command is not None
    asked = _parse([word.replace("$ADDR", ADDRESS) for word in shlex.split(command[1])])
    if asked.command == "join":
        stop_s = re.search(r"(?m)^TimeoutStopSec=(\d+)$", text)
        assert stop_s is not None
        assert int(stop_s[1]) > asked.leave_s + 20


def test_the_pods_type_what_there_is() -> None:
    text = (ROOT / "peers" / "kubernetes.yaml").read_text()
    arguments = re.search(r"(?m)^ +args: (\[.*\])$", text)
    assert arguments is not None
    asked = _parse([word.replace("$(ADDR)", ADDRESS) for word in json.loads(arguments[1])])
    assert asked.command == "join"
    grace_s = re.search(r"terminationGracePeriodSeconds: (\d+)", text)
    assert grace_s is not None
    assert int(grace_s[1]) > asked.leave_s + 20
    assert str(asked.state) in text.split("mountPath: ")[1]
