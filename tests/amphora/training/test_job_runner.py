"""`amphora train` on users' scripts: real processes, their exit codes and the failure file."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.support.job_tree import Tree, wait_for
from tests.support.until import until


def test_success_and_failure_exclude_each_other(scripted: Tree) -> None:
    scripted.script("print('hello')")
    output = scripted.base / "output"
    output.mkdir(parents=True)
    (output / "failure").write_text("an earlier run's")
    result = scripted.train()
    assert (result.returncode, scripted.failure) == (0, None), result.stderr
    assert "hello" in result.stdout
    assert (output / "success").read_bytes() == b""
    scripted.script("raise SystemExit(1)").train()
    assert scripted.failure and not (output / "success").exists()


def test_a_script_sees_its_hyperparameters_and_channels(tree: Tree) -> None:
    tree.channel("train").configure(
        {"sagemaker_program": '"s.py"', "lr": "1e-4", "name": '"a b"', "flag": "true"}
    ).script(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['SM_CHANNEL_TRAIN'], os.environ['SM_HP_NAME']]))",
        "s.py",
    )
    argv, channel, name = json.loads(tree.train().stdout)
    assert argv == ["--flag", "True", "--lr", "1e-4", "--name", "a b"]
    assert channel == str(tree.base / "input" / "data" / "train") and name == "a b"


@pytest.mark.parametrize("cause", ["", "from ValueError('an inner reason')"])
def test_a_mistake_in_a_recipes_job_is_told_once_and_without_frames(tree: Tree, cause: str) -> None:
    tree.configure({}).script(
        "class Mistake(Exception):\n    is_users_mistake = True\n"
        f"raise Mistake('lr is 0; ' + 'give more') {cause}",
        "train.py",
    )
    result = tree.train(AMPHORA_CODE_DIR=str(tree.base / "code"))
    assert result.returncode == 1 and tree.failure
    assert tree.failure.startswith("Mistake: lr is 0; give more")
    for text in (result.stdout + result.stderr, tree.failure):
        assert text.count("lr is 0; give more") == 1, text
        assert "Traceback" not in text and "train.py:" not in text and "inner" not in text


@pytest.mark.parametrize("name", ["model", "output"])
def test_a_file_where_a_folder_should_be(scripted: Tree, name: str) -> None:
    scripted.script("")
    (scripted.base / name).write_text("")
    result = scripted.train()
    assert result.returncode == 2 and "cannot be created" in result.stderr


def test_a_secret_for_a_shell_script_stands_in_its_variable(tree: Tree) -> None:
    tree.script(
        '[ "$2" = amphora-secret:SM_HP_HF_TOKEN ] && echo "given ${#SM_HP_HF_TOKEN}"', "run.sh"
    )
    tree.configure({"sagemaker_program": "run.sh", "hf-token": "hf_plantedplantedplanted"})
    result = tree.train()
    assert "given 24" in result.stdout, result.stderr


def test_secrets_reach_no_log_argv_or_failure(tree: Tree) -> None:
    secret = "hf_" + "s3cr3t" * 5
    values = {
        "hf_token": f'"{secret}"',
        "db": '{"user": "me", "password": "planted-word"}',
        "use_auth_token": "true",
    }
    tree.configure({"sagemaker_program": "s.py", **values}).script(
        "import os, sys\n"
        "argv = open('/proc/self/cmdline').read()\n"
        "print('in argv:', os.environ['SM_HP_HF_TOKEN'] in argv, 'planted' in argv)\n"
        "assert sys.argv[1:4] == ['--db', 'password=planted-word,user=me', '--hf_token']\n"
        "assert sys.argv[4:] == [os.environ['SM_HP_HF_TOKEN'], '--use_auth_token', 'True']\n"
        "print(os.environ['SM_HP_HF_TOKEN'], os.environ['DB_PASSWORD'], flush=True)\n"
        "raise ValueError('refused: ' + sys.argv[4] + os.environ['DB_PASSWORD'])",
        "s.py",
    )
    result = tree.train(DB_PASSWORD="correct horse")
    everything = result.stdout + result.stderr + (tree.failure or "")
    assert "in argv: False False" in result.stdout, result.stderr
    for hidden in (secret, "correct horse", "planted-word"):
        assert hidden not in everything
    assert tree.failure and tree.failure.startswith("ValueError: refused: ******")


@pytest.mark.parametrize(
    ("text", "says"), [(None, "no configuration folder"), ("{", "not valid JSON")]
)
def test_a_wrong_configuration_reaches_the_failure_file(
    tree: Tree, text: str | None, says: str
) -> None:
    if text is not None:
        tree.configure(text)
    result = tree.train()
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert tree.failure and says in tree.failure
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


def test_hyperparameters_larger_than_a_command_line_may_be(tree: Tree) -> None:
    tree.configure(
        {"sagemaker_program": "s.py", **{f"hp{n:03}": f'"{n:03}{"x" * 2490}"' for n in range(99)}}
    ).script("import sys; print(len(sys.argv), sum(map(len, sys.argv[1:])))", "s.py")
    result = tree.train()
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["199", str(99 * (2493 + 7))]
    assert "SM_HPS is left out" in result.stderr


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


class TestStop:
    """SIGTERM and SIGINT: the script has a budget, then everything is killed."""

    SAVES = (
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.3); pathlib.Path('saved').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_the_script_saves_and_its_exit_code_counts(self, scripted: Tree, number: int) -> None:
        scripted.script(self.SAVES)
        process = scripted.start()
        wait_for(scripted.base / "code" / "ready")
        process.send_signal(number)
        process.communicate(timeout=60)
        assert (process.returncode, scripted.failure) == (0, None)
        assert (scripted.base / "code" / "saved").exists()

    def test_a_script_that_does_not_care_ends_and_says_so(self, scripted: Tree) -> None:
        scripted.script("import pathlib, time\npathlib.Path('ready').touch()\ntime.sleep(60)")
        process = scripted.start()
        wait_for(scripted.base / "code" / "ready")
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 143
        assert scripted.failure and scripted.failure.startswith("Stopped by SIGTERM")
        assert "WARNING training was stopped, exit code 143" in output and "ERROR" not in output

    def test_out_of_budget_it_is_killed_with_all_its_children(self, scripted: Tree) -> None:
        scripted.script(
            "import pathlib, signal, subprocess, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "child = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 60; true'], start_new_session=True)\n"
            "pathlib.Path('ready').write_text(str(child.pid))\n"
            "time.sleep(60)"
        )
        process = scripted.start(AMPHORA_STOP_SECONDS="0.5")
        ready = scripted.base / "code" / "ready"
        wait_for(ready)
        child = int(until(ready.read_text))
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 137
        assert not os.path.exists(f"/proc/{child}")  # noqa: PTH110
        assert scripted.failure and "did not end in time and was killed" in scripted.failure

    def test_helpers_of_the_script_are_left_to_it(self, scripted: Tree) -> None:
        """A data loader's worker killed by our SIGTERM would fail the step that is to be saved."""
        scripted.script(
            "import multiprocessing, pathlib, signal, sys, time\n"
            "def work(kind): pathlib.Path(kind).touch(); time.sleep(60)\n"
            "if __name__ == '__main__':\n"
            "    kinds = ('fork', 'spawn')\n"
            "    workers = [\n"
            "        multiprocessing.get_context(kind).Process(target=work, args=(kind,), daemon=True)\n"
            "        for kind in kinds]\n"
            "    for worker in workers: worker.start()\n"
            "    def stop(*_):\n"
            "        time.sleep(0.5)\n"
            "        pathlib.Path('alive').write_text(str([worker.is_alive() for worker in workers]))\n"
            "        sys.exit(0)\n"
            "    signal.signal(signal.SIGTERM, stop)\n"
            "    time.sleep(60)\n"
        )
        process = scripted.start()
        wait_for(scripted.base / "code" / "fork")
        wait_for(scripted.base / "code" / "spawn")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert (scripted.base / "code" / "alive").read_text() == "[True, True]"

    def test_ranks_of_spawn_can_save_though_their_parent_dies(self, scripted: Tree) -> None:
        scripted.script(
            "import multiprocessing, pathlib, signal, sys, time\n"
            "def save(*_):\n    time.sleep(1); pathlib.Path('saved').touch(); sys.exit(0)\n"
            "def work():\n"
            "    signal.signal(signal.SIGTERM, save); pathlib.Path('ready').touch(); time.sleep(60)\n"
            "if __name__ == '__main__':\n"
            "    rank = multiprocessing.get_context('spawn').Process(target=work)\n"
            "    rank.start(); rank.join()\n"
        )
        process = scripted.start()
        wait_for(scripted.base / "code" / "ready")
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 143 and (scripted.base / "code" / "saved").exists()

    def test_a_process_of_an_unreadable_name_harms_nothing(self, scripted: Tree) -> None:
        scripted.script(
            "import ctypes, subprocess, sys\n"
            "name = 'import ctypes, time; ctypes.CDLL(None).prctl(15, bytes([255]), 0, 0, 0);'\n"
            "name += 'print(1, flush=True); time.sleep(60)'\n"
            "child = subprocess.Popen(\n"
            "    [sys.executable, '-c', name], stdout=subprocess.PIPE, start_new_session=True)\n"
            "child.stdout.readline()"
        )
        assert scripted.train().returncode == 0


