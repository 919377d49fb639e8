"""Adapters of encoders by name: trained by the recipe, loaded in running servers, told apart in a
batch, and loaded by all workers or by none."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers

from tests.support.adapter_kit import adapter
from tests.support.jobs import Job, write
from tests.support.servers import IN_FLOAT32, Running, fault
from tests.support.serving_kit import Handlers, assert_close
from tests.support.tiny_models import save
from tests.support.until import until

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
pytestmark = pytest.mark.heavy
TEXTS = ("the film was good", "anna said paris was bad", "who was in paris", "good film again .")
CLASSES: Any = {"auto": transformers.AutoModelForSequenceClassification, "task_type": "SEQ_CLS",
                "target_modules": ["query", "value"]}  # fmt: skip


def order(server: Running, name: str, folder: Path) -> httpx.Response:
    return server.http.post("/adapters", json={"name": name, "src": str(folder)})


def ask(server: Running, name: str, text: str) -> Any:
    answer = server.invoke({"inputs": text}, **({HEADER: name} if name else {}))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[tuple[Path, dict[str, Path]]]:
    """A base, and adapters of it that jobs have trained: of texts by two labels and by three, and
    of tokens."""
    folder = tmp_path_factory.mktemp("trained")
    base = save("BertForMaskedLM", folder / "model")
    rows: dict[str, list[dict[str, Any]]] = {
        "two": [{"text": text, "label": "ab"[n % 2]} for n, text in enumerate(TEXTS * 2)],
        "three": [{"text": text, "label": "xyz"[n % 3]} for n, text in enumerate(TEXTS * 3)],
        "tags": [
            {"tokens": text.split(), "ner_tags": ["PER" if w == "anna" else "O" for w in text.split()]}
            for text in TEXTS * 2
        ],
    }  # fmt: skip
    models = {}
    for name, some in rows.items():
        channel = write(folder / "data" / name, some)
        argv = ("--model_name_or_path", str(base), "--use_cpu", "True", "--lora_r", "4",
                "--lora_save", "adapter", "--lr", "0.05", "--epochs", "2", "--max_length",
                "16" if name == "two" else "32", "--eval_strategy", "no")  # fmt: skip
        models[name] = Job(folder / name, {"train": channel}, argv, preloaded).finish().model
        assert (models[name] / "proof.json").is_file()
    yield folder, models


def test_trained_adapters_answer_by_name_as_their_merged_models(
    trained: tuple[Path, dict[str, Path]],
) -> None:
    folder, models = trained
    # Alone, each is merged into its base.
    plain = {name: Handlers(models[name]) for name in models}
    long = " ".join(TEXTS * 3)
    texts = [*TEXTS, long]
    environ = IN_FLOAT32 | {"AMPHORA_ADAPTERS": "3", "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}
    with Running(folder, environ) as server:
        server.ready().wait_for_workers(2)
        named = {"inputs": "the [MASK] was good"}
        before = server.invoke(named).json()
        for name, source in models.items():
            assert fault(server.invoke(named, **{HEADER: name})) == (404, "model_not_found")
            assert order(server, name, source).status_code == 200
            # All workers know it once the order is answered.
            answers = [ask(server, name, "good") for _ in range(6)]
            assert answers == answers[:1] * 6
        requests = [(name, text) for text in texts for name in models] * 4
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda request: ask(server, *request), requests))
        for (name, text), answer in zip(requests, answers, strict=True):
            assert_close(answer, plain[name].ask({"inputs": text}), 1e-4, f"{name}: {text}")
        assert server.metric("amphora_batch_size_count") < len(requests)  # some were merged
        assert {answer[0]["label"] for answer in answers[1::3]} <= {*"xyz"}
        assert_close(server.invoke(named).json(), before, 1e-5)
        listed = [entry["id"] for entry in server.http.get("/v1/models").json()["data"]]
        assert listed == ["model", *sorted(models)]
        # In API bodies `model` names it, in each of several lines, too.
        body = {"inputs": TEXTS[0]}
        answer = server.http.post("/predict", json=body, headers={HEADER: "three"})
        assert [entry["label"] for entry in answer.json()] and len(answer.json()) == 3
        embedded = server.http.post("/v1/embeddings", json={"input": "good", "model": "two"})
        assert embedded.status_code in (400, 404), embedded.text
        # The name is taken; there is no room; then there is.
        assert fault(order(server, "two", models["two"])) == (409, "adapter_already_loaded")
        assert fault(order(server, "four", models["two"])) == (507, "too_many_adapters")
        assert server.http.delete("/adapters/two").status_code == 200
        assert fault(server.invoke(named, **{HEADER: "two"})) == (404, "model_not_found")
        assert fault(server.http.delete("/adapters/two")) == (404, "adapter_not_found")
        body = {"lora_name": "four", "lora_path": str(models["two"])}
        assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert_close(ask(server, "four", long), plain["two"].ask({"inputs": long}), 1e-4)
        unload = server.http.post("/v1/unload_lora_adapter", json={"lora_name": "four"})
        assert (unload.status_code, len(server.http.get("/adapters").json()["adapters"])) == (
            200,
            2,
        )


def test_the_proof_of_an_adapter_refuses_another_base(
    trained: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    _, models = trained
    save("BertForMaskedLM", tmp_path / "model", seed=1)
    with Running(tmp_path, {**IN_FLOAT32, "AMPHORA_ADAPTERS": "3"}) as server:
        server.ready()
        answer = order(server, "two", models["two"])
        assert fault(answer) == (400, "adapter_not_loaded")
        assert "does not answer as its proof.json says" in answer.text
        assert str(models["two"]) in answer.text
        for folder, status in ((tmp_path / "none", 404), (Path("adapters/two"), 400)):
            assert order(server, "two", folder).status_code == status
        shutil.copytree(models["two"], tmp_path / "linked")
        weights = tmp_path / "linked" / "adapter_model.safetensors"
        weights.unlink()
        weights.symlink_to(models["two"] / weights.name)
        linked = order(server, "two", tmp_path / "linked")
        assert (linked.status_code, "outside" in linked.text) == (400, True)
        assert server.http.get("/adapters").json() == {"adapters": []}


def test_a_worker_that_ends_gets_the_adapters_again_or_the_load_is_refused(
    tmp_path: Path,
) -> None:
    base = save("BertModel", tmp_path / "model")
    folders = {name: adapter(base, tmp_path / name, seed=seed, **CLASSES)
               for seed, name in enumerate("abc")}  # fmt: skip
    # One is in the model's folder.
    shutil.copytree(folders["a"], base / "adapters" / "a")
    environ = {**IN_FLOAT32, "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}
    with Running(tmp_path, environ) as server:
        server.ready().wait_for_workers(2)
        assert order(server, "b", folders["b"]).status_code == 200
        first = {name: ask(server, name, "good") for name in "ab"}
        assert first["a"] != first["b"]
        # The copies count, not what has become of the folder.
        shutil.rmtree(folders["b"])
        for worker in server.workers():
            os.kill(worker, signal.SIGKILL)
        until(lambda: server.metric("amphora_worker_restarts_total") == 2, what=lambda: server.log)
        server.wait_for_workers(2)
        assert server.ping() == 200
        for name, answer in first.items():
            assert [ask(server, name, "good") for _ in range(6)] == [answer] * 6
        # A worker dies while it should load one: no worker has it.
        stopped, _ = server.workers()
        os.kill(stopped, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(order(server, "c", folders["c"])))
        thread.start()
        until(lambda: "adapter: c " in server.log, what=lambda: server.log)
        os.kill(stopped, signal.SIGKILL)
        thread.join()
        assert (fault(answers[0]), "died" in answers[0].text) == ((400, "adapter_not_loaded"), True)
        server.wait_for_workers(2)
        refusals = [server.invoke({"inputs": "good"}, **{HEADER: "c"}) for _ in range(6)]
        assert {fault(refusal) for refusal in refusals} == {(404, "model_not_found")}
        assert order(server, "c", folders["c"]).status_code == 200
        assert ask(server, "c", "good")
        assert server.stop() == 0


def test_a_broken_adapter_of_the_model_ends_the_start(tmp_path: Path) -> None:
    base = save("BertModel", tmp_path / "model")
    folder = adapter(base, base / "adapters" / "fr", seed=1, **CLASSES)
    settings = folder / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"use_dora": True}))
    with Running(tmp_path, IN_FLOAT32) as server:
        assert server.process.wait(240) != 0
        assert "The adapter 'fr' cannot be loaded: " in server.log
        assert "use_dora" in server.log


def test_a_model_that_generates_takes_no_adapters(tmp_path: Path) -> None:
    save("LlamaForCausalLM", tmp_path / "model")
    with Running(tmp_path, {**IN_FLOAT32, "AMPHORA_ADAPTERS": "2"}) as server:
        assert server.process.wait(240) != 0
        assert "encoders take adapters by name" in server.log
