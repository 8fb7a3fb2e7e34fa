"""The tutorial's commands, typed as they stand there (docs/tutorial.md), do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from forked import run
from swarm import START_S, contributes, ended, log_lines, printed, swarm_in, until

from p2pdiloco.util.status_pipe import Invited

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]


@pytest.mark.timeout(400)
def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    assert [words[:2] for words in COMMANDS] == [
        ["p2pdiloco", word] for word in ("bootstrap", "start", "members", "doctor", "join", "status", "generate")
    ]
    _, start, add, doctor, join, status, generate = [words[1:] for words in COMMANDS]
    with swarm_in(tmp_path) as swarm:
        known = {"bootstrap": swarm.start_bootstrap()}

        def typed(words: list[str]) -> list[str]:
            """With this network's addresses."""
            return [
                known["bootstrap"] if "/p2p/" in word else known["invite"] if word == "INVITE" else word
                for word in words
            ]

        ann = swarm.launch("ann", typed(start))
        ann.wait_for(Invited, START_S)
        assert printed(ann, "every 6 steps; 8 learners end roughly 12 % above one machine") is not None
        known["invite"] = run(*add, "--state", ann.folder, timeout_s=START_S).stdout.strip()
        asked = run(*typed(doctor), "--seconds", "0.5", "--state", tmp_path / "doctor", timeout_s=START_S)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        for word in ("1 peer answers, 869,504 parameters", "tokens/s", "GB needed", "Mbit/s needed in each direction"):
            assert word in asked.stdout
        bob = swarm.launch("bob", typed(join))
        until(ann, lambda: contributes(ann, bob, 0), what="contributions of bob")
        assert "the run's state is here" in "".join(log_lines(bob))
        table = run(*typed(status), "--state", tmp_path / "asking", timeout_s=START_S)
        assert (table.returncode, "2 known, 2 live" in table.stdout) == (0, True), table.stdout + table.stderr
        bob.process.terminate()
        assert ended(bob) == 0
        assert printed(bob, "this machine gave") is not None
        wrote = run(*typed(generate), "--tokens", "8", "--state", bob.folder, timeout_s=START_S)
        assert (wrote.returncode, "def " in wrote.stdout) == (0, True), wrote.stdout + wrote.stderr
        ann.process.terminate()
        assert ended(ann) == 0
