"""A tiny real model and small labelled data, made here: no test needs a network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

CODE = Path(__file__).resolve().parents[2] / "code"
sys.path.insert(0, str(CODE))

WORDS = ["the", "film", "was", "good", "great", "bad", "awful", "truly", "number", ","]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, hidden size 32, with a WordPiece tokenizer, saved without a head."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny-bert"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    digits = [str(digit) for digit in range(10)]
    pieces = [*special, *WORDS, *digits, *(f"##{digit}" for digit in digits)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast = BertTokenizerFast(tokenizer_object=tokenizer, vocab=vocabulary, model_max_length=64)
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reviews() -> Callable[[int], list[tuple[str, str]]]:
    """A function of n to n (text, label) rows that a tiny model can learn to tell apart."""

    def make(count: int) -> list[tuple[str, str]]:
        kinds = [("good", "great", "pos"), ("bad", "awful", "neg")]
        rows = []
        for number in range(count):
            first, second, label = kinds[number % 2]
            rows.append((f"the film number {number} was {first} , truly {second}", label))
        return rows

    return make


@pytest.fixture(scope="session")
def train(tiny_model: Path) -> Run:
    """Runs code/train.py in a process of its own, as an image does."""

    def run(
        base: Path,
        channels: Mapping[str, Path],
        *arguments: str,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SAGEMAKER_"))}
        variables = {f"SM_CHANNEL_{name.upper()}": str(path) for name, path in channels.items()}
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
            launcher += ["--master_port", "0", "--rdzv_backend", "c10d"]
            launcher += ["--rdzv_endpoint", "localhost:0"]
        return subprocess.run(
            [*launcher, str(CODE / "train.py"), *arguments],
            env={
                **inherited,
                "HF_HUB_OFFLINE": "1",
                # Threads that wait for each other are slow where tests share the cores.
                "OMP_NUM_THREADS": "1",
                "SAGEMAKER_BASE_DIR": str(base),
                **variables,
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run
