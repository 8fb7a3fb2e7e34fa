"""The second run of what failed in ``make test``: ``pytest --last-failed -p tests.second_runs``.

A test that fails and then passes has a fault, but processes on a busy machine miss deadlines now and then. So it passes
once in this way: its id is written to ``tests/second_runs.toml``, and what is listed there fails in its second run.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

LISTED = Path("tests") / "second_runs.toml"
"""Below the root of the repository: ids of tests, each with the day and the commit of its second run."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a listed test before it runs."""
    before = _listed(item.config).get(_plain(item.nodeid))
    if before is not None:
        pytest.fail(
            f"this test failed, and it needed a second run before ({before}): find its fault, then remove its line "
            f"from {LISTED}",
            pytrace=False,
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write down what has passed now, and say so in the last lines."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    reports = [] if terminal is None or hasattr(config, "workerinput") else terminal.stats.get("passed", [])
    passed = sorted({_plain(one.nodeid) for one in reports if one.when == "call"} - _listed(config).keys())
    if not passed:
        return
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=config.rootpath, capture_output=True, text=True, check=False).stdout.strip()
    when = f"{datetime.now(UTC):%Y-%m-%d} {commit or 'no commit'}"
    lines = [f"{json.dumps(test)} = {json.dumps(when)}" for test in passed]
    with (config.rootpath / LISTED).open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    for line in (f"These tests needed a second run. {LISTED} lists them now; commit it:", *lines):
        terminal.write_line(line)


def _listed(config: pytest.Config) -> dict[str, str]:
    return tomllib.loads((config.rootpath / LISTED).read_text(encoding="utf-8"))


def _plain(node: str) -> str:
    """A test's id without the group that xdist appends."""
    head, bracket, rest = node.rpartition("]")
    return head + bracket + rest.partition("@")[0]
