"""An encoder's forward as OpenVINO computes it on a CPU.

The graph replaces the encoder inside a model (`base_model`); its head stays PyTorch's. The package
is imported only where it computes: it starts threads, and what runs threads cannot be forked into
workers.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from recipe.data.column_names import TYPE_IDS

FILE, WEIGHTS = "model.xml", "model.bin"
STEP = 8
"""Lengths of calls are multiples of it: each shape has kernels of its own to make and to keep."""
_OUTPUTS = ("last_hidden_state", "pooler_output")
_INPUTS = ("input_ids", "attention_mask", TYPE_IDS)
_KERNELS = "64"
"""How many shapes' kernels a layer keeps: of 5,000, its default, a worker grows for hours."""


def package() -> Any:
    """Import openvino without its telemetry, which reports conversions to its makers unless a file
    in the home folder forbids it."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def inputs_of(model: Any, tokenizer: Any) -> list[str]:
    """Return what the encoder of a model takes of `input_ids`, `attention_mask` and, if the
    tokenizer makes them, `token_type_ids`."""
    taken = inspect.signature(type(model.base_model).forward).parameters
    untyped = {TYPE_IDS} - set(tokenizer.model_input_names)
    return [name for name in _INPUTS if name in taken and name not in untyped]


def convert(encoder: Any, inputs: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """Return OpenVINO's graph of an encoder, for texts of any number and length, and the names of
    its outputs.

    Args:
        encoder: In float32, on the CPU.
        inputs: What it takes.
    """
    openvino = package()
    example = {name: torch.ones((2, STEP), dtype=torch.long) for name in inputs}
    with torch.no_grad():
        output = encoder(**example)
    names = tuple(name for name in _OUTPUTS if output.get(name) is not None)
    selected = _SelectedOutput(encoder, names).eval()
    return openvino.convert_model(selected, example_input=example), names


def save(graph: Any, folder: Path) -> None:
    """Write a graph's two files."""
    # In float16, its default, weights could overflow, or end as zero.
    package().save_model(graph, folder / FILE, compress_to_fp16=False)


class _SelectedOutput(torch.nn.Module):
    """An encoder of which only what is read is given."""

    def __init__(self, encoder: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self._encoder, self._names = encoder, names

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        types = {} if token_type_ids is None else {TYPE_IDS: token_type_ids}
        output = self._encoder(input_ids=input_ids, attention_mask=attention_mask, **types)
        return tuple(output[name] for name in self._names)


class Forward:
    """Computes what an encoder's `forward` would, compiled in each process that calls it, with as
    many threads as torch has there."""

    def __init__(
        self,
        folder: Path,
        inputs: Sequence[str],
        names: Sequence[str],
        precision: str = "f32",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            folder: Where `save` has written the graph; it may be deleted afterwards.
            inputs: What it takes.
            names: What it gives.
            precision: What is not quantized is computed in it: f32 or bf16.
            dtype: The type of its outputs.
        """
        # Open files are inherited by forks, and leave nothing behind.
        self._files = [os.open(folder / file, os.O_RDONLY) for file in (FILE, WEIGHTS)]
        self._inputs, self._names = tuple(inputs), tuple(names)
        self._precision, self._dtype = precision, dtype
        self._lock = threading.Lock()
        self._request: Any = None
        self._process = 0

    def replace(self, model: Any) -> None:
        """Compute the encoder of a model from now on."""
        encoder = model.base_model
        function = functools.wraps(type(encoder).forward)(functools.partial(self))
        vars(encoder)["forward"] = function

    def start(self) -> None:
        """Compile the graph in this process and call it once: the first call lays out weights."""
        self(torch.ones((1, STEP), dtype=torch.long))

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
                "INFERENCE_PRECISION_HINT": self._precision,
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
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return of the encoder's output what heads read.

        Args:
            input_ids: [texts, tokens].
            attention_mask: Alike; None for texts without padding.
            token_type_ids: Alike; None for texts that are not pairs.
            options: Only that a dict is to be returned.

        Raises:
            TypeError: Other inputs or outputs are requested.
        """
        others = {name for name, value in options.items() if value not in (None, False)}
        if others - {"return_dict"}:
            raise TypeError(f"OpenVINO's graph of this model takes no {', '.join(sorted(others))}.")
        if self._process != os.getpid():
            self._compile()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        tensors = {"input_ids": input_ids, "attention_mask": mask, TYPE_IDS: types}
        taken = {name: tensors[name].long().numpy() for name in self._inputs}
        with self._lock:
            values = self._request.infer(taken, share_inputs=True)
            output: dict[str, Any] = {
                name: torch.from_numpy(values[index]).to(self._dtype)
                for index, name in enumerate(self._names)
            }
        return BaseModelOutputWithPoolingAndCrossAttentions(**output)
