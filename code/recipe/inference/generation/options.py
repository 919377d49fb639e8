"""How texts are to be generated: what transformers' pipelines, TGI and OpenAI's clients may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.inference.parameters import FLAG, RULES, Rule, faults, number, whole
from recipe.inference.payloads import BadRequest

DEFAULT_NEW_TOKENS = 64
MOST_SEQUENCES = 32
"""Texts that are generated at once, beams included: each has a cache of its own."""
MOST_STOPS = 64
"""Texts that end a generated text: each is looked for after each token."""
CUT, REFUSE = "cut", "refuse"
GREEDY_BELOW = 1e-5
"""A temperature: what is divided by less would exceed float32, and all but the likeliest is as good
as impossible long before."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What decides on a text that is generated, beside its prompt."""

    max_new_tokens: int | None = None
    """None: what `default_new_tokens` and the model's positions allow."""
    max_length: int | None = None
    """Tokens of prompt and text; `max_new_tokens` takes precedence, as in transformers."""
    default_new_tokens: int = DEFAULT_NEW_TOKENS
    do_sample: bool = False
    chosen: tuple[tuple[str, Any], ...] = ()
    """Other arguments of transformers' `generate`; the model's generation_config or transformers
    decides on those that are not there."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_beams: int = 1
    sequences: int = 1
    """Texts for each prompt."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Likeliest tokens to name in the place of each one; None: no log-probabilities."""
    truncate: int | None = None
    """Tokens of a prompt to keep, counted from its end."""
    long_prompts: str = CUT
    """What becomes of a prompt that is too long: `CUT` on the left, or `REFUSE`."""

    @property
    def looks_back(self) -> bool:
        """Whether what a prompt holds weighs on what is generated in other ways than by the model:
        then its padding would, too."""
        return any(
            name in ("repetition_penalty", "no_repeat_ngram_size") for name, _ in self.chosen
        )

    def options(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`, but for lengths and the numbers of tokens."""
        options: dict[str, Any] = {
            "do_sample": self.do_sample,
            "num_beams": self.num_beams,
            "num_return_sequences": self.sequences,
        }
        kept = (pair for pair in self.chosen if self.do_sample or pair[0] not in SAMPLING)
        return {**options, **dict(kept)}


_STOP = Rule(
    lambda value: (
        (isinstance(value, str) and bool(value))
        or (isinstance(value, list) and all(isinstance(text, str) and text for text in value))
    ),
    "a text or a list of texts, none of them empty",
)
_UNLIT = Rule(lambda value: value is False, "false: it is not supported")

PARAMETERS: Mapping[str, Rule] = {
    "max_new_tokens": whole(1),
    "max_length": whole(1),
    "min_new_tokens": whole(0),
    "do_sample": FLAG,
    "temperature": number(0),
    "top_p": number(0, 1, above=True),
    "top_k": whole(0),
    "typical_p": number(0, 1, above=True),
    "min_p": number(0, 1),
    "repetition_penalty": RULES["repetition_penalty"],
    "no_repeat_ngram_size": whole(0),
    "length_penalty": number(-1e6, 1e6),
    "early_stopping": FLAG,
    "frequency_penalty": number(-2, 2),
    "num_beams": whole(1),
    "num_return_sequences": whole(1),
    "seed": whole(-(2**63), 2**64 - 1),
    "stop": _STOP,
    "stop_sequences": _STOP,
    "stop_sequence": _STOP,
    "truncate": whole(1),
    "truncation": FLAG,
    "return_full_text": FLAG,
    "details": FLAG,
    "decoder_input_details": FLAG,
    "top_n_tokens": whole(0, 5),
    "stream": FLAG,
    # What older clients send in every request, as false.
    "watermark": _UNLIT,
    "best_of": Rule(lambda value: value == 1, "1: for several texts there is num_return_sequences"),
}
"""What each parameter may be."""
_STOPS = ("stop", "stop_sequences", "stop_sequence")
SAMPLING = ("temperature", "top_p", "top_k", "typical_p", "min_p")
"""What only a sampled text knows; to ask for one of these is to ask for sampling."""
_CHOSEN = (
    *SAMPLING, "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "length_penalty",
    "early_stopping",
)  # fmt: skip


def settings_of(parameters: Mapping[str, Any]) -> GenerationSettings:
    """The settings that a request's `parameters` ask for; those that are None are left out.

    Raises:
        BadRequest: A parameter is unknown, or its value is not of its kind, or they contradict each
            other; all that is wrong is said.
    """
    values = {name: value for name, value in parameters.items() if value is not None}
    if unknown := ", ".join(repr(name) for name in values if name not in PARAMETERS):
        raise BadRequest(
            f"text-generation does not take {unknown}, but {', '.join(sorted(PARAMETERS))}."
        )
    if wrong := faults(values, PARAMETERS):
        raise BadRequest(". ".join(wrong) + ".")
    stops = {name: values[name] for name in _STOPS if name in values}
    if len(stops) > 1:
        raise BadRequest(f"{' and '.join(stops)} mean the same: give one of them.")
    samples = values.get("do_sample")
    if samples is None:
        samples = any(name in values for name in SAMPLING)
    if values.get("temperature", 1) < GREEDY_BELOW:
        if values["temperature"] == 0 and values.get("do_sample"):
            raise BadRequest("temperature is 0, which samples nothing, and do_sample is true.")
        samples = False
    if values.get("decoder_input_details") and values.get("stream"):
        raise BadRequest("decoder_input_details cannot be streamed: leave one of them out.")
    top, has_details = values.get("top_n_tokens", 0), values.get("details")
    same = ("max_new_tokens", "max_length", "frequency_penalty", "num_beams", "seed", "truncate")
    stop: str | list[str] = next(iter(stops.values()), [])
    settings = GenerationSettings(
        **{name: values[name] for name in same if name in values},
        chosen=tuple((name, values[name]) for name in _CHOSEN if name in values),
        do_sample=samples,
        sequences=values.get("num_return_sequences", 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=top if has_details or top else None,
        long_prompts=CUT if values.get("truncation", True) else REFUSE,
    )
    refuse_contradictions(settings)
    return settings


def refuse_contradictions(settings: GenerationSettings) -> None:
    """Raises BadRequest if settings that are right one by one contradict each other."""
    wrong = []
    if (
        settings.sequences > 1
        and not settings.do_sample
        and settings.sequences > settings.num_beams
    ):
        wrong.append(
            f"num_return_sequences is {settings.sequences}, and without sampling there are"
            f" {settings.num_beams}: set do_sample, or num_beams"
        )
    if (rows := max(settings.sequences, settings.num_beams)) > MOST_SEQUENCES:
        wrong.append(f"{rows} texts at once are too many: at most {MOST_SEQUENCES} are generated")
    if len(settings.stop) > MOST_STOPS:
        wrong.append(f"stop has {len(settings.stop)} texts: give {MOST_STOPS} at most")
    if settings.num_beams > 1 and (settings.stop or settings.logprobs is not None):
        wrong.append("with num_beams there are neither stop nor details: leave one out")
    least = dict(settings.chosen).get("min_new_tokens", 0)
    if settings.max_new_tokens is not None and least > settings.max_new_tokens:
        wrong.append(f"min_new_tokens is {least}, max_new_tokens {settings.max_new_tokens}")
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
