"""The columns of data that is public, by rows of those shapes: recognised rightly, or refused with a
reason; never read as something else."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Features, List, Value

from recipe import task_table
from recipe.arguments import parse
from recipe.data import language_modeling
from recipe.errors import RecipeError
from recipe.plan import detection

ENCODER, DECODER = "BertForMaskedLM", "LlamaForCausalLM"
WRITER, CLASSIFIER, VIT = "T5Model", "BertForSequenceClassification", "ViTForImageClassification"
ROWS = 24
Row = Mapping[str, Any]
drawn = random.Random(0)


def said(words: int = 8) -> str:
    return " ".join(drawn.choices(["the", "cat", "sat", "on", "a", "mat", "in", "rome"], k=words))


def at_words(text: str, *words: str) -> list[tuple[int, int]]:
    return [(text.index(word), text.index(word) + len(word)) for word in words]


ADA = "number 7 Ada sat in Rome"
SPANS = [[start, end, "PER"] for start, end in at_words(ADA, "Ada")]
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
NO = [TURNS[0], {"role": "assistant", "content": "no"}]
STRINGS = List(Value("string"))
SQUAD = {"id": "1", "title": "t", "context": ADA, "question": "who sat?",
         "answers": {"text": ["Ada"], "answer_start": [9]}}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A public data set's columns, and what is made of them."""

    model: str
    row: Callable[[int], Row]
    task: str
    """The task that is found; or words of the refusal, where `reads` is None."""
    reads: Row | None = None
    """What the first row that is read must have."""
    argv: tuple[str, ...] = ()
    features: Mapping[str, Any] | None = None
    """The types of columns that are ClassLabels, in a Parquet file; JSON Lines without."""


def tagged(**more: Any) -> Callable[[int], Row]:
    return lambda n: {"tokens": ["Ada", "sat"], "ner_tags": [1, 0], **more}


