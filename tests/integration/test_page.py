"""The page in a real headless browser: it loads, lives, shows hostile words as text, and finds its peer's next life."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.watch import browser as browsers
from benchmarks.watch.browser import Tab, browser
from benchmarks.watch.shots import crowd
from p2pdiloco.observability.history import RunHistory
from p2pdiloco.observability.log_reader import Recording, player
from p2pdiloco.observability.snapshot import (
    ChatBusyError,
    ChatReply,
    Headline,
    History,
    OwnWords,
    PeerRow,
    RunSnapshot,
    Sample,
    Title,
)
from p2pdiloco.observability.web_server import PageServer

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        browsers.found() is None, reason="no headless browser here: install chromium, or name one in P2PDILOCO_BROWSER"
    ),
]
HOSTILE = "<img src=x onerror=\"document.title='evil'\"></td><script>document.title='evil'</script>"
ME, OTHER, THIRD = ("12D3KooW" + letter * 44 for letter in "ABC")
LOADED = "typeof picture !== 'undefined' && picture !== null && history !== null"


class Live:
    """A peer whose events are the test's, and whose others say hostile words."""

    def __init__(self) -> None:
        self.chronicle = RunHistory(Title(run="5" * 40, name="story", me=ME), [1], 100)
        self.step(1)

    def step(self, number: int) -> None:
        base: dict[str, Any] = {"time": 100.0 + number, "step": number, "tokens": 1000 * number}
        contributors = {f"{ME}/1": 1000}
        self.chronicle.take(
            {**base, "event": "commit", "shard": 0, "version": number, "owner": ME, "contributors": contributors}
        )
        self.chronicle.take({**base, "event": "evaluation", "version": number, "loss": 5.0 / number})

    def picture(self) -> RunSnapshot:
        told = self.chronicle.picture(101.0)
        words = OwnWords(
            phase=HOSTILE,
            tokens_per_s=1.0,
            tokens=1,
            loss=None,
            version_min=1,
            version_max=1,
            up_bytes=0,
            down_bytes=0,
            blocked_s=0.0,
            trouble=HOSTILE,
        )
        other = PeerRow(peer=HOSTILE, is_live=True, words=words)
        return msgspec.structs.replace(
            told,
            peers=(*told.peers, other),
            headlines=(Headline(at=1.0, level=HOSTILE, text=HOSTILE),),
            troubles=(HOSTILE,),
            counts={HOSTILE: 1},
            sample=Sample(at=1.0, step=1, text=HOSTILE),
        )

    def history(self) -> History:
        return self.chronicle.history()

    @property
    def mark(self) -> int:
        return self.chronicle.mark


def test_it_loads_lives_and_comes_back_after_a_restart_and_hostile_words_stay_words() -> None:
    async def whole() -> None:
        live = Live()
        async with browser() as tab:
            async with PageServer(lambda _: live) as server:
                port = server.port
                await tab.open(server.address)
                await tab.until(LOADED, "it shows something")
                assert await tab.text("name") == "story"
                assert await tab.text("loss") == "5.000"
                await is_harmless(tab)
                for number in range(2, 6):
                    live.step(number)
                await tab.until("document.getElementById('loss').textContent === '1.000'", "it is live")
                await tab.until("document.querySelectorAll('#curve circle').length === 5", "and so is the curve")
                await tab.press("x")
                assert await tab.value("document.getElementById('over-time').getAttribute('aria-pressed')") == "true"
                was = await tab.value("getComputedStyle(document.body).backgroundColor")
                await tab.press("t")
                assert await tab.value("getComputedStyle(document.body).backgroundColor") != was
            lost = "document.getElementById('pulse').classList.contains('lost')"
            await tab.until(lost, "it says that nobody answers")
            await tab.value("picture.course.phase = 'finished', pulse()")
            assert (await tab.text("pulse")).startswith("this peer stopped at")
            assert not await tab.value(lost)
            await tab.value("picture.course.phase = 'training', pulse()")
            live.step(6)
            async with PageServer(lambda _: live, port=port):
                await tab.until("document.getElementById('loss').textContent === '0.833'", "it is there again")
                await tab.until(f"!{lost}", "and says so")

    asyncio.run(whole())


async def is_harmless(tab: Tab, *, may_complain: bool = False) -> None:
    assert await tab.value("document.querySelectorAll('main img, main script, footer script').length") == 0
    assert "evil" not in await tab.value("document.title")
    assert HOSTILE in await tab.text("troubles")
    assert HOSTILE in await tab.text("headlines")
    assert may_complain or not tab.complaints


ROWS_ARE_RIGHT = """(() => {
  const rows = [...document.querySelectorAll('#peers tbody tr')];
  return rows.length === picture.peers.length && rows.every((row, i) => {
    const peer = picture.peers[i];
    return row.cells[0].title === peer.peer && row.cells[0].textContent.startsWith(short(peer.peer)) &&
      row.cells[2].textContent === percent(peer.share) && row.cells[6].textContent === String(peer.commits); });
})()"""
"""Rows are kept and moved, so each has to stand where its peer does, with its numbers."""


