"""Generation parameters of requests, which have the names of OpenAI's API whatever the client's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipe.backend.requests.parameters import FLAG, RULES, Rule, number, whole
from recipe.backend.requests.payloads import BadRequest

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
    """None means as many as `usual_tokens` and the model's positions allow."""
    usual_tokens: int
    do_sample: bool = False
    chosen: tuple[tuple[str, Any], ...] = ()
    """Other arguments of transformers' `generate`. Those that are missing have the value of the
    model's generation_config, or transformers' default."""
    sequences: int = 1
    """Texts for each prompt."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    follows: bool = False
    """Whether the text of each token is needed."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    logprobs: int | None = None
    """The number of likeliest tokens at each position of the answer whose log-probabilities are
    given next to its own; None: no token has one."""

    def options(self) -> dict[str, Any]:
        """Return arguments of transformers' `generate`, without lengths and token ids."""
        sequences = {"num_beams": 1, "num_return_sequences": self.sequences}
        return {"do_sample": self.do_sample, **sequences, **dict(self.chosen)}


_STOP = Rule(
    lambda value: all(
        isinstance(text, str) and text for text in (value if isinstance(value, list) else [value])
    ),
    "a text or a list of texts, none of them empty",
)
PARAMETERS: Mapping[str, Rule] = {
    **{
        name: RULES[name]
        for name in ("top_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "stream")
    },
    "temperature": number(0),
    "top_k": whole(0),
    "min_p": number(0, 1),
    "max_tokens": whole(0),
    "min_tokens": whole(0),
    "n": whole(1, MOST_SEQUENCES),
    "seed": whole(-(2**63), 2**64 - 1),
    "stop": _STOP,
    # The server cuts texts at stop texts, and always gets the ids of tokens.
    "include_stop_str_in_output": FLAG,
    "return_token_ids": FLAG,
    "echo": FLAG,
    "logprobs": whole(0, 20),  # vLLM's limit
}
"""The values that each parameter may have, by the keys of OpenAI's API and vLLM's extensions."""
SAMPLING = ("temperature", "top_p", "top_k", "typical_p", "min_p")
_NAMES = {
    "min_tokens": "min_new_tokens", "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}  # fmt: skip
"""Further parameters, and their names as arguments of `generate`."""


def settings_of(parameters: Mapping[str, Any], usual_tokens: int) -> GenerationSettings:
    """Return the settings of a request's `parameters`: those that are missing are the model's, and
    a temperature of 0 generates greedily. Raise BadRequest if some are unknown or wrong, or
    contradict each other; it names all of them."""
    if unknown := ", ".join(repr(name) for name in parameters if name not in PARAMETERS):
        raise BadRequest(
            f"text-generation does not take {unknown}, but {', '.join(sorted(PARAMETERS))}."
        )
    # Only the log-probabilities of an echoed prompt need no further token.
    rules = PARAMETERS if parameters.get("echo") else {**PARAMETERS, "max_tokens": whole(1)}
    if wrong := {n: value for n, value in parameters.items() if not rules[n].is_right(value)}:
        texts = [
            f"{name} is {json.dumps(value)[:60]}: give {rules[name].words}, or leave it out."
            for name, value in wrong.items()
        ]
        raise BadRequest(" ".join(texts), next(iter(wrong)))
    samples = parameters.get("temperature", 1) >= GREEDY_BELOW
    names = {**(dict.fromkeys(SAMPLING[1:]) if samples else {}), **_NAMES}
    chosen: list[tuple[str, Any]]
    chosen = [(names[name] or name, v) for name, v in parameters.items() if name in names]
    if samples and "temperature" in parameters:
        chosen.append(("temperature", float(parameters["temperature"])))  # transformers wants one
    stop: str | list[str] = parameters.get("stop", [])
    settings = GenerationSettings(
        max_new_tokens=parameters.get("max_tokens"),
        usual_tokens=usual_tokens,
        seed=parameters.get("seed"),
        chosen=tuple(sorted(chosen)),
        do_sample=samples,
        sequences=parameters.get("n", 1),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        follows=any(parameters.get(name) for name in ("return_token_ids", "stream")),
        echo=parameters.get("echo", False),
        logprobs=parameters.get("logprobs"),
    )
    refuse_contradictions(settings)
    return settings


def refuse_contradictions(settings: GenerationSettings) -> None:
    """Raise BadRequest if settings contradict each other."""
    wrong = []
    if settings.sequences > 1 and not settings.do_sample:
        wrong.append(
            f"n is {settings.sequences}, and without sampling all texts are equal: set a"
            " temperature"
        )
    if len(settings.stop) > MOST_STOPS:
        wrong.append(f"stop has {len(settings.stop)} texts: give {MOST_STOPS} at most")
    least = dict(settings.chosen).get("min_new_tokens", 0)
    if settings.max_new_tokens is not None and least > settings.max_new_tokens:
        wrong.append(f"min_tokens is {least}, max_tokens {settings.max_new_tokens}")
    if wrong:
        raise BadRequest(". ".join(wrong) + ".")
