"""Log-probabilities of completions: those of transformers' workers beside vLLM's."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import IN_FLOAT32, Running
from tests.vllm.conftest import START_SECONDS, Serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2 * START_SECONDS)]
BODY = {"prompt": ["red cat: é", "a", "blue"], "max_tokens": 1, "temperature": 0}


def test_scores_are_those_of_vllm(
    serve: Serve, model: Path, tmp_path: Path, preloaded: Mapping[str, str]
) -> None:
    shutil.copytree(model / "model", tmp_path / "model")
    shutil.rmtree(tmp_path / "model/adapters")
    theirs = serve(tmp_path).ready(START_SECONDS)
    (tmp_path / "ours").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / "ours/model")

    def choices(server: Running, body: Mapping[str, Any]) -> list[Any]:
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return list(reply.json()["choices"])

    with Running(tmp_path / "ours", {**preloaded, **IN_FLOAT32}) as ours:
        ours.ready()
        for more in (
            {"logprobs": 1, "echo": True}, {"logprobs": 3, "max_tokens": 4}, {"echo": True},
            {"logprobs": 0, "echo": True}, {"logprobs": 2, "echo": True, "max_tokens": 0},
            {"logprobs": 1, "echo": True, "prompt": [9, 7, 8]},
        ):  # fmt: skip
            body = {**BODY, **more}
            for mine, other in zip(choices(ours, body), choices(theirs, body), strict=True):
                for name in ("index", "text", "finish_reason"):
                    assert mine[name] == other[name], body
                if "logprobs" not in body:
                    assert mine["logprobs"] is other["logprobs"] is None
                    continue
                actual, expected = mine["logprobs"], other["logprobs"]
                assert actual.keys() == expected.keys()
                assert actual["tokens"] == expected["tokens"]
                assert actual["text_offset"] == expected["text_offset"]
                assert actual["token_logprobs"] == pytest.approx(
                    expected["token_logprobs"], abs=1e-4
                )
                for some, tops in zip(
                    actual["top_logprobs"], expected["top_logprobs"], strict=True
                ):
                    assert some == (tops if tops is None else pytest.approx(tops, abs=1e-4))
