"""Stage B on a GPU, 9 minutes: training speed, compared with HF Trainer in bfloat16.

    make gpu-speed                     on a machine with a CUDA device
    python benchmarks/gpu/speed.py --smoke      the same code, small, on a CPU

Samples have the lengths of tweets (28 ± 12 tokens). Each training takes some steps; the time runs
from the end of the warm-up to the end of the last step. Only real tokens count as work: their
floating-point operations (6 for each weight) over the matrix rate of the same run. HF Trainer pads
to 128, or groups by length.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from functools import partial
from typing import Any
from unittest import mock

import attention
from stage import (
    Stage,
    Values,
    find_minilm,
    matrix_rate,
    table,
    take_turns,
    training_arguments,
    wait,
)

import numpy as np  # isort: skip
import peft
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    ModernBertConfig,
    Qwen3Config,
    Trainer,
    TrainerCallback,
)
from transformers.utils import is_liger_kernel_available

from recipe.batching.document_batches import Documents
from recipe.batching.samples import Samples
from recipe.plan.batch_layout import TrainableModel
from recipe.plan.table import Table
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine
from recipe.training.preparation import lay_out

PADDED = 128
WARM_UP = 5


class Clock(TrainerCallback):  # type: ignore[misc]
    """Record when step `warm_up` and the last step end; only these two wait for the device."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._device, self._warm_up = device, warm_up
        self.times: list[float] = []
        self.first_step = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note when the first step begins, and how long it took when the second does."""
        if state.global_step < 2:
            wait(self._device)
            self.first_step = time.perf_counter() - self.first_step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note the time."""
        if state.global_step in (self._warm_up, state.max_steps):
            wait(self._device)
            self.times.append(time.perf_counter())


def tweet_lengths(count: int) -> Any:
    """Return the numbers of tokens of `count` tweets."""
    drawn = np.random.default_rng(1).normal(28, 12, count)
    return np.clip(drawn, 4, PADDED).astype(np.int64)


def encoder(stage: Stage, name: str) -> Any:
    """Return a model of this shape with random weights."""
    if stage.smoke or name == "MiniLM":
        config = AutoConfig.from_pretrained(find_minilm(stage))
        config.num_labels = 2
        if stage.smoke:
            config.num_hidden_layers = 1
    else:
        config = {"BERT-base": BertConfig, "ModernBERT-base": ModernBertConfig}[name](num_labels=2)
    config.pad_token_id = 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def seconds_of_steps(stage: Stage, trainer: Trainer, warm_up: int) -> tuple[float, float]:
    """Train; return the seconds from the end of step `warm_up` to the end of the last one, and
    those of the first step, in which kernels are compiled."""
    clock = Clock(stage.device, warm_up)
    trainer.add_callback(clock)
    trainer.train()
    return clock.times[1] - clock.times[0], clock.first_step


