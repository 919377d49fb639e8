"""Fine-tune a model for the task that `--task` names on the channels of a training job.

    SM_CHANNEL_TRAIN=data/train SM_CHANNEL_TEST=data/test SM_MODEL_DIR=model \\
        python code/train.py --model_name_or_path path/to/model --epochs 1

For several processes, replace `python` by `torchrun --nproc_per_node 2`.
On SIGTERM, the script ends its step, saves a checkpoint and exits with code 75. Started again, it
resumes from the newest intact checkpoint and ends with the weights of an uninterrupted run.
`--help` lists the hyperparameters, `--help NAME` explains one. Without SM_* variables, the /opt/ml
tree is used.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys


def main(argv: list[str]) -> None:
    """Train with the hyperparameters in `argv`; exit with the message of a RecipeError."""
    # Imports create no garbage, and collecting takes a quarter of their time.
    gc.disable()
    from recipe import arguments, errors, paths

    if argv[:1] == ["--help"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `--help | head`
        try:
            print(arguments.describe(*argv[1:2]))
        except errors.RecipeError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        return
    from recipe.training import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    gc.freeze()
    gc.enable()
    try:
        folders = paths.from_environment(os.environ)
        run.run(arguments.parse(argv, folders), folders, os.environ)
    except errors.RecipeError as error:
        if sys.excepthook is not sys.__excepthook__:  # a supervisor's hook, which logs the error
            raise
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
