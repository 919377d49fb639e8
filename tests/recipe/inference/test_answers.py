"""Every answer against transformers' own pipelines, called as Hugging Face's image calls them.

Each body is answered alone and merged with all others of its task; both must be what the pipeline
gives, in shape and names exactly and in numbers within TOLERANCE.
"""

import copy
import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForQuestionAnswering, AutoModelForSeq2SeqLM, AutoTokenizer

from amphora.serving.api.write import plain
from recipe.backend.requests.payloads import BadRequest
from recipe.tasks.question_answering import report as found_answers
from recipe.tasks.question_answering import tokens as windows
from tests.support.serving_kit import TEXTS, Handlers, assert_close, save

A, B, _, D = TEXTS
LONG = " ".join([B, D] * 2)
LABELS = {0: "neg", 1: "pos", 2: "mixed"}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
ENTAILMENT = {0: "contradiction", 1: "neutral", 2: "entailment"}
NUMBERS = {name: number for number, name in ENTAILMENT.items()}
MASKED = ["the film was [MASK] .", "[MASK] said paris was [MASK]", "who [MASK]"]


def question_body(inputs: Any, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": parameters} if parameters else {"inputs": inputs}


PAIR, PAIRS = (
    {"text": A, "text_pair": B},
    [{"text": A, "text_pair": B}, {"text": B, "text_pair": A}],
)
CLASSIFIED = [
    question_body(A), question_body(TEXTS), question_body(A, top_k=1), question_body(A, top_k=None),
    question_body([A], top_k=2), question_body(A, top_k=9),
    question_body(A, function_to_apply="sigmoid"), question_body(TEXTS, function_to_apply="none"),
    question_body(A, padding=True, truncation=True, max_length=8), question_body(PAIR),
    question_body(PAIRS, top_k=2), PAIR, question_body([PAIRS[0]]),
]  # fmt: skip
TAGGED = [
    question_body(B), question_body([B]), question_body(TEXTS), question_body([B], aggregation_strategy="none"),
    *(question_body(B, aggregation_strategy=name) for name in ("simple", "first", "average", "max")),
    question_body(TEXTS, aggregation_strategy="simple"), question_body(B, ignore_labels=[]),
    question_body(TEXTS, ignore_labels=["O", "B-PER"]),
    question_body(LONG * 2, aggregation_strategy="first", stride=8),
]  # fmt: skip
CHOSEN = [
    question_body(A, candidate_labels=["film", "paris"]), question_body(A, candidate_labels="film, paris, who"),
    question_body([A], candidate_labels=["film", "paris"]), question_body(TEXTS, candidate_labels=["film", "who"]),
    question_body(A, candidate_labels=["film", "paris"], multi_label=True),
    question_body(TEXTS[:2], candidate_labels=["a b", "c"], hypothesis_template="was {} good"),
    question_body(LONG * 3, candidate_labels=["film", "who was in paris"]),
]  # fmt: skip
FILLED = [
    question_body(MASKED[0]), question_body(MASKED), question_body(MASKED[0], top_k=2),
    question_body(MASKED, top_k=1), question_body(MASKED, targets=["paris", "film"]),
    question_body(MASKED[0], targets=["film", "good", "##a", "good"], top_k=2),
    question_body(MASKED[1], targets="anna"),
]  # fmt: skip
FEATURES = [
    question_body(A), question_body([A]), question_body(TEXTS), question_body(A, truncation=True),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [
    pytest.param((
        "text-classification", "BertForSequenceClassification", {"id2label": LABELS}, CLASSIFIED,
    ), id="several labels"),
    pytest.param((
        "text-classification", "BertForSequenceClassification", {"num_labels": 1}, CLASSIFIED[:8],
    ), id="one label"),
    pytest.param((
        "text-classification", "BertForSequenceClassification",
        {"id2label": LABELS, "problem_type": "multi_label_classification"}, CLASSIFIED[:8],
    ), id="labels together"),
    pytest.param((
        "text-classification", "BertForSequenceClassification",
        {"num_labels": 1, "problem_type": "regression"}, CLASSIFIED[:8],
    ), id="a number"),
    pytest.param((
        "text-classification", "BertForSequenceClassification",
        {"id2label": LABELS, "problem_type": "regression"},
        [body for body in CLASSIFIED if {"top_k", "return_all_scores"} & (body.get("parameters") or {}).keys()],
    ), id="several numbers"),
    pytest.param((
        "text-classification", "GPT2ForSequenceClassification", {"id2label": LABELS}, CLASSIFIED[:8],
    ), id="without padding"),
    pytest.param(("token-classification", "BertForTokenClassification", {"id2label": TAGS}, TAGGED), id="entities"),
    pytest.param((
        "zero-shot-classification", "BertForSequenceClassification", {"id2label": ENTAILMENT, "label2id": NUMBERS}, CHOSEN,
    ), id="labels of the request"),
    pytest.param(("fill-mask", "BertForMaskedLM", {}, FILLED), id="masks"),
    pytest.param(("feature-extraction", "BertModel", {}, FEATURES), id="token vectors"),
])  # fmt: skip
def test_answers_are_those_of_transformers_pipelines(case: Any, tmp_path: Path) -> None:
    def toolkit_answer(pipeline: Any, body: Any) -> Any:
        """What Hugging Face's image answers: `inputs`, or the whole object, and `parameters`."""
        data = copy.deepcopy(body)
        inputs = data.pop("inputs", data)
        return pipeline(inputs, **(data.pop("parameters", None) or {}))

    tolerance = 2e-5
    task, kind, config, bodies = case
    folder = save(kind, tmp_path / "model", 7, **config)
    if kind.startswith("GPT2"):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}))
    make: Any = transformers.pipeline
    reference = make(task, model=str(folder), device="cpu")
    served = Handlers(folder, HF_TASK=task)
    expected = [plain(toolkit_answer(reference, body)) for body in bodies]
    merged = served.ask_all(bodies)
    for body, answer, wanted in zip(bodies, merged, expected, strict=True):
        assert_close(answer, wanted, tolerance, f"{body}")
        assert_close(served.ask(body), wanted, tolerance, f"alone: {body}")
    if task == "fill-mask":
        with pytest.raises(
            BadRequest, match="'goodly' is not one token of the model, but good, ##l"
        ):
            served.ask(question_body(MASKED, targets=["film", "goodly"]))


