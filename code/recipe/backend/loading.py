"""Loads a saved model, and chooses the layout that this host computes fastest without changing its
answers.

`AMPHORA_DTYPE` (float32, bfloat16 or float16) overrides the precision.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from recipe.backend import precision, programs
from recipe.backend.engines.ctranslate import CALL_TOKENS, Forward
from recipe.backend.engines.int8 import Artefact, Compute, Trial, weights_of, why_unavailable
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.packed_rows import PackedRows
from recipe.backend.padded_rows import ALONE, EQUAL, PADDED, PaddedRows
from recipe.backend.programs import DEVICES, Buckets, Programs
from recipe.backend.rows import OutputKind, Pooling, Reading, TokenRow, are_close, tolerance_of
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin
from recipe.compat import positions_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.errors import ModelError
from recipe.models import flat_attention, packed_encoders
from recipe.runtime import blocked_weights
from recipe.tokenization.encoding import types_alone

_WRITERS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
_WITHOUT_SHAPES: Mapping[Any, str] = {
    **dict.fromkeys(
        _WRITERS,
        "it generates text, so its shapes grow with each token (docs/TRAINIUM.md names the vLLM "
        "image that serves decoders there)",
    ),
    AutoModelForMaskedLM: "it fills masks, which needs scores of the whole vocabulary",
}
"""Why models cannot be served in fixed shapes."""
_INPUTS = frozenset({"input_ids", "attention_mask", TYPE_IDS})


def load(
    origin: Origin,
    architecture: Any,
    environ: Mapping[str, str] = os.environ,
    reading: Reading | None = None,
) -> LoadedModel:
    """Load a model by one of transformers' Auto classes, on an accelerator if there is one.

    `reading` is what will be read: by default labels of sequence classifiers, else values of
    tokens. Raise ModelError if the model cannot be read, or the device cannot compute it, and
    ValueError if AMPHORA_DTYPE is not a precision.
    """
    if reading is None:
        is_labelled = architecture is AutoModelForSequenceClassification
        reading = Reading.LABELS if is_labelled else Reading.TOKENS
    kind, name, dtype = precision.chosen(environ)
    gives_way = precision.may_replace(kind, name, environ)
    published = origin.config() if gives_way and architecture is AutoModelForCausalLM else None
    if getattr(published, "dtype", None) in (torch.float16, "float16"):
        name, dtype = "float16", torch.float16
    source, host = origin, kind
    if kind in DEVICES:
        if architecture in _WITHOUT_SHAPES:
            raise programs.refused(kind, _WITHOUT_SHAPES[architecture])
        # Other kernels branch on whether the mask excludes any token.
        source, host = replace(origin, options={**origin.options, **programs.ATTENTION}), "cpu"
    model = weights.read(source, architecture, dtype).eval().to(host)
    weights.refuse_broken(model, origin)
    if kind not in DEVICES and packed_encoders.minimum_length(model.config) > 1:
        packed_encoders.patch_forward_for_lengths(model)
    tokenizer = origin.tokenizer()
    has_types = TYPE_IDS in tokenizer.model_input_names
    # Tokenizers without a limit report 1e30.
    loaded = wrap_model(model, tokenizer, int(min(tokenizer.model_max_length, positions_of(model))))
    loaded = replace(
        loaded,
        typed=has_types and types_alone(tokenizer),
        answers_questions=architecture is AutoModelForQuestionAnswering,
    )
    if architecture in _WRITERS:
        if kind == "cpu":
            _use_onednn_layout(model, environ, functools.partial(_generation_scores, loaded))
    else:
        if kind not in DEVICES:
            if reading is Reading.MEAN:
                reading = Reading.TOKENS  # the caller computes their means
            loaded, name = precision.settled(loaded, origin, architecture, name, environ, reading)
        loaded = laid_out(loaded, origin, kind, architecture, reading, environ)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    log(f"model: {type(loaded.model).__name__} on {kind} in {name} ({versions})")
    return loaded


def wrap_model(model: PreTrainedModel, tokenizer: Any, max_length: int) -> LoadedModel:
    """Return a loaded model with its tokenizer, in the padded layout."""
    arguments = inspect.signature(model.forward).parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in arguments.values())
    inputs = _INPUTS if takes_all else _INPUTS & set(arguments)
    positions = positions_of(model)
    pad = tokenizer.pad_token_id or 0
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        max_length=max_length,
        positions=positions,
        padded=PaddedRows.from_model(model, pad, inputs, max(positions, max_length)),
    )


def laid_out(
    loaded: LoadedModel,
    origin: Origin,
    kind: str,
    architecture: Any,
    reading: OutputKind,
    environ: Mapping[str, str],
) -> LoadedModel:
    """Return an encoder in the layout that this host computes fastest: programs of fixed shapes,
    its int8, packed or padded rows.

    `loaded` has its final precision, and is on the CPU if the device `kind` needs fixed shapes.
    Raise ModelError if the device cannot compute it, or the files of its int8 are damaged, and
    ValueError if AMPHORA_PACKING or AMPHORA_BUCKETS is invalid.
    """
    if kind in DEVICES:
        return _compile_programs(loaded, kind, reading, environ)
    loaded = _choose_merging(loaded, reading)
    if loaded.padded.merging != PADDED:
        return loaded
    float_layout = functools.partial(_float_layout, loaded, architecture, reading, environ)
    artefact = Artefact.find(origin.location)
    if artefact is None:
        return float_layout()
    why_not = why_unavailable()
    if kind != "cpu":
        why_not = f"the model is served on {kind}"
    elif name := environ.get("AMPHORA_DTYPE"):
        why_not = f"AMPHORA_DTYPE is {name}"
    elif not why_not and weights_of(artefact.folder.parent) != artefact.proof.weights:
        why_not = "it was made of other weights or settings; `amphora quantize` makes it again"
    trial = Trial(why_not, {})
    if not why_not:
        forward = Forward(artefact.folder, artefact.proof.outputs, dtype=loaded.model.dtype)
        tokens = min(CALL_TOKENS, loaded.padded.call_tokens)
        quick = replace(loaded, padded=replace(loaded.padded, call_tokens=tokens))

        def prepare() -> tuple[Compute, Compute]:
            exact = float_layout()
            return (
                lambda rows: exact.forward(rows, reading),
                lambda rows: quick.forward(rows, reading),
            )

        try:
            trial = artefact.try_out(forward, loaded.model, prepare)
        except ModelError as error:
            trial = Trial(error.message, {})
        if not trial.why_not:
            log(f"engine: CTranslate2 {importlib.metadata.version('ctranslate2')} in int8: {trial}")
            return replace(quick, engine=forward, trial=trial)
    times = f" ({trial})" if trial.milliseconds else ""
    log(f"engine: PyTorch instead of int8: {trial.why_not}{times}")
    return replace(float_layout(), trial=trial)


def _float_layout(
    loaded: LoadedModel, architecture: Any, reading: OutputKind, environ: Mapping[str, str]
) -> LoadedModel:
    """Return the model with packed texts and with weights in the layout of the CPU's kernels, if
    its answers stay the same. Otherwise log the reason."""
    model, alone = loaded.model, loaded.alone()
    name, inputs = architecture.__name__, loaded.padded.inputs
    packed = PackedRows.from_model(model, name, inputs, environ)
    if packed is None:
        return loaded
    first, second = loaded.probes()
    rows = [second, first, first, TokenRow(second.ids[:-1]), second]
    usual = model.config._attn_implementation
    expected = alone.forward(rows, reading)
    tolerance = tolerance_of(expected, model.dtype, exact=1e-4)
    try:
        flat_attention.use(model)
        # Rows alone are computed by the attention of packed ones, too.
        is_same = all(
            are_close(replace(alone, layout=layout).forward(rows, reading), expected, tolerance)
            for layout in (packed, None)
        )
        why_not = "" if is_same else "its answers would differ"
    except Exception as error:
        why_not = f"{type(error).__name__}: {str(error)[:200]}"
    if why_not:
        log(f"batches: texts are padded: {why_not}")
        model.set_attn_implementation(usual)
        return loaded
    # Not for models of unknown families, which may use the weights of a layer elsewhere.
    _use_onednn_layout(model, environ, lambda: alone.forward([first, second], reading))
    return replace(loaded, layout=packed)


def _choose_merging(loaded: LoadedModel, reading: OutputKind) -> LoadedModel:
    """Return the model with the widest merging that gives the answers of each row alone.

    The other texts of a call would change the answers of models that ignore the attention mask
    (FNet), or find the end of a text by its padding but have no padding token (GPT-2 with a head).
    """
    first, second = loaded.probes()
    alone = loaded.alone()
    expected = alone.forward([first, second], reading)
    tolerance = tolerance_of(expected, loaded.model.dtype)
    typed = loaded.typed
    if TYPE_IDS in loaded.padded.inputs and TYPE_IDS in loaded.tokenizer.model_input_names:
        # Most models assume types of 0 if there are none, but some compute something else.
        (with_types,) = alone.forward([_typed(first)], reading)
        typed |= not torch.allclose(with_types, expected[0], atol=tolerance, rtol=0)
    for merging, rows in ((PADDED, [first, second]), (EQUAL, [first, first])):
        merged = replace(loaded, padded=replace(loaded.padded, merging=merging))
        try:
            answers = merged.forward(rows, reading)
        except (RuntimeError, ValueError, IndexError):
            continue
        allowed = expected if merging == PADDED else [expected[0], expected[0]]
        if are_close(answers, allowed, tolerance):
            break
    else:
        merging, merged = ALONE, alone
    if merging != PADDED:
        name = type(loaded.model).__name__
        log(f"batches: padding changes the answers of {name}: {merging}")
    return replace(merged, typed=typed)


def _use_onednn_layout(
    model: PreTrainedModel,
    environ: Mapping[str, str],
    answers: Callable[[], Sequence[torch.Tensor]],
) -> None:
    """Convert the weights of a model's linear layers to the layout of the CPU's kernels, if it has
    such kernels and the model's answers to a few texts stay the same. Otherwise log the reason.
    Raise ValueError if AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1.
    """
    if blocked_weights.why_not(model, model.dtype, environ) is not None:
        return

    def are_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
        return are_close(one, other, tolerance_of(other, model.dtype))

    if fault := blocked_weights.use(model, answers, are_same):
        log(f"weights: in PyTorch's layout: {fault}")


def _compile_programs(
    loaded: LoadedModel, kind: str, reading: OutputKind, environ: Mapping[str, str]
) -> LoadedModel:
    """Move a model to a device that compiles a program for each shape, and compile all of them.
    Raise ModelError if its answers differ from the CPU's, and ValueError if AMPHORA_BUCKETS is
    invalid."""
    merged = _choose_merging(loaded, Reading.TOKENS if reading is Reading.MEAN else reading)
    if merged.padded.merging != PADDED:
        raise programs.refused(kind, f"padding changes its answers ({merged.padded.merging})")
    alone = loaded.alone()
    has_types = TYPE_IDS in loaded.padded.inputs and TYPE_IDS in loaded.tokenizer.model_input_names
    buckets = Buckets.read(environ, loaded.max_length)
    taken, count = loaded.padded.inputs, len(buckets.shapes)
    layout = Programs(
        compute=programs.compiled(loaded.model, taken, reading, kind, count),
        buckets=buckets,
        kind=kind,
        pad=loaded.padded.pad,
        has_types=has_types,
        per_token=reading is Reading.TOKENS,
        pools=isinstance(reading, Pooling),
    )
    probes: dict[int, list[tuple[TokenRow, torch.Tensor]]] = {}
    for length in {shape.length for shape in buckets.shapes}:
        rows = [
            # A row that is too long keeps its last token.
            row if len(row.ids) <= length else TokenRow([*row.ids[: length - 1], row.ids[-1]])
            for row in (loaded.longest(), loaded.probes()[0])
        ]
        # Programs always receive types, and types of 0 change the answers of some models.
        answers = alone.forward([_typed(row) if has_types else row for row in rows], reading)
        probes[length] = list(zip(rows, answers, strict=True))
    programs.move(loaded.model, kind, reading)
    layout.compile(probes, loaded.model.dtype)
    return replace(merged, layout=layout)


@torch.inference_mode()
def _generation_scores(loaded: LoadedModel) -> list[torch.Tensor]:
    """Compute the scores of a decoder for a prompt and for a token after it."""
    model: Any = loaded.model
    ids = torch.tensor([loaded.probes()[1].ids], device=model.device)
    read: dict[str, Any] = {"input_ids": ids}
    more: dict[str, Any] = {"input_ids": ids[:, :1]}
    if model.config.is_encoder_decoder:
        read["decoder_input_ids"] = ids
        more = {"decoder_input_ids": ids[:, :1]}
    first = model(**read, use_cache=True)
    if (cache := getattr(first, "past_key_values", None)) is None:
        return [first.logits[0].float()]
    if model.config.is_encoder_decoder:
        more["encoder_outputs"] = (first.encoder_last_hidden_state,)
    # The name since transformers 5.24, and the one before.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    then = model(**more, **{name: cache}, use_cache=True)
    return [first.logits[0].float(), then.logits[0].float()]


def _typed(row: TokenRow) -> TokenRow:
    """Return the row with types of 0."""
    return replace(row, types=[0] * len(row.ids))
