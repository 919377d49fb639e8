"""The contract of script mode: what a user's script is given, and what becomes of its end."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.job_tree import Tree, wait_for

IMPORTS = "import json, multiprocessing, os, pathlib, signal, subprocess, sys, time\n"


@pytest.fixture
def job(tmp_path: Path) -> Tree:
    """A job of script.py."""
    return Tree(tmp_path / "ml").configure({"sagemaker_program": "script.py"})


def test_argv_and_environment(job: Tree) -> None:
    """Hyperparameters as SDK v2 sends them, which is JSON, and as v3 does, strings as they are."""
    sent = {
        "flag": "true", "layers": "[1, 2]", "lr": "1e-4", "n": "3", "name": '"a b"', "nothing": "null",
        "object": '{"b": 2, "a": {"c": 1}}', "raw": "plain 'words' $HOME", "version": "1.10",
        "sagemaker_program": '"script.py"', "sagemaker_job_name": '"a-job"',
    }  # fmt: skip
    names = [
        "SM_HPS", "SM_HP_NAME", "SM_CHANNELS", "SM_CHANNEL_TRAIN", "SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR",
        "SM_CURRENT_HOST", "SM_HOSTS", "SM_USER_ENTRY_POINT", "SM_MODULE_DIR", "SAGEMAKER_JOB_NAME",
    ]  # fmt: skip
    job.channel("train").configure(
        sent, resourceconfig={"current_host": "algo-1", "hosts": ["algo-1"]}, inputdataconfig={"train": {}}
    ).script(
        IMPORTS + f"values = {{name: os.environ[name] for name in {names}}}\n"
        "folders = [os.path.isdir(os.environ[name]) for name in ('SM_MODEL_DIR', 'SM_OUTPUT_DATA_DIR')]\n"
        "print(json.dumps([sys.argv[1:], values, os.getcwd(), folders, sys.path[0]]))"
    )  # fmt: skip
    done = job.train()
    assert (done.returncode, job.failure) == (0, None), done.stderr
    argv, values, folder, folders, first_path = json.loads(done.stdout)
    assert argv == [
        "--flag", "True", "--layers", "[1, 2]", "--lr", "1e-4", "-n", "3", "--name", "a b", "--nothing", "",
        "--object", "a={'c': 1},b=2", "--raw", "plain 'words' $HOME", "--version", "1.10",
    ]  # fmt: skip
    assert json.loads(values.pop("SM_HPS")) == {
        "flag": True, "layers": [1, 2], "lr": 1e-4, "n": 3, "name": "a b", "nothing": None,
        "object": {"b": 2, "a": {"c": 1}}, "raw": "plain 'words' $HOME", "version": 1.1,
    }  # fmt: skip
    base = str(job.base)
    assert values == {
        "SM_HP_NAME": "a b", "SM_CHANNELS": '["train"]', "SM_CHANNEL_TRAIN": f"{base}/input/data/train",
        "SM_MODEL_DIR": f"{base}/model", "SM_OUTPUT_DATA_DIR": f"{base}/output/data",
        "SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1"]', "SM_USER_ENTRY_POINT": "script.py",
        "SM_MODULE_DIR": f"{base}/code", "SAGEMAKER_JOB_NAME": "a-job",
    }  # fmt: skip
    assert (folder, folders, first_path) == (f"{base}/code", [True, True], f"{base}/code")


def test_hyperparameters_larger_than_a_command_line_may_be(job: Tree) -> None:
    values = {f"hp{n:03}": f'"{n:03}{"x" * 2490}"' for n in range(99)}
    job.configure({"sagemaker_program": "script.py", **values})
    done = job.script("import sys; print(len(sys.argv), sum(map(len, sys.argv[1:])))").train()
    assert done.stdout.split() == ["199", str(99 * (2493 + 7))], done.stderr
    assert "SM_HPS is left out" in done.stderr


def test_secrets_reach_no_log_argv_or_failure(job: Tree) -> None:
    secret = "hf_" + "s3cr3t" * 5
    values = {
        "hf_token": f'"{secret}"',
        "db": '{"user": "me", "password": "planted-word"}',
        "use_auth_token": "true",
    }
    job.configure({"sagemaker_program": "script.py", **values}).script(
        "import os, sys\n"
        "argv = open('/proc/self/cmdline').read()\n"
        "print('in argv:', os.environ['SM_HP_HF_TOKEN'] in argv, 'planted' in argv)\n"
        "assert sys.argv[1:4] == ['--db', 'password=planted-word,user=me', '--hf_token']\n"
        "assert sys.argv[4:] == [os.environ['SM_HP_HF_TOKEN'], '--use_auth_token', 'True']\n"
        "print(os.environ['SM_HP_HF_TOKEN'], os.environ['DB_PASSWORD'], flush=True)\n"
        "raise ValueError('refused: ' + sys.argv[4] + os.environ['DB_PASSWORD'])"
    )
    done = job.train(DB_PASSWORD="correct horse")
    everything = done.stdout + done.stderr + (job.failure or "")
    assert "in argv: False False" in done.stdout, done.stderr
    for hidden in (secret, "correct horse", "planted-word"):
        assert hidden not in everything
    assert job.failure and job.failure.startswith("ValueError: refused: ******")


def test_the_last_run_decides_between_success_and_failure(job: Tree) -> None:
    """Further ends, each with its reason, are in tests/amphora/training/test_failures.py."""
    output = job.base / "output"
    for script, code in (("raise SystemExit(17)", 17), ("print('hello')", 0), ("1 / 0", 1)):
        done = job.script(script).train()
        assert done.returncode == code, done.stderr
        assert (job.failure is None, (output / "success").exists()) == (code == 0, code == 0)
    assert job.failure and job.failure.startswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("script", "number", "code", "saved", "failure"),
    [
        *(pytest.param(
            "def save(*_): time.sleep(0.3); pathlib.Path('saved').write_text('model'); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
            "pathlib.Path('ready').touch(); time.sleep(600)\n",
            number, 0, "model", "", id=f"saves at {number.name}",
        ) for number in (signal.SIGTERM, signal.SIGINT)),
        pytest.param(
            "pathlib.Path('ready').touch(); time.sleep(600)", signal.SIGTERM, 143, "", "Stopped by SIGTERM",
            id="does not care",
        ),
        pytest.param(
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "command = ['sh', '-c', 'trap \"\" TERM; sleep 600; true']\n"
            "child = subprocess.Popen(command, start_new_session=True)\n"
            "pathlib.Path('saved').write_text(str(child.pid)); pathlib.Path('ready').touch(); time.sleep(600)\n",
            signal.SIGTERM, 137, None, "did not end in time and was killed", id="ignores it",
        ),
        # A helper that SIGTERM ends (a data loader's worker, wandb, ffmpeg) fails the step to be saved.
        pytest.param(
            "def work(kind): pathlib.Path(kind).touch(); time.sleep(600)\n"
            "if __name__ == '__main__':\n"
            "    workers = [multiprocessing.get_context(kind).Process(target=work, args=(kind,), daemon=True)\n"
            "               for kind in ('fork', 'spawn')]\n"
            "    for worker in workers: worker.start()\n"
            "    command = [sys.executable, '-c', 'print(input() + input())']\n"
            "    helpers = [subprocess.Popen(line, shell=shell, stdin=-1, stdout=-1, text=True, start_new_session=shell)\n"
            "               for line, shell in ((command, False), ('touch pipe; cat | cat', True))]\n"
            "    def stop(*_):\n"
            "        time.sleep(0.5)\n"
            "        alive = [worker.is_alive() for worker in workers]\n"
            "        answers = [helper.communicate('a\\nb\\n')[0] for helper in helpers]\n"
            "        pathlib.Path('saved').write_text(str([*alive, *answers]))\n"
            "        sys.exit(0)\n"
            "    signal.signal(signal.SIGTERM, stop)\n"
            "    while not all(map(os.path.exists, ('fork', 'spawn', 'pipe'))): time.sleep(0.02)\n"
            "    pathlib.Path('ready').touch(); time.sleep(600)\n",
            signal.SIGTERM, 0, r"[True, True, 'ab\n', 'a\nb\n']", "", id="has helpers",
        ),
        pytest.param(
            "def save(*_): time.sleep(1); pathlib.Path('saved').write_text('model'); sys.exit(0)\n"
            "def work():\n"
            "    signal.signal(signal.SIGTERM, save); pathlib.Path('ready').touch(); time.sleep(600)\n"
            "if __name__ == '__main__':\n"
            "    rank = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    rank.start(); rank.join()\n",
            signal.SIGTERM, 143, "model", "Stopped by SIGTERM", id="a rank of spawn saves",
        ),
    ],
)  # fmt: skip
def test_a_stop(
    job: Tree, script: str, number: int, code: int, saved: str | None, failure: str
) -> None:
    """The script has AMPHORA_STOP_SECONDS for saving; then it and its children are killed."""
    job.script(IMPORTS + script)
    process = job.start(**({"AMPHORA_STOP_SECONDS": "0.5"} if saved is None else {}))
    wait_for(job.code / "ready")
    process.send_signal(number)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    assert failure in (job.failure or "") and bool(job.failure) == bool(failure)
    written = (job.code / "saved").read_text() if (job.code / "saved").exists() else ""
    if saved is None:
        assert not os.path.exists(f"/proc/{int(written)}")  # noqa: PTH110
    else:
        assert written == saved
    # A stop is no error, which alarms on logs would count.
    assert ("ERROR" in output) == (code == 137), output
    assert "WARNING training was stopped" in output or code != 143


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [("",), ("0", "1")])
def test_wandb_runs_until_a_stopped_script_has_saved(job: Tree, ranks: Sequence[str]) -> None:
    enabled = str(len(ranks) > 1).lower()
    job.configure(
        {"sagemaker_program": "script.py", "sagemaker_torch_distributed_enabled": enabled}
    ).script(
        IMPORTS + "import wandb\n"
        "run, stopped = wandb.init(mode='offline', project='p'), []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))\n"
        "rank = os.environ.get('RANK', '')\n"
        "pathlib.Path('ready' + rank).touch()\n"
        "while not stopped: run.log({'loss': 1.0}); time.sleep(0.05)\n"
        "time.sleep(0.5); run.log({'last': 2.0}); run.finish()\n"
        "pathlib.Path('saved' + rank).touch()"
    )
    process = job.start(WANDB_DIR=str(job.base), AMPHORA_NPROC_PER_NODE=str(len(ranks)))
    for rank in ranks:
        wait_for(job.code / f"ready{rank}")
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert all((job.code / f"saved{rank}").exists() for rank in ranks)
    kept = [path.read_bytes() for path in job.base.glob("wandb/offline-run-*/*.wandb")]
    assert [b"last" in run for run in kept] == [True] * len(ranks)


@pytest.mark.parametrize(
    "line",
    [
        "python3 script.py 2>&1 | tee log",
        "exec > >(tee log) 2>&1; python3 script.py",
        "(trap 'wait; touch trapped' TERM; python3 script.py | cat > log & wait; wait)",
    ],
)
def test_a_stop_of_a_shell_script_leaves_the_readers_of_its_output(job: Tree, line: str) -> None:
    """The shell and its Python script get the signal; without a reader, the script cannot print."""
    job.configure({"sagemaker_program": "train.sh"}).script(f"{line}\n", "train.sh").script(
        IMPORTS + "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('saving', flush=True); pathlib.Path('saved').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "loader = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('training', flush=True); pathlib.Path('ready').touch(); time.sleep(600)"
    )
    process = job.start()
    wait_for(job.code / "ready")
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert (job.code / "saved").exists(), output
    assert (job.code / "log").read_text() == "training\nsaving\n"
    assert (job.code / "trapped").exists() == ("trap" in line)


def test_a_script_resumes_from_its_checkpoints(job: Tree) -> None:
    job.script(
        IMPORTS + "folder = pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'], 'checkpoints')\n"
        "folder.mkdir(exist_ok=True)\n"
        "stopped = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))\n"
        "for step in range(len(list(folder.iterdir())), 6):\n"
        "    (folder / str(step)).write_text(sys.argv[2])\n"
        "    while step == 2 and not stopped and sys.argv[2] == 'first': time.sleep(0.02)\n"
        "    if stopped: sys.exit(0)\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], 'model').touch()"
    )
    settings = {"sagemaker_program": "script.py"}
    process = job.configure(settings | {"run": "first"}).start()
    wait_for(job.base / "checkpoints" / "2")
    process.terminate()
    assert (process.communicate(timeout=240), process.returncode)[1] == 0
    assert not (job.base / "model" / "model").exists()
    done = job.configure(settings | {"run": "second"}).train()
    assert (done.returncode, (job.base / "model" / "model").exists()) == (0, True), done.stderr
    written = [(job.base / "checkpoints" / str(step)).read_text() for step in range(6)]
    assert written == ["first"] * 3 + ["second"] * 3


def test_a_daemon_left_behind_does_not_hold_the_job(job: Tree) -> None:
    """Nor does a process whose name is no text."""
    job.script(
        IMPORTS
        + "name = 'import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([255]), 0, 0, 0);'\n"
        "name += 'print(1, flush=True); time.sleep(600)'\n"
        "for command in (['sleep', '600'], [sys.executable, '-c', name]):\n"
        "    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
        "    if command[0] != 'sleep': child.stdout.readline()\n"
        "    print(child.pid)"
    )
    done = job.train()
    assert done.returncode == 0, done.stderr
    assert [os.path.exists(f"/proc/{pid}") for pid in done.stdout.split()] == [False, False]  # noqa: PTH110


def test_pipe_mode_gives_a_fifo_for_each_epoch(job: Tree) -> None:
    job.configure(
        {"sagemaker_program": "script.py"}, inputdataconfig={"train": {"TrainingInputMode": "Pipe"}}
    ).script("import os; print(open(os.environ['SM_CHANNEL_TRAIN'] + '_0').read())")
    fifo = job.base / "input" / "data" / "train_0"
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    process = job.start()
    fifo.write_text("piped words")
    output, _ = process.communicate(timeout=240)
    assert (process.returncode, "piped words" in output) == (0, True), output
