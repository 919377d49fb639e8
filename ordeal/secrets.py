"""Planted secrets in hyperparameters, the environment, URLs and files.

Searches runs that would show them, then all that the other campaigns have printed and written.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ordeal.common import PLANTED, Trial, failure, start
from ordeal.serving import Server
from tests.support.job_tree import Tree

NOWHERE = "no log, failure text, report, metric or response holds a planted secret"
USED = "the script itself still gets them"
PROMISES = (NOWHERE, USED)

HYPERPARAMETERS = {
    "api_key": "planted-as-a-hyperparameter-1",
    "db_password": 'pla\'nted "2" $x',
    "nested": {"inner": {"access_token": "planted-in-a-nested-one-3"}},
}
URL = "https://user:planted-in-a-url-4@host.invalid/simple"
KEY = "AKIAPLANTEDPLANTED55"
SECRETS = [
    *PLANTED.values(), "planted-as-a-hyperparameter-1", "planted-in-a-nested-one-3",
    "planted-in-a-url-4", KEY, "pla'nted", "planted-in-the-model's-environment-6",
]  # fmt: skip

SCRIPT = """
import os, sys
print("argv", sys.argv)
print("all", dict(os.environ))
print("in parts ", end="", flush=True); print(os.environ["HF_TOKEN"])
sys.stderr.write(open("notes.txt").read())
import hashlib
print("digest", hashlib.sha256(sys.argv[sys.argv.index("--api_key") + 1].encode()).hexdigest())
url, token = os.environ["ORDEAL_URL"], os.environ["HF_TOKEN"]
raise ValueError(f"cannot reach {url} with {token} {sys.argv}")
"""
HANDLERS = """
import os
def model_fn(model_dir): print("environment", dict(os.environ)); return None
def input_fn(body, content_type): raise ValueError("bad body, key " + os.environ["MY_API_KEY"])
def predict_fn(data, model): return data
"""


def run(trial: Trial) -> None:
    """Run a failing script, a failing install and failing handlers; then search."""
    _script(trial)
    _install(trial)
    _handlers(trial)
    roots = [trial.folder] if trial.short else [trial.folder.parent]
    for path in (file for root in roots for file in root.rglob("*")):
        if _is_output(path):
            trial.count("files searched")
            text = path.read_bytes()
            leaked = [secret for secret in SECRETS if secret.encode() in text]
            trial.check(NOWHERE, not leaked, f"{path}: {leaked}")


def _is_output(path: Path) -> bool:
    """Return whether the product wrote a file, rather than a campaign."""
    given = ("/input/", "/code/", "/channel/", "/rows/", ".hypothesis", "/config/")
    return path.is_file() and not any(part in str(path) for part in given)


def _script(trial: Trial) -> None:
    base = trial.folder / "script"
    Tree(base).configure({"sagemaker_program": "script.py", **HYPERPARAMETERS})
    (base / "code").mkdir()
    (base / "code" / "script.py").write_text(SCRIPT)
    (base / "code" / "notes.txt").write_text(f"aws_access_key_id = {KEY}\n")
    log = trial.folder / "script.log"
    code = start(base, "train", log, ORDEAL_URL=URL).wait(60)
    digest = hashlib.sha256(HYPERPARAMETERS["api_key"].encode()).hexdigest()  # type: ignore[attr-defined]
    trial.check(USED, digest in log.read_text(), "the script got another value")
    trial.check(USED, code == 1 and "ValueError" in failure(base), (code, failure(base)[:300]))


def _install(trial: Trial) -> None:
    base = trial.folder / "install"
    Tree(base).configure({"sagemaker_program": "script.py"})
    (base / "code").mkdir()
    (base / "code" / "script.py").write_text("pass")
    (base / "code" / "requirements.txt").write_text(f"--index-url {URL}\nno-such-dist==9\n")
    environ = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    code = start(base, "train", trial.folder / "install.log", **environ).wait(120)
    trial.check(USED, code == 2, (code, failure(base)[:300]))


def _handlers(trial: Trial) -> None:
    handlers_trial = Trial.begin("handlers", [], trial.folder / "handlers", 0, True)
    code = handlers_trial.folder / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(HANDLERS)
    with Server(handlers_trial, 1, MY_API_KEY="planted-in-the-model's-environment-6") as server:
        status, body = server.post()
        (trial.folder / "response.txt").write_bytes(body)
        (trial.folder / "metrics.txt").write_bytes(server.http.get("/metrics").content)
    trial.check(USED, status == 400 and b"bad body" in body, (status, body))
