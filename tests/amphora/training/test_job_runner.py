"""`amphora train` on users' scripts: real processes, their exit codes and the failure file."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amphora.training import process_tree
from tests.support.job_tree import Tree, wait_for


def test_a_mistake_in_a_recipes_job_is_told_once_and_without_frames(tree: Tree) -> None:
    tree.configure({}).script(
        "class Mistake(Exception):\n    is_users_mistake = True\n"
        "raise Mistake('lr is 0; ' + 'give more') from ValueError('an inner reason')",
        "train.py",
    )
    result = tree.train(AMPHORA_CODE_DIR=str(tree.base / "code"))
    assert result.returncode == 1 and tree.failure
    assert tree.failure.startswith("Mistake: lr is 0; give more")
    for text in (result.stdout + result.stderr, tree.failure):
        assert text.count("lr is 0; give more") == 1, text
        assert "Traceback" not in text and "train.py:" not in text and "inner" not in text


def test_the_lines_that_a_mistake_proposes_are_whole(tree: Tree) -> None:
    lines = [f"- text_column={'review' * 20} label_column={number}" for number in range(3)]
    tree.configure({}).script(
        "class Mistake(Exception):\n    is_users_mistake = True\n"
        f"raise Mistake({chr(10).join(['so and so, ' * 90, *lines])!r})",
        "train.py",
    )
    result = tree.train(AMPHORA_CODE_DIR=str(tree.base / "code"))
    assert result.returncode == 1 and tree.failure
    for text in (result.stderr, tree.failure[:1024]):
        assert [line for line in text.splitlines() if line[:2] == "- "] == lines, text


def test_a_process_that_ends_while_processes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Path("/proc/0"), Path(f"/proc/{os.getpid()}")]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listed))
    assert process_tree._children() == {os.getppid(): [os.getpid()]}


def test_a_file_where_a_folder_should_be(scripted: Tree) -> None:
    scripted.script("")
    (scripted.base / "output").write_text("")
    result = scripted.train()
    assert result.returncode == 2 and "cannot be created" in result.stderr


def test_a_secret_for_a_shell_script_stands_in_its_variable(tree: Tree) -> None:
    tree.script(
        '[ "$2" = amphora-secret:SM_HP_HF_TOKEN ] && echo "given ${#SM_HP_HF_TOKEN}"', "run.sh"
    )
    tree.configure({"sagemaker_program": "run.sh", "hf-token": "hf_plantedplantedplanted"})
    result = tree.train()
    assert "given 24" in result.stdout, result.stderr


def test_a_missing_configuration_reaches_the_failure_file(tree: Tree) -> None:
    result = tree.train()
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert tree.failure and "no configuration folder" in tree.failure
    assert not (tree.base / "model").exists()


def test_arguments_that_transformers_5_ignores_end_the_job_before_the_script(
    scripted: Tree,
) -> None:
    scripted.script("import tokens").script(
        "from transformers import AutoTokenizer\nprint('started')\n"
        "AutoTokenizer.from_pretrained('model')('a text', pad_to_max_length=True)",
        "tokens.py",
    )
    result = scripted.train()
    assert result.returncode == 2 and "started" not in result.stdout
    assert scripted.failure and 'write padding="max_length"' in scripted.failure
    assert "tokens.py, line 3: pad_to_max_length has no effect" in scripted.failure


def test_intermediate_output_is_uploaded_by_the_platform_or_refused(tree: Tree) -> None:
    job = {"sagemaker_program": "s.py", "sagemaker_s3_output": "s3://bucket/prefix"}
    tree.script("import os; print(os.listdir(os.environ['SM_OUTPUT_INTERMEDIATE_DIR']))", "s.py")
    assert tree.configure(job).train().returncode == 2
    assert tree.failure and "sagemaker_s3_output is 's3://bucket/prefix'" in tree.failure
    assert "checkpoint_s3_uri" in tree.failure
    tree.configure({**job, "sagemaker_s3_output": "file:///tmp/output"})
    assert "[]" in tree.train().stdout
    # The folder exists now, as if the platform had created it.
    assert "[]" in tree.configure(job).train().stdout


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        (f"{sys.executable} -m torch.distributed.run --standalone train.py", True),
        ("python3 /usr/bin/torchrun train.py", True),
        ("mpirun --host a:1,b:1 python3 train.py", True),
        ("/bin/sh -c PATH=/opt/bin:$PATH orted -mca ess env", True),
        ("/bin/bash -e -c true && accelerate launch train.py", True),
        ("python3 -m accelerate.commands.launch train.py", True),
        ("python3 /usr/bin/deepspeed train.py", True),
        ("/bin/bash /opt/ml/input/data/sm_drivers/sm_train.sh", True),
        ("python3 /opt/ml/code/train.py --lr 1", False),
        ("python3 /opt/ml/code/run-torchrun.py --lr 1", False),
        ("python3 accelerate_launch.py --plugin deepspeed", False),
        ("python3 /opt/ml/code/train.py --deepspeed ds.json", False),
    ],
)
def test_launchers_are_known_by_their_command_lines(command: str, is_launcher: bool) -> None:
    assert bool(process_tree._LAUNCHER.search(command)) == is_launcher


def test_a_stop_at_the_very_start_is_a_stop(scripted: Tree) -> None:
    # The stop arrives with the first instruction after its handler is there.
    stopped_at_once = """
