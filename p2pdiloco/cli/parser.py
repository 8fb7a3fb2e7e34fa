"""A command line that says what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NoReturn

from p2pdiloco.util import status_pipe


class Parser(argparse.ArgumentParser):
    """Its messages name the nearest command or option to one that does not exist."""

    _taker = ""
    """An option on the command line that takes several values."""

    def check(self, words: Sequence[str]) -> None:
        """Complain of the first word that is no option here but looks like one, before anything that is only missing.
        What follows ``--`` is not looked at."""
        known = set(self._option_strings())
        for word in words:
            if word == "--":
                return
            name = word.split("=", 1)[0]
            if (action := self._option_string_actions.get(name)) is not None and action.nargs == "*":
                self._taker = name
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"there is no option {name}{meant(name, self._shown())}")

    def _option_strings(self) -> Iterable[str]:
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    yield from sub._option_string_actions

    def _shown(self) -> Iterable[str]:
        """The options that help shows."""
        return (
            option
            for option in self._option_strings()
            if (action := self._option_string_actions.get(option)) is None or action.help != argparse.SUPPRESS
        )

    def error(self, message: str) -> NoReturn:
        """The sentence, and where to read on; status 2."""
        message = message.replace(
            "expected one argument", "a value has to follow (--OPTION=-1, if it begins with a dash)"
        )
        if "arguments are required" in message and self._taker:
            message += f" ({self._taker} takes all that follows it: put it last)"
        status_pipe.writer.report_exit(2, message)
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")


def meant(word: str, known: Iterable[str], before: str = "") -> str:
    """``: did you mean ...?`` if one of ``known``, all of which stand behind ``before``, is near."""
    import difflib

    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f": did you mean {before}{near[0]}?" if near else ""
