"""The functions that answer requests: the user's, and the image's own for those that are missing.

`<model>/code/inference.py` (or the file SAGEMAKER_PROGRAM names) may define `model_fn`, and either
`input_fn, predict_fn, output_fn` or `transform_fn`. Everything is found and checked once, before
the model is loaded; whether a function takes `context` is decided then, by its parameters.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from amphora import codecs
from amphora.errors import CodeError, near

NAMES = ("model_fn", "input_fn", "predict_fn", "output_fn", "transform_fn")
_SIGNATURES = {
    "model_fn": ("model_dir",),
    "model_warmup_fn": ("model_dir", "model"),
    "input_fn": ("body", "content_type"),
    "predict_fn": ("data", "model"),
    "output_fn": ("prediction", "accept"),
    "transform_fn": ("model", "body", "content_type", "accept"),
    "tokens_fn": ("data", "model"),
    "predict_batch_fn": ("inputs", "model"),
    "describe_fn": ("model_dir", "model"),
}


@dataclass(frozen=True)
class Handler:
    """One function of a handlers' file, called with or without `context` as it was written."""

    name: str
    function: Callable[..., Any]
    takes_context: bool
    wants_bytes: bool
    """Whether its body parameter is annotated `bytes`: then textual bodies are not decoded."""

    def __call__(self, *args: Any, context: Any) -> Any:
        if self.takes_context:
            return self.function(*args, context)
        return self.function(*args)

    def body(self, body: bytes, content_type: str) -> str | bytes:
        """The body in the form that this function takes."""
        return body if self.wants_bytes else codecs.as_text(body, content_type)


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """What answers a request: the trio, or `transform_fn` alone."""

    model_fn: Handler
    model_warmup_fn: Handler | None
    input_fn: Handler
    predict_fn: Handler
    output_fn: Handler
    transform_fn: Handler | None
    predict_batch_fn: Handler | None
    """Declares that predictions may be merged, and repeated: see `amphora.batching`."""
    tokens_fn: Handler | None
    describe_fn: Handler | None
    """Says what the model is, and which routes of clients' APIs it answers: a JSON object."""
    image_only: bool
    """Whether the image's own trio answers, so that the server knows a request to warm up with."""


def resolve(code_dir: Path, program: str | None, image_code: Path) -> Handlers:
    """Find every function. Raises CodeError where a file, an import or a signature is wrong."""
    user = _user_module(code_dir, program)
    own = {name for name in _SIGNATURES if user is not None and hasattr(user, name)}
    _check_exclusive(user, own)
    needed = (
        {"model_fn"}
        if "transform_fn" in own
        else {"model_fn", "input_fn", "predict_fn", "output_fn"}
    )
    image = None if needed <= own else _image_module(image_code, needed - own)

    def find(name: str) -> Handler | None:
        module = user if name in own else image
        return _handler(module, name) if module is not None and hasattr(module, name) else None

    def find_beside(name: str, companion: str) -> Handler | None:
        # Hooks go with the function that they help: the image's batching knows the image's data.
        alone = "transform_fn" in own and companion == "predict_fn"
        return find(name) if not alone and (name in own or companion not in own) else None

    trio_is_image = not own & {"input_fn", "predict_fn", "output_fn", "transform_fn"}
    nothing = Handler("", _never, False, False)
    return Handlers(
        model_fn=find("model_fn") or nothing,
        model_warmup_fn=find_beside("model_warmup_fn", "model_fn"),
        input_fn=find("input_fn") or nothing,
        predict_fn=find("predict_fn") or nothing,
        output_fn=find("output_fn") or nothing,
        transform_fn=find("transform_fn") if "transform_fn" in own else None,
        predict_batch_fn=find_beside("predict_batch_fn", "predict_fn"),
        tokens_fn=find_beside("tokens_fn", "predict_fn"),
        # The image knows its own model, and which APIs its own functions answer.
        describe_fn=find("describe_fn")
        if "describe_fn" in own or (trio_is_image and "model_fn" not in own)
        else None,
        image_only=trio_is_image,
    )


