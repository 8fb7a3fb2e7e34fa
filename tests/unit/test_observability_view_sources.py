"""Where ``p2pdiloco watch`` gets its pictures: a page over a real socket, a state folder of a peer that lives or is
gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from test_observability_history import ANN, BOB, commit
from test_observability_log_reader_playback import started, write
from test_observability_web_server import Shown

from p2pdiloco.observability import view_sources
from p2pdiloco.observability.log_reader import RecordingError
from p2pdiloco.observability.view_sources import Page, Tape, UnseenError, found
from p2pdiloco.observability.web_server import PageServer

RUN = "r" * 40


def recorded(state: Path) -> Path:
    return write(state / RUN[:12] / "metrics.jsonl", started(100.0, ANN, RUN), commit(110.0, 1, BOB, ann=5, bob=7))


def test_a_state_folder_is_shown_live_while_its_peer_lives_and_is_a_recording_afterwards(tmp_path: Path) -> None:
    log = recorded(tmp_path)

    async def whole() -> None:
        shown = Shown()
        async with PageServer(lambda _: shown) as server:
            log.with_name("page.port").write_text(str(server.port))
            source = await found(str(tmp_path), 0.0)
            assert isinstance(source, Page)
            seen = await source.look()
            assert seen.picture == shown.picture()
            assert seen.history == shown.history()
            shown.chronicle.take(commit(3.0, 2, ANN, ann=5))
            assert (await source.look()).picture.merges[0].version == 2
        with pytest.raises(UnseenError, match="no answer from"):
            await source.look()
        tape = await found(str(tmp_path), 0.0)
        assert isinstance(tape, Tape)
        assert [row.version for row in (await tape.look()).picture.merges] == [1]

    asyncio.run(whole())


def test_a_page_of_another_run_at_the_same_port_is_not_taken_for_it(tmp_path: Path) -> None:
    log = write(tmp_path / ("s" * 12) / "metrics.jsonl", started(100.0, ANN, "s" * 40))

    async def whole() -> None:
        async with PageServer(lambda _: Shown()) as server:
            log.with_name("page.port").write_text(str(server.port))
            assert isinstance(await found(str(tmp_path), 0.0), Tape)

    asyncio.run(whole())


def test_the_token_is_taken_from_the_address_or_from_the_folder(tmp_path: Path) -> None:
    log = recorded(tmp_path)

    async def whole() -> None:
        async with PageServer(lambda _: Shown(), "127.0.0.1", 0, "secret") as server:
            with pytest.raises(UnseenError, match="the token is missing"):
                await Page(f"http://127.0.0.1:{server.port}").look()
            page = Page(f"http://127.0.0.1:{server.port}/?token=secret")
            assert (await page.look()).picture.title.run == RUN
            log.with_name("page.port").write_text(str(server.port))
            log.with_name("page.token").write_text("secret\n")
            assert isinstance(await found(str(tmp_path), 0.0), Page)

    asyncio.run(whole())


def test_what_is_no_page_is_refused_and_what_is_endless_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_sources, "MOST_BYTES", 1000)
    answers: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []

    def answer(text: str, status: int = 200, **headers: str) -> None:
        async def one(request: web.Request) -> web.StreamResponse:
            return web.Response(text=text, status=status, headers=headers)

        answers.append(one)

    answer("x" * 5000)
    answer("<html>")
    answer('{"at": "noon"}')
    answer("", 302, Location="http://127.0.0.1:1/")

    async def whole() -> None:
        async def serve(request: web.BaseRequest) -> web.StreamResponse:
            return await answers.pop(0)(request)  # type: ignore[arg-type]

        runner = web.ServerRunner(web.Server(serve))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        page = Page(f"http://127.0.0.1:{runner.addresses[0][1]}")
        for why in ("it is not a page", "is not a page", "is not a page", "refuses: 302"):
            with pytest.raises(UnseenError, match=why):
                await page.look()
        await runner.cleanup()

    asyncio.run(whole())


def test_what_is_no_place_is_said(tmp_path: Path) -> None:
    for place in ("https://example.org", "file:///etc/passwd"):
        with pytest.raises(UnseenError, match="is not a page"):
            asyncio.run(found(place, 0.0))
    with pytest.raises(UnseenError, match="p2pdiloco status"):
        asyncio.run(found("/ip4/127.0.0.1/tcp/1", 0.0))
    with pytest.raises(RecordingError, match="no peer has logged"):
        asyncio.run(found(str(tmp_path), 0.0))
