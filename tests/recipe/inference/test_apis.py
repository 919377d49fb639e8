"""Bodies of OpenAI's and TEI's APIs for vectors, labels and rankings, beside the same models'
own answers."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.backend.requests.payloads import BadRequest, Document, UnsupportedContentType
from recipe.backend.saved.origin import Origin
from recipe.inference.apis import openai, request_reader
from recipe.task_table import SERVED, resolve
from recipe.tasks.sentence_embedding import serve as embedder
from recipe.tasks.text_classification import serve as classifier
from tests.support.serving_kit import save

TEXTS = ["the film was good", "anna said", "paris again . who was bad in the film"]


@pytest.fixture(scope="module")
def environ() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AMPHORA_DTYPE", "float32")
        yield


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, environ: None) -> Any:
    folder = save("BertModel", tmp_path_factory.mktemp("bert"))
    return embedder.load_vectors(Origin(str(folder), {}))


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory, environ: None) -> Any:
    names = {0: "sad", 1: "glad", 2: "neither"}
    folder = save("BertForSequenceClassification", tmp_path_factory.mktemp("three"), id2label=names)
    return classifier.Classifier.load(Origin(str(folder), {}))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory, environ: None) -> Any:
    folder = save("BertForSequenceClassification", tmp_path_factory.mktemp("one"), num_labels=1)
    return classifier.Classifier.load(Origin(str(folder), {}))


def ask(model: Any, body: object, path: str = "/invocations") -> Any:
    request = request_reader.read(json.dumps(body).encode(), "application/json", path)
    model.refuse_other_apis(request)
    prepared = model.prepare(request)
    answer = request_reader.format_answer(model.predict([prepared])[0], prepared)
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, Document):
        return answer.value
    return answer[0] if answer.single else list(answer)


def test_embeddings_are_the_models_vectors_of_length_one(vectors: Any) -> None:
    vectors_alone = np.array(ask(vectors, {"inputs": TEXTS}))
    expected = vectors_alone / np.linalg.norm(vectors_alone, axis=1, keepdims=True)
    body = {"input": TEXTS, "model": "any"}
    answer = ask(vectors, body, "/v1/embeddings")
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    got = np.array([entry["embedding"] for entry in answer["data"]])
    assert np.allclose(got, expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 3 * 3
    packed = ask(vectors, {**body, "encoding_format": "base64"})["data"][1]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), got[1].astype("<f4"))
    assert np.allclose(ask(vectors, {"inputs": TEXTS}, "/embed"), expected, atol=1e-6)
    assert np.allclose(
        ask(vectors, {"inputs": TEXTS, "normalize": False}, "/embed"), vectors_alone, atol=1e-6
    )
    assert len(ask(vectors, {**body, "dimensions": 32})["data"]) == 3


def test_a_model_of_token_vectors_answers_the_apis_with_those_of_texts(vectors: Any) -> None:
    tokens = embedder.TokenFeatures(vectors.vectors.loaded)
    body = {"inputs": TEXTS[:2]}
    assert np.ndim(ask(tokens, {"inputs": TEXTS[0]})) == 3
    assert ask(tokens, body, "/embed") == ask(vectors, body, "/embed")


def test_similarities_are_those_of_the_vectors(vectors: Any) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    scores = ask(vectors, {"inputs": inputs}, "/similarity")
    first, *_ = units = np.array(ask(vectors, {"inputs": TEXTS}, "/embed"))
    assert np.allclose(scores, units @ first, atol=1e-5)
    assert ask(vectors, {"inputs": inputs}) == scores


def test_predictions_have_teis_shape(labels: Any) -> None:
    def vectors_alone(text: Any) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = ask(
            labels, {"inputs": [text], "parameters": {"top_k": None}}
        )[0]
        return answer

    def same(answer: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
        scores = [entry["score"] for entry in answer]
        names = [entry["label"] for entry in answer] == [entry["label"] for entry in expected]
        return names and scores == pytest.approx([entry["score"] for entry in expected], abs=1e-5)

    assert same(ask(labels, {"inputs": TEXTS[0]}, "/predict"), vectors_alone(TEXTS[0]))
    # A list of two texts is a pair; several sequences are lists of their own.
    pair = ask(labels, {"inputs": TEXTS[:2]}, "/predict")
    assert same(pair, vectors_alone(TEXTS[:2]))
    assert not same(pair, vectors_alone(TEXTS[0]))
    batch = ask(labels, {"inputs": [TEXTS[:2], [TEXTS[2]]]}, "/predict")
    assert same(batch[0], pair)
    assert same(batch[1], vectors_alone(TEXTS[2]))
    raw = ask(labels, {"inputs": TEXTS[0], "raw_scores": True}, "/predict")
    odds = np.exp([entry["score"] for entry in raw])
    assert np.allclose(
        odds / odds.sum(), [entry["score"] for entry in vectors_alone(TEXTS[0])], atol=1e-5
    )


def test_texts_are_ranked_as_the_pairs_are_scored(ranker: Any) -> None:
    body = {"query": "who", "texts": TEXTS}
    pairs = ask(ranker, {"inputs": [["who", text] for text in TEXTS]})
    order = sorted(range(3), key=lambda index: -pairs[index]["score"])
    answer = ask(ranker, {**body, "return_text": True}, "/rerank")
    assert [item["index"] for item in answer] == order
    for entry in answer:
        assert entry["text"] == TEXTS[entry["index"]]
        assert entry["score"] == pytest.approx(pairs[entry["index"]]["score"], abs=1e-6)
    raw = ask(ranker, {**body, "raw_scores": True}, "/rerank")
    assert 1 / (1 + np.exp(-raw[0]["score"])) == pytest.approx(answer[0]["score"], abs=1e-5)


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        (TEXTS[0], TEXTS[1], [(0, 1)]),
        (TEXTS[0], TEXTS[:2], [(0, 0), (0, 1)]),
        (TEXTS[:2], TEXTS[1:3], [(0, 1), (1, 2)]),
    ],
)
def test_scores_are_those_of_the_pairs(
    ranker: Any, one: Any, other: Any, pairs: list[tuple[int, int]]
) -> None:
    answer = ask(ranker, {"text_1": one, "text_2": other, "model": "any"}, "/score")
    expected = ask(ranker, {"inputs": [[TEXTS[a], TEXTS[b]] for a, b in pairs]})
    assert [entry["index"] for entry in answer["data"]] == list(range(len(pairs)))
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == pytest.approx([entry["score"] for entry in expected], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 3 * len(pairs)
    with pytest.raises(BadRequest, match="2 texts in text_1 and 3 in text_2"):
        ask(ranker, {"text_1": TEXTS[:2], "text_2": TEXTS[:3]}, "/v1/score")


def test_the_body_decides_only_where_it_is_plain(vectors: Any) -> None:
    def route(body: object) -> str:
        return request_reader.read(
            json.dumps(body).encode(), "application/json", "/invocations"
        ).route

    assert route({"input": "a", "model": "m"}) == "/v1/embeddings"
    assert route({"prompt": "a"}) == "/v1/completions"
    assert route({"inputs": "a", "parameters": {"prompt": "b"}}) == ""
    assert route({"inputs": 'a "messages" b'}) == ""
    with pytest.raises(BadRequest, match="different APIs"):
        route({"prompt": "a", "messages": []})
    with pytest.raises(UnsupportedContentType, match="text/csv"):
        request_reader.read(b"a", "text/csv", "/embed")
    with pytest.raises(BadRequest, match="not valid JSON"):
        request_reader.read(b'{"messages": NaN}', "application/json", "/invocations")


def test_each_task_shows_the_form_of_its_spec() -> None:
    for name, served in SERVED.items():
        load = resolve(served.load)
        task = getattr(load, "__self__", embedder.TokenFeatures)
        if name != "sentence-similarity":
            assert (task.served.form, task.served.routes) == (served.form, served.routes), name


def test_a_description_says_the_task_the_form_and_the_routes(
    vectors: Any, labels: Any, ranker: Any, tmp_path: Path
) -> None:
    environ = {"HF_MODEL_ID": "someone/some-model"}
    assert openai.served_name(environ) == "someone/some-model"
    assert openai.served_name({**environ, "AMPHORA_MODEL_NAME": "mine"}) == "mine"
    description_text = labels.describe()
    assert (description_text["form"], description_text["routes"]) == (
        "pair",
        ["/predict", "/tokenize"],
    )
    assert description_text["architecture"] == "BertForSequenceClassification"
    assert description_text["max_length"] == 48
    assert description_text["padding"] is False
    padded = classifier.Classifier.load(
        Origin(str(save("GPT2ForSequenceClassification", tmp_path)), {})
    )
    assert "padding" not in padded.describe()
    description_text = ranker.describe()
    assert description_text["form"] == "rank"
    assert "/rerank" in description_text["routes"]
    description_text = vectors.describe()
    assert description_text["form"] == "similarity"
    assert "/v1/embeddings" in description_text["routes"]
