"""What ``doctor`` finds: each misconfiguration is made, and must be named with its remedy."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from test_training_builtin_learner import make_manifest

from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.node import diagnostics
from p2pdiloco.node.diagnostics import Finding
from p2pdiloco.peer.options import LearnerOptions
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.manifest_defaults import momentum_type
from p2pdiloco.training.speed_trial import SpeedTrial
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.files import lock
from p2pdiloco.wire.control_messages import PeerStatus


def is_found(finding: Finding, verdict: str, detail: str, remedy: str = "") -> None:
    assert (finding.verdict, detail in finding.detail, remedy in finding.remedy) == (verdict, True, True), finding
    assert finding.remedy or finding.verdict not in ("warning", "failure"), "what is wrong has a remedy"


# -- this machine ------------------------------------------------------------------------------------------------------


def test_a_state_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_found(diagnostics.disk(tmp_path / "new" / "er"), "ok", "free")
    (tmp_path / "file").write_text("")
    is_found(diagnostics.disk(tmp_path / "file" / "state"), "failure", "is a file", "--state")
    is_found(diagnostics.disk(tmp_path, 1 << 60), "failure", "needed at most", "--keep-checkpoints")
    free = 10 * diagnostics.shutil.disk_usage(tmp_path).free // 9
    is_found(diagnostics.disk(tmp_path, free), "warning", "needed at most", "make room")
    monkeypatch.setattr(diagnostics.os, "access", lambda *_: False)
    is_found(diagnostics.disk(tmp_path), "failure", "is not writable", "--state")


def test_a_folder_that_a_peer_has_is_named(tmp_path: Path) -> None:
    is_found(diagnostics.folder(tmp_path), "ok", "none runs")
    (tmp_path / "run").mkdir()
    held = lock(tmp_path / "run" / "lock")
    try:
        is_found(diagnostics.folder(tmp_path), "note", "running: run (process", "another --state")
    finally:
        diagnostics.os.close(held)
    is_found(diagnostics.folder(tmp_path), "ok", "none runs")


def test_a_key_that_is_spoilt_or_open_to_all_is_named(tmp_path: Path) -> None:
    is_found(diagnostics.identity(tmp_path), "ok", "none yet")
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    is_found(diagnostics.identity(tmp_path), "ok", str(path))
    path.chmod(0o644)
    is_found(diagnostics.identity(tmp_path), "warning", "others on this machine may read", "chmod 600")
    path.write_bytes(b"no key")
    is_found(diagnostics.identity(tmp_path), "failure", str(path), "move it away")


def test_a_device_that_torch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps"):
        is_found(diagnostics.accelerator(device), "failure", f"--device {device}", "--device cpu")
    is_found(diagnostics.accelerator("cpu"), "note", "on the CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    is_found(diagnostics.accelerator("cpu"), "note", "training would not use it", "--device cuda")


def test_a_busy_machine_and_a_container_s_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (0.1, 0.0, 0.0))
    is_found(diagnostics.machine(), "ok", "cores")
    monkeypatch.setattr(diagnostics.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    is_found(diagnostics.machine(), "warning", "99.0 processes compete for the cores", "--only-when-idle")
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "used").write_text("400000\n")
    monkeypatch.setattr(diagnostics, "CGROUP_LIMITS", (str(tmp_path / "limit"), "/nowhere"))
    monkeypatch.setattr(diagnostics, "CGROUP_USES", (str(tmp_path / "used"), "/nowhere"))
    assert diagnostics.memory_bytes() == 600_000
    (tmp_path / "limit").write_text("max\n")
    assert diagnostics.memory_bytes() > 600_000 or psutil.virtual_memory().available <= 600_000


def test_few_open_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _: (256, 4096))
    is_found(diagnostics.open_files(), "warning", "at most 256", "ulimit -n 4096")
    monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _: (256, 256))
    is_found(diagnostics.open_files(), "warning", "at most 256", "limits.conf")
    monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    is_found(diagnostics.open_files(), "ok", "any number")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's names")
def test_what_slows_connections_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").write_text("4096 16384 212992\n")
    is_found(diagnostics.send_buffers(tmp_path / "small"), "note", "up to 0 MiB", "tcp_wmem")
    (tmp_path / "large").write_text("4096 65536 67108864\n")
    is_found(diagnostics.send_buffers(tmp_path / "large"), "ok", "up to 64 MiB")
    is_found(diagnostics.send_buffers(tmp_path / "nowhere"), "note", "the system's own")

    class Refusing(socket.socket):
        def setsockopt(self, *_: Any) -> None:
            raise PermissionError

    monkeypatch.setattr(diagnostics.socket, "socket", Refusing)
    is_found(diagnostics.congestion_control(), "note", "BBR is refused", "modprobe tcp_bbr")


def test_small_packets_are_named() -> None:
    is_found(diagnostics.judged_mtu(1500, "host"), "ok", "1,500")
    is_found(diagnostics.judged_mtu(1420, "host"), "note", "a tunnel or a VPN")
    is_found(diagnostics.judged_mtu(1000, "host"), "warning", "at most 1,000 bytes", "raise the MTU")
    if sys.platform == "linux":
        is_found(diagnostics.path_mtu("127.0.0.1", 9), "ok", "to 127.0.0.1")
    is_found(diagnostics.path_mtu("256.1.1.1", 9), "note", "does not tell")


def test_a_wrong_clock_is_named() -> None:
    now = 1_700_000_000.0
    told = SharedClock(wall=lambda: now, steady=lambda: 5.0)
    is_found(diagnostics.clock(told), "note", "no node")
    told.adopt([-0.2, 0.1, 0.0])
    is_found(diagnostics.clock(told), "ok", "3 directory nodes")
    wrong = SharedClock(wall=lambda: now, steady=lambda: 5.0)
    wrong.adopt([-3600.0] * 3)
    is_found(diagnostics.clock(wrong), "warning", "3,600 s", " ")


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest(steps=360)


def status(**fields: Any) -> PeerStatus:
    counts = "step known live participating weight_averaged version_min version_max heads_mark tokens_trained"
    more = "tokens_merged held_out_step bytes_up bytes_down"
    base = dict.fromkeys([*counts.split(), *more.split()], 0)
    rest = {"run": "r", "name": "n", "peer": "p", "phase": "training", "total_steps": 360, "tokens_per_second": 0.0}
    return PeerStatus(**{**base, **rest, "train_loss": None, "held_out_loss": None, "blocked_s": 0.0, **fields})


TRIAL = SpeedTrial(tokens_per_s=1000.0, step_s=0.5, steps=12, threads=2, bytes=400_000_000)


def test_what_a_machine_would_give_is_told(manifest: Manifest, tmp_path: Path) -> None:
    others = [status(tokens_per_second=2000.0), status(tokens_per_second=float("nan")), status(tokens_per_second=1e3)]
    findings, estimate = diagnostics.judged(manifest, TRIAL, others, tmp_path, free_memory=4_000_000_000)
    assert [finding.verdict for finding in findings] == ["ok"] * 5, findings
    speed = "1,000 tokens/s, 0.500 s a step (12 steps, 2 threads); this machine would train 25.0% of the run's tokens"
    is_found(findings[1], "ok", speed)
    assert estimate.share == 0.25
    parameters = Layout.of(manifest).elements
    sync = manifest.config.schedule.sync_every
    assert estimate.up_bytes_per_s == pytest.approx(0.44 * parameters * (1 + 3 / 4) / (sync * 0.5))
    assert estimate.memory_bytes == 9 * parameters + (45 << 20) + (250 << 20) + 400_000_000
    checkpoint = 8 if momentum_type(manifest.config.outer) == "float32" else 6
    assert estimate.disk_bytes == (4 * checkpoint + 8 + 27 + 58) * parameters + (100 << 20), "as docs/operating.md says"


def test_what_a_machine_lacks_is_told(manifest: Manifest, tmp_path: Path) -> None:
    def judged(trial: SpeedTrial | None, *peers: PeerStatus, free: int = 4_000_000_000) -> dict[str, Finding]:
        findings, _ = diagnostics.judged(manifest, trial, peers, tmp_path, free_memory=free)
        return {finding.subject: finding for finding in findings}

    is_found(judged(TRIAL, free=800_000_000)["memory"], "warning", "0.80 free", "--follow")
    is_found(judged(TRIAL, free=100_000_000)["memory"], "failure", "0.10 free", "--follow")
    is_found(judged(None)["memory"], "ok", "estimated")
    is_found(judged(None)["speed"], "note", "not measured")
    broken = SpeedTrial(trouble="/nowhere is not a folder: say --data FOLDER")
    is_found(judged(broken)["speed"], "failure", "cannot train here", "--data FOLDER")
    is_found(judged(TRIAL, status(tokens_per_second=1e9))["speed"], "note", "a very small share", "--device")
    is_found(judged(TRIAL, status(step=300, tokens_per_second=1.0))["speed"], "note", "the run ends in 30 s", "fetch")
    other = msgspec.structs.replace(TRIAL, has_blocks=False)
    is_found(judged(other)["data"], "note", "different from the run's", "--data")


@pytest.mark.heavy
def test_the_speed_is_measured_with_the_run_s_own_steps(manifest: Manifest, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"a text of some length {number}\n" * 9)
    found = asyncio.run(diagnostics.tried(manifest, LearnerOptions(threads=1, data=str(tmp_path)), 0.1))
    assert (found.trouble, found.threads) == ("", 1)
    assert found.tokens_per_s == pytest.approx(2 * 8 / found.step_s)
    assert found.steps >= 3
    assert found.bytes > 50e6


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (LearnerOptions(device="cuda:9"), "--device cpu"),
        (LearnerOptions(device="abacus"), "abacus"),
        (LearnerOptions(data="/nowhere"), "/nowhere"),
    ],
)
def test_what_a_learner_could_not_use_is_named(
    manifest: Manifest, options: LearnerOptions, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from p2pdiloco.training.speed_trial import main

    (tmp_path / "manifest").write_bytes(manifest.encode())
    words = ["--manifest", str(tmp_path / "manifest"), "--device", options.device, "--seconds", "0"]
    assert main(words + (["--data", options.data] if options.data else [])) == 2
    assert sentence in msgspec.json.decode(capsys.readouterr().out, type=SpeedTrial).trouble
