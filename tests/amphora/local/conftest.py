"""Commands that run in the tests' process leave its logging as it was."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Restore the loggers that `amphora.cli.main` configures."""
    loggers = [logging.getLogger(name) for name in ("amphora", "recipe")]
    states = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagates) in zip(loggers, states, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagates
