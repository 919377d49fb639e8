"""LoRA adapters loaded and unloaded over HTTP, beside the same adapters merged into their base."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.adapter_kit import adapter, merged
from tests.support.paths import CODE
from tests.support.servers import Running
from tests.support.serving_kit import save

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
GREEDY = {"inputs": "the film was", "parameters": {"max_new_tokens": 8, "do_sample": False}}
ENVIRON = {"AMPHORA_CODE_DIR": str(CODE), "AMPHORA_DTYPE": "float32"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("LlamaForCausalLM", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four of them, by name."""
    from transformers import AutoModelForCausalLM

    settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter(base, root / name, AutoModelForCausalLM, seed, **settings)
        for seed, name in enumerate(["one", "two", "three", "four"])
    }


@pytest.fixture(scope="module")
def expected(
    base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What each answers to `GREEDY`, merged into its base; '' stands for the base."""
    from recipe.inference import registry
    from recipe.inference.apis import reading

    texts = {}
    for name in ("", *adapters):
        root = tmp_path_factory.mktemp("merged")
        folder = merged(base, adapters[name], root / "model") if name else base
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AMPHORA_DTYPE", "float32")
            task = registry.load(str(folder), {})
        request = reading.read(json.dumps(GREEDY).encode(), "application/json", "/invocations")
        (answer,) = task.predict([request])
        texts[name] = (answer() if callable(answer) else answer)[0][0]["generated_text"]
    assert len(set(texts.values())) == 5
    return texts


@pytest.fixture(scope="module")
def server(
    base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Two workers; `one` lies in the model's folder, three may be loaded at a time."""
    root = tmp_path_factory.mktemp("server")
    shutil.copytree(base, root / "model")
    shutil.copytree(adapters["one"], root / "model" / "adapters" / "one")
    environ = {**ENVIRON, "AMPHORA_ADAPTERS": "3", "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}
    running = Running(root, environ)
    try:
        yield running.ready(120)
    finally:
        running.close()


def text_of(server: Running, name: str = "") -> str:
    answer = server.invoke(GREEDY, **({HEADER: name} if name else {}))
    assert answer.status_code == 200, answer.text
    return str(answer.json()[0]["generated_text"])


def test_each_adapter_answers_as_merged_whoever_names_it(
    server: Running, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    assert text_of(server, "one") == expected["one"]
    order = {"name": "two", "src": str(adapters["two"]), "preload": True, "pin": False}
    answer = server.http.post("/adapters", json=order)
    assert (answer.status_code, answer.json()) == (200, {"status": "Adapter two registered"})
    # Of two workers at least one has not loaded it before.
    for _ in range(6):
        assert text_of(server, "two") == expected["two"]
        assert text_of(server) == expected[""]
    shown = server.http.get("/adapters").json()["adapters"]
    assert [entry["name"] for entry in shown] == ["one", "two"]
    models = server.http.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == ["model", "one", "two"]

    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"prompt": GREEDY["inputs"], "max_tokens": 8, "temperature": 0}
        for name in ("one", "two", "model"):
            written = client.completions.create(model=name, **asked)
            own = expected["" if name == "model" else name]
            assert GREEDY["inputs"] + written.choices[0].text == own
            assert written.model == name
        with pytest.raises(openai.NotFoundError, match="There is no model 'three'"):
            client.completions.create(model="three", **asked)
    assert server.http.delete("/adapters/two").status_code == 200
    assert server.invoke(GREEDY, **{HEADER: "two"}).status_code == 404
    assert text_of(server, "one") == expected["one"]


def test_what_cannot_be_loaded_is_refused_and_forgotten(
    server: Running, adapters: dict[str, Path], expected: dict[str, str], tmp_path: Path
) -> None:
    def post(**order: Any) -> tuple[int, str]:
        answer = server.http.post("/adapters", json=order)
        return answer.status_code, answer.text

    assert post(name="x")[0] == 400
    assert post(name="x", src=str(tmp_path))[0] == 404
    assert post(name="one", src=str(adapters["two"]))[0] == 409
    assert post(name="model", src=str(adapters["two"]))[0] == 409
    broken = tmp_path / "broken"
    shutil.copytree(adapters["two"], broken)
    settings = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**settings, "r": 3}))
    status, text = post(name="broken", src=str(broken))
    assert status == 400 and "cannot be served on" in text and str(broken) in text
    assert [entry["name"] for entry in server.http.get("/adapters").json()["adapters"]] == ["one"]
    for name in ("two", "three"):
        assert post(name=name, src=str(adapters[name]))[0] == 200
    status, text = post(name="four", src=str(adapters["four"]))
    assert status == 507 and "AMPHORA_ADAPTERS" in text
    assert text_of(server, "three") == expected["three"]
    for name in ("two", "three"):
        assert server.http.delete(f"/adapters/{name}").status_code == 200
    assert server.http.delete("/adapters/three").status_code == 404


def test_adapters_come_and_go_under_load_and_no_answer_is_anothers(
    server: Running, adapters: dict[str, Path], expected: dict[str, str]
) -> None:
    wrong: list[Any] = []
    stop = threading.Event()

    def client(name: str) -> None:
        while not stop.is_set():
            answer = server.invoke(GREEDY, **({HEADER: name} if name else {}))
            is_gone = answer.status_code == 404 and name in ("two", "three")
            if not is_gone and answer.json()[0]["generated_text"] != expected[name]:
                wrong.append((name, answer.text))

    names = ("", "one", "two", "three")
    threads = [threading.Thread(target=client, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for _ in range(4):
        for name in ("two", "three"):
            order = {"name": name, "src": str(adapters[name])}
            assert server.http.post("/adapters", json=order).status_code == 200
        for name in ("two", "three"):
            assert server.http.delete(f"/adapters/{name}").status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_without_room_for_adapters_says_so(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "model")
    running = Running(tmp_path, ENVIRON).ready(120)
    try:
        answer = running.http.post("/adapters", json={"name": "x", "src": str(adapters["one"])})
        assert answer.status_code == 404
        assert "AMPHORA_ADAPTERS" in answer.text
        named = running.invoke(GREEDY, **{HEADER: "x"})
        assert named.status_code == 404
        assert "takes no adapters" in named.text
    finally:
        running.close()


def test_the_multi_model_api_gives_adapters_of_one_base_one_pool(
    base: Path,
    adapters: dict[str, Path],
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    environ = {**ENVIRON, "SAGEMAKER_MULTI_MODEL": "true", "AMPHORA_ADAPTERS": "8"}
    running = Running(tmp_path, environ).ready(60)
    try:
        for name in ("one", "two"):
            order = {"model_name": name, "url": str(adapters[name])}
            answer = running.http.post("/models", json=order, timeout=120)
            assert answer.status_code == 200, answer.text
        running.wait_for_workers(1)
        for name in ("one", "two", "one"):
            answer = running.http.post(f"/models/{name}/invoke", json=GREEDY)
            assert answer.json()[0]["generated_text"] == expected[name]
        written = running.http.post(
            "/v1/completions", json={"model": "two", "prompt": "the", "max_tokens": 2}
        )
        assert written.json()["model"] == "two"
        assert running.http.delete("/models/one").status_code == 200
        assert running.http.post("/models/one/invoke", json=GREEDY).status_code == 404
        answer = running.http.post("/models/two/invoke", json=GREEDY)
        assert answer.json()[0]["generated_text"] == expected["two"]
        assert running.http.delete("/models/two").status_code == 200
        assert not running.workers() or running.workers() == [running.process.pid]
    finally:
        running.close()
