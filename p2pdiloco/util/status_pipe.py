"""The status pipe: what a ``p2pdiloco`` command tells the program that started it, one JSON object a line.

The parent makes a pipe, lets the child inherit its write end, and names it by ``--status-fd N``::

    with status_pipe.opened() as (reader, fd):
        process = Popen([*command, status_pipe.OPTION, str(fd)], pass_fds=(fd,))
    invite = reader.wait_for(Invited, timeout_s=60.0).invite

Rules of this file:
1. The child depends on no reader. It never waits for the pipe; when its parent has closed the pipe, or lets it fill up,
   the child stops reporting and goes on.
2. A line has at most ``LINE_BYTES`` bytes. The writer leaves out a longer message; the reader skips a longer line.
3. The end of the pipe is the end of the child: no other process keeps the write end open.
4. ``str(message)`` is what a person reads instead. Programs never search that text.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import msgspec

OPTION = "--status-fd"
LINE_BYTES = 1 << 14
REASON_CHARACTERS = 2000
MOST_MESSAGES = 64
"""The reader keeps the newest ones."""


# -- Messages ----------------------------------------------------------------------------------------------------------


class StatusMessage(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """One line of the pipe."""


class Listening(StatusMessage, frozen=True):
    """A bootstrap node is up."""

    addresses: tuple[str, ...]
    """Its multiaddrs, the one to give to others first."""

    def __str__(self) -> str:
        found = (f"  p2pdiloco start CONFIG.toml --bootstrap {address}" for address in self.addresses[:1])
        join = (f"  p2pdiloco join {address}" for address in self.addresses)
        return "\n".join(
            (
                "This directory node is up. To found a run, type on a machine that trains:",
                *found,
                "Others join it with the invite that this prints; a run that is open to all, with",
                *join,
            )
        )


class Invited(StatusMessage, frozen=True):
    """Others can join the run. A peer reports it again when its invite or address changes."""

    invite: str
    """An invite, or an address of an open run; empty if an admin makes an invite for each newcomer."""
    usage: str
    """What a person types to join."""

    def __str__(self) -> str:
        return f"to join from another machine:  {self.usage}"


class PageAt(StatusMessage, frozen=True):
    """The page of this peer is served."""

    url: str

    def __str__(self) -> str:
        return f"look at  {self.url}"


class Exited(StatusMessage, frozen=True):
    """The command ends in order, or with a sentence for its user. A crash reports nothing."""

    status: int
    reason: str

    def __str__(self) -> str:
        return self.reason


Say: TypeAlias = Callable[[str | StatusMessage], None]
"""Tells the user a line; a message goes to the status pipe, too."""

_DECODER = msgspec.json.Decoder(Listening | Invited | PageAt | Exited)
Message = TypeVar("Message", bound=StatusMessage)


# -- The child's side --------------------------------------------------------------------------------------------------


class StatusWriter:
    """Writes messages to the pipe of this process, if its parent has given it one."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def attach(self, fd: int) -> None:
        """Report to ``fd`` from now on.

        Raises:
            OSError: it is no open file descriptor.
        """
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd = fd

    def report(self, message: StatusMessage) -> None:
        """Write ``message``; without a pipe, do nothing."""
        line = msgspec.json.encode(message) + b"\n"
        if self._fd is None or len(line) > LINE_BYTES:
            return
        try:
            is_written = os.write(self._fd, line) == len(line)
        except OSError:  # the parent has closed it, or it is full
            is_written = False
        if not is_written:
            self.close()

    def report_exit(self, status: int, reason: str) -> None:
        """Report ``Exited`` with as much of the reason as a line holds."""
        self.report(Exited(status, reason[:REASON_CHARACTERS]))

    def close(self) -> None:
        """Report nothing more. A fork of this process closes its copy, so that the pipe ends with this process."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


writer = StatusWriter()
"""This process's."""


# -- The parent's side -------------------------------------------------------------------------------------------------


class StatusPipeError(Exception):
    """The awaited message does not come; the text says why."""


class StatusReader:
    """The messages of one child."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``, and closes it at the pipe's end or with this object."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self._partial_line = b""
        self._messages: deque[StatusMessage] = deque(maxlen=MOST_MESSAGES)

    def poll(self) -> list[StatusMessage]:
        """The messages until now, oldest first; does not wait."""
        while self._close.alive:
            try:
                data = os.read(self._fd, LINE_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.close()
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            self._partial_line = self._partial_line[: LINE_BYTES + 1]  # too long, and stays so
            for line in lines:
                if len(line) <= LINE_BYTES:
                    with contextlib.suppress(msgspec.DecodeError):
                        self._messages.append(_DECODER.decode(line))
        return list(self._messages)

    def find(self, kind: type[Message]) -> Message | None:
        """The first message of this kind, if it has come."""
        return next((message for message in self.poll() if isinstance(message, kind)), None)

    def wait_for(self, kind: type[Message], timeout_s: float) -> Message:
        """The first message of this kind.

        Raises:
            StatusPipeError: the child ended without it, or it did not come within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while (found := self.find(kind)) is None:
            if not self._close.alive:
                reason = self.find(Exited)
                raise StatusPipeError(f"the process ended{'' if reason is None else f': {reason}'}")
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise StatusPipeError(f"no {kind.__name__} within {timeout_s:g} s")
            poller.poll(1e3 * left_s)
        return found

    def close(self) -> None:
        """Read no more; the child goes on."""
        self._close()


@contextlib.contextmanager
def opened() -> Iterator[tuple[StatusReader, int]]:
    """A pipe for one child: its reader, and the write end, which is to be inherited by the child that is started inside
    the block and is closed here after it."""
    read_fd, write_fd = os.pipe()
    reader = StatusReader(read_fd)
    try:
        yield reader, write_fd
    except BaseException:
        reader.close()
        raise
    finally:
        os.close(write_fd)
