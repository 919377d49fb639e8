"""Hugging Face's inference toolkit itself, which `make setup` installs without its server."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import transformers.file_utils

NAME = "sagemaker_huggingface_inference_toolkit"


def import_toolkit(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Return one of its modules until the test ends, not the image's stand-in, which a test before
    may have imported."""
    # It imports its server for one exception, and a name that transformers 5 has dropped.
    service = SimpleNamespace(PredictionException=type("PredictionException", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "mms", SimpleNamespace(service=service))
    monkeypatch.setitem(sys.modules, "mms.service", service)
    monkeypatch.setattr(transformers.file_utils, "is_tf_available", lambda: False, raising=False)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(NAME)]:
        monkeypatch.delitem(sys.modules, loaded)
    paths = [folder for folder in sys.path if not folder.endswith("stand_ins")]
    monkeypatch.setattr(sys, "path", paths)
    module = importlib.import_module(f"{NAME}.{name}")
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(NAME)]:
        real = sys.modules.pop(loaded)
        monkeypatch.setitem(sys.modules, loaded, real)  # removed after the test
    return module
