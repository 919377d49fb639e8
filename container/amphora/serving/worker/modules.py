"""Imports files by their paths: the user's handlers, and the image's own.

The user's folder comes first on sys.path and the image's is not on it, so that a user's `import
utils` never finds the image's module. Only the image's packages can be imported by name; a user's
module of the same name is refused if the image's is needed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from amphora.common import packages, transformers4
from amphora.common.errors import CodeError, did_you_mean
from amphora.serving import handler_files

LOG = logging.getLogger("amphora.worker")
OTHER_SERVERS = {"ts", "mms", "sagemaker_containers", "sagemaker_pytorch_serving_container",
                 "djl_python", "triton_python_backend_utils", "kserve", "litserve"}  # fmt: skip
"""Packages with which only TorchServe, AWS's older servers, DJL, Triton and others run code."""


def user_module(code_dir: Path, program: str | None) -> ModuleType | None:
    """Import the module of the user's handlers; return None if there is none.

    Raises CodeError if the program is not there, or cannot be imported.
    """
    path = handler_files.handlers_path(code_dir, program)
    dotted = program if program and handler_files.DOTTED.fullmatch(program) else ""
    is_name = "." in dotted and not dotted.endswith(".py")
    is_installed = False
    if path is None and is_name:
        # An installed module; a plain name would also find the standard library's `code`.
        # find_spec fails for a missing parent package, and for a module without a spec.
        with contextlib.suppress(ImportError, ValueError):
            is_installed = importlib.util.find_spec(dotted) is not None
    if path is None and not is_installed:
        if not program:
            return None
        names = sorted(entry.name for entry in code_dir.glob("*.py")) if code_dir.is_dir() else []
        listed = f"It holds {', '.join(names) or 'no Python file'}.{did_you_mean(program, names)}"
        raise CodeError(
            f"SAGEMAKER_PROGRAM is {program!r}, but {code_dir} has no such file. {listed}",
            "Name the file that defines the handlers, as a path inside that folder; or set the "
            "variable to an empty value to use the image's own handlers.",
        )
    if str(code_dir) in sys.path:
        sys.path.remove(str(code_dir))
    sys.path.insert(0, str(code_dir))
    transformers4.check(path or code_dir, code_dir)
    if path is not None and not (is_name and path.suffix == ".py"):
        name = path.parent.name if path.name == "__init__.py" else path.stem
        return _execute(path, name, importlib.util.spec_from_file_location(name, path))
    try:
        # By its name, so that its relative imports work.
        return importlib.import_module(dotted)
    except Exception as error:
        raise _import_error(path or code_dir, error) from error


def load_image(image_code: Path, name: str) -> ModuleType:
    """Import the file `name`.py of the image's code folder, which a user's imports never find.

    Raises CodeError if that fails, or a module of the user's hides one of its packages.
    """
    path = image_code / f"{name}.py"
    if not path.is_file():
        raise CodeError(
            f"Functions of the image are needed, but {path} is not there.",
            "Set AMPHORA_CODE_DIR to the folder that has the image's inference.py and defaults.py,"
            " or define model_fn, input_fn, predict_fn and output_fn in code/inference.py.",
        )
    for package in (init.parent.name for init in image_code.glob("*/__init__.py")):
        spec = importlib.util.find_spec(package)
        if spec is None or image_code not in Path(spec.origin or "").parents:
            raise CodeError(
                f"The user's code has a module {package!r}, which hides the image's package of that"
                f" name, and {path.name} of the image is needed for functions that it leaves out.",
                "Rename the module, or define model_fn, input_fn, predict_fn and output_fn.",
            )
    spec = importlib.util.spec_from_file_location(f"amphora_image_{name}", path)
    return _execute(path, f"amphora_image_{name}", spec)


def add_image(image_code: Path) -> None:
    """Make the image's packages importable, and the stand-in for Hugging Face's toolkit, unless the
    user has others of their names that can be imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _ImageFinder)]
    sys.meta_path.append(_ImageFinder(image_code))
    stand_ins = Path(__file__).with_name("stand_ins")
    if str(stand_ins) in sys.path:
        return
    before = len(sys.path)
    if "mms" not in sys.modules and importlib.util.find_spec("mms") is None:
        # The toolkit itself cannot be imported without its server; `make setup` installs it so.
        (toolkit,) = (file.parent.name for file in stand_ins.glob("*/__init__.py"))
        indices = (number for number, path in enumerate(sys.path) if Path(path, toolkit).is_dir())
        before = next(indices, before)
    sys.path.insert(before, str(stand_ins))


@dataclass(frozen=True)
class _ImageFinder(importlib.abc.MetaPathFinder):
    """Finds the image's packages, and nothing else of its folder, if nobody else has them."""

    image_code: Path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find one of the packages; Python's import system finds the modules inside of it."""
        if not (self.image_code / fullname / "__init__.py").is_file():
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [str(self.image_code)])


def _execute(path: Path, name: str, spec: importlib.machinery.ModuleSpec | None) -> ModuleType:
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
    if isinstance(error, SyntaxError):
        location = f"{error.filename}, line {error.lineno}"
    else:
        # The last frame in the file's folder, since a library lies below it.
        frames = traceback.extract_tb(error.__traceback__)
        user = [frame for frame in frames if Path(frame.filename).is_relative_to(path.parent)]
        frame = (user or frames)[-1]
        location = f"{frame.filename}, line {frame.lineno}"
    advice = packages.hidden_module_remedy(path.parent, str(error))
    advice = advice or transformers4.remedy(str(error))
    if isinstance(error, ModuleNotFoundError) and not advice:
        what = f"it needs the module {error.name!r}, which is not installed"
        remedy = "Add its package to the model's code/requirements.txt, or its file to code/."
        if (error.name or "").partition(".")[0] in OTHER_SERVERS:
            remedy = "That is of another server or image: leave it out, and define model_fn."
        return CodeError(f"{path} cannot be imported: {what} ({location}).", remedy)
    return CodeError(
        f"{path} cannot be imported: {type(error).__name__}: {error} ({location}).",
        advice or "Correct the error in that code.",
    )
