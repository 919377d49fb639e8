"""HF_MODEL_ID with a Hub on this machine, and without a way to any."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.support import http_server
from tests.support.paths import CODE
from tests.support.servers import Running
from tests.support.serving_kit import save
from tests.support.worker_front import load_runner

pytestmark = pytest.mark.heavy
REPOSITORY = "team/tiny"
COMMIT = "0" * 40


def hub(folder: Path, seen: list[tuple[str, str]]) -> type[BaseHTTPRequestHandler]:
    """As much of the Hugging Face Hub as `from_pretrained` asks for: one repository's files.

    Args:
        seen: Gets the paths that were asked for, and the authorization they came with.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("authorization", "")))
            path = self.path.partition("?")[0]
            files = sorted(entry.name for entry in folder.iterdir())
            body = b""
            if path.startswith(f"/api/models/{REPOSITORY}"):
                if "/tree/" in path:
                    kept = [{"type": "file", "path": n, "size": 1, "oid": "0"} for n in files]
                    body = json.dumps(kept).encode()
                else:
                    siblings = [{"rfilename": name} for name in files]
                    about = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
                    body = json.dumps(about).encode()
            elif Path(path).name in files and re.match(
                rf"/{REPOSITORY}/resolve/(v2|{COMMIT})/", path
            ):
                body = (folder / Path(path).name).read_bytes()
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            if not body:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: `seen` is the log."""

    return Handler


def test_a_model_of_the_hub_is_fetched_in_its_revision_with_the_token(tmp_path: Path) -> None:
    secret, seen = "hf_" + "s" * 30, list[tuple[str, str]]()
    save("BertForSequenceClassification", tmp_path / "hub")
    (tmp_path / "model").mkdir()
    with http_server.running(hub(tmp_path / "hub", seen)) as port:
        environ = {
            "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "hf"),
            "HF_MODEL_ID": REPOSITORY, "HF_MODEL_REVISION": "v2", "HF_API_TOKEN": secret,
        }  # fmt: skip
        with Running(tmp_path, {"AMPHORA_CODE_DIR": str(CODE), **environ}) as server:
            (answer,) = server.ready().invoke("the film was good").json()
            assert answer["label"] in ("LABEL_0", "LABEL_1")
            weights = f"/{REPOSITORY}/resolve/{COMMIT}/model.safetensors"
            for path in (f"/api/models/{REPOSITORY}/revision/v2", weights):
                assert (path, f"Bearer {secret}") in seen
            assert secret not in server.log


def test_without_a_way_to_the_hub_the_load_fails_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", REPOSITORY)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match=r"cannot be read.*pack the model into model.tar.gz"):
        load_runner(tmp_path)
