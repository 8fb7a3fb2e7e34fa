"""Homes whose nodes are forks of one process, and notice in seconds what takes a minute."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import msgspec
import pytest
from forked import begin_in

from benchmarks.wan.homes import CONFIG, Gathering, Home, wait_for
from p2pdiloco.node import resource_guard
from p2pdiloco.peer import peer
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.transport import sockets

DEAD_AFTER_S = 4
"""A path that is gone; 20 otherwise."""
FINISH_S = 12.0
"""Until who is cut off goes at the run's end; 60 otherwise. On a busy machine 5 were once too few."""
LOOK_S = 0.2
"""Between looks whether a learner is to rest; 2 otherwise, in which a fast machine makes a short run's steps."""
WAIT_S = 60.0
BATCH = 64


def hasten() -> None:
    """In a node's process."""
    config = peer.protocol_config
    peer.protocol_config = lambda *given: msgspec.structs.replace(config(*given), finish_s=FINISH_S)
    sockets.DEAD_AFTER_S = DEAD_AFTER_S
    resource_guard.LOOK_S = LOOK_S


def begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes that are begun from now on are such, and make short steps."""
    monkeypatch.setattr(Home, "begin", staticmethod(partial(begin_in, change=hasten)))
    monkeypatch.setitem(CONFIG, "inner.batch", BATCH)


def homes(name: str, **nats: str) -> str:
    """A topology: a public hub, and homes by name, each behind a router of this kind."""
    sites = [f'[[site]]\nname = "{home}"\nnat = "{nat}"' for home, nat in nats.items()]
    return "\n".join([f'name = "{name}"', '[[site]]\nname = "hub"', *sites])


def trains(those: Gathering, *homes: Home) -> None:
    """Wait until each of these has taken a commit, not there yet, that holds all of them."""
    peers = {str(started(home)["peer"]) for home in homes}
    before = {home.name: len(home.events()) for home in homes}

    def has_news(home: Home) -> bool:
        news = [event for event in home.events()[before[home.name] :] if event["event"] == "commit"]
        return any({str(peer_of(LearnerId(one))) for one in event["contributors"]} >= peers for event in news)

    wait_for(lambda: all(map(has_news, homes)), those.homes, WAIT_S, "all train together")


def started(home: Home) -> dict[str, Any]:
    """Its first event."""
    return next(event for event in home.events() if event["event"] == "started")


def leaves(home: Home) -> dict[str, Any]:
    """It leaves in order; its report."""
    home.process.send_signal(signal.SIGTERM)
    assert home.process.wait(WAIT_S) == 0, home.told()[-2000:]
    return home.report()
