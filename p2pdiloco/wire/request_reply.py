"""Replies to requests, and reasons for refusing one."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True):
    """What a request is answered with. ``payload`` is shared until it is sent: do not change it."""

    body: bytes
    payload: bytes | bytearray | memoryview | None = None
    priority: float = 0.0
    """Lower goes first among the payloads for this peer."""


class Response(Struct, frozen=True):
    """What came back for a request."""

    body: bytes
    payload: memoryview | None


class RequestError(Exception):
    """A request got no answer: timed out, disconnected, refused, too large. The text says which."""


class RequestRefused(RequestError):  # noqa: N818
    """The peer says no, in its own words. Handlers raise it in ``answer``; askers get it from ``request``."""
