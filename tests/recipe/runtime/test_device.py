import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.errors import DeviceError, DistributedError
from recipe.runtime import device
from recipe.training import progress


def test_precision_comes_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx512_bf16"})
    chosen = device.choose({}, bf16=None, use_cpu=True, fp16=False)
    assert (chosen.bf16, chosen.reason) == (True, "this CPU has avx512_bf16")
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx2"})
    chosen = device.choose({}, bf16=None, use_cpu=True, fp16=False)
    assert (chosen.bf16, chosen.reason) == (False, "this CPU has no amx_bf16, no avx512_bf16")
    assert device.choose({}, bf16=True, use_cpu=True, fp16=False).bf16
    assert not device.choose({}, bf16=True, use_cpu=True, fp16=True).bf16


def test_cpu_flags_are_those_of_linux(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor: 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n")
    assert device.cpu_flags(listing) >= {"fpu", "avx512_bf16", "amx_bf16"}
    assert device.cpu_flags(tmp_path / "none") == set()


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


def test_progress_is_told_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    forecast: Any = SimpleNamespace(
        seconds_left=lambda args, state, total: 3600.0 + total - state.global_step
    )
    lines = progress.ProgressLines(forecast, every=5.0, clock=lambda: now[0])
    arguments: Any = SimpleNamespace(
        train_batch_size=8, gradient_accumulation_steps=1, world_size=2
    )
    state: Any = SimpleNamespace(global_step=0, max_steps=100)
    control: Any = None
    lines.on_train_begin(arguments, state, control)
    for step in range(1, 11):
        now[0] += 1.0
        state.global_step = step
        lines.on_step_end(arguments, state, control)
    assert capsys.readouterr().out.splitlines() == [
        "step 5 of 100 (5 %), 16.0 texts/s, about 1 h 1 min left",
        "step 10 of 100 (10 %), 16.0 texts/s, about 1 h 1 min left",
    ]


def test_no_attention_kernel_that_is_known_to_be_wrong_is_used() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.choose({}, bf16=None, use_cpu=False, fp16=False)
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
