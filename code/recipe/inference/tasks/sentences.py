"""Models that sentence-transformers has saved: its own modules compute their vectors (pooling,
dense layers, normalisation, prompts, the longest text)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipe.compat import in_precision
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.inference import loaded_model
from recipe.inference.loaded_model import BATCH
from recipe.inference.origin import Origin
from recipe.inference.payloads import BadRequest, Request
from recipe.tokenization.encoding import beginning


@dataclass(frozen=True)
class SentenceVectors:
    """A SentenceTransformer that many requests share."""

    model: Any
    parameters: frozenset[str] = frozenset(
        {"normalize", "prompt", "prompt_name", "truncate_dim", "truncation"}
    )
    columns: tuple[str, ...] = ()

    @classmethod
    def load(cls, origin: Origin, environ: Mapping[str, str] = os.environ) -> SentenceVectors:
        """The SentenceTransformer that `origin` names, in the precision that is fastest here.

        Raises:
            ModelError: It cannot be loaded, or does not make a vector of a text.
            ValueError: AMPHORA_DTYPE names a precision that it does not have.
        """
        from sentence_transformers import SentenceTransformer

        kind, name, dtype = loaded_model.precision(environ)
        if name == "int8":
            raise ValueError("AMPHORA_DTYPE is 'int8', which sentence-transformers has not here.")
        try:
            model = SentenceTransformer(
                origin.place, device=kind, model_kwargs=in_precision(dtype), **origin.options
            )
        except UNLOADABLE as error:
            raise ModelError(
                f"The sentence-transformers model {origin.place} cannot be loaded: "
                f"{why_unloadable(error)}",
                "It needs every file that its save_pretrained wrote.",
            ) from error
        # Dense layers are loaded apart, in float32.
        model = model.to(dtype).eval()
        loaded_model.refuse_broken(model, origin)
        if not hasattr(model.tokenizer, "vocab_files_names"):
            reader = type(model.tokenizer).__name__
            raise ModelError(
                f"The first module of {origin.place} reads texts by a {reader}.",
                "These handlers serve models that begin with a transformer: bring an inference.py.",
            )
        first = (origin.sentence_modules or [{}])[0].get("path", "")
        loaded_model.refuse_empty(model.tokenizer, str(Path(origin.place) / first))
        modules = ", ".join(type(module).__name__ for module in model)
        print(
            f"model: SentenceTransformer ({modules}) on {kind} in {name}, "
            f"{model.max_seq_length} tokens at most",
            flush=True,
        )
        return cls(model)

    def count(self, request: Request) -> list[int]:
        """Tokens of each text with its prompt; what is longer than the model reads is noted.

        Raises:
            BadRequest: The model does not have the `prompt_name`, a prompt is named twice, or a
                text is too long and is not to be cut.
        """
        if request.token_ids is None:
            name, prompts = request.parameters.get("prompt_name"), self.model.prompts
            if name is not None and "prompt" in request.parameters:
                raise BadRequest("prompt and prompt_name are both there. Give one.")
            if name is not None and name not in prompts:
                known = f"has {', '.join(sorted(prompts))}" if prompts else "has none"
                raise BadRequest(
                    f"The prompt_name {name!r} is not one of the model, which {known}."
                )
            default = prompts.get(name or self.model.default_prompt_name or "", "")
            prompt = str(request.parameters.get("prompt", default))
            tokenizer, limit = self.model.tokenizer, self.model.max_seq_length or 1 << 30
            texts = [beginning(tokenizer, prompt + text, limit) for text in request.texts]
            request.texts = [text[len(prompt) :] for text in texts]
            request.token_ids = tokenizer(texts, verbose=False)["input_ids"]
            lengths = [len(ids) for ids in request.token_ids]
            request.truncated = [place for place, n in enumerate(lengths) if n > limit]
            loaded_model.refuse_uncut(request, limit)
            request.token_ids = [ids[:limit] for ids in request.token_ids]
        return [len(ids) for ids in request.token_ids]

    def rows(self, requests: Sequence[Request]) -> list[list[torch.Tensor]]:
        """What `SentenceTransformer.encode` makes of each text: requests of equal parameters go
        through the model together."""
        alike: dict[str, list[Request]] = {}
        for request in requests:
            self.count(request)
            alike.setdefault(json.dumps(request.parameters, sort_keys=True), []).append(request)
        rows: dict[int, list[torch.Tensor]] = {}
        for group in alike.values():
            parameters = group[0].parameters
            encoded = self.model.encode(
                [text for request in group for text in request.texts],
                batch_size=BATCH,
                show_progress_bar=False,
                convert_to_tensor=True,
                normalize_embeddings=parameters.get("normalize", False),
                prompt=parameters.get("prompt"),
                prompt_name=parameters.get("prompt_name"),
                truncate_dim=parameters.get("truncate_dim"),
            )
            vectors = iter(encoded.float().cpu())
            rows |= {id(request): [next(vectors) for _ in request.texts] for request in group}
        return [rows[id(request)] for request in requests]
