"""The words that the tiny model of tests/conftest.py knows."""

WORDS = ["the", "film", "was", "good", "great", "bad", "awful", "truly", "number", ","]
