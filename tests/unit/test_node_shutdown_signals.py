"""Machines that are taken back: a scheduler's signal, a cloud's notice at its metadata address."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.node import shutdown_signals
from p2pdiloco.node.shutdown_signals import CLOUDS, is_taken_back, leave_when_asked
from p2pdiloco.util.tasks import Tasks

EVENT = b'{"Events": [{"EventType": "%s", "NotBefore": "soon"}]}'


class Metadata(BaseHTTPRequestHandler):
    """What clouds answer at 169.254.169.254, as their documents say."""

    notice = False

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(b"a token\n")

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "a token":
                self.send_error(401)
            elif self.notice:
                self.answer(b'{"action": "terminate", "time": "2026-11-22T08:22:00Z"}')
            else:
                self.send_error(404)
        elif self.path == "/computeMetadata/v1/instance/preempted":
            assert self.headers["Metadata-Flavor"] == "Google"
            self.answer(b"TRUE\n" if self.notice else b"FALSE\n")
        elif self.path == "/metadata/scheduledevents?api-version=2020-07-01":
            assert self.headers["Metadata"] == "true"
            self.answer(EVENT % (b"Preempt" if self.notice else b"Freeze"))
        else:
            self.answer(b"[1, 2")

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Metadata.notice = False
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


class Node:
    """What a session asks of its node."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.left = asyncio.Event()
        self.host = Tasks()
        self.options = SimpleNamespace(folder=Path("story"))

    def leave(self, reason: str) -> None:
        self.said.append(f"leave: {reason}")
        self.left.set()

    def abandon(self, reason: str) -> None:
        self.said.append(f"at once: {reason}")


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_a_notice_is_told_from_none(cloud: str, address: str) -> None:
    assert not is_taken_back(address, CLOUDS[cloud].question)
    Metadata.notice = True
    assert is_taken_back(address, CLOUDS[cloud].question)


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_a_notice_is_leaving_in_order(cloud: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown_signals, "LOOK_S", 0.01)

    async def live() -> list[str]:
        node = Node()
        with leave_when_asked(node, f"{cloud}={address}"):  # type: ignore[arg-type]
            await asyncio.sleep(0.1)
            assert not node.said
            Metadata.notice = True
            await asyncio.wait_for(node.left.wait(), 10.0)
        return node.said

    assert asyncio.run(live()) == [f"leave: {cloud} reclaims the machine"]


def test_where_no_cloud_answers_the_peer_goes_on(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(shutdown_signals, "LOOK_S", 0.01)

    async def live(place: str) -> list[str]:
        node = Node()
        with leave_when_asked(node, place):  # type: ignore[arg-type]
            await asyncio.sleep(0.2)
        return node.said

    assert asyncio.run(live("gcp=http://127.0.0.1:1")) == []
    assert asyncio.run(live(f"azure={address}/nonsense")) == []


async def signalled(*numbers: signal.Signals) -> list[str]:
    """What a node is asked for by these signals, each sent when the one before has been handled."""
    node = Node()
    with leave_when_asked(node, None):  # type: ignore[arg-type]
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
    return node.said


def test_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown_signals, "SAME_S", 0.0)
    live = signalled
    usr1, term, interrupt = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
    assert asyncio.run(live(usr1)) == ["leave: SIGUSR1"]
    toggled: list[Path] = []
    monkeypatch.setattr(shutdown_signals, "toggle", toggled.append)
    assert asyncio.run(live(signal.SIGUSR2, signal.SIGUSR2, usr1)) == ["leave: SIGUSR1"]
    assert toggled == [Path("story")] * 2, "a pause, and its end"
    assert asyncio.run(live(usr1, usr1)) == ["leave: SIGUSR1"], "SLURM may send it to all steps, and again"
    assert asyncio.run(live(usr1, term)) == ["leave: SIGUSR1", "at once: SIGTERM"]
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # who runs tests may ignore it
    assert asyncio.run(live(signal.SIGHUP, signal.SIGHUP)) == ["leave: SIGHUP"]
    assert asyncio.run(live(interrupt, interrupt)) == ["leave: SIGINT", "at once: SIGINT"]


def test_a_signal_that_comes_again_within_a_second_is_the_same_one_also_while_the_peer_closes() -> None:
    """Of a terminal and of a wrapper, which sends the same or another one."""

    async def closing() -> list[str]:
        said = await signalled(signal.SIGINT, signal.SIGINT, signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would kill this process"
        return said

    assert asyncio.run(closing()) == ["leave: SIGINT"]
