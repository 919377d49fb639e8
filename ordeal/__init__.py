"""The ordeal: campaigns that break the product on purpose. `python -m ordeal --help`."""
