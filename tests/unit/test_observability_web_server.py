"""What the page's server shows, and to whom: real sockets, a view made up."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from test_observability_history import ANN, BOB, chronicle, commit, progress

from p2pdiloco.observability import web_server as server_module
from p2pdiloco.observability.connection_limits import OWN_USER, PageLimits, client_of
from p2pdiloco.observability.history import RunHistory
from p2pdiloco.observability.snapshot import ChatBusyError, ChatReply, History, RunSnapshot
from p2pdiloco.observability.web_server import PageServer, is_this_machine, kept_token

HOSTILE = "</script><script>alert(1)</script>"


class Shown:
    """A view whose picture is the test's."""

    def __init__(self) -> None:
        self.chronicle: RunHistory = chronicle(1)
        self.chronicle.take(commit(1.0, 1, ANN, ann=5, bob=6))
        self.chronicle.take(progress(1.0, 500))
        self.asked = 0

    def picture(self) -> RunSnapshot:
        self.asked += 1
        return self.chronicle.picture(2.0)

    def history(self) -> History:
        return self.chronicle.history()

    @property
    def mark(self) -> int:
        return self.chronicle.mark


Ask = Callable[[PageServer, aiohttp.ClientSession, Shown], Coroutine[Any, Any, None]]


def serving(ask: Ask, host: str = "127.0.0.1", token: str = "", limits: PageLimits | None = None) -> None:
    async def whole() -> None:
        shown = Shown()
        async with PageServer(lambda _: shown, host, 0, token, limits) as server, aiohttp.ClientSession() as session:
            await ask(server, session, shown)

    asyncio.run(whole())


def chatting(ask: Ask, chat: Callable[[str], Awaitable[ChatReply]]) -> None:
    async def whole() -> None:
        shown = Shown()
        server = PageServer(lambda _: shown, token="secret", chat=chat)
        headers = {"Authorization": "Bearer secret"}
        async with server, aiohttp.ClientSession(headers=headers) as session:
            await ask(server, session, shown)

    asyncio.run(whole())


def at(server: PageServer, path: str = "/") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        size = 0
        for path in ("/", "/page.js", "/page.css"):
            async with session.get(at(server, path)) as answer:
                body = await answer.read()
                assert answer.status == 200
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "Access-Control-Allow-Origin" not in answer.headers
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                size += len(body)
                elsewhere = body.replace(b"http://www.w3.org/2000/svg", b"")
                assert b"http:" not in elsewhere
                assert b"https:" not in elsewhere
                for markup in (b"innerHTML", b"outerHTML", b"insertAdjacentHTML", b"document.write", b"eval("):
                    assert markup not in body
        assert size < 300_000
        assert not shown.asked

    serving(ask)


def test_the_stream_tells_pictures_and_the_history_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    monkeypatch.setattr(server_module, "HISTORY_S", 0.0)

    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with session.get(at(server, "/stream")) as answer:
            assert answer.content_type == "text/event-stream"
            names: list[str] = []
            async for raw in answer.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("event: "):
                    names.append(line[7:])
                    if names.count("picture") == 3 and names.count("history") == 1:
                        shown.chronicle.take(commit(2.0, 2, BOB, bob=6))
                elif line.startswith("data: ") and names[-1] == "picture":
                    assert json.loads(line[6:])["title"]["me"] == ANN
                if names.count("history") == 2:
                    break
            assert names.count("picture") >= 3

    serving(ask)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_a_foreign_name_that_points_here_is_refused(host: str) -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        for path in ("/", "/stream", "/picture.json", "/metrics"):
            async with session.get(at(server, path), headers={"Host": host}) as answer:
                assert answer.status in (400, 421)
        assert not shown.asked

    serving(ask)


