"""Text generation by encoder-decoders: summaries, translations and others.

transformers 5 has no pipelines for these tasks; answers have the form of those of version 4.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.generation import decoding
from recipe.backend.generation.decoding import Pauses
from recipe.backend.generation.gathering import GenerationGroups, GroupMembers, TokenizedInput
from recipe.backend.generation.options import GREEDY_BELOW
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.padded_rows import BATCH
from recipe.backend.requests.payloads import BadRequest, Request, a_text
from recipe.backend.requests.probes import NEW_TOKENS, PROMPTS
from recipe.backend.served_task import ServedTask
from recipe.console import log
from recipe.models.packed_encoders import IS_OLDER
from recipe.models.sources.origin import Origin
from recipe.tasks.text_to_text.spec import SPECS, SUMMARIES, TEXTS, TRANSLATIONS
from recipe.tokenization.languages import language_tokens

_NAMES = {TEXTS: "generated_text", SUMMARIES: "summary_text", TRANSLATIONS: "translation_text"}
_LENGTHS = {"max_new_tokens", "max_length"}
_WRITING = _LENGTHS | {
    "min_new_tokens", "min_length", "num_beams", "do_sample", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "early_stopping",
    "seed",
}  # fmt: skip
PARAMETERS = _WRITING | {"truncation", "prefix"}
_SAMPLING = ("temperature", "top_k", "top_p", "typical_p")
_LANGUAGES = ("src_lang", "tgt_lang")
_NEW_TOKENS, _BEAMS, _MOST_BEAMS = 256, 4, 64
_LIMITED = ("max_new_tokens", "max_length", "min_length", "min_new_tokens")
_MOST_TOKENS = 4096
"""The most new tokens, if the model's positions set no bound."""


