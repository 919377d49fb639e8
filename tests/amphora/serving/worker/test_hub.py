"""HF_MODEL_ID with a Hub on this machine, and without a way to any."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import CODE
from tests.support.servers import Running
from tests.support.serving_kit import save

pytestmark = pytest.mark.heavy
REPOSITORY = "team/tiny"
COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """As much of the Hugging Face Hub as `from_pretrained` asks for: one repository's files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.seen: list[tuple[str, str]] = []
        """Paths that were asked for, and the authorization they came with."""

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        self.server.seen.append((self.path, self.headers.get("authorization", "")))
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}"):
            files = sorted(entry.name for entry in self.server.folder.iterdir())
            listed: Any = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
            if "/tree/" not in path:
                siblings = [{"rfilename": name} for name in files]
                listed = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(listed).encode(), with_body)
            return
        file = self.server.folder / Path(path).name
        if (
            path.startswith((f"/{REPOSITORY}/resolve/v2/", f"/{REPOSITORY}/resolve/{COMMIT}/"))
            and file.is_file()
        ):
            self._send(200, file.read_bytes(), with_body)
        else:
            self._send(404, b"", with_body)

    def _send(self, status: int, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `seen` is the log."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    save("BertForSequenceClassification", tmp_path / "hub")
    with Hub(tmp_path / "hub") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def serve(base: Path, endpoint: str, **environ: str) -> Running:
    """A server whose model folder is empty."""
    (base / "model").mkdir()
    settings = {"AMPHORA_CODE_DIR": str(CODE), "HF_ENDPOINT": endpoint, "HF_HOME": str(base / "hf")}
    return Running(base, {**settings, "HF_MODEL_ID": REPOSITORY, **environ})


def test_a_model_of_the_hub_is_fetched_in_its_revision_with_the_token(
    hub: Hub, tmp_path: Path
) -> None:
    secret = "hf_" + "s" * 30
    with serve(tmp_path, hub.url, HF_MODEL_REVISION="v2", HF_API_TOKEN=secret) as server:
        (answer,) = server.ready().invoke("the film was good").json()
        assert answer["label"] in ("LABEL_0", "LABEL_1")
        weights = f"/{REPOSITORY}/resolve/{COMMIT}/model.safetensors"
        for path in (f"/api/models/{REPOSITORY}/revision/v2", weights):
            assert (path, f"Bearer {secret}") in hub.seen
        assert secret not in server.log


@pytest.mark.long
def test_without_a_way_to_the_hub_the_server_ends_with_the_remedy(tmp_path: Path) -> None:
    with serve(tmp_path, "http://127.0.0.1:9", HF_HUB_ETAG_TIMEOUT="1") as server:
        assert server.process.wait(240) == 2
        last = server.log.splitlines()[-1]
        assert f"The model '{REPOSITORY}' cannot be read" in last
        assert "pack the model into model.tar.gz" in last
