"""Texts of equal settings that `generate` writes together, from first to last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from threading import Semaphore, Thread
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from recipe.inference import loaded_model, turns
from recipe.inference.generation import calls
from recipe.inference.generation.decoding import (
    Completion,
    Event,
    Finite,
    Notes,
    Pauses,
    Penalties,
    Watch,
    Writer,
)
from recipe.inference.generation.prompts import Prompt
from recipe.inference.loaded_model import ALONE, EQUAL, PADDED, LoadedModel
from recipe.inference.saved.weights import embeddings_of


def merging_of(loaded: LoadedModel) -> str:
    """Which prompts `generate` may continue together so that each text is what it is alone.

    Decoders of some families (BART's, Whisper's) count positions from the padding on, others heed
    no mask.
    """
    model: Any = loaded.model
    vocabulary = embeddings_of(model)
    # Tokens of all kinds, none of them special as a rule.
    long = [(7 + 31 * place) % vocabulary for place in range(14)]
    short, equal = long[:5], long[::-1]

    def steps(prompts: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        output = model.generate(
            **calls.inputs(loaded, prompts), max_new_tokens=2, do_sample=False, num_beams=1,
            num_return_sequences=1, eos_token_id=None, pad_token_id=calls.pad_token_id(loaded),
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return output.sequences[:, -2], [scores.float() for scores in output.logits]

    try:
        for merging, prompts in ((PADDED, [short, long]), (EQUAL, [long, equal])):
            firsts, together = steps(prompts)
            for place, prompt in enumerate(prompts):
                first, alone = steps([prompt])
                # Another first token, as good as this one, is followed by others.
                count = 2 if first[0] == firsts[place] else 1
                if not all(
                    are_same(own[0], both[place], model.dtype)
                    for own, both in zip(alone[:count], together, strict=False)
                ):
                    break
            else:
                return merging
    except Exception as error:
        print(f"batches: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return ALONE


def write(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    pause: Callable[[], None] = turns.pause,
    *,
    follows: bool = False,
    tell: Callable[[Completion, str], None] | None = None,
    start: Callable[[Watch], None] | None = None,
) -> list[list[Completion]]:
    """The texts of prompts that are one of `groups`, each prompt's in a list.

    Args:
        loaded: The model.
        prompts: They are continued together.
        pause: Lets others have their turn.
        follows: Whether the tokens' own texts are wanted.
        tell: Called for each token with its text so far, and what the token adds. Without it
            it pauses before each token.
        start: Called once with what ends the generation early.
    """
    settings = prompts[0].settings
    model: Any = loaded.model
    ends = calls.ends(loaded, prompts[0])
    texts = [
        [Completion(prompt.place, place) for place in range(settings.sequences)]
        for prompt in prompts
    ]
    follows = follows or settings.logprobs is not None
    writers = [
        Writer(text, loaded.tokenizer, ends, follows=follows, goes_on=prompt.goes_on)
        for prompt, own in zip(prompts, texts, strict=True)
        for text in own
    ]
    inputs = calls.inputs(loaded, [prompt.ids for prompt in prompts])
    length = inputs["input_ids"].shape[1]
    notes = Notes() if settings.logprobs is not None else None
    penalties = Penalties(
        length, settings.frequency_penalty, settings.presence_penalty, settings.logit_bias
    )
    watch = Watch(writers, notes, settings.logprobs or 0, tell)
    if start is not None:
        start(watch)
    if settings.do_sample:
        # Forks of one process would otherwise all draw the same.
        seed, place = settings.seed, prompts[0].place
        # Equal prompts of a request that are in several groups are not to draw the same texts.
        shifted = seed if seed is None or not place else (seed + place) % 2**64
        torch.seed() if shifted is None else torch.manual_seed(shifted)
    has_beams = settings.num_beams > 1
    # Beams change their places with every token: they are read in the end.
    criteria: list[Any] = [] if has_beams else [watch]
    if tell is None:
        criteria.append(Pauses(pause, draws=settings.do_sample))
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            **settings.options(),
            max_new_tokens=prompts[0].new,
            eos_token_id=sorted(ends.ids) or None,
            pad_token_id=calls.pad_token_id(loaded),
            logits_processor=LogitsProcessorList(
                [Finite(ends.ids), penalties, *([notes] if notes else [])]
            ),
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    if has_beams:
        for writer, ids in zip(writers, output[:, length:].tolist(), strict=True):
            for number in ids:
                if not writer.written.finish:
                    writer.take(number)
    for writer in writers:
        writer.end()
    return texts


def events(loaded: LoadedModel, prompts: Sequence[Prompt]) -> Iterator[Event]:
    """The texts of a request, token by token as they are generated.

    Its thread computes while the next token is waited for, and not otherwise: what is drawn does
    not depend on other requests at work, and nothing is computed ahead of a slow reader.
    """
    queue: Queue[Event | BaseException | None] = Queue()
    is_asked, is_left = Semaphore(0), False
    watches: list[Watch] = []
    devices = [loaded.model.device] if loaded.model.device.type == "cuda" else []

    def tell(written: Completion, text: str) -> None:
        if is_left:
            return
        finished = written if written.finish else None
        event = Event(written.prompt, written.place, written.tokens[-1], text, finished)
        queue.put(event)
        with torch.random.fork_rng(devices):
            is_asked.acquire()

    def generate() -> None:
        try:
            for group in alike(loaded, prompts):
                if not is_left:
                    write(loaded, group, follows=True, tell=tell, start=watches.append)
        except BaseException as error:
            queue.put(error)
        else:
            queue.put(None)

    thread = Thread(target=generate, daemon=True)  # a reader may never come back
    thread.start()
    try:
        while (event := queue.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
            is_asked.release()
    finally:
        # The reader may have left before the end.
        is_left = True
        for watch in watches:
            watch.is_left.set()
        is_asked.release()
        thread.join()


def alike(loaded: LoadedModel, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts that can be continued together, in their order."""
    found: dict[Any, list[Prompt]] = {}
    lasting = has_lasting_positions(loaded.model.config)
    looks_back = calls.weighs_prompts(loaded.model)
    for prompt in prompts:
        settings = prompt.settings
        key: list[Any] = [settings, prompt.new, prompt.is_chat]
        if looks_back or settings.looks_back or not lasting or loaded.merging != PADDED:
            key.append(len(prompt.ids))
        if settings.seed is not None:
            # What is drawn for one depends on what is drawn beside it.
            key.append(id(prompt.owner))
        found.setdefault(tuple(key), []).append(prompt)
    for group in found.values():
        rows = max(group[0].settings.sequences, group[0].settings.num_beams)
        size = 1 if loaded.merging == ALONE else max(1, loaded_model.BATCH // rows)
        for start in range(0, len(group), size):
            yield group[start : start + size]


def are_same(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether scores differ by no more than the order of sums in a precision makes of them,
    beside how much they differ among each other. A neighbour that is seen changes them by far
    more."""
    spread = float((one - one.mean()).norm())
    difference = float(((one - one.mean()) - (other - other.mean())).norm())
    return difference <= (1e-3 if dtype == torch.float32 else 0.08) * max(spread, 1e-6)


def has_lasting_positions(config: Any) -> bool:
    """Whether a token's place is told to a model alike whatever else is read beside it.

    Rotary embeddings of some kinds change for all rows with the longest one, attention in chunks
    with where a chunk begins.
    """
    config = config.get_text_config()
    kinds: list[str] = []
    parameters = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    while parameters:
        for name, value in parameters.pop().items():
            if isinstance(value, dict):
                parameters.append(value)
            elif name in ("rope_type", "type"):
                kinds.append(str(value))
    layers = set(getattr(config, "layer_types", None) or ())
    return (
        not any("dynamic" in kind or kind in ("longrope", "su") for kind in kinds)
        and layers <= {"full_attention", "sliding_attention"}
        and not getattr(config, "attention_chunk_size", None)
    )
