"""`push_to_hub`, against the part of a hub that a push of small files uses: what is pushed, and what a
failure costs."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recipe import arguments
from recipe.errors import HyperparameterError
from recipe.storage import hub as pushing
from tests.support import http_server
from tests.support.jobs import Job
from tests.support.words import write_reviews

TOKEN = "hf_planted0123456789planted"


NAME = "team/reviews"
ARGV = ["--push_to_hub", "True", "--hub_model_id", NAME]


class Hub(http_server.Quiet):
    """The requests of a push of small files, by what its class keeps."""

    protocol_version = "HTTP/1.1"
    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    private: ClassVar[dict[str, bool]] = {}
    refuses = ""
    """Paths that contain this are answered 403; empty: none."""
    address = ""

    def do_GET(self) -> None:
        status, value = self.answer(self.path.partition("?")[0], http_server.read_body(self))
        self.reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    do_POST = do_PUT = do_GET

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if self.refuses and self.refuses in path:
            return 403, {"error": "You have read access only."}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid user token."}
        url, files = f"{self.address}/{NAME}", self.repositories.get(NAME)
        if path == "/api/repos/create":
            if files is not None:
                return 409, {"error": "You already created this model repo", "url": url}
            values = json.loads(body)
            assert f"{values['organization']}/{values['name']}" == NAME
            self.repositories[NAME] = {".gitattributes": b""}
            self.private[NAME] = bool(
                values.get("private") or values.get("visibility") == "private"
            )
            return 200, {"url": url, "name": NAME}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if files is None or not path.startswith(f"/api/models/{NAME}"):
            return 404, {"error": f"no {path}"}
        if "/preupload/" in path:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{**file, **how} for file in json.loads(body)["files"]]}
        if "/tree/" in path:
            return 200, [
                {"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in files.items()
            ]
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            return 200, {"commitUrl": f"{url}/commit/{'0' * 40}", "commitOid": "0" * 40}
        return 200, {"sha": "0" * 40, "id": NAME, "siblings": []}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    served = type("Served", (Hub,), {"repositories": {}, "private": {}})
    with http_server.running(served) as port:
        served.address = f"http://127.0.0.1:{port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", served.address)
        yield served


def prepared(*more: str, **environ: str) -> pushing.Repository:
    given = arguments.parse([*ARGV, *more])
    token = given.hub_token or given.hf_token or environ.get("HF_TOKEN")
    return pushing.prepare(NAME, token, given.hub_private_repo is not False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Model\n")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def test_the_whole_folder_is_pushed_and_what_it_replaces_is_gone(
    hub: type[Hub], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = prepared("--hub_token", TOKEN)
    assert hub.private[NAME] and repository.name == NAME
    # An adapter of an earlier job would be loaded on top of these weights.
    files = hub.repositories[NAME]
    files |= {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old", "LICENSE": b"ours"}
    repository.push(model)
    written = {
        str(path.relative_to(model)): path.read_bytes()
        for path in model.rglob("*")
        if path.is_file()
    }
    assert {name: files[name] for name in written} == written
    assert set(files) == {*written, ".gitattributes", "LICENSE"}
    assert f"model pushed to {hub.address}/{NAME}" in capsys.readouterr()[0]


def test_a_failure_after_training_is_said_and_raises_nothing(
    hub: type[Hub], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = prepared(HF_TOKEN=TOKEN)
    hub.refuses = "/commit/"
    repository.push(model)
    output = capsys.readouterr()[0]
    assert f"warning: the model was not pushed to the hub ({NAME}): " in output and "403" in output
    assert f"saved in {model}" in output and f"hf upload {NAME} FOLDER" in output
    assert TOKEN not in output


def test_a_hub_that_does_not_end_is_not_waited_for(
    hub: type[Hub], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = prepared(HF_TOKEN=TOKEN)
    monkeypatch.setattr(pushing, "MOST_SECONDS", 0.1)
    over = threading.Event()
    monkeypatch.setattr(repository._api, "upload_folder", lambda **_: over.wait(20))
    repository.push(model)
    over.set()
    assert "was not pushed to the hub (team/reviews): not within 0.1 s." in capsys.readouterr()[0]


def test_a_public_repository_and_one_that_is_there(hub: type[Hub]) -> None:
    prepared("--hub_private_repo", "False", "--hf_token", TOKEN)
    assert not hub.private[NAME]
    assert prepared("--hub_token", TOKEN).name == NAME
    assert not hub.private[NAME], "what is there keeps its visibility"


@pytest.mark.parametrize(
    ("environ", "refuses", "says"),
    [
        ({}, "", "there is no token. Set hub_token"),
        (
            {"HF_TOKEN": "hf_somebody"},
            "",
            "cannot be pushed to: .*401.*the write access of the token",
        ),
        (
            {"HF_TOKEN": TOKEN},
            "create",
            "cannot be pushed to: .*403.*the write access of the token",
        ),
    ],
)
def test_what_would_fail_after_training_fails_before(
    hub: type[Hub], environ: dict[str, str], refuses: str, says: str
) -> None:
    hub.refuses = refuses
    with pytest.raises(HyperparameterError, match=f"hub_model_id.*{says}"):
        prepared(**environ)


def test_a_job_pushes_its_model(
    tmp_path: Path, tiny_model: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    channels = {"train": write_reviews(tmp_path / "in" / "train.csv", 40).parent}
    argv = (*ARGV, "--hub_token", TOKEN, "--model_id", str(tiny_model), "--max_steps", "2")
    job = Job(tmp_path, channels, argv)
    job.run_here()
    assert hub.repositories[NAME]["model.safetensors"] == job.files["model.safetensors"]
    assert TOKEN not in (job.model / "README.md").read_text() + capsys.readouterr().out
