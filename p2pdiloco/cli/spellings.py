"""Old spellings of commands and options. They are translated before the command line is parsed, so neither help nor
completion shows them."""

from __future__ import annotations

from collections.abc import Sequence

UNTIL = "0.2"
"""The release that no longer has ``RENAMED``."""

RENAMED = {
    # commands
    "top": "watch",
    "page": "watch --page auto",
    "events": "watch --events",
    "invite": "members add",
    "ban": "members ban",
    "completion": "--print-completion",
    # options; after the name of a command, those that only this command had
    "bootstrap --initial-peers": "--bootstrap",
    "bootstrap --meet": "--rendezvous",
    "members --address": "--bootstrap",
    "plan --link": "--up",
    "watch --port": "--page",
    "--no-relay": "--relay off",
    "--no-map": "--no-port-mapping",
    "--tensor-threads": "--merge-threads",
}

HIVEMIND = {
    "--initial_peers": "--bootstrap",
    "--identity_path": "--identity",
    "--host_maddrs": "--directory-listen",
    "--announce_maddrs": "--directory-announce",
}
"""hivemind's own names of these options. Its users type them, so they stay for good, and without a notice."""


def translate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line in the present spelling, and one notice for each old spelling in it. Nothing after ``--`` is
    changed."""
    found: list[str] = []
    used: list[str] = []
    for i, word in enumerate(words):
        if word == "--":
            found += words[i:]
            break
        name, equals, value = word.partition("=")
        key = name if i == 0 else f"{found[0]} {name}"
        if i and key not in RENAMED:
            key = name
        if key in RENAMED and (i == 0 or name.startswith("--")):
            used.append(key)
            name, *more = RENAMED[key].split()
        else:
            name, *more = [HIVEMIND.get(name, name)]
        found += [name + equals + value, *more]
    return found, [_notice(key) for key in dict.fromkeys(used)]


def _notice(old: str) -> str:
    return f"p2pdiloco: {old.split()[-1]} is now {RENAMED[old]}; the old spelling works until {UNTIL}"
