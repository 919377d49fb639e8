"""The environment, read into settings; and what a worker is started with."""

from pathlib import Path

import pytest

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError
from amphora.serving import settings
from amphora.serving.pool import spawner


def read(devices: dict[str, int] | None = None, **environ: str) -> settings.ServerSettings:
    """Read the settings for accelerators of one kind, or none, and 8 CPUs."""
    kind, count = next(iter((devices or {"cpu": 0}).items()))
    detected = Devices(kind=kind, accelerators=count, cpus=8, efa=False, reason="test")
    return settings.read(Path("/ml"), environ, detected)


def test_defaults_are_the_contracts(tmp_path: Path) -> None:
    detected = read()
    assert (detected.port, detected.max_body, detected.timeout) == (8080, 25 * 1024**2, 60)
    assert (detected.batch_size, detected.batch_tokens, detected.queue_limit) == (32, 16_384, 512)
    assert (detected.startup_timeout, detected.max_delay) == (480, 0.02)
    assert detected.model_dir == Path("/ml/model")
    assert detected.code_dir == Path("/ml/model/code")
    assert detected.default_accept == "application/json"
    assert not detected.is_multi_model
    assert read(SAGEMAKER_SUBMIT_DIRECTORY=str(tmp_path)).code_dir == tmp_path


def test_adapters_that_no_request_could_name_fail_the_start(tmp_path: Path) -> None:
    def start(**environ: str) -> settings.ServerSettings:
        devices = Devices(efa=False, reason="test", cpus=1)
        return settings.read(tmp_path, environ, devices)

    folder = tmp_path / "model" / "adapters"
    for name in ("fr", "de", ".cache"):
        (folder / name).mkdir(parents=True)
    (folder / "README.md").touch()
    (folder / "fr" / "adapter_config.json").touch()
    assert start(AMPHORA_ADAPTERS="0").adapters == 0
    (folder / "de" / "checkpoint-9").mkdir()
    (folder / "de" / "checkpoint-9" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"is 64, and .*de/, which has no adapter"):
        start()
    (folder / "de" / "adapter_config.json").touch()
    assert start().adapters == 64
    with pytest.raises(ConfigError, match=r"AMPHORA_ADAPTERS is 1, .* holds 2 adapters. Raise it"):
        start(AMPHORA_ADAPTERS="1")
    with pytest.raises(ConfigError, match="AMPHORA_ADAPTERS is 2, and SAGEMAKER_MULTI_MODEL is"):
        start(AMPHORA_ADAPTERS="2", SAGEMAKER_MULTI_MODEL="true")
    with pytest.raises(ConfigError, match=r"AMPHORA_ADAPTERS is 'fr'. Give a whole number"):
        start(AMPHORA_ADAPTERS="fr")
    with pytest.raises(ConfigError, match="holds 'de', which is the name of the base"):
        start(AMPHORA_MODEL_NAME="de")


@pytest.mark.parametrize(
    ("devices", "environ", "workers", "threads"),
    [
        ({}, {}, 8, 1),
        ({}, {"SAGEMAKER_MODEL_SERVER_WORKERS": "2"}, 2, 4),
        ({}, {"SAGEMAKER_MODEL_SERVER_WORKERS": "16"}, 16, 1),
        ({}, {"SAGEMAKER_TS_MAX_WORKERS": "3"}, 3, 2),
        ({}, {"SAGEMAKER_TS_MIN_WORKERS": "12"}, 12, 1),
        ({}, {"SAGEMAKER_TS_MIN_WORKERS": "4", "SAGEMAKER_TS_MAX_WORKERS": "2"}, 2, 4),
        ({}, {"SAGEMAKER_MODEL_SERVER_WORKERS": "2", "OMP_NUM_THREADS": "3"}, 2, 3),
        ({"cuda": 4}, {}, 4, 2),
        ({"cuda": 4}, {"SAGEMAKER_MODEL_SERVER_WORKERS": "1"}, 1, 8),
        ({"neuron": 2}, {}, 2, 4),
    ],
)
def test_workers_and_their_threads(
    devices: dict[str, int], environ: dict[str, str], workers: int, threads: int
) -> None:
    detected = read(devices, **environ)
    assert (detected.workers, detected.threads) == (workers, threads)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "5"}, 5),
        ({"SAGEMAKER_TS_RESPONSE_TIMEOUT": "7"}, 7),
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT": "9"}, 9),
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT": "9", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "5"}, 5),
    ],
)
def test_the_time_out_by_any_of_its_names(environ: dict[str, str], seconds: float) -> None:
    assert read(**environ).timeout == seconds


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, True),
        ({"SAGEMAKER_BIND_TO_PORT": "9000", "SAGEMAKER_BASE_DIR": "/x"}, True),
        ({"SAGEMAKER_TRAINING_MODULE": "", "SAGEMAKER_REGION": ""}, True),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "1", "SAGEMAKER_PROGRAM": "x.py"}, True),
        ({"SAGEMAKER_PROGRAM": "x.py", "SAGEMAKER_REGION": "eu-west-1"}, False),
        ({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/x"}, False),
        ({"AMPHORA_UI": "0"}, False),
        ({"SAGEMAKER_REGION": "eu-west-1", "AMPHORA_UI": "1"}, True),
    ],
)
def test_the_page_is_for_laptops(environ: dict[str, str], shown: bool) -> None:
    assert read(**environ).shows_page is shown


def environment(devices: dict[str, int], index: int, **environ: str) -> dict[str, str]:
    share = not devices
    return spawner.worker_environment(read(devices, **environ), environ, index, share)


def test_each_worker_sees_its_own_device_and_has_one_thread_until_it_is_forked() -> None:
    assert environment({"cuda": 2}, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment({"cuda": 2}, 2)["CUDA_VISIBLE_DEVICES"] == "0", "more workers than devices"
    given = environment({"cuda": 2}, 1, CUDA_VISIBLE_DEVICES="4,6")
    assert given["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment({"neuron": 2}, 1)["NEURON_RT_VISIBLE_CORES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment({}, 0)
    assert environment({}, 0)["OMP_NUM_THREADS"] == "1"
    assert environment({"cuda": 2}, 0)["OMP_NUM_THREADS"] == "4"
    assert environment({}, 0, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "1"
    assert environment({"cuda": 2}, 0, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"
