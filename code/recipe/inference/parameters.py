"""What a request may ask beside its inputs: the names that transformers' pipelines take, and what
each may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What values a parameter may have."""

    is_right: Callable[[Any], bool]
    range: str
    """The same in words."""


def _whole(least: int) -> Rule:
    return Rule(lambda value: type(value) is int and value >= least, f"{least} or more")


def _one_of(*values: Any) -> Rule:
    names = [str(value).lower() if type(value) is bool else value for value in values]
    words = f"{', '.join(names[:-1])} or {names[-1]}"
    return Rule(lambda value: any(type(value) is type(v) and value == v for v in values), words)


def _more_than_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


_FLAG = _one_of(True, False)
_POSITIVE = Rule(_more_than_zero, "a number more than 0")
_TEXT = Rule(lambda value: isinstance(value, str), "a text")
_TEXTS = Rule(
    lambda value: _are_texts(value) or bool(value and isinstance(value, str)),
    "a text or a list of texts",
)

RULES: Mapping[str, Rule] = {
    # What is read, and how much of it.
    "truncation": _one_of(True, False, "longest_first", "do_not_truncate"),
    "max_length": _whole(1),
    "padding": _one_of(True, False, "longest", "max_length", "do_not_pad"),
    "stride": _whole(0),
    "doc_stride": _whole(1),
    "max_seq_len": _whole(8),
    "max_question_len": _whole(1),
    "is_split_into_words": _FLAG,
    "delimiter": _TEXT,
    "tokenizer_kwargs": Rule(lambda value: isinstance(value, dict), "an object"),
    "tokenize_kwargs": Rule(lambda value: isinstance(value, dict), "an object"),
    "prefix": _TEXT,
    "prompt": _TEXT,
    "prompt_name": _TEXT,
    "src_lang": _TEXT,
    "tgt_lang": _TEXT,
    # What is answered.
    "top_k": _whole(1),
    "function_to_apply": _one_of("sigmoid", "softmax", "none", "default"),
    "return_all_scores": _FLAG,
    "aggregation_strategy": _one_of("none", "simple", "first", "average", "max"),
    "ignore_labels": Rule(lambda value: value == [] or _are_texts(value), "a list of labels"),
    "candidate_labels": _TEXTS,
    "multi_label": _FLAG,
    "hypothesis_template": _TEXT,
    "targets": _TEXTS,
    "max_answer_len": _whole(1),
    "handle_impossible_answer": _FLAG,
    "align_to_words": _FLAG,
    "normalize": _FLAG,
    "truncate_dim": _whole(1),
    "return_text": _FLAG,
    "clean_up_tokenization_spaces": _FLAG,
    # How a text is written.
    "max_new_tokens": _whole(1),
    "min_new_tokens": _whole(0),
    "min_length": _whole(0),
    "num_beams": _whole(1),
    "num_beam_groups": _whole(1),
    "num_return_sequences": _whole(1),
    "do_sample": _FLAG,
    "early_stopping": _one_of(True, False, "never"),
    "temperature": _POSITIVE,
    "top_p": Rule(lambda value: type(value) in (int, float) and 0 < value <= 1, "0 to 1"),
    "typical_p": Rule(lambda value: type(value) in (int, float) and 0 < value <= 1, "0 to 1"),
    "repetition_penalty": _POSITIVE,
    "length_penalty": Rule(
        lambda value: type(value) in (int, float) and abs(value) < 1e6, "a number"
    ),
    "no_repeat_ngram_size": _whole(0),
    "seed": _whole(0),
    "stream": _FLAG,
}
"""What each parameter of some task may be."""

OPTIONS = {"wait_for_model", "use_cache", "use_gpu"}
"""What Hugging Face's Inference API takes as `options`: here they ask for what is always so."""
