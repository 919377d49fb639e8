"""What tells that a job's texts are for masked language modelling."""

from __future__ import annotations

from recipe.data import classification
from recipe.data.column_names import TEXT_NAMES
from recipe.data.evidence import Evidence, Recognised

_FILLERS = ("ForMaskedLM", "ForPreTraining")
"""Ends of the names of classes with a head for masked tokens."""


def recognise(evidence: Evidence) -> Recognised | None:
    """Whether the first rows hold texts without labels, for an encoder with its head."""
    text = evidence.named(TEXT_NAMES)
    fills = any(name.endswith(_FILLERS) for name in evidence.architectures)
    if text is None or not fills or classification.recognise(evidence) is not None:
        return None
    return Recognised(reason=f"column {text} holds texts without labels, for an encoder")
