import re
import subprocess
from pathlib import Path

import pytest

from recipe.errors import ModelError
from recipe.inference import registry
from recipe.storage import checksums


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


def test_files_that_are_as_they_were_written_and_others_beside_them_pass(folder: Path) -> None:
    (folder / "README.md").write_text("a card")
    look(folder)
    look(folder / "no such folder")


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


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, which SHA256SUMS lists"):
        look(folder)


def test_a_name_that_no_file_can_have_is_missing(folder: Path) -> None:
    (folder / checksums.NAME).write_text(f"{'0' * 64}  {'n' * 300}\n")
    with pytest.raises(ModelError, match=r"nnn is missing"):
        look(folder)


def test_sums_lead_nowhere_else(folder: Path) -> None:
    """A file like /dev/zero never ends."""
    for name in ("../secret", "/dev/zero", "a\\b"):
        (folder / checksums.NAME).write_text(f"{'0' * 64}  {name}\n")
        with pytest.raises(ModelError, match="invalid line"):
            look(folder)
    (folder / "endless").symlink_to("/dev/zero")
    (folder / checksums.NAME).write_text(f"{'0' * 64}  endless\n")
    with pytest.raises(ModelError, match="endless is missing"):
        look(folder)


def test_damage_is_told_in_the_stead_of_what_it_made_go_wrong(folder: Path) -> None:
    (folder / "config.json").write_text("[")
    with (
        pytest.raises(ModelError, match=r"config\.json has changed"),
        checksums.verified(str(folder)),
    ):
        raise ValueError("Expecting value")


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
