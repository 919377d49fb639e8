"""Prompts with equal settings, continued together by transformers' `generate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Queue
from threading import Semaphore, Thread
from typing import Any

from recipe.backend.generation import decoding
from recipe.backend.generation.decoding import STOPPED, Completion, Watch, Writer
from recipe.backend.generation.gathering import GenerationGroups, GroupMembers
from recipe.backend.generation.prompts import Prompt
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.padded_rows import BATCH
from recipe.models.packed_decoders import DECODERS

MERGED = {*DECODERS, "bloom", "gemma2", "gemma3_text", "mixtral", "opt", "phi"}
"""Types of models that continue padded prompts exactly as each alone; a test compares both. Others
count positions from the padding on (BART), or ignore the attention mask (RWKV)."""


def may_merge(config: Any) -> bool:
    """Return whether prompts of several lengths may share a call of `generate`."""
    # Rotary embeddings of some kinds change for all rows with the longest one.
    kinds = re.findall(r'"(?:rope_)?type": "([^"]*)"', config.to_json_string(use_diff=False))
    depends = any("dynamic" in kind or kind in ("longrope", "su") for kind in kinds)
    return config.model_type in MERGED and not depends


def gather(
    gathering: GenerationGroups, loaded: LoadedModel, prompts: Sequence[Prompt], merges: bool
) -> list[GroupMembers]:
    """Add the prompts of a request to groups that share the settings of a call of `generate`."""
    settings = prompts[0].settings
    chosen = {**vars(loaded.model.generation_config), **dict(settings.chosen)}
    # Penalties on tokens of the prompt would apply to its padding, too.
    if chosen["repetition_penalty"] not in (None, 1.0) or chosen["no_repeat_ngram_size"]:
        merges = False
    most = max(1, BATCH // settings.sequences) if merges else 1
    # The samples drawn for a prompt depend on those drawn for its neighbours.
    alike: Any = settings if settings.seed is None and most > 1 else object()
    kinds: dict[Any, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault((alike, prompt.new, prompt.is_chat), []).append(prompt)
    parts: list[GroupMembers] = []
    for kind, some in kinds.items():
        parts += gathering.add(some, kind, most, partial(write, loaded))
    return parts


def write(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    pause: Callable[[], None],
    report: Callable[[Completion], None] | None = None,
) -> list[list[Completion]]:
    """Return the texts of each prompt of a group. After each step call `pause`, or `report` with
    the only text."""
    settings = prompts[0].settings
    ends = decoding.end_ids(loaded.model)
    # Chat models often end their turn with a token that only their tokenizer names.
    end = loaded.tokenizer.eos_token_id
    if end is not None and (prompts[0].is_chat or not ends):
        ends.append(end)
    writers = [
        Writer(Completion(prompt.index), loaded.tokenizer, prompt, ends, follows=settings.follows)
        for prompt in prompts
        for _ in range(settings.sequences)
    ]
    texts = [writer.written for writer in writers]
    if report is not None:
        pause = partial(report, texts[0])
    decoding.generate(
        loaded,
        prompts,
        Watch(pause, settings.do_sample, writers),
        ends,
        settings.seed,
        max_new_tokens=prompts[0].new,
        eos_token_id=sorted(set(ends)) or None,
        pad_token_id=decoding.pad_token_id(loaded),
        **settings.options(),
    )
    for writer in writers:
        if not writer.written.finish:
            writer.finish(STOPPED)  # By the model's own settings.
    count = settings.sequences
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def events(loaded: LoadedModel, prompt: Prompt) -> Iterator[Completion]:
    """Yield the text of a prompt after each token that was added to it.

    The thread generates only while the caller waits for the next step, so its random numbers do not
    depend on other requests and it does not run ahead of a slow reader.
    """
    steps: Queue[Completion | BaseException | None] = Queue()
    wanted, is_left = Semaphore(0), False

    def hand_over(text: Completion) -> None:
        steps.put(text)
        wanted.acquire()
        if is_left:
            raise GeneratorExit  # The reader has left.

    def generate() -> None:
        try:
            write(loaded, [prompt], lambda: None, hand_over)
            steps.put(None)
        except BaseException as error:
            steps.put(error)

    thread = Thread(target=generate, daemon=True)  # a reader may never come back
    thread.start()
    try:
        while (text := steps.get()) is not None:
            if isinstance(text, BaseException):
                raise text
            yield text
            wanted.release()
    finally:
        is_left = True
        wanted.release()
        thread.join()
