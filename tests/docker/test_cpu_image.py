"""The CPU image, run as SageMaker runs it: train, then serve, then a request."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.docker.conftest import Docker, Job

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

GOOD, BAD = "a lovely day", "a dreadful day"


def save_tiny_model(folder: Path) -> None:
    """A real, untrained BERT of 32 units, with a vocabulary of the data's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "lovely", "dreadful", "day", "evening"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def trained(job: Job) -> subprocess.CompletedProcess[str]:
    save_tiny_model(job.data("model"))
    rows = [f"{text},{label}" for text, label in ((GOOD, 1), (BAD, 0))] * 40
    (job.data("train") / "train.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (job.data("test") / "test.csv").write_text("\n".join(["text,label", *rows[:20]]) + "\n")
    job.configure(
        ["train", "test", "model"],
        model_name_or_path="/opt/ml/input/data/model",
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        seed=1,
    )
    return job.train()


def test_amphora_is_the_entrypoint_and_nothing_of_the_bases_is_left(
    docker: Docker, cpu_image: str, torch_base: str
) -> None:
    def config(image: str) -> dict[str, object]:
        described: dict[str, object] = json.loads(docker("inspect", image).stdout)[0]["Config"]
        return described

    ours, theirs = config(cpu_image), config(torch_base)
    assert (ours["Entrypoint"], ours["Cmd"]) == (["amphora"], ["train"])
    assert theirs["Entrypoint"] != ours["Entrypoint"]
    assert "SAGEMAKER_TRAINING_MODULE=" in ours["Env"]
    assert ours["Healthcheck"] == {"Test": ["NONE"]}
    labels = ours["Labels"]
    assert labels["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    assert labels["org.opencontainers.image.base.name"] == torch_base


def test_the_bases_torch_is_kept(docker: Docker, cpu_image: str, torch_base: str) -> None:
    ask = (
        "from importlib.metadata import distribution as of; "
        "print(of('torch').version, of('torch').locate_file('torch'))"
    )
    versions = [
        docker("run", "--rm", "--entrypoint", "python3", image, "-c", ask).stdout
        for image in (torch_base, cpu_image)
    ]
    assert versions[0] == versions[1]
    assert versions[0].startswith("2.13.0")


def test_a_base_whose_torch_moved_fails_the_build(docker: Docker, cpu_image: str) -> None:
    script = Path(__file__).parents[2] / "container" / "locks" / "base.sh"
    command = "echo torch==1.0 > /tmp/base.txt; sh /tmp/base.sh check /tmp/base.txt"
    checked = docker("run", "--rm", "--entrypoint", "sh", "-v", f"{script}:/tmp/base.sh:ro",
                     cpu_image, "-c", command, check=False)  # fmt: skip
    assert checked.returncode == 1
    assert "packages were replaced: torch==1.0" in checked.stdout


def test_train_leaves_a_model_and_no_failure(
    trained: subprocess.CompletedProcess[str], job: Job
) -> None:
    assert trained.returncode == 0, trained.stdout
    assert {"model.safetensors", "config.json"} <= {
        p.name for p in (job.folder / "model").iterdir()
    }
    assert not (job.folder / "output" / "failure").exists()


@pytest.fixture
def endpoint(
    trained: subprocess.CompletedProcess[str], job: Job, docker: Docker
) -> Iterator[tuple[str, str]]:
    """A serving container on a free port: its address, and its id."""
    assert trained.returncode == 0, trained.stdout
    model = f"{job.folder / 'model'}:/opt/ml/model:ro"
    started = docker("run", "-d", "-p", "127.0.0.1::8080", "-v", model, job.image, "serve")
    container = started.stdout.split()[-1]
    port = docker("port", container, "8080").stdout.rsplit(":", 1)[1].strip()
    yield f"http://127.0.0.1:{port}", container
    docker("rm", "-f", container)


def wait_until_healthy(address: str, container: str, docker: Docker) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/ping", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    pytest.fail(docker("logs", container).stdout)


def test_serve_answers_what_it_learnt_and_stops_when_told(
    endpoint: tuple[str, str], docker: Docker
) -> None:
    address, container = endpoint
    wait_until_healthy(address, container, docker)
    answer = httpx.post(f"{address}/invocations", json={"inputs": [GOOD, BAD]}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()) == 2
    assert ["1" in str(one["label"]) for one in answer.json()] == [True, False]
    docker("stop", "-t", "30", container)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", container).stdout.strip() == "0"


def test_a_failing_run_says_why_and_exits_with_an_error(
    docker: Docker, cpu_image: str, trained: subprocess.CompletedProcess[str], job: Job,
    tmp_path: Path,
) -> None:  # fmt: skip
    failing = Job(docker, cpu_image, tmp_path)
    (failing.data("train") / "train.csv").write_text(f"text,label\n{GOOD},1\n{BAD},0\n")
    model = ["-v", f"{job.data('model')}:/opt/base-model:ro"]
    failing.configure(["train"], model_name_or_path="/opt/base-model", label_column="absent")
    done = failing.train(*model)
    assert done.returncode != 0
    assert "absent" in (tmp_path / "output" / "failure").read_text()
    assert not any((tmp_path / "model").iterdir())
