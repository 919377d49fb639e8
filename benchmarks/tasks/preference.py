"""Answers that are chosen or rejected by a rule; the reference is TRL's DPOTrainer.

    python benchmarks/tasks/preference.py FOLDER

writes a small Llama and a tokenizer of words to FOLDER: the model to give to run.py. It has learned
from texts, as a language model, that each animal likes two things, one as often as the other; the
chosen answer names the first of them among other words, the rejected one the second. Both variants
compute once what the model says of the answers before it is trained, as the recipe always does and
TRL with `precompute_ref_log_probs`; without that TRL computes it in each step. Dropout is off,
beta is 0.1.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from teaching import TEXTS_A_STEP, teach
from words import ANIMALS, FILLERS, THINGS

ARGUMENTS = ["--task", "preference", "--max_length", "128"]
SCORE = "share of pairs"
_VOCABULARY = 8192


def data(rows: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of 8 to 50 words with two answers of 3 to 35 words."""
    return _rows(random.Random(seed), rows, prompts=[5, 10, 20, 45], answers=[1, 2, 4, 16])


def _rows(
    drawn: random.Random, rows: int, prompts: list[int], answers: list[int]
) -> list[dict[str, Any]]:
    """Prompts and answers with as many other words as one of these numbers."""
    made = []
    for _ in range(rows):
        at = drawn.randrange(len(ANIMALS))
        words = drawn.choices(FILLERS, k=drawn.choice(prompts))
        words.insert(drawn.randrange(len(words)), f"the {ANIMALS[at]}")
        texts = []
        for thing in (at, (at + 1) % len(THINGS)):
            before, after = (drawn.choices(FILLERS, k=drawn.choice(answers)) for _ in "ab")
            texts.append(" " + " ".join([*before, THINGS[thing], *after]))
        prompt = " ".join([*words, "likes"])
        made.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
    return made


def reference(model: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> Any:
    """The DPOTrainer."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        **settings,
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


def judge(folder: Path, rows: list[dict[str, Any]]) -> float:
    """The share of pairs whose chosen thing the saved model thinks likelier than the other one, at
    the place of the chosen answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    right = 0
    for row in rows:
        words = row["chosen"].split()
        at = next(place for place, word in enumerate(words) if word in THINGS)
        other = next(word for word in row["rejected"].split() if word in THINGS)
        head = " ".join([row["prompt"], *words[:at]])
        with torch.no_grad():
            logits = model(**tokenizer(head, return_tensors="pt")).logits[0, -1]
        chosen, rejected = (tokenizer.convert_tokens_to_ids(word) for word in (words[at], other))
        right += bool(logits[chosen] > logits[rejected])
    return right / len(rows)


def make(folder: str) -> None:
    """A Llama of four layers, 256 wide, that knows what the animals like."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "the", "likes", *ANIMALS, *THINGS, *FILLERS]
    known = {word: number for number, word in enumerate(dict.fromkeys(words))}
    known |= {f"<{number}>": number for number in range(len(known), _VOCABULARY)}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=256,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=1024, max_position_embeddings=256,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    def texts(drawn: random.Random) -> tuple[list[str], list[str]]:
        rows = _rows(drawn, TEXTS_A_STEP, prompts=[1, 2, 5], answers=[1, 2, 4])
        said = [row["prompt"] + row[drawn.choice(["chosen", "rejected"])] for row in rows]
        return said, said

    teach(model, tokenizer, texts, lambda step: 1e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(*sys.argv[1:])
