"""Shutdown requests: signals from people and schedulers, and preemption notices from cloud metadata servers.

Rules of this file:
1. All of them cause a graceful shutdown: unmerged progress is contributed and the state is saved, within ``--leave-s``.
2. A SIGINT or SIGTERM more than ``SAME_S`` after the first signal ends the process at once. Earlier ones are the same
   request, sent twice: by a terminal and by a wrapper. A repeated SIGUSR1 (SLURM: ``--signal=B:USR1@60``) or SIGHUP
   (the terminal closes; nohup ignores it) has no further effect. SIGUSR2 pauses the learner, or ends the pause
   (``resource_guard.py``).
3. A metadata server is asked only if the user names the cloud, and only at that cloud's address (tests give another
   one). Its answer is bounded in size, and only compared with the expected notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from p2pdiloco.node.node import Node
from p2pdiloco.node.resource_guard import toggle
from p2pdiloco.util import logs
from p2pdiloco.util.process import SAME_S

log = logs.get("session")

# Interval between two requests to the metadata server; the shortest notice of a large cloud is 30 s.
LOOK_S = 5.0
ASK_S = 2.0
MOST_BYTES = 1 << 16
IMPATIENT = (signal.SIGINT, signal.SIGTERM)


class Question(NamedTuple):
    """Request to a cloud's metadata server for a preemption notice."""

    path: str
    headers: dict[str, str]
    is_notice: Callable[[bytes], bool]
    """Returns whether an answer announces that the machine will be reclaimed."""
    token_path: str = ""
    """Path from which a token is requested first (AWS)."""


class Cloud(NamedTuple):
    """Metadata server of one cloud."""

    address: str
    question: Question


def _has_preemption(data: bytes) -> bool:
    """Return whether Azure's scheduled events contain a preemption."""
    events = json.loads(data).get("Events", [])
    return any(event.get("EventType") in ("Preempt", "Terminate") for event in events)


CLOUDS = {
    "aws": Cloud(
        "http://169.254.169.254",
        Question("/latest/meta-data/spot/instance-action", {}, lambda data: b"action" in data, "/latest/api/token"),
    ),
    "gcp": Cloud(
        "http://metadata.google.internal",
        Question(
            "/computeMetadata/v1/instance/preempted",
            {"Metadata-Flavor": "Google"},
            lambda data: data.strip().upper() == b"TRUE",
        ),
    ),
    "azure": Cloud(
        "http://169.254.169.254",
        Question("/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}, _has_preemption),
    ),
}


@contextlib.contextmanager
def leave_when_asked(node: Node, spot: str | None) -> Iterator[None]:
    """Handle signals while entered, and the preemption notices of the cloud ``spot``.

    spot: ``NAME``, or ``NAME=ADDRESS`` to ask another address; None: notices are not requested.
    """
    loop = asyncio.get_running_loop()
    same_until: float | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal same_until
        if same_until is None:
            same_until = loop.time() + SAME_S
            log.info("shutting down gracefully; repeat the signal after a second to end at once", signal=number.name)
            node.leave(number.name)
        elif number in IMPATIENT and loop.time() >= same_until:
            node.abandon(number.name)

    def stop_listening() -> None:
        for number in (*numbers, signal.SIGUSR2):
            loop.remove_signal_handler(number)

    numbers = [*IMPATIENT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR2, toggle, node.options.folder)
    watch = None if spot is None else node.host.keep(partial(_watch, node, spot), name="spot notices")
    try:
        yield
    finally:
        if same_until is None:
            stop_listening()
        else:  # the first signal may be sent again while the rest of the peer shuts down
            loop.call_at(same_until, stop_listening)
        if watch is not None:
            watch.cancel()


async def _watch(node: Node, spot: str) -> None:
    """Leave as soon as the cloud announces that it reclaims the machine."""
    name, _, address = spot.partition("=")
    cloud = CLOUDS[name]
    is_told = False
    while True:
        try:
            if await asyncio.to_thread(is_taken_back, address or cloud.address, cloud.question):
                log.warning("the cloud reclaims this machine; shutting down gracefully", cloud=name)
                node.leave(f"{name} reclaims the machine")
                return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            if not is_told:
                log.warning("the metadata server does not answer: no spot notices", cloud=name, reason=str(error))
                is_told = True
        await asyncio.sleep(LOOK_S)


def is_taken_back(address: str, question: Question) -> bool:
    """Return whether the metadata server has a preemption notice. Blocks for a few seconds at most.

    Raises:
        OSError: the server does not answer.
        ValueError, AttributeError, TypeError: the answer is malformed.
    """
    headers = dict(question.headers)
    if question.token_path:
        asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        headers["X-aws-ec2-metadata-token"] = _ask(address + question.token_path, asked, "PUT").decode("ascii").strip()
    try:
        return question.is_notice(_ask(address + question.path, headers, "GET"))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # AWS: no interruption is scheduled
            return False
        raise


def _ask(url: str, headers: dict[str, str], method: str) -> bytes:
    request = urllib.request.Request(url, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a link-local address, never by a proxy
    with direct.open(request, timeout=ASK_S) as answer:
        return bytes(answer.read(MOST_BYTES))
