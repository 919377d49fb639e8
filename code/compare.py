"""Compare two runs: scores, hyperparameters, and the rows that only one of them gets right.

    python code/compare.py runs/a runs/b

A run is the folder of a job (`--out` of `amphora train`), or the one with its metrics.json.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Print the comparison; return an exit code."""
    from recipe.errors import RecipeError
    from recipe.reports import run_comparison

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `report ... | head`
    try:
        for line in run_comparison.compare(*map(Path, argv)):
            print(line)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
