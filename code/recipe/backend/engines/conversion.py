"""Converts an encoder to OpenVINO, which then computes it on a CPU in place of PyTorch.

`AMPHORA_ENGINE` is torch (the default) or openvino. A model is converted and compared with its own
answers in float32 in a fork of the process that loads it: that process stays without threads, so
that workers can be forked from it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from recipe.backend.engines import comparison, graph
from recipe.backend.engines.graph import Forward
from recipe.console import log
from recipe.errors import ModelError
from recipe.models import packed_encoders

NAME = "AMPHORA_ENGINE"
TORCH, OPENVINO = "torch", "openvino"
_SECONDS = 240.0
"""After which a conversion is given up."""


def is_requested(environ: Mapping[str, str]) -> bool:
    """Return whether AMPHORA_ENGINE asks for OpenVINO.

    Raises:
        ValueError: It names no engine.
    """
    name = environ.get(NAME) or TORCH
    if name not in (TORCH, OPENVINO):
        raise ValueError(f"{NAME} is {name!r}. Give {TORCH} or {OPENVINO}.")
    return name == OPENVINO


def refused(why_not: str) -> ModelError:
    """Return the error for a model that OpenVINO cannot compute."""
    return ModelError(
        f"{NAME} is {OPENVINO}, and it cannot be: {why_not}.",
        f"Leave {NAME} out: then PyTorch computes the model.",
    )


def converted(model: PreTrainedModel, inputs: Sequence[str], longest: int) -> Forward:
    """Return what computes a model by OpenVINO; a log line says that it does.

    Args:
        model: In the precision that it answers in, as it was loaded.
        inputs: What it is given of `input_ids`, `attention_mask` and `token_type_ids`.
        longest: Tokens that it reads at most.

    Raises:
        ModelError: OpenVINO cannot compute the model, or its answers differ.
    """
    if why_not := _unfit(model):
        raise refused(why_not)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="openvino-") as name:
        names = _convert_in_fork(model, inputs, longest, Path(name))
        forward = Forward(Path(name), inputs, names, model, longest)
    version = importlib.metadata.version("openvino")
    log(f"engine: OpenVINO {version}, converted in {time.monotonic() - began:.1f} s")
    return forward


def _unfit(model: PreTrainedModel) -> str:
    """Return why OpenVINO cannot compute a model; empty if nothing is known against it."""
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}, not on a CPU"
    if model.dtype not in graph.PRECISIONS:
        return f"the precision is {model.dtype}, not float32 or bfloat16"
    kind = model.config.model_type
    if kind in packed_encoders.UNMASKED:
        return f"{kind} computes texts of one length at a time"
    if "forward" in vars(model):
        return f"the forward pass of {type(model).__name__} is replaced, which it does not see"
    if importlib.util.find_spec("openvino") is None:
        return "the package openvino is not installed (it is in the image for CPUs)"
    return ""


def _convert_in_fork(
    model: PreTrainedModel, inputs: Sequence[str], longest: int, folder: Path
) -> Sequence[str]:
    """Convert a model in a fork, into `folder`.

    Returns:
        The names of the graph's outputs.

    Raises:
        ModelError: It cannot be converted, or answers otherwise.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (model, inputs, longest, folder, sender)
    process = context.Process(target=_convert, args=arguments, daemon=True)
    with receiver:
        process.start()
        sender.close()
        try:
            if not receiver.poll(_SECONDS):
                raise refused(f"it was not converted in {_SECONDS:g} s")
            names, why_not = receiver.recv()
        except EOFError:
            process.join()
            why_not = f"its conversion ended with exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()
    if why_not:
        raise refused(why_not)
    return tuple(names)


def _convert(
    model: PreTrainedModel, inputs: Sequence[str], longest: int, folder: Path, sender: Connection
) -> None:
    """Convert and compare a model in the fork, and send the names of its outputs and a fault."""
    # The pool of threads of the process before the fork, if it had one, is not here.
    torch.set_num_threads(1)
    outcome: tuple[Sequence[str], str]
    try:
        with warnings.catch_warnings(), torch.no_grad(), redirect_stdout(io.StringIO()):
            # The answers are compared, whatever tracing warns of; prints of the model would repeat.
            warnings.simplefilter("ignore")
            exact: Any = torch.nn.Module.float(copy.deepcopy(model))
            names = graph.convert(exact, inputs, folder)
            dtypes = dict.fromkeys((torch.float32, model.dtype))
            forwards = {d: Forward(folder, inputs, names, model, longest, d) for d in dtypes}
            outcome = names, comparison.fault(exact, forwards, names, inputs, longest)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {first[:300]}"
        outcome = (), f"it cannot be converted, or answers in another form: {why}"
    sender.send(outcome)
    # The threads of OpenVINO are not waited for.
    sender.close()
    os._exit(0)
