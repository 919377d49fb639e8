"""Decoders that `amphora train` has left behind, served by vLLM as they were saved."""

import json
from pathlib import Path

import pytest

from tests.support import causal_kit
from tests.support.causal_kit import save_llama
from tests.support.exports import environment, run_on_model
from tests.support.job_tree import Tree
from tests.support.jobs import write
from tests.support.paths import CODE
from tests.vllm.conftest import START_SECONDS, Serve, greedy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_SECONDS)]
# Tokens that are proposed from the prompt.
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
               "prompt_lookup_min": 1}  # fmt: skip


@pytest.mark.parametrize("saved", ["adapter", pytest.param("full", marks=pytest.mark.long)])
def test_a_trained_decoder_answers_what_it_has_learned(
    tmp_path: Path, serve: Serve, saved: str
) -> None:
    """Streamed, as a chat, with its template and its end of a turn; a full one with speculation,
    which keeps the text."""
    base = save_llama(tmp_path / "base")
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]},
                      {"role": "assistant", "content": row["completion"]}]}
        for row in causal_kit.pairs(300)
    ]  # fmt: skip
    write(tmp_path / "input/data/train", rows)
    hyperparameters = {
        "model_id": str(base), "task": "causal-lm", "max_length": "64", "epochs": "6", "lr": "1e-2",
        "train_batch_size": "8",
    }  # fmt: skip
    if saved == "adapter":
        hyperparameters |= {"lora_r": "24", "lora_save": "adapter"}
    tree = Tree(tmp_path, {"AMPHORA_CODE_DIR": str(CODE), "HF_HUB_OFFLINE": "1"})
    done = tree.configure(hyperparameters).train(timeout=280, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert ("adapter_model.safetensors" in names) == (saved == "adapter")
    speculation = {"SM_VLLM_SPECULATIVE_CONFIG": json.dumps(SPECULATION)} if saved == "full" else {}
    server = serve(tmp_path, **speculation).ready(START_SECONDS)
    body = {
        "messages": [{"role": "user", "content": "blue cat:"}], "max_tokens": 40, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    if saved == "full":
        assert text == "catcatcat"
        assert choices[-1]["finish_reason"] == "stop"
        accepted = "vllm:spec_decode_num_accepted_tokens_total{"
        rows = server.http.get("/metrics").text.splitlines()
        (row,) = (row for row in rows if row.startswith(accepted))
        assert float(row.rpartition(" ")[2]) > 0
    else:
        # The base's last layer, which stays as it is, knows no end.
        prompt = "<|im_start|>user blue cat:</s><|im_start|>assistant "
        assert text.startswith("catcatcat")
        assert text == greedy(base, prompt, 40, tmp_path / "model")


@pytest.mark.long
def test_a_quantized_decoder_is_served(tmp_path: Path, serve: Serve) -> None:
    """What examples/export/quantize.py writes, with whole numbers of 8 bits: those that vLLM
    computes with on a CPU."""
    base = save_llama(tmp_path / "base")
    tree = Tree(tmp_path / "ml")
    python = environment(tmp_path / "venv")
    run_on_model(tree, python, base, "export/quantize.py", scheme="W8A8")
    server = serve(tree.base, SM_VLLM_DTYPE="bfloat16").ready(START_SECONDS)
    body = {"prompt": "blue cat:", "max_tokens": 8, "temperature": 0}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["text"]
    # Rounding may decide otherwise somewhere, not at once.
    assert text[:2] == greedy(base, "blue cat:", 2)


def test_a_wrong_setting_ends_the_start_with_vllms_reason(
    serve: Serve, model: Path, tmp_path: Path
) -> None:
    """And not with a traceback."""
    (tmp_path / "model").symlink_to(model / "model")
    wrong = serve(tmp_path, SM_VLLM_MAX_MODEL_LEN="5000")
    assert wrong.process.wait(START_SECONDS) == 2
    (line,) = [row for row in wrong.log.splitlines() if "cannot be served by vLLM" in row]
    assert "max_model_len" in line
    assert "5000" in line
