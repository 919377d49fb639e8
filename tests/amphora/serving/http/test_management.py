"""Who may manage models and adapters, and by which requests."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.servers import NAMED, RECIPE, Running, Start, fault, write_model


@pytest.fixture(scope="module")
def server(shared: Start, preloaded: Mapping[str, str]) -> Running:
    return shared(**{**preloaded, **RECIPE, "SAGEMAKER_MULTI_MODEL": "true"}).ready()


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
@pytest.mark.parametrize("path", ["/models", "/adapters"])
def test_orders_are_json(shared: Start, path: str, kind: str) -> None:
    """A web page sends these kinds to any address without asking it first."""
    server = shared(SAGEMAKER_MULTI_MODEL="true" if path == "/models" else "false").ready()
    order = json.dumps({"model_name": "x", "url": "/x", "name": "x", "src": "/x"})
    headers = {"content-type": kind} if kind else {}
    answer = server.http.post(path, content=order, headers=headers)
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


@pytest.mark.parametrize("name", ["a\nforged line", "", "x" * 1025, "\x1b[2J", "a\u2028b"])
def test_names_are_printable_and_bounded(server: Running, name: str) -> None:
    answer = server.http.post("/models", json={"model_name": name, "url": "/nowhere"})
    assert fault(answer) == (400, "bad_request")
    assert "forged line\n" not in server.log
    answer = server.http.post("/models", json={"model_name": "x", "url": f"/a{name * 4}\n"})
    assert fault(answer) == (400, "bad_request")


@pytest.mark.parametrize("name", ["limit", "next_page_token"])
@pytest.mark.parametrize("value", ["9" * 5000, "9" * 10, "-1", "x", "1.5"])
def test_numbers_of_a_page_are_bounded(server: Running, name: str, value: str) -> None:
    answer = server.http.get(f"/models?{name}={value}")
    assert fault(answer) == (400, "bad_request")
    assert len(answer.content) < 1000


def test_an_answer_does_not_list_a_folder(server: Running) -> None:
    answer = server.http.post("/models", json={"model_name": "x", "url": "/etc"}, timeout=240)
    assert fault(answer) == (500, "model_not_loaded")
    assert not [name for name in ("passwd", "adduser", ".pwd.lock", "apt") if name in answer.text]
    assert "/etc contains " in server.log


def test_outside_a_container_only_this_machine_is_let_in(start: Start, tmp_path: Path) -> None:
    server = start().ready()
    other = socket.gethostbyname(socket.gethostname())
    for address in {other, "127.0.0.2"} - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((address, server.port), timeout=5):
            pass
    server.stop()
    everywhere = start(AMPHORA_BIND="0.0.0.0").ready()
    with socket.create_connection(("127.0.0.2", everywhere.port), timeout=5):
        pass


def test_the_images_listen_on_every_interface() -> None:
    root = Path(__file__).parents[4]
    for name in ("Dockerfile.gpu", "Dockerfile.neuron"):
        assert "AMPHORA_BIND=0.0.0.0" in (root / name).read_text()
