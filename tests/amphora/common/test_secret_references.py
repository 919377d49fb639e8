"""Tokens that the environment names by the ARN of a secret, on a stand-in for AWS Secrets Manager."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from amphora.common import logs, secret_references
from amphora.common.errors import ConfigError
from tests.support import http_server
from tests.support.job_tree import Tree
from tests.support.package_indexes import AWS
from tests.support.servers import Running, write_model

TOKEN = "hf_" + "abcdefgh" * 4
ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:amphora/"
SECRETS = {
    "hf-token": f"{TOKEN}\n",
    "both": json.dumps({"hub": TOKEN, "wandb": "w1234567"}),
    "empty": " ",
}


class SecretsManager(http_server.Quiet):
    """Answers GetSecretValue for the secrets above, by their ARN without the key."""

    def do_POST(self) -> None:
        assert self.headers["X-Amz-Target"] == "secretsmanager.GetSecretValue"
        name = json.loads(http_server.read_body(self))["SecretId"].removeprefix(ARN)
        if name in SECRETS:
            self.reply(200, json.dumps({"SecretString": SECRETS[name]}).encode())
        else:
            kind = "AccessDeniedException" if name == "others" else "ResourceNotFoundException"
            self.reply(400, json.dumps({"__type": kind, "message": "no"}).encode())


@pytest.fixture(scope="module")
def manager() -> Iterator[dict[str, str]]:
    with http_server.running(SecretsManager) as port:
        yield {**AWS, "AWS_ENDPOINT_URL_SECRETS_MANAGER": f"http://127.0.0.1:{port}"}


@pytest.fixture
def client_settings(manager: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in manager.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("client_settings")
def test_a_reference_becomes_the_value_and_is_masked() -> None:
    environ = {
        "HF_TOKEN": f"{ARN}hf-token",
        "WANDB_API_KEY": f" {ARN}both:wandb::",
        "MLFLOW_TRACKING_TOKEN": "as-given",
        "DB_PASSWORD": f"{ARN}hf-token",
    }
    values = secret_references.read_references(environ)
    assert values == {"HF_TOKEN": TOKEN, "WANDB_API_KEY": "w1234567"}
    assert "w1234567" not in logs.mask("the key w1234567 is wrong")


@pytest.mark.usefixtures("client_settings")
def test_all_references_that_cannot_be_read_are_named() -> None:
    environ = {
        "HF_TOKEN": f"{ARN}both",
        "HF_API_TOKEN": f"{ARN}both:hup",
        "HUGGING_FACE_HUB_TOKEN": "arn:aws:secretsmanager:eu-west-1:secret:token",
        "WANDB_API_KEY": f"{ARN}others",
        "MLFLOW_TRACKING_TOKEN": f"{ARN}empty",
    }
    with pytest.raises(ConfigError) as error:
        secret_references.read_references(environ)
    for text in (
        "HF_TOKEN: the secret amphora/both in eu-west-1 is JSON with the keys hub, wandb. Append :KEY",
        "HF_API_TOKEN: the secret amphora/both in eu-west-1 has no key hup.",
        "HUGGING_FACE_HUB_TOKEN is not the ARN of a secret. Give arn:aws:secretsmanager:REGION",
        "WANDB_API_KEY: the secret amphora/others in eu-west-1 cannot be read:",
        "AccessDeniedException",
        "needs secretsmanager:GetSecretValue",
        "MLFLOW_TRACKING_TOKEN: the secret amphora/empty in eu-west-1 has no text.",
    ):
        assert text in str(error.value)
    assert TOKEN not in str(error.value)


def test_a_script_finds_the_token_and_no_log_shows_it(
    scripted: Tree, manager: dict[str, str]
) -> None:
    tree = scripted.script("import os\nprint(os.environ['HF_TOKEN'], len(os.environ['HF_TOKEN']))")
    done = tree.train(**manager, HF_TOKEN=f"{ARN}hf-token")
    assert done.returncode == 0, done.stderr
    assert f" {len(TOKEN)}\n" in done.stdout
    assert TOKEN not in done.stdout + done.stderr
    refused = tree.train(**manager, HF_TOKEN=f"{ARN}absent")
    assert refused.returncode == 2 and tree.failure
    assert tree.failure.startswith("ConfigError: HF_TOKEN: the secret amphora/absent in eu-west-1")


@pytest.mark.heavy
def test_handlers_find_the_token(tmp_path: Path, manager: dict[str, str]) -> None:
    code = """
        import os

        def model_fn(model_dir):
            return os.environ["HF_TOKEN"]

        def predict_fn(data, model):
            return len(model)
    """
    write_model(tmp_path / "model", code)
    with Running(tmp_path, {**manager, "HF_TOKEN": f"{ARN}hf-token"}) as server:
        assert server.ready().answer({"inputs": "a"}) == len(TOKEN)


@pytest.mark.heavy
def test_doctor_names_a_secret_that_cannot_be_read(scripted: Tree, manager: dict[str, str]) -> None:
    scripted.script("print()")
    code, findings = scripted.doctor(**manager, HF_TOKEN=f"{ARN}others")
    assert code == 1
    assert "the secret amphora/others" in findings["environment"][0]["detail"]
