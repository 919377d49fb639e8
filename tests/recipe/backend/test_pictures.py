"""Tasks of pictures beside image-classification, on tiny random models: what transformers' pipelines
answer, by bodies of requests; and what is refused instead of ignored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.backend.requests.payloads import BadRequest
from recipe.backend.requests.serialization import plain
from tests.support.images import PICTURE, SIZES, SQUARE, TEXT, made, save_llava
from tests.support.serving_kit import Handlers, assert_close, tokenizer


def save_detector(folder: Path) -> None:
    config = made.YolosConfig(
        image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=3,
        initializer_range=0.3, **SIZES,
    )  # fmt: skip
    made.YolosForObjectDetection(config).save_pretrained(folder)
    made.YolosImageProcessorPil(size=SQUARE).save_pretrained(folder)


def save_segmenter(folder: Path) -> None:
    config = made.SegformerConfig(
        num_labels=3, hidden_sizes=[8] * 4, depths=[1] * 4, decoder_hidden_size=16,
        num_attention_heads=[1] * 4,
    )  # fmt: skip
    made.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    made.SegformerImageProcessorPil(size=SQUARE).save_pretrained(folder)


def save_features(folder: Path) -> None:
    config = made.ViTConfig(image_size=32, patch_size=8, initializer_range=0.3, **SIZES)
    made.ViTModel(config).save_pretrained(folder)
    made.ViTImageProcessorPil(size=SQUARE).save_pretrained(folder)


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


LABELS = ["film", "paris"]
Call = Callable[[Any], Any]
CASES: dict[str, tuple[Callable[[Path], None], str, list[tuple[Any, Call]]]] = {
    "detector": (save_detector, "object-detection", [
        ({"inputs": TEXT, "threshold": 0.0}, lambda pipeline: pipeline(PICTURE, threshold=0.0)),
        ({"image": TEXT}, lambda pipeline: pipeline(PICTURE)),
    ]),
    "segmenter": (save_segmenter, "image-segmentation", [
        ({"inputs": TEXT}, lambda pipeline: pipeline(PICTURE)),
    ]),
    "features": (save_features, "image-feature-extraction", [
        ({"inputs": TEXT}, lambda pipeline: pipeline(PICTURE)),
    ]),
    "clip": (save_clip, "zero-shot-image-classification", [
        ({"inputs": TEXT, "candidate_labels": LABELS},
         lambda pipeline: pipeline(PICTURE, candidate_labels=LABELS)),
        ({"image": TEXT, "candidate_labels": LABELS, "hypothesis_template": "good {}"},
         lambda pipeline: pipeline(PICTURE, candidate_labels=LABELS, hypothesis_template="good {}")),
    ]),
    "llava": (save_llava, "image-text-to-text", [
        ({"images": TEXT, "text": "<image> who was", "max_new_tokens": 4},
         lambda pipeline: pipeline(images=PICTURE, text="<image> who was", max_new_tokens=4)),
        ({"inputs": {"images": TEXT, "text": "<image> who was"},
          "parameters": {"generate_kwargs": {"max_new_tokens": 3}, "return_full_text": False}},
         lambda pipeline: pipeline(images=PICTURE, text="<image> who was", return_full_text=False,
                                   generate_kwargs={"max_new_tokens": 3})),
    ]),
}  # fmt: skip
CHEAP = ("features", "clip", "llava")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in CHEAP else pytest.mark.heavy) for name in CASES],
)
def test_a_task_of_pictures_is_found_by_its_head_and_answers_as_its_pipeline(
    case: str, tmp_path: Path
) -> None:
    save, task, requested = CASES[case]
    torch.manual_seed(5)
    save(tmp_path)
    served = Handlers(tmp_path)
    assert served.model.task == task  # type: ignore[attr-defined]
    pipeline = made.pipeline(task, model=str(tmp_path), device="cpu")
    for body, call in requested:
        assert_close(served.ask(body), plain(call(pipeline)), 1e-5, str(body)[-80:])
    for wrong, words in [
        ({"inputs": {"image": TEXT, "treshold": 0.5}}, "unknown parts 'treshold'"),
        ({"image": TEXT, "treshold": 0.5}, "has no parameter 'treshold'"),
    ]:
        with pytest.raises(BadRequest, match=words):
            served.ask(wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_message_with_a_picture_is_answered(tmp_path: Path) -> None:
    torch.manual_seed(5)
    save_llava(tmp_path)
    served = Handlers(tmp_path)
    content = [{"type": "image", "image": TEXT}, {"type": "text", "text": "who was good"}]
    parameters = {"max_new_tokens": 4, "return_full_text": False}
    body = {"inputs": [{"role": "user", "content": content}], "parameters": parameters}
    pipeline = made.pipeline("image-text-to-text", model=str(tmp_path), device="cpu")
    message = {"role": "user", "content": [{"type": "image", "image": PICTURE}, content[1]]}
    (expected,) = pipeline(text=[message], **parameters)
    (answer,) = served.ask(body)
    assert answer["generated_text"] == expected["generated_text"] != ""


@pytest.mark.filterwarnings("ignore")
def test_a_library_that_a_task_needs_is_named(tmp_path: Path) -> None:
    from recipe.errors import ModelError

    config = made.VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=2, tubelet_size=1, num_labels=3, **SIZES
    )
    made.VideoMAEForVideoClassification(config).save_pretrained(tmp_path)
    made.VideoMAEImageProcessorPil(size={"shortest_edge": 32}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"PyAv library.*code/requirements\.txt"):
        Handlers(tmp_path)
