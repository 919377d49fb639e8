"""What a request may cost: refused with the figure and the bound, before memory is taken."""

import io
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import BertTokenizerFast

from amphora.serving.api import toolkit
from amphora.serving.protocol.media_types import Fault
from recipe.backend import bounds, images
from recipe.backend.bounds import TooCostly
from tests.support.serving_kit import Handlers, save

ENTAILMENT = {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}}
NLI: tuple[str, dict[str, Any], str] = (
    "BertForSequenceClassification", ENTAILMENT, "zero-shot-classification"
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "labels": ("BertForSequenceClassification", {}, ""),
    "zero-shot": NLI,
    "tags": ("BertForTokenClassification", {}, ""),
    "answers": ("BertForQuestionAnswering", {}, ""),
    "masks": ("BertForMaskedLM", {}, ""),
    "vectors": ("BertModel", {}, "sentence-similarity"),
    "token vectors": ("BertModel", {"hidden_size": 128}, "feature-extraction"),
    "t5": ("T5ForConditionalGeneration", {}, ""),
    "texts": ("LlamaForCausalLM", {}, ""),
}
WORD = "film "
LONG = "a" * 600_000
QUESTION = {"question": "who", "context": "anna said " * 4000}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Any]:
    """ask(model, body): the answer of one of MODELS."""
    loaded: dict[str, Handlers] = {}

    def _ask(name: str, body: Any) -> Any:
        if name not in loaded:
            kind, config, task = MODELS[name]
            folder = save(kind, tmp_path_factory.mktemp("model"), **config)
            loaded[name] = Handlers(folder, **({"HF_TASK": task} if task else {}))
        return loaded[name].ask(body)

    return _ask


def parameter_body(inputs: Any, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters}


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        ("labels", {"inputs": {"text": LONG, "text_pair": "b"}}, ["600,001 bytes", "500,000"]),
        ("labels", {"query": "a", "texts": ["a"]}, ["2 labels"]),
        ("zero-shot", parameter_body(["a"] * 1000, candidate_labels=["a"] * 1000),
         ["1,000,000 texts, pairs", "1,000 inputs x 1,000 labels", "AMPHORA_MAX_ROWS"]),
        ("zero-shot", parameter_body("a", candidate_labels=["ab"], hypothesis_template="{0}" * 200_000),
         ["1,000,000 bytes", "AMPHORA_MAX_TEXT_BYTES"]),
        ("tags", parameter_body("a " * 180_000, stride=45, aggregation_strategy="simple"),
         ["179,955 texts, pairs and windows", "AMPHORA_MAX_ROWS", "45 of them shared"]),
        ("tags", parameter_body(LONG, stride=1, aggregation_strategy="simple"), ["600,000 bytes"]),
        ("answers", parameter_body({**QUESTION, "context": "a " * 180_000}, doc_stride=43),
         ["AMPHORA_MAX_ROWS", "43 of them shared"]),
        ("answers", parameter_body(QUESTION, top_k=2 * 10**6), ["AMPHORA_MAX_ANSWER_VALUES"]),
        ("answers", {"inputs": {**QUESTION, "context": LONG}}, ["AMPHORA_MAX_TEXT_BYTES"]),
        ("masks", parameter_body(["[MASK] " * 40] * 400, top_k=30_522), ["AMPHORA_MAX_ANSWER_VALUES"]),
        ("vectors", {"inputs": ["a"] * 131_073}, ["AMPHORA_MAX_ANSWER_VALUES", "vectors of 32"]),
        ("token vectors", {"inputs": [WORD * 46] * 700},
         ["4,300,800 numbers", "4,194,304", "33,600 tokens"]),
        ("t5", parameter_body(["a"] * 500, num_beams=32, max_new_tokens=400),
         ["6,400,000 tokens", "500 texts x 32", "AMPHORA_MAX_TOKENS_WRITTEN"]),
        ("t5", parameter_body("a", prefix=LONG), ["AMPHORA_MAX_TEXT_BYTES"]),
        ("texts", parameter_body(["a"] * 500, num_return_sequences=32, max_new_tokens=40, do_sample=True),
         ["640,000 tokens", "500 prompts x 32", "AMPHORA_MAX_TOKENS_WRITTEN"]),
        ("texts", parameter_body("a", stop=["x"] * 600_000), ["stop has 600000 texts", "64"]),
    ],
)  # fmt: skip
def test_what_costs_too_much_is_refused_with_the_figure_and_the_bound(
    ask: Callable[[str, Any], Any], model: str, body: Any, words: list[str]
) -> None:
    ask("labels", {"inputs": "a"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=words[0]) as refusal:
        ask(model, body)
    assert all(word in str(refusal.value) for word in words), refusal.value
    status = getattr(refusal.value, "status_code", None)
    assert status == (413 if "AMPHORA_" in str(refusal.value) else 400)
    # In KiB. What is refused has not been allocated.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("labels", {"inputs": "film " * 800_000}),
        ("labels", {"inputs": {"text": WORD * 500, "text_pair": WORD * 700}}),
        ("zero-shot", parameter_body(WORD * 5000, candidate_labels=["good"] * 100)),
        ("tags", parameter_body(WORD * 2000, stride=8, aggregation_strategy="simple")),
        ("answers", parameter_body(QUESTION, doc_stride=16, top_k=20)),
        ("masks", parameter_body("the [MASK] was [MASK]", top_k=60)),
    ],
)
def test_long_texts_that_the_beginning_decides_are_answered(
    ask: Callable[[str, Any], Any], model: str, body: Any
) -> None:
    assert ask(model, body)