NER = {"tokens": STRINGS, "ner_tags": List(ClassLabel(names=["O", "B-PER"]))}
IS_ADA = {"tokens": ADA.split(), "tags": ["O", "O", "B-PER", "O", "O", "O"]}
TAGS, ANSWERS, VECTORS = "token-classification", "question-answering", "sentence-embedding"
SHAPES = {
    # Words with tags
    "wikiann": Shape(
        ENCODER, tagged(langs=["en", "en"], spans=["PER: Ada"]), TAGS,
        {"tokens": ["Ada", "sat"], "tags": ["B-PER", "O"]},
        features={**NER, "langs": STRINGS, "spans": STRINGS},
    ),
    "universal_dependencies": Shape(
        ENCODER, lambda n: {"text": "Ada sat", "tokens": ["Ada", "sat"], "lemmas": ["a", "b"],
                            "upos": [0, 1], "head": ["1", "0"]},
        TAGS, {"tokens": ["Ada", "sat"], "tags": ["PROPN", "VERB"]},
        features={"text": Value("string"), "tokens": STRINGS, "lemmas": STRINGS,
                  "upos": List(ClassLabel(names=["PROPN", "VERB"])), "head": STRINGS},
    ),
    "doccano": Shape(ENCODER, lambda n: {"id": n, "text": ADA, "label": SPANS}, TAGS, IS_ADA),
    "prodigy": Shape(
        ENCODER, lambda n: {
            "text": ADA, "answer": "accept",
            "tokens": [{"text": word, "id": at} for at, word in enumerate(ADA.split())],
            "spans": [{"start": 9, "end": 12, "token_start": 2, "token_end": 2, "label": "PER"}],
        }, TAGS, IS_ADA,
    ),
    "Kaggle's sentences and lists": Shape(
        ENCODER, lambda n: {"Sentence": ADA, "Tag": str(IS_ADA["tags"])}, TAGS, IS_ADA
    ),
    "lists of other lengths": Shape(
        ENCODER, lambda n: {"Sentence": ADA, "Tag": "['O', 'B-PER']"}, "6 words in column",
        argv=("--task", TAGS),
    ),
    "gliner": Shape(
        ENCODER, lambda n: {"tokenized_text": ADA.split(), "ner": [[2, 2, "person"]]},
        "6 words in column", argv=("--task", TAGS, "--text_column", "tokenized_text"),
    ),
    "two columns of tags": Shape(
        ENCODER, lambda n: {"tokens": ["Ada", "sat"], "labels": ["B-PER", "O"],
                            "tags": ["NNP", "VBD"]},
        "label_column=tags or label_column=labels", argv=("--task", TAGS),
    ),
    # Questions
    "squad with another context": Shape(
        ENCODER, lambda n: {**SQUAD, "paragraph": said()}, "values in column 'paragraph'"
    ),
    "squad": Shape(ENCODER, lambda n: SQUAD, ANSWERS, {"answers": ["Ada"], "starts": [9]}),
    "mrqa": Shape(
        ENCODER, lambda n: {"context": ADA, "qid": str(n), "question": "who sat?",
                            "detected_answers": {"text": ["Ada"]}, "answers": ["Ada"]},
        "answer_start", argv=("--task", ANSWERS),
    ),
    "duorc": Shape(
        ENCODER, lambda n: {"plot": said(30), "question": "who?", "answers": ["Ada"]},
        "task is not given",
    ),
    # Queries and texts
    "tevatron": Shape(
        ENCODER, lambda n: {
            "query_id": str(n), "query": f"q {n}",
            "positive_passages": [{"docid": "1", "title": "T", "text": "yes"}],
            "negative_passages": [{"docid": "2", "title": "T", "text": "no"}],
        }, VECTORS, {"query": "q 0", "texts": ["T yes", "T no"], "scores": [1.0, 0.0]},
    ),
    "bge": Shape(
        ENCODER, lambda n: {"query": f"q {n}", "pos": ["yes"], "neg": ["no", "not"],
                            "pos_scores": [1.0], "neg_scores": [0.1, 0.2], "prompt": "find"},
        VECTORS, {"texts": ["yes", "no", "not"], "scores": [1.0, 0.0, 0.0]},
    ),
    "s2orc": Shape(
        ENCODER, lambda n: {"title": f"t {n}", "abstract": "yes"}, VECTORS,
        {"query": "t 0", "texts": ["yes"]}, argv=("--task", VECTORS),
    ),
    "sick": Shape(
        ENCODER, lambda n: {"sentence_A": said(), "sentence_B": said(), "label": n % 3,
                            "relatedness_score": n / 5},
        "label, relatedness_score", argv=("--task", VECTORS),
    ),
    "wiki_qa": Shape(
        CLASSIFIER, lambda n: {"question": f"q {n // 2}", "answer": f"a {n}", "label": n % 2},
        "reranking", {"text": "q 0", "text_pair": "a 0", "label": [0.0, 0.0]},
        argv=("--task", "reranking"),
        features={"question": Value("string"), "answer": Value("string"),
                  "label": ClassLabel(names=["0", "1"])},
    ),
    "mrpc": Shape(
        CLASSIFIER, lambda n: {"sentence1": said(), "sentence2": said(), "label": n % 2},
        'has "not_equivalent" in column', argv=("--task", "reranking"),
        features={"sentence1": Value("string"), "sentence2": Value("string"),
                  "label": ClassLabel(names=["not_equivalent", "equivalent"])},
    ),
    "ms_marco": Shape(
        CLASSIFIER, lambda n: {
            "answers": ["x"], "query": f"q {n}", "query_id": n, "wellFormedAnswers": ["x"],
            "passages": {"is_selected": [0, 1], "passage_text": ["no", "yes"], "url": ["a", "b"]},
        }, "reranking", {"text": "q 0", "text_pair": "no", "label": [0.0, 0.0]},
    ),
    "Amazon's ESCI": Shape(
        ENCODER, lambda n: {"query": said(), "product_title": said(), "esci_label": "ESCI"[n % 4]},
        "column 'esci_label'", argv=("--task", VECTORS),
    ),
    "graded pairs": Shape(
        ENCODER, lambda n: {"query": f"q {n}", "document": said(), "grade": n % 4},
        "column 'grade' (0, 1, 2 ...)", argv=("--task", VECTORS),
    ),
    "graded pairs, named": Shape(
        ENCODER, lambda n: {"query": f"q {n}", "document": "it", "grade": n % 4}, VECTORS,
        {"query": "q 0", "texts": ["it"], "scores": [0.0]},
        argv=("--task", VECTORS, "--label_column", "grade"),
    ),
    "relevant or not": Shape(
        ENCODER, lambda n: {"question": said(), "answer": said(), "is_relevant": n % 2 == 0},
        "column 'is_relevant'", argv=("--task", VECTORS),
    ),
    "a corpus of BEIR": Shape(
        ENCODER, lambda n: {"_id": f"d{n}", "title": f"t {n}", "text": "it"}, VECTORS,
        {"query": "t 0", "texts": ["it"]}, argv=("--task", VECTORS),
    ),
    "BEIR's qrels": Shape(
        ENCODER, lambda n: {"query-id": n, "corpus-id": n, "score": 1}, "no two columns",
        argv=("--task", VECTORS),
    ),
    "snli as pairs with labels": Shape(
        ENCODER, lambda n: {"sentence1": said(), "sentence2": said(), "label": n % 3},
        "may be classes of entailment", argv=("--task", VECTORS),
    ),
    "pairs of three grades, named": Shape(
        ENCODER, lambda n: {"sentence1": "a", "sentence2": "b", "label": n % 3}, VECTORS,
        {"scores": [0.0]}, argv=("--task", VECTORS, "--label_column", "label"),
    ),
    "pairs with distances": Shape(
        ENCODER, lambda n: {"sentence1": said(), "sentence2": said(), "distance": n / 99},
        "column 'distance'", argv=("--task", VECTORS),
    ),
    # Texts from texts
    "qmsum": Shape(
        WRITER, lambda n: {"document": "long", "query": said(), "summary": "short"},
        "values in column 'query'",
    ),
    "xsum": Shape(
        WRITER, lambda n: {"id": "1", "document": "long", "summary": "short"}, "summarization",
        {"source": "long", "target": "short"},
    ),
    "reddit_tifu": Shape(
        WRITER, lambda n: {"title": said(), "documents": "long", "tldr": "short"},
        "summarization", {"source": "long", "target": "short"},
    ),
    "opus_books, named": Shape(
        WRITER, lambda n: {"id": "1", "translation": {"en": "cat", "fr": "chat"}},
        "translation", {"source": "chat", "target": "cat"},
        argv=("--source_lang", "fr", "--target_lang", "en"),
    ),
    "simpletransformers": Shape(
        WRITER, lambda n: {"prefix": "ask", "input_text": "it", "target_text": "done"},
        "values in column 'prefix'",
    ),
    "aya collection, several languages": Shape(
        WRITER, lambda n: {"inputs": "cat", "targets": "chat", "target_lang": ["fra", "deu"][n % 2]},
        "several languages by column 'target_lang'", argv=("--task", "translation"),
    ),
    "one direction of several": Shape(
        WRITER, lambda n: {"source": "cat", "target": "chat", "target_lang": "fra"},
        "translation", {"source": "cat", "target": "chat"}, argv=("--task", "translation"),
    ),
    # Answers to choose from
    "openbookqa": Shape(
        CLASSIFIER, lambda n: {"question": said(), "choices": {"text": [*"abcd"], "label": [*"ABCD"]},
                               "answerKey": "ABCD"[n % 4]},
        "multiple-choice", {"choices": [*"abcd"], "answer": 0},
    ),
    "mmlu": Shape(
        DECODER, lambda n: {"question": said(), "choices": [*"abcd"], "answer": n % 4},
        "answers to choose from in 'choices'", argv=("--task", "causal-lm"),
    ),
    "arc in a CSV": Shape(
        CLASSIFIER, lambda n: {"question": said(), "choices": str({"text": [*"ab"]}),
                               "answerKey": "AB"[n % 2]}, "answers to choose from in 'choices'",
    ),
    "cosmos_qa": Shape(
        CLASSIFIER, lambda n: {"context": said(), "question": said(), "answer0": "a",
                               "answer1": "b", "label": n % 2},
        "Rename it to choices", argv=("--task", "multiple-choice"),
    ),
    # Texts alone
    "wikipedia": Shape(
        ENCODER, lambda n: {"id": str(n), "url": "http://a/b", "title": said(3), "text": "the cat"},
        "masked-lm: column text holds texts, for an encoder with a masked head. Give task=masked-lm",
    ),
    "the pile": Shape(
        DECODER, lambda n: {"text": "the cat", "meta": {"pile_set_name": "Github"}},
        "column text holds texts, for a decoder. Give task=causal-lm",
    ),
    "simple-wiki": Shape(
        ENCODER, lambda n: {"text": said(30), "simplified": said()}, "Give task=masked-lm"
    ),
    # Preferences and prompts
    "truthy-dpo, named": Shape(
        DECODER, lambda n: {"system": "You are kind.", "prompt": "hi", "chosen": "yes",
                            "rejected": "no"},
        "preference", {"prompt": "hi", "chosen": "yes"}, argv=("--prompt_column", "prompt"),
    ),
    "orca_dpo without systems": Shape(
        DECODER, lambda n: {"system": "", "question": "hi", "chosen": "yes", "rejected": "no"},
        "preference", {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    ),
    "capybara": Shape(
        DECODER, lambda n: {"prompt": "hi", "chosen": TURNS, "rejected": NO, "source": "x"},
        "preference", {"prompt": json.dumps(TURNS[:1]), "chosen": json.dumps(TURNS[1:])},
    ),
    "SafeRLHF": Shape(
        DECODER, lambda n: {"prompt": said(), "response_0": said(), "response_1": said(),
                            "better_response_id": n % 2},
        "chosen and rejected columns", argv=("--task", "preference"),
    ),
    "preferences for a language model": Shape(
        DECODER, lambda n: {"question": said(), "chosen": said(), "rejected": said()},
        "Give task=preference", argv=("--task", "causal-lm"),
    ),
    "kto for a language model": Shape(
        DECODER, lambda n: {"prompt": f"hi {n}", "completion": f"yes {n}", "label": n % 2 == 1},
        "values in column 'label', which belong", argv=("--task", "causal-lm"),
    ),
    "a completion and a rejected one": Shape(
        DECODER, lambda n: {"prompt": said(), "completion": said(), "rejected": said()},
        "Give task=preference",
    ),
    "prompts with images": Shape(
        DECODER, lambda n: {"prompt": said(), "completion": said(), "image": "a.png"}, "TRL"
    ),
    "preferences about images": Shape(
        DECODER, lambda n: {"prompt": said(), "chosen": said(), "rejected": said(), "images": ["a"]},
        "TRL",
    ),
    "completions that are missing": Shape(
        DECODER, lambda n: {"prompt": f"hi {n}", "completion": [None, " ", "yes"][n % 3]},
        "causal-lm", {"prompt": "hi 2", "completion": "yes"},
    ),
    "no completion at all": Shape(
        DECODER, lambda n: {"prompt": f"hi {n}", "completion": ""}, "no completion in any row",
        argv=("--task", "causal-lm"),
    ),
    "medical o1": Shape(
        DECODER, lambda n: {"Question": said(), "Complex_CoT": said(), "Response": said()},
        "values in column 'Complex_CoT'",
    ),
    "firefly": Shape(
        DECODER, lambda n: {"instruction": "hi", "output": "yes", "history": [["a", "b"]]},
        "values in column 'history'",
    ),
    "alpaca": Shape(
        DECODER, lambda n: {"instruction": "do", "input": "it" * (n % 2), "output": "done"},
        "causal-lm", {"prompt": language_modeling.ALPACA_WITHOUT_INPUT.format("do"),
                      "completion": "done"},
    ),
    "dolly": Shape(
        DECODER, lambda n: {"instruction": "do", "context": "it" * n, "response": "done",
                            "category": "qa"}, "values in column 'context'",
        argv=("--task", "causal-lm"),
    ),
    "LLaMA-Factory's pairs": Shape(
        DECODER, lambda n: {"conversations": [{"from": "human", "value": "hi"}],
                            "chosen": {"from": "gpt", "value": "yes"},
                            "rejected": {"from": "gpt", "value": "no"}},
        "preference", {"prompt": json.dumps(TURNS[:1]), "chosen": json.dumps(TURNS[1:]),
                       "rejected": json.dumps(NO[1:])},
    ),
    "alpaca with a ready text": Shape(
        DECODER, lambda n: {"instruction": "do", "input": "", "output": "done", "text": "do: done"},
        "Give text_column=text to learn it as a whole", argv=("--task", "causal-lm"),
    ),
    "no_robots": Shape(
        DECODER, lambda n: {"prompt": "hi", "prompt_id": str(n), "messages": TURNS,
                            "category": "Chat"}, "causal-lm", {"messages": json.dumps(TURNS)},
    ),
    "sharegpt": Shape(
        DECODER, lambda n: {"id": str(n), "conversations": [{"from": "human", "value": "hi"},
                                                            {"from": "gpt", "value": "yes"}]},
        "causal-lm", {"messages": json.dumps(TURNS)},
    ),
    "llava": Shape(
        DECODER, lambda n: {"id": str(n), "image": "a.png", "conversations": TURNS}, "TRL",
        argv=("--task", "causal-lm"),
    ),
    "distilabel orca": Shape(
        DECODER, lambda n: {"system": "", "input": f"hi {n}", "chosen": "yes", "rejected": "no",
                            "status": "tie" if n < 3 else "unchanged"},
        "preference", {"prompt": "hi 3", "chosen": "yes", "rejected": "no"},
    ),
    # Pictures
    "cifar100": Shape(
        VIT, lambda n: {"img": {"bytes": b"\x89PNG", "path": None}, "fine_label": n % 3,
                        "coarse_label": n % 2}, "label column",
        features={"img": datasets.Image(decode=False), "fine_label": ClassLabel(names=[*"abc"]),
                  "coarse_label": ClassLabel(names=[*"ab"])},
    ),
    "addresses of pictures": Shape(
        VIT, lambda n: {"image": f"http://a/{n}.jpg", "label": n % 2}, "names the picture 'http:"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_public_shape_is_recognised_or_refused(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    data, model = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    model.mkdir()
    config = {"architectures": [shape.model], "is_encoder_decoder": shape.model == WRITER}
    (model / "config.json").write_text(json.dumps(config))
    rows: list[Any] = [shape.row(n) for n in range(ROWS)]
    if shape.features is None:
        (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        table = datasets.Dataset.from_list(rows, features=Features(shape.features))
        table.to_parquet(data / "train-00000-of-00001.parquet")
    channels = {"train": data}
    argv = ["--model_id", str(model), "--eval_strategy", "no", *shape.argv]
    given = parse(argv)

    def read() -> tuple[str, Any]:
        task, _ = detection.find(given, channels)
        return task, task_table.load(task)(channels, dataclasses.replace(given, task=task))

    if shape.reads is None:
        with pytest.raises(RecipeError) as refusal:
            read()
        assert shape.task in str(refusal.value)
        return
    task, made = read()
    assert task == shape.task
    row = made.train[0]
    assert {column: row[column] for column in shape.reads} == shape.reads
