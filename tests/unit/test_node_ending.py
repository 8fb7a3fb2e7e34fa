"""What a user is told at a peer's end, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.node import launcher
from p2pdiloco.node import node as nodes
from p2pdiloco.node.node import Node
from p2pdiloco.node.notifier import Notifier
from p2pdiloco.observability.alerts import Alert
from p2pdiloco.observability.snapshot import Summary
from p2pdiloco.peer.ending import APART, NOBODY, Ending, ordinary_ending
from p2pdiloco.protocol.manifest import RunConfig

SUMMARY = Summary(share=0.5, commits=1, lasts_s=10.0, tokens=1000, up_bytes=1, down_bytes=1)


class Ended(Node):
    """A node whose peer has come to an end; ``told`` is all that its user hears, in order."""

    def __init__(self, *, has_finished: bool, is_saved: bool) -> None:
        self.told: list[str] = []
        view = SimpleNamespace(has_finished=has_finished, is_prolonged=False)
        peer = SimpleNamespace(
            machine=SimpleNamespace(view=view),
            stayed=self._stayed,
            manifest=SimpleNamespace(config=RunConfig(name="story")),
            is_over=True,
            is_saved=is_saved,
            options=SimpleNamespace(is_fetching=False, folder=Path("/state")),
        )
        self.peer = cast(Any, peer)
        self.telemetry = cast(Any, SimpleNamespace(picture=lambda: SimpleNamespace(account=SUMMARY)))

    async def end(self, ending: Ending) -> None:
        notifier = cast(Notifier, SimpleNamespace(tell=self._alerted))
        await self._finish(
            ending, self.told.append, lambda e: launcher._announce_end(self, notifier, self.told.append, e)
        )

    def status(self) -> Any:
        return None

    def _alerted(self, alert: Alert) -> None:
        self.told.append(f"alert {alert.kind}: {alert.text}")

    async def _stay(self, say: Any) -> None:
        say("serving the final")

    async def _stayed(self, ending: Ending) -> Ending:
        return ending


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "farewell", lambda _status, _folder, **_: "the run's model is in /state")
    monkeypatch.setattr(nodes, "progress_fields", lambda _status: {})


def told(ending: Ending, *, has_finished: bool, is_saved: bool = True) -> list[str]:
    node = Ended(has_finished=has_finished, is_saved=is_saved)
    asyncio.run(node.end(ending))
    return node.told


@pytest.mark.parametrize("status", [0, APART])
def test_what_it_gave_and_that_it_is_done_is_told_before_it_stays(status: int) -> None:
    said = [line for line in told(Ending(status, "all is merged"), has_finished=True) if line != "all is merged"]
    assert [line[:17] for line in said] == [
        "the run's model i",
        "this machine gave",
        "alert done: all i",
        "serving the final",
    ]


@pytest.mark.parametrize("ending", [Ending(0, "SIGINT"), Ending(1, "the learner cannot go on")])
def test_who_leaves_or_fails_is_not_done_and_hears_where_its_model_is_if_it_was_saved(ending: Ending) -> None:
    model, gave = told(ending, has_finished=False)
    assert model == "the run's model is in /state"
    assert gave.startswith("this machine gave")
    assert told(ending, has_finished=False, is_saved=False) == [gave]


@pytest.mark.parametrize(("has_heard_end", "what"), [(True, "the run ended"), (False, "all other peers were lost")])
def test_a_newcomer_that_all_have_left_ends_with_the_reason_and_what_to_do(
    has_heard_end: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited for ever, in silence."""
    monkeypatch.setattr(nodes, "LOOK_S", 0.001)
    monkeypatch.setattr(nodes, "ENDED_S", 0.005)
    monkeypatch.setattr(nodes, "LOST_S", 0.005 if not has_heard_end else 1e9)
    lives, endings = iter(["b", "b", "", "b"]), []

    class View(SimpleNamespace):
        @property
        def live(self) -> str:
            return next(lives, "")

    view = View(is_current=False, has_heard_end=has_heard_end)
    node = Ended(has_finished=False, is_saved=False)
    node.peer = cast(Any, SimpleNamespace(machine=SimpleNamespace(view=view), end_in_order=endings.append))
    asyncio.run(node._leave_when_abandoned())
    (ending,) = endings
    assert ending.status == NOBODY
    assert ending.reason.startswith(f"{what} before this peer had the model")
    assert "p2pdiloco resume STATE --stay-s" in ending.reason
    assert not list(lives), "it had waited anew when a peer was there"


def test_a_newcomer_that_has_the_model_stays() -> None:
    node = Ended(has_finished=False, is_saved=False)
    view = SimpleNamespace(is_current=True, has_heard_end=True, live="")
    node.peer = cast(Any, SimpleNamespace(machine=SimpleNamespace(view=view)))
    asyncio.run(node._leave_when_abandoned())


def test_a_line_that_was_too_thin_is_no_success_though_this_peer_has_merged_all_alone() -> None:
    def ended(unmerged: int, line: str, *, is_shared: bool = False) -> Ending:
        view: Any = SimpleNamespace(
            unmerged_tokens=lambda: unmerged, missing=0, has_finished=is_shared, is_shared=is_shared
        )
        return ordinary_ending("SIGTERM", view, needs_majority=False, trouble=line, learners="", line=line)

    assert ended(0, "") == Ending(0, "SIGTERM")
    thin = "the line is too thin for this run"
    assert ended(0, thin) == Ending(APART, f"SIGTERM, but other peers may not have this peer's progress: {thin}")
    assert ended(0, thin, is_shared=True) == Ending(0, "SIGTERM"), "late, but the others have it"
    assert ended(9, thin) == Ending(1, f"SIGTERM; 9 tokens were not merged in time and are lost ({thin})")
