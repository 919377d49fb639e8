"""Print the recipe's log lines on stdout, from the first process only."""

from __future__ import annotations

import logging
import os


def is_first_process() -> bool:
    """Return whether this is rank 0 of the job, or its only process."""
    return os.environ.get("RANK", "0") == "0"


def log(line: str) -> None:
    """Log a line of serving: as the server logs, if it runs this code, else on stdout."""
    logger = logging.getLogger("recipe")
    if logger.handlers:
        logger.info("%s", line)
    else:
        print(line, flush=True)


def say_row(what: str, detail: object) -> None:
    """Print a line of the plan: the subject in a column, then the decision."""
    say(f"{what:15} {detail}")


def say(line: str) -> None:
    """Print one line and flush it, on rank 0 only, so that a job's log has each line once."""
    if is_first_process():
        print(line, flush=True)
