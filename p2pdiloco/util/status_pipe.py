"""Status pipe: messages of a ``p2pdiloco`` command to the program that started it, one JSON object a line.

The parent creates a pipe, lets the child inherit its write end, and names it with ``--status-fd N``::

    with status_pipe.opened() as (reader, fd):
        process = Popen([*command, status_pipe.OPTION, str(fd)], pass_fds=(fd,))
    invite = reader.wait_for(Invited, timeout_s=60.0).invite

Rules of this file:
1. The child does not depend on a reader and never waits for the pipe. If its parent closes the pipe or lets it fill up,
   the child stops reporting and continues.
2. A line has at most ``LINE_BYTES`` bytes. The writer leaves out a longer message; the reader skips a longer line.
3. The end of the pipe means the end of the child: no other process keeps the write end open.
4. ``str(message)`` is the text that a person reads. Programs never parse that text. ``message.public`` has no secret
   in it: it is printed where the output may be kept (container logs, files).
"""

from __future__ import annotations

import contextlib
import json
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
"""Maximum number of messages that the reader keeps; the newest stay."""


# -- Messages ----------------------------------------------------------------------------------------------------------


class StatusMessage(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """One line of the pipe."""

    @property
    def public(self) -> str:
        """The text without secrets."""
        return str(self)


class Listening(StatusMessage, frozen=True):
    """A bootstrap node is up."""

    addresses: tuple[str, ...]
    """Its multiaddrs, the one to give to others first."""

    def __str__(self) -> str:
        found = (f"  p2pdiloco start CONFIG.toml --bootstrap {address}" for address in self.addresses[:1])
        join = (f"  p2pdiloco join {address}" for address in self.addresses)
        return "\n".join(
            (
                "This bootstrap node is up. To create a run, type on a machine that trains:",
                *found,
                "Others join with the invite that start prints, or, if the run is open to anyone, with",
                *join,
            )
        )


class Invited(StatusMessage, frozen=True):
    """The run can be joined. A peer reports it again when its invite or address changes."""

    invite: str
    """An invite, or an address of an open run; empty if an admin makes an invite for each newcomer."""
    usage: str
    """Command with which a person joins."""
    notes: tuple[str, ...] = ()
    """Lines printed below the invite: who may get it, and how to make one for another person."""
    file: str = ""
    """File that holds the invite, if it is a secret."""

    @property
    def public(self) -> str:
        """Where the invite is."""
        if not self.file:
            return str(self)
        return f"to join from another machine: the invite is in {self.file} (it is secret, and this is no terminal)"

    def __str__(self) -> str:
        return "\n  ".join((f"to join from another machine:  {self.usage}", *self.notes))


class PageAt(StatusMessage, frozen=True):
    """The page of this peer is served."""

    url: str
    token_file: str = ""
    """File that holds the token in the address, if there is one."""

    @property
    def public(self) -> str:
        """The address without the token."""
        if not self.token_file:
            return str(self)
        return f"look at  {self.url.partition('?')[0]}  (add ?token=... with the token in {self.token_file})"

    def __str__(self) -> str:
        return f"look at  {self.url}"


class Farewell(StatusMessage, frozen=True):
    """The peer has ended or its run is complete, and its state is saved."""

    text: str
    """What was merged, where the model is, and the next commands."""

    def __str__(self) -> str:
        return self.text


class Exited(StatusMessage, frozen=True):
    """The command ends in order, or with an error message for its user. A crash reports nothing."""

    status: int
    reason: str

    def __str__(self) -> str:
        return self.reason


Say: TypeAlias = Callable[[str | StatusMessage], None]
"""Shows a line to the user. A ``StatusMessage`` is also reported to the status pipe."""

_DECODER = msgspec.json.Decoder(Listening | Invited | PageAt | Farewell | Exited)
Message = TypeVar("Message", bound=StatusMessage)


# -- Child -------------------------------------------------------------------------------------------------------------


class StatusWriter:
    """Writes messages to the status pipe of this process, if its parent has given it one."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def attach(self, fd: int) -> None:
        """Report to ``fd`` from now on.

        Raises:
            OSError: ``fd`` is not an open file descriptor.
        """
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd = fd

    def report(self, message: StatusMessage) -> None:
        """Write ``message``; without a pipe, do nothing."""
        # "replace": a path may have bytes that are no text.
        line = json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace") + b"\n"
        if self._fd is None or len(line) > LINE_BYTES:
            return
        try:
            is_written = os.write(self._fd, line) == len(line)
        except OSError:  # the parent has closed the pipe, or the pipe is full
            is_written = False
        if not is_written:
            self.close()

    def report_exit(self, status: int, reason: str) -> None:
        """Report ``Exited`` with as much of the reason as a line holds."""
        self.report(Exited(status, reason[:REASON_CHARACTERS]))

    def close(self) -> None:
        """Stop reporting. A fork of this process closes its copy, so that the pipe ends with this process."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


writer = StatusWriter()
"""Status writer of this process."""


# -- Parent ------------------------------------------------------------------------------------------------------------


class StatusPipeError(Exception):
    """The awaited message will not come. The text says why."""


class StatusReader:
    """Reader of the messages of one child."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, and close it at the pipe's end or with this object."""
        os.set_blocking(fd, False)
        self._fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        """Stops reading. The child continues."""
        self._partial_line = b""
        self._messages: deque[StatusMessage] = deque(maxlen=MOST_MESSAGES)

    def poll(self) -> list[StatusMessage]:
        """Return the messages received so far, oldest first, without waiting."""
        while self.close.alive:
            try:
                data = os.read(self._fd, LINE_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.close()
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            self._partial_line = self._partial_line[: LINE_BYTES + 1]  # keeps a too long line recognizable as such
            for line in lines:
                if len(line) <= LINE_BYTES:
                    with contextlib.suppress(msgspec.DecodeError):
                        self._messages.append(_DECODER.decode(line))
        return list(self._messages)

    def find(self, kind: type[Message]) -> Message | None:
        """Return the first message of this kind, if it has arrived."""
        return next((message for message in self.poll() if isinstance(message, kind)), None)

    def wait_for(self, kind: type[Message], timeout_s: float) -> Message:
        """Wait for the first message of this kind and return it.

        Raises:
            StatusPipeError: the child ended without it, or it did not arrive within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while (found := self.find(kind)) is None:
            if not self.close.alive:
                reason = self.find(Exited)
                raise StatusPipeError(f"the process ended{'' if reason is None else f': {reason}'}")
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise StatusPipeError(f"no {kind.__name__} within {timeout_s:g} s")
            poller.poll(1e3 * left_s)
        return found


@contextlib.contextmanager
def opened() -> Iterator[tuple[StatusReader, int]]:
    """Create a pipe for one child and yield its reader and its write end.

    The child must be started inside the block and inherit the write end, which is closed here after the block.
    """
    read_fd, write_fd = os.pipe()
    reader = StatusReader(read_fd)
    try:
        yield reader, write_fd
    except BaseException:
        reader.close()
        raise
    finally:
        os.close(write_fd)
