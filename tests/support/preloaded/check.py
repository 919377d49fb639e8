"""Stands in for code/check.py, as `train` does for code/train.py."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
