"""The table of failures: what stands in the first 1,024 characters, and the exit code."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from amphora.training import failure
from amphora.training.exception_records import Record
from amphora.training.launch import HOOK_DIR
from tests.support.job_tree import Tree
from tests.support.preloading import run_script

# Two processes that gloo joins.
GLOO = (
    "import datetime, os, torch, torch.distributed as dist\n"
    "end = os.pipe()\nrank = int(os.fork() == 0)\nstore = dist.FileStore('store', 2)\n"
    "seconds = datetime.timedelta(seconds=3)\n"
    "dist.init_process_group('gloo', timeout=seconds, rank=rank, world_size=2, store=store)\n"
    "dist.barrier()\n"
)
LOST_PEER = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"
# A rank prints exceptions as with torch.
SHOW_RANK = (
    "import contextlib, io, os, sys\n"
    "def show(*error):\n"
    "    with contextlib.redirect_stderr(io.StringIO()) as text: hook(*error)\n"
    "    for line in text.getvalue().splitlines(): print(f'[rank{rank}]: {line}', file=sys.stderr)\n"
    "hook, sys.excepthook = sys.excepthook, show\n"
)
# Two ranks of which one notices, as by gloo, that the other has gone. They print exceptions and end as
# with torch, whose import takes seconds.
MOCK_PEERS = SHOW_RANK + (
    "import atexit, socket, time\n"
    "rank, wire = os.environ['RANK'], socket.socket(socket.AF_UNIX)\n"
    "def lose_peer():\n    wire.recv(1); atexit.register(time.sleep, 1)\n"
    f"    raise RuntimeError({LOST_PEER!r})\n"
    "if rank == '0': wire.bind('wire'); wire.listen(); wire = wire.accept()[0]\n"
    "while rank == '1':\n    try: wire.connect('wire'); break\n    except OSError: time.sleep(0.01)\n"
)


# pip builds with the packages that are installed, and uses no index.
OFFLINE = (("PIP_NO_BUILD_ISOLATION", "0"), ("PIP_NO_INDEX", "1"))


@dataclass(frozen=True)
class Case:
    script: str
    code: int
    says: tuple[str, ...]
    first: str = ""
    """What the text starts with."""
    files: tuple[tuple[str, str], ...] = ()
    hyperparameters: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    is_launcher: bool = False


# The last line of a script's errors, and a part of the remedy.
@pytest.mark.parametrize(("line", "remedy"), {
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.": "ran out of memory",
    "RuntimeError: A process in the process pool was terminated abruptly while": "ran out of memory",
    "RuntimeError: One of the subprocesses has abruptly died during map operation.": "ran out of memory",
    "OSError: [Errno 28] No space left on device: '/dev/shm/torch_1_2'": "--shm-size",
    "OSError: [Errno 28] No space left on device": "volume_size",
    "ModuleNotFoundError: No module named 'no_such_module'": "requirements.txt, next to the script",
    "ModuleNotFoundError: No module named 'my_helper'": "dependencies=",
    "ModuleNotFoundError: No module named 'torch_xla'": "image for Trainium",
    "ModuleNotFoundError: No module named 'smdistributed'": "DistributedDataParallel",
    "ModuleNotFoundError: No module named 'sagemaker_containers'": "is now sagemaker_training",
    "ModuleNotFoundError: No module named 'horovod'": "image is for PyTorch",
    "ImportError: cannot import name 'load_metric' from 'datasets' (datasets/__init__.py)": "evaluate.load",
    "ImportError: cannot import name 'HfFolder' from 'huggingface_hub' (__init__.py)": "get_token",
    "ImportError: cannot import name 'Repository' from 'huggingface_hub' (__init__.py)": "upload_folder",
    "ImportError: cannot import name 'cached_download' from 'huggingface_hub' (x.py)": "hf_hub_download",
    "AttributeError: 'Accelerator' object has no attribute 'use_fp16'": "accelerator.mixed_precision",
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'logging_dir'": "project_dir=",
    "TypeError: Accelerator.__init__() got an unexpected keyword argument 'split_batches'": "dataloader_config",
    "ImportError: cannot import name 'prepare_model_for_int8_training' from 'peft'": "kbit_training",
    "ImportError: cannot import name 'AutoModelWithLMHead' from 'transformers'": "--transformers 4",
    "KeyError: 'SM_CHANNEL_VALIDATION'": "no channel of that name",
    "FileNotFoundError: Couldn't find a module script at /glue.py. Module 'glue' doesn't exist on the"
    " Hugging Face Hub either.": "cannot reach the Hub",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "lower the batch size",
    "MemoryError: Unable to allocate 1.0 EiB": "larger instance",
    "torch.distributed.DistNetworkError: The client socket has timed out": "communication error",
    "KeyError: 'heartbeat'": "\n(exit code 1)",
}.items())  # fmt: skip
def test_an_exception_has_its_remedy(line: str, remedy: str, tmp_path: Path) -> None:
    tail = ["Traceback (most recent call last):", line]
    ended = failure.Ended(pid=1, is_script=False, exit_code=1, tail=tail)
    head = failure.diagnose(ended, tmp_path).head
    assert head.startswith(line) and remedy in head


# Exceptions that end the script itself.
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in {
    "long exception": Case(
        "raise RuntimeError('begin ' + 'x' * 2000 + ' the last words')", 1,
        ("script.py:1", " ... ", "the last words\n"), "RuntimeError: begin xxx",
    ),
    "exception in a library": Case(
        "import json, runpy\ndef load(): json.loads('{')\nif __name__ == 'again': load()\n"
        "runpy.run_path('script.py', run_name='again')", 1, ("script.py:2 in load",), "json.decoder.JSONDecodeError"
    ),
    "exception with a cause": Case(
        "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
        1, ("script.py:2", "raised as ValueError: second"), "ZeroDivisionError: division by zero\n",
    ),
    "time-out of asyncio": Case(
        "import asyncio\nasync def load():\n"
        "    try: await asyncio.wait_for(asyncio.sleep(9), 0.01)\n"
        "    except asyncio.TimeoutError as e: raise RuntimeError('the download hangs') from e\nasyncio.run(load())",
        1, ("TimeoutError\n", "script.py:3 in load", "raised as RuntimeError: the download hangs"),
    ),
    "exception raised by the block that handles another": Case(
        "try: {}['lr']\nexcept KeyError: raise ValueError('no such setting')",
        1, ("script.py:1", "raised as ValueError: no such setting"), "KeyError: 'lr'\n",
    ),
    "exception of the way out that a handler took": Case(
        "def load(): raise FileNotFoundError('no data')\n"
        "try: import flash_attn_of_mine\nexcept ImportError: load()",
        1, ("script.py:1 in load", "while handling ModuleNotFoundError"), "FileNotFoundError: no data",
    ),
    "exception that cannot be told": Case(
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Odd",
        1, ("script.py:3", "cannot be shown"), "Odd: ",
    ),
    "exception in a data loader's worker": Case(
        "from torch.utils.data import DataLoader\n"
        "class Rows(list):\n    def __getitem__(self, at):\n        raise ValueError(f'row {at} is broken')\n"
        "if __name__ == '__main__': next(iter(DataLoader(Rows([1, 2]), num_workers=1)))",
        1, ("script.py:4 in __getitem__",), "ValueError: row 0 is broken\n",
    ),
    "exception while a data set is made": Case(
        "import datasets\ndef rows():\n    yield {'a': 1}\n    raise KeyError('column')\n"
        "datasets.Dataset.from_generator(rows, cache_dir='cache')",
        1, ("script.py:4 in rows", "raised as datasets"), "KeyError: 'column'\n",
    ),
    "exception group": Case(
        "import sys\nif sys.version_info < (3, 11): from exceptiongroup import ExceptionGroup\n"
        "def f(): raise LookupError('leaf')\n"
        "try: f()\nexcept LookupError as e: leaf = e\n"
        "raise ExceptionGroup('two', [ExceptionGroup('one', [leaf]), KeyError(2)])",
        1, ("script.py:3 in f", "raised as ExceptionGroup: two"), "LookupError: leaf",
    ),
    "rank of mp.start_processes": Case(
        "import torch.multiprocessing as mp\ndef work(rank): raise ValueError(f'rank {rank} of spawn')\n"
        "mp.start_processes(work, nprocs=1, start_method='fork')",
        1, (), "ValueError: rank 0 of spawn",
    ),
    "collective that times out": Case(
        GLOO + "if rank == 1: os.close(end[1]); os.read(end[0], 1); os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))",
        1, ("ddp_timeout",), "RuntimeError: ",
    ),
    "torchrun of a rank that is killed and one that loses it": Case(
        SHOW_RANK + "rank = '1'\nfrom torch.distributed.elastic.multiprocessing import errors\n"
        f"if os.fork() == 0:\n    os.environ['RANK'] = '1'; raise RuntimeError({LOST_PEER!r})\n"
        "os.wait()\nprint('E1126 18:00:00.000 1 torch/distributed/elastic/api.py', file=sys.stderr)\n"
        "killed = errors.ProcessFailure(local_rank=0, pid=1, exitcode=-9, error_file='')\n"
        "raise errors.ChildFailedError('script.py', {0: killed})",
        137, ("SIGKILL", "rank 0"), "The script was killed by SIGKILL", is_launcher=True,
    ),
    "function that torch's launcher runs": Case(
        "import json\nfrom torch.distributed.elastic.multiprocessing import errors\n"
        "stack = 'Traceback (most recent call last):\\n  File \"script.py\", line 7, in fit\\n    fit()\\nKeyError: 0'\n"
        "open('e', 'w').write(json.dumps({'message': {'extraInfo': {'py_callstack': stack, 'timestamp': 1}}}))\n"
        "raise errors.ChildFailedError('fit', {0: errors.ProcessFailure(0, 1, 1, 'e')})",
        1, ("script.py:7 in fit: fit()", "rank 0"), "KeyError: 0\n",
    ),
    "communication lost to a process that left": Case(
        GLOO + "if rank == 1: os._exit(0)\ndist.all_reduce(torch.ones(1))", 1, ("communication error",),
    ),
}.items()])  # fmt: skip
def test_exception(case: Case, tmp_path: Path, preloaded: Mapping[str, str]) -> None:
    """In a fork that has the libraries and the hook, without a job around it."""
    script = tmp_path / "script.py"
    script.write_text(case.script)
    (records := tmp_path / "records").mkdir()
    environ = {
        "PYTHONPATH": str(HOOK_DIR),
        "AMPHORA_ERROR_DIR": str(records),
        "AMPHORA_SCRIPT_DIR": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
    }
    done = run_script(preloaded, [str(script)], environ, tmp_path)
    # The last one, since processes below the script end before it.
    record = max(map(Record.read, records.glob("*.json")), key=lambda record: record.time)
    ended = failure.Ended(
        pid=record.pid,
        is_script=not case.is_launcher,
        exit_code=done.returncode,
        tail=done.stderr.splitlines(),
    )
    diagnosis = failure.diagnose(ended, records)
    check(case, diagnosis.text, diagnosis.exit_code, done.stderr)
    assert diagnosis.text.count("\n  at ") <= 1


@pytest.mark.parametrize("case", [pytest.param(
    case, id=name, marks=[pytest.mark.heavy] * (name == "one rank is killed")
) for name, case in {
    "requirements that are not read": Case(
        "import flash_attn_of_mine", 1, ("src/requirements.txt is not read: move it to the top",),
        files=(("src/requirements.txt", "flash_attn"),),
    ),
    "segmentation fault": Case(
        "import ctypes\ndef read():\n    ctypes.string_at(0)\nread()", 139, ("script.py:3 in read",),
        "The script was ended by SIGSEGV",
    ),
    "exception below a checked command": Case(
        "raise LookupError('deep')", 1, ("script.py:1",), "LookupError: deep\n",
        files=(("outer.py", "import subprocess, sys\n"
                "subprocess.run([sys.executable, '-c', 'import flash_attn'])\n"
                "subprocess.run([sys.executable, 'middle.py'], check=True)"),
               ("middle.py", "import subprocess\nsubprocess.check_call('python3 script.py --a \"b c\"', shell=True)")),
        hyperparameters=(("sagemaker_program", "outer.py"),),
    ),
    "exit with a command's code": Case(
        "raise LookupError('deep')", 1, ("script.py:1",), "LookupError: deep\n",
        files=(("outer.py", "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'script.py']))"),),
        hyperparameters=(("sagemaker_program", "outer.py"),),
    ),
    "torchrun below a shell, and a rank that loses the other": Case(
        MOCK_PEERS + "if rank == '1': raise LookupError('deep')\nlose_peer()",
        1, ("script.py:15", "rank 1"), "LookupError: deep\n",
        files=(("run.sh", f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2 script.py"),),
        hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "exception that a shell forgave": Case(
        "raise LookupError('the last')", 1, ("script.py:1",), "LookupError: the last\n",
        files=(("run.sh", "python3 -c 'import flash_attn' || true\npython3 script.py"),),
        hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "shell that goes on to a mistake of its own": Case(
        "", 1, ("UNSET: unbound variable", "before, a process"), "The script ended with exit code 1.\n",
        files=(("run.sh", "set -u\npython3 -c 'import flash_attn' || true\necho $UNSET"),),
        hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "shell that cleans up after an exception": Case(
        "raise LookupError('x')", 1, ("script.py:1", "cleaning up"), "LookupError: x\n",
        files=(("run.sh", "trap 'echo cleaning up >&2' EXIT\npython3 script.py"),),
        hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "command that is killed": Case(
        "import subprocess\nsubprocess.run(['sh', '-c', 'kill -9 $$'], check=True)",
        1, ("SIGKILL", "Out of memory"), "subprocess.CalledProcessError",
    ),
    "exit code of a shell that forgave an exception": Case(
        "raise LookupError('forgiven') from KeyError(1)", 4, ("no data", "before, a process", "from KeyError(1)\n(exit code 4)"),
        "The script ended with exit code 4.\n",
        files=(("run.sh", "python3 script.py || true\necho no data >&2; exit 4"),),
        hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "syntax error": Case("def f(:\n", 1, (), "SyntaxError: "),
    "command that says why": Case(
        "import subprocess\nsubprocess.check_call(['sh', '-c', 'echo tar: data.tgz: no such file >&2; exit 2'])",
        1, ("script.py:2", "tar: data.tgz: no such file"), "subprocess.CalledProcessError",
    ),
    "interrupt": Case("raise KeyboardInterrupt", 130, (), "KeyboardInterrupt"),
    "exit with words": Case("raise SystemExit('bad split')", 1, ("bad split",)),
    "bad argument": Case(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\np.parse_args()",
        2, ("invalid float value: 'fast'",), hyperparameters=(("lr", "fast"),),
    ),
    "its own failure file": Case(
        "import os\nopen(os.environ['SM_OUTPUT_FAILURE'], 'w').write('my words')\nraise ValueError('x')", 1, (), "my words"
    ),
    "shell script": Case("", 3, ("no data here",), files=(("run.sh", "echo no data here >&2; exit 3"),),
                         hyperparameters=(("sagemaker_program", "run.sh"),)),
    "exit beside a harmless child's exception": Case(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import flash_attn'])\nsys.exit(3)",
        3, (), "The script ended with exit code 3",
    ),
    "exit after a traceback that was handled": Case(
        "import sys, traceback\nprint('2 rows')\ntry: 1/0\nexcept ZeroDivisionError: traceback.print_exc()\n"
        "sys.exit('train.csv:\\ntwo columns,\\nno column text')",
        1, ("no column text", "printed before: ZeroDivisionError: division by zero at ", "script.py:3", "stdout: 2 rows\n"),
        "The script ended with exit code 1.\n",
    ),
    "excepthook that calls no other": Case(
        "import sys\nsys.excepthook = lambda *_: print('hidden')\nraise LookupError('not lost')",
        1, ("script.py:3",), "LookupError: not lost",
    ),
    "shell script whose interpreter is missing": Case(
        "", 2, ("/no/such", "cannot be started"), "CodeError:",
        files=(("run.sh", "#!/no/such\n"),), hyperparameters=(("sagemaker_program", "run.sh"),),
    ),
    "requirement whose build says why": Case(
        "", 2, ("needs CUDA 11", "no wheel for Python 3."), "CodeError: requirements.txt",
        files=(("requirements.txt", "./dependency"), ("dependency/setup.py", "raise SystemExit('needs CUDA 11')")),
        environ=OFFLINE,
    ),
    "requirement that does not compile": Case(
        "", 2, ("gone.c",), "CodeError: requirements.txt",
        files=(("requirements.txt", "./dependency"),
               ("dependency/setup.py", "from setuptools import Extension, setup\n"
                "setup(name='x', version='1', ext_modules=[Extension('x', ['gone.c'])])")),
        environ=OFFLINE,
    ),
    "hyperparameters larger than a command line": Case(
        "", 2, ("100,089 characters, is that of --hp89.",), "CodeError:",
        hyperparameters=tuple((f"hp{n:02}", "x" * (100_000 + n)) for n in range(90)),
    ),
    "one rank is killed": Case(
        MOCK_PEERS + "if rank == '0': os.kill(os.getpid(), 9)\nlose_peer()",
        137, ("SIGKILL", "rank 0"), "The script was killed by SIGKILL", environ=(("AMPHORA_NPROC_PER_NODE", "2"),),
    ),
}.items()])  # fmt: skip
def test_failure(case: Case, scripted: Tree) -> None:
    scripted.configure({"sagemaker_program": "script.py", **dict(case.hyperparameters)})
    scripted.script(case.script)
    for file, text in case.files:
        scripted.script(text, file)
    result = scripted.train(**dict(case.environ))
    assert scripted.failure is not None, result.stderr
    check(case, scripted.failure, result.returncode, result.stderr)


def check(case: Case, text: str, code: int, stderr: str) -> None:
    shown = text[:1024]
    assert code == case.code, (shown, stderr)
    assert shown.startswith(case.first), shown
    for part in case.says:
        assert part in shown, shown


@pytest.mark.parametrize(
    ("program", "source", "words"),
    [
        ("script.py", "import threading as m\none = m.Thread(target=work)\none.start(); one.join()",
         "Exception in thread Thread-1 (work):"),
        ("script.py", "import multiprocessing as m\none = m.get_context('fork').Process(target=work)\n"
         "one.start(); one.join()", "Process ForkProcess-1:"),
        ("script.py", "import asyncio\nasync def fail(): work()\nasync def main():\n"
         "    task = asyncio.create_task(fail())\n    await asyncio.sleep(0)\nasyncio.run(main())", "Task"),
        ("run.sh", "work()", "ValueError: alone"),
    ],
    ids=["thread", "process", "task of asyncio", "behind a pipe"],
)  # fmt: skip
def test_an_exception_that_ends_something_unnoticed_is_told(
    scripted: Tree, program: str, source: str, words: str
) -> None:
    scripted.configure({"sagemaker_program": program})
    scripted.script(f"def work(): raise ValueError('alone')\n{source}")
    result = scripted.script("python3 script.py 2>&1 | tee log.txt", "run.sh").train()
    assert (result.returncode, scripted.failure) == (0, None)
    assert f"exit code 0, but an exception ended a process or thread: {words}" in result.stderr


@pytest.fixture
def two_by_mpi(scripted: Tree) -> Tree:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    return scripted.configure(
        {"sagemaker_program": "script.py", "sagemaker_mpi_enabled": "true",
         "sagemaker_mpi_num_of_processes_per_host": "2"}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        (
            "os.kill(os.getpid(), 9)",
            137,
            ("killed by SIGKILL", "more memory", "signal 9", "rank 1)"),
        ),
        ("print('[rank0]: x', file=sys.stderr); sys.exit(7)", 7, ("exit code 7", "rank 1)")),
    ],
)
def test_a_rank_of_mpirun_that_ends_without_an_exception(
    two_by_mpi: Tree, ends: str, code: int, says: tuple[str, ...]
) -> None:
    two_by_mpi.script(
        "import os, sys, time\n"
        f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1': {ends}\n"
        "time.sleep(600)"
    )
    assert two_by_mpi.train().returncode == code
    assert two_by_mpi.failure is not None
    for part in says:
        assert part in two_by_mpi.failure[:1024]
    assert "[rank0]" not in two_by_mpi.failure.partition("Last lines")[0]


def test_mpirun_fails_if_it_names_no_rank(two_by_mpi: Tree, tmp_path: Path) -> None:
    """It ends well if a SIGCONT meets its start, and may end before it has written a rank's code."""
    two_by_mpi.script("")
    fake = tmp_path / "bin" / "mpirun"
    fake.parent.mkdir()
    path = f"{fake.parent}:{two_by_mpi.environment()['PATH']}"
    one_rank = (
        'while [ "$1" != /bin/sh ]; do shift; done\n'
        'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 exec "$@"\n'
    )
    raised = "[1,1]<stderr>:Traceback (most recent call last):\n[1,1]<stderr>:ValueError: rank 1"
    raised = f"echo '{raised}\nPrimary job  terminated normally' >&2; exit 1"
    for text, says in (
        ("exit 0", "started 0 of its ranks"), (one_rank, "started 1 of 2 ranks"), (raised, "ValueError: rank 1")
    ):  # fmt: skip
        fake.write_text(f"#!/bin/sh\n{text}")
        fake.chmod(0o755)
        assert two_by_mpi.train(PATH=path).returncode != 0
        assert two_by_mpi.failure and says in two_by_mpi.failure.splitlines()[0]


def test_ranks_of_mpirun_need_not_be_python(two_by_mpi: Tree) -> None:
    two_by_mpi.script('echo "rank $OMPI_COMM_WORLD_RANK: $1 $2"', "run.sh")
    two_by_mpi.configure(
        {"sagemaker_program": "run.sh", "sagemaker_mpi_enabled": "true", "text": "a 'b'",
         "sagemaker_mpi_num_of_processes_per_host": "2"}
    )  # fmt: skip
    result = two_by_mpi.train()
    assert result.returncode == 0, result.stderr
    assert all(f"rank {rank}: --text a 'b'" in result.stdout for rank in (0, 1))


def test_the_head_never_passes_what_is_shown() -> None:
    head = "\n".join(["ValueError: " + "w" * 900, "  at script.py:1 " + "s" * 280, "(exit code 1)"])
    shown = failure.shortened_head(head)
    assert len(shown) <= 1024 and shown.endswith("(exit code 1)")
    assert "at script.py:1 " + "s" * 280 in shown
    assert failure.shortened_head("short") == "short"
    assert len(failure.shortened_head("\n" * 5000)) <= 1024
