"""Parameters of requests: the names that transformers' pipelines take, and their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 1 << 31
"""The default upper bound of whole numbers: larger ones could overflow in tensors."""


@dataclass(frozen=True)
class Rule:
    """The values that a parameter may have."""

    is_right: Callable[[Any], bool]
    words: str
    """A description of these values that continues "Give ..."."""


def whole(least: int, most: int = _MOST) -> Rule:
    """Return the rule of a whole number; True and False are not numbers."""
    words = f"a whole number from {least}" + ("" if most == _MOST else f" to {most}")
    return Rule(lambda value: type(value) is int and least <= value <= most, words)


def number(least: float, most: float = math.inf, *, above: bool = False) -> Rule:
    """Return the rule of a finite number from `least`, or above it, up to `most`."""

    def is_right(value: Any) -> bool:
        # math.isfinite raises OverflowError for whole numbers of 400 digits.
        if type(value) not in (int, float) or not -math.inf < value < math.inf or value > most:
            return False
        return bool(value > least if above else value >= least)

    words = f"a number {'above' if above else 'from'} {least:g}"
    return Rule(is_right, words if most == math.inf else f"{words} to {most:g}")


def one_of(*values: Any) -> Rule:
    """Return the rule of one of a few values, of the same type."""
    names = [value if isinstance(value, str) else json.dumps(value) for value in values]
    words = " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return Rule(lambda value: any(type(value) is type(v) and value == v for v in values), words)


def are_texts(value: Any) -> bool:
    """Return whether a JSON value is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


FLAG = one_of(True, False)
TEXT = Rule(lambda value: isinstance(value, str), "a text")
TEXT_OR_TEXTS = Rule(
    lambda value: isinstance(value, str) or are_texts(value), "a text or a list of texts"
)


def are_ids(value: Any) -> bool:
    """Return whether a JSON value is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(number) is int and 0 <= number < _MOST for number in value)
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


SIDE = Rule(lambda value: str(value).lower() in ("left", "right"), '"Left" or "Right"')
_NAMES = Rule(lambda value: value != "" and TEXT_OR_TEXTS.is_right(value), TEXT_OR_TEXTS.words)
_SHARE = number(0, 1, above=True)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("truncate", "return_all_scores", "multi_label", "normalize",
         "handle_impossible_answer", "align_to_words", "return_text", "do_sample",
         "stream", "pool", "return_full_text", "return_language", "sequential", "output_rle_mask",
         "output_bboxes_mask"), FLAG
    ),
    **dict.fromkeys(
        ("prefix", "prompt", "prompt_name", "src_lang", "tgt_lang", "language",
         "hypothesis_template"), TEXT
    ),
    **dict.fromkeys(
        ("max_length", "doc_stride", "top_k", "max_answer_len", "truncate_dim",
         "dimensions", "max_new_tokens", "num_beams"),
        whole(1),
    ),
    **dict.fromkeys(("stride", "min_new_tokens", "min_length", "no_repeat_ngram_size"), whole(0)),
    **dict.fromkeys(
        ("mask_threshold", "overlap_mask_area_threshold", "crop_overlap_ratio", "pred_iou_thresh",
         "stability_score_thresh", "crops_nms_thresh"),
        number(0, 1),
    ),
    **dict.fromkeys(("points_per_batch", "points_per_crop", "num_frames"), whole(1, 256)),
    **dict.fromkeys(("crop_n_points_downscale_factor", "stability_score_offset"), whole(1, 16)),
    "crops_n_layers": whole(0, 2),
    "frame_sampling_rate": whole(1, 10_000),
    "chunk_length_s": number(1),
    "stride_length_s": Rule(
        lambda value: all(map(number(0).is_right, value if _is_pair(value) else [value])),
        "seconds, or those at the left and at the right",
    ),
    "return_timestamps": one_of(True, False, "word", "char"),
    "task": one_of("transcribe", "translate"),
    "speaker_embeddings": Rule(
        lambda value: isinstance(value, list) and 0 < len(value) <= 4096
        and all(map(number(-1e6, 1e6).is_right, value)), "a list of numbers",
    ),
    "subtask": one_of("semantic", "instance", "panoptic"),
    "max_seq_len": whole(8),
    "seed": whole(0, 2**64 - 1),
    "truncation": one_of(True, False, "longest_first", "only_first", "do_not_truncate"),
    "truncation_direction": SIDE,
    "padding": one_of(True, False, "longest", "max_length", "do_not_pad"),
    "function_to_apply": one_of("sigmoid", "softmax", "none", "default"),
    "threshold": Rule(
        lambda value: value == "tuned" or number(0, 1).is_right(value),
        'a number from 0 to 1, or "tuned"',
    ),
    "aggregation_strategy": one_of("none", "simple", "first", "average", "max"),
    "ignore_labels": Rule(lambda value: value == [] or are_texts(value), "a list of labels"),
    **dict.fromkeys(("candidate_labels", "targets"), _NAMES),
    "early_stopping": one_of(True, False, "never"),
    "temperature": number(0, above=True),
    "top_p": _SHARE,
    "typical_p": _SHARE,
    # Scores may overflow float32 beyond this range.
    "repetition_penalty": number(0.001, 1000),
    "length_penalty": number(-1e6, 1e6),
}  # fmt: skip
"""The valid values of each parameter of any task."""
REQUIRED = {"candidate_labels"}
"""Parameters without which their tasks have no answer."""
