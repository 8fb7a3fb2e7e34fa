"""Errors that end a command with their text and an exit status."""

from __future__ import annotations


class UserError(Exception):
    """The user is to repair something: the command, a configuration, data."""

    status = 2


class NobodyThereError(UserError):
    """Nobody could be reached, or the requested run does not exist."""

    status = 3
