"""Devices, memory and processes of a training: what is chosen, shared and refused."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.arguments import parse
from recipe.errors import DeviceError, DistributedError, HyperparameterError, ModelError
from recipe.runtime import device, distribution, memory
from recipe.runtime.device import Device
from recipe.runtime.distribution import Distribution
from recipe.training import progress
from tests.support import http_server
from tests.support.jobs import QUICK, Job, write
from tests.support.paths import CODE
from tests.support.words import reviews


def test_precision_comes_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx512_bf16"})
    chosen = device.choose({}, bf16=None, use_cpu=True, fp16=False)
    assert (chosen.bf16, chosen.reason) == (True, "this CPU has avx512_bf16")
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx2"})
    chosen = device.choose({}, bf16=None, use_cpu=True, fp16=False)
    assert (chosen.bf16, chosen.reason) == (False, "this CPU has no amx_bf16, no avx512_bf16")
    # A host that hides AMX: what is left is slower than float32.
    hidden = {"GenuineIntel", "avx512_bf16", "avx512_fp16"}
    for flags, bf16 in (
        (hidden, False),
        (hidden | {"amx_bf16"}, True),
        (hidden ^ {"GenuineIntel"}, True),
    ):
        monkeypatch.setattr(device, "cpu_flags", lambda flags=flags: flags)
        assert device.choose({}, bf16=None, use_cpu=True, fp16=False).bf16 is bf16
    assert device.choose({}, bf16=True, use_cpu=True, fp16=False).bf16
    assert not device.choose({}, bf16=True, use_cpu=True, fp16=True).bf16


def test_cpu_flags_are_those_of_linux(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("vendor_id\t: GenuineIntel\nflags\t\t: fpu amx_bf16\n\nflags\t\t: vme\n")
    assert device.cpu_flags(listing) == {"GenuineIntel", "fpu", "amx_bf16"}
    assert device.cpu_flags(tmp_path / "none") == set()


def test_progress_is_told_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    forecast: Any = SimpleNamespace(seconds_left=lambda *_: 3600.0)
    lines = progress.ProgressLines(forecast, every=5.0, clock=lambda: now[0])
    job: Any = SimpleNamespace(
        train_batch_size=8,
        gradient_accumulation_steps=1,
        world_size=2,
        max_steps=100,
        global_step=0,
    )
    lines.on_train_begin(job, job, job)
    for job.global_step in range(1, 11):
        now[0] += 1.0
        lines.on_step_end(job, job, job)
    shown = "step {0} of 100 ({0} %), 16.0 texts/s, about 1 h 0 min left"
    assert capsys.readouterr().out.splitlines() == [shown.format(step) for step in (5, 10)]


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, 2),
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_processes_share_the_cores(environ: dict[str, str], share: int | None) -> None:
    threads = device.choose(environ, bf16=None, use_cpu=True, fp16=False).threads
    cores = len(os.sched_getaffinity(0))
    assert threads == (share and max(1, cores // share))


def test_a_world_that_is_only_announced_is_refused() -> None:
    device.check_world(torch.device("cpu"), expected=1)
    with pytest.raises(DistributedError, match=r"WORLD_SIZE is 2.* 1 term"):
        device.check_world(torch.device("cpu"), expected=2)


def test_no_attention_kernel_that_is_known_to_be_wrong_is_used() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    chosen = device.choose({}, bf16=None, use_cpu=False, fp16=False)
    assert torch.backends.cuda.cudnn_sdp_enabled(), "choosing changes nothing"
    threads = torch.get_num_threads()
    try:
        device.set_up(chosen)
    finally:
        torch.set_num_threads(threads)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("environ", "use_cpu", "says"),
    [
        ({"SM_NUM_GPUS": "4"}, False, "SM_NUM_GPUS is 4.* requirements"),
        ({"SM_NUM_GPUS": "4", "CUDA_VISIBLE_DEVICES": "0"}, False, "SM_NUM_GPUS is 4"),
        ({"SM_NUM_GPUS": "4", "CUDA_VISIBLE_DEVICES": ""}, False, ""),
        ({"SM_NUM_GPUS": "4"}, True, ""),
        ({"SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "0"}, False, ""),
        ({"SM_NUM_NEURONS": "64"}, False, "has Neuron cores, but torch .* has no Neuron device"),
        ({"SM_NUM_NEURONS": "64"}, True, ""),
        # As the front shows a model worker its core.
        ({"NEURON_RT_VISIBLE_CORES": "0"}, False, "has Neuron cores, but"),
    ],
)
def test_a_host_with_accelerators_does_not_silently_use_its_cpu(
    environ: dict[str, str], use_cpu: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    if says:
        with pytest.raises(DeviceError, match=says):
            device.choose(environ, bf16=None, use_cpu=use_cpu, fp16=False)
    else:
        chosen = device.choose(environ, bf16=None, use_cpu=use_cpu, fp16=False)
        assert chosen.kind == "cpu"


@pytest.mark.parametrize(
    ("kind", "world", "started"),
    [
        ("neuron", "2", ["neuron"]),
        ("xla", "2", ["registered", "xla"]),
        ("neuron", "1", []),
        ("cpu", "2", []),
    ],
)
def test_the_process_group_is_started_first_on_devices_that_need_it(
    kind: str, world: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str] = []
    monkeypatch.setattr(device.dist, "init_process_group", groups.append)
    monkeypatch.setattr(device.xla, "register_backend", lambda: groups.append("registered"))
    device.join(kind, {"WORLD_SIZE": world})
    assert groups == started


@pytest.mark.parametrize(("local_rank", "bypasses"), [("0", False), ("1", True)])
def test_a_process_uses_its_gpu_whatever_its_number(
    local_rank: str, bypasses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.dist, "is_initialized", lambda: True)
    environ = {"LOCAL_RANK": local_rank}
    device.settle_on_gpu(torch.device("cuda", 0), environ)
    assert (environ.get("ACCELERATE_BYPASS_DEVICE_MAP") == "true") == bypasses
    device.settle_on_gpu(torch.device("cpu"), {})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max\n"}, 32),
        (
            {"memory.max": f"{8 * 10**9}\n", "memory.current": f"{5 * 10**9}\n",
             "memory.stat": f"anon {3 * 10**9}\ninactive_file {2 * 10**9}\n"},
            5,
        ),
        (
            {"memory/memory.limit_in_bytes": f"{4 * 10**9}\n", "memory/memory.stat": "total_inactive_file 0\n",
             "memory/memory.usage_in_bytes": f"{10**9}\n"},
            3,
        ),
    ],
    ids=["no limit", "its cache is free", "control groups of version 1"],
)  # fmt: skip
def test_a_containers_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    host = tmp_path / "meminfo"
    host.write_text(f"MemTotal: {64 * 10**9 // 1024} kB\nMemAvailable: {32 * 10**9 // 1024} kB\n")
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert memory.available(host, tmp_path) == expected * 10**9
    assert memory.available(tmp_path / "none", tmp_path / "none") is None


def output_of(code: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(CODE)}
    command = [sys.executable, "-c", f"from recipe.runtime import memory\n{code}"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("is_shared", [True, False])
def test_threads_share_one_arena_of_freed_memory(is_shared: bool) -> None:
    output = output_of(f"""
