"""Question answering: the words of a context that answer a question."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import AutoModelForQuestionAnswering

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import BadRequest, Request, read_record
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.served_task import ServedTask
from recipe.models.answer_spans import find_spans
from recipe.models.sources.origin import Origin
from recipe.tasks.question_answering.spec import SPECS
from recipe.tokenization.windows import PairWindow, check_fast, pair_windows

PARAMETERS = {
    "top_k", "doc_stride", "max_answer_len", "max_seq_len", "handle_impossible_answer",
    "align_to_words", "padding",
}  # fmt: skip
_NONE = "handle_impossible_answer"
_MAX_SEQ_LEN, _DOC_STRIDE, _MAX_ANSWER_LEN = 384, 128, 15


@dataclass(frozen=True, kw_only=True)
class QuestionAnswerer(ServedTask):
    """A saved extractive question answering model."""

    served = SPECS[0].served["question-answering"]
    loaded: LoadedModel

    @property
    def _trained(self) -> Mapping[str, Any]:
        """Return the parameters with which the recipe trained and evaluated the model, if any."""
        return getattr(self.loaded.model.config, "question_answering", None) or {}

    @classmethod
    def load(cls, origin: Origin) -> QuestionAnswerer:
        """Return the question answering model that `origin` names. Raise ModelError if its
        tokenizer does not map tokens to characters."""
        loaded = loading.load(origin, AutoModelForQuestionAnswering)
        check_fast(loaded.tokenizer)
        return cls(loaded=loaded)

    def example(self, text: str) -> Request:
        return Request(inputs=[{"question": "Is it?", "context": text}])

    def prepare(self, request: Request) -> Request:
        request = request.checked(PARAMETERS, "question-answering")
        bounds.hold(Bound.ROWS, len(request.inputs))
        values = request.read(question_and_context)
        most = request.parameters.get("top_k", 1)
        bounds.hold(Bound.ANSWER, 4 * len(values) * min(most, Bound.ANSWER.most))
        work, read = [], 0
        sizes: list[int] = []
        for question, context in values:
            work.append(self._windows(question, context, request.parameters))
            lengths = [len(window.ids) for window in work[-1]]
            sizes += lengths
            read += sum(lengths)
            bounds.hold(Bound.ROWS, len(sizes))
            bounds.hold(Bound.READ, read)
        return replace(request, values=values, sizes=sizes, work=work)

    def _windows(
        self, question: str, context: str, parameters: Mapping[str, Any]
    ) -> list[PairWindow]:
        """Return overlapping windows of a context, each with the question and short enough for the
        model. Raise BadRequest if the question leaves no room, or the context has no tokens."""
        tokenizer: Any = self.loaded.tokenizer
        most = parameters.get("max_seq_len", self._trained.get("max_seq_len", _MAX_SEQ_LEN))
        most = min(most, self.loaded.max_length)
        shared = min(most // 2, self._trained.get("doc_stride", _DOC_STRIDE))
        shared = parameters.get("doc_stride", shared)
        bounds.hold_text(question, context)
        answer = min(parameters.get("max_answer_len", _MAX_ANSWER_LEN), most)
        bounds.hold(Bound.SCORES, 4 * most * answer, "max_seq_len and max_answer_len")
        turns.pause()
        room = most - self._count(question) - tokenizer.num_special_tokens_to_add(pair=True)
        bounds.hold_windows(tokenizer, context, room, shared)
        if room <= shared:
            if self._count(context) > room:
                raise BadRequest(
                    f"The question leaves no room for its context: {most} tokens are read at once, "
                    f"of which parts share {shared} (doc_stride)."
                )
            shared = 0  # there is one part
        windows = []
        for window in pair_windows(tokenizer, [question], [context], most, shared):
            turns.pause()
            windows.append(window)
        if not any(window.is_context.sum() > window.is_context[window.nowhere]
                   for window in windows):  # fmt: skip
            raise BadRequest("A context is empty.")
        return windows

    def _count(self, text: str) -> int:
        """Return the tokens of a text, without special tokens."""
        encoded = self.loaded.tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return for each request, for each question `{"score", "start", "end", "answer"}`, where
        start and end are characters of the context; with `top_k` a list of the best."""
        parts = itertools.chain.from_iterable(prepared.work for prepared in requests)
        rows = [TokenRow(window.ids, window.types) for windows in parts for window in windows]
        logits = iter(self.loaded.forward(rows, Reading.TOKENS))
        answers: list[Any] = []
        for prepared in requests:
            entries = []
            for (_, context), windows in zip(prepared.values, prepared.work, strict=True):
                scored = [(window, next(logits).numpy()) for window in windows]
                entries.append(self._answer(context, scored, prepared.parameters))
            # As Hugging Face's pipeline: a list of one question is answered as that question.
            answers.append(prepared.answer(entries, single=len(entries) == 1))
        return answers

    def _answer(
        self,
        context: str,
        scored: Sequence[tuple[PairWindow, np.ndarray[Any, Any]]],
        parameters: Mapping[str, Any],
    ) -> Any:
        """Return the likeliest words of a context: one answer, or a list of several.

        Args:
            context: The whole of it.
            scored: Its parts, with their logits of shape (tokens, 2): starts and ends.
            parameters: The request's.
        """
        trained, cls = self._trained, self.loaded.tokenizer.cls_token_id
        parameters = {**trained, **parameters}
        count, by_words = parameters.get("top_k", 1), parameters.get("align_to_words", True)
        longest = parameters.get("max_answer_len", _MAX_ANSWER_LEN)
        # Several spans of tokens may have the same words.
        candidates = 2 * count + 10 if by_words else count
        no_answer, answers = 1e6, dict[str, dict[str, Any]]()
        masked = []
        for window, logits in scored:
            allowed = window.is_context.copy()
            is_cls = window.ids[window.nowhere] == cls
            allowed[window.nowhere] |= is_cls or trained.get(_NONE, False)
            masked.append(np.where(allowed, logits.T, -10000.0))
        # As in training's evaluation: one softmax over all windows, and of equal words the likelier
        # place. Pipelines normalize each window, and add up equal words.
        is_judged = bool(trained)
        per_window = min(candidates, masked[0].shape[1] * longest)
        bounds.hold(Bound.ANSWER, 8 * len(masked) * per_window, "places of answers, by top_k")
        scale = _log_sum(np.concatenate(masked, axis=1)) if is_judged else None
        for (window, _), values in zip(scored, masked, strict=True):
            scores = values - (_log_sum(values) if scale is None else scale)
            none, best = find_spans(scores, window.is_context, window.nowhere, candidates, longest)
            no_answer = min(no_answer, float(np.exp(none)))
            for first, last, log_score in best:
                turns.pause()
                score = float(np.exp(log_score))
                begins, ends = window.characters(first, last, by_words)
                text = context[begins:ends]
                known = answers.get(text.lower())
                if known is None or (is_judged and known["score"] < score):
                    entry = {"score": score, "start": begins, "end": ends, "answer": text}
                    answers[text.lower()] = entry
                elif not is_judged:
                    known["score"] += score
        nothing = {"score": no_answer, "start": 0, "end": 0, "answer": ""}
        entries = [*answers.values(), *([nothing] if parameters.get(_NONE) else ())]
        ranked = sorted(entries, key=lambda entry: -entry["score"])[:count]
        return ranked[0] if len(ranked) == 1 else ranked


def _log_sum(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logarithm [2, 1] of a softmax's denominators over logits [2, tokens]."""
    highest = logits.max(axis=1, keepdims=True)
    return np.asarray(highest + np.log(np.exp(logits - highest).sum(1, keepdims=True)))


def question_and_context(value: Any) -> tuple[str, str]:
    """Return an input's question and its context. Raise BadRequest if one is missing or empty."""
    cells = read_record(value, QuestionAnswerer.served.inputs)
    if not all(text.strip() for text in cells.values()):
        raise BadRequest("A question or a context is empty.")
    return cells["question"], cells["context"]
