"""Loads a saved model, and chooses the layout that this host computes fastest without changing its
answers.

`AMPHORA_DTYPE` (float32, bfloat16 or float16) overrides the precision.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
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
from recipe.backend.engines.ctranslate import CALL_PADDING, CALL_TOKENS, Forward
from recipe.backend.engines.int8 import Artefact, Trial, weights_of, why_unavailable
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.packed_rows import PackedRows
from recipe.backend.padded_rows import ALONE, EQUAL, PADDED, PaddedRows
from recipe.backend.programs import DEVICES, Buckets, Programs
from recipe.backend.proofs import int8_trial
from recipe.backend.proofs import reference as references
from recipe.backend.proofs.reference import Reference
from recipe.backend.rows import OutputKind, Pooling, Reading, TokenRow, tolerance_of
from recipe.backend.saved import weights
from recipe.backend.shared_encoder import HostedOrigin, takes_adapters
from recipe.compat import positions_of
from recipe.console import log
from recipe.data.column_names import TYPE_IDS
from recipe.models import flat_attention, packed_encoders
from recipe.models.sources.origin import Origin
from recipe.models.sources.tokenizers import log_replacement
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
    reading: OutputKind | None = None,
) -> LoadedModel:
    """Load a model by one of transformers' Auto classes, on an accelerator if there is one.

    `reading` is what will be read: by default labels of sequence classifiers, else values of
    tokens. Raise ModelError if the model cannot be read, or the device cannot compute it, and
    ValueError if AMPHORA_DTYPE is not a precision.
    """
    if reading is None:
        is_labelled = architecture is AutoModelForSequenceClassification
        reading = Reading.LABELS if is_labelled else Reading.TOKENS
    if isinstance(origin, HostedOrigin):
        return _adapted(origin, architecture, environ, reading)
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
    log_replacement(tokenizer)
    has_types = TYPE_IDS in tokenizer.model_input_names
    # Tokenizers without a limit report 1e30.
    loaded = wrap_model(model, tokenizer, int(min(tokenizer.model_max_length, positions_of(model))))
    loaded = replace(
        loaded,
        typed=has_types and types_alone(tokenizer),
        answers_questions=architecture is AutoModelForQuestionAnswering,
    )
    proof = references.find(origin, environ)

    def read_exactly() -> LoadedModel:
        exact = weights.read(origin, architecture, torch.float32).eval().to(loaded.model.device)
        return replace(loaded, model=exact).alone()

    if architecture in _WRITERS:
        _choose_weights(loaded, Reference.from_proof(proof, None), origin, environ, read_exactly)
    else:
        if kind not in DEVICES:
            # The caller computes means of tokens.
            states = reading if reading is Reading.LABELS else Reading.TOKENS
            loaded, name = precision.settled(loaded, origin, architecture, name, environ, states)
        loaded = laid_out(loaded, origin, kind, architecture, reading, environ, read_exactly)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    log(f"model: {type(loaded.model).__name__} on {kind} in {name} ({versions})")
    return loaded


def _adapted(
    origin: HostedOrigin, architecture: Any, environ: Mapping[str, str], reading: OutputKind
) -> LoadedModel:
    """Return the served model with an adapter. Raise ModelError if it does not fit, or does not
    give the answers of its proof."""
    loaded = origin.shared.adapt(origin, architecture)
    loaded = replace(loaded, answers_questions=architecture is AutoModelForQuestionAnswering)
    proved = Reference.from_proof(references.find(origin, environ), reading)
    if proved is not None and (why_not := proved.try_layout(loaded)):
        raise references.refused(origin, proved, loaded, why_not, None)
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
    read_exactly: Callable[[], LoadedModel] | None = None,
) -> LoadedModel:
    """Return an encoder in the layout that this host computes fastest: programs of fixed shapes,
    its int8, packed or padded rows, whose answers to the probes are those of its proof, or without
    one of each text alone.

    Args:
        loaded: In its final precision, and on the CPU if the device `kind` needs fixed shapes.
        read_exactly: Loads the model in float32, each text alone, to say where a difference is.

    Raises:
        ModelError: The device cannot compute it, no layout gives the answers of the proof, or the
            files of its int8 are damaged.
        ValueError: AMPHORA_PACKING, AMPHORA_PROOF or AMPHORA_BUCKETS is invalid.
    """
    if _needs_types(loaded, reading):
        loaded = replace(loaded, typed=True)
    if precision.is_reference():
        return loaded.alone()
    proved = Reference.from_proof(references.find(origin, environ), reading)
    if kind in DEVICES:
        compiled = _compile_programs(loaded, kind, reading, environ)
        if proved is not None and (why_not := proved.try_layout(compiled)):
            raise references.refused(origin, proved, compiled, why_not, read_exactly)
        return compiled
    reference = proved or Reference.from_texts_alone(loaded, reading)

    def float_layout() -> LoadedModel:
        """Return the model in the first of its layouts that gives the answers of the reference."""
        for name, candidate in _layouts(loaded, architecture, environ):
            if not (why_not := reference.try_layout(candidate)):
                return candidate
            log(f"batches: not {name}, since {why_not}")
        raise references.refused(origin, reference, loaded, why_not, read_exactly)

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
    trial = Trial(why_not)
    if not why_not:
        forward = Forward(artefact.folder, artefact.proof.outputs, dtype=loaded.model.dtype)
        tokens = min(CALL_TOKENS, loaded.padded.call_tokens)
        calls = replace(loaded.padded, call_tokens=tokens, call_padding=CALL_PADDING)
        quick = replace(loaded, padded=calls)
        trial = int8_trial.try_out(artefact, forward, reference, lambda: (float_layout(), quick))
        if not trial.why_not:
            log(f"engine: CTranslate2 {importlib.metadata.version('ctranslate2')} in int8: {trial}")
            return replace(quick, engine=forward, trial=trial)
    times = f" ({trial})" if trial.milliseconds else ""
    log(f"engine: PyTorch instead of int8: {trial.why_not}{times}")
    return replace(float_layout(), trial=trial)


def _layouts(
    loaded: LoadedModel, architecture: Any, environ: Mapping[str, str]
) -> Iterator[tuple[str, LoadedModel]]:
    """Yield the layouts of an encoder with their names, the fastest first: packed texts with
    weights in the layout of the CPU's kernels, by graphs and without, and padded texts in wide and
    narrow calls. The one before is undone.

    Other texts of a call change the answers of models that ignore the attention mask (FNet), or
    find the end of a text by its padding but have no padding token (GPT-2 with a head).
    """
    model = loaded.model
    packed = PackedRows.from_model(model, architecture.__name__, loaded.padded.inputs, environ)
    if packed is not None:
        usual = model.config._attn_implementation
        flat_attention.use(model)
        # Not for models of unknown families, which may use the weights of a layer elsewhere.
        if blocked_weights.why_not(model, model.dtype, environ) is None:
            undo = blocked_weights.reorder(model, fuses=not takes_adapters(environ))
            yield "packed texts with oneDNN's weights", replace(loaded, layout=packed)
            undo()
        longest = max(loaded.positions, loaded.max_length)
        if (recorded := packed.with_graphs(model, longest, environ)) is not None:
            yield "packed texts by graphs", replace(loaded, layout=recorded)
        yield "packed texts", replace(loaded, layout=packed)
        model.set_attn_implementation(usual)
    for merging in (PADDED, EQUAL, ALONE):
        padded = replace(loaded.padded, merging=merging)
        yield f"calls of {merging}", replace(loaded, padded=padded)


def _needs_types(loaded: LoadedModel, reading: OutputKind) -> bool:
    """Return whether types of 0 change a model's answers. Most models assume types of 0 if there
    are none, but some compute something else."""
    if loaded.typed:
        return True
    if not (TYPE_IDS in loaded.padded.inputs and TYPE_IDS in loaded.tokenizer.model_input_names):
        return False
    alone, row = loaded.alone(), loaded.probes()[0]
    (expected,) = alone.forward([row], reading)
    (typed,) = alone.forward([_typed(row)], reading)
    tolerance = tolerance_of([expected], loaded.model.dtype)
    return float((typed - expected).abs().max()) > tolerance


def _choose_weights(
    loaded: LoadedModel,
    reference: Reference | None,
    origin: Origin,
    environ: Mapping[str, str],
    read_exactly: Callable[[], LoadedModel],
) -> None:
    """Convert the weights of the linear layers of a model that generates text to the layout of the
    CPU's kernels, if it has such kernels and the log-probabilities of probes stay the same. Raise
    ModelError if those of its proof are others in both layouts, and ValueError if
    AMPHORA_BLOCKED_WEIGHTS is neither 0 nor 1."""
    if precision.is_reference():
        return
    model, is_proved = loaded.model, reference is not None
    if blocked_weights.why_not(model, model.dtype, environ) is None:
        try:
            reference = reference or Reference.from_texts_alone(loaded, None)
        except Exception as error:
            log(f"weights: in PyTorch's layout: {type(error).__name__}: {str(error)[:200]}")
            return
        undo = blocked_weights.reorder(model)
        if not (why_not := reference.try_layout(loaded)):
            return
        undo()
        log(f"weights: in PyTorch's layout: {why_not}")
    if reference is not None and is_proved and (why_not := reference.try_layout(loaded)):
        raise references.refused(origin, reference, loaded, why_not, read_exactly)


def _compile_programs(
    loaded: LoadedModel, kind: str, reading: OutputKind, environ: Mapping[str, str]
) -> LoadedModel:
    """Move a model to a device that compiles a program for each shape, and compile all of them.
    Raise ModelError if its answers differ from the CPU's, and ValueError if AMPHORA_BUCKETS is
    invalid."""
    states = Reading.TOKENS if reading is Reading.MEAN else reading
    padded = Reference.from_texts_alone(loaded, states)
    if why_not := padded.try_layout(loaded):
        raise programs.refused(kind, f"padding changes its answers: {why_not}")
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
    return replace(loaded, layout=layout)


def _typed(row: TokenRow) -> TokenRow:
    """Return the row with types of 0."""
    return replace(row, types=[0] * len(row.ids))
