"""What docs/ENDPOINTS.md tells Clarify, and what it does with captured files, on a real server's answers."""

import base64
import csv
import io
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import jmespath
import pytest

from tests.support import plain_answers, serving_kit
from tests.support.servers import served

PAGE = (Path(__file__).parents[2] / "docs" / "ENDPOINTS.md").read_text()
LABELS = ["everyday", "incident"]
TEXTS = [*serving_kit.TEXTS, 'she said "good", again\nand again', ""]
LINES = "application/jsonlines"


def block(mark: str, language: str) -> str:
    """The last block with this mark."""
    matches: list[str] = re.findall(rf"<!-- {mark} -->\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    return matches[-1]


ENDPOINT: dict[str, Any] = json.loads(block("request: CreateEndpointConfig", "json"))
CLARIFY = ENDPOINT["ExplainerConfig"]["ClarifyExplainerConfig"]["InferenceConfig"]
PREDICTOR: dict[str, Any] = json.loads(block("analysis", "json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose best label is not always the same."""
    folder = tmp_path_factory.mktemp("clarify") / "model"
    names = dict(enumerate(reversed(LABELS)))
    return serving_kit.save("BertForSequenceClassification", folder, num_labels=2, id2label=names)


@pytest.fixture(scope="module")
def url(model: Path, preloaded: Mapping[str, str]) -> Iterator[str]:
    with served(model.parent, preloaded, AMPHORA_DTYPE="float32") as server:
        yield f"{server.http.base_url}/invocations"


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, float]]:
    """The probability of each label for each text, by the library."""
    _, answers = plain_answers.classes(model, [{"text": text} for text in TEXTS])
    return [{entry["label"]: entry["score"] for entry in answer} for answer in answers]


def ask(url: str, body: str, kind: str) -> list[str]:
    answer = httpx.post(
        url, content=body.encode(), headers={"Content-Type": kind, "Accept": kind}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith(kind)
    return answer.text.splitlines()


pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("template", "probability", "headers"),
    [
        (CLARIFY["ContentTemplate"], CLARIFY["ProbabilityAttribute"], CLARIFY["LabelHeaders"]),
        (PREDICTOR["content_template"], PREDICTOR["probability"], PREDICTOR["label_headers"]),
    ],
)
def test_clarify_reads_the_probability_of_each_label(
    url: str, expected: list[dict[str, float]], template: str, probability: str, headers: list[str]
) -> None:
    lines = [template.replace("$features", json.dumps([text])) for text in TEXTS]
    assert jmespath.search(CLARIFY["FeaturesAttribute"], json.loads(lines[0])) == [TEXTS[0]]
    answers = [json.loads(line) for line in ask(url, "\n".join(lines), LINES)]
    assert len(answers) == len(TEXTS)
    best = set()
    for answer, wanted in zip(answers, expected, strict=True):
        numbers = jmespath.search(probability, answer)
        assert dict(zip(headers, numbers, strict=True)) == pytest.approx(wanted, abs=1e-5)
        (one,) = re.findall(r"For one class, use `(.*?)`", PAGE)
        assert jmespath.search(one, answer) == pytest.approx(wanted["incident"], abs=1e-5)
        (label,) = re.findall(r"for predicted labels, `(.*?)`", PAGE)
        assert jmespath.search(label, answer) == max(wanted, key=wanted.__getitem__)
        best.add(max(wanted, key=wanted.__getitem__))
    assert best == set(LABELS), "the order of labels would not be seen"


def test_csv_has_the_best_label_and_its_score(url: str, expected: list[dict[str, float]]) -> None:
    body = io.StringIO()
    csv.writer(body).writerows([text] for text in TEXTS)
    rows = list(csv.reader(ask(url, body.getvalue(), "text/csv")))
    for row, wanted in zip(rows, expected, strict=True):
        best = max(wanted, key=wanted.__getitem__)
        assert (row[0], float(row[1])) == (best, pytest.approx(wanted[best], abs=1e-5))


def test_captured_files_become_rows(url: str, tmp_path: Path) -> None:
    lines = []
    for inputs, encoding in ((TEXTS[:2], "JSON"), (TEXTS[2], "BASE64")):
        body = json.dumps({"inputs": inputs})
        answer = "".join(ask(url, body, "application/json"))
        sides = {
            name: {
                "observedContentType": "application/json",
                "mode": mode,
                "data": base64.b64encode(data.encode()).decode() if encoding == "BASE64" else data,
                "encoding": encoding,
            }
            for name, mode, data in (
                ("endpointInput", "INPUT", body),
                ("endpointOutput", "OUTPUT", answer),
            )
        }
        event = {"eventId": str(uuid.uuid4()), "inferenceTime": "2026-11-01T00:00:00Z"}
        lines.append(
            json.dumps({"captureData": sides, "eventMetadata": event, "eventVersion": "0"})
        )
    folder = tmp_path / "endpoint" / "all" / "2026" / "11"
    folder.mkdir(parents=True)
    (folder / "00.jsonl").write_text("\n".join(lines) + "\n")
    scope: dict[str, Any] = {}
    exec(block("run: captured", "python"), scope)
    rows = scope["captured"](tmp_path)
    assert [text for text, _ in rows] == TEXTS[:3]
    assert {label for _, label in rows} <= set(LABELS)
