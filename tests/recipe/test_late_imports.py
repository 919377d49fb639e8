"""`recipe.late_imports`: a module that is imported by a call of one of its functions."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.late_imports import imported_by_call

PACKAGE = """
import other_of_late
LOADED = True
def square(number):
    return number * number
def cube(number):
    return number * square(number)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two functions."""
    (tmp_path / "late_one").mkdir()
    (tmp_path / "late_one" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "other_of_late.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_one", "other_of_late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "late_one"


def test_it_is_imported_by_the_first_call_and_not_before(package: str) -> None:
    with imported_by_call(package, "square"):
        from late_one import square  # type: ignore[import-not-found]

        # As torch does for each of its operators, over all modules.
        assert (
            inspect.getmodule(test_what_else_is_asked_of_it_imports_it_at_once.__code__)
            is sys.modules[__name__]
        )
    assert "other_of_late" not in sys.modules
    assert package not in sys.modules
    assert square(4) == 16
    assert "other_of_late" in sys.modules
    import late_one

    assert late_one.LOADED
    assert square(number=5) == late_one.square(5)


def test_what_else_is_asked_of_it_imports_it_at_once(package: str) -> None:
    with imported_by_call(package, "square"):
        from late_one import cube

        assert cube(3) == 27
        import late_one

        # From here on it is the module itself.
        assert late_one.LOADED
        assert late_one.square.__module__ == package
    assert sys.modules[package].square is late_one.square
    with pytest.raises(ImportError, match="nothing_like_it"):
        from late_one import nothing_like_it  # noqa: F401


def test_a_module_that_is_there_already_or_nowhere_stays_as_it_is(package: str) -> None:
    import late_one

    with imported_by_call(package, "square"):
        assert sys.modules[package] is late_one
    with imported_by_call("no_such_module_of_late", "square"), pytest.raises(ModuleNotFoundError):
        import no_such_module_of_late  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.heavy
def test_the_handlers_start_without_what_only_losses_of_detectors_need() -> None:
    server = """
import sys
import inference
for name in ("scipy.optimize", "boto3", "botocore"):
    assert name not in sys.modules, f"{name} is imported at start"
from accelerate.commands.config import sagemaker
assert callable(sagemaker.boto3.client), "it is there once it is asked for"
import boto3
assert boto3.client is sagemaker.boto3.client
from transformers.loss import loss_for_object_detection as losses
import numpy
rows, columns = losses.linear_sum_assignment(numpy.array([[4, 1], [2, 3]]))
assert columns.tolist() == [1, 0]
import scipy.optimize
assert scipy.optimize.linear_sum_assignment.__module__.startswith("scipy")
assert callable(scipy.optimize.minimize)
"""
    code = Path(__file__).resolve().parents[2] / "code"
    subprocess.run([sys.executable, "-c", server], check=True, cwd=code, timeout=240)
