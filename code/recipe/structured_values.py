"""Read hyperparameters that are lists or objects, in every form in which SageMaker delivers them.

The SDKs send JSON. On the way to argv, SageMaker's toolkits write lists as Python does, and objects
as `key=value` with commas.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from recipe.errors import HyperparameterError
from recipe.hyperparameters import FIELDS

_LISTS = {
    **{name: mark for name, item in FIELDS.items() if (mark := item.metadata["separator"])},
    **dict.fromkeys(("report_to", "optim_target_modules"), ","),
    **dict.fromkeys(("fsdp", "debug"), " "),
}
"""Hyperparameters that take several values, and their separators in a text."""
_JSON = ("class_names",)
"""Those whose text may be a JSON list, for values with commas."""
_PAIRS = ("optim_args", "mp_parameters")
"""Objects that are read as a text `key=value,...`."""
_OBJECTS = (
    *("accelerator_config", "fsdp_config", "lr_scheduler_kwargs"),
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
)
# Commas that no bracket or quote encloses, and are followed by `key=`.
_PART = re.compile(
    r"(\w[\w.-]*)=((?:\{.*?\}|\[.*?\]|'[^']*'|\"[^\"]*\"|[^,])*)(?:,(?=\s*\w[\w.-]*=)|$)"
)


def read(name: str, text: str) -> Any:
    """Return an object as a dict, a list in the form that its field reads, and others unchanged.

    Raises:
        HyperparameterError: The value must be an object, and is none.
    """
    if name in _LISTS and text.startswith(("[", "(")):
        listed = _literal(text)
        if isinstance(listed, (list, tuple)) and all(
            isinstance(one, (str, int, float)) for one in listed
        ):
            items = [str(item) for item in listed]
            if name in _JSON and any("," in item for item in items):
                return json.dumps(items)
            return _LISTS[name].join(items)
    if name in _PAIRS and text.startswith("{") and isinstance(pairs := _literal(text), dict):
        return ",".join(f"{key}={value}" for key, value in pairs.items())
    if name not in _OBJECTS:
        return text
    value = _literal(text) if text.startswith("{") else _pairs(text)
    if isinstance(value, dict):
        return value
    if name == "fsdp_config" and text.endswith(".json"):
        return text
    raise HyperparameterError(
        f"Hyperparameter {name} has value {text!r}, which is not an object.",
        'Give JSON, such as {"key": 1}, or key=1,other=2.',
    )


def _pairs(text: str) -> dict[str, Any] | None:
    """Return the object that `key=value,...` writes; None if it is something else."""
    pairs, end = {}, 0
    for match in _PART.finditer(text):
        if text[end : match.start()].strip():
            return None
        pairs[match[1]] = _literal(match[2].strip())
        end = match.end()
    return pairs if pairs and end == len(text) else None


def _literal(text: str) -> Any:
    """Return the value of JSON, or of a literal of Python; the text itself if it is neither."""
    for read_text in (json.loads, ast.literal_eval):
        try:
            return read_text(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
