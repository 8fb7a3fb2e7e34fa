"""docs/protocol-tests.md lists what the docstrings of the protocol's tests say. To write it: ``make golden``."""

from __future__ import annotations

import pytest

from tests.golden.protocol_tests import PAGE, page


def test_the_page_lists_the_tests_of_each_rule(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update", default=False):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/protocol-tests.md is out of date: run make golden"
