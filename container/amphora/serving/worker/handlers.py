"""Finds the functions that answer requests: the user's, and defaults for those that are missing.

`<model>/code/inference.py` (or the file SAGEMAKER_PROGRAM names) may define any of `model_fn`,
`input_fn`, `predict_fn`, `output_fn`, or `transform_fn` for the last three; or a `handler.py` the
class `EndpointHandler` of Hugging Face's Inference Endpoints. If there is neither, the image's own
handlers (`code/inference.py`) answer. Missing functions come from `code/defaults.py`, which behaves
like the image that the file was written for; most depend on the loaded model, so that
`Handlers.completed` adds them later. Functions are checked once, before the model is loaded.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from amphora.common.errors import CodeError
from amphora.serving import handler_files
from amphora.serving.api import toolkit, write
from amphora.serving.handler_files import ENDPOINT_HANDLER, HANDLER_SERVICE
from amphora.serving.protocol import media_types
from amphora.serving.protocol.media_types import bad_request
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
# Only the image's handlers take requests that the server has parsed (`amphora.serving.api`).
_IMAGE_SIGNATURES = {
    **_SIGNATURES,
    "request_fn": ("request", "model"),
    "load_adapter_fn": ("name", "folder", "model_dir", "model"),
    "unload_adapter_fn": ("name", "model"),
}
# A file that defines only these leaves models and requests to the image's handlers.
_COMPANIONS = {"pre_model_fn", "tokens_fn", "turns_fn"}
# What other servers call, in whatever file of a model's folder.
_CALLED = {*_SIGNATURES, ENDPOINT_HANDLER, "handle", "PreTrainedPipeline", "TritonPythonModel"}
_SERVER_IMPORT = re.compile(
    rf"(?m)^(?:from|import) +({'|'.join(modules.OTHER_SERVERS)}|flask|fastapi)\b".encode()
)
# Names of files, in lower case, with which other images answer requests.
_SERVERS = {"serve", "server", "app", "predict", "predictor", "inference", "handler",
            "mar-inf", "cog", "bentofile", "bento"}  # fmt: skip
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


@dataclass(frozen=True)
class Handler:
    """One function of a handlers' file, called with or without `context` as it was written."""

    name: str
    function: Callable[..., Any]
    takes_context: bool
    body_type: type[str] | type[bytes] | None = None
    """The annotation of its body parameter, if that is `str` or `bytes`."""

    @classmethod
    def from_function(cls, file: str, name: str, function: Any) -> Handler:
        """Check a function of a file. Raises CodeError if it cannot serve as this handler."""
        if not callable(function):
            raise CodeError(f"{file}: {name} is {function!r}.", "It must be a function.")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise CodeError(f"{file}: {name} is written with `async def`.", "Write it with `def`.")
        expected = _IMAGE_SIGNATURES[name]
        parameters = list(inspect.signature(function).parameters.values())
        body_type: type[str] | type[bytes] | None = None
        for expected_name, parameter in zip(expected, parameters, strict=False):
            if expected_name == "body" and parameter.annotation in (str, "str"):
                body_type = str
            elif expected_name == "body" and parameter.annotation in (bytes, "bytes"):
                body_type = bytes
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [parameter for parameter in parameters if parameter.kind in kinds]
        required = sum(parameter.default is parameter.empty for parameter in positional)
        count = len(expected)
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return cls(name, function, required > count, body_type)
        if len(positional) < count or required > count + 1:
            names = ", ".join(expected)
            raise CodeError(
                f"{file}: {name} takes {len(positional)} arguments.",
                f"Write `def {name}({names})` or `def {name}({names}, context)`.",
            )
        further = [parameter.name for parameter in positional[count:]]
        takes_context = required > count or further[:1] in (["context"], ["ctx"])
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

    functions: Mapping[str, Handler]
    """Each by its name. `predict_batch_fn` declares that predictions may be merged and repeated
    (`protocol.batching`), `turns_fn` that they may take turns (`worker.job_threads`)."""
    defaults: Any = None
    """An object of `code/defaults.py` that provides the missing functions once the model is loaded,
    by `complete`."""

    def completed(self, model: Any) -> Handlers:
        """Return these handlers with the missing functions, for a loaded model."""
        if self.defaults is None:
            return self
        default = self.defaults.complete(model)
        missing: dict[str, Any] = {}
        if default:

            def input_fn(body: Any, content_type: str) -> Any:
                if default["family"] == "pytorch":
                    return default["to_tensor"](toolkit.decode(body, content_type, numbers=True))
                return toolkit.decode(body, content_type, default["task"])

            def output_fn(prediction: Any, accept: str) -> Any:
                # PyTorch's image converts tensors to lists, so NPY holds float64 or int64.
                if default["family"] == "pytorch" and write.is_tensor(prediction):
                    prediction = write.lists_of_array(write.array_of_tensor(prediction))
                return write.encode(prediction, accept)

            missing = {
                "input_fn": input_fn, "predict_fn": default["predict_fn"], "output_fn": output_fn
            }  # fmt: skip
        functions = {
            name: Handler.from_function(_DEFAULTS, name, function)
            for name, function in missing.items()
        }
        return replace(self, defaults=None, functions={**functions, **self.functions})


