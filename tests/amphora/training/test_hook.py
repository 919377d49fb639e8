"""What the hook does to the script's own processes, and what it leaves alone."""

from tests.support.job_tree import Tree

MARK = "import builtins\nbuiltins.chained = True\n"


def test_another_sitecustomize_still_runs(scripted: Tree) -> None:
    scripted.script(MARK, "sitecustomize.py").script("print('chained', chained)")
    assert "chained True" in scripted.train().stdout


def test_lines_are_whole_also_where_python_is_told_not_to_buffer(scripted: Tree) -> None:
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


def test_an_excepthook_of_the_scripts_own_is_called_too(scripted: Tree) -> None:
    scripted.script(
        "import sys\n"
        "theirs = sys.excepthook\n"
        "def hook(*error):\n    print('mine'); theirs(*error)\n"
        "sys.excepthook = hook\n"
        "raise LookupError('gone')"
    )
    assert "mine" in scripted.train().stdout
    assert scripted.failure and scripted.failure.startswith("LookupError: gone")


def test_what_a_process_without_the_hook_said_is_shown(scripted: Tree) -> None:
    scripted.script(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-I', '-c', 'raise OverflowError(7)']).returncode)"
    )
    assert scripted.train().returncode == 1
    assert scripted.failure and scripted.failure.startswith("The script ended with exit code 1")
    assert "OverflowError: 7" in scripted.failure[:1024]


PARSERS = """
import argparse, sys
first = argparse.ArgumentParser()
first.add_argument("--learning-rate")
_, rest = first.parse_known_args()
second = argparse.ArgumentParser()
second.add_argument("--epochs")
second.parse_known_args({again})
"""


def test_arguments_that_no_parser_of_the_script_takes_are_named(tree: Tree) -> None:
    """A script that asks for known arguments drops the others without a word."""
    given = {"learning_rate": "5e-5", "epochs": "2", "zzz": "1"}
    tree.configure({"sagemaker_program": "script.py", **given})
    for again in ("", "rest", "sys.argv[1:]"):
        done = tree.script(PARSERS.format(again=again)).train()
        assert done.returncode == 0
        lines = [line for line in done.stderr.splitlines() if "no parser of the script" in line]
        assert lines == [
            "amphora: no parser of the script takes --learning_rate; it takes --learning-rate",
            "amphora: no parser of the script takes --zzz",
        ]
    done = tree.script(PARSERS.format(again="") + "raise KeyError('gone')").train()
    assert "no parser of the script" not in done.stderr
    refused = tree.script(PARSERS.format(again="").replace("parse_known_args", "parse_args", 1))
    assert "no parser of the script" not in refused.train().stderr
