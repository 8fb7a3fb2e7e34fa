"""Real testbeds: made, measured, used, changed, killed, cleaned. They need root, tbf, and netem or /dev/net/tun."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from possible import why_not

from benchmarks.netbed import testbed as testbeds
from benchmarks.netbed.__main__ import main
from benchmarks.netbed.measure import Flow, arriving
from benchmarks.netbed.namespace_exec import command
from benchmarks.netbed.namespaces import TestbedError, configure, create, listed, processes_in, remove
from benchmarks.netbed.qdisc import set_bucket
from benchmarks.netbed.trace import play
from benchmarks.netbed.verification import LinkOffError, must_agree

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's

NAME = "test-two"
SOURCE = f"""
name = "{NAME}"
[defaults]
up = "20mbit"
down = "100mbit"
round_trip_ms = 20
[[site]]
name = "a"
[[site]]
name = "b"
[[link]]
between = ["a", "b"]
[[change]]
at_s = 0.1
site = "a"
up = "5mbit"
[[change]]
at_s = 0.2
between = ["a", "b"]
round_trip_ms = 60
"""
SOON_S = 15.0


WHY_NOT = why_not()
needs_kernel = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "none")
measures = pytest.mark.skipif(
    os.environ.get("P2PDILOCO_MEASURE") != "1",
    reason="measures links, which needs a quiet machine: make test-measured",
)


@pytest.fixture
def alone() -> Iterator[None]:
    """One such test at a time on this machine, and nothing left of it."""
    with (Path(tempfile.gettempdir()) / "p2pbed-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        testbeds.down(NAME)
        yield
        testbeds.down(NAME)
        assert ours() == []


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "two.toml"
    path.write_text(SOURCE)
    return str(path)


def ours() -> list[str]:
    return listed(f"p2pbed-{NAME}--")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks.netbed", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@measures
@needs_kernel
@pytest.mark.usefixtures("alone")
def test_a_command_runs_in_a_measured_site_and_nothing_stays(file):
    talk = (
        "import os, socket; s = socket.create_server((os.environ['P2PBED_ADDRESS'], 0)); "
        "print(s.getsockname()[0], os.environ['P2PBED_PEERS'], sorted(os.listdir('/sys/class/net')))"
    )
    done = bench("exec", file, "b", "--", sys.executable, "-c", talk)
    assert done.stdout.strip() == "10.99.2.1 a=10.99.1.1 b=10.99.2.1 ['eth0', 'lo']", done.stderr
    assert "every line and path is as asked for" in done.stderr
    assert ours() == []
    assert bench("exec", "--unverified", file, "a", "--", "sh", "-c", "exit 7").returncode == 7
    assert "options go before" in bench("exec", file, "a", "--unverified", "--", "true").stderr


@needs_kernel
@pytest.mark.usefixtures("alone")
def test_a_command_runs_in_a_site_and_nothing_stays(file):
    talk = "import os; print(os.environ['P2PBED_ADDRESS'], sorted(os.listdir('/sys/class/net')))"
    done = bench("exec", "--unverified", file, "b", "--", sys.executable, "-c", talk)
    assert done.stdout.strip() == "10.99.2.1 ['eth0', 'lo']", done.stderr
    assert ours() == []


@measures
@needs_kernel
@pytest.mark.usefixtures("alone")
def test_what_is_off_is_refused():
    made = testbeds.up(SOURCE.encode())
    made.set_verified(True)
    assert testbeds.standing(NAME).is_verified
    configure(made.edge(0), lambda net: set_bucket(net, "wan", 18_000_000, 0.05))
    with pytest.raises(LinkOffError, match=r"up a: 1[78].* Mbit/s for 20 Mbit/s \(-"):
        must_agree(made)
    assert not testbeds.standing(NAME).is_verified


@needs_kernel
@pytest.mark.usefixtures("alone")
def test_up_and_down_may_be_repeated(file):
    for _ in range(2):
        done = bench("up", file, "--unverified")
        assert done.returncode == 0, done.stderr
    made = testbeds.standing(NAME)
    assert made is not None
    refused = bench("exec", file, "a", "--", "true")
    assert refused.returncode == 2
    assert "has not been measured" in refused.stderr
    Path(file).write_text(SOURCE.replace("20mbit", "30mbit"))
    assert "another topology of the name" in bench("link", file).stderr
    assert [bench("down", file).stdout for _ in range(2)] == [f"{NAME} is down\n", f"{NAME} was not up\n"]
    assert made.router is None or is_dead(made.router)


@measures
@needs_kernel
@pytest.mark.usefixtures("alone")
def test_a_change_changes_the_link():
    made = testbeds.up(SOURCE.encode())
    told = []
    assert play(made, threading.Event(), lambda seconds, change: told.append((seconds, change.at_s)))
    assert [at for _, at in told] == [0.1, 0.2]
    assert all(seconds >= at for seconds, at in told)
    by_kind = {(check.kind, check.where): check.measured for check in must_agree(made)}
    assert by_kind["up", "a"] == pytest.approx(5e6, rel=0.05)
    assert by_kind["round trip", "a-b"] == pytest.approx(0.06, rel=0.05)
    again = testbeds.standing(NAME)
    assert (again.played, again.topology) == (2, made.topology)
    again.rewind()
    sites, flow = [made.site(0), made.site(1)], [Flow(source=0, target=1, bps=23e6)]
    assert any(arriving(sites, flow, 20e6, 0.1) == pytest.approx(20e6, rel=0.05) for _ in range(3))


@needs_kernel
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("moment", ["namespaces", "running"])
def test_after_sigkill_clean_leaves_nothing(file, moment):
    if set(listed()) - set(ours()):
        pytest.skip("a testbed is up here, and clean would remove it")
    argv = [sys.executable, "-m", "benchmarks.netbed", "exec", "--unverified", file, "a", "--"]
    inner = (
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); print('running', flush=True); time.sleep(1000)"
    )
    tool = subprocess.Popen([*argv, sys.executable, "-c", inner], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        if moment == "namespaces":
            wait_for(lambda: len(ours()) >= 2)
        else:
            assert tool.stdout.readline() == b"running\n"
            assert len(processes_in(ours())) >= 2
    finally:
        tool.kill()
        tool.wait()
        tool.stdout.close()
    pids = processes_in(ours())
    done = bench("clean")
    assert done.returncode == 0, done.stderr
    assert listed() == []
    assert all(is_dead(pid) for pid in pids)
    assert not (testbeds.FOLDER / NAME).exists()
    assert "p2pbed" not in Path("/proc/net/dev").read_text()
    assert "removed 0 namespaces, killed 0 processes" in bench("clean").stdout


@needs_kernel
@pytest.mark.usefixtures("alone")
def test_what_takes_long_to_die_is_dead_when_its_namespace_is_removed():
    """The kernel closes packet sockets one by one, after the process has left its namespace."""
    name = f"p2pbed-{NAME}--a"
    create([name])
    inner = (
        "import socket, time; held = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3) for _ in range(100)];"
        "print('running', flush=True); time.sleep(1000)"
    )
    slow = subprocess.Popen(command(name, [sys.executable, "-c", inner]), stdout=subprocess.PIPE)
    try:
        assert slow.stdout.readline() == b"running\n"
        assert remove([name]) == [slow.pid]
        assert is_dead(slow.pid)
        assert ours() == []
    finally:
        slow.kill()
        slow.wait()
        slow.stdout.close()


@needs_kernel
@pytest.mark.usefixtures("alone")
def test_sigterm_ends_the_command_and_takes_all_down(file):
    argv = [sys.executable, "-m", "benchmarks.netbed", "exec", "--unverified", file, "a", "--", "sh", "-c"]
    tool = subprocess.Popen([*argv, "echo running; exec sleep 1000"], stdout=subprocess.PIPE)
    try:
        assert tool.stdout.readline() == b"running\n"
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(SOON_S) == 128 + signal.SIGTERM
    finally:
        tool.kill()
        tool.communicate()
    assert ours() == []


@needs_kernel
@pytest.mark.usefixtures("alone")
def test_half_made_namespaces_are_no_obstacle():
    create([f"p2pbed-{NAME}--a"])
    Path(f"/run/netns/p2pbed-{NAME}--b").touch()  # killed between making the name and the namespace
    assert testbeds.up(SOURCE.encode()).topology.name == NAME
    with pytest.raises(TestbedError, match="File exists"):
        create([f"p2pbed-{NAME}--a"])


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("action", ["up", "link", "down", "clean", "probe", "play"])
def test_without_root_it_says_so(action, file, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main([action, *([] if action in ("clean", "probe") else [file])]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "need root: run with sudo" in capsys.readouterr().err


def is_dead(pid: int) -> bool:
    """Gone, or waiting for init to take note."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(is_so, seconds: float = SOON_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)