@dataclass(frozen=True, kw_only=True)
class TextGenerator(ServedTask):
    """A saved encoder-decoder model."""

    # The three tasks differ only in what loads their models.
    served = SPECS[0].served[SUMMARIES]
    generates = True
    loaded: LoadedModel
    task: str
    """SUMMARIES, TRANSLATIONS or TEXTS."""
    defaults: Mapping[str, Any]
    """Parameters of requests that leave them out: beams, lengths, the prefix, languages."""
    limits: Mapping[str, int]
    """The largest lengths and number of beams."""
    languages: Mapping[str, int]
    """The token of each language of a multilingual model; empty for other models."""
    gathering: GenerationGroups = field(default_factory=GenerationGroups)

    @classmethod
    def load(
        cls, origin: Origin, task: str, environ: Mapping[str, str] = os.environ
    ) -> TextGenerator:
        """Load the encoder-decoder model that `origin` names.

        Args:
            origin: The model.
            task: SUMMARIES, TRANSLATIONS or TEXTS.
            environ: HF_TASK may name the task more precisely, such as translation_en_to_fr, for
                which a model's configuration may have settings (task_specific_params).
        """
        loaded = loading.load(origin, AutoModelForSeq2SeqLM)
        decoding.settle(loaded.model)
        name = environ.get("HF_TASK") or task
        config: Any = loaded.model.config
        generation: Any = loaded.model.generation_config
        defaults: dict[str, Any] = {"prefix": getattr(config, "prefix", None) or ""}
        # In transformers 4, 1 is also the value of a model without this setting.
        is_unset = generation.num_beams is None or (generation.num_beams == 1 and IS_OLDER)
        defaults["num_beams"] = _BEAMS if is_unset else generation.num_beams or 1
        if generation.max_new_tokens is not None:
            defaults["max_new_tokens"] = generation.max_new_tokens
        elif generation.max_length in (None, 20):
            # 20 is transformers' value for a model without this setting.
            defaults["max_new_tokens"] = _NEW_TOKENS
        else:
            defaults["max_length"] = generation.max_length
        specific = (getattr(config, "task_specific_params", None) or {}).get(name, {})
        if "max_length" in specific:
            defaults.pop("max_new_tokens", None)
        defaults |= {k: v for k, v in specific.items() if k in PARAMETERS}
        positions = getattr(config, "max_position_embeddings", None) or _MOST_TOKENS
        limits = dict.fromkeys(_LIMITED, positions) | {"num_beams": _MOST_BEAMS}
        for key in limits.keys() & defaults.keys():
            defaults[key] = min(defaults[key] or 0, limits[key])
        if pair := re.fullmatch(r"translation_(.+)_to_(.+)", name):
            defaults |= {"src_lang": pair[1], "tgt_lang": pair[2]}
        defaults.setdefault("src_lang", getattr(loaded.tokenizer, "src_lang", None))
        shown = ", ".join(f"{k}={v!r}" for k, v in defaults.items() if k in PARAMETERS and v)
        log(f"generation: {shown}, unless a request sets others")
        known = language_tokens(loaded.tokenizer)
        return cls(loaded=loaded, task=task, defaults=defaults, limits=limits, languages=known)

    def example(self, text: str) -> Request:
        parameters: dict[str, Any] = {"max_new_tokens": 2, "num_beams": 1, "min_length": 0}
        if self.languages and self.loaded.model.generation_config.forced_bos_token_id is None:
            parameters["tgt_lang"] = self.defaults.get("tgt_lang") or next(iter(self.languages))
        return Request(inputs=[text], parameters=parameters)

    def probes(self) -> Sequence[Request]:
        longer = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        requests = map(self.example, PROMPTS)
        return [replace(one, parameters={**one.parameters, **longer}) for one in requests]

    def prompt_ids(self, prepared: Request) -> Sequence[int]:
        return list(prepared.work[0][0])

    def continue_prompt(self, prepared: Request) -> list[int]:
        token_ids, options = prepared.work
        (output,) = self._generate(options, [TokenizedInput(0, token_ids[0])], lambda: None)
        tokens: list[int] = output.tolist()
        return tokens

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS.union(_LANGUAGES if self.languages else ()), self.task)
        sources = request.read(a_text)
        generation: Any = self.loaded.model.generation_config
        languages: dict[str, str | None] = {}
        if self.languages:
            for name in _LANGUAGES:
                language = request.parameters.get(name) or self.defaults.get(name)
                if language is not None and language not in self.languages:
                    raise BadRequest(
                        f"{name} is {language!r}. Give one of the model's: "
                        f"{', '.join([*self.languages][:60])}."
                    )
                languages[name] = language
            if languages["tgt_lang"] is None and generation.forced_bos_token_id is None:
                raise BadRequest(
                    "The model generates several languages: name one in tgt_lang, as in "
                    f'{{"inputs": "a text", "parameters": {{"tgt_lang": '
                    f'"{next(iter(self.languages))}"}}}}.'
                )
        options = self._options(request.parameters)
        if (target := languages.pop("tgt_lang", None)) is not None:
            options["forced_bos_token_id"] = self.languages[target]
        prefix = request.parameters.get("prefix", self.defaults.get("prefix", ""))
        new = options.get("max_new_tokens") or options["max_length"]
        texts, beams = len(sources), options["num_beams"]
        reason = f"{texts:,} texts x {beams:,} beams x {new:,} new tokens"
        bounds.hold(Bound.WRITTEN, texts * beams * new, reason)
        bounds.hold_text(prefix)
        # Of the request's parameters only truncation is about sources.
        kept = {k: v for k, v in request.parameters.items() if k == "truncation"}
        prepared = self.loaded.encode(replace(request, parameters=kept), sources, prefix, languages)
        token_ids = [row.ids for row in prepared.work]
        sizes = [len(ids) + new for ids in token_ids]
        work, given = (token_ids, options), request.parameters
        return replace(prepared, parameters=given, sizes=sizes, work=work)

    def _options(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `generate` for a request's parameters.

        Raises:
            BadRequest: They contradict each other, or exceed a limit.
        """
        chosen = {k: v for k, v in parameters.items() if k in _WRITING}
        if set(chosen) >= _LENGTHS:
            raise BadRequest("max_new_tokens and max_length are both given. Give one.")
        for kind in ("length", "new_tokens"):
            least, longest = chosen.get(f"min_{kind}"), chosen.get(f"max_{kind}")
            if least is not None and longest is not None and least > longest:
                raise BadRequest(f"min_{kind} is {least}, max_{kind} {longest}.", f"min_{kind}")
        for key, most in self.limits.items():
            if chosen.get(key, 0) > most:
                raise BadRequest(f"{key} is {chosen[key]}, and the model's limit is {most}.", key)
        left_out = _LENGTHS if _LENGTHS & set(chosen) else set()
        usual = {k: v for k, v in self.defaults.items() if k in _WRITING - left_out}
        options = {**usual, **chosen}
        generation: Any = self.loaded.model.generation_config
        if options.get("temperature", 1) < GREEDY_BELOW:
            del options["temperature"]
            options["do_sample"] = False
        if not options.get("do_sample", generation.do_sample):
            if idle := [name for name in _SAMPLING if name in chosen and name in options]:
                raise BadRequest(
                    f"{idle[0]} has no effect without do_sample: true. Send that too, or leave "
                    f"{idle[0]} out.",
                    idle[0],
                )
            options.pop("seed", None)
        return options

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return the generated texts of each request, under the task's name.

        Texts of equal parameters are generated together. If predictions take turns, an answer is a
        function that returns it.
        """
        later: list[Callable[[], dict[str, Any]]] = []
        generation: Any = self.loaded.model.generation_config
        for prepared in requests:
            token_ids, options = prepared.work
            # A step takes no longer than one with this number of texts and the default beams.
            size = max(1, min(BATCH, BATCH * _BEAMS // options["num_beams"]))
            penalty = generation.encoder_repetition_penalty
            if penalty not in (None, 1.0) or generation.encoder_no_repeat_ngram_size:
                # Penalties on tokens of the source would apply to its padding, too.
                size = 1
            sources = [TokenizedInput(index, ids) for index, ids in enumerate(token_ids)]
            alike: Any = object()
            # The samples drawn for a text depend on those drawn for its neighbours.
            if options.get("seed") is None:
                sources.sort(key=lambda source: len(source.ids))
                if size > 1:
                    alike = json.dumps(options, sort_keys=True)
            parts = self.gathering.add(sources, alike, size, partial(self._write, options))
            later.append(partial(self._answer, prepared, parts))
        return list(later) if turns.are_taken() else [answer() for answer in later]

    def _answer(self, prepared: Request, parts: Sequence[GroupMembers]) -> dict[str, Any]:
        texts = self.gathering.results(parts)
        return prepared.answer([{_NAMES[self.task]: text} for text in texts])

    def _write(
        self,
        options: Mapping[str, Any],
        sources: Sequence[TokenizedInput],
        pause: Callable[[], None],
    ) -> list[str]:
        """Generate the text of each source, with a pause after each token."""
        output = self._generate(options, sources, pause)
        texts: list[str] = self.loaded.tokenizer.batch_decode(output, skip_special_tokens=True)
        return texts

    def _generate(
        self,
        options: Mapping[str, Any],
        sources: Sequence[TokenizedInput],
        pause: Callable[[], None],
    ) -> torch.Tensor:
        """Return the tokens of each source's text, shape (texts, tokens)."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        arguments: dict[str, Any] = {"seed": None, "num_return_sequences": 1, **options}
        draws = bool(options.get("do_sample", model.generation_config.do_sample))
        watch, ends = Pauses(pause, draws=draws), decoding.end_ids(model)
        if model.generation_config.stop_strings:
            # Without such texts, transformers 4.57 passes it on to the model.
            arguments["tokenizer"] = tokenizer
        return decoding.generate(self.loaded, sources, watch, ends, **arguments)
