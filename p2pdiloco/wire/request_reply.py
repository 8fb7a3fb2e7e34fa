"""Replies to requests, and reasons for refusing one."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True):
    """Answer to a request. ``payload`` is shared until it has been sent: do not modify it."""

    body: bytes
    payload: bytes | bytearray | memoryview | None = None
    priority: float = 0.0
    """Payloads for this peer with a lower value are sent first."""


class Response(Struct, frozen=True):
    """Response to a request, as the requesting peer receives it."""

    body: bytes
    payload: memoryview | None


class RequestError(Exception):
    """A request was not answered: it timed out, was refused, or was too large, or the peer disconnected."""


class RequestRefused(RequestError):  # noqa: N818
    """The peer refused a request; the text is its reason. Handlers raise it in ``answer``; ``request`` raises it."""
