"""Finds the functions that answer requests: the user's, and defaults for those that are missing.

`<model>/code/inference.py` (or the file SAGEMAKER_PROGRAM names) may define any of `model_fn`,
`input_fn`, `predict_fn`, `output_fn`, or `transform_fn` for the last three; or a `handler.py` the
class `EndpointHandler` of Hugging Face's Inference Endpoints. If there is neither, the image's own
handlers (`code/inference.py`) answer. If it defines some, those that are missing come from
`code/defaults.py`, which behaves like the image that the file was written for: most of these
functions depend on the loaded model, so `Handlers.completed` adds them later.

The user's functions are looked up and checked once, before the model is loaded; a function's
parameters then also decide whether it takes `context`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from amphora.common.errors import CodeError
from amphora.serving import handler_files
from amphora.serving.handler_files import ENDPOINT_HANDLER, HANDLER_SERVICE
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import Fault
from amphora.serving.worker import modules

LOG = logging.getLogger("amphora.worker")
_TRIO = frozenset({"input_fn", "predict_fn", "output_fn"})
_SIGNATURES = {
    "pre_model_fn": ("model_dir",),
    "model_fn": ("model_dir",),
    "model_warmup_fn": ("model_dir", "model"),
    "input_fn": ("body", "content_type"),
    "predict_fn": ("data", "model"),
    "output_fn": ("prediction", "accept"),
    "transform_fn": ("model", "body", "content_type", "accept"),
    "tokens_fn": ("data", "model"),
    "predict_batch_fn": ("inputs", "model"),
    "turns_fn": ("model", "pause"),
    "describe_fn": ("model_dir", "model"),
}
# A file that defines only these leaves models and requests to the image's handlers.
_COMPANIONS = {"pre_model_fn", "tokens_fn", "turns_fn"}
# The image's own inference.py does not define these.
_IMAGE_COMPANIONS = {"pre_model_fn", "transform_fn"}
# Names of files, in lower case, with which other images answer requests.
_SERVERS = {"serve", "server", "app", "predict", "predictor", "inference", "handler"}
_DEFAULTS = "the image's defaults"
# How names of handlers are misspelled: inputfn, predict_func, outputFunction.
_ENDING = re.compile(r"(?:fun|func|function)$")
_PLAIN_NAMES = {name.replace("_", ""): name for name in _SIGNATURES}
# Functions that other servers call, and their equivalents here.
_OTHERS = {
    "loadmodel": "model_fn", "initialize": "model_fn", "predict": "predict_fn",
    "inference": "predict_fn", "infer": "predict_fn", "preprocess": "input_fn",
    "inputhandler": "input_fn", "postprocess": "output_fn", "outputhandler": "output_fn",
    "handler": "transform_fn", "lambdahandler": "transform_fn",
}  # fmt: skip


class Defaults(Protocol):
    """What `code/defaults.py` provides for one file."""

    def model_fn(self, model_dir: str) -> Any:
        """Load the model if the file has no model_fn."""

    def complete(self, model: Any, model_dir: str) -> Mapping[str, Callable[..., Any]]:
        """Return the missing functions by their names, for the loaded model."""

    def advice(self, model: Any, model_dir: str) -> str:
        """Return a likely cause of an error in the file's predict_fn, or ""."""


