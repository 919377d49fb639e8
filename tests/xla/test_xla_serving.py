"""The image's handlers on torch-xla: a program for each bucket, compiled before the first request,
and the answers of the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving_kit import TEXTS, WORDS, Handlers, assert_close, save

pytestmark = [pytest.mark.xla, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
BUCKETS = "1x16,4x16,4x48"
MANY = [" ".join(WORDS[: 1 + number % 11]) for number in range(15)] + ["who " * 90]
CONTEXT = "anna said paris was good in the film again . " * 8
PAIR = {"text": "who said", "text_pair": "anna said paris was bad"}
OnCpu = Callable[..., Handlers]


@pytest.fixture
def cpu_handlers(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    """The same handlers in this process, as a host without torch-xla has them."""

    def load(folder: Path, **environ: str) -> Handlers:
        from recipe.backend import precision

        chosen = precision.device.choose({}, bf16=None, use_cpu=False, fp16=False)
        with monkeypatch.context() as patch:
            there = dataclasses.replace(chosen, kind="cpu")
            patch.setattr(precision.device, "choose", lambda *_, **__: there)
            return Handlers(folder, **environ)

    return load


def programs() -> int:
    from recipe.runtime import xla

    return xla.programs()


def held(
    folder: Path, bodies: list[Any], cpu_handlers: OnCpu, buckets: str = BUCKETS, **more: str
) -> None:
    """Every answer is the CPU's, and no request needs another program."""
    before = programs()
    served = Handlers(folder, AMPHORA_BUCKETS=buckets, **more)
    assert programs() == before + len(buckets.split(","))
    answers = [served.ask(body) for body in bodies]
    # Merged with other texts.
    answers += served.ask_all(bodies[:2])
    assert programs() == before + len(buckets.split(","))
    plain = cpu_handlers(folder, **more)
    for answer, body in zip(answers, [*bodies, *bodies[:2]], strict=True):
        assert_close(answer, plain.ask(body))


@pytest.mark.parametrize(
    ("kind", "bodies"),
    {
        "BertForSequenceClassification": [
            {"inputs": MANY, "parameters": {"top_k": None}}, {"inputs": PAIR}, "who",
        ],
        # It adds something for types that are all 0, as the tokenizer gives them.
        "GPT2ForSequenceClassification": [
            {"inputs": MANY, "parameters": {"top_k": None}}, {"inputs": PAIR}, "who",
        ],
        "BertForTokenClassification": [{"inputs": TEXTS}, {"inputs": TEXTS[1]}],
        "BertForQuestionAnswering": [
            {"inputs": {"question": "who said", "context": CONTEXT[:60]}},
            {"inputs": {"question": "who said", "context": CONTEXT}, "parameters": {"top_k": 2}},
        ],
        "BertModel": [{"inputs": MANY}, {"source_sentence": "who", "sentences": TEXTS}],
    }.items(),
)  # fmt: skip
def test_each_head_answers_as_on_the_cpu(
    kind: str, bodies: list[Any], tmp_path: Path, cpu_handlers: OnCpu
) -> None:
    held(save(kind, tmp_path / "model"), bodies, cpu_handlers)


def test_a_sentence_transformer_with_a_prompt_that_is_not_pooled(
    tmp_path: Path, cpu_handlers: OnCpu
) -> None:
    from sentence_transformers import SentenceTransformer, models

    encoder = models.Transformer(str(save("BertModel", tmp_path / "m")), max_seq_length=40)
    pooling = models.Pooling(32, "mean", include_prompt=False)
    modules = [encoder, pooling, models.Dense(32, 8), models.Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "the film was "}).save(
        str(tmp_path / "s")
    )
    bodies = [
        {"inputs": MANY, "parameters": {"prompt_name": "query"}},
        {"inputs": TEXTS, "parameters": {"truncate_dim": 4, "normalize": True}},
        {"source_sentence": "who", "sentences": TEXTS},
    ]
    held(tmp_path / "s", bodies, cpu_handlers, buckets="2x16,4x40")


def test_a_text_longer_than_every_bucket_is_refused(tmp_path: Path, cpu_handlers: OnCpu) -> None:
    served = Handlers(save("BertModel", tmp_path / "model"), AMPHORA_BUCKETS="1x8,2x16")
    ready = programs()
    with pytest.raises(ValueError, match=r"has 48 tokens.*for 16 at most \(AMPHORA_BUCKETS\)"):
        served.ask({"inputs": "who " * 60})
    short = {"inputs": ["who " * 60, "who"], "parameters": {"max_length": 16}}
    assert_close(served.ask(short), cpu_handlers(tmp_path / "model").ask(short))
    assert programs() == ready


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("T5ForConditionalGeneration", "shapes grow"),
        ("BertForMaskedLM", "scores of the whole vocabulary"),
        # Finds the end of a text by its padding, and knows none.
        ("GPT2ForSequenceClassification", "padding changes its answers"),
    ],
)
def test_what_has_no_fixed_shapes_is_refused(kind: str, why: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(Exception, match=f"cannot be served on xla: .*{why}.*USE_TORCH_XLA=0"):
        Handlers(folder)


def test_pictures_are_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(**sizes)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor().save_pretrained(tmp_path / "vit")
    with pytest.raises(Exception, match="on xla: transformers' pipeline for image-classif"):
        Handlers(tmp_path / "vit")


def test_a_model_that_looks_at_its_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.backend import programs

    # This attention goes on in another way where nothing is padded.
    monkeypatch.setitem(programs.ATTENTION, "attn_implementation", "sdpa")
    folder = save("BertForSequenceClassification", tmp_path / "model")
    with pytest.raises(Exception, match="depends on numbers on the device"):
        Handlers(folder, AMPHORA_BUCKETS=BUCKETS)


def test_a_device_that_answers_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.backend import programs

    def damaged(model: Any, kind: str, reading: Any) -> None:
        right(model, kind, reading)
        model.classifier.bias.data += 1

    right = programs.move
    monkeypatch.setattr(programs, "move", damaged)
    folder = save("BertForSequenceClassification", tmp_path / "model")
    with pytest.raises(Exception, match=r"its answers for 1x16 .* differ from the CPU's by 1"):
        Handlers(folder, AMPHORA_BUCKETS=BUCKETS)
