"""The image's own handlers over HTTP, and models of the Hub. tests/recipe/inference compares answers with pipelines."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import http_server
from tests.support.paths import CODE
from tests.support.servers import IN_FLOAT32, Running
from tests.support.serving_kit import save
from tests.support.worker_front import load_runner

LABELS = {0: "neg", 1: "pos", 2: "mixed"}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    """The image's handlers over a tiny random classifier."""
    base = tmp_path_factory.mktemp("classifier")
    save("BertForSequenceClassification", base / "model", id2label=LABELS)
    with Running(base, {**preloaded, **IN_FLOAT32}) as running:
        yield running.ready()


def test_a_classifier_answers_cuts_long_texts_and_refuses_adapters_by_name(
    server: Running, tmp_path: Path
) -> None:
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
    line = 'amphora_model{engine="PyTorch",task="text-classification"} 1.0'
    assert line in server.http.get("/metrics").text.splitlines()
    # tests/amphora/serving/test_adapters.py has those of models that may have some.
    answer = server.http.post("/adapters", json={"name": "x", "src": str(tmp_path)})
    assert (answer.status_code, "takes no adapters" in answer.text) == (404, True)
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "x"}
    named = server.invoke({"inputs": "good"}, **header)
    assert (named.status_code, "no adapters" in named.text) == (404, True)
    assert named.json()["error"]["code"] == "model_not_found"


def test_a_bad_record_has_an_error_in_its_place(server: Running) -> None:

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
    (alone,) = server.invoke("good").json()
    assert entries[0] == {**alone, "score": pytest.approx(alone["score"], abs=1e-5)}
    assert ask('{"input\n').status_code == 400


REPOSITORY = "team/tiny"


@pytest.mark.heavy
def test_a_model_of_the_hub_is_fetched_in_its_revision_with_the_token(tmp_path: Path) -> None:
    commit = "0" * 40

    def hub(folder: Path, seen: list[tuple[str, str]]) -> type[http_server.Quiet]:
        """As much of the Hugging Face Hub as `from_pretrained` asks for: one repository's files.

        Args:
            seen: Gets the paths that were asked for, and the authorization they came with.
        """

        absent = {"X-Error-Code": "EntryNotFound"}

        class Handler(http_server.Quiet):
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
                        about = {"id": REPOSITORY, "sha": commit, "siblings": siblings}
                        body = json.dumps(about).encode()
                elif Path(path).name in files and re.match(
                    rf"/{REPOSITORY}/resolve/(v2|{commit})/", path
                ):
                    body = (folder / Path(path).name).read_bytes()
                headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
                self.reply(*(200, body, headers) if body else (404, body, {**headers, **absent}))

            do_HEAD = do_GET

        return Handler

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
            weights = f"/{REPOSITORY}/resolve/{commit}/model.safetensors"
            for path in (f"/api/models/{REPOSITORY}/revision/v2", weights):
                assert (path, f"Bearer {secret}") in seen
            assert secret not in server.log


@pytest.mark.heavy
def test_without_a_way_to_the_hub_the_load_fails_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODEL_ID", REPOSITORY)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        Exception, match=r"cannot be loaded from the.*pack the model into model.tar.gz"
    ):
        load_runner(tmp_path)
