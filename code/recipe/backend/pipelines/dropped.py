"""The pipelines of transformers 4 that version 5 dropped, though it has their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForImageToImage,
    AutoModelForVisualQuestionAnswering,
)

_library: Any = transformers
SUFFIX = " of transformers 4"
"""Ends the names by which they are registered: transformers refuses their own."""


class _ImagePipeline(_library.Pipeline):  # type: ignore[misc]
    """What they share: an image processor, and a tokenizer if there is text."""

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer: bool | None = True

    def _sanitize_parameters(
        self, top_k: int | None = None, generate_kwargs: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], ...]:
        return {}, generate_kwargs or {}, {} if top_k is None else {"top_k": top_k}

    def _pixels(self, image: Any) -> Any:
        return self.image_processor(images=image, return_tensors="pt").to(self.dtype)

    def _generated(self, inputs: Any, arguments: dict[str, Any]) -> Any:
        usual: Any = self.model.generation_config
        # 20 is the value of a model without this setting.
        if usual.max_new_tokens is None and usual.max_length in (None, 20):
            arguments = {"max_new_tokens": 256, **arguments}
        return self.model.generate(**inputs, **arguments)

    def _texts(self, outputs: torch.Tensor) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]


class ImageToText(_ImagePipeline):
    """A caption of an image: `[{"generated_text"}]`."""

    def preprocess(self, image: Any) -> Any:
        return self._pixels(image)

    def _forward(self, inputs: Any, **generate_kwargs: Any) -> Any:
        if self.model.config.model_type == "git":
            inputs["input_ids"] = None
        return self._generated(inputs, generate_kwargs)

    def postprocess(self, outputs: Any) -> Any:
        return [{"generated_text": text} for text in self._texts(outputs)]


class VisualQuestionAnswering(_ImagePipeline):
    """Answers to a question about an image, `[{"score", "answer"}]`; of a model that generates them
    `[{"answer"}]`."""

    def preprocess(self, inputs: Any) -> Any:
        question = self.tokenizer(inputs["question"], return_tensors="pt", truncation=True)
        return {**question, **self._pixels(inputs["image"])}

    def _forward(self, inputs: Any, **generate_kwargs: Any) -> Any:
        if self.model.can_generate():
            return self._generated(inputs, generate_kwargs)
        return self.model(**inputs).logits

    def postprocess(self, outputs: Any, top_k: int = 5) -> Any:
        if self.model.can_generate():
            return [{"answer": text.strip()} for text in self._texts(outputs)]
        scores, numbers = outputs[0].sigmoid().topk(min(top_k, outputs.shape[-1]))
        names = self.model.config.id2label
        pairs = zip(scores.tolist(), numbers.tolist(), strict=True)
        return [{"score": score, "answer": names[number]} for score, number in pairs]


class ImageToImage(_ImagePipeline):
    """An image that the model makes of an image, such as a larger one."""

    _load_tokenizer = False

    def preprocess(self, image: Any) -> Any:
        return self._pixels([image])

    def _forward(self, inputs: Any) -> Any:
        return self.model(**inputs).reconstruction

    def postprocess(self, outputs: Any) -> Any:
        from PIL import Image

        values = outputs[0].float().clamp(0, 1).mul(255).round().byte()
        return Image.fromarray(values.movedim(0, -1).squeeze(-1).numpy())


PIPELINES: Sequence[tuple[str, Any, Any]] = (
    ("image-to-text", ImageToText, AutoModelForImageTextToText),
    ("visual-question-answering", VisualQuestionAnswering, AutoModelForVisualQuestionAnswering),
    ("image-to-image", ImageToImage, AutoModelForImageToImage),
)
"""Their tasks, classes and the Auto classes of their models."""
