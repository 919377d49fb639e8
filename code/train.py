"""Fine-tune a model for the task that `--task` names on the channels of a training job.

    SM_CHANNEL_TRAIN=data/train SM_CHANNEL_TEST=data/test SM_MODEL_DIR=model \\
        python code/train.py --model_name_or_path path/to/model --epochs 1

Several processes: the same command with `torchrun --nproc_per_node 2` for `python`.
Stopped by SIGTERM, it ends its step, saves, and leaves with exit code 75; started again, it goes on
from the newest whole checkpoint and ends with the weights of a run that was never stopped.
`--help` lists the hyperparameters. Without SM_* variables, the /opt/ml tree is used.
"""

from __future__ import annotations

import gc
import os
import sys


def main(argv: list[str]) -> None:
    """Train as `argv` says; an error is raised, with a message for the job's owner."""
    # Imports leave nothing to collect, and looking for it takes a quarter of their time.
    gc.disable()
    from recipe import arguments, errors, paths
    from recipe.training import run

    gc.freeze()
    gc.enable()
    if "--help" in argv:
        print(f"{__doc__}\n{arguments.describe()}")
        return
    places = paths.from_environment(os.environ)
    try:
        run.run(arguments.parse(argv, places), places, os.environ)
    except errors.RecipeError as error:
        if sys.excepthook is not sys.__excepthook__:  # that of a supervisor, which logs it
            raise
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
