"""Batch transform jobs: the service's way of cutting a file into requests and of joining the answers,
against a server of a tiny real model."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import IN_FLOAT32, Running
from tests.support.tiny_models import WORDS, save

NAMES = {0: "sad", 1: "glad", 2: "neither"}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("transform")
    save("BertForSequenceClassification", base / "model", seed=4, id2label=NAMES)
    environ = {**preloaded, **IN_FLOAT32, "SAGEMAKER_BATCH": "true",
               "SAGEMAKER_MODEL_SERVER_TIMEOUT": "600"}  # fmt: skip
    with Running(base, environ) as running:
        yield running.ready()


def transform(server: Running, lines: list[bytes], kind: str, strategy: str) -> list[bytes]:
    """Answer a file's lines as a job with SplitType=Line and AssembleWith=Line does.

    A request has a line, or as many as fit in 16 kB, and requests are sent in parallel; the answers
    of a file are joined in its order. A refused request fails the job.
    """
    chunks: list[list[bytes]] = []
    for line in lines:
        if (
            strategy == "SingleRecord"
            or not chunks
            or sum(map(len, chunks[-1])) + len(line) > 16_000
        ):
            chunks.append([])
        chunks[-1].append(line)
    most = server.http.get("/execution-parameters").json()["MaxConcurrentTransforms"]

    def ask(chunk: list[bytes]) -> list[bytes]:
        headers = {"content-type": kind, "accept": "application/jsonlines"}
        body = b"\n".join(chunk) + b"\n"
        answer = server.http.post("/invocations", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.content.splitlines()

    with ThreadPoolExecutor(min(most, 16)) as threads:
        return [line for answer in threads.map(ask, chunks) for line in answer]


def texts_of(count: int) -> list[str]:
    return [" ".join(WORDS[(i * step) % len(WORDS)] for step in (1, 5, 7)[: i % 3 + 1]) + f" {i}"
            for i in range(count)]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize(
    "count", [1_000, pytest.param(20_000, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.parametrize("kind", ["application/jsonlines", "text/csv; header=absent"])
def test_both_strategies_answer_each_line_and_alike(server: Running, kind: str, count: int) -> None:
    """Wrong and blank lines, too, at the ends of requests and of the file."""
    is_csv = kind.startswith("text/csv")
    lines = [
        (text if is_csv else json.dumps({"inputs": text})).encode() for text in texts_of(count)
    ]
    wrong = {0: b"", 7: b'"', 8: b"\xff", 11: b"a, b", 12: b'{"inputs": 7, "id": 9}'}
    for number in range(0, count, 100):
        for offset, line in wrong.items():
            # A quote that stands open in CSV is one across lines.
            if not (is_csv and line == b'"'):
                lines[number + offset] = line
    lines[-1] = b""
    many, single = (transform(server, lines, kind, s) for s in ("MultiRecord", "SingleRecord"))
    assert len(many) == len(single) == count
    failed = 0
    for line, one, other in zip(lines, map(json.loads, many), map(json.loads, single), strict=True):
        assert ("error" in one) == ("error" in other), line
        if "error" in one:
            failed += 1
            assert one["error"]["code"] == other["error"]["code"]
        else:
            assert one["label"] == other["label"]
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    assert failed == count // 100 * (4 if is_csv else 5) + 1