def resolve(
    code_dir: Path, program: str | None, image_code: Path, model_dir: Path | None = None
) -> Handlers:
    """Find every function that can be known before the model is.

    Args:
        code_dir: The user's code folder; it need not exist.
        program: SAGEMAKER_PROGRAM; None means inference.py, if it is there.
        image_code: The folder with the image's inference.py and defaults.py.
        model_dir: The model's folder, which must not hold other servers' code.

    Raises CodeError if a file, an import or a signature is wrong.
    """
    modules.add_image(image_code)
    user = modules.user_module(code_dir, program)
    file = str(getattr(user, "__file__", ""))
    defined = {name for name in _SIGNATURES if getattr(user, name, None) is not None}
    if Path(file).name == handler_files.ENDPOINT_PROGRAM and hasattr(user, ENDPOINT_HANDLER):
        defined = set()  # Its server calls the class alone, whatever else the file defines.
    _check_code(user, defined, code_dir, model_dir)
    predicts = defined & {"model_fn", "predict_fn", "predict_batch_fn", "transform_fn"}
    endpoint = None if predicts else getattr(user, ENDPOINT_HANDLER, None)
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
        module = modules.load_image(image_code, "inference")
        image = {
            name: Handler.from_function(str(module.__file__), name, getattr(module, name))
            for name in _IMAGE_SIGNATURES
            if hasattr(module, name)
        }
        return Handlers(functions=image | functions)
    names = ", ".join(name for name in _SIGNATURES if name in defined)
    LOG.info("%s defines %s.", file, names or ENDPOINT_HANDLER)
    if "predict_batch_fn" in functions and "predict_fn" not in functions:
        batch = functions["predict_batch_fn"]

        def predict(data: Any, model: Any, context: Any) -> Any:
            (prediction,) = batch([data], model, context=context)
            if isinstance(prediction, Exception):
                raise prediction
            return prediction

        functions["predict_fn"] = Handler("predict_batch_fn", predict, takes_context=True)
    needed = {"model_fn"} if "transform_fn" in functions else {"model_fn", *_TRIO}
    defaults = None
    if missing := needed - set(functions):
        image_defaults = modules.load_image(image_code, "defaults")
        defaults = image_defaults.select_defaults(frozenset(functions), file)
        if "model_fn" in missing:
            functions["model_fn"] = Handler.from_function(_DEFAULTS, "model_fn", defaults.model_fn)
    return Handlers(functions=functions, defaults=defaults)


def _endpoint_functions(file: str, kind: Any) -> dict[str, Handler]:
    """Return the functions of a class of Hugging Face's Inference Endpoints: `__init__(path)`, and
    `__call__(data)` of a request's JSON object."""
    if not inspect.isclass(kind) or inspect.iscoroutinefunction(kind.__call__):
        raise CodeError(
            f"{file}: {ENDPOINT_HANDLER} is not a class, or one with an `async def __call__`.",
            "Write a class with `def __init__(self, path)` and `def __call__(self, data)`.",
        )

    def predict(data: Any, model: Any) -> Any:
        if not isinstance(data, Mapping):
            raise bad_request('Send an object, such as {"inputs": "a text"}.')
        return model(data)

    return {
        "model_fn": Handler("model_fn", kind, takes_context=False),
        "predict_fn": Handler("predict_fn", predict, takes_context=False),
    }


def _check_code(
    user: ModuleType | None, defined: set[str], code_dir: Path, model_dir: Path | None
) -> None:
    """Raise CodeError if the user's code has what only other servers run or call."""
    if (service := code_dir / HANDLER_SERVICE).is_file():
        raise CodeError(
            f"{service} is a handler service (handle(data, context)), which is not run here.",
            "Define model_fn and transform_fn, or input_fn, predict_fn and output_fn, in"
            " inference.py.",
        )
    if user is None:
        folder = model_dir or code_dir
        configurations = ("MAR-INF", "cog.yaml", "bentofile.yaml", "bento.yaml")
        marks = [mark for name in configurations if (mark := folder / name).exists()]
        paths = sorted({*code_dir.glob("*.py"), *code_dir.glob("[Ii]nference.*"), *marks})
        others = {path for name in ("*", "*/*", "*/*/*") for path in folder.glob(f"{name}.py")}
        for path in [*paths, *sorted(others - {*paths})]:
            names = _CALLED
            if path in paths or path.stem.lower() == "inference":
                names = names | {"predict", "load_model"}
            unused = [name for name in handler_files.unused_names(path) if name in names]
            stem = path.name.lower().partition(".")[0]  # also of inference.py.txt
            content = path.read_bytes() if path.suffix == ".py" and path.is_file() else b""
            server = _SERVER_IMPORT.search(content)
            if unused or server or (path in paths and stem in _SERVERS):
                what = f", which imports {server[1].decode()}," if server else ""
                what = f", which defines {', '.join(unused)}," if unused else what
                choice = ""
                if path.is_relative_to(code_dir) and path.suffix == ".py" and not server:
                    choice = f" set SAGEMAKER_PROGRAM to {str(path.relative_to(code_dir))!r},"
                raise CodeError(
                    f"{path}{what} is not run.",
                    f"Move its code to {code_dir / 'inference.py'},{choice} or remove it to use "
                    "the image's own handlers.",
                )
        return
    if not defined - _COMPANIONS and hasattr(user, ENDPOINT_HANDLER):
        return
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
    services = [name for name, value in vars(user).items() if hasattr(value, "handle")]
    values = ((name, vars(user).get(name)) for name in dict.fromkeys([*unused, *services]))
    local = [name for name, value in values if getattr(value, "__module__", "") == user.__name__]
    if local and not defined - _COMPANIONS:
        raise CodeError(
            f"{path} defines {', '.join(local)}, and no function that the server calls.",
            f"Define model_fn, input_fn, predict_fn, output_fn or a class {ENDPOINT_HANDLER}; or "
            "remove the file to use the image's own handlers.",
        )
