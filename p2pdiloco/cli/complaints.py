"""Errors that end a command with a sentence and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
REPAIR = 2
NOBODY_THERE = 3


class Complaint(Exception):  # noqa: N818
    """What happened, why, and what to do; and the exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def complaining(*, repair: tuple[type[Exception], ...], nobody: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn the expected errors of a command into complaints; an unexpected one is a defect and keeps its traceback."""
    try:
        yield
    except repair as error:
        raise Complaint(str(error), REPAIR) from error
    except nobody as error:
        raise Complaint(str(error), NOBODY_THERE) from error
    except OSError as error:
        raise Complaint(str(error), FAILED) from error
