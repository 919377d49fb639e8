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
