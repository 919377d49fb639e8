"""Reads vLLM's source without importing it, which takes ten seconds: the architectures that it
generates text with, and the arguments of `vllm serve`."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path

_REGISTRY, _LIST = "model_executor/models/registry.py", "_TEXT_GENERATION_MODELS"
_ARGUMENTS = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
_COLLECTIONS = {"list", "List", "tuple", "Tuple", "set", "Set", "Sequence"}


class ArgumentKind(Enum):
    """What follows an argument of `vllm serve`."""

    FLAG = "nothing, and --no- turns it off"
    SWITCH = "nothing"
    OPTIONAL = "one word or none"
    LIST = "one word or several"
    VALUE = "one word"


def find_package() -> Path | None:
    """Return vLLM's folder; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or not spec.origin else Path(spec.origin).parent


def read_architectures(package: Path) -> set[str]:
    """Return the architectures that vLLM lists as models that generate text."""
    listed: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError):
        for node in ast.parse((package / _REGISTRY).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _LIST:
                keys = getattr(node.value, "keys", ())
                listed |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return listed


def read_arguments(package: Path) -> Mapping[str, ArgumentKind]:
    """Return the arguments of `vllm serve` without `--`; empty if they were not found.

    vLLM makes most of them from the types of dataclass fields (`get_kwargs` of arg_utils.py), and
    declares others by `add_argument`.
    """
    kinds: dict[str, ArgumentKind] = {}
    declared: dict[str, ArgumentKind | None] = {}
    for path in (path for pattern in _ARGUMENTS for path in package.glob(pattern)):
        with contextlib.suppress(OSError, SyntaxError):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                    for field in node.body:
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                            name = field.target.id.replace("_", "-")
                            kinds[name] = _kind_by_type({*_types(field.annotation)})
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                    declared |= dict.fromkeys(_long_names(node), _declared_kind(node))
    return {
        **kinds,
        **{name: kind or kinds.get(name, ArgumentKind.VALUE) for name, kind in declared.items()},
    }


def _types(annotation: ast.expr) -> Iterator[str]:
    """Yield the names of the types that an annotation allows."""
    if isinstance(annotation, ast.BinOp):
        yield from _types(annotation.left)
        yield from _types(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value).rpartition(".")[2]
        inner = annotation.slice
        members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name in ("Optional", "Union", "Annotated"):
            for member in members[:1] if name == "Annotated" else members:
                yield from _types(member)
        else:
            yield name
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from _types(ast.parse(annotation.value, mode="eval").body)
    else:
        yield ast.unparse(annotation).rpartition(".")[2]


def _kind_by_type(types: set[str]) -> ArgumentKind:
    if "bool" in types:
        return ArgumentKind.OPTIONAL if "str" in types else ArgumentKind.FLAG
    return ArgumentKind.LIST if types & _COLLECTIONS else ArgumentKind.VALUE


def _long_names(call: ast.Call) -> Iterator[str]:
    for word in call.args:
        if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
            yield str(word.value).removeprefix("--")


def _declared_kind(call: ast.Call) -> ArgumentKind | None:
    """Return the kind that a call of `add_argument` gives; None if a field's type does."""
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if "BooleanOptionalAction" in given.get("action", ""):
        return ArgumentKind.FLAG
    if given.get("action", "").strip("'\"").startswith("store_"):
        return ArgumentKind.SWITCH
    if nargs := given.get("nargs", "").strip("'\""):
        return ArgumentKind.OPTIONAL if nargs == "?" else ArgumentKind.LIST
    return None if None in given else ArgumentKind.VALUE
