"""Stage B on a GPU, 9 minutes: how fast does it train, beside HF Trainer in bfloat16?

    make gpu-speed                     on a machine with a CUDA device
    python benchmarks/gpu/speed.py --smoke      the same code, small, on a CPU

Samples have the lengths of tweets (28 tokens, give or take 12). Of each training some steps are
taken; time is counted between the end of the warm-up and the last step, each waited for on the
device. Real tokens only count as work: their floating-point operations (6 for each weight) over
the matrix rate of the same run. HF Trainer pads to 128, or groups by length, as a knowing user has
it.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from stage import Stage, Values, matrix_rate, minilm, table, timed, wait

import datasets  # isort: skip
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    ModernBertConfig,
    Qwen3Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from recipe.batching.document_batches import Documents
from recipe.batching.samples import Samples
from recipe.plan.worlds import Computation
from recipe.tasks.causal_lm.task import NEXT_TOKENS
from recipe.tasks.text_classification.task import CLASSES
from recipe.training import engine

PADDED = 128
WARM_UP = 5


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds from the end of step WARM_UP to the end of the last one."""

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self._device, self._warm_up = device, warm_up
        self._began = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Read the time at the two steps that count."""
        if state.global_step in (self._warm_up, state.max_steps):
            wait(self._device)
            now = time.perf_counter()
            if state.global_step == self._warm_up:
                self._began = now
            else:
                self.seconds = now - self._began


def lengths_of(count: int) -> Any:
    """Tokens of `count` tweets."""
    drawn = np.random.default_rng(1).normal(28, 12, count)
    return np.clip(drawn, 4, PADDED).astype(np.int64)


def arguments(
    stage: Stage, folder: str, size: int, steps: int, **changes: Any
) -> TrainingArguments:
    """bfloat16, the fused optimizer, nothing saved, evaluated or logged."""
    values = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": size,
        "learning_rate": 1e-4,
        "bf16": True,
        "use_cpu": stage.device.type == "cpu",
        "optim": "adamw_torch_fused",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        **changes,
    }
    return TrainingArguments(**values)


def encoder(stage: Stage, name: str) -> Any:
    """A model of that shape; the weights do not matter."""
    if stage.smoke or name == "MiniLM":
        config = AutoConfig.from_pretrained(minilm(stage.options))
        config.num_labels = 2
        if stage.smoke:
            config.num_hidden_layers = 1
    else:
        config = {"BERT-base": BertConfig, "ModernBERT-base": ModernBertConfig}[name](num_labels=2)
    config.pad_token_id = 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def train(stage: Stage, way: str, name: str, size: int, steps: int) -> tuple[float, Any]:
    """Samples a second, and the model."""
    model = encoder(stage, name)
    tokenizer = AutoTokenizer.from_pretrained(minilm(stage.options))
    lengths = lengths_of(max(size * 8, 256))
    ids = np.random.default_rng(0).integers(1000, 20000, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.random.default_rng(2).integers(0, 2, len(lengths))
    clock = Clock(stage.device, min(WARM_UP, steps - 1))
    with tempfile.TemporaryDirectory() as folder:
        if way.startswith("recipe"):
            changes = {"torch_compile": True} if "compiled" in way else {}
            args = arguments(stage, folder, size, steps, **changes)
            samples = Samples(ids, starts, labels)
            computation = Computation(
                model=model, tokenizer=tokenizer, arguments=args, objective=CLASSES
            )
            trainer: Trainer = engine.build(computation, {"train": samples, "evaluation": samples})
        else:
            changes = {}
            if way == "HF grouped by length":
                changes = {"train_sampling_strategy": "group_by_length"}
            split = datasets.Dataset.from_dict({
                "input_ids": [ids[a:b].tolist() for a, b in itertools.pairwise(starts)],
                "labels": labels.tolist(),
            })  # fmt: skip
            padding: dict[str, Any] = {"padding": "max_length", "max_length": PADDED}
            if way == "HF grouped by length":
                padding = {"padding": True, "pad_to_multiple_of": 8}
            trainer = Trainer(
                model=model,
                args=arguments(stage, folder, size, steps, **changes),
                train_dataset=split,
                data_collator=DataCollatorWithPadding(tokenizer, **padding),
            )
        trainer.add_callback(clock)
        trainer.train()
    return size * (steps - min(WARM_UP, steps - 1)) / clock.seconds, model


def encoders(stage: Stage, rate: float, name: str, size: int) -> Values:
    """All ways to train one model at one batch size, taking turns twice."""
    steps = 3 if stage.smoke else {32: 60, 256: 30}.get(size, 15)
    ways = ["HF padded to 128", "HF grouped by length", "recipe", "recipe, compiled"]
    if stage.smoke:
        ways.remove("recipe, compiled")
    results: dict[str, list[float]] = {way: [] for way in ways}
    weights = 0
    for _ in range(1 if stage.smoke else 2):
        for way in ways:
            speed, model = train(stage, way, name, size, steps)
            results[way].append(speed)
            weights = model.num_parameters(exclude_embeddings=True)
            del model
    best = {way: max(speeds) for way, speeds in results.items()}
    mean = float(lengths_of(1000).mean())
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
    """Tokens a second of a decoder of 0.6 G weights, by the recipe and by HF Trainer."""
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
    tokenizer = AutoTokenizer.from_pretrained(minilm(stage.options))
    results = {}
    for way in ("HF grouped by length", "recipe"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        clock = Clock(stage.device, min(2, steps - 1))
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(stage, folder, size, steps, train_sampling_strategy="group_by_length"
                             if way != "recipe" else "random")  # fmt: skip
            if way == "recipe":
                ready = {"train": documents, "evaluation": documents}
                computation = Computation(
                    model=model, tokenizer=tokenizer, arguments=args, objective=NEXT_TOKENS
                )
                trainer: Trainer = engine.build(computation, ready)
            else:
                rows = [ids[a:b].tolist() for a, b in itertools.pairwise(starts)]

                def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
                    longest = max(len(item["input_ids"]) for item in features)
                    shape = (len(features), longest)
                    batch = {
                        "input_ids": torch.zeros(shape, dtype=torch.long),
                        "attention_mask": torch.zeros(shape, dtype=torch.long),
                        "labels": torch.full(shape, -100),
                    }
                    for row, feature in enumerate(features):
                        count = len(feature["input_ids"])
                        batch["input_ids"][row, :count] = torch.tensor(feature["input_ids"])
                        batch["attention_mask"][row, :count] = 1
                        batch["labels"][row, :count] = batch["input_ids"][row, :count]
                    return batch

                trainer = Trainer(
                    model=model,
                    args=args,
                    train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
                    data_collator=collate,
                )
            trainer.add_callback(clock)
            trainer.train()
        tokens = float(lengths.mean()) * size * (steps - min(2, steps - 1)) / clock.seconds
        share = 6 * model.num_parameters(exclude_embeddings=True) * tokens / rate
        results[way] = {"tokens/s": round(tokens), "share of the matrix rate": f"{share:.1%}"}
        del model, trainer
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def ceiling(stage: Stage, rate: float) -> Values:
    """A bare loop on one batch that lies on the device: what no trainer can pass."""
    name, size = "BERT-base", 8 if stage.smoke else 256
    model = encoder(stage, name).to(stage.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(1000, 20000, (size, PADDED), device=stage.device)
    labels = torch.zeros(size, dtype=torch.long, device=stage.device)

    def step() -> None:
        with torch.autocast(stage.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(stage.device, step, 2 if stage.smoke else 20)
    flops = 6 * model.num_parameters(exclude_embeddings=True) * size * PADDED
    return {"share of the matrix rate, all tokens real": f"{flops / seconds / rate:.1%}"}


def trace(stage: Stage) -> Values:
    """Three steps as torch.profiler sees them: the ten dearest operations, and a trace file."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if stage.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        train(stage, "recipe", "MiniLM", 32, 3)
    path = Path(stage.options.out) / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    by = "self_cuda_time_total" if stage.device.type == "cuda" else "self_cpu_time_total"
    averages = profiler.key_averages()
    rows = [line for line in averages.table(sort_by=by, row_limit=10).splitlines() if line.strip()]
    (Path(stage.options.out) / "profile.txt").write_text("\n".join(rows) + "\n")
    launches = sum(e.count for e in averages if "LaunchKernel" in e.key)
    return {"trace": str(path), "kernel launches in 3 steps": launches}


def main() -> None:
    """All of it; exit code 1 if something failed."""
    stage = Stage("speed", __doc__, seconds=540)
    rates: list[float] = []

    def rate() -> Values:
        rates.append(matrix_rate(stage.device, 256 if stage.smoke else 8192))
        return {"bfloat16 TFLOP/s": round(rates[0] / 1e12, 2)}

    stage.check("rate", 5, rate)
    sizes = (8,) if stage.smoke else (32, 256, 1024)
    for name in ("MiniLM",) if stage.smoke else ("MiniLM", "BERT-base", "ModernBERT-base"):
        for size in sizes:
            stage.check(
                f"{name}, batch {size}",
                35,
                lambda name=name, size=size: encoders(stage, rates[0], name, size),  # type: ignore[misc]
            )
    stage.check("ceiling", 10, lambda: ceiling(stage, rates[0]))
    stage.check("decoder", 60, lambda: decoder(stage, rates[0]))
    stage.check("trace", 20, lambda: trace(stage))
    stage.end()


if __name__ == "__main__":
    main()
