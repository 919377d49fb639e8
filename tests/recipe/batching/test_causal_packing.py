"""Packed documents: the same answers, losses and gradients as each document alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipe.batching import flat
from recipe.batching import packing as plan
from recipe.batching.batches import Packed, Padded
from recipe.batching.document_batches import DocumentLayout, Documents
from recipe.models import flat_attention, packed_decoders
from tests.support.packed_batches import (
    PAD,
    SIZE,
    SMALL,
    assert_same_losses,
    documents_of,
    spread,
)

LLAMA = {**SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 96, "bos_token_id": 2, "eos_token_id": 3}  # fmt: skip
WINDOW = {**LLAMA, "sliding_window": 9}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MIXED = {"use_sliding_window": True, "max_window_layers": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2, **STILL}),
    "gpt_neox": ("GPTNeoX", LLAMA),
    "llama": ("Llama", LLAMA),
    "mistral": ("Mistral", WINDOW),
    "olmo2": ("Olmo2", LLAMA),
    "phi3": ("Phi3", WINDOW),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2, with windows": ("Qwen2", {**WINDOW, **MIXED}),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 8}),
    "qwen3, with windows": ("Qwen3", {**WINDOW, **MIXED, "head_dim": 8}),
    "smollm3": ("SmolLM3", LLAMA),
    "starcoder2": ("Starcoder2", WINDOW),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 8}),
}


@pytest.mark.parametrize(
    ("kind", "attention", "lay"),
    [
        *((kind, "sdpa", layout) for kind in KINDS for layout in ("packed", "one row")),
        # Padded batches go through the library's own masks; eager attention takes masks that are added.
        *((kind, "sdpa", "padded") for kind in ("gpt2", "qwen3, with windows")),
        *((kind, "eager", "packed") for kind in ("gpt2", "qwen3, with windows", "gemma")),
    ],
)
def test_losses_and_gradients_are_those_of_documents_alone(
    kind: str, attention: str, lay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: dict[str, Any] = {
        "packed": lambda lengths: Packed(plan.shape(lengths), SIZE, PAD, 0),
        "padded": lambda lengths: Padded(plan.buckets(lengths), SIZE, PAD),
        "one row": lambda lengths: Packed(flat.row(lengths), SIZE, PAD, 0),
    }

    def alone(model: PreTrainedModel, documents: Documents, row: int) -> torch.Tensor:
        """[2]: the sum of a document's losses, and how often the model is right, by its own words."""
        ids = torch.from_numpy(documents.tokens(row).astype(np.int64))
        learned = documents.learned[documents.starts[row] : documents.starts[row + 1]]
        labels = ids.where(torch.from_numpy(learned), torch.tensor(-100))
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100)
        return torch.stack([total, (logits.argmax(-1) == labels[1:]).sum()])

    def make(kind: str, attention: str = "sdpa") -> PreTrainedModel:
        """A small random model whose weights are far from 0, so that a leak would be seen."""
        name, values = KINDS[kind]
        config = getattr(transformers, f"{name}Config")(**values)
        config._attn_implementation = attention
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return spread(model)

    model = make(kind, attention)
    documents = documents_of([30, 5, 17, 2, 41])
    rows = np.arange(5)
    expected = torch.stack([alone(model, documents, row) for row in rows])
    count = documents.weight(rows)
    packed_decoders.patch_forward_for_documents(model)
    if lay == "one row":
        flat_attention.use(model)
    layout = DocumentLayout(layouts[lay]([documents.lengths]), count + 3)
    # In several parts, too, whose logits are not kept.
    monkeypatch.setattr(
        packed_decoders, "_MOST_LOGITS", 50 * 16 if attention == "sdpa" else 1 << 26
    )
    batch = layout.tensors(documents, rows)
    answers = model(**batch).logits
    assert answers.shape == (SIZE, 2)
    assert answers[:5, 1].tolist() == expected[:, 1].tolist()
    assert answers[5].tolist() == [0, 0]
    assert_same_losses(model, answers[:5, 0] / count, expected[:, 0] / count)
    # What the model always took, it takes still.
    ids = torch.from_numpy(documents.tokens(0).astype(np.int64))[None]
    assert model(input_ids=ids).logits.shape == (1, 30, 50)


def test_every_decoder_is_held_to_that() -> None:
    assert {kind.split(",")[0] for kind in KINDS} == set(packed_decoders.DECODERS)


def test_a_gpu_keeps_more_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 << 30)  # a stand-in: there is none here
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    # 2.5 GB of 80 GB, in float32; never fewer than on a CPU
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == (80 << 30) // 32 // 4
    gpu.total_memory = 1 << 20
    assert packed_decoders.most_logits(torch.device("cuda", 0)) == packed_decoders._MOST_LOGITS
