"""Writes docs/LICENSES.md: each distribution of the locks with its licence. `make licences`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("image", "gpu", "cpu", "neuron-xla", "dev")
_KIND = "License :: OSI Approved :: "
HEAD = """# Licences of what is installed

Made by `make licences` from container/locks and the metadata of what is installed where it runs.
Images hold what `image` lists, those for GPUs and CPUs what `gpu` and `cpu` list too, the legacy
Neuron stack what `neuron-xla` lists, on top of their base image; `dev` is for development and
tests only, and is in no image. torch and what it needs come with a base image.

| distribution | version | licence | locks |
|---|---|---|---|
"""


def locked() -> dict[tuple[str, str], list[str]]:
    """(name, version) to the locks that name it."""
    found: dict[tuple[str, str], list[str]] = {}
    for lock in LOCKS:
        for line in (ROOT / "container" / "locks" / f"{lock}.txt").read_text().splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)", line):
                found.setdefault((match[1], match[2]), []).append(lock)
    return dict(sorted(found.items()))


def licence(name: str, version: str) -> str:
    """In one short line; where another version is installed, that one's; else that nobody says."""
    try:
        told = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed here"
    every = [each.split(" :: ")[-1] for each in told.get_all("Classifier") or [] if _KIND in each]
    free = next(iter((told.get("License") or "").strip().splitlines()), "")[:60]
    said = told.get("License-Expression") or ", ".join(every) or free or "not said"
    of = "" if told["Version"] == version else f" (of {told['Version']})"
    return said.replace("|", "/") + of


def main() -> None:
    """Write the page."""
    rows = [
        f"| {name} | {version} | {licence(name, version)} | {', '.join(locks)} |"
        for (name, version), locks in locked().items()
    ]
    (ROOT / "docs" / "LICENSES.md").write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
