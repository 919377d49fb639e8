"""The multi-model API: who may manage models and how, and which model answers a request."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from amphora.serving.http import multi_model
from amphora.serving.http.multi_model import TARGET_MODEL
from tests.support.servers import RECIPE, Running, Start, fault, write_code, write_model
from tests.support.until import until

NAMED = """
import json
def model_fn(model_dir): return model_dir.rsplit("/", 1)[1]
def transform_fn(model, body, content_type, accept): return json.dumps([model, json.loads(body)])
"""


@pytest.fixture(scope="module")
def server(shared: Start, preloaded: Mapping[str, str]) -> Running:
    """A server of models that tests load, and unload again."""
    environ = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_PROGRAM": "inference.py"}
    return shared(**{**preloaded, **RECIPE, **environ}).ready()


def test_models_come_and_go(server: Running, tmp_path: Path) -> None:
    http = server.http
    for name in ("a", "b", "c/d.tar.gz"):
        url = write_model(tmp_path / "models" / name[0], NAMED)
        assert http.post("/models", json={"model_name": name, "url": url}).status_code == 200
    again = http.post("/models", json={"model_name": "a", "url": url})
    assert fault(again) == (409, "model_already_loaded")
    page = http.get("/models?limit=2").json()
    assert [model["modelName"] for model in page["models"]] == ["a", "b"]
    rest = http.get(f"/models?limit=2&next_page_token={page['nextPageToken']}").json()
    assert rest == {"models": [{"modelName": "c/d.tar.gz", "modelUrl": url}]}
    assert http.get("/models/a").json()["modelUrl"].endswith("/models/a")
    assert http.post("/models/b/invoke", json=5).json() == ["b", 5]
    assert http.post("/models/c/d.tar.gz/invoke", json=6).json() == ["c", 6]
    assert http.delete("/models/b").status_code == 200
    for missing in (http.get("/models/b"), http.delete("/models/b"), http.post("/models/b/invoke")):
        assert fault(missing) == (404, "model_not_found")
    assert http.post("/models/a/invoke", json=7).json() == ["a", 7]
    for name in ("a", "c/d.tar.gz"):
        assert http.delete(f"/models/{name}").status_code == 200
    assert "amphora_queue_age_seconds 0.0" in http.get("/metrics").text


def test_a_model_that_cannot_be_loaded_is_an_error_which_lists_no_folder_and_the_others_live(
    server: Running, tmp_path: Path
) -> None:
    http = server.http
    good = write_model(tmp_path / "models" / "good", NAMED)
    bad = write_model(tmp_path / "models" / "bad", "import not_there")
    assert http.post("/models", json={"model_name": "good", "url": good}).status_code == 200
    answer = http.post("/models", json={"model_name": "bad", "url": bad})
    assert fault(answer) == (500, "model_not_loaded")
    assert "not_there" in answer.json()["error"]["message"]
    nowhere = http.post("/models", json={"model_name": "n", "url": str(tmp_path / "n")})
    assert nowhere.status_code == 404
    (tmp_path / "bare").mkdir()
    bare = http.post("/models", json={"model_name": "bare", "url": str(tmp_path / "bare")})
    assert bare.status_code == 500
    assert "Model bare has no code/inference.py: the image's handlers serve it." in server.log
    assert http.post("/models/good/invoke", json=1).json() == ["good", 1]
    assert server.ping() == 200
    assert http.delete("/models/good").status_code == 200
    answer = server.http.post("/models", json={"model_name": "x", "url": "/etc"}, timeout=240)
    assert fault(answer) == (500, "model_not_loaded")
    assert not [name for name in ("passwd", "adduser", ".pwd.lock", "apt") if name in answer.text]
    assert "/etc contains " in server.log


FULL, FAILED = (507, "out_of_memory"), (500, "model_not_loaded")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ("raise OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB.')", FULL),
        ('raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory")', FULL),
        ("raise MemoryError", FULL),
        ("import os; os.kill(os.getpid(), 9)", FULL),
        ("raise RuntimeError('CUDA error: device-side assert triggered')", FAILED),
        ("raise KeyError('memory')", FAILED),
        ("return 'of 4 TB'", FULL),
    ],
)
def test_a_model_for_which_there_is_no_room_is_507(
    server: Running, tmp_path: Path, loads: str, expected: tuple[int, str]
) -> None:
    code = f"class OutOfMemoryError(RuntimeError): ...\ndef model_fn(d): {loads}\n"
    url = write_model(tmp_path / "huge", code + NAMED.split("\n", 3)[3])
    if "TB" in loads:
        with (tmp_path / "huge" / "weights").open("wb") as sparse:
            sparse.truncate(1 << 42)
    answer = server.http.post("/models", json={"model_name": "huge", "url": url})
    assert fault(answer) == expected


GATED = """
import json, time
from pathlib import Path
def gate(folder, name):
    (Path(folder) / f"at-{name}").touch()
    while not (Path(folder) / name).exists():
        time.sleep(0.01)
