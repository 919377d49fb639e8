"""Requests for sharding and compilation, and the hub's token."""

import hashlib
import re
import shutil
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from recipe.arguments import parse
from recipe.errors import HyperparameterError, ModelError
from recipe.runtime import distribution
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from tests.support import http_server
from tests.support.jobs import QUICK, Job, write
from tests.support.words import reviews, write_reviews


def device(processes: int, kind: str = "cpu") -> Device:
    return Device(kind=kind, bf16=False, reason="", processes=processes, threads=None)


def choose(on: Device, *argv: str) -> Distribution:
    given = parse(argv)
    return distribution.choose(given.passed, given.compile, on)


def write_data(folder: Path, count: int) -> dict[str, Path]:
    return {
        "train": write(folder, [{"text": text, "label": label} for text, label in reviews(count)])
    }


@pytest.mark.parametrize(
    "argv",
    [("--mp_parameters", "partitions=2,ddp=True"), ("--mp_parameters", '{"partitions": 2}'),
     ("--fsdp", "True"), ("--fsdp", "full_shard")],
)  # fmt: skip
def test_sharding_is_by_fsdp2(argv: tuple[str, str]) -> None:
    chosen = choose(device(2), *argv)
    assert chosen.arguments == {"fsdp_config": {"version": 2}}
    assert chosen.notes[0].endswith("sharded over 2 processes (FSDP2)")
    for on in (device(1), device(2, "xla")):
        alone = choose(on, *argv)
        assert alone.arguments == {"fsdp": False} and "fsdp has no effect" in alone.notes[0]


def test_another_version_of_fsdp_is_refused() -> None:
    """The log would name FSDP2, and accelerate would shard by FSDP1."""
    with pytest.raises(HyperparameterError, match="fsdp_config has version 1, but"):
        choose(device(2), "--fsdp", "True", "--fsdp_config", '{"version": 1}')


@pytest.mark.parametrize(
    "argv", [("--mp_parameters", ""), ("--mp_parameters", "{}"), ("--fsdp", "false")]
)
def test_nothing_is_sharded_unless_asked_for(argv: tuple[str, str]) -> None:
    assert choose(device(2), *argv) == Distribution()


def test_fsdp_of_one_process_shards_nothing(
    tmp_path: Path, tiny_model: Path, preloaded: dict[str, str]
) -> None:
    channels = write_data(tmp_path / "in", 20)
    arguments = ["--model_id", str(tiny_model), "--max_steps", "2", "--fsdp", "full_shard"]
    job = Job(tmp_path, channels, arguments, {**preloaded, **QUICK}).finish()
    assert "fsdp has no effect with one process" in job.log


@pytest.mark.heavy
def test_a_model_is_compiled(tmp_path: Path, tiny_model: Path) -> None:
    channels = write_data(tmp_path / "in", 20)
    arguments = [
        "--model_id",
        str(tiny_model),
        "--max_steps",
        "2",
        "--batch_size",
        "4",
        "--compile",
    ]
    # Needs no C++ compiler and no time; what is tested is that the model goes through Dynamo.
    arguments += ["--torch_compile_backend", "eager"]
    done = Job(tmp_path, channels, arguments, QUICK).finish(TORCH_LOGS="dynamo")
    assert "torch.compile is on; batch size and learning rate" in done.log
    assert "start tracing" in done.errors
    assert not [name for name in done.weights if "_orig_mod" in name]


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


def test_what_compiles_depends_on_the_device() -> None:
    assert choose(device(1)) == Distribution()
    assert choose(device(1, "cuda"), "--compile").arguments == {"torch_compile": True}
    xla = choose(device(2, "xla"), "--compile")
    assert xla.arguments == {}
    assert xla.notes == ("torch.compile is off: torch-xla compiles without it",)
    neuron = device(2, "neuron")
    compiled = choose(neuron, "--compile")
    assert compiled.arguments == {"torch_compile": True, "torch_compile_backend": "neuron"}
    with pytest.raises(HyperparameterError, match="only with SimpleFSDP"):
        choose(neuron, "--fsdp", "True", "--compile")


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


@pytest.mark.heavy
@pytest.mark.long
def test_a_broken_download_is_an_error_that_says_so(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
