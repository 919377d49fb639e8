"""An image of noise, and a tiny model that generates text from images."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.support.serving_kit import tokenizer

made: Any = transformers
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
SQUARE = {"height": 32, "width": 32}


def picture() -> tuple[Any, str]:
    """Return noise as an image and as base64."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, format="PNG")
    return Image.fromarray(noise), base64.b64encode(out.getvalue()).decode()


PICTURE, TEXT = picture()
"""One image for all tests."""


def save_llava(folder: Path) -> None:
    """Save a tiny model that generates text from images and text."""
    reader = tokenizer()
    reader.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = made.LlavaConfig(
        vision_config=made.CLIPVisionConfig(image_size=32, patch_size=8, **SIZES),
        text_config=made.LlamaConfig(
            vocab_size=len(reader), num_key_value_heads=2, max_position_embeddings=128,
            pad_token_id=0, bos_token_id=2, eos_token_id=3, initializer_range=0.3, **SIZES,
        ),
        image_token_id=reader.convert_tokens_to_ids("<image>"), image_seq_length=16,
    )  # fmt: skip
    made.LlavaForConditionalGeneration(config).save_pretrained(folder)
    made.LlavaProcessor(
        image_processor=made.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE),
        tokenizer=reader, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}",
    ).save_pretrained(folder)  # fmt: skip


def save_detector(folder: Path) -> None:
    config = made.YolosConfig(
        image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=3,
        initializer_range=0.3, **SIZES,
    )  # fmt: skip
    made.YolosForObjectDetection(config).save_pretrained(folder)
    made.YolosImageProcessorPil(size=SQUARE).save_pretrained(folder)


def save_clip(folder: Path) -> None:
    reader = tokenizer()
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = made.CLIPConfig(
        text_config={"vocab_size": len(reader), "max_position_embeddings": 48, **ids, **SIZES},
        vision_config={"image_size": 32, "patch_size": 8, **SIZES}, projection_dim=16,
    )  # fmt: skip
    made.CLIPModel(config).save_pretrained(folder)
    reader.save_pretrained(folder)
    made.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE).save_pretrained(folder)