def train(stage: Stage, way: str, name: str, size: int, steps: int) -> tuple[float, int, float]:
    """Return samples a second, the model's weights without embeddings, and the seconds of the first
    step."""
    model = encoder(stage, name)
    tokenizer = AutoTokenizer.from_pretrained(find_minilm(stage))
    lengths = tweet_lengths(max(size * 8, 256))
    ids = np.random.default_rng(0).integers(1000, 20000, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.random.default_rng(2).integers(0, 2, len(lengths))
    # TrainingArguments leaves its own variables there, too.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(stage.options.out / "inductor")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, cache):
        if way.startswith("recipe"):
            samples = Samples(ids, starts, labels)
            args = training_arguments(folder, size, steps, torch_compile="compiled" in way)
            loaded = TrainableModel(
                model=model, tokenizer=tokenizer, arguments=args, objective=CLASSES,
                bf16_weights="bf16" in way, cuda_graphs="graphs" in way,
            )  # fmt: skip
            trainer: Trainer = engine.build(
                lay_out(loaded, {"train": samples, "evaluation": samples}, Table())
            )
        else:
            split: Any = [
                {"input_ids": ids[a:b].tolist(), "labels": int(label)}
                for (a, b), label in zip(itertools.pairwise(starts), labels, strict=True)
            ]
            padding: dict[str, Any] = {"padding": "max_length", "max_length": PADDED}
            if way == "HF grouped by length":
                padding = {"padding": True, "pad_to_multiple_of": 8}
            grouping = "group_by_length" if way == "HF grouped by length" else "random"
            trainer = Trainer(
                model=model,
                args=training_arguments(folder, size, steps, train_sampling_strategy=grouping),
                train_dataset=split,
                data_collator=DataCollatorWithPadding(tokenizer, **padding),
            )
        warm_up = min(WARM_UP, steps - 1)
        seconds, first = seconds_of_steps(stage, trainer, warm_up)
    weights = model.num_parameters(exclude_embeddings=True)
    return size * (steps - warm_up) / seconds, weights, first


def encoders(stage: Stage, rate: float, name: str, size: int) -> Values:
    """Train one model at one batch size by each trainer in turn."""
    steps = 3 if stage.smoke else {32: 60, 256: 30}.get(size, 15)
    ways = ["HF padded to 128", "HF grouped by length", "recipe", "recipe, bf16 weights",
            "recipe, graphs", "recipe, bf16 weights, graphs"]  # fmt: skip
    if not stage.smoke:  # it takes longer than these steps
        ways += ["recipe, compiled", "recipe, compiled, bf16 weights",
                 "recipe, compiled, bf16 weights, graphs"]  # fmt: skip
    trainings = {way: partial(train, stage, way, name, size, steps) for way in ways}
    results = take_turns(trainings, 1 if stage.smoke else 2)
    best = {way: max(speed for speed, _, _ in speeds) for way, speeds in results.items()}
    weights = results["recipe"][0][1]
    mean = float(tweet_lengths(1000).mean())
    rows = [
        {
            "way": way,
            "samples/s": round(speed),
            "to HF padded": round(speed / best["HF padded to 128"], 2),
            "to HF grouped": round(speed / best["HF grouped by length"], 2),
            "share of the matrix rate": f"{6 * weights * mean * speed / rate:.1%}",
            "first step, s": ", ".join(f"{first:.1f}" for _, _, first in results[way]),
        }
        for way, speed in best.items()
    ]
    print(f"\n{name}, batch {size}\n{table(rows)}\n", flush=True)
    return {"rows": rows}


def decoder(stage: Stage, rate: float, lora: bool) -> Values:
    """Measure tokens a second and memory of a decoder of 0.6 G weights, by the recipe, HF Trainer
    and TRL, which packs rows of one length."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 512}  # fmt: skip
    large = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936}  # fmt: skip
    config = Qwen3Config(**(small if stage.smoke else large), head_dim=64 if stage.smoke else 128,
                         tie_word_embeddings=True)  # fmt: skip
    size, steps = (4, 3) if stage.smoke else (16, 12)
    random = np.random.default_rng(0)
    lengths = random.integers(16, 64, 64) if stage.smoke else random.integers(128, 2048, 128)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(0, config.vocab_size, starts[-1]).astype(np.int32)
    learned = np.ones(len(ids), dtype=bool)
    learned[starts[:-1]] = False
    documents = Documents(ids, starts, (lengths - 1).astype(np.int64), learned)
    tokenizer = AutoTokenizer.from_pretrained(find_minilm(stage))
    rows: Any = [{"input_ids": ids[a:b].tolist()} for a, b in itertools.pairwise(starts)]
    results: dict[str, Any] = {}
    for way in ("recipe", "recipe, bf16 weights", "HF grouped by length", "TRL, packed"):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if lora:
            adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            model = peft.get_peft_model(model, adapters)
        mean = float(lengths.mean())
        if stage.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        grouping = "group_by_length" if way.startswith("HF") else "random"
        with tempfile.TemporaryDirectory() as folder:
            args = training_arguments(folder, size, steps, train_sampling_strategy=grouping)
            if way.startswith("recipe"):
                ready = {"train": documents, "evaluation": documents}
                loaded = TrainableModel(
                    model=model, tokenizer=tokenizer, arguments=args, objective=NEXT_TOKENS,
                    bf16_weights="bf16" in way,
                )  # fmt: skip
                trainer: Trainer = engine.build(lay_out(loaded, ready, Table()))
            elif way.startswith("TRL"):
                from trl import SFTConfig, SFTTrainer  # what only one way needs

                # As many tokens a step, in half as many rows.
                packed = training_arguments(
                    folder, size // 2, steps, SFTConfig, packing=True, max_length=int(2 * mean),
                    gradient_checkpointing=False, use_liger_kernel=is_liger_kernel_available(),
                )  # fmt: skip
                trainer = SFTTrainer(
                    model=model, args=packed, processing_class=tokenizer,
                    train_dataset=Dataset.from_list([*rows] * (2 * steps * size // len(rows) + 1)),
                )  # fmt: skip
            else:
                trainer = Trainer(
                    model=model, args=args, train_dataset=rows,
                    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
                )  # fmt: skip
            try:
                seconds, _ = seconds_of_steps(stage, trainer, 2)
            except torch.OutOfMemoryError as error:
                results[way] = {"out of memory": str(error).partition(". GPU")[0]}
            else:
                tokens = mean * size * (steps - 2) / seconds
                share = 6 * model.num_parameters(exclude_embeddings=True) * tokens / rate
                results[way] = {"tokens/s": round(tokens), "share of the rate": f"{share:.1%}"}
        del model, trainer
        if stage.device.type == "cuda":
            results[way]["GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
            torch.cuda.empty_cache()
    return results


def main() -> None:
    """Run all checks; the exit code is 1 if one failed."""
    stage = Stage("speed", __doc__, seconds=540)
    rate = matrix_rate(stage.device, 256 if stage.smoke else 8192)
    stage.check("rate", 5, lambda: {"bfloat16 TFLOP/s": round(rate / 1e12, 2)})
    stage.check("attention by length", 30, lambda: attention.measure_lengths(stage))
    large = (("MiniLM", 32), ("BERT-base", 1024), ("ModernBERT-base", 256), ("MiniLM", 1024))
    for name, size in (("MiniLM", 8),) if stage.smoke else large:
        stage.check(f"{name} {size}", 70, partial(encoders, stage, rate, name, size))
    for lora in (False, True):
        name = "decoder, LoRA" if lora else "decoder"
        stage.check(name, 90, partial(decoder, stage, rate, lora))
    stage.end()


if __name__ == "__main__":
    main()