@dataclass(frozen=True)
class Handler:
    """One function of a handlers' file, called with or without `context` as it was written."""

    name: str
    function: Callable[..., Any]
    takes_context: bool
    body_type: type[str] | type[bytes] | None = None
    """The annotation of its body parameter, if that is `str` or `bytes`."""
    advice: str = ""
    """The likely cause of an error that it raises."""

    @classmethod
    def from_function(cls, file: str, name: str, function: Any) -> Handler:
        """Check a function of a file. Raises CodeError if it cannot serve as this handler."""
        if not callable(function):
            raise CodeError(f"{file}: {name} is {function!r}.", "It must be a function.")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise CodeError(f"{file}: {name} is written with `async def`.", "Write it with `def`.")
        expected = _SIGNATURES[name]
        parameters = list(inspect.signature(function).parameters.values())
        body_place = expected.index("body") if "body" in expected else len(parameters)
        body_type: type[str] | type[bytes] | None = None
        if body_place < len(parameters):
            annotation = parameters[body_place].annotation
            if annotation in (str, "str"):
                body_type = str
            elif annotation in (bytes, "bytes"):
                body_type = bytes
        takes_context = _takes_context(file, name, parameters, expected)
        return cls(name, function, takes_context, body_type)

    def __call__(self, *args: Any, context: Any) -> Any:
        if self.takes_context:
            return self.function(*args, context)
        return self.function(*args)

    def body(self, body: bytes, content_type: str) -> str | bytes | bytearray:
        """Return the body in the form that this function takes.

        As in AWS's toolkits that is text for JSON and CSV, and a bytearray for other types. An
        annotation changes it: `bytes` gives bytes, `str` gives text for every textual type.
        """
        if self.body_type is bytes:
            return body
        if self.body_type is str or media_types.media_type(content_type) in media_types.DECODED:
            text = media_types.as_text(body, content_type)
            return text if isinstance(text, str) else bytearray(text)
        return bytearray(body)


@dataclass(frozen=True, kw_only=True)
class Handlers:
    """The functions that answer a request: the trio, or `transform_fn` alone."""

    model_fn: Handler
    pre_model_fn: Handler | None = None
    model_warmup_fn: Handler | None = None
    input_fn: Handler | None = None
    predict_fn: Handler | None = None
    output_fn: Handler | None = None
    transform_fn: Handler | None = None
    predict_batch_fn: Handler | None = None
    """Declares that predictions may be merged, and repeated: see `protocol.batching`."""
    tokens_fn: Handler | None = None
    turns_fn: Handler | None = None
    """Declares that predictions of several requests may take turns at `pause()`: see
    `worker.job_threads`."""
    describe_fn: Handler | None = None
    """Describes the model and the routes of clients' APIs that it answers, as a JSON object."""
    image_only: bool = False
    """Whether the image's own trio answers, so that the server knows a request to warm up with."""
    defaults: Defaults | None = None
    """Provides the missing functions once the model is loaded."""

    def function(self, name: str) -> Handler:
        """Return a function that the handlers define or `completed` has added."""
        handler = getattr(self, name)
        assert isinstance(handler, Handler)
        return handler

    def completed(self, model: Any, model_dir: str) -> Handlers:
        """Return these handlers with the missing functions, for a loaded model."""
        if self.defaults is None:
            return self
        functions = self.defaults.complete(model, model_dir)
        added: dict[str, Any] = {
            name: Handler.from_function(_DEFAULTS, name, function)
            for name, function in functions.items()
            if getattr(self, name) is None
        }
        if self.predict_fn is not None:
            advice = self.defaults.advice(model, model_dir)
            added["predict_fn"] = replace(self.predict_fn, advice=advice)
        return replace(self, defaults=None, **added)


