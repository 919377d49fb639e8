"""AMPHORA_COMPILE=1: torch.compile in the workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import CODE
from tests.support.servers import LABELS, Running, save_model

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]


@pytest.mark.long
def test_a_compiled_model_answers_as_the_plain_one(tmp_path: Path, tokenizer: Any) -> None:
    save_model("BertForSequenceClassification", tmp_path / "model", tokenizer, {"id2label": LABELS})
    texts = ["good", "the film was bad", "anna said the film was good again in paris"]
    answers = []
    for compiled in ("0", "1"):
        cache = tmp_path / f"cache-{compiled}"
        environ = {"AMPHORA_CODE_DIR": str(CODE), "AMPHORA_DTYPE": "float32"}
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        server = Running(tmp_path, {**environ, "AMPHORA_COMPILE": compiled})
        try:
            answers.append([server.ready(250).invoke(text).json()[0] for text in texts])
            assert any(cache.rglob("*.cpp")) == (compiled == "1")
        finally:
            server.close()
    for plain, same in zip(*answers, strict=True):
        assert same["label"] == plain["label"]
        assert same["score"] == pytest.approx(plain["score"], abs=1e-4)