def _never(*args: Any) -> Any:
    raise AssertionError("transform_fn answers alone")


def _check_exclusive(user: ModuleType | None, own: set[str]) -> None:
    others = sorted(own & {"input_fn", "predict_fn", "output_fn"})
    if user is not None and "transform_fn" in own and others:
        raise CodeError(
            f"{user.__file__} defines transform_fn and also {', '.join(others)}.",
            "transform_fn does the work of all three: keep it, or keep them.",
        )


def _user_module(code_dir: Path, program: str | None) -> ModuleType | None:
    path = code_dir / (program or "inference.py")
    if path.is_file():
        return _load(path, path.stem, code_dir)
    if program:
        names = sorted(entry.name for entry in code_dir.glob("*.py")) if code_dir.is_dir() else []
        there = f"It holds {', '.join(names)}." if names else "It holds no Python file."
        raise CodeError(
            f"SAGEMAKER_PROGRAM is {program!r}, but {code_dir} has no such file. {there}",
            "Name the file that defines the handlers, as a path inside that folder."
            + near(program, names),
        )
    return None


def _image_module(image_code: Path, missing: set[str]) -> ModuleType:
    path = image_code / "inference.py"
    if not path.is_file():
        raise CodeError(
            f"{', '.join(sorted(missing))} must come from the image's handlers,"
            f" but {path} is not there.",
            "Set AMPHORA_CODE_DIR to the folder that has the image's inference.py,"
            " or define every function in the model's code/inference.py.",
        )
    module = _load(path, "amphora_image_inference", image_code)
    if lost := sorted(name for name in missing if not hasattr(module, name)):
        raise CodeError(f"{path} does not define {', '.join(lost)}.", "The image is incomplete.")
    return module


def _load(path: Path, name: str, folder: Path) -> ModuleType:
    """Import a file by its path, with its folder first on sys.path for its own imports."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CodeError(f"{path} is not a Python file.", "Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _import_error(path, error) from error
    return module


def _import_error(path: Path, error: Exception) -> CodeError:
    where = _place(error, path)
    if isinstance(error, ModuleNotFoundError):
        return CodeError(
            f"{path} cannot be imported: it needs the module {error.name!r}, which is not installed"
            f" ({where}).",
            "Add its package to the model's code/requirements.txt, or its file to code/.",
        )
    return CodeError(
        f"{path} cannot be imported: {type(error).__name__}: {error} ({where}).",
        "The fault is inside that code, not in finding it.",
    )


def _place(error: Exception, path: Path) -> str:
    """Where it went wrong: the last frame in the file's folder, since below it lies a library."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(path.parent)]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _handler(module: ModuleType, name: str) -> Handler:
    function = getattr(module, name)
    if not callable(function):
        raise CodeError(f"{module.__file__}: {name} is {function!r}.", "It must be a function.")
    expected = _SIGNATURES[name]
    parameters = list(inspect.signature(function).parameters.values())
    position = expected.index("body") if "body" in expected else None
    return Handler(
        name=name,
        function=function,
        takes_context=_takes_context(module, name, parameters, expected),
        wants_bytes=position is not None
        and len(parameters) > position
        and parameters[position].annotation in (bytes, "bytes"),
    )


def _takes_context(
    module: ModuleType, name: str, parameters: list[inspect.Parameter], expected: tuple[str, ...]
) -> bool:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return len(required) > len(expected)
    extra = len(positional) - len(expected)
    if extra < 0 or len(required) > len(expected) + 1:
        names = ", ".join(expected)
        raise CodeError(
            f"{module.__file__}: {name} takes {len(positional)} arguments.",
            f"Write `def {name}({names})` or `def {name}({names}, context)`.",
        )
    return extra >= 1 and (
        len(required) == len(expected) + 1 or positional[len(expected)].name == "context"
    )
