"""The folder below /tmp: one's own, or refused."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from recipe.inference.engines import choice
from recipe.storage import private_folder


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that others can write to."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def planted(folder: Path) -> Path:
    """What another user would have this one believe of a model's graph."""
    kept = folder / "openvino-0123"
    kept.mkdir(parents=True)
    (kept / "outcome.json").write_text(json.dumps({"sums": {}, "planted": True}))
    return kept


def test_it_is_made_for_this_user_alone() -> None:
    folder = private_folder.ensure()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder.ensure() == folder
    kept = planted(folder)
    assert choice._kept(kept)["planted"], "what is one's own is read"


def test_a_link_is_refused(shared: Path, tmp_path: Path) -> None:
    planted(tmp_path / "theirs")
    private_folder.path().symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="alone may write"):
        private_folder.ensure()
    assert choice._kept(private_folder.path() / "openvino-0123") == {}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(mode: int) -> None:
    kept = planted(private_folder.path())
    private_folder.path().chmod(mode)
    assert choice._kept(kept) == {}


def test_a_file_is_refused() -> None:
    private_folder.path().touch()
    with pytest.raises(PermissionError):
        private_folder.ensure()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused() -> None:
    kept = planted(private_folder.path())
    private_folder.path().chmod(0o700)
    os.chown(private_folder.path(), 12345, 12345)
    assert choice._kept(kept) == {}