import contextlib, os, signal
from amphora.cli import main
from amphora.training.process_tree import Signals
caught = Signals.caught
@contextlib.contextmanager
def stopped():
    with caught() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        yield signals
Signals.caught = stopped
raise SystemExit(main())
"""
    scripted.command = lambda: [sys.executable, "-c", stopped_at_once, "train"]  # type: ignore[method-assign]
    result = scripted.train()
    assert result.returncode == 143, result.stderr
    assert scripted.failure == "Stopped by SIGTERM before the script had started.\n"


def test_as_pid_one_orphans_are_reaped(scripted: Tree) -> None:
    """In a pid namespace of its own, as in a container."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to make a pid namespace here")
    scripted.script(
        "import os, subprocess, time\n"
        "orphan = subprocess.run(['sh', '-c', 'sleep 0.2 >&2 & echo $!'], capture_output=True).stdout\n"
        "end = time.monotonic() + 30\n"
        "while (there := os.path.exists(f'/proc/{int(orphan)}')) and time.monotonic() < end:\n"
        "    time.sleep(0.05)\n"
        "print(os.getppid(), there)"
    )
    result = scripted.train(prefix=unshare)
    assert (result.returncode, result.stdout.split()) == (0, ["1", "False"]), result.stderr


def test_the_rest_of_a_model_that_was_killed_half_written_is_not_uploaded(scripted: Tree) -> None:
    scripted.configure({"sagemaker_program": "script.py"})
    scripted.script(
        "import os, signal, time\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "half = Path(os.environ['SM_MODEL_DIR'], '.arriving-x')\nhalf.mkdir()\n"
        "(half / 'model.safetensors').write_text('half')\nprint('writing', flush=True)\n"
        "time.sleep(60)"
    )
    job = scripted.start(AMPHORA_STOP_SECONDS="1")
    wait_for(scripted.base / "model" / ".arriving-x" / "model.safetensors")
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert list((scripted.base / "model").iterdir()) == []


def test_a_job_ends_below_a_parent_that_ignores_the_end_of_children(scripted: Tree) -> None:
    scripted.script("import sys\nsys.exit(3)")
    ignoring = ["/bin/bash", "-c", "trap '' CHLD; exec \"$@\"", "bash"]
    assert scripted.train(prefix=ignoring).returncode == 3


