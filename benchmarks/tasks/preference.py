"""Answers that people chose or rejected: `harmless-base/test.jsonl.gz` of
github.com/anthropics/hh-rlhf; the reference is TRL's DPOTrainer.

Its model is what `small_llama.py` writes. Both variants compute once what the model says of the
answers before it is trained, as the recipe always does and TRL with `precompute_ref_log_probs`;
without that TRL computes it in each step. Dropout is off, beta is 0.1. Conversations of fewer than
128 tokens, so that nothing is truncated.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from samples import drawn

BETA = 0.1
ARGUMENTS = ["--task", "preference", "--max_length", "128", "--beta", str(BETA)]
_TURN = "\n\nAssistant:"
_CHARACTERS = 320


def data(rows: int, seed: int, source: Path) -> list[dict[str, Any]]:
    """Read the last answers of conversations, and what they share as the prompt."""
    pairs = []
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            both = json.loads(line)
            prompt, _, chosen = both["chosen"].rpartition(_TURN)
            other, _, rejected = both["rejected"].rpartition(_TURN)
            longest = len(prompt) + max(len(chosen), len(rejected))
            if prompt == other and chosen.strip() and rejected.strip() and longest < _CHARACTERS:
                pairs.append({"prompt": prompt + _TURN, "chosen": chosen, "rejected": rejected})
    return drawn(pairs, rows, seed)


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """Make the DPOTrainer."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        **settings,
        beta=BETA,
        gradient_checkpointing=False,
        max_length=128,
        precompute_ref_log_probs=True,
    )
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def judge(folder: Path, rows: list[dict[str, Any]], before: str) -> dict[str, float]:
    """Measure DPO's loss of other pairs, and the share of them whose chosen answer the training
    has made likelier than the rejected one."""
    import torch
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    after, first = (
        _log_probabilities(str(folder), tokenizer, rows),
        _log_probabilities(before, tokenizer, rows),
    )
    margins = BETA * ((after[:, 0] - first[:, 0]) - (after[:, 1] - first[:, 1]))
    return {
        "share of pairs": float((margins > 0).float().mean()),
        "loss": float(-torch.nn.functional.logsigmoid(margins).mean()),
    }


def _log_probabilities(folder: str, tokenizer: Any, rows: list[dict[str, Any]]) -> Any:
    """Compute those of each row's chosen and rejected answer: [rows, 2]."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    results = []
    for row in rows:
        start = len(tokenizer(row["prompt"])["input_ids"])
        for answer in (row["chosen"], row["rejected"]):
            ids = [*tokenizer(row["prompt"] + answer)["input_ids"], tokenizer.eos_token_id]
            tokens = torch.tensor([ids])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
            log_probabilities = logits.gather(-1, tokens[0, 1:, None])[start - 1 :]
            results.append(float(log_probabilities.sum()))
    return torch.tensor(results).view(-1, 2)
