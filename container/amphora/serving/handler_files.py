"""Finds the file that has the user's handlers, and code that no server of ours would call."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HANDLER_SERVICE = "handler_service.py"
"""A file for AWS's model servers, which is refused."""
ENDPOINT_PROGRAM, ENDPOINT_HANDLER = "handler.py", "EndpointHandler"
"""The file and the class of Hugging Face's Inference Endpoints."""
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A module's name."""


def program_path(code_dir: Path, program: str) -> Path | None:
    """Return the file that SAGEMAKER_PROGRAM names below a folder: a path, or a dotted module."""
    names = [program, f"{program}.py"]
    if DOTTED.fullmatch(program):
        dotted = program.replace(".", "/")
        names += [f"{dotted}.py", f"{dotted}/__init__.py"]
    return next((code_dir / name for name in names if (code_dir / name).is_file()), None)


def handlers_path(code_dir: Path, program: str | None) -> Path | None:
    """Return the file of the user's handlers: SAGEMAKER_PROGRAM, else inference.py or handler.py.

    The folder need not exist.
    """
    if program:
        return program_path(code_dir, program)
    return program_path(code_dir, "inference") or program_path(code_dir, ENDPOINT_PROGRAM)


def has_handlers(code_dir: Path, program: str | None) -> bool:
    """Return whether a folder has the user's handlers, or a handler service."""
    return (code_dir / HANDLER_SERVICE).is_file() or handlers_path(code_dir, program) is not None


def code_folder(model_dir: Path, program: str | None) -> Path:
    """Return the folder of a model's code: code/, or the model's own if handler.py is there."""
    code = model_dir / "code"
    is_endpoint = program in (None, ENDPOINT_PROGRAM) and (model_dir / ENDPOINT_PROGRAM).is_file()
    return model_dir if is_endpoint and not has_handlers(code, program) else code


def inner_folder(folder: Path, program: str | None) -> Path:
    """Return the folder code/ of an unpacked model archive; other folders unchanged."""
    inner = folder / "code"
    is_archive = has_handlers(inner, program) and not has_handlers(folder, program)
    return inner if is_archive else folder


def unused_names(path: Path) -> list[str]:
    """Return the public names that a file defines, imports or assigns, and does not use itself,
    except as a program. Decorated classes are used by their decorators."""
    try:
        content = path.read_bytes()
        tree = ast.parse(content)
    except (OSError, ValueError):
        return []
    except SyntaxError:  # If the file is not imported, nothing else reports it.
        return re.findall(
            r"(?m)^(?:async def|def|class) +(\w+)", content.decode("utf-8", "replace")
        )
    body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))
    ]
    nodes = [node for part in body for node in ast.walk(part)]
    names_in_use = (node for node in nodes if isinstance(node, ast.Name))
    used = {node.id for node in names_in_use if isinstance(node.ctx, ast.Load)}
    names = [
        node.name
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.ClassDef) and not node.decorator_list)
    ]
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in used]
