"""Prompts with equal settings, continued together by transformers' `generate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from threading import Semaphore, Thread
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from recipe.backend.generation import decoding, gathering
from recipe.backend.generation.decoding import (
    STOPPED,
    Completion,
    Finite,
    Pauses,
    Penalties,
    Watch,
    Writer,
)
from recipe.backend.generation.gathering import Piece
from recipe.backend.generation.prompts import Prompt
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.padded_rows import BATCH
from recipe.backend.saved.weights import embeddings_of
from recipe.console import log


def may_merge(loaded: LoadedModel) -> bool:
    """Return whether `generate` continues padded prompts exactly as it continues each alone.

    Decoders of some families (BART, Whisper) count positions from the padding on; others ignore the
    attention mask.
    """
    model: Any = loaded.model
    # Rotary embeddings of some kinds change for all rows with the longest one, and chunked
    # attention depends on where a chunk begins.
    config = model.config.get_text_config()
    kinds = re.findall(r'"(?:rope_)?type": "([^"]*)"', config.to_json_string(use_diff=False))
    if any("dynamic" in kind or kind in ("longrope", "su") for kind in kinds):
        return False
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - {"full_attention", "sliding_attention"}:
        return False
    if getattr(config, "attention_chunk_size", None):
        return False
    vocabulary = embeddings_of(model)
    # Tokens from the whole vocabulary, rarely special ones. One token is shorter than the
    # convolutions of Mamba, which transformers 4 computes over the padding.
    long = [(7 + 31 * index) % vocabulary for index in range(14)]
    prompts = [long[:1], long[:5], long]

    def scores(rows: list[list[int]]) -> torch.Tensor:
        """Return the scores after each prompt, and after one further token: (prompts, 2,
        vocabulary)."""
        output = model.generate(
            **decoding.padded(loaded, rows), max_new_tokens=2, do_sample=False, num_beams=1,
            num_return_sequences=1, eos_token_id=None, pad_token_id=decoding.pad_token_id(loaded),
            prefix_allowed_tokens_fn=lambda row, ids: long[:1],
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return torch.stack(output.logits, dim=1).float()

    try:
        together, alone = scores(prompts), torch.cat([scores([prompt]) for prompt in prompts])
    except Exception as error:
        log(f"batches: {type(error).__name__}: {str(error)[:200]}")
        return False
    # The tolerance covers rounding; a visible neighbour changes scores by far more.
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.08
    spread = (alone - alone.mean(-1, keepdim=True)).norm(dim=-1)
    difference = together - alone
    difference = (difference - difference.mean(-1, keepdim=True)).norm(dim=-1)
    return bool((difference <= tolerance * spread.clamp(min=1e-6)).all())


def pieces(loaded: LoadedModel, prompts: Sequence[Prompt], merges: bool) -> Iterator[Piece[Prompt]]:
    """Group the prompts of a request by the settings that a call of `generate` shares."""
    settings = prompts[0].settings
    chosen = {**vars(loaded.model.generation_config), **dict(settings.chosen)}
    # Penalties on tokens of the prompt would apply to its padding, too.
    if chosen["repetition_penalty"] not in (None, 1.0) or chosen["no_repeat_ngram_size"]:
        merges = False
    most = max(1, BATCH // settings.sequences) if merges else 1
    kinds: dict[Any, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault((prompt.new, prompt.is_chat), []).append(prompt)
    for kind, some in kinds.items():
        # The samples drawn for a prompt depend on those drawn for its neighbours.
        alike = (settings, *kind) if settings.seed is None and most > 1 else object()
        yield from gathering.pieces(some, alike, most)


def write(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    pause: Callable[[], None],
    report: Callable[[Completion], None] | None = None,
) -> list[list[Completion]]:
    """Return the texts of each prompt of pieces that may share a call. Call `pause` after each
    step, and `report` with each text that a token was added to."""
    settings = prompts[0].settings
    model: Any = loaded.model
    ends = decoding.end_ids(model)
    # Chat models often end their turn with a token that only their tokenizer names.
    end = loaded.tokenizer.eos_token_id
    if end is not None and (prompts[0].is_chat or not ends):
        ends.append(end)
    follows = report is not None or settings.logprobs
    writers = [
        Writer(Completion(prompt.index, index), loaded.tokenizer, prompt, ends, follows=follows)
        for prompt in prompts
        for index in range(settings.sequences)
    ]
    inputs = decoding.padded(loaded, [prompt.ids for prompt in prompts])
    penalties = Penalties(inputs["input_ids"].shape[1], settings)
    if settings.do_sample:
        decoding.set_seed(settings.seed, prompts[0].index)
    with torch.inference_mode():
        model.generate(
            **inputs,
            **settings.options(),
            max_new_tokens=prompts[0].new,
            eos_token_id=sorted(set(ends)) or None,
            pad_token_id=decoding.pad_token_id(loaded),
            logits_processor=LogitsProcessorList([Finite(ends), penalties]),
            stopping_criteria=StoppingCriteriaList(
                [Watch(writers, penalties, report), Pauses(pause, draws=settings.do_sample)]
            ),
        )
    for writer in writers:
        if not writer.written.finish:
            writer.finish(STOPPED)  # By the model's own settings.
    texts = [writer.written for writer in writers]
    count = settings.sequences
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def events(loaded: LoadedModel, prompts: Sequence[Prompt], merges: bool) -> Iterator[Completion]:
    """Yield a text of a request after each token that was added to it.

    The thread generates only while the caller waits for the next step, so its random numbers do not
    depend on other requests and it does not run ahead of a slow reader.
    """
    steps: Queue[list[Completion] | BaseException | None] = Queue()
    wanted, is_left = Semaphore(0), False
    step: list[Completion] = []

    def hand_over() -> None:
        steps.put([*step])
        step.clear()
        wanted.acquire()
        if is_left:
            raise GeneratorExit  # The reader has left.

    def generate() -> None:
        try:
            for piece in pieces(loaded, prompts, merges):
                write(loaded, piece.inputs, hand_over, step.append)
            steps.put(None)
        except BaseException as error:
            steps.put(error)

    thread = Thread(target=generate, daemon=True)  # a reader may never come back
    thread.start()
    try:
        while (made := steps.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            yield from made
            wanted.release()
    finally:
        is_left = True
        wanted.release()
        thread.join()
