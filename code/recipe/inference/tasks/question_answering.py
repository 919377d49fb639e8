"""Question answering: the words of a context that answer a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering

from recipe.errors import ModelError
from recipe.inference import loaded_model
from recipe.inference.loaded_model import Encoder, Row
from recipe.inference.origin import Origin
from recipe.inference.payloads import Answers, BadRequest, Request, a_text

PARAMETERS = {
    "top_k", "doc_stride", "max_answer_len", "max_seq_len", "max_question_len",
    "handle_impossible_answer", "align_to_words", "padding",
}  # fmt: skip
_MAX_SEQ_LEN, _DOC_STRIDE, _MAX_ANSWER_LEN = 384, 128, 15
_EXAMPLE = 'Send for example {"inputs": {"question": "Who?", "context": "It was Ada."}}.'


@dataclass(frozen=True)
class _Window:
    """A part of a context with the question."""

    row: Row
    encoding: Any
    """The tokenizer's, which knows the characters of each token."""
    allowed: np.ndarray[Any, Any]
    """Which tokens may be of an answer: those of the context."""


@dataclass(frozen=True, kw_only=True)
class QuestionAnswerer:
    """A saved extractive question answering model."""

    encoder: Encoder

    def example(self, text: str) -> Request:
        """A request that this task answers."""
        return Request(texts=[{"question": "Is it?", "context": text}])

    def measure(self, request: Request) -> list[int]:
        """Tokens of each part of each context, with its question.

        Raises:
            BadRequest: a parameter or an input is none of this task's.
        """
        if request.prepared is None:
            request.only(PARAMETERS, "question-answering")
            if not request.is_read:
                request.texts = [
                    part for each in request.texts for part in _spread(each, request.records)
                ]
            request.read(_question)
            request.prepared = [
                self._windows(question, context, request.parameters)
                for question, context in request.texts
            ]
        return [len(window.row.ids) for windows in request.prepared for window in windows]

    def _windows(self, question: str, context: str, asked: Mapping[str, Any]) -> list[_Window]:
        tokenizer: Any = self.encoder.tokenizer
        most = min(asked.get("max_seq_len", _MAX_SEQ_LEN), self.encoder.max_length)
        stride = asked.get("doc_stride", min(most // 2, _DOC_STRIDE))
        if longest := asked.get("max_question_len"):
            ids = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)
            question = question[
                : ([0, *(end for _, end in ids["offset_mapping"])][: longest + 1])[-1]
            ]
        asks_first = tokenizer.padding_side == "right"
        try:
            encoded = tokenizer(
                *((question, context) if asks_first else (context, question)),
                truncation="only_second" if asks_first else "only_first",
                max_length=most,
                stride=stride,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        except BaseException as error:
            # Where question and stride leave no room, tokenizers panic, which is no Exception.
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise BadRequest(
                f"The question leaves no room for its context: {most} tokens are read at once, of "
                f"which parts share {stride} (doc_stride)."
            ) from error
        windows = []
        for number, ids in enumerate(encoded["input_ids"]):
            sequence = 1 if asks_first else 0
            allowed = np.array([each == sequence for each in encoded.sequence_ids(number)])
            # The token before all stands for "no answer".
            if tokenizer.cls_token_id is not None:
                allowed |= np.array(ids) == tokenizer.cls_token_id
            types = encoded["token_type_ids"][number] if "token_type_ids" in encoded else None
            windows.append(_Window(Row(ids, types), encoded[number], allowed))
        if not any(window.allowed[1:].any() for window in windows):
            raise BadRequest(f"A context is empty. {_EXAMPLE}")
        return windows

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request, for each question `{"score", "start", "end", "answer"}`, where start
        and end are characters of the context; with `top_k` a list of the best."""
        for request in requests:
            self.measure(request)
        rows = [each.row for request in requests for some in request.prepared for each in some]
        logits = iter(self.encoder.forward(rows, _starts_and_ends))
        answers: list[Any] = []
        for request in requests:
            entries = []
            for (_, context), windows in zip(request.texts, request.prepared, strict=True):
                scored = [(window, next(logits).numpy()) for window in windows]
                entries.append(self._answer(context, scored, request.parameters))
            # As Hugging Face's pipeline: a list of one question is answered as that question.
            single = len(entries) == 1 and not request.records
            answers.append(Answers(entries, request.truncated, single))
        return answers

    def _answer(
        self,
        context: str,
        scored: Sequence[tuple[_Window, np.ndarray[Any, Any]]],
        asked: Mapping[str, Any],
    ) -> Any:
        best, by_words = asked.get("top_k", 1), asked.get("align_to_words", True)
        longest = asked.get("max_answer_len", _MAX_ANSWER_LEN)
        # Several spans of tokens may be the same words.
        wanted = 2 * best + 10 if by_words else best
        sequence = 1 if self.encoder.tokenizer.padding_side == "right" else 0
        nothing, answers = 1e6, dict[str, dict[str, Any]]()
        for window, logits in scored:
            start, end = (_probabilities(each, window.allowed) for each in logits.T)
            nothing = min(nothing, float(start[0] * end[0]))
            start[0] = end[0] = 0.0
            for first, last, score in _spans(start, end, wanted, longest):
                if not (window.allowed[first] and window.allowed[last]):
                    continue
                begins, stops = _characters(window.encoding, first, last, sequence, by_words)
                words = context[begins:stops]
                entry = {"score": 0.0, "start": begins, "end": stops, "answer": words}
                answers.setdefault(words.lower(), entry)["score"] += score
        found = list(answers.values())
        if asked.get("handle_impossible_answer"):
            found.append({"score": nothing, "start": 0, "end": 0, "answer": ""})
        found = sorted(found, key=lambda each: -each["score"])[:best]
        return found[0] if len(found) == 1 else found


def _probabilities(
    logits: np.ndarray[Any, Any], allowed: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    masked = np.where(allowed, logits, -10000.0)
    powers = np.exp(masked - masked.max())
    return np.asarray(powers / powers.sum())


def _spans(
    start: np.ndarray[Any, Any], end: np.ndarray[Any, Any], count: int, longest: int
) -> list[tuple[int, int, float]]:
    """The likeliest spans of at most `longest` tokens: first and last token, and probability."""
    products = np.tril(np.triu(np.outer(start, end)), longest - 1)
    flat = products.ravel()
    count = min(count, len(flat))
    likeliest = np.argpartition(-flat, count - 1)[:count]
    likeliest = likeliest[np.argsort(-flat[likeliest], kind="stable")]
    firsts, lasts = np.unravel_index(likeliest, products.shape)
    return [(int(a), int(b), float(products[a, b])) for a, b in zip(firsts, lasts, strict=True)]


def _characters(
    encoding: Any, first: int, last: int, sequence: int, by_words: bool
) -> tuple[int, int]:
    """Where the words of a span of tokens begin and end; its tokens, where no words are known."""
    if by_words:
        words = encoding.token_to_word(first), encoding.token_to_word(last)
        if None not in words:
            spans = [encoding.word_to_chars(word, sequence) for word in words]
            if None not in spans:
                return spans[0][0], spans[1][1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def _starts_and_ends(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    both = torch.stack([output.start_logits, output.end_logits], dim=-1)
    return [each[: int(row.sum())] for each, row in zip(both, mask, strict=True)]


def _spread(value: Any, is_record: bool) -> list[Any]:
    """Questions about one context, or one question about several, one by one."""
    if is_record or not isinstance(value, dict) or set(value) != {"question", "context"}:
        return [value]
    question, context = value["question"], value["context"]
    count = max(len(each) for each in (question, context, [0]) if isinstance(each, list))
    lists = [each if isinstance(each, list) else [each] * count for each in (question, context)]
    if not lists[0] or len(lists[0]) != len(lists[1]):
        raise BadRequest(f"There are {len(lists[0])} questions and {len(lists[1])} contexts.")
    return [{"question": q, "context": c} for q, c in zip(*lists, strict=True)]


def _question(value: Any) -> tuple[str, str]:
    if isinstance(value, bytes):
        a_text(value)
    if not isinstance(value, dict) or set(value) != {"question", "context"}:
        raise BadRequest(f"An input is {str(value)[:60]!r}, not a question with its context. "
                         f"{_EXAMPLE}")  # fmt: skip
    question, context = a_text(value["question"]), a_text(value["context"])
    if not question.strip() or not context.strip():
        raise BadRequest(f"A question or a context is empty. {_EXAMPLE}")
    return question, context


def load(origin: Origin) -> QuestionAnswerer:
    """The question answering model that `origin` names.

    Raises:
        ModelError: its tokenizer does not know which characters its tokens are of.
    """
    loaded = loaded_model.load(origin, AutoModelForQuestionAnswering)
    if not loaded.tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer of {origin.place} does not say where its tokens stand in a text.",
            "Save a fast tokenizer (tokenizer.json) beside the model.",
        )
    return QuestionAnswerer(encoder=loaded)
