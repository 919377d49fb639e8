"""SageMaker's requests for sharding, compilation and smddp, and the hub's token."""

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from recipe.arguments import parse
from recipe.errors import HyperparameterError, ModelError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import distribution
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from tests.support import http_server
from tests.support.jobs import QUICK, Job, write
from tests.support.words import reviews, write_reviews

COMPILER = {
    "sagemaker_training_compiler_enabled": True,
    "sagemaker_training_compiler_debug_mode": False,
}
SMDDP = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_distributed_dataparallel_enabled":true}'}


def device(processes: int, kind: str = "cpu") -> Device:
    return Device(kind=kind, bf16=False, reason="", processes=processes, threads=None)


def choose(given: Hyperparameters, on: Device, environ: dict[str, str]) -> Distribution:
    backend = given.passed.get("torch_compile_backend")
    return distribution.choose(given.mp_parameters, given.compile, backend, on, environ)


def write_data(folder: Path, count: int) -> dict[str, Path]:
    return {
        "train": write(folder, [{"text": text, "label": label} for text, label in reviews(count)])
    }


@pytest.mark.parametrize("written", ["partitions=2,ddp=True", '{"partitions": 2, "ddp": true}'])
def test_mp_parameters_ask_for_fsdp2(written: str) -> None:
    hyperparameters = parse(["--mp_parameters", written])
    chosen = choose(hyperparameters, device(2), {})
    assert chosen.arguments == {"fsdp": True, "fsdp_config": {"version": 2}}
    alone = choose(hyperparameters, device(1), {})
    assert alone.arguments == {}
    assert alone.notes == ("mp_parameters (partitions, ddp) has no effect with one process",)


def test_fsdp_of_one_process_shards_nothing(
    tmp_path: Path, tiny_model: Path, preloaded: dict[str, str]
) -> None:
    channels = write_data(tmp_path / "in", 20)
    arguments = ["--model_id", str(tiny_model), "--max_steps", "2", "--fsdp", "full_shard"]
    job = Job(tmp_path, channels, arguments, {**preloaded, **QUICK}).finish()
    assert "fsdp has no effect with one process" in job.log


@pytest.mark.parametrize("written", ["", "{}"])
def test_empty_mp_parameters_ask_for_nothing(written: str) -> None:
    hyperparameters = parse(["--mp_parameters", written])
    assert choose(hyperparameters, device(2), {}) == Distribution()


@pytest.mark.parametrize("written", ["yes", "{partitions}"])
def test_unreadable_mp_parameters_are_named(written: str) -> None:
    with pytest.raises(HyperparameterError, match="mp_parameters has value"):
        choose(parse(["--mp_parameters", written]), device(2), {})


@pytest.mark.heavy
def test_training_compiler_keys_compile(tmp_path: Path, tiny_model: Path) -> None:
    channels = write_data(tmp_path / "in", 20)
    arguments = ["--model_id", str(tiny_model), "--max_steps", "2", "--batch_size", "4"]
    # Needs no C++ compiler and no time; what is tested is that the model goes through Dynamo.
    arguments += ["--torch_compile_backend", "eager"]
    parameters = {"SM_FRAMEWORK_PARAMS": json.dumps(COMPILER), "TORCH_LOGS": "dynamo"}
    done = Job(tmp_path, channels, arguments, QUICK).finish(**parameters)
    assert "SageMaker Training Compiler is set; batch size and learning rate" in done.log
    assert "start tracing" in done.errors
    assert not [name for name in done.weights if "_orig_mod" in name]


def test_compilation_is_off_unless_asked_for() -> None:
    off = {"SM_FRAMEWORK_PARAMS": '{"sagemaker_training_compiler_enabled": "false"}'}
    assert choose(Hyperparameters(), device(1), off).arguments == {}
    requested = choose(parse(["--compile"]), device(1, "cuda"), {})
    assert requested.arguments == {"torch_compile": True}


def test_training_compiler_keys_do_not_compile_where_it_does_not_pay() -> None:
    keys = {"SM_FRAMEWORK_PARAMS": json.dumps(COMPILER)}
    on_cpu = choose(Hyperparameters(), device(1), keys)
    assert on_cpu.arguments == {}
    assert "it is slower on a CPU; compile=True turns it on" in on_cpu.notes[0]
    on_gpu = choose(Hyperparameters(), device(1, "cuda"), keys)
    assert on_gpu.arguments == {"torch_compile": True}


