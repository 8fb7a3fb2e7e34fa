"""What a person is told of without looking, in virtual time; and that it reaches a command and an address."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from test_observability_history import ANN, chronicle

from p2pdiloco.node.notifier import Notifier
from p2pdiloco.observability.alerts import PATIENCE_S, RECENT_LOSSES, Alert, Alerts
from p2pdiloco.observability.snapshot import Headcount, RunSnapshot, ShardRow

EVERY_S = 5.0
BASE = chronicle(1).picture(0.0)


def shown(
    loss: float | None = 2.0, live: int = 3, moved: float = 1.0, phase: str = "training", step: int = 8
) -> RunSnapshot:
    return msgspec.structs.replace(
        BASE,
        course=msgspec.structs.replace(BASE.course, phase=phase, held_out_loss=loss, held_out_step=step),
        headcount=Headcount(known=live, live=live, participating=live),
        shards=(ShardRow(shard=0, version=1, at=moved),),
    )


def noticed(alerts: Alerts, picture: RunSnapshot, **more: Any) -> list[tuple[float, Alert]]:
    """Looking at the same for a minute: what is told, and when."""
    return [
        (EVERY_S * look, alert)
        for look in range(1, 13)
        for alert in alerts.look(1000.0 + EVERY_S * look, picture, **more)
    ]


def begun(left_s: list[float] | None = None) -> Alerts:
    """A healthy peer is looked at for a while: nothing is told."""
    alerts = Alerts(lambda: left_s[-1] if left_s else None)
    for look in range(40):
        assert not alerts.look(800.0 + EVERY_S * look, shown(moved=800.0 + EVERY_S * look), 1e12)
    return alerts


def test_each_kind_is_noticed_once_within_a_minute_and_so_is_its_end() -> None:
    cases = {
        "stuck": (shown(moved=995.0), {}),
        "alone": (shown(live=1), {}),
        "diverging": (shown(loss=2.6), {}),
        "disk": (shown(), {"room_bytes": 5e6}),
        "limit": (shown(), {"limits": ["500 connected peers, of at most 512"]}),
        "trouble": (msgspec.structs.replace(shown(), troubles=("loss is nan",)), {}),
    }
    for kind, (picture, amounts) in cases.items():
        alerts = begun()
        told = [(at, alert) for at, alert in noticed(alerts, picture, **amounts) if alert.kind == kind]
        assert [alert.is_over for _, alert in told] == [False], kind
        assert told[0][0] <= 60.0, kind
        assert alerts.present[kind]
        over = [alert for alert in alerts.look(1100.0, shown(moved=1099.0), 1e12) if alert.kind == kind]
        assert [alert.is_over for alert in over] == [True], kind
        assert kind not in alerts.present


def test_a_figure_that_was_much_too_low_is_forgotten() -> None:
    """Of one who lied while it was the only one to evaluate: it does not alarm for good."""
    alerts = begun()
    alerts.look(1000.0, shown(loss=0.0, step=9, moved=1000.0))
    told = []
    for number in range(1, 31):
        at = 1000.0 + 20.0 * number
        told += alerts.look(at, shown(loss=2.0, step=9 + number, moved=at))
        assert ("diverging" in alerts.present) == (2 <= number < RECENT_LOSSES), number
    assert [(alert.kind, alert.is_over) for alert in told] == [("diverging", False), ("diverging", True)]


def test_the_same_evaluation_seen_again_takes_no_place() -> None:
    """Pictures come every few seconds, evaluations every few minutes: the best one is not forgotten meanwhile."""
    alerts = begun()
    for look in range(100):
        at = 1000.0 + EVERY_S * look
        alerts.look(at, shown(loss=2.6, step=9, moved=at))
    assert "diverging" in alerts.present


def test_the_end_of_a_membership_is_told_a_day_before() -> None:
    left_s = [1e9]
    alerts = begun(left_s)
    left_s.append(3600.0)
    told = [alert for _, alert in noticed(alerts, shown()) if alert.kind == "membership"]
    assert [alert.text for alert in told] == ["the membership ends in 1.0 hours: ask for a new invite"]
    left_s.append(1e9)
    assert [alert.is_over for alert in alerts.look(1100.0, shown(moved=1099.0)) if alert.kind == "membership"] == [True]


def test_what_is_short_is_no_news() -> None:
    alerts = begun()
    assert not alerts.look(1000.0, shown(live=1, moved=1000.0))
    assert not alerts.look(1000.0 + PATIENCE_S / 2, shown(live=1, moved=1004.0))
    assert not alerts.look(1000.0 + PATIENCE_S, shown(live=3, moved=1008.0))


def test_a_slow_run_and_one_that_is_over_are_not_stuck() -> None:
    slow = Alerts()
    for look in range(200):
        assert not slow.look(EVERY_S * look, shown(moved=60.0 * (EVERY_S * look // 60.0)))
    assert not [alert for _, alert in noticed(begun(), shown(moved=990.0, phase="finished"))]


def test_a_newcomer_that_has_lost_all_is_told_what_it_lacks() -> None:
    (text,) = [alert.text for _, alert in noticed(begun(), shown(live=1, phase="joining")) if alert.kind == "alone"]
    assert "has no model yet: it waits for them" in text


def test_who_begins_alone_is_not_told_so() -> None:
    assert "alone" not in [alert.kind for _, alert in noticed(Alerts(), shown(live=1))]


def test_a_command_gets_others_words_as_one_argument(tmp_path: Path) -> None:
    hostile = "x; touch evil $(touch evil) `touch evil` 'y\" \n --z"
    script = tmp_path / "told.py"
    script.write_text(
        "import json, os, sys\n"
        "open('told.json', 'a').write(json.dumps([sys.argv[1:], os.environ['P2PDILOCO_ALERT']]) + '\\n')\n"
    )
    before = Path.cwd()

    async def whole() -> None:
        async with Notifier(f"{sys.executable} {script} --flag", ANN) as notifier:
            notifier.tell(Alert(kind="alone", text=hostile))
            notifier.tell(Alert(kind="done", text="over"))

    os.chdir(tmp_path)
    try:
        asyncio.run(whole())
    finally:
        os.chdir(before)
    told = [json.loads(line) for line in (tmp_path / "told.json").read_text().splitlines()]
    assert told == [[["--flag", hostile], "alone"], [["--flag", "over"], "done"]]
    assert not (tmp_path / "evil").exists()


def test_an_address_gets_json_and_one_that_refuses_harms_nobody() -> None:
    heard = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(await request.json())
        return web.Response(status=500)

    async def whole() -> None:
        app = web.Application()
        app.router.add_post("/hook", hear)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with Notifier(f"http://127.0.0.1:{port}/hook", ANN) as notifier:
            notifier.tell(Alert(kind="disk", text="full"))
        await runner.cleanup()
        async with Notifier(f"http://127.0.0.1:{port}/hook", ANN) as nobody:
            nobody.tell(Alert(kind="disk", text="full"))

    asyncio.run(whole())
    assert heard == [{"kind": "disk", "text": "full", "is_over": False, "peer": ANN}]
