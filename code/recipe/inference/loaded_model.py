"""A saved model that runs over batches of texts, in the precision that this host computes fastest.

`AMPHORA_DTYPE` (float32, bfloat16 or int8) overrides the choice; `AMPHORA_COMPILE=1` compiles the
model with torch.compile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from recipe.compat import in_precision
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.inference.payloads import Request
from recipe.runtime import device
from recipe.tokenization.encoding import beginning, encode

BATCH = 32
"""Texts that go through a model at once."""
_STEP = 8
"""Lengths are multiples of it: each shape has kernels of its own to make (docs/LAB.md)."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, and how it is asked for."""

    place: str
    """A folder, or a name on the Hugging Face Hub."""
    options: Mapping[str, Any]
    """What every `from_pretrained` is given."""

    @classmethod
    def find(cls, model_dir: str, environ: Mapping[str, str]) -> Origin:
        """The model in `model_dir`, else the one that HF_MODEL_ID names (a folder will do).

        Raises:
            ModelError: neither is there.
        """
        trust = environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true")
        options: dict[str, Any] = {"trust_remote_code": True} if trust else {}
        if (Path(model_dir) / "config.json").is_file():
            return cls(model_dir, options)
        name = environ.get("HF_MODEL_ID", "")
        if not name:
            found = ", ".join(sorted(path.name for path in Path(model_dir).glob("*"))[:10])
            raise ModelError(
                f"There is no config.json in {model_dir}, which holds {found or 'nothing'}.",
                "Pack the files that save_pretrained wrote at the top of model.tar.gz, or set "
                "HF_MODEL_ID.",
            )
        if revision := environ.get("HF_MODEL_REVISION"):
            options["revision"] = revision
        if token := environ.get("HF_API_TOKEN") or environ.get("HF_TOKEN"):
            options["token"] = token
        return cls(name, options)

    @property
    def adapter(self) -> dict[str, Any]:
        """The settings of the LoRA adapter, where only that was saved; else empty."""
        path = Path(self.place) / "adapter_config.json"
        settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return settings

    def config(self) -> Any:
        """The model's configuration."""
        try:
            return AutoConfig.from_pretrained(self.place, **self.options)
        except OSError as error:
            raise ModelError(
                f"The model {self.place!r} cannot be read: {str(error).splitlines()[0]}",
                "Without a way to the Hub, bring the model in model.tar.gz, or give HF_MODEL_ID "
                "the path of its folder.",
            ) from error


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A model, its tokenizer, and how many tokens it can read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int

    def encode(self, request: Request, reserved: int = 0) -> list[list[int]]:
        """Token ids of the request's texts, kept with it; what is cut is noted there too.

        Args:
            request: It is changed.
            reserved: Positions to leave free after each text.
        """
        if request.token_ids is None:
            limit = max(1, self.max_length - reserved)
            request.token_ids = encode(self.tokenizer, request.texts, limit)
            request.truncated = [
                place
                for place, ids in enumerate(request.token_ids)
                if len(ids) == limit and self._is_longer(request.texts[place], limit)
            ]
        return request.token_ids

    def _is_longer(self, text: str, limit: int) -> bool:
        decisive = beginning(self.tokenizer, text, limit)
        return len(self.tokenizer(decisive, verbose=False)["input_ids"]) > limit

    @torch.inference_mode()
    def rows(
        self,
        requests: Sequence[Request],
        read: Callable[[Any, torch.Tensor], Sequence[torch.Tensor]],
    ) -> list[list[torch.Tensor]]:
        """What `read(output, attention_mask)` makes of each text, in float32 on the CPU.

        All requests' texts go through the model together, by length, so that little is padded.

        Returns:
            For each request a tensor for each of its texts.
        """
        token_ids = [ids for request in requests for ids in self.encode(request)]
        found: list[torch.Tensor] = [torch.empty(0)] * len(token_ids)
        for places in _by_length(token_ids):
            batch = self._padded([token_ids[place] for place in places])
            values = read(self.model(**batch), batch["attention_mask"])
            for place, value in zip(places, values, strict=True):
                found[place] = value.float().cpu()
        results = iter(found)
        return [[next(results) for _ in request.texts] for request in requests]

    def _padded(self, token_ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        longest = min(self.max_length, -(-max(map(len, token_ids)) // _STEP) * _STEP)
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(token_ids), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(token_ids):
            ids[row, : len(each)] = torch.tensor(each, dtype=torch.long)
            mask[row, : len(each)] = 1
        where = self.model.device
        return {"input_ids": ids.to(where), "attention_mask": mask.to(where)}


def _by_length(token_ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    order = sorted(range(len(token_ids)), key=lambda place: len(token_ids[place]))
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


def load(origin: Origin, architecture: Any, environ: Mapping[str, str] = os.environ) -> Encoder:
    """The model by one of transformers' Auto classes, ready to answer, on an accelerator if any.

    Raises:
        ModelError: it cannot be read.
        ValueError: AMPHORA_DTYPE names no precision.
    """
    chosen = device.choose(environ, bf16=None, use_cpu=False, fp16=False)
    name = environ.get("AMPHORA_DTYPE") or ("bfloat16" if chosen.bf16 else "float32")
    if name not in _DTYPES:
        raise ValueError(f"AMPHORA_DTYPE is {name!r}. Give {', '.join(_DTYPES)}.")
    tokenizer = AutoTokenizer.from_pretrained(origin.place, **origin.options)
    model = _weights(origin, architecture, _DTYPES[name]).eval().to(chosen.kind)
    if name == "int8":
        quantisation: Any = torch.ao.quantization
        # A scale for each row of a weight halves the labels that change, at no cost.
        layers = {torch.nn.Linear: quantisation.per_channel_dynamic_qconfig}
        model = quantisation.quantize_dynamic(model.cpu(), layers)
    if environ.get("AMPHORA_COMPILE", "") in ("1", "true"):
        model.forward = torch.compile(model.forward, dynamic=True)
    print(f"model: {type(model).__name__} on {chosen.kind} in {name}", flush=True)
    return Encoder(
        model=model, tokenizer=tokenizer, max_length=_max_length(tokenizer, model.config)
    )


def _weights(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """The model itself; where only a LoRA adapter was saved, its base with the adapter merged."""
    if not origin.adapter:
        return _whole(origin, architecture, dtype)
    from peft import PeftModel

    base = origin.adapter["base_model_name_or_path"]
    config = origin.config()
    try:
        model = architecture.from_pretrained(
            base, config=config, **in_precision(dtype), **origin.options
        )
    except OSError as error:
        raise ModelError(
            f"{origin.place} holds an adapter, and its base {base!r} cannot be read: "
            f"{str(error).splitlines()[0]}",
            "Train with lora_save=merged, or have the base at that place.",
        ) from error
    merged: Any = PeftModel.from_pretrained(model, origin.place)
    return merged.merge_and_unload()


def _whole(origin: Origin, architecture: Any, dtype: torch.dtype) -> Any:
    """The model, all of whose weights were in its files: a new head would answer at random."""
    try:
        model, report = architecture.from_pretrained(
            origin.place, **in_precision(dtype), output_loading_info=True, **origin.options
        )
    except UNLOADABLE as error:
        raise ModelError(
            f"The model {origin.place} cannot be loaded: {why_unloadable(error)}",
            "It needs config.json, whole weights (best in model.safetensors) and its tokenizer.",
        ) from error
    missing = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    # A sentence's vector is the mean of its tokens': without the pooler, which many do not save.
    if missing and architecture is not AutoModel:
        raise ModelError(
            f"The model {origin.place} lacks {len(missing)} weights of {type(model).__name__}"
            f" ({', '.join(missing[:3])}).",
            "Check that its files are whole, and that HF_TASK is what it was trained for.",
        )
    return model


def _max_length(tokenizer: PreTrainedTokenizerBase, config: Any) -> int:
    """Tokens that the model has positions for; tokenizers without a limit of their own say 1e30."""
    positions = getattr(config, "max_position_embeddings", None) or 1 << 30
    return int(min(tokenizer.model_max_length, positions))
