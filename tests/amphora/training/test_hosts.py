"""Two hosts of one job: two supervised trees in two network namespaces, joined by a wire."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.job_tree import Tree, wait_for
from tests.support.until import until

HOSTS = {"algo-1": "10.213.77.1", "algo-2": "10.213.77.2"}
REDUCE = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "total = torch.tensor([float(dist.get_rank() + 1)])\n"
    "dist.all_reduce(total)\n"
)


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *words], check=check, capture_output=True)


@pytest.fixture(scope="module")
def network() -> Iterator[dict[str, str]]:
    """Host name to network namespace."""
    spaces = {host: f"amphora-{os.getpid()}-{host}" for host in HOSTS}
    if shutil.which("ip") is None or ip("netns", "add", spaces["algo-1"], check=False).returncode:
        pytest.skip("no right to make network namespaces here, or no iproute2")
    ip("netns", "add", spaces["algo-2"])
    wires = {host: f"am{os.getpid() % 100000}-{n}" for n, host in enumerate(HOSTS)}
    ip("link", "add", wires["algo-1"], "type", "veth", "peer", "name", wires["algo-2"])
    try:
        for host, address in HOSTS.items():
            space = spaces[host]
            ip("link", "set", wires[host], "netns", space)
            ip("-n", space, "link", "set", wires[host], "name", "eth0")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            names = Path("/etc/netns") / space / "hosts"
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text(
                "".join(f"{a} {h}\n" for h, a in {"localhost": "127.0.0.1", **HOSTS}.items())
            )
        yield spaces
    finally:
        for space in spaces.values():
            ip("netns", "delete", space, check=False)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


@dataclass
class Cluster:
    trees: dict[str, Tree]
    network: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, host: str, *prefix: str, **environ: str) -> subprocess.Popen[str]:
        tree = self.trees[host]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.network[host], *prefix, *tree.command()],
            env=tree.environment(**environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def configure(self, script: str, **hyperparameters: str) -> Cluster:
        """Write the same job for each host."""
        for host, tree in self.trees.items():
            resources = {
                "current_host": host, "hosts": list(HOSTS), "network_interface_name": "eth0"
            }  # fmt: skip
            job = {"sagemaker_program": "script.py", **hyperparameters}
            tree.configure(job, resourceconfig=resources).script(script)
        return self

    def finish(self, *processes: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
        """Wait for the end of the processes; return their exit codes and outputs."""
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        return [process.returncode for process in processes], outputs

    def train(self, **environ: str) -> tuple[list[int], list[str]]:
        return self.finish(*[self.start(host, **environ) for host in self.trees])

    @property
    def failures(self) -> list[str]:
        return [tree.failure or "" for tree in self.trees.values()]


@pytest.fixture
def cluster(tmp_path: Path, network: dict[str, str]) -> Iterator[Cluster]:
    cluster = Cluster({host: Tree(tmp_path / host) for host in HOSTS}, network)
    yield cluster
    # What a test that failed leaves would be in the next one's way.
    for process in cluster.started:
        process.kill()
        process.communicate()


TORCHRUN = {"sagemaker_torch_distributed_enabled": "true"}


def start_mpirun(cluster: Cluster, script: str) -> list[subprocess.Popen[str]]:
    """Start mpirun on the first host, whose daemon `amphora train` runs on the second.

    Each host has its own name, and its own files at the paths that all hosts share.
    """
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    as_host = 'hostname "$0" && mount --bind "$1" /mnt && shift && exec "$@"'
    cluster.configure(script, sagemaker_mpi_enabled="true")
    processes = []
    for host, tree in cluster.trees.items():
        (tree.base / "tmp").mkdir()
        unshare = ("unshare", "--uts", "--mount", "sh", "-c", as_host)
        environ = {"SAGEMAKER_BASE_DIR": "/mnt", "TMPDIR": "/mnt/tmp"}
        processes.append(cluster.start(host, *unshare, host, str(tree.base), **environ))
    return processes


def test_mpirun_has_a_rank_on_each_host(cluster: Cluster) -> None:
    codes, outputs = cluster.finish(
        *start_mpirun(
            cluster,
            "import os, socket\n"
            "host = socket.gethostname(), os.environ['SM_CURRENT_HOST']\n"
            "print('rank', os.environ['OMPI_COMM_WORLD_RANK'], *host)",
        )
    )
    assert codes == [0, 0], outputs
    assert "rank 0 algo-1 algo-1" in outputs[0] and "rank 1 algo-2 algo-2" in outputs[0], outputs


def test_a_rank_of_mpirun_that_raises(cluster: Cluster) -> None:
    codes, outputs = cluster.finish(
        *start_mpirun(
            cluster,
            "import os, time\n"
            "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': raise ValueError('rank 1 of mpi')\n"
            "time.sleep(600)",
        )
    )
    assert 0 not in codes, outputs
    ours, theirs = cluster.failures
    assert ours.startswith("ValueError: rank 1 of mpi"), ours
    assert theirs.startswith("algo-1 failed first: ValueError: rank 1 of mpi"), theirs


def test_a_stop_lets_each_rank_of_mpirun_save(cluster: Cluster) -> None:
    script = STOPPABLE.replace("os.environ['SM_HP_SECONDS']", "0.1")
    rank = " + os.environ['OMPI_COMM_WORLD_RANK'])"
    for file in ("ready", "saved"):
        script = script.replace(f"'{file}')", f"'{file}-'{rank}")
    processes = start_mpirun(cluster, script)
    folders = [tree.base / "code" for tree in cluster.trees.values()]
    for rank, folder in enumerate(folders):
        wait_for(folder / f"ready-{rank}")
    for process in processes:
        process.terminate()
    codes, outputs = cluster.finish(*processes)
    assert codes == [0, 0], outputs
    assert all((f / f"saved-{rank}").exists() for rank, f in enumerate(folders)), outputs


def test_a_failing_host_ends_the_other_with_its_reason(cluster: Cluster) -> None:
    codes, outputs = cluster.configure(
        "import os, time\n"
        "if os.environ['SM_CURRENT_HOST'] == 'algo-2': raise OSError('algo-2 has no data')\n"
        "time.sleep(600)"
    ).train()
    assert codes[1] == 1 and codes[0] != 0, outputs
    ours, theirs = cluster.failures
    assert theirs.startswith("OSError: algo-2 has no data")
    assert ours.startswith("algo-2 failed first: OSError: algo-2 has no data")


@pytest.mark.heavy
def test_the_host_that_raised_is_named_though_its_script_ends_last(cluster: Cluster) -> None:
    """Its connections are gone at once; what it says of itself comes seconds later."""
    codes, outputs = cluster.configure(
        REDUCE + "if dist.get_rank() == 0:\n"
        "    import atexit, time\n"
        "    dist.destroy_process_group()\n"
        "    atexit.register(time.sleep, 5)\n"
        "    raise ValueError('it gave up')\n"
        "dist.all_reduce(total)",
        **TORCHRUN,
    ).train()
    assert 0 not in codes, outputs
    raised, lost = cluster.failures
    assert raised.startswith("ValueError: it gave up"), raised
    assert lost.startswith("algo-1 failed first: ValueError: it gave up"), lost


@pytest.mark.heavy
def test_the_host_is_named_whose_rank_exited(cluster: Cluster) -> None:
    """The other ranks, of its own host too, raise because they lose it."""
    script = (
        "print('total', total.item(), os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
        "if dist.get_rank() == 2: raise SystemExit('no data')\ndist.all_reduce(total)"
    )
    cluster.configure(REDUCE + script, **TORCHRUN)
    codes, outputs = cluster.train(AMPHORA_NPROC_PER_NODE="2")
    assert 0 not in codes, outputs
    assert [output.count("\ntotal 10.0 eth0") for output in outputs] == [2, 2], outputs
    lost, exited = cluster.failures
    cause = "The script ended with exit code 1 and no exception.\nno data\n"
    cause += "last line of stdout: total 10.0 eth0\n"
    assert exited.startswith(f"{cause}(exit code 1, rank 2)"), exited
    assert lost.startswith(f"algo-2 failed first: {cause}"), lost


def test_a_host_that_is_done_waits_for_the_others(cluster: Cluster) -> None:
    cluster.configure(
        "import os, pathlib, time\n"
        "while os.environ['SM_CURRENT_HOST'] == 'algo-1' and not pathlib.Path('on').exists():\n"
        "    time.sleep(0.05)\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], 'model').write_text('whole')",
    )
    first, second = (cluster.start(host) for host in HOSTS)
    wait_for(cluster.trees["algo-2"].base / "model" / "model")
    time.sleep(1)
    assert second.poll() is None, "it ended before the other host"
    (cluster.trees["algo-1"].base / "code" / "on").touch()
    assert cluster.finish(first, second)[0] == [0, 0]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        *((host, signal.SIGKILL) for host in HOSTS),
        pytest.param("algo-1", signal.SIGSTOP, marks=[pytest.mark.heavy, pytest.mark.long]),
        pytest.param("algo-2", signal.SIGSTOP, marks=pytest.mark.heavy),
    ],
)
def test_a_lost_host_ends_the_job(cluster: Cluster, victim: str, number: int) -> None:
    cluster.configure(
        "import os, pathlib, time\n"
        "parent = os.getppid()\n"
        "pathlib.Path('ready').touch()\n"
        # A host that is killed cannot end its script.
        "while os.getppid() == parent: time.sleep(0.1)",
    )
    processes = {host: cluster.start(host) for host in HOSTS}
    for tree in cluster.trees.values():
        wait_for(tree.base / "code" / "ready")
    lost = processes.pop(victim)
    lost.send_signal(number)
    ((other, process),) = processes.items()
    output, _ = process.communicate(timeout=240)
    lost.kill()
    lost.communicate(timeout=240)
    assert process.returncode != 0, output
    failure = cluster.trees[other].failure
    assert failure and failure.startswith(f"{victim} failed first"), failure


def test_a_host_that_never_appears(cluster: Cluster) -> None:
    cluster.configure("import time; time.sleep(600)")
    process = cluster.start("algo-2", AMPHORA_HOST_WAIT_SECONDS="1")
    process.communicate(timeout=240)
    assert process.returncode == 2
    failure = cluster.trees["algo-2"].failure
    assert failure and "The host algo-1 does not answer on port 7776 within 1 s" in failure


def test_a_name_that_never_resolves(tree: Tree) -> None:
    hosts = ["algo-1", "nowhere.invalid"]
    tree.configure(resourceconfig={"current_host": "algo-1", "hosts": hosts})
    assert tree.train(AMPHORA_HOST_WAIT_SECONDS="0.5").returncode == 2
    assert tree.failure and "No address for nowhere.invalid within" in tree.failure


def test_a_stop_while_waiting_for_a_host(tree: Tree) -> None:
    def catches_sigterm(pid: int) -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    tree.configure(
        resourceconfig={"current_host": "algo-1", "hosts": ["algo-1", "nowhere.invalid"]}
    )
    process = tree.start()
    until(lambda: catches_sigterm(process.pid))
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    assert tree.failure == "Stopped by SIGTERM before the script had started.\n"


STOPPABLE = (
    "import os, pathlib, signal, subprocess, sys, time\n"
    "seconds = float(os.environ['SM_HP_SECONDS'])\n"
    "helper = subprocess.Popen(['cat'], stdin=-1, stdout=-1)\n"
    "def save(*_):\n"
    "    time.sleep(seconds); assert helper.communicate(b'x') == (b'x', None)\n"
    "    pathlib.Path('saved').touch(); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "pathlib.Path('ready').touch()\n"
    "time.sleep(600)"
)


def test_a_stop_before_another_host_has_appeared_fails_nothing(cluster: Cluster) -> None:
    """It was taken for the end of the time that the other one has to appear."""
    tree = cluster.configure(STOPPABLE, seconds="1").trees["algo-1"]
    process = cluster.start("algo-1")
    wait_for(tree.base / "code" / "ready")
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert (process.returncode, tree.failure) == (0, None), output
    assert (tree.base / "code" / "saved").exists()


@pytest.mark.heavy
def test_hosts_that_are_stopped_each_have_their_budget(cluster: Cluster) -> None:
    """The one that has saved first must not cut the other's saving short, nor fail it."""
    seconds = "{'algo-1': 0.1, 'algo-2': 12}[os.environ['SM_CURRENT_HOST']]"
    cluster.configure(STOPPABLE.replace("os.environ['SM_HP_SECONDS']", seconds))
    processes = [cluster.start(host) for host in HOSTS]
    for tree in cluster.trees.values():
        wait_for(tree.base / "code" / "ready")
    for process in processes:
        process.terminate()
    codes, outputs = cluster.finish(*processes)
    assert codes == [0, 0], outputs
    assert all((tree.base / "code" / "saved").exists() for tree in cluster.trees.values())
    assert cluster.failures == ["", ""]


def test_a_host_that_is_done_can_be_stopped(cluster: Cluster) -> None:
    cluster.configure(
        "import os, time\nparent = os.getppid()\n"
        # A host that is killed cannot end its script.
        "while os.environ['SM_CURRENT_HOST'] == 'algo-2' and os.getppid() == parent: time.sleep(0.1)"
    )
    first, second = (cluster.start(host) for host in HOSTS)
    assert first.stdout is not None
    while "waiting for the others" not in (line := first.stdout.readline()):
        assert line, "it ended, or is not done"
    first.terminate()
    output, _ = first.communicate(timeout=240)
    second.kill()
    second.communicate(timeout=240)
    assert first.returncode == 0, output
