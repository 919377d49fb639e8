"""task=image-classification: which pictures are read and how, what is drawn, and what is refused."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from recipe.data.classification import Splits
from recipe.data.files.image_files import read_image
from recipe.data.labels import Labels
from recipe.errors import DataError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.models.sources.origin import Origin
from recipe.tasks.image_classification import batches as pixels
from recipe.tasks.image_classification import data as pictures
from recipe.tasks.image_classification import task as image_classification
from recipe.tasks.image_classification.batches import FixedPictures
from recipe.tasks.image_classification.batches import PictureSamples as Samples
from tests.support import jobs, tasks
from tests.support.jobs import Job
from tests.support.serving_kit import Handlers


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def image_bytes(value: int) -> bytes:
    """A picture whose upper half is of a shade, and whose lower half is black."""
    drawn = np.zeros((8, 12, 3), dtype=np.uint8)
    drawn[:4] = value
    return encoded(Image.fromarray(drawn))


def write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image_bytes(value))


def load(channels: dict[str, Path], **options: Any) -> Splits:
    return pictures.load(channels, Hyperparameters(task="image-classification", **options))


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(count):
                write(tmp_path / split / name / f"valid_{number}.JPG", 90)
    for name in ("notes.txt.md", "._valid_0.JPG"):
        (tmp_path / "train" / "cat" / name).write_text("x")
    whole = load({"data": tmp_path})
    assert (len(whole.train), len(whole.evaluation)) == (8, 4)
    assert whole.labels.names == ("cat", "dog")
    assert whole.train[0]["place"] == str(tmp_path / "train" / "cat" / "valid_0.JPG")
    channels = {"train": tmp_path / "train", "validation": tmp_path / "test"}
    assert len(load(channels).evaluation) == 4
    alone = load({"train": tmp_path / "train"})
    assert sorted(alone.evaluation["label"]) in ([0], [1])
    assert "2 labels: cat (" in alone.notes[-1]
    write(tmp_path / "test" / "cow" / "1.png", 3)
    with pytest.raises(DataError, match=r"/cow/1.png has the label 'cow', which is in the test"):
        load({"data": tmp_path})
    write(tmp_path / "train" / "stray.png", 3)
    with pytest.raises(DataError, match=r"stray\.png is not in a folder of a class"):
        load({"train": tmp_path / "train"})


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_names_files(tmp_path: Path, kind: str) -> None:
    rows = [{"file_name": f"p/{n}.png", "label": "ab"[n % 2]} for n in range(6)]
    for row in rows:
        write(tmp_path / str(row["file_name"]), 9)
    write(tmp_path / "p" / "spare.png", 9)
    text = "\n".join(map(json.dumps, rows))
    if kind == "csv":
        text = "\n".join(["file_name,label", *(f"{r['file_name']},{r['label']}" for r in rows)])
    (tmp_path / f"metadata.{kind}").write_text(text)
    loaded = load({"train": tmp_path})
    assert len(loaded.train) + len(loaded.evaluation) == 6
    assert any("of the 7 images in channel train, those" in line for line in loaded.notes)
    (tmp_path / "p" / "3.png").unlink()
    with pytest.raises(DataError, match=r"names the image 'p/3.png' in column 'file_name'"):
        load({"train": tmp_path})


def test_folders_that_are_called_after_splits_are_no_classes(tmp_path: Path) -> None:
    for number in range(4):  # dogs and cats as Kaggle packs them
        write(tmp_path / "train" / f"{('cat', 'dog')[number % 2]}.{number}.png", number)
        write(tmp_path / "test1" / f"{number}.png", number)
    with pytest.raises(DataError, match=r"named after splits \(test1, train\)"):
        load({"train": tmp_path})


def test_folders_of_one_name_are_one_class_if_the_folders_beside_are_equal(tmp_path: Path) -> None:
    for name in ("a/healthy", "a/blight", "b/healthy", "b/blight"):
        for number in range(4):
            write(tmp_path / name / f"{number}.png", number)
    assert load({"train": tmp_path}).labels.names == ("blight", "healthy")
    shutil.move(tmp_path / "b" / "blight", tmp_path / "b" / "rust")
    with pytest.raises(DataError, match=r"a/healthy and .*b/healthy have .* mv \S+") as refusal:
        load({"train": tmp_path})
    shutil.move(*str(refusal.value).split()[-2:])
    assert load({"train": tmp_path}).labels.names == ("b_healthy", "blight", "healthy", "rust")


@pytest.mark.parametrize("kind", ["parquet", "disk", "bytes"])
def test_a_column_holds_pictures(tmp_path: Path, kind: str) -> None:
    labels = datasets.ClassLabel(names=["wolf", "cat", "unseen"])
    columns: dict[str, Any] = {
        "image": [{"bytes": image_bytes(n), "path": f"{n}.png"} for n in range(6)],
        "label": [n % 2 for n in range(6)],
    }
    kinds: dict[str, Any] = {"image": datasets.Image(decode=False), "label": labels}
    if kind == "bytes":
        columns["image"] = [image["bytes"] for image in columns["image"]]
        kinds["image"] = datasets.Value("binary")
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    if kind == "disk":
        rows.save_to_disk(str(tmp_path))
    else:
        rows.to_parquet(str(tmp_path / "train.parquet"))
    loaded = load({"train": tmp_path})
    assert loaded.labels.names == ("wolf", "cat", "unseen")
    shades = [np.asarray(read_image(image["bytes"])).max() for image in loaded.train]
    assert [n % 2 for n in shades] == loaded.train["label"][:]
    assert "row" in loaded.train[0]["place"]


SQUARE, EDGE = {"height": 32, "width": 32}, {"shortest_edge": 32}
CROPPED = {"size": EDGE, "crop_size": SQUARE}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {"size": SQUARE}),
    "deit": ("DeiTImageProcessor", {"size": {"height": 40, "width": 40}, "crop_size": SQUARE}),
    "beit": ("BeitImageProcessor", {"size": SQUARE}),
    "convnext": ("ConvNextImageProcessor", {"size": EDGE}),
    "clip": ("CLIPImageProcessor", CROPPED),
    "dinov2": ("BitImageProcessor", CROPPED),
    "siglip": ("SiglipImageProcessor", {"size": SQUARE}),
    "levit": ("LevitImageProcessor", CROPPED),
    "poolformer": ("PoolFormerImageProcessor", CROPPED),
    "perceiver": ("PerceiverImageProcessor", {"size": SQUARE, "crop_size": SQUARE}),
    "mobilenet": ("MobileNetV2ImageProcessor", CROPPED),
    "mobilevit": ("MobileViTImageProcessor", CROPPED),
    "efficientnet": ("EfficientNetImageProcessor", {"size": SQUARE}),
    "efficientnet-b0": ("EfficientNetImageProcessor", {
        "size": SQUARE, "include_top": False, "rescale_offset": True, "rescale_factor": 1 / 127.5}),
    "raw": ("ViTImageProcessor", {"size": SQUARE, "do_rescale": False, "do_normalize": False}),
}  # fmt: skip


def processor_of(kind: str) -> Any:
    name, settings = PROCESSORS[kind]
    actual = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return actual(**settings)


def test_pictures_of_every_kind_are_read_in_rgb_and_upright() -> None:
    random = np.random.default_rng(0)
    colours = Image.fromarray(random.integers(0, 255, (20, 28, 3), dtype=np.uint8))
    grey, cmyk, palette = (colours.convert(mode) for mode in ("L", "CMYK", "P"))
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[274] = 6  # turned by a quarter
    turned = colours.transpose(Image.Transpose.ROTATE_270)
    files = {
        "grey": (encoded(grey), grey),
        "two colours": (encoded(grey.convert("1")), grey.convert("1")),
        "a palette": (encoded(palette, "GIF"), palette),
        "transparent": (encoded(colours.convert("RGBA")), colours),
        "print": (encoded(cmyk, "TIFF"), cmyk),
        "16 bits": (encoded(deep), grey),
        "turned": (encoded(colours, exif=exif), turned),
    }
    for name, (data, shown) in files.items():
        read = read_image(data)
        assert read.mode == "RGB", name
        assert np.array_equal(np.asarray(read), np.asarray(shown.convert("RGB"))), name


def samples_of(
    kind: str, count: int = 5, augmentation: str = "none", name: str = "train"
) -> tuple[Samples, FixedPictures, list[Image.Image]]:
    random = np.random.default_rng(1)
    drawn = [
        Image.fromarray(random.integers(0, 255, (20 + 9 * n, 50 - 7 * n, 3), dtype=np.uint8))
        for n in range(count)
    ]
    files = [encoded(image) for image in drawn]
    split = datasets.Dataset.from_dict(
        {"place": [str(n) for n in range(count)], "bytes": files, "file": [None] * count,
         "label": [n % 2 for n in range(count)]}
    )  # fmt: skip
    processor = processor_of(kind)
    objective = image_classification._ImageLabels()
    objective.processor = processor
    kinds = image_classification.AUGMENTATIONS[augmentation]
    samples = pixels.read(name, split, processor, kinds)
    model: Any = torch.nn.Module()
    model.config = transformers.ConvNextConfig()
    layout: Any = objective.layout(model, False, 4, 0, [])
    return samples, layout, drawn


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_batch_is_what_the_models_processor_makes(kind: str) -> None:
    samples, layout, drawn = samples_of(kind)
    batch = layout.tensors(samples, np.asarray([3, 0, 4]))
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    made = (processor_of(kind)(drawn[row], return_tensors="pt") for row in (3, 0, 4))
    wanted = torch.cat([one["pixel_values"] for one in made]).float()
    torch.testing.assert_close(batch["pixel_values"][:3], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("Siglip2ImageProcessor", {}, r"Siglip2.* of the shape \[1, 256, 768\] .* SigLIP for"),
    ("ImageGPTImageProcessor", {"clusters": [[0.0, 0, 0]]}, "no pixel_values .*'pixel_values'"),
    ("CLIPImageProcessor", {**CROPPED, "do_pad": True, "pad_size": {"height": 48, "width": 48}},
     "not a scale and an offset of 8 bit pixels.* do_pad to false"),
    ("ViTImageProcessor", {"do_resize": False}, "all images the same size"),
])  # fmt: skip
def test_processors_of_other_values_are_refused(
    name: str, settings: dict[str, Any], words: str
) -> None:
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    with pytest.raises(ModelError, match=words):
        pixels.Preprocessing.measure(kind(**settings)).pixels(Image.new("RGB", (40, 30), "red"))


@pytest.mark.parametrize("argv", [[], ["--lora_r", "2"]])
def test_batch_normalization_counts_the_images_of_a_step_alone_or_nothing_under_adapters(
    tmp_path: Path, argv: list[str]
) -> None:
    config = transformers.MobileViTConfig(
        image_size=32, hidden_sizes=[8] * 3, neck_hidden_sizes=[8] * 7, num_attention_heads=2
    )
    model = transformers.MobileViTForImageClassification(config)
    model.save_pretrained(tmp_path / "start")
    processor_of("vit").save_pretrained(tmp_path / "start")
    for number in range(3):
        write(tmp_path / "train" / ("cat", "dog")[number % 2] / f"{number}.png", 80 * number)
    argv += ["--batch_size=8", "--epochs=1", "--eval_strategy=no", "--augmentation=none"]
    jobs.run(tmp_path / "job", tmp_path / "start", {"train": tmp_path / "train"}, *argv)
    if "--lora_r" not in argv:
        files = (read_image(path.read_bytes()) for path in sorted(tmp_path.glob("train/*/*")))
        model(**processor_of("vit")([*files], return_tensors="pt"))
        argv[0] = (
            "--batch_size=2"  # The last step has one image, and its last layers one pixel of each.
        )
        jobs.run(tmp_path / "odd", tmp_path / "start", {"train": tmp_path / "train"}, *argv)
    trained = load_file(tmp_path / "job" / "model" / "model.safetensors")
    for name, value in model.named_buffers():
        torch.testing.assert_close(trained[name], value, msg=name)


def test_what_is_drawn_depends_on_seed_epoch_and_row_alone() -> None:
    samples, layout, _ = samples_of("vit", augmentation="flip")
    plain, _, _ = samples_of("vit")
    rows = np.arange(3)

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        made: torch.Tensor = layout.tensors(samples.draw_epoch(seed, epoch), rows)["pixel_values"]
        return made

    assert torch.equal(drawn(1, 2), drawn(1, 2))
    assert not torch.equal(drawn(1, 2), drawn(1, 3)) and not torch.equal(drawn(1, 2), drawn(2, 2))
    other = layout.tensors(samples.draw_epoch(1, 2), np.asarray([2, 1]))["pixel_values"]
    assert torch.equal(other[1], drawn(1, 2)[1])
    # What is evaluated is never drawn, nor what no augmentation was asked for.
    as_it_is = layout.tensors(plain, rows)["pixel_values"]
    assert torch.equal(layout.tensors(samples, rows)["pixel_values"], as_it_is)
    assert torch.equal(layout.tensors(plain.draw_epoch(1, 2), rows)["pixel_values"], as_it_is)
    # A crop of a picture is like it, and mirrored about half of the time.
    top = [samples.draw_epoch(0, epoch).picture(1) for epoch in range(40)]
    assert all(image.shape == (3, 32, 32) for image in top)
    assert len({image.tobytes() for image in top}) == 40


def test_broken_pictures_are_named_all_at_once(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(3):
            write(tmp_path / name / f"{number}.png", 80)
    whole = (tmp_path / "cat" / "1.png").read_bytes()
    (tmp_path / "cat" / "1.png").write_bytes(whole[:-40])
    (tmp_path / "dog" / "0.png").write_text("no picture")
    loaded = load({"train": tmp_path}, passed={"eval_strategy": "no"})
    with pytest.raises(DataError) as caught:
        pixels.read("train", loaded.train, processor_of("vit"), frozenset())
    for words in ("2 problems", "cat/1.png: An image", "dog/0.png: An image"):
        assert words in str(caught.value)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16, "image_size": 24, "patch_size": 8}  # fmt: skip
    for channels, words in ((1, "reads images of 1 channels"), (3, "24 x 24 pixels")):
        config = transformers.ViTConfig(**small, num_channels=channels)
        folder = tmp_path / str(channels)
        transformers.ViTForImageClassification(config).save_pretrained(folder)
        processor_of("vit").save_pretrained(folder)
        source = Origin(str(folder))
        labels = Labels(("a", "b", "c"))
        with pytest.raises(ModelError, match=words):
            model, _ = image_classification.load_model(source, labels, Hyperparameters())
            assert model.config.num_labels == 3
            image_classification.check_size(model, 32, 32)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_alone_is_served_as_in_plain_peft(tmp_path: Path) -> None:
    import peft
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    channel, argv = tasks.make("image-classification, LoRA", tmp_path)
    more = ("--lora_save", "adapter", "--use_dora", "True", "--max_steps", "2", "--lr", "0.05",
            "--eval_strategy", "no", "--bf16", "False", "--use_cpu", "True")  # fmt: skip
    job = Job(tmp_path / "job", {"train": channel}, (*argv, *more))
    job.run_here()
    assert (job.model / "proof.json").is_file()
    base = AutoModelForImageClassification.from_pretrained(tmp_path / "start")
    plain = peft.PeftModel.from_pretrained(base, job.model).eval()
    path = next(channel.rglob("*.png"))
    pixels = AutoImageProcessor.from_pretrained(job.model)(Image.open(path), return_tensors="pt")
    with torch.inference_mode():
        scores = plain(**pixels).logits.softmax(-1)[0].tolist()
    served = Handlers(job.model).ask((path.read_bytes(), "image/png"))
    assert sorted(row["score"] for row in served) == pytest.approx(sorted(scores), abs=1e-5)