def resolve(
    code_dir: Path, program: str | None, image_code: Path, model_dir: Path | None = None
) -> Handlers:
    """Find every function that can be known before the model is.

    Args:
        code_dir: The user's code folder; it need not exist.
        program: SAGEMAKER_PROGRAM; None means inference.py, if it is there.
        image_code: The folder with the image's inference.py and defaults.py.
        model_dir: The model's folder, which the defaults look at if the user has no code.

    Raises:
        CodeError: A file, an import or a signature is wrong.
    """
    modules.add_image(image_code)
    user = modules.user_module(code_dir, program)
    file = str(getattr(user, "__file__", ""))
    defined = {name for name in _SIGNATURES if getattr(user, name, None) is not None}
    _refuse_service(code_dir / HANDLER_SERVICE, None if defined else user)
    endpoint = None if defined - _COMPANIONS else getattr(user, ENDPOINT_HANDLER, None)
    if user is None:
        _refuse_idle_files(code_dir, model_dir)
    elif endpoint is None:
        _refuse_other_names(user, defined)
    others = sorted(defined & {*_TRIO, "predict_batch_fn"})
    if "transform_fn" in defined and others:
        raise CodeError(
            f"{file} defines transform_fn and also {', '.join(others)}.",
            "transform_fn replaces input_fn, predict_fn and output_fn: keep either it or them.",
        )
    for name in ("tokens_fn", "turns_fn"):
        if name in defined and "predict_batch_fn" not in defined:
            LOG.warning("%s defines %s without predict_batch_fn: it is not called.", file, name)
            defined.discard(name)
    functions: dict[str, Any] = {
        name: Handler.from_function(file, name, getattr(user, name)) for name in defined
    }
    if endpoint is not None:
        functions |= _endpoint_functions(file, endpoint)
    elif not defined - _COMPANIONS:
        if user is not None:
            LOG.info("%s defines no handler: the image's own handlers serve.", file)
        return _image_handlers(image_code, functions.get("pre_model_fn"), model_dir)
    LOG.info("%s defines %s.", file, ", ".join(name for name in _SIGNATURES if name in defined))
    if "predict_batch_fn" in functions and "predict_fn" not in functions:
        functions["predict_fn"] = _one_by_one(functions["predict_batch_fn"])
    needed = {"model_fn"} if "transform_fn" in functions else {"model_fn", *_TRIO}
    defaults = None
    if missing := needed - set(functions):
        path = image_code / "defaults.py"
        if not path.is_file():
            raise _no_image(path, missing)
        image_defaults = modules.load_image(image_code, "defaults")
        defaults = image_defaults.select_defaults(frozenset(functions), file)
        if "model_fn" in missing:
            functions["model_fn"] = Handler.from_function(_DEFAULTS, "model_fn", defaults.model_fn)
    return Handlers(**functions, defaults=defaults)


def _endpoint_functions(file: str, kind: Any) -> dict[str, Handler]:
    """Return the functions of a class of Hugging Face's Inference Endpoints: `__init__(path)`, and
    `__call__(data)` of a request's JSON object."""
    if not inspect.isclass(kind) or inspect.iscoroutinefunction(kind.__call__):
        raise CodeError(
            f"{file}: {ENDPOINT_HANDLER} is {kind!r}.",
            "Write a class with `def __init__(self, path)` and `def __call__(self, data)`.",
        )

    def predict(data: Any, model: Any) -> Any:
        if not isinstance(data, Mapping):
            raise Fault(400, "bad_request", 'Send an object, such as {"inputs": "a text"}.')
        return model(data)

    return {
        "model_fn": Handler("model_fn", kind, takes_context=False),
        "predict_fn": Handler("predict_fn", predict, takes_context=False),
    }


def _refuse_other_names(user: ModuleType, defined: set[str]) -> None:
    """Raise CodeError if the user's module defines what only other servers call."""
    path = Path(user.__file__ or "")
    unused = handler_files.unused_names(path) if path.suffix == ".py" else []
    renamed = {}
    for name, value in vars(user).items():
        plain = name.replace("_", "").lower()
        meant = _PLAIN_NAMES.get(_ENDING.sub("fn", plain))
        meant = meant or (_OTHERS.get(plain) if name in unused else None)
        if meant is None or not inspect.isroutine(value) or defined & {"transform_fn", meant}:
            continue
        if plain in _OTHERS and "predict_fn" in defined:
            # Whoever writes predict_fn knows our names.
            LOG.warning("%s defines %s, which is not called: %s is.", path, name, meant)
        else:
            renamed[name] = meant
    if renamed:
        remedy = ", ".join(f"{name} to {meant}" for name, meant in renamed.items())
        raise CodeError(
            f"{path} defines {', '.join(renamed)}, which the server does not call.",
            f"Rename {remedy}, or remove it.",
        )
    values = ((name, vars(user).get(name)) for name in unused)
    local = [name for name, value in values if getattr(value, "__module__", "") == user.__name__]
    if local and not defined - _COMPANIONS:
        raise CodeError(
            f"{path} defines {', '.join(local)}, and no function that the server calls.",
            f"Define model_fn, input_fn, predict_fn, output_fn or a class {ENDPOINT_HANDLER}; or "
            "remove the file to use the image's own handlers.",
        )