def test_compilation_is_off_on_a_cpu_without_a_compiler() -> None:
    without = choose(parse(["--compile"]), device(1), {"CXX": "no-such-compiler"})
    assert without.arguments == {}
    assert "needs no-such-compiler" in without.notes[0]


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.long
def test_compiled_and_packed_trains_to_the_same_losses(
    tmp_path: Path, still_model: Path, preloaded: Mapping[str, str]
) -> None:
    channels = write_data(tmp_path / "in", 60)
    arguments = ["--model_id", str(still_model), "--max_steps", "8", "--batch_size", "8"]
    arguments += ["--lr", "1e-2", "--bf16", "False", "--logging_steps", "1", "--max_length", "32"]
    losses = {}
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        job = Job(tmp_path / name, channels, arguments, {**preloaded, **QUICK})
        job.finish(*more, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
        assert "samples packed into" in job.log
        matches = re.findall(r"'(?:eval_)?loss': ([^,}]+)", job.log)
        losses[name] = [float(loss) for loss in matches]
    assert list((tmp_path / "inductor").rglob("*.so")), "nothing was compiled"
    assert len(losses["plain"]) == 8 + 2  # steps, and an evaluation after each epoch
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-4)


def test_torch_xla_neither_shards_nor_takes_torch_compile() -> None:
    hyperparameters = parse(["--mp_parameters", "partitions=2", "--compile"])
    chosen = choose(hyperparameters, device(2, "xla"), {})
    assert chosen.arguments == {}
    assert chosen.notes == (
        "mp_parameters (partitions) has no effect on torch-xla: no weights are sharded",
        "torch.compile is off: torch-xla compiles without it",
    )


def test_native_neuron_compiles_by_its_own_backend_and_not_what_is_sharded() -> None:
    compiled = choose(parse(["--compile"]), device(2, "neuron"), {})
    assert compiled.arguments == {"torch_compile": True, "torch_compile_backend": "neuron"}
    sharded = choose(parse(["--mp_parameters", "a=2"]), device(2, "neuron"), {})
    assert sharded.arguments["fsdp"]
    with pytest.raises(HyperparameterError, match="only with SimpleFSDP"):
        both = parse(["--mp_parameters", "a=2", "--compile"])
        choose(both, device(2, "neuron"), {})


def test_smddp_is_used_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = choose(Hyperparameters(), device(8, "cuda"), SMDDP)
    assert (without.arguments, len(without.notes)) == ({}, 1)
    assert "nccl backend" in without.notes[0]
    package = tmp_path / "smdistributed" / "dataparallel"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    actual = choose(Hyperparameters(), device(8, "cuda"), SMDDP)
    assert actual.arguments == {"ddp_backend": "smddp"}
    for name in [name for name in sys.modules if name.startswith("smdistributed")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_token_reaches_the_hub_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    credentials: set[str | None] = set()

    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            credentials.add(self.headers.get("Authorization"))
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")  # which is not asked for again
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:
            pass

    channels = write_data(tmp_path / "in", 20)
    arguments = ["--model_id", "some/model", "--hf_token", "hf_planted"]
    with http_server.running(Refuse) as port:
        url = f"http://127.0.0.1:{port}"
        files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        # Without it, the library would ask huggingface.co, again and again.
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ModelError, match="'some/model' cannot be loaded") as refused:
            Job(tmp_path, channels, arguments).run_here()
    assert "Bearer hf_planted" in credentials
    assert "hf_planted" not in str(refused.value) + "".join(capfd.readouterr())


def test_a_secret_is_in_no_message() -> None:
    assert "hf_planted" not in repr(parse(["--huggingface_token", "hf_planted"]))
    for argv in (["--hf_token", "a", "--hf_token", "hf_planted"], ["--my_token", "hf_planted"]):
        with pytest.raises(HyperparameterError) as caught:
            parse(argv)
        assert "hf_planted" not in str(caught.value)


class Download(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download needs, whose weights end half-way."""

    folder: Path

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        match = re.fullmatch(r"/some/model/resolve/\w+/(.+)", self.path)
        file = self.folder / match[1] if match else None
        if file is None or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            is_weights = file.name == "model.safetensors"
            self.wfile.write(content[: len(content) // 2] if is_weights else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.heavy
@pytest.mark.long
def test_a_broken_download_is_an_error_that_says_so(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Download, "folder", tiny_model, raising=False)
    data = write_reviews(tmp_path / "in" / "train.csv", 40).parent
    argv = ("--model_id", "some/model", "--max_steps", "2", "--batch_size", "8")
    job = Job(tmp_path, {"train": data}, argv)
    with http_server.running(Download) as port:
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "cache")}
        assert job.run(HF_HUB_OFFLINE="0", **where).codes == {1}
    last = job.errors.strip().splitlines()[-1]
    for words in ("ModelError", "some/model", "peer closed connection", "Start the job again"):
        assert words in last
