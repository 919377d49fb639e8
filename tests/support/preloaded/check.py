"""Stands in for code/check.py, as `train.py` does for code/train.py."""

import sys

from train import main

main(sys.argv)
