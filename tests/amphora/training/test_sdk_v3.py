"""What SDK v3's ModelTrainer sends, made by the SDK's own code, and a container to run it in.

The package is read, not imported: `sagemaker-train` brings an ML platform's worth of dependencies,
and only three methods and a folder of it matter here.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from amphora.common.devices import Devices
from amphora.common.errors import ConfigError
from amphora.contract.job import Paths, decode, read_job
from amphora.training.launch import Launch
from amphora.training.sdk_v3 import (
    arguments_of,
    forget_generic_failure,
    read,
    start,
    understand,
)
from tests.support.job_tree import Tree, clean_environ, wait_for

BASH_ENV = Path(__file__).parents[3] / "container" / "amphora" / "hook" / "bash_env.sh"
# A container as far as this matters: bash becomes PID 1, and /opt/ml is the job's tree. /opt is
# made anew, in a mount namespace, of what it holds here and of that tree.
_CONTAINER = """
set -eu
stage=$1 base=$2; shift 2
mount -t tmpfs amphora-test "$stage"
for entry in /opt/*; do
    [ -d "$entry" ] && [ "$entry" != /opt/ml ] || continue
    mkdir "$stage/${entry##*/}"
    mount --rbind "$entry" "$stage/${entry##*/}"
done
mkdir "$stage/ml"
mount --bind "$base" "$stage/ml"
mount --rbind "$stage" /opt
cd /
exec "$@"
"""
_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def package(name: str, version: str) -> Path:
    """Where an SDK's package lies; the test is skipped where it is not installed."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert distribution.version == version
    return Path(str(distribution.locate_file("sagemaker")))


def distributed(kind: str, **settings: Any) -> SimpleNamespace:
    """A DistributedConfig: Torchrun, MPI, or a user's own."""
    script = {"Torchrun": "torchrun_driver.py", "MPI": "mpi_driver.py"}.get(kind, "own_driver.py")
    config = type(kind, (SimpleNamespace,), {})(driver_script=script)
    config.model_dump = lambda: settings
    return config


