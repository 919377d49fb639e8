"""Feature extraction: one vector for each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModel

from recipe.inference import loaded_model as encoder
from recipe.inference.loaded_model import Encoder, Origin
from recipe.inference.payloads import Answers, Request


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """A saved encoder that answers texts with vectors."""

    encoder: Encoder
    warm_up: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, request: Request) -> list[int]:
        """Tokens of each text. Raises BadRequest where a parameter is none of this task's."""
        request.only({"normalize"}, "feature-extraction")
        return [len(ids) for ids in self.encoder.encode(request)]

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """For each request a vector for each text: the mean of its tokens' last hidden states, as
        sentence encoders are trained; with `normalize` of length 1."""
        rows = self.encoder.rows(requests, _mean)
        return [
            Answers(
                [_vector(each, request.parameters.get("normalize", False)) for each in vectors],
                request.truncated,
            )
            for request, vectors in zip(requests, rows, strict=True)
        ]


def _mean(output: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    states: torch.Tensor = output.last_hidden_state.float()
    weights = mask.unsqueeze(-1).float()
    return list((states * weights).sum(1) / weights.sum(1))


def _vector(values: torch.Tensor, normalize: bool) -> list[float]:
    scaled = values / values.norm() if normalize else values
    return [float(value) for value in scaled]


def load(origin: Origin) -> Embedder:
    """The encoder that `origin` names, without a head."""
    return Embedder(encoder=encoder.load(origin, AutoModel))