def test_a_run_of_megabytes_is_refused_before_it_becomes_tokens(
    ask: Callable[[str, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    usual = BertTokenizerFast.__call__

    def seen(self: Any, text: Any, *rest: Any, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, *(map(len, [text] if isinstance(text, str) else text)))
        return usual(self, text, *rest, **options)

    monkeypatch.setattr(BertTokenizerFast, "__call__", seen)
    for model in ("labels", "vectors", "token vectors", "tags", "t5", "texts"):
        with pytest.raises(ValueError, match="AMPHORA_MAX_TEXT_BYTES"):
            ask(model, {"inputs": " " * 2_000_000 + "a"})
    assert longest <= 500_000


@pytest.fixture
def limit() -> Iterator[Callable[[dict[str, str]], None]]:
    """Sets bounds by their variables, for one test."""
    yield bounds.read
    bounds.read({})


def test_a_variable_sets_a_bound_and_wrong_ones_are_all_named(
    tmp_path: Path, limit: Callable[[dict[str, str]], None]
) -> None:
    handlers = Handlers(save("BertForSequenceClassification", tmp_path))
    limit({"AMPHORA_MAX_ROWS": "2"})
    assert len(handlers.ask({"inputs": ["a", "b"]})) == 2
    with pytest.raises(TooCostly, match=r"asks for 3 texts.*2 are allowed"):
        handlers.ask({"inputs": ["a", "b", "c"]})
    limit({})
    assert len(handlers.ask({"inputs": ["a", "b", "c"]})) == 3
    with pytest.raises(ValueError, match=r"MAX_ROWS is '0'.*MAX_PIXELS is 'many'"):
        bounds.read({"AMPHORA_MAX_ROWS": "0", "AMPHORA_MAX_PIXELS": "many"})


def test_pixels_are_bounded_for_all_images_of_a_request_and_in_users_code(
    limit: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def png(width: int, height: int) -> bytes:
        out = io.BytesIO()
        Image.new("1", (width, height)).save(out, format="PNG")
        return out.getvalue()

    limit({"AMPHORA_MAX_PIXELS": "7000"})
    large, half = png(120, 60), png(60, 60)
    monkeypatch.setenv("AMPHORA_MAX_PIXELS", "7000")
    with pytest.raises(Fault, match=r"120 x 60 pixels.*AMPHORA_MAX_PIXELS"):
        toolkit.decode(large, "image/png")
    with pytest.raises(TooCostly, match="7,200 pixels"):
        images.read(large, images.Pixels())
    with pytest.raises(TooCostly, match="7,200 pixels"):
        pixels = images.Pixels()
        for _ in range(2):
            images.read(half, pixels)
    assert toolkit.decode(png(4, 3), "image/png")["inputs"].size == (4, 3)
