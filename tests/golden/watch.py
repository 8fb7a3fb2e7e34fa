"""Draws the state machines of objects from what running code does: their states, and the functions that change them.

Rules of this file:
1. Nothing is declared: a function says in which state an object is, and each observed change becomes an arrow. The code
   needs no framework, and a diagram cannot show a change that does not occur.
2. An arrow has the name of the function in which the change occurred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NOTHING = "[*]"
"""The initial state, in Mermaid."""


class Picture:
    """The observed state changes of one kind of object."""

    def __init__(self) -> None:
        self.arrows: dict[tuple[str, str], set[str]] = {}
        self._last: dict[int, tuple[object, str]] = {}

    def see(self, whose: object, state: str, cause: str) -> None:
        """Record that ``whose`` is in ``state``; ``cause`` is the reason if it was in another state before."""
        _, before = self._last.get(id(whose), (whose, NOTHING))
        self._last[id(whose)] = (whose, state)  # kept, so that its id stays its own
        if state != before:
            self.arrows.setdefault((before, state), set()).add("" if before == NOTHING else cause)

    def mermaid(self) -> str:
        """Return the diagram in Mermaid's language, which GitHub draws."""
        lines = [
            f"    {before} --> {after}" + (f" : {', '.join(sorted(causes))}" if causes != {""} else "")
            for (before, after), causes in sorted(self.arrows.items())
        ]
        return "\n".join(["stateDiagram-v2", *lines, ""])


@contextmanager
def attributes_of(kind: type, state_of: Callable[[Any], str | None], *parts: type) -> Iterator[Picture]:
    """Look at an object of ``kind`` whenever an attribute of it or of one of its ``parts`` is set. ``state_of`` returns
    None for an object that is not complete yet."""
    picture = Picture()
    wholes: dict[int, object] = {}

    def set_attribute(self: object, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if isinstance(value, parts):
            wholes[id(value)] = self
        whole = wholes.get(id(self)) if isinstance(self, parts) else self
        state = None if whole is None else state_of(whole)
        if state is not None:
            picture.see(whole, state, sys._getframe(1).f_code.co_name)

    with pytest.MonkeyPatch.context() as patch:
        for each in (kind, *parts):
            patch.setattr(each, "__setattr__", set_attribute)
        yield picture


@contextmanager
def calls_of(kind: type, method: str, state_of: Callable[[Any], str]) -> Iterator[Picture]:
    """Look at an object after each call of ``method``; the cause is the type of the call's first argument."""
    picture = Picture()
    called = getattr(kind, method)

    def call(self: object, event: object, *others: object) -> object:
        answer = called(self, event, *others)
        inner = getattr(event, "message", event)
        picture.see(self, state_of(self), type(inner).__name__)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, call)
        yield picture