def _refuse_idle_files(code_dir: Path, model_dir: Path | None) -> None:
    """Raise CodeError if handlers are in a file that is not run."""
    names = {*_SIGNATURES, "predict", "load_model", "handle", ENDPOINT_HANDLER}
    paths = sorted(code_dir.glob("*.py"))
    for path in [*paths, *([model_dir / "inference.py"] if model_dir is not None else [])]:
        defined = [name for name in handler_files.unused_names(path) if name in names]
        if defined or (path in paths and path.stem.lower() in _SERVERS):
            what = f", which defines {', '.join(defined)}," if defined else ""
            raise CodeError(
                f"{path}{what} is not run.",
                f"Name it {code_dir / 'inference.py'}, set SAGEMAKER_PROGRAM to {path.name!r}, "
                "or remove it to use the image's own handlers.",
            )


def _refuse_service(path: Path, user: ModuleType | None) -> None:
    """Raise CodeError if the user's code is a handler service of AWS's model servers."""
    files = [path] if path.is_file() else []
    if user is not None:
        kinds = [kind for kind in vars(user).values() if inspect.isclass(kind)]
        local_kinds = [kind for kind in kinds if kind.__module__ == user.__name__]
        if any(callable(getattr(value, "handle", None)) for value in (user, *local_kinds)):
            files.append(Path(user.__file__ or ""))
    if files:
        raise CodeError(
            f"{files[0]} is a handler service (handle(data, context)), which this server does not"
            " run.",
            "Define model_fn and transform_fn, or input_fn, predict_fn and output_fn, in"
            " inference.py.",
        )


def _image_handlers(
    image_code: Path, pre_model_fn: Handler | None, model_dir: Path | None
) -> Handlers:
    """Return the image's handlers, or its defaults if only they can load the folder."""
    if model_dir is not None and (image_code / "defaults.py").is_file():
        defaults = modules.load_image(image_code, "defaults")
        if defaults.leads(str(model_dir)):
            return Handlers(
                pre_model_fn=pre_model_fn,
                model_fn=Handler.from_function(_DEFAULTS, "model_fn", defaults.load_torchscript),
                defaults=defaults.select_defaults(frozenset(), ""),
            )
    path = image_code / "inference.py"
    needed = {"model_fn", *_TRIO}
    if not path.is_file():
        raise _no_image(path, needed)
    module = modules.load_image(image_code, "inference")
    if missing := sorted(name for name in needed if not hasattr(module, name)):
        raise CodeError(f"{path} does not define {', '.join(missing)}.", "The image is incomplete.")
    names = [
        name for name in _SIGNATURES if hasattr(module, name) and name not in _IMAGE_COMPANIONS
    ]
    functions: dict[str, Any] = {
        name: Handler.from_function(str(path), name, getattr(module, name)) for name in names
    }
    return Handlers(**functions, pre_model_fn=pre_model_fn, image_only=True)


def _no_image(path: Path, missing: set[str]) -> CodeError:
    return CodeError(
        f"{', '.join(sorted(missing))} must come from the image, but {path} is not there.",
        "Set AMPHORA_CODE_DIR to the folder that has the image's inference.py and defaults.py,"
        " or define every function in the model's code/inference.py.",
    )


def _one_by_one(batch: Handler) -> Handler:
    """Return a `predict_fn` for a file that has only `predict_batch_fn`."""

    def predict(data: Any, model: Any, context: Any) -> Any:
        (prediction,) = batch([data], model, context=context)
        if isinstance(prediction, Exception):
            raise prediction
        return prediction

    return Handler("predict_batch_fn", predict, takes_context=True)


def _takes_context(
    file: str, name: str, parameters: list[inspect.Parameter], expected: tuple[str, ...]
) -> bool:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return len(required) > len(expected)
    extra = len(positional) - len(expected)
    if extra < 0 or len(required) > len(expected) + 1:
        names = ", ".join(expected)
        raise CodeError(
            f"{file}: {name} takes {len(positional)} arguments.",
            f"Write `def {name}({names})` or `def {name}({names}, context)`.",
        )
    return extra >= 1 and (
        len(required) == len(expected) + 1 or positional[len(expected)].name == "context"
    )
