"""Generation parameters of requests: those of transformers' pipelines, TGI and OpenAI's clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.backend.requests.parameters import FLAG, RULES, Rule, faults, number, whole
from recipe.backend.requests.payloads import BadRequest

DEFAULT_NEW_TOKENS = 64
MOST_SEQUENCES = 32
"""Texts for one prompt, each of which has a cache of its own."""
MOST_STOPS = 64
"""Stop texts, each of which is searched for after each token."""
GREEDY_BELOW = 1e-5
"""Temperatures below it decode greedily: scores divided by them would overflow float32, and all
tokens but the likeliest are practically impossible long before."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """What determines a generated text, apart from the model and the prompt."""

    max_new_tokens: int | None = None
    """None means as many as `default_new_tokens` and the model's positions allow."""
    default_new_tokens: int = DEFAULT_NEW_TOKENS
    do_sample: bool = False
    chosen: tuple[tuple[str, Any], ...] = ()
    """Other arguments of transformers' `generate`. Those that are missing have the value of the
    model's generation_config, or transformers' default."""
    sequences: int = 1
    """Texts for each prompt."""
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return arguments of transformers' `generate`, without lengths and token ids."""
        kept = {k: v for k, v in self.chosen if self.do_sample or k not in SAMPLING}
        sequences = {"num_beams": 1, "num_return_sequences": self.sequences}
        return {"do_sample": self.do_sample, **sequences, **kept}


_STOP = Rule(
    lambda value: (
        (isinstance(value, str) and bool(value))
        or (isinstance(value, list) and all(isinstance(text, str) and text for text in value))
    ),
    "a text or a list of texts, none of them empty",
)
_STOPS = ("stop", "stop_sequences", "stop_sequence")
_SHARED = (
    "max_new_tokens", "min_new_tokens", "do_sample", "top_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "stream",
)  # fmt: skip
"""Parameters with the values that they have for encoder-decoders."""
_OFF = Rule(lambda value: value is False, "false: it is not supported")

PARAMETERS: Mapping[str, Rule] = {
    **{name: RULES[name] for name in _SHARED},
    "temperature": number(0),
    "top_k": whole(0),
    "min_p": number(0, 1),
    "num_return_sequences": whole(1, MOST_SEQUENCES),
    "seed": whole(-(2**63), 2**64 - 1),
    **dict.fromkeys(_STOPS, _STOP),
    "return_full_text": FLAG,
    "details": FLAG,
    # Clients send these with the values that have no effect.
    "frequency_penalty": Rule(lambda value: value == 0, "0: only vLLM supports it"),
    "watermark": _OFF,
    "truncation": Rule(lambda value: value is False, "false: prompts are not truncated"),
    "decoder_input_details": _OFF,
    "top_n_tokens": Rule(lambda value: value == 0, "0: only the generated token is returned"),
    "num_beams": Rule(lambda value: value == 1, "1: only encoder-decoders are served with beams"),
    "best_of": Rule(lambda value: value == 1, "1: for several texts there is num_return_sequences"),
}
"""The values that each parameter may have."""
SAMPLING = ("temperature", "top_p", "top_k", "typical_p", "min_p")
"""Parameters of sampling: a request that has one of them asks for sampling."""
_CHOSEN = (*SAMPLING, "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size")


def settings_of(parameters: Mapping[str, Any]) -> GenerationSettings:
    """Return the settings of a request's `parameters`; those that are None are left out. Raise
    BadRequest if some are unknown or wrong, or contradict each other; it names all of them."""
    values = {name: value for name, value in parameters.items() if value is not None}
    if unknown := ", ".join(repr(name) for name in values if name not in PARAMETERS):
        raise BadRequest(
            f"text-generation does not take {unknown}, but {', '.join(sorted(PARAMETERS))}."
        )
    wrong = faults(values, PARAMETERS)
    if values.get("details") and not values.get("stream"):
        wrong.append("details is true: only vLLM and streams have them")
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
    stops = {name: values[name] for name in _STOPS if name in values}
    if len(stops) > 1:
        raise BadRequest(f"{' and '.join(stops)} mean the same: give one of them.")
    samples = values.get("do_sample")
    if samples is None:
        samples = any(name in values for name in SAMPLING)
    if values.get("temperature", 1) < GREEDY_BELOW:
        if values["temperature"] == 0 and values.get("do_sample"):
            raise BadRequest("temperature is 0, which turns sampling off, but do_sample is true.")
        samples = False
    same = ("max_new_tokens", "seed")
    stop: str | list[str] = next(iter(stops.values()), [])
    settings = GenerationSettings(
        **{name: values[name] for name in same if name in values},
        chosen=tuple((name, values[name]) for name in _CHOSEN if name in values),
        do_sample=samples,
        sequences=values.get("num_return_sequences", 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    refuse_contradictions(settings)
    return settings


def refuse_contradictions(settings: GenerationSettings) -> None:
    """Raise BadRequest if settings contradict each other."""
    wrong = []
    if settings.sequences > 1 and not settings.do_sample:
        wrong.append(
            f"num_return_sequences (n) is {settings.sequences}, and without sampling all texts are"
            " equal: set do_sample, or a temperature"
        )
    if len(settings.stop) > MOST_STOPS:
        wrong.append(f"stop has {len(settings.stop)} texts: give {MOST_STOPS} at most")
    least = dict(settings.chosen).get("min_new_tokens", 0)
    if settings.max_new_tokens is not None and least > settings.max_new_tokens:
        wrong.append(f"min_new_tokens is {least}, max_new_tokens {settings.max_new_tokens}")
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
