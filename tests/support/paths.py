"""Where this checkout and its code lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "code"
