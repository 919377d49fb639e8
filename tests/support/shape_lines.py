"""Configurations of models by what they are, and the lines that a refusal proposes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from recipe.errors import RecipeError
from recipe.hyperparameters import Hyperparameters

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "encoder": {"architectures": ["BertModel"]},
    "masked": {"architectures": ["BertForMaskedLM"]},
    "classifier": {"architectures": ["BertForSequenceClassification"]},
    "decoder": {"architectures": ["LlamaForCausalLM"]},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
    "vit": {"architectures": ["ViTForImageClassification"]},
}
_NAMES = [field.name for field in dataclasses.fields(Hyperparameters)]
_PAIR = rf"(?:{'|'.join(_NAMES)})=(?:'[^']*'|\"[^\"]*\"|[^\s;'\"]+)"
_LINE = re.compile(rf"(?<![\w:]){_PAIR}(?: {_PAIR})*")


def proposed_lines(refusal: RecipeError) -> list[dict[str, str]]:
    """Return the lines of hyperparameters that a message proposes."""
    proposed: list[dict[str, str]] = []
    for match in _LINE.finditer(str(refusal)):
        line = {}
        for pair in re.findall(_PAIR, match[0]):
            name, _, value = pair.partition("=")
            if value[0] in "'\"":
                value = value[1:-1]
            elif not value.endswith("..."):
                value = value.rstrip(".,;:)")
            line[name] = value
        if line not in proposed and not any("..." in value for value in line.values()):
            proposed.append(line)
    return proposed
