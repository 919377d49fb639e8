"""What a release and other people's CI rest on: versions that agree, a workflow that calls what exists, and the
documentation's site, of which every link leads somewhere."""

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from ordeal import audit

ROOT = Path(__file__).parents[2]


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "container" / "pyproject.toml").read_text())["project"][
        "version"
    ]
    headings = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == version
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])


def workflow(name: str = "check") -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load(
        (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    )
    return read


def test_every_lock_of_an_image_is_audited_and_none_passed_over() -> None:
    workflow_text = workflow("audit")
    assert workflow_text["permissions"] == {"contents": "read"}
    named = {
        lock
        for path in ROOT.glob("Dockerfile.*")
        for lock in re.findall(r"locks/([\w-]+)\.txt", path.read_text())
    }
    assert set(audit.LOCKS) == named - {"sbom"}
    assert workflow_text["jobs"]["audit"]["steps"][-1]["run"] == "python -m ordeal.audit"
    makefile = (ROOT / "Makefile").read_text()
    assert "$(BIN)/python -m ordeal.audit" in makefile
    assert "`make audit`" in (ROOT / "docs" / "RELEASING.md").read_text()
    assert '"--strict"' in inspect.getsource(audit.find_vulnerabilities)


def test_the_workflow_runs_what_the_one_check_runs_and_may_read_only() -> None:
    job = workflow()["jobs"]["make"]
    targets = set(job["strategy"]["matrix"]["target"])
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    script = (ROOT / ".ci" / "run").read_text()
    steps = re.findall(r"^step (?:make|beside) (.+)$", script, re.MULTILINE)
    checked = {word for step in steps for word in step.split() if not word.startswith("--")}
    # torch-xla's environment is 7.5 GB: too much for a free machine.
    assert targets == checked - {"test-xla", "setup"}
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    workflow_text = workflow()
    assert workflow_text["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow_text[True], (
        "a stranger's code would run with our rights"
    )


def test_actions_are_named_by_commit() -> None:
    """A tag can be moved to other code."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        lines = [line for line in path.read_text().splitlines() if "uses:" in line]
        assert lines
        for line in lines:
            assert re.search(r"uses: actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_no_link_is_kept() -> None:
    # One to an environment outside has once taken the place of everyone's own.
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    links = [line for line in listed.stdout.splitlines() if line.startswith("120000 ")]
    assert not links


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DOCS = ROOT / "docs"
EDIT = "https://github.com/someone/amphora/edit/main"


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs`."""
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    folders = ["-c", str(DOCS / "site"), "-d", str(site / ".doctrees"), str(source), str(site)]
    address = ["-D", f"edit_address={EDIT}"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, *address, *folders],
        text=True,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(DOCS, folder)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.heavy
def test_pages_mentions_and_docstrings_are_there(site: Path) -> None:
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    home = (site / "index.html").read_text()
    for name in ("TRAINING", "SERVING", "site/examples", "site/recipe"):
        assert f'href="{name}.html"' in home
    assert (site / "_static" / "logo.svg").is_file()
    # A section that a page names after the page.
    estimators = (site / "ESTIMATORS.html").read_text()
    assert (
        'href="TRAINING.html#packages-for-your-code">Training, Packages for your code<'
        in estimators
    )
    edited = {"index": "README", "ESTIMATORS": "docs/ESTIMATORS", "site/security": "SECURITY"}
    for page, source in edited.items():
        assert f'href="{EDIT}/{source}.md"' in (site / f"{page}.html").read_text()
    assert EDIT not in (site / "REFERENCE.html").read_text()
    package = (site / "site" / "amphora.html").read_text()
    assert 'id="amphora-contract-job"' in package and 'id="amphora-common-logs"' in package
    text = re.sub(r"<[^>]*>", "", package)
    assert "read_job(environ" in text and "class Job" in text
    errors = re.sub(r"<[^>]*>", "", (site / "site" / "errors.html").read_text())
    assert "has … different values in … rows: too many for classes." in errors
    assert "Name the column of the classes in the hyperparameter label_column." in errors
    assert "Write --key value." in errors  # no dash in place of the option's
    assert 'id="recipe-tasks-base"' in (site / "site" / "recipe.html").read_text()


PASTED = {
    "HyperparameterError: Hyperparameter learnin_rate (value '1') is not known. Did you mean learning_rate?": (
        "Errors: Hyperparameter … (value …) is not known.",
        "site/errors.html#hyperparametererror-",
    ),
    "AlgorithmError: Out of memory: lower the batch size or max_length, or take a larger instance. train.py, line 3": (
        "Troubleshooting: out of memory: lower the batch size",
        "TROUBLESHOOTING.html#out-of-memory-",
    ),
    "how can I resume a stopped job": (
        "Training: Resume a stopped job",
        "TRAINING.html#resume-a-stopped-job",
    ),
}


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("query", PASTED)
def test_the_search_finds_an_error_with_a_users_values(site: Path, query: str) -> None:
    address = f"{(site / 'search.html').as_uri()}?q={urllib.parse.quote(query)}"
    headless = [str(CHROMIUM), "--headless", "--no-sandbox", "--virtual-time-budget=20000"]
    shown = subprocess.run(
        [*headless, "--dump-dom", address], capture_output=True, text=True, check=True
    ).stdout.split('id="search-results"')[-1]
    links = re.findall(r'<li[^>]*><a href="([^"]*)"[^>]*>(.*?)</a>', shown)
    title, target = PASTED[query]
    assert links, shown[-2000:]
    href, text = links[0]
    assert re.sub(r"<[^>]*>", "", text).startswith(title) and href.startswith(target)


@pytest.mark.heavy
def test_what_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """A mention, an anchor and a page."""
    source = tmp_path / "docs"
    source.mkdir()
    text = "see docs/NOWHERE.md, [this](#nowhere) and [that](other.md)"
    (source / "index.md").write_text(f"# A page\n\n{text}\n")
    built = build(source, tmp_path / "site")
    assert built.returncode != 0
    for says in ("docs/NOWHERE.md is mentioned, and is no page", "'nowhere'", "other.md"):
        assert says in built.stderr


def test_the_pages_are_what_the_code_says() -> None:
    program = (
        "import json, runpy; print(json.dumps(runpy.run_path('docs/reference.py')['pages']()))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for path, text in json.loads(made).items():
        assert (ROOT / path).read_text() == text, "run: .venv/bin/python docs/reference.py"
        assert "text-classification" in text


def test_the_drawings_are_what_the_program_draws() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["DRAWINGS"]
    assert len(drawings) >= 4
    for name, draw in drawings.items():
        committed = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert committed == draw().text(), "run: .venv/bin/python docs/diagrams.py"
