"""Texts from texts, by encoder-decoder models: summaries, translations, and what else they learned.

transformers 5 has no pipelines for these tasks; answers have the shape that those of version 4 had.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from recipe.inference import loaded_model
from recipe.inference.loaded_model import BATCH, Encoder
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text
from recipe.tokenization.encoding import beginning
from recipe.tokenization.languages import is_multilingual, languages, token_of

GENERAL, SUMMARIES, TRANSLATIONS = "text2text-generation", "summarization", "translation"
_NAMES = {GENERAL: "generated_text", SUMMARIES: "summary_text", TRANSLATIONS: "translation_text"}
_WRITING = {
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "num_beams", "do_sample",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "early_stopping", "num_return_sequences",
}  # fmt: skip
PARAMETERS = _WRITING | {"truncation", "clean_up_tokenization_spaces", "prefix"}
_LANGUAGES = {"src_lang", "tgt_lang"}
_NEW_TOKENS, _BEAMS, _MOST_BEAMS = 256, 4, 64
_MOST_TOKENS = 4096
"""Of a text that is written, where the model's positions set no bound."""


@dataclass(frozen=True, kw_only=True)
class TextToText:
    """A saved encoder-decoder model that answers texts with texts."""

    encoder: Encoder
    task: str
    """GENERAL, SUMMARIES or TRANSLATIONS."""
    defaults: Mapping[str, Any]
    """What a request may say otherwise: beams, lengths, the prefix of each text, languages."""

    def example(self, text: str) -> Request:
        """A request that this task answers, at little cost."""
        parameters: dict[str, Any] = {"max_new_tokens": 2, "num_beams": 1, "min_length": 0}
        if (
            self._is_multilingual
            and self.encoder.model.generation_config.forced_bos_token_id is None
        ):
            parameters["tgt_lang"] = self.defaults.get("tgt_lang") or languages(self._tokenizer)[0]
        return Request(texts=[text], parameters=parameters)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text, and of what may be written for it.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        if request.prepared is None:
            multilingual = self._is_multilingual
            request.only(PARAMETERS | (_LANGUAGES if multilingual else set()), self.task)
            request.read(a_text)
            asked = self._options(request)
            self._check(asked)
            prefix = request.parameters.get("prefix", self.defaults.get("prefix", ""))
            request.prepared = prefix, asked
            self._encode(request, prefix)
        _, asked = request.prepared
        new = asked.get("max_new_tokens") or asked["max_length"]
        return [len(ids) + new for ids in request.token_ids or ()]

    def _encode(self, request: Request, prefix: str) -> None:
        tokenizer, limit = self._tokenizer, self.encoder.max_length
        texts = [beginning(tokenizer, prefix + text, limit) for text in request.texts]
        if self._is_multilingual:
            source = request.parameters.get("src_lang") or self.defaults.get("src_lang")
            tokenizer.src_lang = source or self.defaults["own_src_lang"]
        ids = tokenizer(texts, truncation=True, max_length=limit + 1)["input_ids"]
        request.truncated = [place for place, each in enumerate(ids) if len(each) > limit]
        if request.truncated and request.parameters.get("truncation") in loaded_model.UNCUT:
            raise BadRequest(
                f"Input {request.truncated[0] + 1} is longer than the {limit} tokens that are read."
                " Shorten it, or leave truncation out: it is then cut."
            )
        request.token_ids = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]

    def _options(self, request: Request) -> dict[str, Any]:
        """What `generate` is given."""
        given = {k: v for k, v in request.parameters.items() if k in _WRITING}
        if {"max_new_tokens", "max_length"} <= set(given):
            raise BadRequest("max_new_tokens and max_length are both given. Give one.")
        defaults = {k: v for k, v in self.defaults.items() if k in _WRITING}
        if {"max_new_tokens", "max_length"} & set(given):
            defaults = {
                k: v for k, v in defaults.items() if k not in ("max_new_tokens", "max_length")
            }
        options = {**defaults, **given}
        if self._is_multilingual:
            options |= self._first_token(request)
        return options

    def _first_token(self, request: Request) -> dict[str, int]:
        tokenizer = self._tokenizer
        for name in ("src_lang", "tgt_lang"):
            language = request.parameters.get(name)
            if language is not None and language not in languages(tokenizer):
                some = ", ".join(languages(tokenizer)[:60])
                raise BadRequest(f"{name} is {language!r}. Give one of the model's: {some}.")
        target = request.parameters.get("tgt_lang") or self.defaults.get("tgt_lang")
        if target is None:
            if self.encoder.model.generation_config.forced_bos_token_id is None:
                raise BadRequest(
                    "The model writes several languages: name one in tgt_lang, as in "
                    f'{{"inputs": "a text", "parameters": {{"tgt_lang": '
                    f'"{languages(tokenizer)[0]}"}}}}.'
                )
            return {}
        return {"forced_bos_token_id": token_of(tokenizer, target)}

    def _check(self, asked: Mapping[str, Any]) -> None:
        positions = getattr(self.encoder.model.config, "max_position_embeddings", None)
        most = positions or _MOST_TOKENS
        for name in ("max_new_tokens", "max_length", "min_length", "min_new_tokens"):
            if (asked.get(name) or 0) > most:
                raise BadRequest(f"{name} is {asked[name]}, and the model writes {most} at most.")
        beams, count = asked.get("num_beams", 1), asked.get("num_return_sequences", 1)
        if max(beams, count) > _MOST_BEAMS:
            raise BadRequest(f"num_beams and num_return_sequences may be {_MOST_BEAMS} at most.")
        if count > 1 and count > beams and not asked.get("do_sample"):
            raise BadRequest(
                f"num_return_sequences is {count}, and num_beams {beams}: without do_sample there "
                "are as many different texts as beams at most."
            )

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request what is written for each text, by the task's name; with
        num_return_sequences a list for each. Texts of equal parameters are written together."""
        jobs: list[tuple[list[int], Request]] = []
        alike: dict[str, list[int]] = {}
        for request in requests:
            self.measure(request)
            key = json.dumps(request.prepared[1], sort_keys=True)
            for ids in request.token_ids or ():
                alike.setdefault(key, []).append(len(jobs))
                jobs.append((ids, request))
        written: list[list[str]] = [[]] * len(jobs)
        for equal in alike.values():
            equal.sort(key=lambda place: len(jobs[place][0]))
            for start in range(0, len(equal), BATCH):
                places = equal[start : start + BATCH]
                options = jobs[places[0]][1].prepared[1]
                texts = self._write([jobs[place][0] for place in places], options)
                for place, each in zip(places, texts, strict=True):
                    written[place] = each
        rest = iter(written)
        return [self._answers(each, [next(rest) for _ in each.texts]) for each in requests]

    def _answers(self, request: Request, written: Sequence[Sequence[str]]) -> Answers:
        name = _NAMES[self.task]
        if request.parameters.get("clean_up_tokenization_spaces"):
            clean = self._tokenizer.clean_up_tokenization
            written = [[clean(text) for text in texts] for texts in written]
        entries: list[Any] = [[{name: text} for text in texts] for texts in written]
        if all(len(each) == 1 for each in entries):
            return Answers([entry for (entry,) in entries], request.truncated)
        return Answers(entries, request.truncated, request.single)

    @torch.inference_mode()
    def _write(self, prompts: Sequence[list[int]], options: Mapping[str, Any]) -> list[list[str]]:
        model: Any = self.encoder.model
        longest = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*each, *[pad] * (longest - len(each))] for each in prompts])
        mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in prompts])
        output = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options
        )
        count = len(output) // len(prompts)
        texts = self._tokenizer.batch_decode(output, skip_special_tokens=True)
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    @property
    def _tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def _is_multilingual(self) -> bool:
        return is_multilingual(self._tokenizer)


def load(origin: Origin, task: str, named: str) -> TextToText:
    """The encoder-decoder model that `origin` names.

    Args:
        origin: Where it is.
        task: GENERAL, SUMMARIES or TRANSLATIONS.
        named: The task as HF_TASK has it, such as translation_en_to_fr, whose own settings a
            model's configuration may hold (task_specific_params).
    """
    loaded = loaded_model.load(origin, AutoModelForSeq2SeqLM)
    config: Any = loaded.model.config
    own: Any = loaded.model.generation_config
    defaults: dict[str, Any] = {"prefix": getattr(config, "prefix", None) or ""}
    if (own.num_beams or 1) == 1:
        defaults["num_beams"] = _BEAMS
    if own.max_new_tokens is None:
        # 20 is what transformers says where a model says nothing.
        said = own.max_length not in (None, 20)
        defaults |= {"max_length": own.max_length} if said else {"max_new_tokens": _NEW_TOKENS}
    else:
        defaults["max_new_tokens"] = own.max_new_tokens
    specific = (getattr(config, "task_specific_params", None) or {}).get(named, {})
    if "max_length" in specific:
        defaults.pop("max_new_tokens", None)
    defaults |= {k: v for k, v in specific.items() if k in PARAMETERS}
    if languages := re.fullmatch(r"translation_(.+)_to_(.+)", named):
        defaults |= {"src_lang": languages[1], "tgt_lang": languages[2]}
    defaults["own_src_lang"] = getattr(loaded.tokenizer, "src_lang", None)
    shown = ", ".join(f"{k}={v!r}" for k, v in defaults.items() if k in PARAMETERS and v)
    print(f"writes: {shown}, unless a request says otherwise", flush=True)
    return TextToText(encoder=loaded, task=task, defaults=defaults)
