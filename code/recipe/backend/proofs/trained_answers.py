"""Compare the model in a folder with the one that was trained: both compute a few probes.

A proof is made of the folder alone. What saving loses or changes (weights, buffers, settings that
change the computation, merged adapters, tokens, label names) shows only here.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recipe.backend.padded_rows import token_values
from recipe.backend.proofs import checking
from recipe.backend.proofs.proof import Proof, scale_of
from recipe.backend.requests.probes import TEXTS, draw_images
from recipe.backend.rows import Pooling, TokenRow
from recipe.backend.served_task import ServedTask
from recipe.compat import positions_of
from recipe.models import lora
from recipe.tokenization.encoding import encode, encode_pairs

_TEXTS, _MOST_TOKENS, _DECODED = TEXTS[:3], 64, 4
_LEAST_SHARE = 1e-4
"""The least tolerance, as a share of the largest value: attention may have other kernels here."""
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class TrainedAnswers:
    """The raw outputs of a trained model in memory, before it is saved or its adapters merged."""

    inputs: Sequence[Mapping[str, Tensor]]
    """Of each probe, alone and without padding, on the CPU."""
    values: Sequence[Tensor]
    """Logits, start and end logits, states of tokens, or a vector."""
    labels: Mapping[int, str]
    precision: str
    """Whose tolerance applies; on a GPU float16, since TF32 has as many digits."""

    def compare(self, task: ServedTask, values: Sequence[Tensor], proof: Proof) -> str:
        """Return how a saved model differs; empty if it does not.

        Args:
            task: The saved model.
            values: What `repeat` returned.
            proof: That of the saved model, for its tolerances.
        """
        saved = checking.model_of(task).config.id2label
        if self.labels != saved:
            return f"its labels are {str(saved)[:200]} instead of {str(dict(self.labels))[:200]}"
        for index, inputs in enumerate(self.inputs if task.tokenizer is not None else ()):
            expected, ids = inputs["input_ids"][0].tolist(), self._tokens(task, index)
            if ids is not None and ids != expected:
                return f"its tokenizer gives the tokens {ids[:8]} instead of {expected[:8]}"
        scale = scale_of([stored.restore() for stored in proof.values])
        name = self.precision if proof.precision == "float32" else "bfloat16"
        share = max(proof.tolerances[name] / scale, _LEAST_SHARE)
        largest, allowed = 0.0, share * scale_of(self.values)
        for one, other in zip(values, self.values, strict=True):
            if one.shape != other.shape:
                return f"its output has the shape {[*one.shape]} instead of {[*other.shape]}"
            apart = torch.where(one == other, 0.0, (one - other).abs())  # also where both are -inf
            most = float(apart.max()) if apart.numel() else 0.0
            largest = max(largest, most if most < float("inf") else float("inf"))
        if largest <= allowed:
            return ""
        return f"its raw values differ by {largest:.3g}, and {allowed:.3g} is allowed ({name})"

    def _tokens(self, task: ServedTask, index: int) -> list[int] | None:
        """Return the saved tokenizer's tokens of a probe; None if these depend on a language."""
        if hasattr(task.tokenizer, "src_lang"):
            return None
        length = self.inputs[index]["input_ids"].shape[1]
        return _encode(checking.model_of(task), task.tokenizer, index, length)

    def repeat(self, task: ServedTask) -> list[Tensor]:
        """Return the outputs of a saved model for the same inputs, in float32 on the CPU."""
        reading = None
        if task.loaded_model is not None and not task.generates:
            prepared = checking.prepare(task, task.probes()[0])
            reading = None if prepared is None else checking.rows_of(task, prepared)[1]
        if isinstance(reading, Pooling) and task.loaded_model is not None:
            rows = [TokenRow(inputs["input_ids"][0].tolist()) for inputs in self.inputs]
            vectors = [row[None] for row in task.loaded_model.forward(rows, reading)]
            # Apart from the module, since a request may turn it off.
            if getattr(task, "normalizes", False):
                vectors = [functional.normalize(vector, dim=-1) for vector in vectors]
            return vectors
        return [_output(checking.model_of(task), inputs) for inputs in self.inputs]


def compute(model: Any, tokenizer: Any, max_length: int, why_not: str) -> TrainedAnswers | str:
    """Return the answers of a trained model in memory, or why it has none.

    Args:
        model: Without DDP's wrapper, but maybe with adapters, and with autocast, which is left out.
        tokenizer: That of the job, or its image processor.
        max_length: The most tokens of a sample; 0 if samples are not cut.
        why_not: Why the model cannot be computed alone; empty if it can.
    """
    inner = lora.bare(getattr(model, "_orig_mod", model))
    device = inner.device.type
    if why_not or device not in _DEVICES:
        return why_not or f"its weights are on {device}"
    if getattr(inner.config, "quantization_config", None) is not None:
        return "its weights are quantized in training"
    try:
        inner.eval()
        limit = min(max_length or _MOST_TOKENS, _MOST_TOKENS, positions_of(inner))
        inputs = _inputs(inner, tokenizer, limit)
        values = [_output(inner, some) for some in inputs]
    except Exception as error:  # the trained model matters more than its comparison
        return f"{type(error).__name__}: {str(error)[:200]}"
    is_exact = all(
        weight.dtype == torch.float32 for weight in inner.parameters() if weight.is_floating_point()
    )
    exact = "float32" if device == "cpu" else "float16"
    return TrainedAnswers(
        inputs=inputs,
        values=values,
        labels=dict(inner.config.id2label),
        precision=exact if is_exact else "bfloat16",
    )


def _encode(model: Any, tokenizer: Any, index: int, limit: int) -> list[int]:
    """Return the tokens of a probe; of a model that answers questions, after a question."""
    if "QuestionAnswering" in type(model).__name__:
        return list(encode_pairs(tokenizer, ["a"], [_TEXTS[index]], limit)[0][0])
    return list(encode(tokenizer, [_TEXTS[index]], limit)[0])


def _inputs(model: Any, tokenizer: Any, limit: int) -> list[dict[str, Tensor]]:
    if model.main_input_name == "pixel_values":
        from PIL import Image

        images = [Image.open(io.BytesIO(image)).convert("RGB") for image in draw_images()]
        pixels = (tokenizer(images=image, return_tensors="pt") for image in images)
        return [{"pixel_values": some["pixel_values"]} for some in pixels]
    taken = inspect.signature(type(model).forward).parameters
    known = None
    with contextlib.suppress(NotImplementedError):  # CANINE hashes characters
        known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    inputs = []
    for index in range(len(_TEXTS)):
        ids = _encode(model, tokenizer, index, limit)
        # A token without an embedding would end the CUDA context.
        if not ids or (known is not None and max(ids) >= known):
            raise ValueError(f"the model has no embeddings of the tokens {ids[:8]}")
        rows = {"input_ids": torch.tensor([ids])}
        if "attention_mask" in taken:
            rows["attention_mask"] = torch.ones_like(rows["input_ids"])
        if model.config.is_encoder_decoder and model.can_generate():
            rows["decoder_input_ids"] = rows["input_ids"][:, :_DECODED]
        inputs.append(rows)
    return inputs


@torch.no_grad()
def _output(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    moved = {name: value.to(model.device) for name, value in inputs.items()}
    if "pixel_values" in moved:
        moved["pixel_values"] = moved["pixel_values"].to(model.dtype)
    # accelerate puts autocast around the forward pass.
    forward = vars(model).get("_original_forward") or model
    return token_values(forward(**moved)).float().cpu()
