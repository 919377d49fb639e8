"""Text generation by the APIs of Hugging Face's image and of TGI (text-generation-inference):
parameters become the keys of OpenAI's API, and generated texts these APIs' answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amphora.serving.api.canonical import (
    ApiRequest,
    ModelTraits,
    check_flags,
    is_conversation,
    wrong_value,
)
from amphora.serving.api.media import EVENTS, JSON_LINES, TEXT
from amphora.serving.protocol.media_types import bad_request
from amphora.serving.protocol.routes import GENERATE_STREAM, TGI

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Parameters of sampling: a request that has one of them asks for sampling."""
_STOPS = ("stop", "stop_sequences", "stop_sequence")
_NAMES: Mapping[str, str] = {
    **{name: name for name in (*_SAMPLING, "seed", "repetition_penalty", "frequency_penalty",
                               "no_repeat_ngram_size")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "adapter_id": "model",
    "truncate": "truncate_prompt_tokens",
}  # fmt: skip
"""Parameters of Hugging Face's APIs, and their names in OpenAI's API or vLLM's extension of it."""
_CUT = "truncation"
"""The flag that cuts a prompt to the part of the context that the new tokens leave."""
_FLAGS = ("do_sample", "return_full_text", "details", "stream", _CUT)
_OTHERS: Mapping[str, str] = {
    **dict.fromkeys(_STOPS, "stop"),
    "grammar": "structured_outputs",
    _CUT: "truncate_prompt_tokens",
}
"""Parameters whose values are translated, too."""
_IDLE: Mapping[str, Any] = {
    "watermark": False, "best_of": 1, "num_beams": 1, "top_n_tokens": 0, "no_repeat_ngram_size": 0,
    "decoder_input_details": False, "typical_p": 1.0, "length_penalty": 1.0, _CUT: False,
    "frequency_penalty": 0,
}  # fmt: skip
"""Values without an effect, which clients send whatever the engine has."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(ApiRequest):
    """Prompts of these APIs."""

    given: Mapping[str, Any]
    """The parameters by these APIs' names."""
    is_document: bool = False
    """Whether the answer is TGI's object instead of Hugging Face's list."""
    generates = True

    def answer(self, prediction: Mapping[str, Any]) -> Any:
        """Return a list with the texts of each prompt, or the only text as an object."""
        has_details = self.given.get("details")
        full = self.given.get("return_full_text", not has_details)
        entries: list[list[dict[str, Any]]] = []
        for prompt, texts in zip(self.inputs, prediction["entries"], strict=True):
            entries.append([])
            for text in texts:
                whole = _prepend_prompt(prompt, text["text"]) if full else text["text"]
                entry = {"generated_text": whole}
                if has_details:
                    details = self._details(text, len(text["tokens"]))
                    entry["details"] = {**details, "prefill": [], "tokens": text["tokens"]}
                entries[-1].append(entry)
        return entries[0][0] if self.is_document else entries

    def events(self, texts: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield TGI's event of each token."""
        for text in texts:
            whole = details = None
            if text["finish"]:
                full = self.given.get("return_full_text", False)
                whole = _prepend_prompt(self.inputs[0], text["text"]) if full else text["text"]
                details = self._details(text, text["generated"])
                details["input_length"] = text["prompt_tokens"]
            (token,) = text["tokens"]
            yield {"index": text["generated"], "token": token, "generated_text": whole,
                   "details": details}  # fmt: skip

    def _details(self, text: Mapping[str, Any], count: int) -> dict[str, Any]:
        seed = self.given.get("seed")
        return {"finish_reason": text["finish"], "generated_tokens": count, "seed": seed}


def read_generation(
    route: str, prompts: Sequence[Any], parameters: Mapping[str, Any], model: ModelTraits,
    *, single: bool,
) -> GenerationRequest:  # fmt: skip
    """Return the request of a body's prompts and parameters. Raise Fault (400) if they cannot be
    answered; engines check the values of settings."""
    given = {name: value for name, value in parameters.items() if value is not None}
    if is_tgi := route in TGI:
        if not single or not isinstance(prompts[0], str):
            raise bad_request('Send {"inputs": "a text", "parameters": {...}}.', "inputs")
        # As in TGI, these routes decide whether the answer is a stream, and not the body.
        given = {"return_full_text": False, **given, "stream": route == GENERATE_STREAM}
    settings = _settings(given, model)
    if not all(isinstance(p, str) or is_conversation(p) for p in prompts):
        shown = json.dumps(prompts[0] if single else prompts)[:60]
        raise bad_request(
            f"inputs must be a text, a conversation or a list of these, not {shown}. Send for"
            ' example {"inputs": "a text"}.',
            "inputs",
        )
    if streams := bool(given.get("stream")):
        if len(prompts) > 1 or settings.get("n", 1) != 1:
            raise bad_request("Only one text can be streamed.", "stream")
        settings["stream"] = True
    if given.get("details") or streams:
        settings["return_token_ids"] = True
    names = {_NAMES[name]: name for name in given if name in _NAMES and name != "adapter_id"}
    return GenerationRequest(
        names=names, streams=streams, inputs=prompts, parameters=settings, single=single,
        continues=True, given=given, is_document=is_tgi,
        kinds=(EVENTS, JSON_LINES) if is_tgi else (EVENTS, JSON_LINES, TEXT),
    )  # fmt: skip


def parameters_by(settings: Collection[str]) -> set[str]:
    """Return the parameters that an engine takes which has these keys of OpenAI's API."""
    names = {name for name, key in {**_NAMES, **_OTHERS}.items() if key in settings}
    return names.union(_FLAGS if _CUT in names else {*_FLAGS} - {_CUT})


def _settings(values: Mapping[str, Any], model: ModelTraits) -> dict[str, Any]:
    """Translate parameters to keys of OpenAI's API. A text is greedy at a temperature of 0.

    Raise Fault (400) for parameters that are unknown, that the engine does not have, or that
    contradict each other.
    """
    takes = parameters_by(model.settings)
    refused = [n for n, value in values.items() if n not in takes and value != _IDLE.get(n)]
    elsewhere = [n for n in refused if not model.passed and n in {**_NAMES, **_OTHERS}]
    for name in refused:
        if name in _IDLE:
            engine = " It needs vLLM." if name in elsewhere else ""
            remedy = f"give {json.dumps(_IDLE[name])}, or leave it out.{engine}"
            raise wrong_value(name, values[name], remedy)
    if refused:
        needs = f" Only vLLM supports {', '.join(elsewhere)}." if elsewhere else ""
        raise bad_request(
            f"text-generation does not take {', '.join(map(repr, refused))}, but"
            f" {', '.join(sorted(takes))}.{needs}",
            refused[0],
        )
    values = {name: value for name, value in values.items() if name in takes}
    check_flags(values, _FLAGS)
    for name in _NAMES:
        if isinstance(values.get(name), bool):
            raise bad_request(f"{name} is {values[name]!r}: give a number.", name)
    stops = [name for name in _STOPS if name in values]
    if len(stops) > 1:
        raise bad_request(f"{' and '.join(stops)} mean the same: give one of them.", stops[1])
    body = {_NAMES[name]: value for name, value in values.items() if name in _NAMES}
    if values.get("do_sample") and body.get("temperature") == 0:
        raise bad_request("temperature is 0, and do_sample is true.", "do_sample")
    if not values.get("do_sample", any(name in values for name in _SAMPLING)):
        body["temperature"] = 0.0
    if stops:
        body |= {"stop": values[stops[0]], "include_stop_str_in_output": True}
    if values.get(_CUT):
        body.setdefault("truncate_prompt_tokens", -1)  # the front knows the context's length
    if "truncate_prompt_tokens" in body:
        body["truncation_side"] = "left"
    match values.get("grammar"):
        case None:
            pass
        case {"type": "json", "value": value}:
            schema = {"name": "grammar", "schema": value}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case {"type": "regex", "value": value}:
            body["structured_outputs"] = {"regex": value}
        case _:
            raise bad_request('grammar is {"type": "json" or "regex", "value"}.', "grammar")
    return body


def _prepend_prompt(prompt: Any, text: str) -> Any:
    """Return a prompt with its text; for a conversation, its messages and the assistant's."""
    if isinstance(prompt, str):
        return prompt + text
    *earlier, last = prompt
    if last["role"] != "assistant":
        return [*prompt, {"role": "assistant", "content": text}]
    begun = last["content"]
    if isinstance(begun, list):
        begun = "\n".join(part.get("text", "") for part in begun)
    return [*earlier, {**last, "content": f"{begun}{text}"}]
