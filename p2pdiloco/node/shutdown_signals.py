"""Requests to leave: signals from people and schedulers, preemption notices from cloud metadata servers.

Rules of this file:
1. All of them are one thing, leaving in order: what is unmerged is contributed, the state saved, within ``--leave-s``.
2. SIGINT and SIGTERM leave, and end the process at once when they come again. SIGUSR1 (SLURM: ``--signal=B:USR1@60``)
   leaves, and may come again: whoever sends it means no harm. SIGUSR2 lets the peer rest, or go on
   (``resource_guard.py``).
3. A metadata address is asked only if the user says which cloud this is, and only at the address of that cloud (tests
   give another one). What it answers is bounded, and compared, never interpreted further.
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
from p2pdiloco.util import logs

log = logs.get("session")

LOOK_S = 5.0
"""Between two looks at the metadata address; the shortest notice of a large cloud is 30 s."""
ASK_S = 2.0
MOST_BYTES = 1 << 16
IMPATIENT = (signal.SIGINT, signal.SIGTERM)


class Question(NamedTuple):
    """What is asked of a cloud."""

    path: str
    headers: dict[str, str]
    is_notice: Callable[[bytes], bool]
    """Whether an answer says that the machine is taken back."""
    token_path: str = ""
    """What is asked before, for a token (AWS)."""


class Cloud(NamedTuple):
    """Where a machine asks whether it is taken back."""

    address: str
    question: Question


def _has_preemption(data: bytes) -> bool:
    """Azure's scheduled events."""
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
    """Heed signals and, with ``spot``, that cloud's notices: ``NAME``, or ``NAME=ADDRESS`` to ask elsewhere."""
    loop = asyncio.get_running_loop()
    heard = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            log.info("leaving in order; once more to leave at once", signal=number.name)
            node.leave(number.name)
        elif number in IMPATIENT:
            node.abandon(number.name)

    numbers = (*IMPATIENT, signal.SIGUSR1)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR2, node.toggle_pause)
    watch = None if spot is None else node.host.keep(partial(_watch, node, spot), name="spot notices")
    try:
        yield
    finally:
        for number in (*numbers, signal.SIGUSR2):
            loop.remove_signal_handler(number)
        if watch is not None:
            watch.cancel()


async def _watch(node: Node, spot: str) -> None:
    """Leave as soon as the cloud says that it takes the machine back."""
    name, _, address = spot.partition("=")
    cloud = CLOUDS[name]
    is_told = False
    while True:
        try:
            if await asyncio.to_thread(is_taken_back, address or cloud.address, cloud.question):
                log.warning("the cloud takes this machine back: leaving in order", cloud=name)
                node.leave(f"{name} takes the machine back")
                return
        except (OSError, ValueError, AttributeError, TypeError) as error:
            if not is_told:
                log.warning("no spot notices: the metadata address does not answer", cloud=name, reason=str(error))
                is_told = True
        await asyncio.sleep(LOOK_S)


def is_taken_back(address: str, question: Question) -> bool:
    """Whether the metadata address has a notice. Blocks, for a few seconds at most.

    Raises:
        OSError: nobody answers there.
        ValueError, AttributeError, TypeError: nonsense.
    """
    headers = dict(question.headers)
    if question.token_path:
        asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        headers["X-aws-ec2-metadata-token"] = _ask(address + question.token_path, asked, "PUT").decode("ascii").strip()
    try:
        return question.is_notice(_ask(address + question.path, headers, "GET"))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # AWS: nothing is planned
            return False
        raise


def _ask(url: str, headers: dict[str, str], method: str) -> bytes:
    request = urllib.request.Request(url, headers=headers, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the address is this machine's own
    with direct.open(request, timeout=ASK_S) as answer:
        return bytes(answer.read(MOST_BYTES))
