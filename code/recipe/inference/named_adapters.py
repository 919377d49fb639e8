"""Adapters of a served encoder, selected by name: loads them, and predicts for several together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModel

from recipe.backend import loading
from recipe.backend.proofs import verification
from recipe.backend.proofs.checking import Captured, replay_task
from recipe.backend.requests.payloads import Request
from recipe.backend.rows import Reading
from recipe.backend.served_task import ServedTask
from recipe.backend.shared_encoder import EncoderShare, HostedOrigin, SharedEncoder
from recipe.console import log
from recipe.errors import ModelError
from recipe.inference import registry
from recipe.models.sources.origin import HUB_NAME, Origin
from recipe.storage import checksums
from recipe.task_table import SERVED, resolve


def load(
    name: str, folder: str, model: ServedTask, origin: Origin, environ: Mapping[str, str]
) -> ServedTask:
    """Load the adapter in a folder, by whose name requests then select it. Return its task.

    Args:
        model: The base's task.
        origin: Where the base comes from.

    Raises:
        ModelError: It is not one of this base, or its folder is incomplete or damaged; or it does
            not answer as its proof says.
    """
    if model.loaded_model is None:
        raise ModelError("The served model takes no adapters: a pipeline computes it.")
    adapters = model.adapters
    if adapters.shared is None:
        adapters.shared = SharedEncoder(model.loaded_model, origin)
    hosted = HostedOrigin(folder, origin.options, base=origin.location, shared=adapters.shared)
    _check_base(hosted)
    with checksums.verified(folder):
        # HF_TASK names the task of the base.
        others = {key: value for key, value in environ.items() if key != "HF_TASK"}
        chosen = registry.chosen(hosted, others)
        vectors = (registry.FEATURES, registry.SENTENCES)
        is_bare = chosen == registry.FEATURES and not hosted.sentence_modules
        if is_bare and registry.chosen(origin, environ) in vectors:
            # With the base's own pooling.
            adapted = loading.load(hosted, AutoModel, others, Reading.MEAN)
            task: ServedTask = dataclasses.replace(model, loaded=adapted)  # type: ignore[type-var]
        elif (served := SERVED.get(chosen)) is not None:
            task = resolve(served.load)(hosted, **served.options)
        else:
            raise ModelError(f"The adapter {folder} is for {chosen}, which takes no adapters.")
        verification.verify(hosted, chosen, task, others)
    adapters.tasks[name] = task
    log(f"adapter: {name} ({chosen}) of {origin.location}")
    return task


def select(request: Request, model: ServedTask) -> ServedTask:
    """Return the task of the adapter that a request names, or that of the model itself."""
    return model.adapters.tasks[request.adapter] if request.adapter else model


def predict(inputs: Sequence[Request], model: ServedTask) -> list[Any]:
    """Return a prediction for each request, or an exception. The encoder computes the texts of all
    adapters together."""
    members: dict[int, list[int]] = {}
    for index, prepared in enumerate(inputs):
        members.setdefault(id(prepared.task or model), []).append(index)
    groups = [(inputs[some[0]].task or model, some) for some in members.values()]
    if len(groups) == 1:
        return [*groups[0][0].predict(inputs)]
    shared = model.adapters.shared
    assert shared is not None
    results: list[Any] = [None] * len(inputs)
    # What each unanswered group has computed so far; most compute once.
    values: dict[int, list[Sequence[Tensor]]] = {number: [] for number in range(len(groups))}
    while values:
        parts: dict[int, EncoderShare] = {}
        for number, computed in [*values.items()]:
            task, some = groups[number]
            try:
                answers = replay_task(task, computed).predict([inputs[index] for index in some])
            except Captured as captured:
                assert task.loaded_model is not None
                parts[number] = EncoderShare(task.loaded_model, captured.rows, captured.reading)
            else:
                del values[number]
                for index, answer in zip(some, answers, strict=True):
                    results[index] = answer
        for number, more in zip(parts, shared.forward([*parts.values()]), strict=True):
            values[number].append(more)
    return results


def _check_base(hosted: HostedOrigin) -> None:
    """Raise ModelError if an adapter and its base have different names on the hub. Folders have no
    name that means anything: shapes are compared, and answers if the adapter has a proof."""
    named = str(hosted.adapter.get("base_model_name_or_path") or "")
    served = hosted.base
    names = [name.rpartition("/")[2].lower() for name in (named, served)]
    are_names = all("/" in name and HUB_NAME.fullmatch(name) for name in (named, served))
    if are_names and not Path(named).exists() and names[0] != names[1]:
        raise ModelError(
            f"The adapter {hosted.location} is of the base {named}, and {served} is served.",
            "Serve its base, or if both are the same model, name it in base_model_name_or_path.",
        )
