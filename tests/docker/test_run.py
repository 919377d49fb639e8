"""`docker run`, as users and SageMaker call it: mounts, stops, exit codes, failure files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.docker.conftest import (
    ONE_THREAD,
    Docker,
    Job,
    container,
    endpoint_of,
    wait_until_healthy,
)
from tests.docker.material import GOOD, LEARNS
from tests.support.until import until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

MakeJob = Callable[[], Job]


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
    trained = docker("run", "--rm", "--network", "none", *whole, job.image, "train", check=False)
    assert trained.returncode == 0, trained.stdout
    assert not job.failure
    with endpoint_of(docker, job.image, *whole) as (address, name):
        wait_until_healthy(address, name, docker)
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


def test_a_wrong_job_ends_with_2_before_anything_starts(make_job: MakeJob) -> None:
    job = script_mode(make_job(), "there.py", "print('never')")
    (job.folder / "code" / "there.py").rename(job.folder / "code" / "elsewhere.py")
    returned, logs = run_script(job)
    assert returned == 2, logs
    assert "there.py" in job.failure
    assert "never" not in logs


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
