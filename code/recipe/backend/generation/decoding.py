"""What `generate` of transformers is called with. Its tokens are decoded one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from recipe.backend.generation.gathering import TokenizedInput
from recipe.backend.generation.prompts import Prompt
from recipe.backend.loaded_model import LoadedModel
from recipe.console import log

LENGTH, END, STOPPED = "length", "eos_token", "stop_sequence"
HALF = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""
NOT_FINITE = (
    "the model's scores are NaN or infinity, so that no token can be chosen: check the weights, or"
    " serve it with AMPHORA_DTYPE=float32"
)
_CONTEXT = 8
"""How many tokens of the prompt are decoded together with the first generated tokens."""
# Settings of a generation_config that change prompts, give several tokens a step, or return more
# than tokens.
_IGNORED = ("prompt_lookup_num_tokens", "assistant_early_exit", "token_healing",
            "return_dict_in_generate", "output_scores", "output_logits", "output_attentions",
            "output_hidden_states")  # fmt: skip


@dataclass
class Token:
    """A generated token, with the fields of TGI's API."""

    id: int
    text: str = ""
    """The text that the token adds, if each token is decoded. The last token of a character adds
    all of it."""
    special: bool = False


@dataclass
class Completion:
    """A text that has been, or is being, generated."""

    prompt: int
    """The position of its prompt in the request."""
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str = ""
    """`LENGTH`, `END` or `STOPPED`; empty until generation ends."""


class Writer:
    """Adds tokens to a `Completion` until an end token, a stop text or the token limit.

    A text that continues its prompt is decoded together with it, as in pipelines of transformers 4:
    alone, tokens of some tokenizers lose the space before them.
    """

    def __init__(
        self,
        written: Completion,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        ends: Collection[int],
        *,
        follows: bool,
    ) -> None:
        """
        Args:
            written: An empty completion.
            ends: End tokens.
            follows: Whether to decode every token, and not only the whole text.
        """
        self.written = written
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._most = prompt.new
        self._stop = prompt.settings.stop
        self._ends = ends
        self._follows = follows or bool(self._stop)
        self._ids = [*prompt.ids] if prompt.continues else []
        self._begin = self._shown = len(self._ids)
        self._start = max(0, self._begin - _CONTEXT)

    def take(self, number: int) -> None:
        """Add a token by its id."""
        self._ids.append(number)
        written = self.written
        shown = written.text
        token = Token(number, special=number in self._special)
        written.tokens.append(token)
        if self._follows:
            added = self._added(self._start, self._shown)
            if added and not added.endswith(HALF):
                written.text += added
                self._start, self._shown = self._shown, len(self._ids)
        tail = written.text[max(0, len(shown) - max(map(len, self._stop), default=0)) :]
        if any(stop in tail for stop in self._stop):
            self.finish(STOPPED)
        elif number in self._ends:
            self.finish(END)
        elif len(written.tokens) >= self._most:
            self.finish(LENGTH)
        if self._follows and written.text.startswith(shown):
            token.text = written.text[len(shown) :]

    def finish(self, reason: str) -> None:
        """End the text."""
        self.written.finish = reason
        # Some tokenizers clean up the text as a whole.
        self.written.text = self._added(0, self._begin)

    def _added(self, start: int, end: int) -> str:
        """Return the text that the tokens from `end` on add to those from `start` to `end`."""
        before, both = (
            str(self._tokenizer.decode(ids, skip_special_tokens=True))
            for ids in (self._ids[start:end], self._ids[start:])
        )
        return both[len(before) :]


@dataclass(eq=False)
class Finite(LogitsProcessor):
    """Raises ArithmeticError if the scores of an unfinished text are NaN or infinity."""

    ends: list[int]
    """End tokens; scores after one of them are ignored."""
    _start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores unchanged; shapes (texts, tokens), (texts, vocabulary)."""
        if self._start is None:
            self._start = input_ids.shape[1]
        new = input_ids[:, self._start :]
        over = torch.isin(new, torch.tensor(self.ends, device=new.device)).any(-1)
        best = scores.amax(-1)
        if bool(((best.isnan() | (best == torch.inf)) & ~over).any()):
            raise ArithmeticError(NOT_FINITE)
        return scores


@dataclass(eq=False)
class Pauses(StoppingCriteria):
    """Pauses after each step; random numbers drawn meanwhile do not affect the generation."""

    pause: Callable[[], None]
    """An exception that it raises ends the generation."""
    draws: bool
    """Whether the generation samples."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """Return that no text is finished, shape (texts,)."""
        devices = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=self.draws):
            self.pause()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(eq=False)
class Watch(Pauses):
    """Passes the tokens of each step to the writers, and ends finished texts."""

    writers: Sequence[Writer]
    """One for each row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        """Return which texts are finished, shape (texts,)."""
        for writer, number in zip(self.writers, input_ids[:, -1].tolist(), strict=True):
            if not writer.written.finish:
                writer.take(number)
        super().__call__(input_ids, scores, **options)
        done = [bool(writer.written.finish) for writer in self.writers]
        return torch.tensor(done, device=input_ids.device)


def settle(model: Any) -> None:
    """Give a model a `generation_config` with which `generate` returns tokens, one a step.

    It is a copy, since other models may share the original.
    """
    config = copy.deepcopy(model.generation_config)
    for name in _IGNORED:
        if getattr(config, name, None):
            log(f"generation: ignores {name} of generation_config.json")
            setattr(config, name, None)
    model.generation_config = config


def end_ids(model: Any) -> list[int]:
    """Return the end tokens of a model's generation_config."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        return []
    return list(configured) if isinstance(configured, list) else [configured]


def pad_token_id(loaded: LoadedModel) -> int:
    """Return the tokenizer's padding token, or one that the attention mask hides."""
    tokenizer = loaded.tokenizer
    known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(number for number in known if number is not None))


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    sources: Sequence[TokenizedInput],
    watch: Pauses,
    ends: list[int],
    seed: int | None,
    **options: Any,
) -> torch.Tensor:
    """Return the tokens that a model generates for some inputs of a request, shape (texts, tokens).

    A decoder's prompts are padded on the left, since new tokens follow them directly.

    Args:
        ends: End tokens.
        options: Other arguments of transformers' `generate`.
    """
    model: Any = loaded.model
    if watch.draws:
        set_seed(seed, sources[0].index)
    side = "right" if model.config.is_encoder_decoder else "left"
    join = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = [torch.tensor(source.ids) for source in sources]
    output: torch.Tensor = model.generate(
        input_ids=join(ids, padding_value=pad_token_id(loaded)).to(model.device),
        attention_mask=join([torch.ones_like(row) for row in ids]).to(model.device),
        **options,
        logits_processor=LogitsProcessorList([Finite(ends)]),
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    return output


def set_seed(seed: int | None, index: int) -> None:
    """Seed torch for the inputs of a request from `index` on: those that do not fit into one call
    have different seeds, so that equal ones do not get equal texts."""
    if seed is None:
        torch.seed()  # forked workers would otherwise all draw the same
    else:
        torch.manual_seed((seed + index) % 2**64 if index else seed)
