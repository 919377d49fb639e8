"""The directive `messages`: the errors that code raises, each with its remedy, under its class.

The files are parsed and not imported. A message is a title, by which the search finds it
(static/search.js).
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

_ROOT = Path(__file__).parents[2]
_ROOTS = {"RecipeError", "AmphoraError"}
_ANSWERS = "Answers to requests, and parts of messages"
_UNKNOWN = "…"
_WORD = re.compile(r"\w+")
_LEAST_WORDS = 3
_Message = tuple[str, str, str]
"""A class or `_ANSWERS`, what is wrong, and the remedy or ""."""


class Messages(SphinxDirective):
    """`.. messages:: code/recipe container/amphora`: a section for each class of errors."""

    required_arguments, optional_arguments = 1, 9

    def run(self) -> list[nodes.Node]:
        """The sections."""
        self.env.note_dependency(__file__)
        trees = {}
        for folder in self.arguments:
            for path in sorted((_ROOT / folder).rglob("*.py")):
                trees[path] = ast.parse(path.read_text(encoding="utf-8"))
                self.env.note_dependency(str(path))
        of_classes: dict[str, dict[str, str]] = {}
        reader = _Reader(list(trees.values()))
        for kind, problem, remedy in reader.messages():
            of_classes.setdefault(kind, {}).setdefault(problem, remedy)
        return [
            self._section(kind, reader.classes.get(kind, ""), of_classes[kind])
            for kind in sorted(of_classes, key=lambda kind: (kind == _ANSWERS, kind))
        ]

    def _section(self, kind: str, about: str, messages: dict[str, str]) -> nodes.section:
        section = nodes.section("", nodes.title("", kind), ids=[nodes.make_id(kind)])
        section += [nodes.paragraph("", "", *_inline(about))] if about else []
        ids: list[str] = []
        for problem, remedy in sorted(
            messages.items(), key=lambda item: item[0].strip("…`:,. ").lower()
        ):
            words = nodes.make_id(" ".join([kind, *_WORD.findall(problem)[:9]]))
            number = next(number for number in itertools.count(1) if f"{words}-{number}" not in ids)
            ids.append(f"{words}-{number}")
            # Not a section, of which each page's navigation would have hundreds to leave out.
            shown = problem.removesuffix(".") if problem.endswith("….") else problem
            message = nodes.topic("", nodes.title("", "", *_inline(shown)))
            message["ids"] = ids[-1:]
            message += nodes.paragraph("", "", *_inline(remedy))
            section += message
        return section


class _Reader:
    """Finds the messages of modules."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self._modules = [list(ast.walk(tree)) for tree in trees]
        every = [node for module in self._modules for node in module]
        self._constants = _texts_by_name(every, lambda name: name.isupper())
        self.classes: dict[str, str] = {}
        """The first line of the docstring of each class of errors."""
        classes = [node for node in every if isinstance(node, ast.ClassDef)]
        before = -1
        while before != len(self.classes):
            before = len(self.classes)
            for node in classes:
                if {*self.classes, *_ROOTS} & {node.name, *map(ast.unparse, node.bases)}:
                    self.classes[node.name] = (ast.get_docstring(node) or "").partition("\n")[0]

    def messages(self) -> Iterator[_Message]:
        """Yield each message: of an error that is made or raised, or that a check yields."""
        for module in self._modules:
            texts = {**self._constants, **_texts_by_name(module, str.islower)}
            raised = {id(node.exc) for node in module if isinstance(node, ast.Raise)}
            for node in module:
                if isinstance(node, ast.Yield) and node.value is not None:
                    problem, end, remedy = _text(node.value, texts).partition(". ")
                    if end:
                        yield "HyperparameterError", f"{problem}.", remedy
                elif isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    is_error = name in self.classes
                    if is_error or (id(node) in raised and not hasattr(builtins, name)):
                        shown = [_text(argument, texts) for argument in node.args]
                        shown = [text for text in shown if len(_WORD.findall(text)) >= _LEAST_WORDS]
                        if shown:
                            kind = name if is_error else _ANSWERS
                            yield kind, shown[0], " ".join(shown[1:2])


def _texts_by_name(
    tree_nodes: list[ast.AST], is_wanted: Callable[[str], bool]
) -> dict[str, ast.expr]:
    """Return the texts to which names are assigned once."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in tree_nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and is_wanted(target.id):
                    assigned.setdefault(target.id, []).append(node.value)
    return {
        name: values[0]
        for name, values in assigned.items()
        if len(values) == 1 and _text(values[0], {}) != _UNKNOWN
    }


def _text(node: ast.AST, texts: Mapping[str, ast.expr]) -> str:
    """Return a text with `…` for what is known only when it is written."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{row}", _UNKNOWN)
    if isinstance(node, ast.JoinedStr):
        joined = "".join(_text(part, texts) for part in node.values)
        return " ".join(re.sub("…+", _UNKNOWN, joined).split())
    if isinstance(node, ast.FormattedValue) and node.conversion == -1:
        return _text(node.value, texts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, texts) + _text(node.right, texts)
    if isinstance(node, ast.Name) and node.id in texts:
        return _text(texts[node.id], {})
    return _UNKNOWN


def _inline(text: str) -> Iterator[nodes.Node]:
    """Yield the text, with code for what stands between backticks."""
    for number, part in enumerate(re.split(r"`([^`]*)`", text)):
        if part:
            yield nodes.literal(part, part) if number % 2 else nodes.Text(part)


def _index_quotes(app: Sphinx, tree: nodes.document) -> None:
    """Let the search find what begins an item of TROUBLESHOOTING: a quoted message."""
    if app.env.docname != "TROUBLESHOOTING":
        return
    for item in tree.findall(nodes.list_item):
        quote = next(iter(item.findall(nodes.literal))).astext()
        item["ids"] = [nodes.make_id(quote)]
        entry = (
            "single",
            quote.replace("...", _UNKNOWN).replace(";", ","),
            item["ids"][0],
            "",
            None,
        )
        item.insert(0, addnodes.index(entries=[entry]))


def setup(app: Sphinx) -> ExtensionMetadata:
    """Called by Sphinx."""
    app.add_directive("messages", Messages)
    app.connect("doctree-read", _index_quotes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