def model_fn(model_dir):
    gate(model_dir, "load")
    return model_dir
def transform_fn(model, body, content_type, accept):
    gate(model, "answer")
    return json.dumps([model.rsplit("/", 1)[1], json.loads(body)])
"""


def test_a_load_delays_nothing_else(server: Running, tmp_path: Path) -> None:
    http, slow = server.http, tmp_path / "slow"
    url = write_model(slow, GATED)
    (slow / "answer").touch()
    quick = write_model(tmp_path / "quick", NAMED)
    huge = write_model(tmp_path / "huge", NAMED)
    with (tmp_path / "huge" / "weights").open("wb") as sparse:
        sparse.truncate(1 << 42)
    with ThreadPoolExecutor(1) as threads:
        try:
            load = threads.submit(http.post, "/models", json={"model_name": "slow", "url": url})
            until((slow / "at-load").exists)
            order = {"model_name": "quick", "url": quick}
            assert http.post("/models", json=order).status_code == 200
            assert http.post("/models/quick/invoke", json=5).json() == ["quick", 5]
            for name in ("quick", "slow"):
                again = http.post("/models", json={"model_name": name, "url": quick})
                assert fault(again) == (409, "model_already_loaded")
            full = http.post("/models", json={"model_name": "huge", "url": huge})
            assert fault(full) == FULL and "Least recently used: quick (" in full.text
            assert http.delete("/models/quick").status_code == 200
            for name in ("quick", "slow"):
                assert fault(http.post(f"/models/{name}/invoke", json=5))[0] == 404
                assert fault(http.delete(f"/models/{name}"))[0] == 404
            assert "still being loaded" in http.get("/models/slow").text
            assert server.ping() == 200 and not load.done()
        finally:
            (slow / "load").touch()
        assert load.result().status_code == 200
    assert http.post("/models/slow/invoke", json=5).json() == ["slow", 5]
    assert http.delete("/models/slow").status_code == 200


def test_memory_is_reserved_before_a_model_is_loaded(server: Running, tmp_path: Path) -> None:
    """Two models that have room one after the other, but not together."""
    http = server.http
    urls = {name: write_model(tmp_path / name, GATED) for name in ("first", "second")}
    for name in urls:
        with (tmp_path / name / "weights").open("wb") as sparse:
            sparse.truncate(int(multi_model.free_memory() / 2))
    (tmp_path / "second" / "load").touch()
    with ThreadPoolExecutor(1) as threads:
        try:
            order = {"model_name": "first", "url": urls["first"]}
            load = threads.submit(http.post, "/models", json=order)
            until((tmp_path / "first" / "at-load").exists)
            order = {"model_name": "second", "url": urls["second"]}
            full = http.post("/models", json=order)
            assert fault(full) == FULL and "MiB for models that are being loaded" in full.text
        finally:
            (tmp_path / "first" / "load").touch()
        assert load.result().status_code == 200
    assert http.post("/models", json=order).status_code == 200
    for name in urls:
        assert http.delete(f"/models/{name}").status_code == 200


def test_a_model_answers_its_last_requests_before_it_is_unloaded(
    server: Running, tmp_path: Path
) -> None:
    http, folder = server.http, tmp_path / "leaving"
    url = write_model(folder, GATED)
    (folder / "load").touch()
    assert http.post("/models", json={"model_name": "leaving", "url": url}).status_code == 200
    with ThreadPoolExecutor(2) as threads:
        try:
            answer = threads.submit(http.post, "/models/leaving/invoke", json=5)
            until((folder / "at-answer").exists)
            unload = threads.submit(http.delete, "/models/leaving")
            until(lambda: http.get("/models/leaving").status_code == 404)
            assert not unload.done() and not answer.done()
        finally:
            (folder / "answer").touch()
        assert answer.result().json() == ["leaving", 5]
        assert unload.result().status_code == 200


def test_a_refused_method_is_answered_by_all_that_its_path_has(
    shared: Start, server: Running
) -> None:
    single = shared(AMPHORA_UI="1").ready()
    allowed = {
        "/": "GET, HEAD, POST", "/adapters": "GET, HEAD, POST", "/invocations": "POST",
        "/ping": "GET, HEAD, POST", "/models": "GET, HEAD, POST", "/models/a": "DELETE, GET, HEAD",
        "/models/a/invoke": "POST",
    }  # fmt: skip
    for path, methods in allowed.items():
        running = server if path.startswith("/models") else single
        for method in ("PUT", "OPTIONS"):
            answer = running.http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods), path


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
@pytest.mark.parametrize("path", ["/models", "/adapters"])
def test_orders_are_json(server: Running, shared: Start, path: str, kind: str) -> None:
    """A web page sends these kinds to any address without asking it first."""
    chosen = server if path == "/models" else shared().ready()
    order = json.dumps({"model_name": "x", "url": "/x", "name": "x", "src": "/x"})
    headers = {"content-type": kind} if kind else {}
    answer = chosen.http.post(path, content=order, headers=headers)
    assert fault(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://evil.example:{port}",
        "null",
        "http://localhost:1",
        "http://[",
    ],
)
def test_pages_of_other_sites_manage_nothing(server: Running, origin: str) -> None:
    local = origin.replace("{port}", str(server.port))
    # By DNS, a site may claim this address: then its name is the host's, too.
    host = local.rpartition("/")[2] if "evil" in local else f"localhost:{server.port}"
    headers = {"origin": local, "host": host}
    order = {"model_name": "x", "url": "/nowhere"}
    assert fault(server.http.post("/models", json=order, headers=headers)) == (
        403,
        "foreign_origin",
    )
    assert fault(server.http.delete("/models/x", headers=headers)) == (403, "foreign_origin")
    assert fault(server.http.delete("/models/x")) == (404, "model_not_found")


def test_a_page_of_the_server_itself_may(server: Running, tmp_path: Path) -> None:
    url = write_model(tmp_path / "own", NAMED)
    origin = {"origin": f"http://127.0.0.1:{server.port}"}
    order = {"model_name": "own", "url": url}
    assert server.http.post("/models", json=order, headers=origin).status_code == 200
    assert server.http.delete("/models/own", headers=origin).status_code == 200


@pytest.mark.parametrize("name", ["limit", "next_page_token"])
@pytest.mark.parametrize("value", ["9" * 5000, "9" * 10, "-1", "x", "1.5"])
def test_numbers_of_a_page_are_bounded(server: Running, name: str, value: str) -> None:
    answer = server.http.get(f"/models?{name}={value}")
    assert fault(answer) == (400, "bad_request")
    assert len(answer.content) < 1000


SEVERAL = """
import json
def model_fn(model_dir): return model_dir.rsplit("/", 1)[1]
def describe_fn(model_dir, model):
    return {"model": "hidden", "task": "echo", "routes": ["/v1/completions", "/embed"]}
