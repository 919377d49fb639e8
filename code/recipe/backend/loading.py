"""How a saved model comes to answer: it is read, held to its own answers, and laid out as this host
computes it fastest.

`AMPHORA_DTYPE` (float32, bfloat16, float16 or int8) overrides the precision; `AMPHORA_COMPILE=1`
compiles the model with torch.compile.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from recipe.backend import packed_rows, precision
from recipe.backend.engines import conversion
from recipe.backend.loaded_model import ALONE, EQUAL, INPUTS, PADDED, LoadedModel
from recipe.backend.packed_rows import PackedRows
from recipe.backend.rows import Reading, TokenRow, are_close, lay_out, tolerance_of
from recipe.backend.saved import weights
from recipe.backend.saved.origin import Origin
from recipe.backend.static import programs as static
from recipe.backend.static.buckets import Buckets
from recipe.backend.static.programs import DEVICES, Layout, Programs
from recipe.compat import positions_of
from recipe.data.column_names import TYPE_IDS
from recipe.models import packed_encoders
from recipe.tokenization.encoding import types_alone

_WRITERS = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)


def load(
    origin: Origin,
    architecture: Any,
    environ: Mapping[str, str] = os.environ,
    means: bool = False,
) -> LoadedModel:
    """The model by one of transformers' Auto classes, ready to answer, on an accelerator if
    there is one.

    Args:
        origin: Where it is.
        architecture: The Auto class.
        environ: AMPHORA_DTYPE and the other variables of this package.
        means: Whether nothing but means of hidden states will be asked for.

    Raises:
        ModelError: It cannot be read, or the device is one that cannot compute it.
        ValueError: AMPHORA_DTYPE is not the name of a precision.
    """
    kind, name, dtype = precision.chosen(environ)
    gives_way = precision.may_replace(kind, name, environ)
    if gives_way and architecture is AutoModelForCausalLM and precision.is_published_in(origin):
        name, dtype = "float16", torch.float16
    if kind in DEVICES and architecture in _WRITERS:
        raise static.refused(
            kind,
            "it generates text, in shapes that grow with each token (docs/TRAINIUM.md names the "
            "vLLM image that serves decoders there)",
        )
    if kind in DEVICES and architecture is AutoModelForMaskedLM:
        raise static.refused(kind, "it fills masks, with scores of the whole vocabulary")
    host = "cpu" if kind in DEVICES else kind
    model = weights.read(static.origin_for(kind, origin), architecture, dtype).eval().to(host)
    weights.refuse_broken(model, origin)
    if kind not in DEVICES and packed_encoders.least_of(model.config) > 1:
        packed_encoders.take_lengths(model)
    tokenizer = origin.tokenizer()
    arguments = inspect.signature(model.forward).parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in arguments.values())
    has_types = "token_type_ids" in tokenizer.model_input_names
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        # Tokenizers without a limit of their own say 1e30.
        max_length=int(min(tokenizer.model_max_length, positions_of(model))),
        positions=positions_of(model),
        inputs=INPUTS if takes_all else INPUTS & set(arguments),
        typed=has_types and types_alone(tokenizer),
    )
    is_compiled = environ.get("AMPHORA_COMPILE", "") in ("1", "true")
    if architecture in _WRITERS:
        packed_rows.tell_padded("the model writes texts", environ)
        if kind == "cpu" and not (is_compiled or name == "int8"):
            lay_out(model, environ, functools.partial(_written, loaded))
    elif kind in DEVICES:
        reading = Reading.MEAN if means else _reading_of(architecture)
        loaded = _on_device(loaded, kind, reading, environ)
    else:
        reading = _reading_of(architecture)
        tried = functools.partial(_tried, loaded, reading)
        model, name = precision.settled(model, origin, architecture, name, environ, tried)
        loaded = _with_safe_merging(replace(loaded, model=model), reading)
        why_not = _why_unusual(loaded, name, environ)
        if conversion.is_requested(environ):
            loaded = _by_openvino(loaded, architecture, why_not)
        else:
            loaded = _laid_out(loaded, architecture.__name__, reading, why_not, environ)
    if name == "int8":
        model = precision.in_int8(model)
    if is_compiled and kind not in DEVICES:
        model.forward = torch.compile(model.forward, dynamic=True)
    print(f"model: {type(model).__name__} on {kind} in {name}", flush=True)
    return replace(loaded, model=model)


def _with_safe_merging(loaded: LoadedModel, reading: Reading) -> LoadedModel:
    """The same with the widest merging whose answers are those of each row alone.

    Some models heed no mask (FNet), or find the end of a text by its padding, and have none
    (GPT-2 with a head): with these, what a request's neighbours are would change its answer.
    """
    first, second = loaded.probes()
    alone = replace(loaded, merging=ALONE)
    expected = alone.forward([first, second], reading)
    tolerance = tolerance_of(expected, loaded.model.dtype)
    typed = loaded.typed
    if "token_type_ids" in loaded.inputs and "token_type_ids" in loaded.tokenizer.model_input_names:
        # Types that are all 0 are what most models assume; some add something for them.
        (with_types,) = alone.forward([_typed(first)], reading)
        typed |= not torch.allclose(with_types, expected[0], atol=tolerance, rtol=0)
    for merging, rows in ((PADDED, [first, second]), (EQUAL, [first, first])):
        try:
            merged = replace(loaded, merging=merging).forward(rows, reading)
        except (RuntimeError, ValueError, IndexError):
            continue
        allowed = expected if merging == PADDED else [expected[0], expected[0]]
        if are_close(merged, allowed, tolerance):
            break
    else:
        merging = ALONE
    if merging != PADDED:
        print(f"batches: {type(loaded.model).__name__} answers otherwise if texts are padded: "
              f"{merging}", flush=True)  # fmt: skip
    return replace(loaded, merging=merging, typed=typed)


def _by_openvino(loaded: LoadedModel, architecture: Any, why_not: Sequence[str]) -> LoadedModel:
    """Return the model as OpenVINO computes it.

    Args:
        loaded: The model.
        architecture: The Auto class that loaded it.
        why_not: Why it is computed as it is (`_why_unusual`).

    Raises:
        ModelError: OpenVINO cannot compute it.
    """
    reasons = [*why_not]
    if architecture is AutoModelForMaskedLM:
        reasons.append("of masked texts few tokens are asked")
    if reasons:
        raise conversion.refused(" and ".join(reasons))
    untyped = {TYPE_IDS} - set(loaded.tokenizer.model_input_names)
    inputs = sorted(loaded.inputs - untyped)
    return replace(loaded, engine=conversion.converted(loaded.model, inputs, loaded.max_length))


def _why_unusual(loaded: LoadedModel, name: str, environ: Mapping[str, str]) -> list[str]:
    """Why texts do not go through the model end to end, nor through another engine.

    Args:
        name: What AMPHORA_DTYPE calls its precision.
        environ: AMPHORA_COMPILE.
    """
    # int8 has one scale for a call's activations, and what torch.compile made is padded.
    reasons = {
        f"the model takes {loaded.merging}": loaded.merging != PADDED,
        "AMPHORA_DTYPE is int8": name == "int8",
        "AMPHORA_COMPILE is set": environ.get("AMPHORA_COMPILE", "") in ("1", "true"),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _laid_out(
    loaded: LoadedModel,
    architecture: str,
    reading: Reading,
    why_not: Sequence[str],
    environ: Mapping[str, str],
) -> LoadedModel:
    """The same with texts end to end and weights as kernels read them, where answers stay;
    else a line says why not.

    Args:
        architecture: The name of the Auto class that loaded the model.
        reading: What its answers are made of.
        why_not: Why it is not to be (`_why_unusual`).
        environ: AMPHORA_PACKING.

    Raises:
        ValueError: AMPHORA_PACKING is neither 0 nor 1.
    """
    if why_not:
        packed_rows.tell_padded(" and ".join(why_not), environ)
        return loaded
    first, second = loaded.probes()
    rows = [second, first, first, TokenRow(second.ids[:-1]), second]
    packed = packed_rows.checked(
        loaded.model,
        PackedRows.of(loaded.model, architecture, loaded.inputs, environ),
        lambda packed: replace(loaded, merging=ALONE, packed=packed).forward(rows, reading),
    )
    loaded = replace(loaded, packed=packed)
    # Of other kinds it is not known that nothing else computes with a layer's weights.
    if loaded.packed is not None:
        alone = replace(loaded, packed=None, merging=ALONE)
        lay_out(loaded.model, environ, lambda: alone.forward(alone.probes(), reading))
    return loaded


def _on_device(
    loaded: LoadedModel, kind: str, reading: Reading, environ: Mapping[str, str]
) -> LoadedModel:
    """Move a model to a device that compiles a program for each shape, and compile them all.

    Args:
        loaded: A model that is still on the CPU.
        kind: The kind of device.
        reading: What its answers are made of.
        environ: AMPHORA_BUCKETS.

    Raises:
        ModelError: Its answers would differ.
        ValueError: AMPHORA_BUCKETS has no such shapes.
    """
    of_texts = Reading.TOKENS if reading is Reading.MEAN else reading
    merging = _with_safe_merging(loaded, of_texts)
    if merging.merging != PADDED:
        raise static.refused(kind, f"it takes {merging.merging}, and texts are padded there")
    packed_rows.tell_padded(f"the device is {kind}", environ)
    alone = replace(merging, merging=ALONE)
    layout = Layout(
        pad=loaded.tokenizer.pad_token_id or 0,
        has_types=TYPE_IDS in loaded.inputs and TYPE_IDS in loaded.tokenizer.model_input_names,
        per_token=reading is Reading.TOKENS,
    )
    buckets = Buckets.read(environ, loaded.max_length)
    call = static.call_of(loaded.model, loaded.inputs, reading)
    call = static.compiled(call, kind, len(buckets.shapes))
    programs = Programs(call, layout, buckets, kind)
    prove = programs.prepare(
        loaded.longest(),
        loaded.probes()[0],
        # Some models add something for types that are all 0, which a program is always given.
        lambda row: alone.forward([_typed(row) if layout.has_types else row], reading)[0],
        loaded.model.dtype,
    )
    static.move(loaded.model, kind)
    prove()
    return replace(merging, programs=programs)


def _tried(loaded: LoadedModel, reading: Reading, with_longest: bool) -> list[torch.Tensor]:
    """Answers to a short text, a longer one, and maybe the longest one, each by itself."""
    rows = [*loaded.probes(), *([loaded.longest()] if with_longest else [])]
    return replace(loaded, merging=ALONE).forward(rows, reading)


@torch.inference_mode()
def _written(loaded: LoadedModel) -> list[torch.Tensor]:
    """Scores of a model that writes texts: of a prompt, and of a token after it."""
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
    then = model(**more, past_key_values=cache, use_cache=True)
    return [first.logits[0].float(), then.logits[0].float()]


def _reading_of(architecture: Any) -> Reading:
    """What the answers of a model of an Auto class are made of."""
    is_labelled = architecture is AutoModelForSequenceClassification
    return Reading.LABELS if is_labelled else Reading.TOKENS


def _typed(row: TokenRow) -> TokenRow:
    """The row, each of its tokens of the first part of a pair."""
    return replace(row, types=[0] * len(row.ids))
