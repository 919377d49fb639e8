"""An encoder's forward as OpenVINO computes it on a CPU.

The package is imported only where it computes: it starts threads, and what runs threads cannot be
forked into workers.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

FILE, _WEIGHTS = "model.xml", "model.bin"
STEP = 8
"""Lengths of calls are multiples of it: each shape has kernels of its own to make and to keep."""
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_KERNELS = "64"
"""How many shapes' kernels a layer keeps: of 5,000, its default, a worker grows for hours."""


def package() -> Any:
    """Import openvino without its telemetry, which reports conversions to its makers unless a file
    in the home folder forbids it."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def wanted_of(output: Any) -> tuple[str, ...]:
    """Return the names of the values that are read of a model's output (see `padded_rows`)."""
    names = [name for name in ("logits", "start_logits", "end_logits") if name in output]
    return tuple(names) or ("last_hidden_state",)


def convert(model: PreTrainedModel, inputs: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Write a model's graph, in float32, for texts of any number and length.

    Args:
        model: In float32, on the CPU.
        inputs: What it takes: `input_ids`, `attention_mask` and maybe `token_type_ids`.
        folder: It is written there.

    Returns:
        The names of what the graph gives.
    """
    openvino = package()
    example = {name: torch.ones((2, 8), dtype=torch.long) for name in inputs}
    with torch.no_grad():
        names = wanted_of(model(**example))
    graph = openvino.convert_model(_SelectedOutput(model, names).eval(), example_input=example)
    # In float16, its default, weights could overflow, or end as zero.
    openvino.save_model(graph, folder / FILE, compress_to_fp16=False)
    return names


class _SelectedOutput(torch.nn.Module):
    """A model of which only what is read is given."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self._model, self._names = model, names

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self._model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return tuple(output[name] for name in self._names)


class Forward:
    """Computes what a model's `forward` would, compiled in each process that calls it, with as many
    threads as torch has there."""

    def __init__(
        self,
        folder: Path,
        inputs: Sequence[str],
        names: Sequence[str],
        model: PreTrainedModel,
        longest: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            folder: Where `convert` has written the graph; it may be deleted afterwards.
            inputs: What it takes.
            names: What it gives.
            model: The model that it was made of.
            longest: Tokens that the model reads at most.
            dtype: What it computes in, float32 or bfloat16; None: as the model.
        """
        # Open files are inherited by forks, and leave nothing behind.
        self._files = [os.open(folder / file, os.O_RDONLY) for file in (FILE, _WEIGHTS)]
        self._inputs, self._names = tuple(inputs), tuple(names)
        self._model, self._dtype = model, dtype or model.dtype
        self._longest = longest
        self._lock = threading.Lock()
        self._request: Any = None
        self._process = 0

    def take_over(self) -> None:
        """Compute the model from now on, and free its weights: who still reads them gets NaN.

        Until then PyTorch computes: a process that has run OpenVINO's threads cannot be forked.
        """
        function = functools.wraps(type(self._model).forward)(functools.partial(self))
        vars(self._model)["forward"] = function
        for module in self._model.modules():
            for name, weight in [*module.named_parameters(recurse=False)]:
                empty = weight.new_full((), float("nan")).expand(weight.shape)
                setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))

    def start(self) -> None:
        """Compile the graph in this process and call it once: the first call lays out weights."""
        self(torch.ones((1, min(self._longest, STEP)), dtype=torch.long))

    def _compile(self) -> None:
        openvino = package()
        core = openvino.Core()
        compiled = core.compile_model(
            core.read_model(*(f"/proc/self/fd/{file}" for file in self._files)),
            "CPU",
            {
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": 1,
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                # Each worker would keep the first CPU for itself.
                "ENABLE_CPU_PINNING": False,
                "INFERENCE_PRECISION_HINT": PRECISIONS[self._dtype],
                "CPU_RUNTIME_CACHE_CAPACITY": _KERNELS,
            },
        )
        self._request = compiled.create_infer_request()
        self._process = os.getpid()

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> ModelOutput:
        """Return of the model's output only what is read: logits in float32,
        hidden states in the model's type, since modules of sentence-transformers read them.

        Args:
            input_ids: [texts, tokens].
            attention_mask: Alike; None for texts without padding.
            token_type_ids: Alike; None for texts that are not pairs.
            options: Only that a dict is to be returned.

        Raises:
            TypeError: Other outputs are requested.
        """
        others = {name for name, value in options.items() if value is not None}
        if others - {"return_dict"} or options.get("return_dict") is False:
            raise TypeError(f"OpenVINO's graph of this model takes no {', '.join(sorted(others))}.")
        if self._process != os.getpid():
            self._compile()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        tensors = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": types}
        taken = {name: tensors[name].long().numpy() for name in self._inputs}
        with self._lock:
            values = self._request.infer(taken, share_inputs=True)
            output = {
                name: torch.from_numpy(values[index]) for index, name in enumerate(self._names)
            }
        if (states := output.get("last_hidden_state")) is not None:
            output["last_hidden_state"] = states.to(self._dtype)
        return ModelOutput(output)  # type: ignore[no-untyped-call]
