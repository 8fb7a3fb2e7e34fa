"""Rented machines, as far as a machine without clouds can see: what is handed over to ``sky``, and what runs there."""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_access_invite_code import invite

from p2pdiloco.access.invite_code import encode_invite
from p2pdiloco.cli import launch
from p2pdiloco.cli.main import _parse, main

yaml = pytest.importorskip("yaml")
INVITE = encode_invite(invite())


def written(tmp_path: Path, *words: str) -> Any:
    assert main(["launch", INVITE, *words, "--out", str(tmp_path / "task.yaml")]) == 0
    assert (tmp_path / "task.yaml").stat().st_mode & 0o777 == 0o600, "whoever reads it can join"
    return yaml.safe_load((tmp_path / "task.yaml").read_text())


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_machines_together_cost_at_most_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = written(tmp_path, "--dollars", "50", "--machines", "4", "--hours", "10", "--gpu", "L4:1", "--infra", "gcp")
    resources = task["resources"]
    assert 4 * (10 + launch.SPARE_H) * resources["max_hourly_cost"] == pytest.approx(50, rel=1e-3)
    assert 4 * (10 + launch.SPARE_H) * resources["max_hourly_cost"] <= 50
    assert (resources["use_spot"], resources["accelerators"], resources["infra"]) == (True, "L4:1", "gcp")
    assert "timeout --signal=USR1 --kill-after=120 36000 p2pdiloco join" in task["run"]
    exported, line, *_ = task["run"].splitlines()
    assert exported == f"export P2PDILOCO_INVITE={INVITE}"
    monkeypatch.setenv("P2PDILOCO_INVITE", INVITE)
    asked = _parse(line.partition("p2pdiloco ")[2].split())
    assert (asked.command, asked.address, asked.device, asked.stay_s) == ("join", [INVITE], "cuda", 0.0)
    assert not written(tmp_path, "--dollars", "5", "--no-spot")["resources"]["use_spot"]


def test_a_checkout_travels_and_a_release_is_installed_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(written(tmp_path, "--dollars", "5")["workdir"], "pyproject.toml").is_file()
    monkeypatch.setattr(launch, "CHECKOUT", tmp_path)
    task = written(tmp_path, "--dollars", "5")
    assert "workdir" not in task
    assert task["setup"] == f"pip install p2pdiloco=={launch.VERSION}"
    assert written(tmp_path, "--dollars", "5", "--source", "git+https://x/y z")["setup"].endswith("'git+https://x/y z'")


@pytest.mark.parametrize(
    "tail", [" " * 500 + "; touch x", " ; touch x", " junk", "\n; touch x", "\n$(touch x)", "\u2028junk", "\0"]
)
def test_what_stands_behind_an_invite_reaches_no_machine(
    tail: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", INVITE + tail, "--dollars", "5", "--out", str(tmp_path / "task.yaml")]) == 2
    assert "copy it again" in capsys.readouterr().err
    assert not (tmp_path / "task.yaml").exists()
    wrapped = f" {INVITE[:100]}\n   {INVITE[100:]}\n"
    assert main(["launch", wrapped, "--dollars", "5", "--out", str(tmp_path / "task.yaml")]) == 0
    assert f"export P2PDILOCO_INVITE={INVITE}\n" in (tmp_path / "task.yaml").read_text()


def test_values_in_the_script_are_words_and_no_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(tmp_path, "p2pdiloco", f'printf "%s\\n" "$@" $P2PDILOCO_INVITE > {tmp_path}/words; exit 5')
    data = "a; touch x $(touch x) `touch x` 'b' > x & # {seconds}"
    task = written(tmp_path, "--dollars", "5", f"--options={shlex.join(['--data', data])}")
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        timeout=20,
        check=False,
    )
    assert done.returncode == 5
    assert (tmp_path / "words").read_text().splitlines() == ["join", "--stay-s", "0", "--data", data, INVITE]
    assert not (tmp_path / "x").exists()
    (tmp_path / "task.yaml").unlink()
    for option in ("--options", "--gpu", "--infra", "--source"):
        for bad in ("a\nb", "a\x85b", "a\u2028b", "a\x1b[2J"):
            said = ["launch", INVITE, "--dollars", "5", option, bad, "--out", str(tmp_path / "task.yaml")]
            assert main(said) == 2
            assert f"{option} has a line break or another control character" in capsys.readouterr().err
    assert not (tmp_path / "task.yaml").exists()


def test_each_machine_is_handed_over_to_sky_and_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program(
        tmp_path, "sky", f'echo "$@" >> {tmp_path}/told; cat "${{@: -1}}" > {tmp_path}/task; test "$5" != p2pdiloco-3'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["launch", INVITE, "--dollars", "10", "--machines", "2"]) == 0
    told = (tmp_path / "told").read_text().splitlines()
    assert [line.split()[:5] for line in told] == [["launch", "-y", "-d", "-c", f"p2pdiloco-{n}"] for n in (1, 2)]
    assert all("--down -i 5 " in line for line in told)
    assert INVITE in yaml.safe_load((tmp_path / "task").read_text())["run"]
    assert not Path(told[0].split()[-1]).exists(), "the invite does not lie about"
    assert "sky down p2pdiloco-2" in capfd.readouterr().out
    assert main(["launch", INVITE, "--dollars", "10", "--machines", "4"]) == 1
    assert "status 1 for p2pdiloco-3" in capfd.readouterr().err


def test_without_sky_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", INVITE, "--dollars", "10"]) == 2
    said = capsys.readouterr().err
    assert "p2pdiloco[sky]" in said
    assert "--out" in said


def test_when_its_hours_are_over_a_peer_is_asked_to_leave(tmp_path: Path) -> None:
    """The task's own script, with a stand-in for the peer."""
    program(tmp_path, "p2pdiloco", f"trap 'echo left > {tmp_path}/end; exit 0' USR1; while :; do sleep 0.05; done")
    script = launch.RUN.format(seconds=0.3, variable="P2PDILOCO_INVITE", invite=INVITE, options="")
    began = time.monotonic()
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=False)
    assert (done.returncode, (tmp_path / "end").read_text()) == (0, "left\n")
    assert time.monotonic() - began < 10
    program(tmp_path, "p2pdiloco", "exit 3")
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=20, check=False)
    assert done.returncode == 3


def test_an_invite_that_admits_too_few_machines_rents_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for_one = encode_invite(msgspec.structs.replace(invite(), uses=1))
    for machines, status in (("1", 0), ("2", 2)):
        words = ["--dollars", "9", "--machines", machines, "--out", str(tmp_path / machines)]
        assert main(["launch", for_one, *words]) == status
        assert (tmp_path / machines).exists() is (status == 0)
    assert "admits 1 of 2 machines: use the one that start printed" in capsys.readouterr().err
