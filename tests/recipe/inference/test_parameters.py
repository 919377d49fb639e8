"""Each parameter of a task changes its answer, or is refused; a table of them, and what vectors'
parameters do under two poolings."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from amphora.serving.api import tgi
from recipe.backend.generation import options
from recipe.backend.requests.payloads import BadRequest
from recipe.tasks.masked_lm import serve as fill_mask
from recipe.tasks.question_answering import serve as question_answering
from recipe.tasks.text_classification import serve as classifier
from recipe.tasks.text_to_text import serve as text_to_text
from recipe.tasks.token_classification import serve as tagger
from recipe.tasks.zero_shot import serve as zero_shot
from tests.support.serving_kit import TEXTS, Handlers, assert_close, request, save, tokenizer

LONG = " ".join([*["anna"] * 30, *["film"] * 30])
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}


# A task: its model, parameters and request; for each parameter a value that changes the answer, maybe with
# the parameters beside it in both requests; parameters of every request; a token that ends a text, too
# (these models write none of their own); parameters that change no answer: what is padded is masked.
Task = functools.partial(
    SimpleNamespace, usual={}, environ={}, config={}, seed=9, ends="", without_effect=set()
)
_SAMPLED = {"do_sample": True, "seed": 3, "num_beams": 1}
_READ = {"max_length": 6, "truncation_direction": "left"}


@pytest.mark.parametrize("task", [
    pytest.param(Task(
        kind="BertForSequenceClassification",
        known=classifier.PARAMETERS,
        inputs=[LONG],
        config={"id2label": {0: "a", 1: "b", 2: "c"}},
        changes={
            "top_k": 2, "function_to_apply": "none", "return_all_scores": True, "threshold": 0.01,
            "truncation": False, **_READ,
        },
        without_effect={"padding", "return_text"},
    ), id="text-classification"),
    pytest.param(Task(
        kind="BertForTokenClassification",
        known=tagger.PARAMETERS,
        inputs=[" ".join(TEXTS * 6)],
        seed=1,
        config={"id2label": {0: "O", 1: "B-A", 2: "I-A"}},
        changes={
            "aggregation_strategy": "simple", "ignore_labels": [],
            "stride": (8, {"aggregation_strategy": "simple"}),
        },
    ), id="token-classification"),
    pytest.param(Task(
        kind="BertForQuestionAnswering",
        known=question_answering.PARAMETERS,
        inputs={
    "question": "who said it in the film",
    "context": "anna said paris was bad again . " * 3,
},
        usual={"top_k": 3},
        changes={
            "top_k": 1, "doc_stride": (6, {"max_seq_len": 24}), "max_answer_len": 1,
            "max_seq_len": (20, {"doc_stride": 2}),
            "handle_impossible_answer": (True, {"top_k": 400}), "align_to_words": False,
        },
        without_effect={"padding"},
    ), id="question-answering"),
    pytest.param(Task(
        kind="BertForSequenceClassification",
        known=zero_shot.PARAMETERS,
        inputs=TEXTS[:1],
        usual={"candidate_labels": ["film", "paris"]},
        config={"id2label": NLI, "label2id": {name: index for index, name in NLI.items()}},
        environ={"HF_TASK": "zero-shot-classification"},
        changes={
            "candidate_labels": ["film", "who"], "hypothesis_template": "was {}",
            "multi_label": True,
        },
    ), id="zero-shot-classification"),
    pytest.param(Task(
        kind="BertForMaskedLM",
        known=fill_mask.PARAMETERS,
        inputs=["[MASK] " + LONG + " [MASK]"],
        changes={
            "top_k": 2, "targets": ["film", "paris"],
            "truncation": False, **_READ,
        },
        without_effect={"padding"},
    ), id="fill-mask"),
    pytest.param(Task(
        kind="T5ForConditionalGeneration",
        known=text_to_text.PARAMETERS,
        inputs=TEXTS,
        ends="c",
        usual={"max_new_tokens": 9},
        changes={
            "max_new_tokens": 3, "num_beams": 1, "do_sample": (True, {"seed": 3, "num_beams": 1}),
            "min_new_tokens": (6, {"num_beams": 1}), "min_length": (6, {"num_beams": 1}),
            "temperature": (9.0, _SAMPLED), "top_k": (2, _SAMPLED), "top_p": (0.2, _SAMPLED),
            "typical_p": (0.2, _SAMPLED), "seed": (4, {**_SAMPLED, "temperature": 5.0}),
            "repetition_penalty": 4.0, "length_penalty": -9.0, "no_repeat_ngram_size": 1,
            "prefix": "who said ",
        },
        # Lengths and cuts of long texts are below.
        without_effect={
            "max_length", "early_stopping", "truncation",
        },
    ), id="text2text-generation"),
    pytest.param(Task(
        kind="LlamaForCausalLM",
        known=tgi.parameters_by(options.PARAMETERS),
        inputs=TEXTS[0],
        ends="good",
        usual={"max_new_tokens": 9},
        changes={
            "max_new_tokens": 3, "min_new_tokens": 9,
            "do_sample": (True, {"seed": 5}), "temperature": (9.0, {"do_sample": True, "seed": 5}),
            "top_p": (0.1, {"temperature": 9.0, "seed": 5}),
            "top_k": (1, {"temperature": 9.0, "seed": 5}),
            "typical_p": (0.1, {"temperature": 9.0, "seed": 5}),
            "min_p": (0.9, {"temperature": 9.0, "seed": 5}), "seed": (6, {"temperature": 9.0}),
            "repetition_penalty": 9.0, "no_repeat_ngram_size": 1,
            "num_return_sequences": (2, {"temperature": 9.0, "seed": 5}), "stop": "ag",
            "stop_sequences": ["ag"], "stop_sequence": "ag",
            "return_full_text": False, "details": True,
        },
        # Streams have their own tests.
        without_effect={"stream"},
    ), id="text-generation"),
])  # fmt: skip
def test_each_parameter_changes_the_answer(task: Any, tmp_path: Path) -> None:
    assert task.known == {*task.changes, *task.without_effect}
    folder, tokens = save(task.kind, tmp_path / "m", task.seed, **task.config), tokenizer(16)
    if task.ends:
        file = folder / "generation_config.json"
        ends = [3, tokens.convert_tokens_to_ids(task.ends)]
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    if "max_length" in task.changes:
        tokens.save_pretrained(folder)
    served = Handlers(folder, **task.environ)

    @functools.cache
    def answer(parameters: str) -> Any:
        try:
            return served.ask({"inputs": task.inputs, "parameters": json.loads(parameters)})
        except BadRequest as error:
            return f"refused: {error}"

    same = []
    for parameter, change in task.changes.items():
        value, extra = change if isinstance(change, tuple) else (change, {})
        usual = {**task.usual, **extra}
        before, after = (answer(json.dumps(some)) for some in (usual, {**usual, parameter: value}))
        assert not str(before).startswith("refused"), f"{parameter}: {before}"
        assert "is not one of" not in str(after), after
        if before == after:
            same.append(parameter)
    assert not same, "parameters without an effect"
    with pytest.raises(BadRequest, match="no_such_thing"):
        served.ask({"inputs": task.inputs, "no_such_thing": 1, **task.usual})


def test_a_record_without_a_mask_or_too_long_is_an_error_in_its_place(tmp_path: Path) -> None:
    served = Handlers(save("BertForMaskedLM", tmp_path / "m"))
    texts = ("who [MASK]", "who", f"[MASK] {LONG}")
    lines = [json.dumps({"inputs": text, "truncation": False}).encode() for text in texts]
    answer = served.ask((b"\n".join(lines), "application/jsonlines"))
    assert answer[0] == served.ask([texts[0]])
    for number, words in ((1, "has no [MASK] among"), (2, "is longer than the 48")):
        assert answer[number]["error"]["message"].startswith(f"The input {words}")
        with pytest.raises(BadRequest, match=f"The input {words[:6]}"):
            served.ask(lines[number])


def test_an_encoder_decoder_samples_only_if_asked(tmp_path: Path) -> None:
    served = Handlers(save("T5ForConditionalGeneration", tmp_path / "m", 9))
    for name, value in (("temperature", 0.5), ("top_k", 1), ("top_p", 0.5), ("typical_p", 0.5)):
        with pytest.raises(BadRequest, match=f"{name} has no effect without do_sample: true"):
            served.ask({"inputs": TEXTS[0], "parameters": {name: value}})
    assert served.ask({"inputs": TEXTS[0], "temperature": 1e-30, "max_new_tokens": 4})
    for kind in ("length", "new_tokens"):
        with pytest.raises(BadRequest, match=f"min_{kind} is 9, max_{kind} 3"):
            served.ask({"inputs": TEXTS[0], f"min_{kind}": 9, f"max_{kind}": 3})


@pytest.fixture(scope="module", params=["plain", "cls", "weightedmean", "padded"])
def vectors(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Handlers:
    """A plain encoder, and sentence models of each pooling that end in a Normalize."""
    folder = tmp_path_factory.mktemp("model")
    save("BertModel", folder / "plain", 7)
    if request.param == "plain":
        return Handlers(folder / "plain")
    pooling = "mean" if request.param == "padded" else request.param
    first = modules.Transformer(str(folder / "plain"))
    parts: list[Any] = [first, modules.Pooling(32, pooling), modules.Normalize()]
    library = SentenceTransformer(modules=parts, device="cpu", prompts={"query": "who said "})
    library.save_pretrained(str(folder / "saved"))
    environ = {"AMPHORA_PACKING": "0"} if request.param == "padded" else {}
    return Handlers(folder / "saved", **environ)


def test_vectors_are_what_their_parameters_say(vectors: Handlers) -> None:
    has_prompts = "prompt" in vectors.model.parameters  # type: ignore[attr-defined]

    def vectors_of(texts: list[Any], **parameters: Any) -> Any:
        return np.array(vectors.ask({"inputs": texts, "parameters": parameters}))

    def refused(words: str, **parameters: Any) -> None:
        with pytest.raises(BadRequest, match=words):
            vectors_of([LONG], **parameters)

    whole = vectors_of(TEXTS, normalize=False)
    lengths = np.linalg.norm(whole, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 0.05).all()
    # Without the parameter the model's own modules decide.
    usual = whole / lengths if has_prompts else whole
    first, last = (" ".join(words) for words in (LONG.split()[:46], LONG.split()[-46:]))
    expected: list[tuple[Any, Any]] = [
        (vectors_of(TEXTS), usual),
        (vectors_of(TEXTS, normalize=True), whole / lengths),
        (vectors_of(TEXTS, normalize=False, truncate_dim=8), whole[:, :8]),
        (vectors_of(TEXTS, normalize=False, dimensions=8), whole[:, :8]),
        (np.linalg.norm(vectors_of(TEXTS, normalize=True, truncate_dim=8), axis=1), np.ones(4)),
        (vectors_of([LONG]), vectors_of([first])),
        (vectors_of([LONG], truncate=True), vectors_of([first])),
        (vectors_of([LONG], truncation_direction="Left"), vectors_of([last])),
    ]
    if has_prompts:
        named = vectors_of(TEXTS, prompt_name="query")
        assert not np.allclose(named, usual, atol=1e-3)
        expected.append((vectors_of(TEXTS, prompt="who said "), named))
    else:
        refused("'prompt'", prompt="who ")
        refused("'prompt_name'", prompt_name="query")
    for answer, wanted in expected:
        assert np.allclose(answer, wanted, atol=1e-4)
    refused("33 dimensions, but the model's vectors have 32", truncate_dim=33)
    refused("mean the same", dimensions=8, truncate_dim=8)
    refused("longer than the 48 tokens", truncate=False)
    refused("longer than the 48 tokens", truncation=False)
    # Each request of a merged prediction is cut on its own side.
    bodies = [{"inputs": [LONG], "truncation_direction": side} for side in ("left", "right")]
    left, right = vectors.ask_all(bodies)
    assert np.allclose(left + right, np.concatenate([expected[7][1], expected[5][1]]), atol=1e-4)

    with pytest.raises(BadRequest, match="a text or a list of texts"):
        vectors.ask({"model": "m", "input": [9906, 1917]})


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_texts_are_truncated_on_the_side_that_the_tokenizer_has(kind: str, tmp_path: Path) -> None:
    file = save(kind, tmp_path, 9) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "truncation_side": "left"}))
    handlers = Handlers(tmp_path)
    usual, left, right = (
        handlers.ask({"inputs": [LONG], "parameters": parameters})
        for parameters in ({}, *({"truncation_direction": side} for side in ("left", "right")))
    )
    assert_close(usual, left)
    assert left != right


VARIED = " ".join(["anna", "film", "good", "paris", "who", "bad", "said", "again"][index * index % 8]
                  for index in range(34))  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("BertForSequenceClassification", {}),
        ("BertModel", {}),
        ("LlamaForCausalLM", {"max_new_tokens": 6}),
    ],
)
def test_the_model_limits_a_text_and_the_tokenizer_says_what_is_usual(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    whole = Handlers(save(kind, tmp_path / "m", 9))
    tokenizer(16).save_pretrained(tmp_path / "m")
    served = Handlers(tmp_path / "m")
    body = {"inputs": [VARIED], "parameters": more}
    for allowed in ({"truncation": False}, {"truncation": False} if more else {"max_length": 40}):
        requested = {"inputs": [VARIED], "parameters": {**more, **allowed}}
        assert_close(served.ask(requested), whole.ask(body), 1e-5)
    if not more:  # a decoder's usual limit is its positions
        assert served.ask(body) != whole.ask(body)
    with pytest.raises(BadRequest, match=r"4[78]"):
        served.ask({"inputs": [f"{VARIED} {VARIED}"], "parameters": {**more, "truncation": False}})


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_an_encoder_decoder_reads_a_long_text_whole_if_asked(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path / "m", seed=3)
    tokenizer(16).save_pretrained(tmp_path / "m")
    served: Any = Handlers(tmp_path / "m", HF_TASK="text2text-generation").model
    for truncation, read, cut in (None, 16, [0]), (False, 36, []):
        prepared = served.prepare(request(VARIED, truncation=truncation, max_new_tokens=2))
        assert (prepared.tokens, list(prepared.truncated)) == (read, cut)
