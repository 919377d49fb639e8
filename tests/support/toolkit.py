"""Hugging Face's inference toolkit itself, which `make setup` installs without its server."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import transformers.file_utils

NAME = "sagemaker_huggingface_inference_toolkit"


def import_toolkit(monkeypatch: pytest.MonkeyPatch, module: str) -> ModuleType:
    """Return one of its modules until the test ends, not the image's stand-in, which a test before
    may have imported."""
    # It imports its server for one exception, and a name that transformers 5 has dropped.
    service = SimpleNamespace(PredictionException=type("PredictionException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "mms", SimpleNamespace(service=service))
    monkeypatch.setitem(sys.modules, "mms.service", service)
    monkeypatch.setattr(transformers.file_utils, "is_tf_available", lambda: False, raising=False)
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        monkeypatch.delitem(sys.modules, name)
    paths = [folder for folder in sys.path if not folder.endswith("stand_ins")]
    monkeypatch.setattr(sys, "path", paths)
    found = importlib.import_module(f"{NAME}.{module}")
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        real = sys.modules.pop(name)
        monkeypatch.setitem(sys.modules, name, real)  # removed after the test
    return found
