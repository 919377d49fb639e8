"""Texts that join and leave a batch at every token, beside batches that are written as a whole.

    .venv/bin/python benchmarks/bench_generation.py [--prompts 32] [--rounds 3]

A Llama with random weights (8 layers, 512 dimensions, grouped queries) continues prompts of 4 to
200 tokens by 8 to 128, all of which come at once, with one CPU thread, in three ways that take
turns: each alone by `generate`, all in one batch of `generate` (as long as the longest), and by the
image's engine. Texts of the engine have to be those of `generate`. Prints a Markdown table, of each
way's best round: tokens a second of the clock and of the CPU, and when the first tokens of prompts
are there, in seconds after they came.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "code"))


def make_model(folder: Path) -> None:
    """A random Llama whose tokens are numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{str(number): number for number in range(2, 8000)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="[UNK]", pad_token="[PAD]", model_max_length=1024
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@dataclass(frozen=True)
class Workload:
    """Prompts that all come at once, and the model that continues them."""

    served: Any
    """A `recipe.inference.generation.generator.Generator`."""
    prompts: list[tuple[list[int], int]]
    """Token numbers, and how many are to follow."""

    def alone(self) -> tuple[list[list[int]], list[float]]:
        """Texts, and when the first token of each was there, one after the other."""
        import torch

        began, texts, firsts = time.monotonic(), [], []
        for ids, new in self.prompts:
            first = time.monotonic() - began
            inputs = torch.tensor([ids])
            written = self.served.loaded.model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new,
                do_sample=False,
            )  # fmt: skip
            # Nobody sees a token before the text is whole; the first could be shown after a step.
            firsts.append(first + (time.monotonic() - began - first) / new)
            texts.append(written[0, len(ids) :].tolist())
        return texts, firsts

    def batched(self) -> tuple[list[list[int]], list[float]]:
        """As `alone`, of one batch that is as long as its longest text."""
        import torch

        began = time.monotonic()
        longest = max(len(ids) for ids, _ in self.prompts)
        rows = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in self.prompts])
        mask = torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in self.prompts]
        )
        written = self.served.loaded.model.generate(
            input_ids=rows, attention_mask=mask, do_sample=False,
            max_new_tokens=max(new for _, new in self.prompts),
        )  # fmt: skip
        texts = [
            row[longest : longest + new].tolist()
            for row, (_, new) in zip(written, self.prompts, strict=True)
        ]
        return texts, [time.monotonic() - began] * len(self.prompts)

    def joining(self) -> tuple[list[list[int]], list[float]]:
        """As `alone`, by the engine that texts join and leave at every token."""
        from recipe.inference.payloads import Request

        began = time.monotonic()
        rows: list[Any] = []
        for ids, new in self.prompts:
            request = Request(
                texts=[" ".join(map(str, ids))],
                parameters={"max_new_tokens": new, "do_sample": False},
            )
            rows += self.served.continuous.add(self.served.prompts.of(request), deque())
        engine = self.served.continuous.engine
        firsts: dict[int, float] = {}
        while not all(row.is_over for row in rows):
            engine.step()
            for place, row in enumerate(rows):
                if place not in firsts and len(row.ids) > len(self.prompts[place][0]):
                    firsts[place] = time.monotonic() - began
        engine.leave(rows)
        texts = [row.ids[len(ids) :] for row, (ids, _) in zip(rows, self.prompts, strict=True)]
        return texts, [firsts[place] for place in range(len(rows))]


def main() -> None:
    """Compare the three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import torch

    from recipe.inference.generation.generator import Generator
    from recipe.inference.origin import Origin

    torch.set_num_threads(1)
    drawn = random.Random(0)
    prompts = [
        ([drawn.randrange(2, 8000) for _ in range(drawn.choice([4, 20, 60, 200]))],
         drawn.choice([8, 16, 32, 64, 128]))
        for _ in range(options.prompts)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        workload = Workload(Generator.load(Origin(folder, {}), {}), prompts)
    assert workload.served.continuous is not None
    ways = {
        "each alone, `generate`": workload.alone,
        "one batch, `generate`": workload.batched,
        "the image's engine": workload.joining,
    }
    best: dict[str, tuple[float, float, list[float]]] = {}
    expected: list[list[int]] = []
    same: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            clock, cpu = time.monotonic(), time.process_time()
            texts, firsts = way()
            spent = time.monotonic() - clock, time.process_time() - cpu
            expected = expected or texts
            same[name] = sum(one == other for one, other in zip(texts, expected, strict=True))
            if name not in best or spent[1] < best[name][1]:
                best[name] = (*spent, sorted(firsts))
    count = sum(new for _, new in prompts)
    dtype = workload.served.loaded.model.dtype
    print(f"{options.prompts} prompts, {count} new tokens, {dtype}, one thread\n")
    print("| way | tokens/s | tokens/CPU-s | first token p50 | p99 | texts as alone |")
    print("|---|---|---|---|---|---|")
    for name, (clock, cpu, firsts) in best.items():
        middle, late = firsts[len(firsts) // 2], firsts[-1 - len(firsts) // 100]
        print(
            f"| {name} | {count / clock:.1f} | {count / cpu:.1f} | {middle:.2f} s | {late:.2f} s "
            f"| {same[name]} of {options.prompts} |"
        )


if __name__ == "__main__":
    main()
