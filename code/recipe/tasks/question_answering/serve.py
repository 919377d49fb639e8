"""Question answering: the words of a context that answer a question."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AutoModelForQuestionAnswering

from recipe.backend import bounds, loading, turns
from recipe.backend.bounds import Bound
from recipe.backend.loaded_model import LoadedModel
from recipe.backend.requests.payloads import Answers, BadRequest, Prepared, Request, read_record
from recipe.backend.rows import Reading, TokenRow
from recipe.backend.saved.origin import Origin
from recipe.backend.served_task import ServedTask
from recipe.errors import ModelError
from recipe.tasks.question_answering import spans
from recipe.tasks.question_answering.spec import SPECS

PARAMETERS = {
    "top_k", "doc_stride", "max_answer_len", "max_seq_len", "handle_impossible_answer",
    "align_to_words", "padding",
}  # fmt: skip
_NONE = "handle_impossible_answer"
_MAX_SEQ_LEN, _DOC_STRIDE, _MAX_ANSWER_LEN = 384, 128, 15


@dataclass(frozen=True)
class Window:
    """A part of a context with the question."""

    row: TokenRow
    encoding: Any
    """The tokenizer's encoding, which has the characters of each token."""
    allowed: np.ndarray[Any, Any]
    """Marks tokens that an answer may contain: those of the context, and the one for no answer."""
    nowhere: int
    """The position of the token for no answer."""


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
        """Return the question answering model that `origin` names.

        Raises:
            ModelError: Its tokenizer does not return the offsets of tokens.
        """
        loaded = loading.load(origin, AutoModelForQuestionAnswering)
        if not loaded.tokenizer.is_fast:
            raise ModelError(
                f"The tokenizer of {origin.location} does not return the offsets of tokens.",
                "Save a fast tokenizer (tokenizer.json) with the model.",
            )
        return cls(loaded=loaded)

    def example(self, text: str) -> Request:
        return Request(inputs=[{"question": "Is it?", "context": text}])

    def prepare(self, request: Request) -> Prepared:
        request = request.checked(PARAMETERS, "question-answering")
        bounds.hold(Bound.ROWS, len(request.inputs))
        inputs = request.read(question_and_context)
        bounds.hold(Bound.ROWS, len(inputs.values))
        most = request.parameters.get("top_k", 1)
        bounds.hold(Bound.ANSWER, 4 * len(inputs.values) * min(most, Bound.ANSWER.most))
        work, read = [], 0
        sizes: list[int] = []
        for question, context in inputs.values:
            work.append(self._windows(question, context, request.parameters))
            lengths = [len(window.row.ids) for window in work[-1]]
            sizes += lengths
            read += sum(lengths)
            bounds.hold(Bound.ROWS, len(sizes))
            bounds.hold(Bound.READ, read)
        return Prepared(request=request, inputs=inputs, sizes=sizes, work=work)

    def _windows(self, question: str, context: str, parameters: Mapping[str, Any]) -> list[Window]:
        """Return overlapping windows of a context, each with the question and short enough for the
        model.

        Raises:
            BadRequest: The question leaves no room for the context, or the context has no tokens.
        """
        tokenizer: Any = self.loaded.tokenizer
        trained = self._trained
        most = parameters.get("max_seq_len", trained.get("max_seq_len", _MAX_SEQ_LEN))
        most = min(most, self.loaded.max_length)
        stride = min(most // 2, trained.get("doc_stride", _DOC_STRIDE))
        stride = parameters.get("doc_stride", stride)
        bounds.hold_text(question, context)
        answer = min(parameters.get("max_answer_len", _MAX_ANSWER_LEN), most)
        bounds.hold(Bound.SCORES, 4 * most * answer, "max_seq_len and max_answer_len")
        turns.pause()
        length = len(tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"])
        room = most - length - tokenizer.num_special_tokens_to_add(pair=True)
        bounds.hold_windows(tokenizer, context, room, stride)
        try:
            encoded = spans.encode(tokenizer, [question], [context], most, stride)
        except BaseException as error:
            # If question and stride leave no room, tokenizers panic, which is not an Exception.
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise BadRequest(
                f"The question leaves no room for its context: {most} tokens are read at once, of "
                f"which parts share {stride} (doc_stride)."
            ) from error
        windows = []
        sequence = spans.context_sequence(tokenizer)
        for number, ids in enumerate(encoded["input_ids"]):
            turns.pause()
            allowed = np.array([owner == sequence for owner in encoded.sequence_ids(number)])
            nowhere = spans.no_answer_token(tokenizer, ids)
            allowed[nowhere] |= ids[nowhere] == tokenizer.cls_token_id or trained.get(_NONE, False)
            types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else None
            windows.append(Window(TokenRow(ids, types), encoded[number], allowed, nowhere))
        if not any(window.allowed.sum() > window.allowed[window.nowhere] for window in windows):
            raise BadRequest("A context is empty.")
        return windows

    def predict(self, requests: Sequence[Prepared]) -> list[Any]:
        """Return for each request, for each question `{"score", "start", "end", "answer"}`, where
        start and end are characters of the context; with `top_k` a list of the best."""
        parts = itertools.chain.from_iterable(prepared.work for prepared in requests)
        rows = [window.row for windows in parts for window in windows]
        logits = iter(self.loaded.forward(rows, Reading.TOKENS))
        answers: list[Any] = []
        for prepared in requests:
            entries = []
            for (_, context), windows in zip(prepared.inputs.values, prepared.work, strict=True):
                scored = [(window, next(logits).numpy()) for window in windows]
                entries.append(self._answer(context, scored, prepared.parameters))
            # As Hugging Face's pipeline: a list of one question is answered as that question.
            single = len(entries) == 1 and not prepared.request.records
            answers.append(Answers(entries, prepared.truncated, single))
        return answers

    def _answer(
        self,
        context: str,
        scored: Sequence[tuple[Window, np.ndarray[Any, Any]]],
        parameters: Mapping[str, Any],
    ) -> Any:
        """Return the likeliest words of a context: one answer, or a list of several.

        Args:
            context: The whole of it.
            scored: Its parts, with their logits of shape (tokens, 2): starts and ends.
            parameters: The request's.
        """
        parameters = {**self._trained, **parameters}
        count, by_words = parameters.get("top_k", 1), parameters.get("align_to_words", True)
        longest = parameters.get("max_answer_len", _MAX_ANSWER_LEN)
        # Several spans of tokens may have the same words.
        candidates = 2 * count + 10 if by_words else count
        sequence = spans.context_sequence(self.loaded.tokenizer)
        no_answer, answers = 1e6, dict[str, dict[str, Any]]()
        masked = [np.where(window.allowed, logits.T, -10000.0) for window, logits in scored]
        # As in training's evaluation: one softmax over all windows, and of equal words the likelier
        # place. Pipelines normalize each window, and add up equal words.
        is_judged = bool(self._trained)
        per_window = min(candidates, masked[0].shape[1] * longest)
        bounds.hold(Bound.ANSWER, 8 * len(masked) * per_window, "places of answers, by top_k")
        scale = _log_sum(np.concatenate(masked, axis=1)) if is_judged else None
        for (window, _), values in zip(scored, masked, strict=True):
            both = values - (_log_sum(values) if scale is None else scale)
            no_answer = min(no_answer, float(np.exp(both[:, window.nowhere].sum())))
            both[:, window.nowhere] = -np.inf
            for first, last, log_score in spans.likeliest(both[0], both[1], candidates, longest):
                turns.pause()
                if not (window.allowed[first] and window.allowed[last]):
                    continue
                score = float(np.exp(log_score))
                # The offsets of the span's words; of its tokens, if no words are known.
                edges = [window.encoding.offsets[token] for token in (first, last)]
                words = [window.encoding.token_to_word(token) for token in (first, last)]
                if by_words and None not in words:
                    positions = [window.encoding.word_to_chars(word, sequence) for word in words]
                    edges = edges if None in positions else positions
                begins, ends = edges[0][0], edges[1][1]
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
