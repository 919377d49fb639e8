"""Check a training job's hyperparameters, data and model without training.

    SM_CHANNEL_TRAIN=data/train python code/check.py 1 0 --model_name_or_path path/to/model

The first argument is the number of training processes, the second how many steps to try (0: none),
or `needs` for what the job needs of an instance; the others are those of `train.py`.
Prints lines `amphora-check {"level": "ok|warning|error", "what": ..., "detail": ...}`, and with
`needs` one line `amphora-needs {...}` of recipe.training.preflight.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys


def main(argv: list[str]) -> None:
    """Print all findings. Errors of the job are findings, not exceptions."""
    processes, tried, *arguments = argv
    finds_needs = tried == "needs"
    steps = 0 if finds_needs else int(tried)
    if steps:  # by one process
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    # As in train.py.
    gc.disable()
    from recipe import paths
    from recipe.tasks.base import Finding
    from recipe.training import preflight

    gc.freeze()
    gc.enable()
    folders = paths.from_environment(os.environ)

    def report(finding: Finding) -> None:
        print(f"amphora-check {json.dumps(dataclasses.asdict(finding))}", flush=True)

    def report_needs(needs: preflight.JobNeeds) -> None:
        print(f"amphora-needs {json.dumps(dataclasses.asdict(needs))}", flush=True)

    preflight.inspect(
        arguments, folders, int(processes), steps, report, report_needs if finds_needs else None
    )


if __name__ == "__main__":
    main(sys.argv[1:])