import ctypes, threading
if {is_shared}:
    memory.share_freed()
together = threading.Barrier(8)
def allocate():
    kept = bytearray(10_000)
    together.wait(60)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library = ctypes.CDLL(None)
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
""")
    assert (output.count("<heap nr=") == 1) == is_shared


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_is_kept_is_not_mapped_again() -> None:
    faults = [
        int(
            output_of(f"""
import resource
if {keeps}:
    memory.keep_freed()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    memoryview(bytearray(40_000_000))[::4096].tolist()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
        )
        for keeps in (True, False)
    ]
    # The heap grows a few times until such a block fits between what else lies on it.
    assert faults[0] < faults[1] / 3


def choose(processes: int, *argv: str, kind: str = "cpu") -> Distribution:
    given = parse(argv)
    on = Device(kind=kind, bf16=False, reason="", processes=processes, threads=None)
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
    chosen = choose(2, *argv)
    assert chosen.arguments == {"fsdp_config": {"version": 2}}
    assert chosen.notes[0].endswith("sharded over 2 processes (FSDP2)")
    for processes, kind in ((1, "cpu"), (2, "xla")):
        alone = choose(processes, *argv, kind=kind)
        assert alone.arguments == {"fsdp": False} and "fsdp has no effect" in alone.notes[0]


def test_another_version_of_fsdp_is_refused() -> None:
    """The log would name FSDP2, and accelerate would shard by FSDP1."""
    with pytest.raises(HyperparameterError, match="fsdp_config has version 1, but"):
        choose(2, "--fsdp", "True", "--fsdp_config", '{"version": 1}')


@pytest.mark.parametrize(
    "argv", [("--mp_parameters", ""), ("--mp_parameters", "{}"), ("--fsdp", "false")]
)
def test_nothing_is_sharded_unless_asked_for(argv: tuple[str, str]) -> None:
    assert choose(2, *argv) == Distribution()


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


def test_what_compiles_depends_on_the_device() -> None:
    assert choose(1) == Distribution()
    assert choose(1, "--compile", kind="cuda").arguments == {"torch_compile": True}
    xla = choose(2, "--compile", kind="xla")
    assert xla.arguments == {}
    assert xla.notes == ("torch.compile is off: torch-xla compiles without it",)
    compiled = choose(2, "--compile", kind="neuron")
    assert compiled.arguments == {"torch_compile": True, "torch_compile_backend": "neuron"}
    with pytest.raises(HyperparameterError, match="only with SimpleFSDP"):
        choose(2, "--fsdp", "True", "--compile", kind="neuron")


def test_the_token_reaches_the_hub_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    credentials: set[str | None] = set()

    class Refuse(http_server.Quiet):
        def do_HEAD(self) -> None:
            credentials.add(self.headers.get("Authorization"))
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})  # which is not asked for again

        do_GET = do_HEAD

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
