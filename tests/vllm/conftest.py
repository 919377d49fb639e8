"""A tiny decoder that vLLM serves, and `amphora serve` in vLLM's environment."""

import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapter_kit import adapter
from tests.support.causal_kit import save_llama
from tests.support.paths import CODE
from tests.support.servers import Running

PYTHON = Path(__file__).parents[2] / "build/vllm/bin/python"
# A start takes 60 s on two idle cores, and 230 s on busy ones.
START_SECONDS = 500
# A small cache, no compilation, the numbers of the reference, and modules that are compiled once for
# all of vLLM's processes.
QUICK = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "SM_VLLM_ENFORCE_EAGER": "true", "SM_VLLM_DTYPE": "float32",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AMPHORA_CODE_DIR": str(CODE),
    "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip
Serve = Callable[..., Running]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """serve(base, NAME=value): a server of vLLM's environment on the model below base."""
    if not PYTHON.is_file():
        pytest.fail("make test-vllm makes the environment that this needs")
    started: list[Running] = []

    def _serve(base: Path, **environ: str) -> Running:
        command = (str(PYTHON), "-m", "amphora", "serve")
        started.append(Running(base, {**QUICK, **environ}, command))
        return started[-1]

    yield _serve
    for server in started:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(90)
        except subprocess.TimeoutExpired:
            server.process.kill()
        server.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base folder of a model with one adapter beside it; another one is in `second`."""
    from transformers import AutoModelForCausalLM

    base = tmp_path_factory.mktemp("llama")
    saved = save_llama(base / "model")
    modules = ["q_proj", "v_proj", "o_proj"]
    for seed, name in enumerate(("first", "second"), 1):
        adapter(saved, base / name, AutoModelForCausalLM, seed, target_modules=modules)
    shutil.copytree(base / "first", base / "model/adapters/first")
    return base


def greedy(folder: Path, prompt: str, count: int, adapted: Path | None = None) -> str:
    """What transformers' generate goes on with."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapted is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
            loaded = PeftModel.from_pretrained(loaded, str(adapted))
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    written = loaded.generate(
        **ids, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=0
    )[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True))
