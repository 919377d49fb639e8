"""Tasks of pictures, on tiny random models: what transformers' pipelines
answer, by bodies of requests; and what is refused instead of ignored."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from amphora.serving.api.write import plain
from recipe.backend.requests.payloads import BadRequest
from tests.support import images
from tests.support.images import PICTURE, SIZES, SQUARE, TEXT, made
from tests.support.serving_kit import Handlers, assert_close


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("save", "task", "requested"), [
    # Bodies, and how the pipeline is called.
    pytest.param(images.save_detector, "object-detection", [
        ({"inputs": TEXT, "threshold": 0.0}, lambda pipeline: pipeline(PICTURE, threshold=0.0)),
        ({"inputs": [TEXT, TEXT]}, lambda pipeline: pipeline([PICTURE, PICTURE])),
    ], marks=pytest.mark.heavy),
    pytest.param(save_segmenter, "image-segmentation", [
        ({"inputs": TEXT}, lambda pipeline: pipeline(PICTURE)),
    ], marks=pytest.mark.heavy),
    (save_features, "image-feature-extraction", [({"inputs": TEXT}, lambda pipeline: pipeline(PICTURE))]),
    (images.save_clip, "zero-shot-image-classification", [
        ({"inputs": TEXT, "candidate_labels": ["film", "paris"]},
         lambda pipeline: pipeline(PICTURE, candidate_labels=["film", "paris"])),
        ({"inputs": TEXT, "candidate_labels": "film, paris", "hypothesis_template": None},
         lambda pipeline: pipeline(PICTURE, candidate_labels=["film", "paris"])),
        ({"inputs": TEXT, "candidate_labels": ["film", "who"], "hypothesis_template": "good {}"},
         lambda pipeline: pipeline(PICTURE, candidate_labels=["film", "who"], hypothesis_template="good {}")),
    ]),
])  # fmt: skip
def test_a_task_of_pictures_is_found_by_its_head_and_answers_as_its_pipeline(
    save: Callable[[Path], None], task: str, requested: list[Any], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    save(tmp_path)
    served = Handlers(tmp_path)
    assert served.model.task == task  # type: ignore[attr-defined]
    assert served.model.pipeline.model._forward_pre_hooks, "it takes turns"  # type: ignore[attr-defined]
    pipeline = made.pipeline(task, model=str(tmp_path), device="cpu")
    if "zero-shot" in task:
        for template in ("{:>99}", "a film"):
            with pytest.raises(BadRequest, match="hypothesis_template is"):
                served.ask(
                    {"inputs": TEXT, "candidate_labels": "a", "hypothesis_template": template}
                )
    for body, call in requested:
        assert_close(served.ask(body), plain(call(pipeline)), 1e-5, str(body)[-80:])


@pytest.mark.filterwarnings("ignore")
def test_pictures_are_bytes_or_base64_and_no_paths(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = made.ViTConfig(
        image_size=32, patch_size=8, num_labels=4, initializer_range=0.3, **SIZES
    )
    made.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    made.ViTImageProcessorPil(size=SQUARE).save_pretrained(tmp_path / "vit")
    served = Handlers(tmp_path / "vit")
    reference = made.pipeline("image-classification", model=str(tmp_path / "vit"), device="cpu")
    data = base64.b64decode(TEXT)
    broken = base64.encodebytes(data).decode()
    for_urls = base64.urlsafe_b64encode(data).decode().rstrip("=")
    one, two = plain(reference(PICTURE)), plain(reference(PICTURE, top_k=2))
    for body, wanted in [
        ((data, "image/png"), one), ((data, "application/x-image"), one), ({"inputs": TEXT}, one),
        ({"inputs": [TEXT, TEXT]}, [one, one]), ({"inputs": broken, "top_k": 2}, two),
        ({"inputs": f"data:image/png;base64,{TEXT}", "top_k": 2}, two),
        ({"inputs": for_urls, "parameters": {"top_k": 2}}, two),
    ]:  # fmt: skip
        assert_close(served.ask(body), wanted, 1e-5, str(body)[:60])
    assert_close(served.ask_all([{"inputs": TEXT}, (data, "image/png")]), [one, one], 1e-5)
    (tmp_path / "secret.png").write_bytes(data)
    for body, words in [
        ({"inputs": "http://169.254.169.254/latest"}, "not followed"),
        ({"inputs": str(tmp_path / "secret.png")}, "not followed"), ((b"", "image/png"), "empty"),
        ({"inputs": ["file:///etc/passwd"]}, "not followed"), ({"inputs": "secret.png"}, "base64"),
        ({"inputs": [{"type": "image", "url": "http://a/b.png"}]}, "not an image. Send the file's bytes"),
        ({"inputs": "AAAA"}, "cannot be read"),
        ((b"text", "image/png"), r"cannot be read: cannot identify image file$"),
        ({"image": TEXT}, "no 'inputs'.*the file in base64"),
        ({"inputs": TEXT, "topk": 2}, "'topk'.*top_k"), ({"inputs": TEXT, "top_k": "2"}, "top_k is"),
    ]:  # fmt: skip
        with pytest.raises(BadRequest, match=words):
            served.ask(body)
