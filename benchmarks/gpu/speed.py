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
import tempfile
import time
from functools import partial
from typing import Any

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
import torch
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


def seconds_of_steps(stage: Stage, trainer: Trainer, warm_up: int) -> float:
    """Train, and return the seconds from the end of step `warm_up` to the end of the last one."""
    clock = Clock(stage.device, warm_up)
    trainer.add_callback(clock)
    trainer.train()
    return clock.times[1] - clock.times[0]


def train(stage: Stage, way: str, name: str, size: int, steps: int) -> tuple[float, int]:
    """Return samples a second, and the model's weights without embeddings."""
    model = encoder(stage, name)
    tokenizer = AutoTokenizer.from_pretrained(find_minilm(stage))
    lengths = tweet_lengths(max(size * 8, 256))
    ids = np.random.default_rng(0).integers(1000, 20000, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.random.default_rng(2).integers(0, 2, len(lengths))
    with tempfile.TemporaryDirectory() as folder:
        if way.startswith("recipe"):
            samples = Samples(ids, starts, labels)
            args = training_arguments(folder, size, steps, torch_compile="compiled" in way)
            loaded = TrainableModel(
                model=model, tokenizer=tokenizer, arguments=args, objective=CLASSES
            )
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
        seconds = seconds_of_steps(stage, trainer, warm_up)
    return size * (steps - warm_up) / seconds, model.num_parameters(exclude_embeddings=True)


def encoders(stage: Stage, rate: float, name: str, size: int) -> Values:
    """Train one model at one batch size by each trainer in turn."""
    steps = 3 if stage.smoke else {32: 60, 256: 30}.get(size, 15)
    ways = ["HF padded to 128", "HF grouped by length", "recipe", "recipe, compiled"]
    if stage.smoke or size > 32:
        ways.remove("recipe, compiled")  # to compile takes longer than these steps
    trainings = {way: partial(train, stage, way, name, size, steps) for way in ways}
    results = take_turns(trainings, 1 if stage.smoke else 2)
    best = {way: max(speed for speed, _ in speeds) for way, speeds in results.items()}
    weights = results["recipe"][0][1]
    mean = float(tweet_lengths(1000).mean())
    rows = [
        {
            "way": way,
            "samples/s": round(speed),
            "to HF padded": round(speed / best["HF padded to 128"], 2),
            "to HF grouped": round(speed / best["HF grouped by length"], 2),
            "share of the matrix rate": f"{6 * weights * mean * speed / rate:.1%}",
        }
        for way, speed in best.items()
    ]
    print(f"\n{name}, batch {size}\n{table(rows)}\n", flush=True)
    return {"rows": rows}


def decoder(stage: Stage, rate: float) -> Values:
    """Measure tokens a second of a decoder of 0.6 G weights, by the recipe and by HF Trainer."""
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
    results: dict[str, Any] = {}
    for way in ("recipe", "HF grouped by length"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        grouping = "random" if way == "recipe" else "group_by_length"
        with tempfile.TemporaryDirectory() as folder:
            args = training_arguments(folder, size, steps, train_sampling_strategy=grouping)
            if way == "recipe":
                ready = {"train": documents, "evaluation": documents}
                loaded = TrainableModel(
                    model=model, tokenizer=tokenizer, arguments=args, objective=NEXT_TOKENS
                )
                trainer: Trainer = engine.build(lay_out(loaded, ready, Table()))
            else:
                rows: Any = [
                    {"input_ids": ids[a:b].tolist()} for a, b in itertools.pairwise(starts)
                ]
                trainer = Trainer(
                    model=model, args=args, train_dataset=rows,
                    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
                )  # fmt: skip
            warm_up = min(2, steps - 1)
            try:
                seconds = seconds_of_steps(stage, trainer, warm_up)
            except torch.OutOfMemoryError as error:
                results[way] = {"out of memory": str(error).partition(". GPU")[0]}
                del model, trainer
                torch.cuda.empty_cache()
                continue
        tokens = float(lengths.mean()) * size * (steps - warm_up) / seconds
        share = 6 * model.num_parameters(exclude_embeddings=True) * tokens / rate
        results[way] = {"tokens/s": round(tokens), "share of the matrix rate": f"{share:.1%}"}
        del model, trainer
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def main() -> None:
    """Run all checks; the exit code is 1 if one failed."""
    stage = Stage("speed", __doc__, seconds=540)
    rate = matrix_rate(stage.device, 256 if stage.smoke else 8192)
    stage.check("rate", 5, lambda: {"bfloat16 TFLOP/s": round(rate / 1e12, 2)})
    sizes = (8,) if stage.smoke else (32, 256, 1024)
    for name in ("MiniLM",) if stage.smoke else ("MiniLM", "BERT-base", "ModernBERT-base"):
        for size in sizes:
            stage.check(
                f"{name} {size}",
                35,
                partial(encoders, stage, rate, name, size),
            )
    stage.check("decoder", 60, lambda: decoder(stage, rate))
    stage.end()


if __name__ == "__main__":
    main()
