"""Errors that end a command with a sentence and an exit status."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from p2pdiloco.util.errors import NobodyThereError, UserError

FAILED = 1
REPAIR = UserError.status
NOBODY_THERE = NobodyThereError.status
INTERRUPTED = 130
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
OWNER_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandError(UserError):
    """An error for the user: it says what happened, why, and what to do, and has an exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def as_command_errors(*repair: type[Exception]) -> Iterator[None]:
    """Turn errors of the system, and those in ``repair``, into errors for the user; an unexpected one is a defect and
    keeps its traceback."""
    try:
        yield
    except repair as error:
        raise CommandError(str(error), REPAIR) from error
    except BrokenPipeError:
        raise  # whoever read our output has seen enough
    except OSError as error:
        raise _of_system(error) from error


def _of_system(error: OSError) -> CommandError:
    what = error.strerror or str(error)
    text = f"{error.filename}: {what}" if error.filename else what
    if error.errno == errno.EADDRNOTAVAIL:
        return CommandError(
            f"{text}; that is no address of this machine: listen on one that it has (0.0.0.0: all), and tell others "
            "the one that they dial with --announce",
            REPAIR,
        )
    if error.filename and error.errno in OWNER_ERRORS:
        return CommandError(f"{text}; change its owner (see ls -ld), or name another place, as with --state", REPAIR)
    if error.errno in PORT_ERRORS:
        return CommandError(f"{text}; choose another port (0: any free one), or stop what listens there", REPAIR)
    if error.errno in DISK_ERRORS:
        return CommandError(f"nothing can be written ({text}): make room, or name a folder on another disk", FAILED)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CommandError(f"{text}: mend the path", REPAIR)
    return CommandError(text, FAILED)
