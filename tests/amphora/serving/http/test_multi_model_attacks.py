"""Models that die, orders that cross each other, and clients that leave."""

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from amphora.serving.http import multi_model
from tests.support.servers import Running, fault, write_model
from tests.support.until import until

pytestmark = pytest.mark.heavy
ENVIRON = {"SAGEMAKER_MULTI_MODEL": "true"}
GATED = """
import json, time
from pathlib import Path
def model_fn(model_dir):
    folder = Path(model_dir)
    if (folder / "broken").exists():
        raise RuntimeError("broken")
    (folder / "at-load").touch()
    while not (folder / "load").exists():
        time.sleep(0.01)
    return folder.name
def transform_fn(model, body, content_type, accept): return json.dumps([model, json.loads(body)])
"""


def gated(folder: Path, opened: bool = True) -> str:
    url = write_model(folder, GATED)
    if opened:
        (folder / "load").touch()
    return url


def load(server: Running, name: str, url: str) -> int:
    order = {"model_name": name, "url": url}
    return server.http.post("/models", json=order).status_code


def test_a_model_whose_workers_cannot_start_again_is_unloaded(tmp_path: Path) -> None:
    with Running(tmp_path, ENVIRON) as server:
        server.ready()
        urls = {name: gated(tmp_path / "models" / name) for name in "ab"}
        for name, url in urls.items():
            assert load(server, name, url) == 200
        assert server.http.delete("/models/b").status_code == 200
        until(lambda: len(server.workers()) == 1)
        (tmp_path / "models" / "a" / "broken").touch()
        # The process with the model, and its fork.
        for process in set(server.pids()) - {server.process.pid}:
            os.kill(process, signal.SIGKILL)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.http.post, "/models/a/invoke", json=1)
            until(
                lambda: server.http.get("/models").json() == {"models": []}, 120, lambda: server.log
            )
            # What waited for it is answered at once.
            assert fault(waiting.result(20))[0] in (404, 500, 503)
        assert fault(server.http.post("/models/a/invoke", json=1)) == (404, "model_not_found")
        until(lambda: server.workers() == [])
        (tmp_path / "models" / "a" / "broken").unlink()
        assert load(server, "a", urls["a"]) == 200
        assert server.http.post("/models/a/invoke", json=1).json() == ["a", 1]
        assert server.stop() == 0


def test_memory_is_reserved_until_all_workers_have_loaded(tmp_path: Path) -> None:
    """Code that runs threads is not forked: each worker takes as much as the first."""
    code = GATED.replace("import json, time", "import json, threading, time").replace(
        "    return folder.name",
        """    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    (folder / "load").unlink()
    return folder.name""",
    )
    with Running(tmp_path, {**ENVIRON, "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}) as server:
        server.ready()
        urls = {}
        for name in ("two", "other"):
            urls[name] = write_model(tmp_path / name, code if name == "two" else GATED)
            (tmp_path / name / "load").touch()
            with (tmp_path / name / "weights").open("wb") as sparse:
                sparse.truncate(int(multi_model.free_memory() * 0.35))
        assert load(server, "two", urls["two"]) == 200
        until(lambda: len(server.workers()) == 2)
        order = {"model_name": "other", "url": urls["other"]}
        full = server.http.post("/models", json=order)
        assert fault(full) == (507, "out_of_memory")
        assert "MiB for models that are being loaded" in full.text
        (tmp_path / "two" / "load").touch()
        until(lambda: load(server, "other", urls["other"]) == 200, 60, lambda: server.log)


def test_a_stop_does_not_wait_for_a_model_that_loads(tmp_path: Path) -> None:
    with Running(tmp_path, ENVIRON) as server:
        server.ready()
        url = gated(tmp_path / "models" / "slow", opened=False)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(load, server, "slow", url)
            until((tmp_path / "models" / "slow" / "at-load").exists)
            assert server.stop() == 0


def test_one_of_many_orders_at_once_counts(tmp_path: Path) -> None:
    with Running(tmp_path, ENVIRON) as server, ThreadPoolExecutor(8) as threads:
        server.ready()
        url = gated(tmp_path / "models" / "a", opened=False)
        loads = [threads.submit(load, server, "a", url) for _ in range(8)]
        until(lambda: sum(one.done() for one in loads) == 7)
        assert fault(server.http.delete("/models/a")) == (404, "model_not_found")
        (tmp_path / "models" / "a" / "load").touch()
        assert sorted(one.result() for one in loads) == [200] + [409] * 7
        unloads = [threads.submit(server.http.delete, "/models/a") for _ in range(8)]
        assert sorted(one.result().status_code for one in unloads) == [200] + [404] * 7
        until(lambda: server.workers() == [])


def test_a_client_that_leaves_while_its_model_loads_leaves_a_model(tmp_path: Path) -> None:
    """SageMaker asks again, and learns that it is there."""
    with Running(tmp_path, ENVIRON) as server:
        server.ready()
        url = gated(tmp_path / "models" / "a", opened=False)
        body = json.dumps({"model_name": "a", "url": url}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /models HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            until((tmp_path / "models" / "a" / "at-load").exists)
        (tmp_path / "models" / "a" / "load").touch()
        until(lambda: server.http.get("/models/a").status_code == 200)
        assert load(server, "a", url) == 409
        assert server.http.post("/models/a/invoke", json=1).json() == ["a", 1]
        assert server.http.delete("/models/a").status_code == 200
        until(lambda: server.workers() == [])


def test_folders_that_cannot_be_read_are_404(tmp_path: Path) -> None:
    with Running(tmp_path, ENVIRON) as server:
        server.ready()
        for url in ("/" + "a" * 300, "/dev/null/x", "/proc/self/mem"):
            answer = server.http.post("/models", json={"model_name": "a", "url": url})
            assert fault(answer) == (404, "model_not_found"), (url, answer.text)
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        answer = server.http.post("/models", json={"model_name": "a", "url": str(loop)})
        assert fault(answer) == (404, "model_not_found")
        assert server.http.get("/models").json() == {"models": []}
