"""Stands in for the model workers of a server that has this folder on PYTHONPATH, as `train.py` does
for code/train.py."""

import sys

if sys.orig_argv[1:3] == ["-m", "amphora.serving.worker.main"]:
    from train import main

    main(["worker"], [int(sys.orig_argv[3])], sys.orig_argv[2])
