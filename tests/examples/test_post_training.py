"""The scripts of examples/post_training and retrieval through `amphora train`: stopped, gone on with,
and served."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import serving_kit
from tests.support.causal_kit import make_model, make_tokenizer
from tests.support.job_tree import Tree
from tests.support.paths import CODE
from tests.support.preloading import PRELOADED, preloading
from tests.support.servers import served
from tests.support.until import until
from tests.support.words import WORDS

sys.path.insert(0, str(CODE))
from recipe.metrics import metric_definitions
from tests.support.images import PICTURE, TEXT, save_llava

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = next(row["Regex"] for row in metric_definitions() if row["Name"] == "loss")
PROMPT = {"inputs": "red cat:", "parameters": {"max_new_tokens": 4}}
SLOW = {"learning_rate": 1e-4}
SHORT = {"max_completion_length": 16}
QUESTION = [{"type": "image", "text": None}, {"type": "text", "text": "who was"}]
ANSWER = [{"type": "text", "text": "anna"}]
CONVERSATION = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
PAIRS = [{"anchor": f"who was {word}", "positive": f"anna was {word} in paris"} for word in WORDS]
ANSWERS = [
    {"prompt": "red cat:", "chosen": "cat", "rejected": "dog" * number} for number in range(1, 9)
]
ENCODERS = "retrieval/train_encoder.py"
MODULES = ("torch.distributed.fsdp", "sentence_transformers.sparse_encoder.losses", "transformers.trainer",
           "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "trl.trainer.kto_trainer",
           "trl.trainer.reward_trainer", "trl.trainer.sft_trainer")  # fmt: skip
FORKS = """import sys
sys.path.insert(0, {folder!r})
from train import main
main([{file!r}, *sys.argv[1:]])
"""
"""A script that runs the example in a fork of a process with its libraries, whose import takes longer."""


@dataclass(frozen=True)
class Case:
    """A script's rows, the arguments that keep it small, and a body for what it has saved."""

    rows: list[dict[str, Any]]
    body: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    """Below examples/; empty: post_training/ and the case's name."""
    answer: str = "'generated_text'"
    """What a text's answer holds, as Python writes it."""


