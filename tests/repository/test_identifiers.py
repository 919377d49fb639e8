"""Identifiers are nouns and verbs: some words that say nothing about what they hold are refused."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("code", "container", "tests", "benchmarks", "ordeal", "examples")
VAGUE = re.compile(r"_?(of|at|places?|said|told|asked|found|beside|each|own|like)", re.IGNORECASE)
PREPOSITION = re.compile(
    r"_?(about|above|around|at|before|below|beside|between|by|for|in|into|near|of|over|under|without)_"
)
"""Functions do not begin with one; `from_x`, `to_x`, `as_x`, `with_x` and `on_x` are conventional."""


def bound(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the local names, parameters, functions and classes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node, node.id
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, node.name


def wrong_names(source: str) -> list[tuple[int, str]]:
    """Return the line and name of each identifier that has to be renamed."""
    wrong = []
    for node, name in bound(ast.parse(source)):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        is_preposition = is_function and PREPOSITION.match(name)
        if VAGUE.fullmatch(name) or is_preposition:
            wrong.append((getattr(node, "lineno", 0), name))
    return wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_they_hold(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in wrong_names(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_a_wrong_name_is_found() -> None:
    source = "def of_rows(at): return [each for each in at]\nclass Beside: ...\ndef on_save(): ..."
    assert sorted(name for _, name in wrong_names(source)) == ["Beside", "at", "each", "of_rows"]
