"""Train and save sentence embedding models: sentence-transformers' modules around an encoder,
trained as one.

The library reads and writes the folder, and its own modules pool, project and normalise. Here these
modules are attributes of the encoder, so that they are trained, sharded and checkpointed with it;
and the encoder takes packed batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from recipe.console import say, say_row
from recipe.errors import ModelError
from recipe.models import lora, packed_encoders
from recipe.settings import ModelSettings

AFTER = "after_encoder"
"""The attribute of an encoder with the modules that follow it: pooling, then any others."""
QUERY, DOCUMENT = "query", "document"
"""The names of sentence-transformers for the prompts of both sides."""
_POOLS = {
    "mean": packed_encoders.means,
    "cls": packed_encoders.firsts,
}
"""Pooling functions for packed texts, by the library's names."""
_DOCUMENT_PROMPTS = (DOCUMENT, "passage", "corpus")


def trained_as_one(sentences: Any, settings: ModelSettings, why: str) -> PreTrainedModel:
    """Return the encoder of a SentenceTransformer with the modules that follow it, and maybe
    adapters. `why` is the reason for its pooling, for the log."""
    others = "".join(f", then {type(module).__name__}" for module in list(sentences)[2:])
    say_row("pooling", f"{_mode(sentences[1])} ({why}){others}")
    named = sentences.similarity_fn_name
    if named != "cosine":
        say(
            "similarity: cosine, on which the losses are based, instead of the model's own "
            f"({named})"
        )
    sentences.similarity_fn_name = "cosine"
    encoder = sentences[0].auto_model
    after = nn.ModuleList(list(sentences)[1:])
    if hasattr(encoder, "peft_config"):  # an adapter that is trained further has none for these
        after.requires_grad_(False)
    setattr(lora.bare(encoder), AFTER, after)
    wrapped: PreTrainedModel = lora.wrap(
        encoder, settings, "FEATURE_EXTRACTION", tokenizer=sentences.tokenizer
    )
    for name, weight in wrapped.named_parameters():
        # The encoder's pooler is for heads: it does not affect the vectors, and DDP would wait for
        # its gradients.
        if ".pooler." in f".{name}":
            weight.requires_grad_(False)
    return wrapped


def set_encoder(first: Any, encoder: Any) -> None:
    """Replace the encoder of a SentenceTransformer's first module."""
    name = "model" if "model" in dict(first.named_children()) else "auto_model"
    setattr(first, name, encoder)


def _mode(pooling: Any) -> str:
    """Return the pooling mode: mean, cls ..., or several joined by a plus."""
    mode = pooling.pooling_mode
    return mode if isinstance(mode, str) else "+".join(mode)


def packs(model: Any) -> bool:
    """Return whether `model` can be packed: its encoder, and how it pools."""
    inner = lora.bare(model)
    family = packed_encoders.family_of(inner.config)
    return family is not None and _mode(getattr(inner, AFTER)[0]) in _POOLS


def patch_forward_for_texts(model: Any) -> None:
    """Let `model` answer texts with their vectors, of packed batches and of padded ones."""
    packed_encoders.patch_forward_for_lengths(model)
    inner = lora.bare(model)
    # Looked up now, since changing the attention of a packed model also changes its type.
    family, usual = packed_encoders.family_of(inner.config), inner.forward

    def forward(*args: Any, **inputs: Any) -> SequenceClassifierOutput:
        """Return logits [texts, width], in float32."""
        pooling, *others = getattr(inner, AFTER)
        if (segments := inputs.get("segments")) is None:
            names = ("input_ids", "attention_mask", "token_type_ids")
            given = {name: inputs[name] for name in names if inputs.get(name) is not None}
            states = usual(**given)[0].float()
            features = pooling(
                {"token_embeddings": states, "attention_mask": inputs["attention_mask"]}
            )
        else:
            assert family is not None
            states = packed_encoders.states(inner, family, inputs, segments, usual).float()
            pool = _POOLS[_mode(pooling)]
            features = {"sentence_embedding": pool(states, segments, inputs["first"])}
        for module in others:
            features = module(features)
        return SequenceClassifierOutput(logits=features["sentence_embedding"].float())

    inner.forward = forward


def prompts(sentences: Any, query: str | None, document: str | None) -> tuple[str, str]:
    """Return the prompts of queries and documents, and save them with the model.

    None takes the model's own prompt; a model without prompts has the empty one.

    Raises:
        ModelError: the model leaves prompts out of its pooling.
    """
    known: dict[str, str] = dict(sentences.prompts or {})
    default = known.get(sentences.default_prompt_name or "", "")
    documents = next((known[name] for name in _DOCUMENT_PROMPTS if known.get(name)), default)
    query = known.get(QUERY) or default if query is None else query
    document = documents if document is None else document
    if (query or document) and not sentences[1].include_prompt:
        raise ModelError(
            "The model's pooling leaves out the tokens of prompts, which is not trained here.",
            "Set include_prompt to true in its 1_Pooling/config.json.",
        )
    if any(known.values()) and not (query or document):  # off, also for calls without a name
        sentences.prompts, sentences.default_prompt_name = {QUERY: "", DOCUMENT: ""}, None
        say("prompts: none, unlike the model before training")
    if query or document:
        sentences.prompts = {**known, QUERY: query, DOCUMENT: document}
        say(
            f"prompts: {query!r} before queries, {document!r} before texts; ask the served model "
            f"with prompt_name={QUERY} or {DOCUMENT}"
        )
    return query, document


def save(
    sentences: Any,
    model: Any,
    weights: Mapping[str, Any] | None,
    folder: Path,
    settings: ModelSettings,
) -> None:
    """Write the trained model as a folder of sentence-transformers, which AutoModel also reads:
    its adapter instead of the encoder if that is saved alone, and the other modules whole.

    Args:
        weights: The gathered weights of a sharded model; None if it is not sharded.
    """
    model = lora.whole(model, weights, settings)
    inner, first = lora.bare(model), sentences[0]
    after = getattr(inner, AFTER)
    for name, module in [*after.named_modules()]:
        # Dense layers get adapters, too.
        if hasattr(module, "unload_and_optionally_merge_module"):
            whole = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=False, adapter_names=None
            )
            after.set_submodule(name, whole)
        elif hasattr(module, "get_base_layer"):
            module.merge()
            after.set_submodule(name, module.get_base_layer())
    delattr(inner, AFTER)
    vars(inner).pop("forward", None)  # restores its class's forward
    set_encoder(first, inner)
    for number, module in enumerate(after, 1):
        sentences[number] = module
    if model is not inner:

        def save_first(path: str, **_: Any) -> None:
            lora.save(model, None, Path(path), settings)
            first.processor.save_pretrained(path)
            first.save_config(path)

        initial = getattr(model, "initial_adapter", {})
        model.initial_adapter = {
            name: weight for name, weight in initial.items() if f".{AFTER}." not in name
        }
        first.save = save_first
    sentences.save_pretrained(str(folder), create_model_card=False)