def test_what_a_script_leaves_imports_and_prints(scripted: Tree) -> None:
    assert "there is no model" in scripted.script("").train().stderr
    scripted.script("import os; open(os.environ['SM_MODEL_DIR'] + '/model.pth', 'w').write('x')")
    assert "there is no model" not in scripted.train().stderr
    # Another sitecustomize still runs.
    mark = "import builtins\nbuiltins.chained = True\n"
    scripted.script(mark, "sitecustomize.py").script("print('chained', chained)")
    assert "chained True" in scripted.train().stdout
    # Lines are whole also where Python is told not to buffer.
    scripted.script("import sys\nprint(sys.stdout.line_buffering, sys.stdout.write_through)")
    for unbuffered in ("", "1"):
        assert "True False" in scripted.train(PYTHONUNBUFFERED=unbuffered).stdout


def test_a_line_is_passed_on_when_it_is_written(scripted: Tree) -> None:
    scripted.script("print('first')\nimport time; time.sleep(30)")
    process = scripted.start()
    assert process.stdout is not None
    while "first" not in (line := process.stdout.readline()):
        assert line, "it ended without a word"
    process.terminate()
    process.communicate(timeout=240)


def test_a_scripts_own_excepthook_is_called_and_what_a_process_without_ours_said_is_shown(
    scripted: Tree,
) -> None:
    scripted.script(
        "import sys\n"
        "theirs = sys.excepthook\n"
        "def hook(*error):\n    print('mine'); theirs(*error)\n"
        "sys.excepthook = hook\n"
        "raise LookupError('gone')"
    )
    assert "mine" in scripted.train().stdout
    assert scripted.failure and scripted.failure.startswith("LookupError: gone")
    scripted.script(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-I', '-c', 'raise OverflowError(7)']).returncode)"
    )
    assert scripted.train().returncode == 1
    assert scripted.failure and scripted.failure.startswith("The script ended with exit code 1")
    assert "OverflowError: 7" in scripted.failure[:1024]


def test_arguments_that_no_parser_of_the_script_takes_are_named(tree: Tree) -> None:
    """A script that asks for known arguments drops the others without a word."""
    parsers = """
import argparse, sys
first = argparse.ArgumentParser()
first.add_argument("--learning-rate")
_, rest = first.parse_known_args()
second = argparse.ArgumentParser()
second.add_argument("--epochs")
second.parse_known_args({again})
"""
    given = {"learning_rate": "5e-5", "epochs": "2", "zzz": "1"}
    tree.configure({"sagemaker_program": "script.py", **given})
    for again in ("", "rest", "sys.argv[1:]"):
        done = tree.script(parsers.format(again=again)).train()
        assert done.returncode == 0
        lines = [line for line in done.stderr.splitlines() if "no parser of the script" in line]
        assert lines == [
            "amphora: no parser of the script takes --learning_rate; it takes --learning-rate",
            "amphora: no parser of the script takes --zzz",
        ]
    done = tree.script(parsers.format(again="") + "raise KeyError('gone')").train()
    assert "no parser of the script" not in done.stderr
    refused = tree.script(parsers.format(again="").replace("parse_known_args", "parse_args", 1))
    assert "no parser of the script" not in refused.train().stderr


@pytest.mark.heavy
def test_several_processes_on_cpus_train_one_model(tree: Tree) -> None:
    """Ranks begin with other weights and see other rows: alone, each would end with its own model."""
    tree.configure(
        {"sagemaker_program": "script.py", "sagemaker_torch_distributed_enabled": "true"}
    ).script(
        "import os, torch\n"
        "from accelerate import Accelerator, PartialState\n"
        "PartialState()  # as many scripts have it, for main_process_first()\n"
        "accelerator = Accelerator()\n"
        "torch.manual_seed(int(os.environ['RANK']))\n"
        "model = accelerator.prepare(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    accelerator.backward(model(torch.randn(2, 4)).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "weights = [weight.tolist() for weight in model.parameters()]\n"
        "print('world', accelerator.num_processes, weights)"
    )
    done = tree.train(
        AMPHORA_NPROC_PER_NODE="3", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", USE_TORCH_XLA="0"
    )
    lines = re.findall(r"^world .*", done.stdout, re.MULTILINE)
    assert len(lines) == 3 and len(set(lines)) == 1 and "world 3 " in lines[0], done.stderr
