"""Web server of a peer: serves the page, its live stream, and the same numbers as JSON and Prometheus metrics.

Rules of this file:
1. Read-only: GET and HEAD. No request changes anything of the peer. Only ``/chat``, if there is one, takes a POST: a
   text to continue, as JSON, which a form of another site cannot send. A page with a chat requires a token everywhere.
2. On loopback every user of this machine may look. On any other address a token is required, as ``?token=`` (it then
   becomes a cookie) or as ``Authorization: Bearer``. Only ``PROBES`` need none.
3. The Host header must name this machine by an address, by ``localhost`` or by its own name. A foreign name that
   resolves to this address (DNS rebinding) is refused. No other origin may read, frame or embed anything.
4. At most ``MOST_STREAMS`` streams are open, and so many more of this process's own user, whom nobody can lock out.
   When all are taken, the client with most loses one to a client with fewer. On loopback a client is a user. A client
   that does not read is disconnected. Other connections are limited in number and time
   (``observability/connection_limits.py``).
5. Without a client nothing is computed. Unchanged data is not sent again.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Protocol, Self

import msgspec
from aiohttp import web

from p2pdiloco.net.abuse_limits import displaced
from p2pdiloco.observability.connection_limits import (
    OWN_USER,
    PageConnection,
    PageConnections,
    PageLimits,
    client_of,
)
from p2pdiloco.observability.prometheus import expose, unhealthy_reason, unready_reason
from p2pdiloco.observability.snapshot import ChatBusyError, ChatReply, History, RunSnapshot
from p2pdiloco.util import logs
from p2pdiloco.util.files import open_regular, read_regular, write_atomically

log = logs.get("page")

FILES = Path(__file__).parent / "page"
TYPES = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
TICK_S = 1.0
# Minimum interval between two histories of a stream.
HISTORY_S = 2.0
MOST_STREAMS = 16
# Longest text to continue.
MOST_CHARACTERS = 4000
# A client that does not read for this long is disconnected.
SEND_S = 10.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Paths for the probes of Kubernetes and others, which need no token.
PROBES = ("/livez", "/readyz")
TOKEN_VARIABLE = "P2PDILOCO_PAGE_TOKEN"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sight(Protocol):
    """The view of one client: a live peer, or a recording."""

    def picture(self) -> RunSnapshot:
        """Return the present snapshot."""

    def history(self) -> History:
        """Return the history up to now."""

    @property
    def mark(self) -> int:
        """Changes whenever the history does."""


class ChatPrompt(msgspec.Struct, frozen=True):
    """Prompt of a chat: the text to continue."""

    prompt: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]


class PageServer:
    """Serves the page; an async context manager.

    Args:
        open_view: returns a client's view for its query. A live peer returns the same view to all.
        port: 0 for any free port.
        token: required unless ``host`` is loopback and there is no chat; see ``new_token``.
        chat: continues a text with the current model; None: there is no chat. It raises ``ChatBusyError``.
    """

    def __init__(
        self,
        open_view: Callable[[Mapping[str, str]], Sight],
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        limits: PageLimits | None = None,
        chat: Callable[[str], Awaitable[ChatReply]] | None = None,
    ) -> None:
        assert token or (is_loopback(host) and chat is None)
        self._chat = chat
        self._open_view = open_view
        self._host = host
        self._token = token
        self._ports = [port]
        self._limits = limits or PageLimits()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: PageConnections
        # Of the own user, and of others: the client of each open stream, and when it began.
        self._streams: dict[bool, dict[PageConnection, tuple[str, float]]] = {True: {}, False: {}}
        self._closing = asyncio.Event()
        self.port = 0

    def try_ports(self, ports: list[int]) -> Self:
        """Listen on the first free one of these ports instead."""
        self._ports = ports
        return self

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: none of the ports is free, or ``host`` is not an address of this machine.
        """
        app = web.Application(
            middlewares=[self._guard], client_max_size=1024 if self._chat is None else 6 * MOST_CHARACTERS
        )
        app.router.add_get("/", self._page)
        for name in TYPES:
            app.router.add_get(f"/{name}", self._page)
        app.router.add_get("/stream", self._stream)
        app.router.add_get("/picture.json", self._picture)
        app.router.add_get("/history.json", self._history)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/chat", self._has_chat)
        app.router.add_post("/chat", self._continue)
        app.router.add_get("/livez", self._alive)
        app.router.add_get("/readyz", self._probed)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = PageConnections(self._runner.server, self._limits)
        for port in self._ports:
            try:
                self._listener = await asyncio.get_running_loop().create_server(
                    self._connections.accept, self._host, port, backlog=32
                )
                self.port = self._listener.sockets[0].getsockname()[1]
                break
            except OSError:
                if port == self._ports[-1]:
                    await self._runner.cleanup()
                    raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def address(self) -> str:
        """Address to open in a browser."""
        host = socket.gethostname() if self._host in ("0.0.0.0", "::", "") else self._host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}" + (f"/?token={self._token}" if self._token else "")

    # -- access --------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._connections.of(request)
        connection.begin_stage()
        try:
            self._check(request)
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        finally:
            connection.begin_stage()
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _check(self, request: web.Request) -> None:
        if not is_this_machine(request.host, self._host):
            raise web.HTTPMisdirectedRequest(text="this peer's page is not available under that host name\n")
        is_chat = request.method == "POST" and request.path == "/chat" and request.content_type == "application/json"
        if request.method not in ("GET", "HEAD") and not is_chat:
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        is_foreign = request.headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site")
        if is_foreign and (request.path != "/" or request.headers.get("Sec-Fetch-Mode") != "navigate"):
            raise web.HTTPForbidden(text="requests from other sites are refused\n")
        if self._token and request.path not in PROBES and not self._knows_token(request):
            raise web.HTTPUnauthorized(
                text="the token is missing: open the address that the peer has printed, with ?token=...\n",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _knows_token(self, request: web.Request) -> bool:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        told = (request.query.get("token", ""), request.cookies.get(self._cookie, ""), bearer)
        mine = self._token.encode()
        return any(hmac.compare_digest(word.encode(errors="backslashreplace"), mine) for word in told)

    @property
    def _cookie(self) -> str:
        """Name of the cookie. Cookies are not separated by port, so each peer on a host needs its own name."""
        return f"p2pdiloco-{self.port}"

    # -- resources -----------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        name = request.path.lstrip("/") or "page.html"
        if name == "page.html" and "token" in request.query:
            found = web.HTTPSeeOther("/")
            found.set_cookie(self._cookie, self._token, httponly=True, samesite="Lax")
            raise found
        text = await asyncio.to_thread((FILES / name).read_text, encoding="utf-8")
        return web.Response(text=text, content_type=TYPES[name], charset="utf-8")

    async def _picture(self, request: web.Request) -> web.StreamResponse:
        return _json(self._view(request).picture())

    async def _history(self, request: web.Request) -> web.StreamResponse:
        return _json(self._view(request).history())

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = expose(self._view(request).picture(), request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return _verdict(unhealthy_reason(self._view(request).picture()))

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return _verdict(unready_reason(self._view(request).picture()))

    async def _alive(self, request: web.Request) -> web.StreamResponse:
        """Answer a liveness probe. A peer that is alone, or waits, is alive: restarting it would not help."""
        return _verdict("")

    async def _probed(self, request: web.Request) -> web.StreamResponse:
        """Answer a readiness probe, without details, since a probe has no token."""
        return _verdict("not ready" if unready_reason(self._view(request).picture()) else "")

    def _view(self, request: web.Request) -> Sight:
        try:
            return self._open_view(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error

    async def _has_chat(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._chat is not None)

    async def _continue(self, request: web.Request) -> web.StreamResponse:
        if self._chat is None:
            raise web.HTTPNotFound(text="this peer continues no texts: start it with --chat\n")
        try:
            asked = msgspec.json.decode(await request.read(), type=ChatPrompt)
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        answering = asyncio.ensure_future(self._chat(asked.prompt))
        try:
            while not (await asyncio.wait({answering}, timeout=TICK_S))[0]:
                self._connections.of(request).begin_stage()
            return web.Response(body=msgspec.json.encode(answering.result()), content_type="application/json")
        except ChatBusyError:
            raise web.HTTPTooManyRequests(text="another text is being continued: try again in a moment\n") from None
        finally:
            answering.cancel()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: ``picture`` every second, ``history`` when it has changed."""
        view = self._view(request)
        connection = self._connections.of(request)
        ends = [(request.get_extra_info(end) or ("", 0))[:2] for end in ("peername", "sockname")]
        client = await asyncio.to_thread(client_of, *ends)
        streams = self._streams[client == OWN_USER]
        if len(streams) >= MOST_STREAMS:
            out = displaced(streams, client)
            if out is None:
                raise web.HTTPServiceUnavailable(
                    text=f"{MOST_STREAMS} pages are already open: close one\n", headers={"Retry-After": "10"}
                )
            del streams[out]
            out.abort()
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        streams[connection] = client, time.monotonic()
        self._connections.stream(connection)
        try:
            await response.prepare(request)
            await self._send(response, b"retry: 1000\n\n")
            mark, told_at = -1, -HISTORY_S
            while not self._closing.is_set():
                connection.begin_stage()
                now = time.monotonic()
                await self._send(response, _event("picture", view.picture()))
                if view.mark != mark and now - told_at >= HISTORY_S:
                    mark, told_at = view.mark, now
                    await self._send(response, _event("history", view.history()))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), TICK_S)
        except (ConnectionError, TimeoutError):
            pass  # the client has disconnected, or does not read
        finally:
            streams.pop(connection, None)
            connection.close_stream()
        return response

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        await asyncio.wait_for(response.write(data), SEND_S)


def _json(value: RunSnapshot | History) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _event(name: str, value: RunSnapshot | History) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


def _verdict(trouble: str) -> web.Response:
    return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(named: str, listens: str) -> bool:
    """Return whether a Host header names this machine by an address or by one of its own names.

    Any other name may have been made to resolve to this machine by an attacker. ``listens``: the address that the page
    listens on.
    """
    name = named.rpartition(":")[0] if named.rpartition(":")[2].isdecimal() and not named.endswith("]") else named
    name = name.strip("[]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return not is_loopback(listens) and name in (socket.gethostname().lower(), listens.lower())
    return address.is_loopback or not is_loopback(listens)


def new_token() -> str:
    """Return a random token of 128 bits."""
    return secrets.token_urlsafe(16)


def kept_token(folder: Path) -> str:
    """Return the token of this peer's page: of the variable P2PDILOCO_PAGE_TOKEN, or one that is created at the first
    call, readable by its user only.

    Raises:
        OSError: the file can be neither read nor written.
    """
    path = folder / "page.token"
    if given := os.environ.get(TOKEN_VARIABLE, "").strip():
        write_atomically(path, given.encode())  # for p2pdiloco watch on this machine
        return given
    with suppress(FileNotFoundError):
        return read_regular(path).decode().strip()
    token = new_token()
    with open(path, "x", encoding="ascii", opener=open_regular) as file:
        file.write(token)
    return token
