"""Results are written whole or not at all; disks that are full or read-only, really mounted."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from recipe.errors import CheckpointError, ModelError, OutputError
from recipe.inference import registry
from recipe.storage import atomic, checkpoints, checksums, number_files
from tests.support.jobs import Job
from tests.support.mounts import Mount, mounted
from tests.support.paths import CODE
from tests.support.words import write_reviews


def test_entries_arrive_replace_their_like_and_leave_others(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (target / "code").mkdir(parents=True)
    (target / "old").mkdir()
    (target / "weights").write_text("old")
    with atomic.whole_folder(target) as folder:
        (folder / "weights").write_text("new")
        (folder / "old").write_text("a file now")
        assert (target / "weights").read_text() == "old"
        assert folder.parent == target, "on the same file system, so that nothing is copied"
    assert sorted(entry.name for entry in target.iterdir()) == ["code", "old", "weights"]
    assert (target / "weights").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_after_an_error_or_a_kill_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk full"), atomic.whole_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise OSError("disk full")
    assert list(target.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    target = tmp_path / "model"
    left = target / ".arriving-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    with atomic.whole_folder(target) as folder:
        (folder / "config.json").touch()
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def kilobytes(count: int) -> torch.Tensor:
    return torch.arange(count * 256, dtype=torch.float32)


WRITERS = {
    "torch": lambda folder: torch.save(kilobytes(300), folder / "optimizer.pt"),
    "safetensors": lambda folder: save_file({"a": kilobytes(300)}, folder / "model.safetensors"),
    "text": lambda folder: (folder / "trainer_state.json").write_text("x" * 300_000),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_keeps_the_checkpoint_before(tmpfs: Mount, kind: str) -> None:
    def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> None:
        with checkpoints.writing(folder, step, needed=300_000) as written:
            written.mkdir(parents=True)
            (written / "scheduler.pt").write_bytes(b"0123456789")
            write(written)
            checkpoints.publish(folder, step, {"seed": 1}, finished=False)

    folder = tmpfs("checkpoints", 500)
    save_checkpoint(folder, 1, WRITERS[kind])
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, 2, WRITERS[kind])
    message = str(caught.value)
    for words in (str(folder), "about 0.3 MB; 0.2 MB were free", "save_total_limit"):
        assert words in message
    newest = checkpoints.newest(folder)
    assert newest is not None
    assert newest.path.name == "checkpoint-1"
    assert [path.name for path in folder.iterdir()] == ["checkpoint-1"], "room is given back"


def test_a_full_disk_leaves_no_half_of_a_result(tmpfs: Mount) -> None:
    folder = tmpfs("model", 500)
    (folder / "config.json").write_text("of before")
    with (
        pytest.raises(OutputError, match=r"The model .*/model: .* 0\.3 MB; 0\.5 MB .* Free"),
        atomic.results("The model", folder, 300_000, "Free space there.") as aside,
    ):
        (aside / "config.json").write_text("new")
        save_file({"a": kilobytes(600)}, aside / "model.safetensors")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_text() == "of before"


def test_a_read_only_folder_is_named_before_anything_is_written(tmpfs: Mount) -> None:
    folder = tmpfs("output", 100, "ro")
    with pytest.raises(OutputError, match=r"The output, .*/output/data, .*Read-only file system"):
        atomic.check_writable("The output", folder / "data", "Mount it.")
    with pytest.raises(CheckpointError, match=r"Read-only file system.*output_dir.*save_strategy"):
        checkpoints.check_writable(folder)


@pytest.mark.heavy
def test_a_job_whose_disks_are_full_goes_on_once_there_is_room(
    tmp_path: Path, tmpfs: Mount, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    """The disk of checkpoints, then the model's, then that of the report."""

    def widened(folder: Path, kilobytes: int) -> None:
        assert mounted("mount", "-o", f"remount,size={kilobytes}k", str(folder))

    saved, model = tmpfs("job/checkpoints", 700), tmpfs("job/model", 100)
    output = tmpfs("job/output/data", 12)
    data = write_reviews(tmp_path / "in" / "train.csv", 80).parent
    argv = ["--model_id", str(tiny_model), "--batch_size", "8", "--max_steps", "6"]
    argv += ["--save_steps", "2", "--save_total_limit", "3"]
    job = Job(tmp_path / "job", {"train": data}, argv, preloaded).run()
    assert job.codes == {1}
    last = job.errors.strip().splitlines()[-1]
    for words in ("CheckpointError", str(saved), "It takes about 0.", "MB were free", "Free space"):
        assert words in last
    newest = checkpoints.newest(saved)
    assert newest is not None
    assert not list(saved.glob(".*"))

    widened(saved, 10_000)
    assert job.run().codes == {1}
    assert f"resuming from {newest.path}" in job.log
    last = job.errors.strip().splitlines()[-1]
    for words in ("OutputError", "The model cannot be written", str(model), "volume size"):
        assert words in last
    assert list(model.iterdir()) == []

    widened(model, 10_000)
    done = job.finish()
    assert "checkpoint-6" in done.log and not done.losses
    assert done.files and done.metrics["eval_loss"] > 0
    (line,) = (line for line in done.log.splitlines() if "the report cannot" in line)
    for words in (str(output), "0.0 MB were free", "metrics.json are already written"):
        assert words in line
    assert {path.name for path in output.iterdir()} - {"mistakes.csv"} == {"metrics.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("a card, which people edit")
    checksums.write(tmp_path)
    return tmp_path


def look(folder: Path) -> None:
    with checksums.verified(str(folder)):
        pass


def test_sha256sum_reads_what_is_written(folder: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "-c", checksums.NAME], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["config.json: OK", "model.safetensors: OK"]


def test_damage_is_told_in_the_stead_of_what_it_made_go_wrong_and_nothing_else(
    folder: Path,
) -> None:
    (folder / "README.md").write_text("a card")
    look(folder)
    look(folder / "no such folder")
    (folder / "config.json").write_text("[")
    with (
        pytest.raises(ModelError, match=r"config\.json has changed"),
        checksums.verified(str(folder)),
    ):
        raise ValueError("Expecting value")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", checksums.NAME])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_is_seen_wherever_it_is(folder: Path, name: str, bit: int) -> None:
    content = (folder / name).read_bytes()
    for offset in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << bit
        (folder / name).write_bytes(damaged)
        if name == checksums.NAME and offset == len(content) - 1:
            continue  # The last line's end: all sums are still there, or the name is longer.
        with pytest.raises(ModelError, match=r"cannot be loaded: .*SHA256SUMS"):
            look(folder)
    (folder / name).write_bytes(content)
    look(folder)


def test_a_file_that_is_gone_or_cannot_be_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, which SHA256SUMS lists"):
        look(folder)
    (folder / checksums.NAME).write_text(f"{'0' * 64}  {'n' * 300}\n")
    with pytest.raises(ModelError, match=r"nnn is missing"):
        look(folder)
    # A file like /dev/zero never ends.
    for name in ("../secret", "/dev/zero", "a\\b"):
        (folder / checksums.NAME).write_text(f"{'0' * 64}  {name}\n")
        with pytest.raises(ModelError, match="invalid line"):
            look(folder)
    (folder / "endless").symlink_to("/dev/zero")
    (folder / checksums.NAME).write_text(f"{'0' * 64}  endless\n")
    with pytest.raises(ModelError, match="endless is missing"):
        look(folder)


def test_a_changed_weight_is_never_served(tmp_path: Path, tiny_model: Path) -> None:
    location = tmp_path / "model"
    location.mkdir()
    for path in tiny_model.iterdir():
        (location / path.name).write_bytes(path.read_bytes())
    checksums.write(location)
    environ = {"HF_TASK": "feature-extraction"}
    registry.load(str(location), environ)
    weights = bytearray((location / "model.safetensors").read_bytes())
    weights[-100] ^= 1
    (location / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError) as caught:
        registry.load(str(location), environ)
    assert re.search(r"model\.safetensors has changed .*Copy its files again", str(caught.value))


KEY = "0123456789abcdef" * 2
WRITER = """
import sys, pathlib, numpy as np
from recipe.storage import number_files
def parts():
    for _ in range(3):
        yield {"ids": np.ones(100_000, np.int32)}
    print("half", flush=True)
    sys.stdin.readline()
    yield {"ids": np.ones(100_000, np.int32)}
number_files.write(pathlib.Path(sys.argv[1]), parts())
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """A process that has written half of its numbers, and waits for a line."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], env={**os.environ, "PYTHONPATH": str(CODE)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert writer.stdout is not None and writer.stdout.readline() == "half\n"
    return writer


@pytest.fixture
def living(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with start(tmp_path / KEY) as writer:
        yield writer
        writer.kill()


def one_number(folder: Path) -> None:
    number_files.write(folder, [{"ids": np.ones(1, np.int32)}])


def test_what_a_killed_writer_left_goes_after_an_hour_and_a_living_one_goes_on(
    tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    def grown_old(folder: Path) -> None:
        long_ago = time.time() - 2 * number_files._SILENT_SECONDS
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (long_ago, long_ago))

    def names(folder: Path) -> set[str]:
        """Without what was drawn at random."""
        return {path.name.partition(".")[0] for path in folder.iterdir()}

    with start(tmp_path / "other") as killed:
        killed.kill()
    one_number(tmp_path / "third")
    assert names(tmp_path) == {KEY, "other", "third"}
    grown_old(next(tmp_path.glob("other.*")))
    one_number(tmp_path / "fourth")
    assert names(tmp_path) == {KEY, "third", "fourth"}
    living.communicate("on\n")
    assert living.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {KEY, "third", "fourth"}
    assert number_files.read(tmp_path / KEY)["ids"].sum() == 400_000


def test_the_first_of_two_writers_of_the_same_numbers_wins(
    tmp_path: Path, living: subprocess.Popen[str]
) -> None:
    one_number(tmp_path / KEY)
    living.communicate("on\n")
    assert living.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [KEY]
    assert number_files.read(tmp_path / KEY)["ids"].tolist() == [1]
