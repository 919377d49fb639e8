"""Identifiers are nouns and verbs: some words that say nothing about what they hold are refused."""

import re
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

VAGUE = re.compile(r"_?(of|at|places?|said|told|asked|found|beside|each|own|like)", re.IGNORECASE)
PREPOSITION = re.compile(
    r"_?(about|above|around|at|before|below|beside|between|by|for|in|into|near|of|over|under|without)_"
)
"""Functions do not begin with one; `from_x`, `to_x`, `as_x`, `with_x` and `on_x` are conventional."""


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield a module's scope, and those of its functions and classes."""
    yield table
    for child in table.get_children():
        yield from scopes(child)


def wrong_names(source: str) -> list[tuple[int, str]]:
    """Return the line of its scope and the name of each identifier that has to be renamed: a local
    name, a parameter, a function or a class."""
    wrong = []
    for scope in scopes(symtable.symtable(source, "a module", "exec")):
        names = [name for name in scope.get_identifiers() if VAGUE.fullmatch(name)]
        symbols = map(scope.lookup, names)
        bound = [item.get_name() for item in symbols if item.is_assigned() or item.is_parameter()]
        is_function = scope.get_type() == "function"
        if is_function and PREPOSITION.match(scope.get_name()):
            bound.append(scope.get_name())
        wrong += [(scope.get_lineno(), name) for name in bound]
    return wrong


@pytest.mark.parametrize(
    "folder", ("code", "container", "tests", "benchmarks", "ordeal", "examples")
)
def test_names_say_what_they_hold(folder: str) -> None:
    root = Path(__file__).parents[2]
    wrong = [
        f"{path.relative_to(root)}, scope of line {line}: {name}"
        for path in sorted((root / folder).rglob("*.py"))
        for line, name in wrong_names(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_a_wrong_name_is_found() -> None:
    source = "def of_rows(at): return [each for each in at]\nclass Beside: ...\ndef on_save(): ..."
    assert sorted(name for _, name in wrong_names(source)) == ["Beside", "at", "each", "of_rows"]