def test_sixty_four_recorded_peers_fit_a_phone_and_are_drawn_in_time(tmp_path: Path) -> None:
    recording = Recording(crowd(tmp_path))

    async def whole() -> None:
        async with PageServer(lambda query: player(recording, query, 60.0)) as server, browser() as tab:
            await tab.open(f"{server.address}/?at={recording.ends}", 390, 844, dark=True)
            await tab.until(LOADED, "it shows something")
            assert await tab.value("picture.peers.length") >= 60
            await tab.until("document.documentElement.scrollWidth <= 390", "nothing sticks out")
            drawn = "(() => { const t = performance.now(); show(); redraw(); return performance.now() - t })()"
            took_ms = await tab.value(drawn)
            assert took_ms < 500.0
            assert not await tab.value("document.getElementById('playback').hidden")
            for change in ("picture.peers.reverse()", "picture.peers.splice(5, 20)", "picture.peers.sort(() => 1)"):
                assert await tab.value(f"source.close(), {change}, show(), {ROWS_ARE_RIGHT}"), change
            assert not tab.complaints

    asyncio.run(whole())


NOTHING_OVERLAPS = """(() => {
  const box = document.getElementById('curve').getBoundingClientRect();
  const boxes = [...document.querySelectorAll('#curve text')].map((text) => text.getBoundingClientRect());
  const isApart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 3 || b.bottom <= a.top + 3;
  return boxes.every((a, i) => a.left >= box.left - 1 && a.right <= box.right + 1 &&
    boxes.every((b, j) => i === j || isApart(a, b)));
})()"""
VOID = """(() => { const box = document.getElementById('lanes').parentElement;
  return box.clientHeight - document.getElementById('lanes').clientHeight; })()"""


def test_a_recording_is_right_at_its_beginning_and_at_its_end(tmp_path: Path) -> None:
    def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
        return {"time": 1000.0 + second, "event": event, **fields}

    begun: dict[str, Any] = {
        "steps": 1,
        "sent_bytes": 0,
        "step_time_s": 0.1,
        "compute_s": 1.0,
        "overhead_s": 0.1,
        "blocked_s": 0.0,
    }
    contributors = {f"{ME}/1": 700, f"{OTHER}/1": 300}
    told = [
        at(0.0, "started", peer=ME, run="5" * 40, is_new=False),
        at(1.0, "joined", peer=OTHER, live=2),
        at(2.0, "evaluation", version=0, tokens=0, step=0, loss=5.575),
        at(2.0, "progress", step=1, tokens=10, loss=5.565, **begun),
        at(9.0, "commit", shard=0, version=1, step=8, head="h", tokens=1000, owner=ME, contributors=contributors),
        at(9.5, "joined", peer=THIRD, live=3),
        at(9.6, "left", peer=OTHER, live=2),
        at(9.7, "left", peer=THIRD, live=1),
        at(10.0, "ended", status=0, reason="the run is complete"),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    recording = Recording(tmp_path)

    async def whole() -> None:
        async with PageServer(lambda query: player(recording, query, 1.0)) as server, browser() as tab:
            for width in (1280, 400):
                await tab.open(f"{server.address}/?at={recording.begins + 3.0}&speed=0", width, 900)
                await tab.until(LOADED, "it shows the beginning")
                assert (await tab.text("live"), await tab.text("peers-words")) == ("2", "2 live")
                labels = await tab.value(
                    "[...document.querySelectorAll('#curve text')].map((text) => text.textContent)"
                )
                assert len(labels) == len(set(labels)), "one label a place, even where the axis spans almost nothing"
                await tab.open(f"{server.address}/?at={recording.ends}", width, 900)
                await tab.until(LOADED, "it shows the end")
                words = [await tab.text(name) for name in ("phase", "pulse", "live", "peers-words", "up", "loss-more")]
                still = ["ended", "end of the recording", "0", "0 live, 2 left", "0 B/s", "last measured at step 0"]
                assert words == still
                assert await tab.text("play") == "▶"
                await tab.until(f"Math.abs({VOID}) < 30", "two lanes fill their panel")
                assert await tab.value(NOTHING_OVERLAPS)
                assert not tab.complaints

    asyncio.run(whole())


def test_the_model_continues_a_text_and_its_words_stay_words() -> None:
    asked: list[str] = []

    async def chat(prompt: str) -> ChatReply:
        asked.append(prompt)
        if len(asked) == 1:
            return ChatReply(text=prompt + HOSTILE, step=12)
        if len(asked) == 2:
            return ChatReply(error=HOSTILE)
        raise ChatBusyError

    async def whole() -> None:
        live = Live()
        async with browser() as tab, PageServer(lambda _: live, token="secret", chat=chat) as server:
            await tab.open(server.address)
            await tab.until(LOADED, "it shows something")
            await tab.until("!document.getElementById('chat').hidden", "it has a chat")
            assert await tab.value("document.getElementById('answer').hidden")
            theme = await tab.value("document.documentElement.dataset.theme ?? ''")
            await tab.value("document.getElementById('prompt').focus()")
            await tab.press("t")
            assert await tab.value("document.documentElement.dataset.theme ?? ''") == theme, "a letter is a letter"
            await tab.value("document.getElementById('prompt').value = '<b>def'")
            for said in (
                "by the version of step 12",
                HOSTILE,
                "another text is being continued: try again in a moment",
            ):
                await tab.value("document.getElementById('ask').click()")
                await tab.until(f"document.getElementById('chat-when').textContent === {json.dumps(said)}", said)
                await tab.until("!document.getElementById('ask').disabled", "the next one can be asked")
                assert await tab.text("answer") == "<b>def" + HOSTILE
            await is_harmless(tab, may_complain=True)
        async with browser() as tab, PageServer(lambda _: live) as server:
            await tab.open(server.address)
            await tab.until(LOADED, "it shows something")
            assert await tab.value("document.getElementById('chat').hidden")
            await is_harmless(tab)

    asyncio.run(whole())
    assert asked == ["<b>def"] * 3