CASES = {
    "grpo": Case(
        [{"prompt": f"{number} + 1 =", "answer": number + 1} for number in range(8)],
        PROMPT, {"num_generations": 4, "batch_size": 8, "max_completion_length": 64},
    ),
    "kto": Case(
        [{"prompt": "red cat:", "completion": "cat" * (1 + number % 2), "label": number % 2 == 0}
         for number in range(8)],
        PROMPT, {"max_length": 64},
    ),
    "dpo": Case(ANSWERS, PROMPT, {"max_length": 64, "lora_r": 4}),
    "reward_model": Case(
        ANSWERS,
        {"inputs": "red cat:cat"}, {"max_length": 64}, answer="'score'",
    ),
    "distillation": Case([{"prompt": f"red cat {number}:"} for number in range(8)], PROMPT, SHORT),
    "sft_images": Case(
        [{"images": [f"{number}.png"], "messages": CONVERSATION} for number in range(8)],
        {
            "inputs": {"image": TEXT, "text": "<image> who was"},
            "parameters": {"max_new_tokens": 4},
        },
    ),
    "sparse": Case(
        PAIRS, {"inputs": "who was good"}, {"kind": "sparse", **SLOW}, ENCODERS, answer="'index'",
    ),
    "multi_vector": Case(
        PAIRS, {"inputs": "who was good"}, {"kind": "multi_vector", **SLOW}, ENCODERS, answer="[[",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of scripts that run in forks."""
    with preloading(
        tmp_path_factory.mktemp("libraries"), imports=MODULES, CUDA_VISIBLE_DEVICES=""
    ) as variables:
        yield {**variables, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def tree(tmp_path: Path, libraries: dict[str, str]) -> Tree:
    """A job's folders."""
    return Tree(tmp_path, libraries)


def _prepare(tree: Tree, script: str) -> dict[str, Any]:
    """Make the job's models and channel; return its hyperparameters."""
    case, base = CASES[script], tree.base
    rows = "\n".join(map(json.dumps, case.rows))
    tree.channel("train", **{"rows.jsonl": rows})
    file = EXAMPLES / (case.file or f"post_training/{script}.py")
    tree.script(FORKS.format(folder=str(PRELOADED), file=str(file)), file.name)
    if case.file:
        serving_kit.save("BertForMaskedLM", base / "start")
    elif script == "sft_images":
        torch.manual_seed(5)
        save_llava(base / "start")
        for row in case.rows:
            PICTURE.save(base / "input/data/train" / row["images"][0])
    else:
        make_model("llama", base / "start")
        make_model("gpt2", base / "teacher")
        tokenizer = make_tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(base / "start")
    teacher = {"teacher_name_or_path": str(base / "teacher")} if script == "distillation" else {}
    return {
        "sagemaker_program": file.name, "sagemaker_torch_distributed_enabled": "true",
        "model_name_or_path": str(base / "start"), "learning_rate": 0.01, "batch_size": 2,
        "save_steps": 1, **teacher, **case.arguments,
    }  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    "script",
    # The script of `sparse` trains `multi_vector`, too; kto is stopped below; distillation is an
    # online trainer, as grpo.
    [
        pytest.param(
            name, marks=[pytest.mark.long] * (name in ("multi_vector", "kto", "distillation"))
        )
        for name in CASES
    ],
)
def test_a_script_trains_goes_on_with_its_checkpoint_and_is_served(
    tree: Tree, script: str, preloaded: Mapping[str, str]
) -> None:
    """On one process, then on two. The last rate of a schedule is 0: a step more changes nothing,
    if the weights are those of the checkpoint."""

    def _weights(folder: Path) -> dict[str, torch.Tensor]:
        loaded = load_file(folder / "model.safetensors")
        # An encoder alone is saved without its model's name before each weight's.
        return {name.removeprefix("bert."): weight for name, weight in loaded.items()}

    def _losses(done: subprocess.CompletedProcess[str]) -> int:
        return len(re.findall(LOSS, done.stdout + done.stderr))

    def _train(tree: Tree, processes: int) -> subprocess.CompletedProcess[str]:
        done = tree.train(timeout=200, AMPHORA_NPROC_PER_NODE=str(processes))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    chosen = _prepare(tree, script)
    alone = {**chosen, "sagemaker_torch_distributed_enabled": "false"}
    tree.configure({**alone, "max_steps": 2})
    assert _losses(_train(tree, 1)) == 2
    first = _weights(tree.base / "model")
    start = _weights(tree.base / "start")
    assert any(not torch.equal(first[name], start[name]) for name in first.keys() & start.keys())
    shutil.rmtree(tree.base / "model")

    tree.configure({**chosen, "max_steps": 3})
    assert _losses(_train(tree, 2)) == 1
    torch.testing.assert_close(_weights(tree.base / "model"), first, rtol=0, atol=1e-6)

    with served(tree.base, preloaded) as server:
        reply = server.invoke(CASES[script].body)
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()
        assert CASES[script].answer in str(answer)


@pytest.mark.heavy
def test_a_stopped_job_leaves_a_checkpoint_of_the_step_that_it_had_reached(tree: Tree) -> None:
    """SIGTERM reaches the trainer, which saves and ends."""
    chosen = _prepare(tree, "kto")
    tree.configure({**chosen, "max_steps": 1_000_000, "save_steps": 1_000_000})
    log = tree.base / "log"
    with log.open("w") as out:
        job = subprocess.Popen(
            tree.command(), stdout=out, stderr=out,
            env=tree.environment(AMPHORA_NPROC_PER_NODE="1"),
        )  # fmt: skip
        try:
            until(lambda: re.search(LOSS, log.read_text()), 200, log.read_text)
            job.send_signal(signal.SIGTERM)
            job.wait(240)
        finally:
            job.kill()
    (checkpoint,) = (tree.base / "checkpoints").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == int(checkpoint.name.partition("-")[2]) > 0
    assert (checkpoint / "model.safetensors").is_file()
