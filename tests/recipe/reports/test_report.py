"""The report: what it says, that it is one file that shows nothing wrong, and a look at it."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from recipe.data.labels import NUMBER, SEVERAL, Labels
from recipe.hyperparameters import Hyperparameters
from recipe.reports import figures, model_card, predictions, report
from recipe.reports.model_card import Facts
from recipe.training.forecast import Stopwatch

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PROBE = "<script>document.title='run by a text'</script>"
HISTORY = [
    {"step": 1, "loss": 2.0, "learning_rate": 5e-5},
    {"step": 2, "loss": 1.0, "learning_rate": 2e-5},
    {"step": 2, "eval_loss": 1.5, "eval_accuracy": 0.5, "eval_runtime": 1.0},
]
SINGLE_LABEL = predictions.Predictions(
    split="test",
    labels=Labels(("cost $5$", "<b>bold</b>")),
    outputs=np.array([[2.0, -2.0], [3.0, -3.0], [0.5, 0.0], [-2.0, 2.0]]),
    true=np.array([0, 1, 1, 1]),
    rows=[{"text": text, "other": f"other {PROBE}"} for text in
          ("right", f"most wrong {PROBE}", "a little wrong", "x" * 1000)],
    columns=["text"],
)  # fmt: skip


def material(
    answers: predictions.Predictions | None = SINGLE_LABEL, **changes: Any
) -> report.Material:
    facts = Facts(
        base_model="some/model",
        hyperparameters=Hyperparameters(hf_token="hf_planted").as_text(),
        about=model_card.describe_classifier((answers or SINGLE_LABEL).labels, ("text",)),
        decisions=[("data", "4 rows")],
        metrics={"eval_accuracy": 0.25, "test_accuracy": 0.5, "train_samples_per_second": 8.0},
    )
    values: dict[str, Any] = {
        "facts": facts,
        "history": HISTORY,
        "sections": () if answers is None else answers.sections(),
        "lengths": np.array([4, 8, 12, 16]),
        "max_length": 20,
        "computed_tokens": 50,
        "phases": {"data": 0.5, "training": 1799.5},
        "price_per_hour": 2.0,
        "hosts": 3,
        "epochs": 449.875,  # 10 tokens a second
    }
    return report.Material(**{**values, **changes})


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the figures out of a page: to draw them takes a second and more."""
    monkeypatch.setattr(figures, "svg", lambda figure: Markup("<svg></svg>"))


def words(page: str) -> str:
    """The page's text without the figures."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", page, flags=re.S))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `material()`. Its figures take a second."""
    return report.write(material(), tmp_path_factory.mktemp("report"))


def test_it_is_one_page_with_its_figures(written: Path) -> None:
    page = written.read_text()
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]
    assert page.count("<svg") == 3
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert "hf_planted" not in page
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert "#1f2328" not in page


def test_its_figures_are_right(written: Path) -> None:
    text = " ".join(words(written.read_text()).split())
    assert "0.5 test accuracy" in text
    assert "1.0 texts per second 10 tokens per second 20% padding" in text
    assert "30.0 min time" in text
    assert "data 0.500 training 1799.500" in text
    assert "3 cost (3 x 2 an hour)" in text
    assert "1.000 0.333 0.500 3" in text, "precision, recall, F1 and rows of the second class"
    assert "cost" not in " ".join(report._tiles(material(price_per_hour=None)))


@pytest.mark.parametrize("columns", [["text"], ["text", "other"]])
@pytest.mark.usefixtures("undrawn")
def test_the_worst_mistake_comes_first_and_is_shown_as_text(
    columns: list[str], tmp_path: Path
) -> None:
    answers = dataclasses.replace(SINGLE_LABEL, columns=columns)
    assert PROBE not in report.write(material(answers), tmp_path).read_text()
    shown = [row[0] for row in answers.sections()[-1].rows]
    second = f"\n\nother {PROBE}" * (len(columns) - 1)
    assert shown == [f"most wrong {PROBE}{second}", f"a little wrong{second}"]


@pytest.mark.parametrize(
    ("labels", "true"),
    [
        (Labels(("a", "b"), SEVERAL), np.array([[1.0, 0.0], [0.0, 0.0]])),
        (Labels(("stars",), NUMBER), np.array([3.1, -3.0], np.float32)),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_sets_of_labels_and_numbers_have_reports_too(
    tmp_path: Path, labels: Labels, true: Any
) -> None:
    given = predictions.Predictions(
        split="evaluation",
        labels=labels,
        outputs=np.array([[2.0, -2.0], [3.0, -3.0]])[:, : len(labels.names)],
        true=true,
        rows=[{"text": "first"}, {"text": "second"}],
        columns=["text"],
    )
    page = report.write(material(given), tmp_path).read_text()
    assert "confusion" not in page.lower()
    drawn = [section for section in given.sections() if section.figure]
    assert len(drawn) == (labels.problem == NUMBER)
    assert given.sections()[-1].rows[0][0] == "second"
    if labels.problem == NUMBER:
        assert [line["true"] for line in given.lines()] == [3.1, -3.0]


@pytest.mark.usefixtures("undrawn")
def test_a_run_resumed_after_its_last_evaluation_has_a_report(tmp_path: Path) -> None:
    page = report.write(material(None), tmp_path).read_text()
    assert page.count("<svg") == 2
    assert "mistakes" not in page


def test_axes_have_numbers_that_a_reader_reads() -> None:
    scores = {"eval_accuracy": 0.0, "eval_f1_macro": 0.25, "eval_perplexity": 2000.0}
    history = [{"step": step, "loss": 0.5, "learning_rate": 1e-5, **scores} for step in (1, 2)]
    with figures.style():
        page = figures.svg(figures.loss(history)) + figures.svg(figures.evaluation(history))
    assert "mathdefault" not in page
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert {"accuracy", "f1 macro"} < set(labels) and "perplexity" not in labels
    assert not [label for label in labels if label.startswith("\N{MINUS SIGN}")]
    assert not {"1.25", "1.50"} & set(labels), "there is no step between two steps"


@pytest.mark.usefixtures("undrawn")
def test_it_names_the_job_and_leaves_out_what_is_another_task_s(tmp_path: Path) -> None:
    chosen = Hyperparameters(task="text-classification", class_weight="balanced").as_text()
    facts = dataclasses.replace(material().facts, job_name="reviews-1", hyperparameters=chosen)
    text = " ".join(words(report.write(material(facts=facts), tmp_path).read_text()).split())
    assert re.search(r"some/model · reviews-1 · 20\d\d-\d\d-\d\d \d\d:\d\d UTC", text)
    assert "class_weight balanced" in text
    assert not re.search(r"mlm_probability|\bbeta\b|loss_type", text)
    assert "train_samples_per_second" not in text, "it would contradict the tile"


def test_a_stopwatch_adds_up_laps() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(times))
    for name in ("data", "training", "data"):
        watch.lap(name)
    assert watch.seconds == {"data": 5.0, "training": 2.0}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_it_whole(written: Path, tmp_path: Path) -> None:
    page = written
    browser = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
    browser += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,2400"]
    shot = tmp_path / "shot.png"
    # One start for both: a headless browser takes seconds to come up.
    done = subprocess.run(
        [*browser, f"--screenshot={shot}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert shot.stat().st_size > 30_000, "an empty page is a few kilobytes"
    dom = done.stdout
    assert "<title>Training report</title>" in dom, "a text of the data ran as a script"
    assert dom.count("</svg>") == 3
    assert "cost $5$" in dom