@dataclass
class ModelTrainer(Tree):
    """A job of SDK v3 on a tree of its own."""

    hyperparameters: dict[str, Any] = field(default_factory=dict)
    channels: list[str] = field(default_factory=list)
    hosts: tuple[str, ...] = ("algo-1",)

    @property
    def code(self) -> Path:
        return self.base / "input" / "data" / "code"

    def send(self, runner: Any = None, **source_code: Any) -> ModelTrainer:
        """Lay out what the SDK and SageMaker would, for `SourceCode(**source_code)`."""
        data = self.base / "input" / "data"
        drivers, output = data / "sm_drivers", self.base / "output"
        for folder in (self.code, output, *(data / name for name in self.channels)):
            folder.mkdir(parents=True, exist_ok=True)
        train = package("sagemaker-train", "1.27.0") / "train"
        core = package("sagemaker-core", "2.27.0") / "core"
        shutil.copytree(train / "container_drivers", drivers, dirs_exist_ok=True)
        shutil.copy(core / "utils" / "install_requirements.py", drivers / "scripts")
        source = {"source_dir": "src", "entry_script": None, "command": None, "args": None}
        source |= {"requirements": None} | source_code
        code = SimpleNamespace(**source, model_dump=lambda: source)
        methods = self._sdk_methods(train)
        this = SimpleNamespace(hyperparameters=self.hyperparameters, _jumpstart_config=None)
        temporary_folder = SimpleNamespace(name=str(drivers))
        methods["_prepare_train_script"](this, temporary_folder, code, runner)
        methods["_write_source_code_json"](this, temporary_folder, code)
        methods["_write_distributed_json"](this, temporary_folder, runner)
        sent = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.hyperparameters.items()
        }
        channels = {
            name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
            for name in (*self.channels, "code", "sm_drivers")
        }
        resources = {
            "current_host": self.hosts[0],
            "current_instance_type": "ml.m5.xlarge",
            "hosts": self.hosts,
            "network_interface_name": "eth0",
        }
        return self.configure(sent, inputdataconfig=channels, resourceconfig=resources)

    def _sdk_methods(self, train: Path) -> dict[str, Any]:
        """ModelTrainer's methods that write the driver, compiled out of model_trainer.py."""
        tree = ast.parse((train / "model_trainer.py").read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        (trainer,) = [node for node in classes if node.name == "ModelTrainer"]
        methods = [node for node in trainer.body if isinstance(node, ast.FunctionDef)]
        tree.body = [
            node for node in methods if re.match(r"_prepare_train_script|_write_", node.name)
        ]
        names: dict[str, Any] = {
            "json": json,
            "os": os,
            "shlex": shlex,
            "logger": logging.getLogger(),
        }
        for module in ("templates", "constants"):
            names |= runpy.run_path(str(train / f"{module}.py"))
        flags = __future__.annotations.compiler_flag
        exec(compile(tree, "model_trainer.py", "exec", flags=flags), names)
        return names

    def command(self) -> list[str]:
        constants = package("sagemaker-train", "1.27.0") / "train" / "constants.py"
        values = runpy.run_path(str(constants))
        sent = [values[f"DEFAULT_CONTAINER_{name}"] for name in ("ENTRYPOINT", "ARGUMENTS")]
        stage = self.base.parent / "opt"
        stage.mkdir(exist_ok=True)
        container = ["sh", "-c", _CONTAINER, "container", str(stage), str(self.base)]
        return [*_UNSHARE, *container, *sent[0], *sent[1]]

    def environment(self, **extra: str) -> dict[str, str]:
        """The image's, with this checkout's `amphora` first on PATH."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        image = {"PATH": path, "BASH_ENV": str(BASH_ENV), "TRAINING_JOB_NAME": "a-job"}
        return clean_environ(**{**image, **self.environ, **extra})

    @contextlib.contextmanager
    def started(self, **environ: str) -> Iterator[subprocess.Popen[str]]:
        process = self.start(**environ)
        try:
            yield process
        finally:
            process.kill()  # And by --kill-child all that is in its namespace.
            process.communicate()


def stop(process: subprocess.Popen[str]) -> str:
    """SIGTERM to the container's PID 1, as `docker stop` sends it. Returns what it printed."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGTERM)
    return process.communicate(timeout=240)[0]


PRINT = (
    "import json, os, sys\n"
    "sm = {name: value for name, value in os.environ.items() if name.startswith('SM_')}\n"
    "print(json.dumps({'argv': sys.argv[1:], 'cwd': os.getcwd(), 'sm': sm}))"
)


@pytest.fixture
def trainer(tmp_path: Path) -> ModelTrainer:
    if subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to make pid and mount namespaces here")
    return ModelTrainer(tmp_path / "ml")


def printed(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(
        next(line for line in result.stdout.splitlines() if line.startswith('{"argv"'))
    )


def test_a_script_sees_what_the_driver_would_show_it(trainer: ModelTrainer) -> None:
    """The same job twice: by the SDK's driver under plain bash, and by us."""
    trainer.hyperparameters = {
        "epochs": 3, "lr": 1e-5, "name": "a b", "flag": True, "none": None, "list": [1, "x"],
        "nested": {"a": {"b": 1}}, "k": 1, "with-dash": "x", "text": '"t"', "sagemaker_own": "y",
    }  # fmt: skip
    trainer.channels = ["train"]
    # A requirements.txt that SourceCode does not name is not installed.
    trainer.script("no-such-package-at-all==1.0", "requirements.txt")
    trainer.script(PRINT).send(entry_script="script.py")
    theirs, ours = printed(trainer.train(BASH_ENV="")), printed(trainer.train())
    assert (
        ours["argv"] == theirs["argv"] and ours["cwd"] == theirs["cwd"] == "/opt/ml/input/data/code"
    )
    assert len(theirs["sm"]) >= 40
    differing = {
        name for name in theirs["sm"] if decode(ours["sm"].get(name)) != decode(theirs["sm"][name])
    }
    assert differing == {
        "SM_HPS",  # without sagemaker_own, as in sagemaker-training
        "SM_CHANNELS",  # sorted
        "SM_TRAINING_ENV",  # that of sagemaker-training
    }
    for name in ("SM_HPS", "SM_CHANNELS"):
        assert set(decode(ours["sm"][name])) == set(decode(theirs["sm"][name])) - {"sagemaker_own"}


SAVES = (
    "import os, pathlib, signal, sys, time\n"
    "me = os.environ.get('RANK', '')\n"
    "def save(*_):\n    time.sleep(0.3); pathlib.Path('saved' + me).touch(); sys.exit(7)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "pathlib.Path('ready' + me).touch()\n"
    "print('rank', me, 'of', os.environ.get('WORLD_SIZE'), *sys.argv[1:], flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.mark.parametrize("how", ["entry_script", "command"])
def test_sigterm_reaches_the_script_whose_exit_code_is_kept(
    trainer: ModelTrainer, how: str
) -> None:
    trainer.script(SAVES)
    trainer.send(**{how: "script.py" if how == "entry_script" else "python3 script.py"})
    with trainer.started() as process:
        wait_for(trainer.code / "ready")
        output = stop(process)
    assert process.returncode == 7, output
    assert (trainer.code / "saved").exists()
    assert trainer.failure and trainer.failure.startswith("Stopped by SIGTERM")


def test_no_value_is_read_by_a_shell(trainer: ModelTrainer) -> None:
    hostile = [
        "it's", "'; touch /opt/ml/pwned; '", "$(touch /opt/ml/pwned)", "`touch /opt/ml/pwned`",
        'say "hi" \\ \n$HOME',
    ]  # fmt: skip
    values = {f"text{number}": value for number, value in enumerate(hostile)} | {"list": hostile}
    trainer.hyperparameters = values
    trainer.script(PRINT).send(entry_script="script.py")
    seen = printed(trainer.train())
    assert seen["argv"][1::2] == [*hostile, json.dumps(hostile)]
    assert [seen["sm"][f"SM_HP_TEXT{number}"] for number in range(len(hostile))] == hostile
    assert json.loads(seen["sm"]["SM_HPS"]) == values
    assert not list(trainer.base.rglob("pwned"))


@pytest.mark.parametrize("how", ["Torchrun", pytest.param("command", marks=pytest.mark.heavy)])
def test_sigterm_reaches_every_rank(trainer: ModelTrainer, how: str) -> None:
    """torchrun itself would give its ranks 30 s and end with its own exit code."""
    trainer.hyperparameters = {"lr": 0.5}
    trainer.script(SAVES, "src/script.py")
    if how == "command":
        trainer.send(command="true && torchrun --nproc_per_node 2 src/script.py --lr 0.5")
    else:
        torchrun = distributed("Torchrun", process_count_per_node=2, smp=None)
        trainer.send(torchrun, entry_script="src/script.py")
    with trainer.started() as process:
        for rank in "01":
            wait_for(trainer.code / f"ready{rank}")
        output = stop(process)
    assert process.returncode == 7, output
    for rank in "01":
        assert f"rank {rank} of 2 --lr 0.5" in output
        assert (trainer.code / f"saved{rank}").exists()


def test_requirements_without_a_way_to_an_index(trainer: ModelTrainer) -> None:
    trainer.script(PRINT).script("no-such-package-at-all==1.0", "needs.txt")
    result = trainer.send(entry_script="script.py", requirements="needs.txt").train(
        PIP_NO_INDEX="1"
    )
    assert result.returncode == 2 and '{"argv"' not in result.stdout
    assert trainer.failure and trainer.failure.startswith("CodeError: needs.txt of ")
    assert "No matching distribution found for no-such-package-at-all" in trainer.failure[:1024]


def test_a_command_of_the_users_and_a_shell_script(trainer: ModelTrainer) -> None:
    trainer.hyperparameters = {"lr": "it's"}
    trainer.script(PRINT)
    trainer.send(command="true && python3 script.py --own", args=["it's $HOME", 2])
    seen = printed(trainer.train())
    assert seen["argv"] == ["--own", "it's $HOME", "2"]
    assert seen["sm"]["SM_HP_LR"] == "it's"
    trainer.hyperparameters = {"text": "it's $HOME"}
    trainer.script('printf "<%s>" "$@"; exit 3', "run.sh")
    result = trainer.send(entry_script="run.sh").train()
    assert (result.returncode, result.stdout) == (3, "<--text><it's $HOME>")


def test_a_tarball_of_code(trainer: ModelTrainer) -> None:
    trainer.script(PRINT)
    subprocess.run(["tar", "czf", "code.tar.gz", "script.py"], cwd=trainer.code, check=True)
    (trainer.code / "script.py").unlink()
    trainer.send(source_dir="s3://b/code.tar.gz", entry_script="script.py")
    assert printed(trainer.train())["cwd"] == "/opt/ml/input/data/code"


def test_a_secret_inside_an_object_is_not_in_argv_either(trainer: ModelTrainer) -> None:
    trainer.hyperparameters = {"db": {"password": "secret-of-mine"}}
    trainer.script(
        "import json, sys\n"
        "print(len(json.loads(sys.argv[2])['password']))\n"
        "print('secret-of-mine' in open('/proc/self/cmdline').read())"
    ).send(entry_script="script.py")
    result = trainer.train()
    assert result.stdout.split()[-2:] == ["14", "False"], result.stderr


def test_a_distribution_of_the_users_own(trainer: ModelTrainer) -> None:
    """Its driver runs as it is; what it says of a failure gives way to the script's exception."""
    trainer.hyperparameters = {"text": "it's"}
    trainer.script("import sys\nraise LookupError(sys.argv[1:])")
    trainer.send(distributed("Own", degree=2), entry_script="script.py")
    (trainer.base / "input/data/sm_drivers/distributed_drivers/own_driver.py").write_text(
        "import os, pathlib, sys\n"
        "sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))\n"
        "from common.utils import execute_commands, write_failure_file\n"
        "code, trace = execute_commands([sys.executable, os.environ['SM_ENTRY_SCRIPT'],\n"
        "                                os.environ['SM_HP_TEXT'], os.environ['SM_DISTRIBUTED_CONFIG']])\n"
        "write_failure_file(trace)\n"
        "sys.exit(code)\n"
    )
    assert trainer.train().returncode == 1
    assert trainer.failure and trainer.failure.startswith(
        'LookupError: ["it\'s", \'{"degree": 2}\']'
    )


def test_mpi_on_one_host(trainer: ModelTrainer, tmp_path: Path) -> None:
    trainer.hyperparameters = {"lr": 0.5}
    trainer.script(PRINT)
    options = {"process_count_per_node": 3, "mpi_additional_options": ["-x", "A=b c"]}
    trainer.send(distributed("MPI", **options), entry_script="script.py")
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text(
        '#!/bin/sh\necho "$@" >&2\nwhile [ "$1" != /bin/sh ]; do shift; done\n'
        'OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 exec "$@"\n'
    )
    mpirun.chmod(0o755)
    path = f"{mpirun.parent}:{trainer.environment()['PATH']}"
    result = trainer.train(PATH=path)
    assert printed(result)["argv"] == ["--lr", "0.5"]
    assert "-np 3" in result.stderr and "-x A=b c" in result.stderr


def test_without_amphora_on_path_the_sdk_goes_its_own_way(
    trainer: ModelTrainer, tmp_path: Path
) -> None:
    trainer.script(PRINT).send(entry_script="script.py")
    (tmp_path / "bin").mkdir()
    for name in ("python3", "pip"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    result = trainer.train(PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if shutil.which("amphora", path="/usr/bin:/bin"):
        pytest.skip("amphora is installed system-wide")
    assert printed(result) and "Training Container Execution Completed" in result.stdout


def test_an_unknown_script_of_another_sdk_runs_unchanged_and_a_line_says_so(
    trainer: ModelTrainer,
) -> None:
    """Under our supervision."""
    trainer.send(entry_script="script.py").script("raise RuntimeError('deep down')")
    script = trainer.base / "input/data/sm_drivers/sm_train.sh"
    script.write_text(script.read_text().replace("\ncd ", "\nrm -rf /opt/ml/nothing\ncd "))
    result = trainer.train()
    assert result.returncode == 1
    assert "its line 'rm -rf /opt/ml/nothing' is not known" in result.stderr
    assert trainer.failure and trainer.failure.startswith("RuntimeError: deep down")


def test_other_commands_of_bash_are_left_alone(trainer: ModelTrainer) -> None:
    trainer.send(entry_script="script.py")
    command = [*trainer.command()[:-2], "-c", 'echo "$$ ${BASH_ENV-unset}"']
    result = subprocess.run(
        command, env=trainer.environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == "1 unset\n"


def test_where_a_host_stands_among_others(tmp_path: Path) -> None:
    """Without a process."""
    driver = "/opt/ml/input/data/sm_drivers/sm_train.sh"
    sent = f"chmod +x {driver} && {driver}"

    def plan(kind: str, **settings: Any) -> Launch:
        base = tmp_path / f"a{kind}"
        trainer = ModelTrainer(base, hosts=("algo-2", "algo-1"))
        config = distributed(kind, **settings) if kind else None
        trainer.script("").send(config, entry_script="script.py")
        environ = {"SAGEMAKER_BASE_DIR": str(base)}
        devices = Devices(kind="cuda", accelerators=4, cpus=8, efa=False, reason="")
        return start(read_job(environ), devices, base, environ, sent)

    argv = plan("Torchrun", process_count_per_node=None, smp=None).argv
    spans = {"--nnodes=2", "--node_rank=1", "--master_addr=algo-1", "--nproc_per_node=4"}
    assert spans <= set(argv)
    assert plan("MPI", process_count_per_node=2).lends
    # Without a distribution one process runs, whatever there is.
    assert plan("").argv == (sys.executable, str(tmp_path / "a/input/data/code/script.py"))
    with pytest.raises(ConfigError, match="sm_drivers cannot be read"):
        read(Paths(tmp_path), sent)
    for other in (f"X=1 {driver}", f"{sent}; true"):
        assert read(Paths(tmp_path / "a"), other).unknown == other


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]([a-z_-]{0,8}[a-z])?", fullmatch=True),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(_CHARACTERS, max_size=20),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(_CHARACTERS, max_size=20), inner, max_size=3)
            ),
            max_leaves=5,
        ).map(lambda value: value if isinstance(value, str) else json.dumps(value)),
        max_size=5,
    )
)
def test_arguments_are_the_drivers(tmp_path: Path, sent: dict[str, str]) -> None:
    def is_a_number_spelled_otherwise(text: str) -> bool:
        """Such as '1.10' and '1e2', which the driver turns into 1.1 and 100.0."""
        again = decode(decode(text))
        is_number = isinstance(again, (int, float)) and not isinstance(again, bool)
        return is_number and json.dumps(again) not in (text, decode(text))

    assume(not any(map(is_a_number_spelled_otherwise, sent.values())))
    utils = "train/container_drivers/common/utils.py"
    driver = runpy.run_path(str(package("sagemaker-train", "1.27.0") / utils))
    Tree(tmp_path).configure(sent)
    job = read_job({"SAGEMAKER_BASE_DIR": str(tmp_path)})
    ours = [word for name, text in arguments_of(job).items() for word in (f"--{name}", text)]
    hps = {key: driver["safe_deserialize"](value) for key, value in sent.items()}
    assert ours == driver["hyperparameters_to_cli_args"](hps)


def test_the_drivers_word_of_a_failure_is_no_reason_but_the_scripts_is(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.failure.parent.mkdir(parents=True)
    for text, is_kept in (
        ("Training Execution failed. For more details, see CloudWatch logs", False),
        ("\nTraining Execution failed.\n", False),
        ("CalledProcessError: a build of mine", True),
    ):
        paths.failure.write_text(text)
        forget_generic_failure(paths)
        assert paths.failure.exists() == is_kept, text


@pytest.mark.parametrize(
    ("tail", "steps"),
    [
        ('CMD="python a.py --b c"\necho "$CMD"\neval $CMD', {"command": "python a.py --b c"}),
        (
            "$SM_PIP_CMD install -r needs.txt\n"
            "$SM_PYTHON_CMD /opt/ml/input/data/sm_drivers/distributed_drivers/basic_script_driver.py",
            {"requirements": "needs.txt", "driver": "basic_script_driver.py"},
        ),
    ],
)
def test_scripts_of_older_sdks_are_understood(tail: str, steps: dict[str, str]) -> None:
    head = (
        "$SM_PYTHON_CMD /opt/ml/input/data/sm_drivers/scripts/environment.py\n"
        "source /opt/ml/input/sm_training.env\nset -x\n"
    )
    assert understand(f'{head}\n{tail}\n\necho "Training Container Execution Completed"\n') == (
        steps,
        "",
    )