ANSWERED = "anna said the film was bad again in paris ."


def test_questions_are_answered_by_the_likeliest_words(tmp_path: Path) -> None:
    def best_spans(
        model: Any, question: str, context: str, longest: int = 15
    ) -> list[dict[str, Any]]:
        """Every span of tokens, its probability and words: the definition, with nothing left out."""
        reader: Any = AutoTokenizer.from_pretrained(model.name_or_path)
        encoded = reader(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            output = model(**encoded)
        owners = encoded.sequence_ids(0)
        # "No answer", the first token, takes its part of the probability.
        able = torch.tensor([owner == 1 or index == 0 for index, owner in enumerate(owners)])
        start, end = (
            torch.where(able, logits[0], -1e4).softmax(-1)
            for logits in (output.start_logits, output.end_logits)
        )
        results: dict[str, dict[str, Any]] = {}
        inside = [index for index, owner in enumerate(owners) if owner == 1]
        for first in inside:
            for last in inside:
                if first <= last < first + longest:
                    words = encoded.token_to_word(first), encoded.token_to_word(last)
                    begins = encoded.word_to_chars(words[0], sequence_index=1).start
                    stops = encoded.word_to_chars(words[1], sequence_index=1).end
                    entry = {
                        "score": 0.0,
                        "start": begins,
                        "end": stops,
                        "answer": context[begins:stops],
                    }
                    span = results.setdefault(context[begins:stops], entry)
                    span["score"] += float(start[first] * end[last])
                    assert offsets[first][0] >= begins
        none = {"score": float(start[0] * end[0]), "start": 0, "end": 0, "answer": ""}
        return [none, *sorted(results.values(), key=lambda item: -item["score"])]

    folder = save("BertForQuestionAnswering", tmp_path / "model", 11)
    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    served = Handlers(folder)
    none, *expected = best_spans(model, "who said", ANSWERED)
    body = {"question": "who said", "context": ANSWERED}
    _, *others = best_spans(model, "who said", A)
    other = {"question": "who said", "context": A}
    _, *short = best_spans(model, "who said", ANSWERED, longest=2)
    both = sorted([none, *expected], key=lambda item: -item["score"])
    cases = [
        (question_body(body), expected[0]), (body, expected[0]), (question_body([body]), expected[0]),
        (question_body([body, other]), [expected[0], others[0]]),
        (question_body(body, max_answer_len=2), short[0]),
        (question_body(body, handle_impossible_answer=True), both[0]),
        # Each token is a word here.
        (question_body(body, align_to_words=False), expected[0]),
        # It is read at once, whatever windows would share.
        (question_body(body, doc_stride=99), expected[0]),
    ]  # fmt: skip
    merged = served.ask_all([item for item, _ in cases])
    for (case, wanted), answer in zip(cases, merged, strict=True):
        assert_close(answer, wanted, 1e-4, f"{case}")
    ranked = served.ask(question_body(body, top_k=3))
    assert [item["answer"] for item in ranked] == [item["answer"] for item in expected[:3]]
    # Of a context that is read in parts, the best part's answer.
    parts = served.ask(
        question_body({"question": "who", "context": ANSWERED * 6}, top_k=2, doc_stride=4)
    )
    assert len(parts) == 2
    for entry in parts:
        assert (ANSWERED * 6)[entry["start"] : entry["end"]] == entry["answer"]
    for wrong, words in [
        (question_body("who"), "question and context"), (question_body({"question": ["who"], "context": A}), "question and context"), (question_body({"question": "", "context": A}), "empty"),
        (question_body(body, top_p=0.5), "takes align_to_words"),
        (question_body({"question": LONG * 4, "context": A}), "no room"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            served.ask(wrong)


@pytest.mark.parametrize("may_be_none", [False, True])
def test_questions_are_answered_as_the_model_was_judged(
    may_be_none: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the parameters that training left in config.json, and by the rule of its evaluations."""
    texts_of_rows = datasets.Sequence(datasets.Value("string"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = save("BertForQuestionAnswering", tmp_path / "model", 11)
    settings = {
        "max_seq_len": 20, "doc_stride": 3, "max_answer_len": 30, "align_to_words": False,
        "handle_impossible_answer": may_be_none,
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "question_answering": settings}))
    draw, words = random.Random(0), ANSWERED.split()
    texts = [{"question": f"who {draw.choice(words)}", "context": " ".join(draw.choices(words, k=k))}
             for k in [2, 3, 30] * 20]  # fmt: skip
    rows = [
        {**entry, "answers": [], "starts": [], "id": str(position)}
        for position, entry in enumerate(texts)
    ]
    split = datasets.Dataset.from_list(rows).cast_column("answers", texts_of_rows)
    reader: Any = AutoTokenizer.from_pretrained(folder)
    of_rows = windows.tokenize_split("test", split, reader, 20, 3)
    assert len(of_rows) > 1.5 * len(rows)
    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    outputs = np.full((len(of_rows), 41), -1e9)
    for index in range(len(of_rows)):
        ids = torch.tensor(of_rows.tokens(index).tolist())[None]
        types = torch.tensor(of_rows.types[of_rows.span(index)].tolist())[None]
        with torch.no_grad():
            output = model(input_ids=ids, token_type_ids=types)
        outputs[index, 1 : 1 + ids.shape[1]] = output.start_logits[0]
        outputs[index, 21 : 21 + ids.shape[1]] = output.end_logits[0]
    judged = found_answers.find(outputs, of_rows, rows, may_be_none)
    assert may_be_none == ("" in {entry.text for entry in judged})
    served = Handlers(folder)
    answers = served.ask(question_body(texts))
    assert [entry["answer"] for entry in answers] == [entry.text for entry in judged]
    assert [entry["start"] for entry in answers if entry["answer"]] == [
        entry.start for entry in judged if entry.text
    ]
    short = served.ask(question_body(texts, max_answer_len=1, handle_impossible_answer=False))
    assert {len(entry["answer"].split()) for entry in short} == {1}


def test_texts_are_written_by_one_beam_where_the_model_says_so(tmp_path: Path) -> None:
    folder = save("T5ForConditionalGeneration", tmp_path / "model", 13)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())
    texts = [*TEXTS, LONG]
    by_beams = Handlers(folder).ask(question_body(texts, max_new_tokens=4))
    one = Handlers(folder).ask(question_body(texts, max_new_tokens=4, num_beams=1))
    file.write_text(json.dumps({**config, "num_beams": 1}))
    assert Handlers(folder).ask(question_body(texts, max_new_tokens=4)) == one != by_beams


def test_defaults_beyond_a_models_limits_are_reduced_and_values_of_requests_refused(
    tmp_path: Path,
) -> None:
    specific = {"summarization": {"min_length": 60, "max_length": 142, "num_beams": 99}}
    folder = save("BartForConditionalGeneration", tmp_path / "m", 3, task_specific_params=specific)
    for task, limit in (
        ("text2text-generation", "max_new_tokens"),
        ("summarization", "max_length"),
    ):
        served = Handlers(folder, HF_TASK=task)
        assert served.ask(question_body(A)) == served.ask(question_body(A, **{limit: 48}))
        for name in ("max_new_tokens", "min_length", "num_beams"):
            with pytest.raises(BadRequest, match=f"{name} is 99, and the model's limit is"):
                served.ask(question_body(A, **{name: 99}))


def test_texts_are_written_as_generate_writes_them(tmp_path: Path) -> None:
    """By the names, the prefix and the beams of each task; test_text_to_text_turns has settings."""
    specific = {"translation_en_to_de": {"prefix": "said : ", "num_beams": 3, "max_length": 9}}
    folder = save(
        "T5ForConditionalGeneration", tmp_path / "model", 13, task_specific_params=specific
    )
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    reader: Any = AutoTokenizer.from_pretrained(folder)

    def write(name: str, text: str, **options: Any) -> list[dict[str, str]]:
        encoded = reader(text, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        with torch.inference_mode():
            output = model.generate(**encoded, **options)
        return [{name: text} for text in reader.batch_decode(output, skip_special_tokens=True)]

    few = {"max_new_tokens": 5}
    for task, name in [
        ("summarization", "summary_text"),
        ("text2text-generation", "generated_text"),
    ]:
        served = Handlers(folder, HF_TASK=task)
        cases: list[tuple[Any, Any]] = [
            (question_body(A, **few), write(name, A, num_beams=4, **few)),
            (question_body(B, num_beams=2, **few), write(name, B, num_beams=2, **few)),
            (question_body([A], num_beams=1, prefix="who ", **few), write(name, f"who {A}", **few)),
        ]
        answers = served.ask_all([body for body, _ in cases])
        for (body, wanted), answer in zip(cases, answers, strict=True):
            assert answer == wanted, f"{body}"
    served = Handlers(folder, HF_TASK="translation_en_to_de")
    wanted = write("translation_text", f"said : {A}", num_beams=3, max_length=9)
    assert served.ask(question_body(A)) == wanted
    for wrong, words in [
        (question_body(A, max_length=5, max_new_tokens=5), "Give one"), (question_body(A, tgt_lang="de"), "tgt_lang"),
        (question_body(A, num_beams=65), "limit is 64"), (question_body(A, stream=True), "stream"),
        (question_body(A, max_new_tokens=10**9), "model's limit is"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            served.ask(wrong)
