"""Stands in for code/check.py, as `train.py` does for code/train.py."""

from train import main

main()
