from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipe.errors import DistributedError
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
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
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
    lines = progress.ProgressLines(every=5.0, clock=lambda: now[0])
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
        "step 5 of 100 (5 %), 16.0 texts/s, about 1 min 35 s left",
        "step 10 of 100 (10 %), 16.0 texts/s, about 1 min 30 s left",
    ]


def test_no_attention_kernel_that_is_known_to_be_wrong_is_used() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    device.choose({}, bf16=None, use_cpu=False, fp16=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