def test_a_daemon_left_behind_does_not_hold_the_job(scripted: Tree) -> None:
    scripted.script(
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    )
    result = scripted.train()
    assert result.returncode == 0
    assert not os.path.exists(f"/proc/{result.stdout.strip()}")  # noqa: PTH110


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
    result = subprocess.run(
        [*unshare, *scripted.command()],
        env=scripted.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout.split()) == (0, ["1", "False"]), result.stderr


def test_two_ranks_reduce_though_the_host_does_not_know_its_own_name(scripted: Tree) -> None:
    unshare = ["unshare", "--uts", "sh", "-c", 'hostname nobody-knows.invalid; exec "$@"', "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a host name for one process needs root")
    scripted.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(total)\n"
        "print('rank', dist.get_rank(), 'total', total.item(), 'threads', torch.get_num_threads())\n"
        "dist.destroy_process_group()"
    )
    result = subprocess.run(
        [*unshare, *scripted.command()],
        env=scripted.environment(AMPHORA_NPROC_PER_NODE="2", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert f"rank {rank} total 3.0 threads 1" in result.stdout


class TestPipe:
    """Pipe mode: one FIFO for each epoch of a channel, which the platform writes to."""

    def test_a_script_reads_the_fifo(self, scripted: Tree) -> None:
        scripted.configure(
            {"sagemaker_program": "script.py"},
            inputdataconfig={"train": {"TrainingInputMode": "Pipe"}},
        ).script("import os; print(open(os.environ['SM_CHANNEL_TRAIN'] + '_0').read())")
        data = scripted.base / "input" / "data"
        data.mkdir()
        os.mkfifo(data / "train_0")
        process = scripted.start()
        (data / "train_0").write_text("piped words")
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "piped words" in output

    def test_the_recipe_says_that_it_wants_files(self, tree: Tree) -> None:
        tree.configure(inputdataconfig={"train": {"TrainingInputMode": "Pipe"}})
        assert tree.train().returncode != 0
        assert tree.failure and "Pipe" in tree.failure[:1024] and "FastFile" in tree.failure[:1024]
