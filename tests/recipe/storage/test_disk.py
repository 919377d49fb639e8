"""Results are written whole or not at all; disks that are full or read-only, really mounted."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipe.errors import CheckpointError, OutputError
from recipe.storage import atomic, checkpoints
from tests.support.jobs import Job
from tests.support.mounts import Mount, mounted
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


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk full"), atomic.whole_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise OSError("disk full")
    assert list(target.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_gone(tmp_path: Path) -> None:
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


def save_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    with checkpoints.writing(folder, step, needed=300_000) as written:
        written.mkdir(parents=True)
        (written / "scheduler.pt").write_bytes(b"0123456789")
        write(written)
        checkpoints.publish(folder, step, {"seed": 1}, finished=False)


WRITERS = {
    "torch": lambda folder: torch.save(kilobytes(300), folder / "optimizer.pt"),
    "safetensors": lambda folder: save_file({"a": kilobytes(300)}, folder / "model.safetensors"),
    "text": lambda folder: (folder / "trainer_state.json").write_text("x" * 300_000),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_keeps_the_checkpoint_before(tmpfs: Mount, kind: str) -> None:
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


def widened(folder: Path, kilobytes: int) -> None:
    assert mounted("mount", "-o", f"remount,size={kilobytes}k", str(folder))


@pytest.mark.heavy
def test_a_job_whose_disks_are_full_goes_on_once_there_is_room(
    tmp_path: Path, tmpfs: Mount, tiny_model: Path, preloaded: Mapping[str, str]
) -> None:
    """The disk of checkpoints, then the model's, then that of the report."""
    saved, model = tmpfs("job/checkpoints", 700), tmpfs("job/model", 100)
    output = tmpfs("job/output/data", 40)
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
    assert [path.name for path in output.iterdir()] == ["metrics.json"]
