"""What a release and other people's CI rest on: versions that agree, a workflow that calls what exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

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
    job = workflow_text["jobs"]["audit"]
    named = {
        lock
        for path in ROOT.glob("Dockerfile.*")
        for lock in re.findall(r"locks/([\w-]+)\.txt", path.read_text())
    }
    assert set(job["strategy"]["matrix"]["lock"]) == named - {"sbom"}
    command = job["steps"][-1]["run"]
    assert "--strict" in command
    # The release checklist has the same command.
    checklist = (ROOT / "docs" / "RELEASING.md").read_text()
    assert command.split("--requirement")[0] in checklist


def test_the_workflow_runs_what_the_one_check_runs() -> None:
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


def test_the_workflow_may_read_only() -> None:
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


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_is_one(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions) > 1
    assert all(part["type"] in {"textarea", "input"} for part in questions)
    assert all(part["attributes"]["label"] for part in questions)


def test_no_link_is_kept() -> None:
    # One to an environment outside has once taken the place of everyone's own.
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    links = [line for line in listed.stdout.splitlines() if line.startswith("120000 ")]
    assert not links
