"""Compute an encoder by CTranslate2 on a CPU.

`Forward` replaces the forward of a model's encoder (`base_model`); PyTorch computes the head. The
package is imported only where it computes, since it starts threads: a process with threads cannot
be forked into workers.

RoBERTa's families give a padding token inside a text, such as a written `<pad>`, the position of
padding. CTranslate2 counts it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from recipe.data.column_names import TYPE_IDS

CALL_TOKENS = 1024
"""The most tokens of a call: a text of 128 takes 31 CPU-ms in calls of 1,024, and 37 in calls of
4,096 (MiniLM, AVX2)."""
_FAMILIES = ("bert", "camembert", "distilbert", "roberta", "xlm-roberta")
_INPUTS = ("input_ids", "attention_mask", TYPE_IDS)
FILES = ("model.bin", "config.json", "vocabulary.json")


def why_unknown(config: Any) -> str:
    """Return why CTranslate2 cannot compute the encoder of a configuration; empty if it can."""
    if config.model_type not in _FAMILIES:
        return (
            f"the model is {config.model_type}, and the encoders known are {', '.join(_FAMILIES)}"
        )
    # RoBERTa's families count positions from it.
    if config.model_type not in ("bert", "distilbert") and config.pad_token_id is None:
        return "its configuration has no pad_token_id"
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    return "" if positions == "absolute" else f"position_embedding_type is {positions}"


def inputs_of(model: Any, tokenizer: Any) -> list[str]:
    """Return the encoder's inputs: of `input_ids`, `attention_mask` and, if the tokenizer makes
    them, `token_type_ids`."""
    taken = inspect.signature(type(model.base_model).forward).parameters
    untyped = {TYPE_IDS} - set(tokenizer.model_input_names)
    return [name for name in _INPUTS if name in taken and name not in untyped]


def convert(encoder: Any, folder: Path, quantization: str | None = None) -> tuple[str, ...]:
    """Write CTranslate2's files of an encoder, and return the names of its outputs.

    Args:
        encoder: In float32, on the CPU.
        folder: Does not exist.
        quantization: int8, or None to keep the precision of the weights.
    """
    from ctranslate2.converters import TransformersConverter

    encoder = copy.deepcopy(encoder)
    has_pooler = getattr(encoder, "pooler", None) is not None
    # The converter reads both of a BERT. transformers 5 dropped position_embedding_type, since all
    # its positions are absolute; models without a pooler get one that is not used.
    encoder.config.position_embedding_type = "absolute"
    if encoder.config.model_type == "bert" and not has_pooler:
        width = encoder.config.hidden_size
        encoder.pooler = torch.nn.ModuleDict({"dense": torch.nn.Linear(width, width)})
    numbers = {str(row): row for row in range(encoder.get_input_embeddings().num_embeddings)}

    class Converter(TransformersConverter):  # type: ignore[misc]
        def load_model(self, *_: Any, **__: Any) -> Any:
            # For XLM-RoBERTa the converter expects the model around the encoder.
            is_inside = encoder.config.model_type == "xlm-roberta"
            inside = SimpleNamespace(config=encoder.config, roberta=encoder)
            return inside if is_inside else encoder

        def load_tokenizer(self, *_: Any, **__: Any) -> Any:
            # Only the size of the vocabulary matters: texts are given as token ids.
            return SimpleNamespace(get_vocab=lambda: numbers, unk_token="0")

    with tempfile.TemporaryDirectory(prefix="int8-") as scratch:
        encoder.config.save_pretrained(scratch)
        Converter(scratch).convert(str(folder), quantization=quantization)
    return ("last_hidden_state", "pooler_output") if has_pooler else ("last_hidden_state",)


class Forward:
    """Computes what an encoder's `forward` would, loaded in each process that calls it, with as
    many threads as torch has there."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        compute_type: str = "int8_float32",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            folder: Where `convert` has written the files; it may be deleted afterwards.
            names: The names of its outputs.
            compute_type: One of CTranslate2's.
            dtype: The type of its outputs.
        """
        # Open files are inherited by forks, and leave nothing behind.
        self._files = {name: os.open(folder / name, os.O_RDONLY) for name in FILES}
        self._names = tuple(names)
        self._compute_type, self._dtype = compute_type, dtype
        for file in self._files.values():
            weakref.finalize(self, os.close, file)
        self._rows: dict[str, int] = {}
        """The rows of the tables of embeddings, if it replaces an encoder: CTranslate2 reads beyond
        them without an error."""
        self._encoder: Any = None
        self._process = 0

    def replace(self, model: Any) -> None:
        """Compute the encoder of a model from now on."""
        encoder = model.base_model
        self._rows = {"input_ids": encoder.get_input_embeddings().num_embeddings}
        if types := getattr(encoder.embeddings, "token_type_embeddings", None):
            self._rows[TYPE_IDS] = types.num_embeddings
        function = functools.wraps(type(encoder).forward)(functools.partial(self))
        vars(encoder)["forward"] = function

    def start(self) -> None:
        """Load the weights in this process, and call them once."""
        self(torch.ones((1, 8), dtype=torch.long))

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Compute the encoder's outputs that heads read.

        Args:
            input_ids: [texts, tokens].
            attention_mask: [texts, tokens], with padding at the end; None without padding.
            token_type_ids: [texts, tokens]; None for single texts.
            options: Others must be None or False, except `return_dict`.

        Raises:
            TypeError: Other inputs or outputs are requested.
            IndexError: An id or a type has no embedding.
        """
        others = {name for name, value in options.items() if value not in (None, False)}
        if others - {"return_dict"}:
            raise TypeError(f"CTranslate2's encoder takes no {', '.join(sorted(others))}.")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if bool((mask[:, :-1] < mask[:, 1:]).any()):
            raise TypeError("CTranslate2's encoder takes padding only at the end.")
        for name, ids in (("input_ids", input_ids), (TYPE_IDS, token_type_ids)):
            if ids is not None and name in self._rows and int(ids.max()) >= self._rows[name]:
                raise IndexError(
                    f"{name} has {int(ids.max())}; the model has {self._rows[name]} rows."
                )
        if self._process != os.getpid():
            import ctranslate2

            self._encoder = ctranslate2.Encoder(
                "int8",
                compute_type=self._compute_type,
                intra_threads=torch.get_num_threads(),
                files={
                    name: Path(f"/proc/self/fd/{file}").read_bytes()
                    for name, file in self._files.items()
                },
            )
            self._process = os.getpid()
        # The outputs of a row that is all padding are not read.
        lengths = mask.sum(1).clamp(min=1).tolist()

        def rows_of(values: Tensor) -> list[list[int]]:
            return [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]

        types = None if token_type_ids is None else rows_of(token_type_ids)
        values = self._encoder.forward_batch(rows_of(input_ids), token_type_ids=types)
        output: dict[str, Any] = {
            name: torch.from_numpy(np.array(getattr(values, name))).to(self._dtype)
            for name in self._names
        }
        states = output["last_hidden_state"]
        padding = input_ids.shape[1] - states.shape[1]
        output["last_hidden_state"] = torch.nn.functional.pad(states, (0, 0, 0, padding))
        return BaseModelOutputWithPoolingAndCrossAttentions(**output)
