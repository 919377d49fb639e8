"""The directive `docstrings`: what the public parts of a package say of themselves.

The files are parsed and not imported, since importing them takes torch and seconds; Sphinx's own
autodoc imports, and AutoAPI infers through all that a module imports, which took minutes here.
What has no docstring, and what begins with an underscore, is left out.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles
from sphinx.util.typing import ExtensionMetadata

_ROOT = Path(__file__).parents[2]
_LEFT_OUT = {"hook", "__main__"}
_CODE = re.compile(r"(``.*?``|`[^`]*`)", re.DOTALL)
# What reST would take for marks of its own: docstrings here are plain text with code in backticks.
_MARKS = re.compile(r"[*|]|(?<=\w)_(?!\w)")
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Docstrings(SphinxDirective):
    """`.. docstrings:: code/recipe`: a section for each module of a package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The sections."""
        package = _ROOT / self.arguments[0]
        lines = StringList()
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            if _LEFT_OUT & set(parts) or any(part.startswith("_") for part in parts[:-1]):
                continue
            name = ".".join(part for part in parts if part != "__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.env.note_dependency(str(path))
            if ast.get_docstring(tree) or any(_public(tree)):
                for line in self._module(name, tree):
                    lines.append(line, str(path))
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, lines, section)
        return section.children

    def _module(self, name: str, tree: ast.Module) -> Iterator[str]:
        yield from (name, "-" * len(name), "", *self._text(tree), "")
        for node in _public(tree):
            yield from self._member(node, "")

    def _member(self, node: _Documented, indent: str) -> Iterator[str]:
        inner = f"{indent}   "
        # Not Python's own domain: it would link each type to whatever class has that name.
        if isinstance(node, ast.ClassDef):
            yield f"{indent}.. describe:: class {node.name}"
        else:
            marks = {
                decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)
            }
            is_property = bool(marks & {"property", "cached_property"})
            arguments = "" if is_property else f"({ast.unparse(node.args)})"
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield f"{indent}.. describe:: {node.name}{arguments}{returns}"
        yield ""
        yield from (f"{inner}{line}" for line in self._text(node))
        yield ""
        if isinstance(node, ast.ClassDef):
            for field, docstring in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and _is_text(docstring):
                    yield from (f"{inner}.. describe:: {ast.unparse(field.target)}", "")
                    yield from (f"{inner}   {line}" for line in self._lines(docstring.value.value))
                    yield ""
            for member in _public(node):
                yield from self._member(member, inner)

    def _text(self, node: _Documented | ast.Module) -> list[str]:
        return self._lines(ast.get_docstring(node) or "")

    def _lines(self, text: str) -> list[str]:
        pieces = _CODE.split(text)
        pieces[::2] = [_MARKS.sub(lambda mark: f"\\{mark[0]}", piece) for piece in pieces[::2]]
        lines = GoogleDocstring(inspect.cleandoc("".join(pieces)), self.config).lines()
        return [line.replace("** -- ", "**: ") for line in lines]


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[_Documented]:
    """What stands in it with a docstring, once for each name."""
    seen = set()
    for node in tree.body:
        if isinstance(node, _Documented) and node.name not in seen and ast.get_docstring(node):
            seen.add(node.name)
            if not node.name.startswith("_"):
                yield node


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    """Called by Sphinx."""
    app.add_directive("docstrings", Docstrings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