def transform_fn(model, body, content_type, accept, context):
    order = json.loads(body)
    if context.path == "/v1/completions":
        choice = {"text": model, "index": 0, "finish_reason": "stop"}
        answer = {"id": "x", "object": "text_completion", "created": 0, "model": order["model"]}
        return json.dumps({**answer, "choices": [choice]})
    return json.dumps([model, order])
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of two models that answer clients' routes, and of one that does not."""
    folder = tmp_path_factory.mktemp("several")
    with Running(folder, {"SAGEMAKER_MULTI_MODEL": "true"}) as server:
        server.ready()
        for name, code in (("first", SEVERAL), ("b/second", SEVERAL), ("plain", NAMED)):
            url = write_model(folder / "models" / name.rpartition("/")[2], code)
            order = {"model_name": name, "url": url}
            server.http.post("/models", json=order).raise_for_status()
        yield server


def test_openais_model_chooses_one_of_several(several: Running) -> None:
    url = f"http://127.0.0.1:{several.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["b/second", "first", "plain"]
        assert client.models.retrieve("first").id == "first"
        for name, text in (("first", "first"), ("b/second", "second")):
            answer = client.completions.create(model=name, prompt="x")
            assert (answer.choices[0].text, answer.model) == (text, name)
        for name in ("other", "hidden", "First"):
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model=name, prompt="x")
            error: Any = caught.value.body
            assert error["code"] == "model_not_found"
            assert (error["type"], error["param"]) == ("not_found_error", None)
            assert f"Model {name!r} is not loaded" in error["message"]
        with pytest.raises(openai.NotFoundError, match="does not answer /v1/completions"):
            client.completions.create(model="plain", prompt="x")
        with pytest.raises(openai.NotFoundError, match="There is no model 'x'"):
            client.models.retrieve("x")
        chosen = client.with_options(default_headers={TARGET_MODEL: "first"})
        answer = chosen.completions.create(model="any", prompt="x")
        assert answer.choices[0].text == "first"


