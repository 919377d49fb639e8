"""Compute an encoder by CTranslate2 on a CPU.

`Forward` replaces the forward of a model's encoder (`base_model`); PyTorch computes the head. The
package is imported only where it computes, since it starts threads: a process with threads cannot
be forked into workers.

RoBERTa's families give a padding token inside a text, such as a written `<pad>`, the position of
padding. CTranslate2 counts it.

CTranslate2 has no converter for ELECTRA, whose layers are BERT's, nor for MPNet, whose attention is
BERT's with T5's relative bias. With such a bias CTranslate2 reads no positions: those of MPNet are
given as token types.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
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
from recipe.runtime.device import cpu_flags

CALL_TOKENS = 1024
"""The most tokens of a call: a text of 128 takes 31 CPU-ms in calls of 1,024, and 37 in calls of
4,096 (MiniLM, AVX2)."""
CALL_PADDING = 64
"""The most tokens of padding of a call: another call costs as much as 48 tokens (docs/LAB.md)."""
_WIDE_KERNELS = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vbmi2"}
"""What a CPU has that computes by CTranslate2's kernels for AVX-512 without a lower clock."""
_FAMILIES = ("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
_WITHOUT_PAD = ("bert", "distilbert", "electra", "mpnet")
_FIRST_POSITION = "first_position"
"""The key of CTranslate2's config.json for the position of a text's first token, if positions are
given as token types."""
_PAD_OF_MPNET, _MOST_DISTANCE = 1, 128
"""Constants of MPNet's code: the padding from which it counts positions, and the largest distance
of its relative ones."""
_INPUTS = ("input_ids", "attention_mask", TYPE_IDS)
FILES = ("model.bin", "config.json", "vocabulary.json")


def why_unknown(config: Any) -> str:
    """Return why CTranslate2 cannot compute the encoder of a configuration; empty if it can."""
    if config.model_type not in _FAMILIES:
        return (
            f"the model is {config.model_type}, and the encoders known are {', '.join(_FAMILIES)}"
        )
    # RoBERTa's families count positions from it.
    if config.model_type not in _WITHOUT_PAD and config.pad_token_id is None:
        return "its configuration has no pad_token_id"
    if config.model_type == "mpnet" and config.pad_token_id != _PAD_OF_MPNET:
        return f"its pad_token_id is {config.pad_token_id}, not {_PAD_OF_MPNET}"
    if getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:
        return "its embeddings are narrower than its layers"
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
    from ctranslate2.converters import TransformersConverter, transformers

    encoder = copy.deepcopy(encoder)
    is_mpnet = encoder.config.model_type == "mpnet"
    transformers.register_loader("ElectraConfig")(transformers.BertLoader)
    transformers.register_loader("MPNetConfig")(_mpnet_loader())
    if is_mpnet:
        _rename_as_in_bert(encoder)
    has_pooler = getattr(encoder, "pooler", None) is not None
    # The converter reads both of a BERT. transformers 5 dropped position_embedding_type, since all
    # its positions are absolute; models without a pooler get one that is not used.
    encoder.config.position_embedding_type = "absolute"
    if encoder.config.model_type in ("bert", "electra", "mpnet") and not has_pooler:
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
    if is_mpnet:
        file = folder / FILES[1]
        settings = {**json.loads(file.read_text()), _FIRST_POSITION: _PAD_OF_MPNET + 1}
        file.write_text(json.dumps(settings))
    return ("last_hidden_state", "pooler_output") if has_pooler else ("last_hidden_state",)


def _rename_as_in_bert(encoder: Any) -> None:
    """Give the parts of an MPNet their names in BERT, with its positions as token types."""
    encoder.embeddings.token_type_embeddings = encoder.embeddings.position_embeddings
    for layer in encoder.encoder.layer:
        attention = layer.attention
        parts = attention.attn
        attention.self = SimpleNamespace(query=parts.q, key=parts.k, value=parts.v)
        attention.output = SimpleNamespace(dense=parts.o, LayerNorm=attention.LayerNorm)


def _mpnet_loader() -> Any:
    """Return the class that reads an MPNet for CTranslate2."""
    from ctranslate2.converters import transformers
    from ctranslate2.specs import attention_spec

    class Loader(transformers.BertLoader):  # type: ignore[misc]
        def get_model_spec(self, model: Any) -> Any:
            spec = super().get_model_spec(model)
            del spec.encoder.position_encodings
            for layer in spec.encoder.layer:
                plain = layer.self_attention
                biased = attention_spec.MultiHeadAttentionSpec(
                    self_attention=True, relative_attention_bias=True
                )
                biased.linear, biased.layer_norm = plain.linear, plain.layer_norm
                biased.relative_attention_bias = model.encoder.relative_attention_bias.weight
                biased.relative_attention_max_distance = np.int32(_MOST_DISTANCE)
                layer.self_attention = biased
            return spec

    return Loader


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
        settings = json.loads((folder / FILES[1]).read_text())
        self._first_position: int | None = settings.get(_FIRST_POSITION)
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
        names = ("token_type_embeddings", "position_embeddings")
        types = getattr(encoder.embeddings, names[self._first_position is not None], None)
        if types is not None:
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
        if self._first_position is not None:
            positions = torch.arange(input_ids.shape[1]) + self._first_position
            token_type_ids = positions.expand_as(input_ids)
        for name, ids in (("input_ids", input_ids), (TYPE_IDS, token_type_ids)):
            if ids is not None and name in self._rows and int(ids.max()) >= self._rows[name]:
                raise IndexError(
                    f"{name} has {int(ids.max())}; the model has {self._rows[name]} rows."
                )
        if self._process != os.getpid():
            # Alone CTranslate2 chooses AVX2.
            if cpu_flags() >= _WIDE_KERNELS:
                os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
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
            name: torch.from_numpy(np.asarray(getattr(values, name))).to(self._dtype)
            for name in self._names
        }
        states = output["last_hidden_state"]
        if padding := input_ids.shape[1] - states.shape[1]:
            output["last_hidden_state"] = torch.nn.functional.pad(states, (0, 0, 0, padding))
        return BaseModelOutputWithPoolingAndCrossAttentions(**output)
