"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from p2pdiloco.runtime import logs


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that call ``main``: it configures logging for its process, which here is everybody's."""
    names = (logs.ROOT, *logs.FOREIGN, "hivemind")
    before = [(x.handlers, x.propagate, x.level) for x in map(logging.getLogger, names)]
    yield
    logging.captureWarnings(False)
    for name, (handlers, propagate, level) in zip(names, before, strict=True):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