def test_names_of_this_machine() -> None:
    for named in ("127.0.0.1:7373", "localhost:7373", "[::1]:7373", "LOCALHOST", "127.0.0.1"):
        assert is_this_machine(named, "127.0.0.1"), named
    assert not is_this_machine("192.0.2.7:7373", "127.0.0.1"), "nobody reaches loopback by that"
    assert is_this_machine("192.0.2.7:7373", "0.0.0.0")
    assert is_this_machine("home.example:7373", "home.example")
    assert not is_this_machine("evil.example:7373", "0.0.0.0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(method: str) -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        for path in ("/", "/picture.json", "/stream"):
            async with session.request(method, at(server, path)) as answer:
                assert answer.status == 405
        assert not shown.asked

    serving(ask)


def test_another_site_may_not_read_but_a_link_may_lead_here() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Origin": "https://evil.example"}
        for path in ("/picture.json", "/page.js", "/"):
            async with session.get(at(server, path), headers=foreign) as answer:
                assert answer.status == 403
        async with session.get(at(server), headers={**foreign, "Sec-Fetch-Mode": "navigate"}) as answer:
            assert answer.status == 200
        assert not shown.asked

    serving(ask)


def test_an_exposed_page_wants_its_token_everywhere() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        paths = ("/", "/page.js", "/stream", "/picture.json", "/history.json", "/metrics", "/health", "/ready")
        for path in paths:
            for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Cookie": "x=secret"}):
                async with session.get(at(server, path), headers=wrong) as answer:
                    assert answer.status == 401, path
        assert not shown.asked
        for probe in ("/livez", "/readyz"):
            async with session.get(at(server, probe)) as answer:
                assert (answer.status, await answer.text()) == (200, "ok\n")
        async with session.get(at(server, "/metrics"), headers={"Authorization": "Bearer secret"}) as answer:
            assert answer.status == 200
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address
        async with aiohttp.ClientSession(cookie_jar=jar) as visitor:
            async with visitor.get(at(server, "/?token=secret")) as answer:
                assert answer.status == 200
                assert "token" not in str(answer.url), "it does not stay in the address"
            async with visitor.get(at(server, "/picture.json")) as answer:
                assert answer.status == 200

    serving(ask, host="0.0.0.0", token="secret")


def test_a_token_of_no_letters_is_a_wrong_one(caplog: pytest.LogCaptureFixture) -> None:
    """Else each is a defect of ours, with its traceback in the user's terminal."""

    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        for header in (b"Authorization: Bearer \xff\xfe", b"Cookie: p2pdiloco-%d=\xff" % server.port):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n" + header + b"\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()

    serving(ask, host="0.0.0.0", token="secret")
    assert not caplog.records


def test_an_exposed_page_without_a_token_is_not_made() -> None:
    with pytest.raises(AssertionError):
        PageServer(lambda _: Shown(), "0.0.0.0", 0)


def test_the_token_stays_and_is_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = kept_token(tmp_path)
    assert kept_token(tmp_path) == token
    assert len(token) >= 20
    assert (tmp_path / "page.token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("P2PDILOCO_PAGE_TOKEN", "mine")
    assert kept_token(tmp_path) == "mine"
    assert (tmp_path / "page.token").read_text() == "mine", "for watch on this machine"
    assert (tmp_path / "page.token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_client_on_this_machine_is_its_user(
    family: socket.AddressFamily, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0] as accepted:
            ends = client.getsockname()[:2], accepted.getsockname()[:2]
            mine = os.getuid()
            assert client_of(*ends) == OWN_USER
            monkeypatch.setattr(os, "getuid", lambda: mine + 1)
            assert client_of(*ends) == f"user {mine}"
    assert client_of(("192.0.2.7", 80), ("192.0.2.1", 80)) == "192.0.2.7"
    assert client_of(("", 0), ("", 0)) == "", "its connection is closed already"


def test_other_users_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user opens 40 streams, which last; then a second user and the peer's own user come."""
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    monkeypatch.setattr(server_module, "MOST_STREAMS", 4)
    users = {"127.0.0.3": "user 3", "127.0.0.4": "user 4", "127.0.0.1": OWN_USER}
    monkeypatch.setattr(server_module, "client_of", lambda peer, _: users[peer[0]])

    async def ask(server: PageServer, _: aiohttp.ClientSession, shown: Shown) -> None:
        async with AsyncExitStack() as stack:

            async def streams(host: str, count: int) -> list[aiohttp.ClientResponse]:
                connector = aiohttp.TCPConnector(local_addr=(host, 0))
                session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
                return [await session.get(at(server, "/stream")) for _ in range(count)]

            many = await streams("127.0.0.3", 40)
            assert [answer.status for answer in many] == [200] * 4 + [503] * 36
            (own,) = await streams("127.0.0.1", 1)
            second = await streams("127.0.0.4", 3)
            assert [answer.status for answer in (own, *second)] == [200, 200, 200, 503], "a fair share"
            assert all([(await answer.content.readline()).startswith(b"retry") for answer in (own, *second[:2])])
            for out in many[:2]:
                with pytest.raises(aiohttp.ClientError):
                    await asyncio.wait_for(out.read(), 5.0)

    serving(ask)


def test_lookers_are_few_and_who_goes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 0.01)
    monkeypatch.setattr(server_module, "MOST_STREAMS", 2)

    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        first, second = [await session.get(at(server, "/stream")) for _ in range(2)]
        async with session.get(at(server, "/stream")) as third:
            assert third.status == 503
            assert "close one" in await third.text()
        first.close()
        async with asyncio.timeout(5.0):
            while True:
                async with session.get(at(server, "/stream")) as again:
                    if again.status == 200:
                        break
                await asyncio.sleep(0.02)
        second.close()

    serving(ask)


def test_a_port_that_is_taken_is_passed_over() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with PageServer(lambda _: shown).try_ports([server.port, 0]) as other:
            assert other.port not in (0, server.port)
        with pytest.raises(OSError, match="in use"):
            async with PageServer(lambda _: shown, port=server.port):
                pass

    serving(ask)


def test_machines_are_told_whether_it_is_healthy_and_ready() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with session.get(at(server, "/health")) as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")
        async with session.get(at(server, "/ready")) as answer:
            assert answer.status == 200
        new = chronicle(1)
        new.take({"time": 1.0, "event": "started", "peer": ANN, "run": "r", "is_new": True})
        shown.chronicle = new
        async with session.get(at(server, "/ready")) as answer:
            assert (answer.status, await answer.text()) == (
                503,
                "joining: the model is not complete on this peer yet\n",
            )
        async with session.get(at(server, "/readyz")) as answer:
            assert (answer.status, await answer.text()) == (503, "not ready\n"), "a probe has no token"
        picture = msgspec.structs.replace(new.picture(1.0), troubles=("no new version",))
        shown.picture = lambda: picture  # type: ignore[method-assign]
        async with session.get(at(server, "/health")) as answer:
            assert (answer.status, await answer.text()) == (503, "no new version\n")
        async with session.get(at(server, "/livez")) as answer:
            assert answer.status == 200, "restarting a peer in trouble would not help it"

    serving(ask)


HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
FEW_DESCRIPTORS = """
import asyncio, os, resource, sys
import uvloop
sys.path.insert(0, sys.argv[1])
from test_observability_web_server import Shown
from p2pdiloco.observability.web_server import PageServer

class Busy(Shown):
    def picture(self):
        for descriptor in [os.dup(0) for _ in range(150)]:
            os.close(descriptor)
        return super().picture()

async def main():
    async with PageServer(lambda _: Busy()) as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
uvloop.run(main())
"""
"""A peer that may open 256 descriptors, and needs 150 of them at each look. It ends with its standard input."""


def test_1300_half_sent_requests_leave_descriptors_to_the_peer_and_the_page_to_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    child = subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS, os.path.dirname(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    port = int(child.stdout.readline())

    async def flood() -> None:
        half_sent = []
        async with asyncio.timeout(60.0):
            for _ in range(1300):
                half_sent.append(await asyncio.open_connection("127.0.0.1", port))
                half_sent[-1][1].write(HALF)
        address = f"http://127.0.0.1:{port}/picture.json"
        async with asyncio.timeout(5.0), aiohttp.ClientSession() as session, session.get(address) as answer:
            assert answer.status == 200
        for _, writer in half_sent:
            writer.transport.abort()

    try:
        asyncio.run(flood())
    finally:
        child.communicate(timeout=20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_that_never_ends_is_cut_off_and_a_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 0.02)

    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with asyncio.timeout(20.0), session.get(at(server, "/stream")) as stream:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(HALF + b"\r\n")
            assert (await reader.readline()).split()[1] == b"200", "a whole request is answered"
            writer.write(HALF + b"X-Endless: ")
            crumbs = asyncio.create_task(crumble(writer))
            with suppress(ConnectionError):
                while await reader.read(1024):  # the rest of the first answer
                    pass
            crumbs.cancel()
            asked = shown.asked
            while shown.asked < asked + 3:  # the stream is older than any request may become
                assert await stream.content.readline()

    async def crumble(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.02)

    serving(ask, limits=PageLimits(stage_s=0.5))


def test_a_client_that_does_not_read_its_answers_is_let_go() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(400 * b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # more than the kernel's buffers hold
        async with asyncio.timeout(20.0):
            await descriptors(server, 1)
            await descriptors(server, 0)
        writer.transport.abort()

    async def descriptors(server: PageServer, number: int) -> None:
        """Until so many sockets of this process are the page's end of a connection."""
        while True:
            sockets = psutil.Process().net_connections("tcp")
            if number == sum(one.laddr.port == server.port and bool(one.raddr) for one in sockets):
                break
            await asyncio.sleep(0.02)

    serving(ask, limits=PageLimits(stage_s=0.5))


def test_a_client_that_floods_the_page_takes_places_from_itself() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
        writer.write(HALF)
        flood = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        async with asyncio.timeout(10.0):
            for early, _ in flood[:10]:
                with suppress(ConnectionError):
                    assert not await early.read()
            writer.write(b"\r\n")
            assert (await reader.readline()).split()[1] == b"200"
        for _, one in (*flood, (reader, writer)):
            one.transport.abort()

    serving(ask, limits=PageLimits(connections=4))


def test_the_page_has_a_small_share_of_the_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert PageLimits(connections=10**9).places() <= soft // 16
    assert PageLimits(connections=3).places() == 3


async def echo(prompt: str) -> ChatReply:
    return ChatReply(text=prompt + "!", step=7)


def test_a_text_is_continued_by_who_has_the_token() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with session.get(at(server, "/chat")) as answer:
            assert await answer.json() is True
        async with session.post(at(server, "/chat"), json={"prompt": HOSTILE}) as answer:
            assert answer.content_type == "application/json"
            assert await answer.json() == {"text": HOSTILE + "!", "step": 7, "error": ""}
        refused = [
            (401, {"headers": {"Authorization": ""}, "json": {"prompt": "x"}}),
            (401, {"headers": {"Authorization": "Bearer secreT"}, "json": {"prompt": "x"}}),
            (403, {"headers": {"Sec-Fetch-Site": "cross-site"}, "json": {"prompt": "x"}}),
            (405, {"data": '{"prompt": "x"}'}),  # as a form of another site could send it
            (405, {"data": {"prompt": "x"}}),
            (400, {"json": {"prompt": 7}}),
            (400, {"json": {"prompt": "x" * 4001}}),
            (413, {"json": {"prompt": "x" * 30_000}}),
        ]
        for status, options in refused:
            async with session.post(at(server, "/chat"), **options) as answer:
                assert answer.status == status, options
        async with session.post(at(server, "/stream"), json={"prompt": "x"}) as answer:
            assert answer.status == 405

    chatting(ask, echo)


def test_where_there_is_no_chat_nothing_is_continued() -> None:
    async def ask(server: PageServer, session: aiohttp.ClientSession, shown: Shown) -> None:
        async with session.get(at(server, "/chat")) as answer:
            assert await answer.json() is False
        async with session.post(at(server, "/chat"), json={"prompt": "x"}) as answer:
            assert answer.status == 404

    serving(ask)
    with pytest.raises(AssertionError):
        PageServer(lambda _: Shown(), chat=echo)


def test_an_answer_may_take_longer_than_a_request_and_the_next_one_is_told_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 0.05)

    async def work() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow(prompt: str) -> ChatReply:
            if begun.is_set():
                raise ChatBusyError
            begun.set()
            await may_end.wait()
            return ChatReply(text=prompt, step=1)

        server = PageServer(lambda _: Shown(), token="secret", limits=PageLimits(stage_s=0.5), chat=slow)
        async with server, aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
            first = asyncio.ensure_future(session.post(at(server, "/chat"), json={"prompt": "a"}))
            await begun.wait()
            async with session.post(at(server, "/chat"), json={"prompt": "b"}) as answer:
                assert answer.status == 429
                assert "try again" in await answer.text()
            await asyncio.sleep(1.5)  # three times as long as a stage
            may_end.set()
            assert await (await first).json() == {"text": "a", "step": 1, "error": ""}

    asyncio.run(work())
