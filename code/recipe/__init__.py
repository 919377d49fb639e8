"""What training (`code/train.py`) and serving (`code/inference.py`) share.

docs/ARCHITECTURE.md draws the sub-packages and their floors; import-linter's contracts in
pyproject.toml hold them. The sub-packages' `__init__` are empty, so that serving imports nothing
that only training needs.
"""
