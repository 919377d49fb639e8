"""Decoders that `amphora train` has left behind, served by vLLM as they were saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import causal_kit
from tests.support.causal_kit import save_llama
from tests.support.exports import environment, run_on_model
from tests.support.job_tree import Tree, trained
from tests.support.jobs import write
from tests.vllm.conftest import START_SECONDS, Serve, greedy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_SECONDS)]
# Tokens that are proposed from the prompt.
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
               "prompt_lookup_min": 1}  # fmt: skip
# Weights that share a scale.
GROUP = 32


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
    trained(tmp_path, hyperparameters)
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


@pytest.mark.long
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_folder_of_4_bits_answers_as_its_weights(
    tmp_path: Path, serve: Serve, method: str
) -> None:
    """In the layouts of AutoAWQ and AutoGPTQ."""
    plain = save_llama(tmp_path / "plain")
    _quantize(plain, save_llama(tmp_path / "model"), method)
    server = serve(tmp_path, SM_VLLM_DTYPE="bfloat16").ready(START_SECONDS)
    for prompt in ("blue cat:", "green dog:"):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        text = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert text[:2] == greedy(plain, prompt, 2)


def _quantize(plain: Path, folder: Path, method: str) -> None:
    """Save a model's weights with 4 bits in `folder`, and their values in `plain`."""
    rows = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": range(8)}[method]

    def packed(values: torch.Tensor, dim: int) -> torch.Tensor:
        """Eight numbers of a dimension as one of 32 bits."""
        eights = values.movedim(dim, -1).unflatten(-1, (-1, 8))[..., list(rows)].int()
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        return (eights << shifts).sum(-1, dtype=torch.int32).movedim(-1, dim).contiguous()

    weights = load_file(plain / "model.safetensors")
    saved: dict[str, torch.Tensor] = {}
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            saved[name] = weight.half()
            continue
        groups = weight.T.unflatten(0, (-1, GROUP))
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scales = ((high - low) / 15 if method == "awq" else torch.maximum(-low, high) / 7).half()
        zeros = (-low / scales).round() if method == "awq" else torch.full_like(low, 8)
        numbers = ((groups / scales).round() + zeros).clamp(0, 15)
        weights[name] = ((numbers - zeros) * scales).flatten(0, 1).T.contiguous()
        numbers, zeros = numbers.flatten(0, 1), zeros[:, 0]
        stem = name.removesuffix("weight")
        saved[stem + "scales"] = scales[:, 0]
        if method == "awq":
            saved[stem + "qweight"], saved[stem + "qzeros"] = packed(numbers, 1), packed(zeros, 1)
        else:
            saved[stem + "qweight"], saved[stem + "qzeros"] = (
                packed(numbers, 0),
                packed(zeros - 1, 1),
            )
            saved[stem + "g_idx"] = torch.arange(len(numbers), dtype=torch.int32) // GROUP
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kind = {
        "awq": {"zero_point": True, "version": "gemm"},
        "gptq": {"sym": True, "desc_act": False},
    }
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP, **kind[method]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