@pytest.mark.parametrize("body", [b"{}", b'{"model": ""}', b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_request_that_names_no_model_is_never_answered_by_any_of_several(
    several: Running, body: bytes
) -> None:
    for path in ("/v1/completions", "/embed"):
        refused = several.http.post(path, content=body)
        assert refused.status_code == 400
        assert "Several models are loaded" in refused.text
        assert "b/second, first, plain" in refused.text


def test_the_header_names_one_of_several_models_on_every_route(several: Running) -> None:
    to_first = {TARGET_MODEL: "first"}
    answer = several.http.post("/embed", json={"inputs": "x"}, headers=to_first)
    assert answer.json() == ["first", {"inputs": "x"}]
    lost = several.http.post("/embed", json={"inputs": "x"}, headers={TARGET_MODEL: "other"})
    assert (lost.status_code, lost.json()["error_type"]) == (404, "Validation")
    assert several.http.get("/info").status_code == 400
    assert several.http.get("/info?model=other").status_code == 404
    reply = several.http.get("/info", params={"model": "b/second"})
    assert reply.status_code == 200 and (info := reply.json())["max_input_length"] is None
    assert (info["model_id"], info["task"]) == ("b/second", "echo")
    assert several.http.post(info["invocations"], json=5).json() == ["second", 5]
    assert several.http.get("/info", headers=to_first).json()["model_id"] == "first"
    for name, expected in (("first", "first"), ("b/second", "second")):
        headers = {TARGET_MODEL: name}
        for path in ("/invocations", "/", "/embed"):
            assert several.http.post(path, json=5, headers=headers).json() == [expected, 5], path
    for path in ("/invocations", "/", "/embed"):
        assert several.http.post(path, json=5).status_code == 400
        assert several.http.post(path, json=5, headers={TARGET_MODEL: "x"}).status_code == 404


UNPRINTABLE = ["a\nforged line", "x" * 1025, "\x1b[2J", "a\u2028b"]


@pytest.mark.parametrize(
    "order",
    [
        *({"model_name": name, "url": "/tmp"} for name in ("", " ", 5, *UNPRINTABLE)),
        *({"model_name": "a", "url": url} for url in ("", ".", None)),
        *({"model_name": "x", "url": f"/a{name * 4}\n"} for name in ("", *UNPRINTABLE)),
        {"model_name": "a"},
        [],
    ],
)
def test_an_order_needs_a_name_and_an_absolute_folder_printable_and_bounded(
    server: Running, order: Any
) -> None:
    assert fault(server.http.post("/models", json=order)) == (400, "bad_request")
    assert server.http.get("/models").json()["models"] == []
    assert "forged line\n" not in server.log


def test_the_only_loaded_model_answers_without_a_name(server: Running, tmp_path: Path) -> None:
    nothing = server.http.post("/embed", json={"inputs": "x"})
    assert (nothing.status_code, nothing.json()["error_type"]) == (503, "Overloaded")
    assert server.http.get("/v1/models").json()["data"] == []
    url = write_model(tmp_path / "models" / "one", SEVERAL)
    server.http.post("/models", json={"model_name": "one", "url": url}).raise_for_status()
    assert server.http.post("/embed", json=1).json() == ["one", 1]
    assert server.http.get("/info").json()["model_id"] == "one"
    lost = server.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert lost.status_code == 404
    assert server.http.delete("/models/one").status_code == 200


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "9000", "memory.current": "8000", "memory.stat": "inactive_file 500\nactive_file 300\nfile_mapped 100"}, 1700),
        (
            {
                "memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "8000",
                "memory/memory.stat": "cache 9\ntotal_inactive_file 500\ntotal_active_file 300\ntotal_mapped_file 900",
            },
            1000,
        ),
        ({"memory.max": "max", "memory.current": "8000", "memory.stat": ""}, 0),
    ],
)  # fmt: skip
def test_free_memory_is_within_the_limit_of_a_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int
) -> None:
    """Of version 2, of version 1, and none; what is free on demand counts as free."""
    write_code(tmp_path, files)
    folders = {"/sys/fs/cgroup": tmp_path}
    monkeypatch.setattr(multi_model, "Path", lambda path: folders.get(path, Path(path)))
    assert multi_model.free_memory() == free or (not free and multi_model.free_memory() > 1e6)
