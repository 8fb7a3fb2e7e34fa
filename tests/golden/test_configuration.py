"""docs/configuration.md is what the definitions of the manifest say. To accept a change: ``make golden``."""

from __future__ import annotations

import pytest

from tests.golden.configuration_page import PAGE, page


def test_the_page_is_what_the_definitions_say(request: pytest.FixtureRequest) -> None:
    drawn = page()
    if request.config.getoption("--update", default=False):
        PAGE.write_text(drawn, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == drawn, "docs/configuration.md is stale: make golden"
