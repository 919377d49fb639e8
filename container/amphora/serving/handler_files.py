"""Finds the file of a code folder that has the user's handlers."""

from __future__ import annotations

import re
from pathlib import Path

HANDLER_SERVICE = "handler_service.py"
"""A file for AWS's model servers, which is refused."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A module's name."""


def program_path(code_dir: Path, program: str) -> Path | None:
    """Return the file that SAGEMAKER_PROGRAM names below a folder: a path, or a dotted module."""
    places = [program, f"{program}.py"]
    if DOTTED.fullmatch(program):
        dotted = program.replace(".", "/")
        places += [f"{dotted}.py", f"{dotted}/__init__.py"]
    return next((code_dir / place for place in places if (code_dir / place).is_file()), None)


def has_handlers(code_dir: Path, program: str | None) -> bool:
    """Return whether a folder has the user's handlers: the program, or a handler service.

    Args:
        code_dir: The folder, which need not exist.
        program: SAGEMAKER_PROGRAM; None means inference.py.
    """
    service = code_dir / HANDLER_SERVICE
    return service.is_file() or program_path(code_dir, program or "inference") is not None


def inner_folder(folder: Path, program: str | None) -> Path:
    """Return the folder code/ of an unpacked model archive; other folders unchanged."""
    inner = folder / "code"
    is_archive = has_handlers(inner, program) and not has_handlers(folder, program)
    return inner if is_archive else folder
