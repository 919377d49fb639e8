"""Teaching a small model by generated texts, before a benchmark trains it further."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

STEPS = 400
TEXTS_A_STEP = 32


def teach(
    model: Any,
    tokenizer: Any,
    texts: Callable[[random.Random], tuple[list[str], list[str]]],
    rate: Callable[[int], float],
) -> None:
    """Train in bfloat16, on one thread.

    Args:
        texts: The texts of a step, and what the model is to say of them.
        rate: The learning rate of a step.
    """
    import torch

    torch.set_num_threads(1)
    drawn = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        read, written = texts(drawn)
        batch = tokenizer(read, padding=True, return_tensors="pt")
        target = tokenizer(text_target=written, padding=True, return_tensors="pt")
        labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
