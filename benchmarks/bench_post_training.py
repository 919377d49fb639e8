"""Post-training beside TRL's own command line, on the same model and data.

    .venv/bin/python benchmarks/bench_post_training.py [--rounds 3] [--steps 8] [--tasks dpo,kto]

A Llama of 3 million random weights learns 64 rows of chats on the CPU, in float32, by one thread.
TRL's command line has no ORPO: a script of its trainer stands for it. Both take turns. Prints for
each task the samples a second of training alone, and the most memory of the process.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import CODE, parser, table, take_turns

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ORPO = """
import sys
from trl import TrlParser, ModelConfig, ScriptArguments
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from datasets import load_dataset
from transformers import AutoTokenizer
script, args, model = TrlParser((ScriptArguments, ORPOConfig, ModelConfig)).parse_args_and_config()
rows = load_dataset(script.dataset_name)["train"]
tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
ORPOTrainer(model=model.model_name_or_path, args=args, train_dataset=rows,
            processing_class=tokenizer).train()
"""
SIZE = 4
"""Samples of a step."""
GENERATED = {"max_completion_length": "32", "num_generations": "4"}
TASKS = {
    "dpo": {}, "kto": {}, "orpo": {}, "reward": {},
    "grpo": {**GENERATED, "reward_funcs": "format"},
}  # fmt: skip


def main() -> None:
    """Train each task by both, in turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", default="8")
    arguments.add_argument("--tasks", default=",".join(TASKS))
    options = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model")
        for task in options.tasks.split(","):
            data = save_rows(folder / task, task)
            variants = {
                "recipe": lambda task=task, data=data: train(
                    recipe_command(task, model, data, folder / "job", options.steps), folder
                ),
                "TRL": lambda task=task, data=data: train(
                    trl_command(task, model, data, folder, options.steps), folder
                ),
            }
            measured = take_turns(variants, options.rounds)
            ours, theirs = (
                [statistics.median(values) for values in zip(*measured[name], strict=True)]
                for name in variants
            )
            rows.append({
                "task": task, "recipe samples/s": f"{ours[0]:.2f}", "TRL": f"{theirs[0]:.2f}",
                "ratio": f"{ours[0] / theirs[0]:.2f}", "recipe MB": f"{ours[1]:.0f}",
                "TRL MB": f"{theirs[1]:.0f}",
            })  # fmt: skip
            print(table(rows), flush=True)


def save_model(folder: Path) -> Path:
    """Save a random Llama with a tokenizer of bytes and a chat template; return its folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pieces = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=688, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_rows(folder: Path, task: str) -> Path:
    """Write 64 rows of chats of a task; return the folder."""
    rows = []
    for number in range(64):
        prompt = [{"role": "user", "content": f"What is {number} plus {number % 7}? " * 2}]
        right, wrong = (
            [{"role": "assistant", "content": text * (1 + number % 4)}]
            for text in (f"It is {number + number % 7}. ", "I do not know that. ")
        )
        if task == "kto":
            rows.append({"prompt": prompt, "completion": right, "label": True})
            rows.append({"prompt": prompt, "completion": wrong, "label": False})
        elif task == "grpo":
            rows.append({"prompt": prompt})
        else:
            rows.append({"prompt": prompt, "chosen": right, "rejected": wrong})
    folder.mkdir()
    lines = (json.dumps(row) for row in rows[:64])
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def recipe_command(task: str, model: Path, data: Path, base: Path, steps: str) -> list[str]:
    """Return the command of a job."""
    given = {
        "task": task, "model_id": str(model), "batch_size": str(SIZE), "max_steps": steps,
        "bf16": "False", "use_cpu": "True", "eval_strategy": "no", "save_strategy": "no",
        "warmup_steps": "0", "resume_from_checkpoint": "False", **TASKS[task],
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    os.environ |= {"SAGEMAKER_BASE_DIR": str(base), "SM_CHANNEL_TRAIN": str(data)}
    return [sys.executable, str(CODE / "train.py"), *words]


def trl_command(task: str, model: Path, data: Path, folder: Path, steps: str) -> list[str]:
    """Return the command of TRL with the same settings."""
    given = {
        "model_name_or_path": str(model), "dataset_name": str(data),
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": str(SIZE),
        "max_steps": steps,
        "bf16": "False", "use_cpu": "True", "save_strategy": "no", "report_to": "none",
        "learning_rate": "1e-6",
        "gradient_checkpointing": "False", **TASKS[task],
    }  # fmt: skip
    if task == "grpo":
        given["reward_funcs"] = "think_format_reward"
    else:
        given["max_length"] = "1024" if task != "orpo" else "512"
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    if task == "orpo":
        (folder / "orpo.py").write_text(ORPO)
        return [sys.executable, str(folder / "orpo.py"), *words]
    return [str(Path(sys.executable).parent / "trl"), task, *words]


def train(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a training; return its samples a second and the most megabytes of its process."""
    with (folder / "log").open("w+") as log:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
                       "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
        child = os.posix_spawn(
            command[0], command, os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), fd) for fd in (1, 2)],
        )  # fmt: skip
        _, status, usage = os.wait4(child, 0)
        log.seek(0)
        text = log.read()
    # The libraries count the completions of a prompt differently.
    seconds = re.findall(r"'train_runtime': '?([\d.]+)", text)
    if status or not seconds:
        sys.exit(f"{' '.join(command)}\n{text[-3000:]}")
    steps = int(command[command.index("--max_steps") + 1])
    return SIZE * steps / float(seconds[-1]), usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
