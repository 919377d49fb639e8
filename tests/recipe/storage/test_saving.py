from pathlib import Path

import pytest

from recipe.storage.atomic import whole_folder


def test_entries_arrive_replace_their_like_and_leave_others(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (target / "code").mkdir(parents=True)
    (target / "old").mkdir()
    (target / "weights").write_text("old")
    with whole_folder(target) as folder:
        (folder / "weights").write_text("new")
        (folder / "old").write_text("a file now")
        assert (target / "weights").read_text() == "old"
        assert folder.parent == target, "on the same file system, so that nothing is copied"
    assert sorted(entry.name for entry in target.iterdir()) == ["code", "old", "weights"]
    assert (target / "weights").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_after_an_error_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk full"), whole_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise OSError("disk full")
    assert list(target.iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_gone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    left = target / ".arriving-abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    with whole_folder(target) as folder:
        (folder / "config.json").touch()
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
