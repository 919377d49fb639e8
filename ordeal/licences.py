"""Write docs/LICENSES.md, each distribution of the locks by its licence: `make licences`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("image", "gpu", "cpu", "neuron-xla", "dev")
_KIND = "License :: OSI Approved :: "
HEAD = """# Licences of what is installed

Made by `make licences` from container/locks and the metadata of the packages installed where it
ran. A base image brings torch and its dependencies, which are not listed. The locks have versions.
"""
_SAME = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD": "BSD License",
    "3-Clause BSD License": "BSD-3-Clause",
}


def locked() -> dict[tuple[str, str], list[str]]:
    """Return the locks that name each (name, version)."""
    found: dict[tuple[str, str], list[str]] = {}
    for lock in LOCKS:
        for line in (ROOT / "container" / "locks" / f"{lock}.txt").read_text().splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)==([^ ;]+)", line):
                found.setdefault((match[1], match[2]), []).append(lock)
    return dict(sorted(found.items()))


def licence(name: str) -> str:
    """Return the licence that the installed version declares, as one short line."""
    try:
        declared = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed where this was made"
    classifiers = declared.get_all("Classifier") or []
    listed = ", ".join(text.split(" :: ")[-1] for text in classifiers if _KIND in text)
    free_text = next(iter((declared.get("License") or "").strip().splitlines()), "")[:60]
    found = declared.get("License-Expression") or listed or free_text or "none declared"
    return _SAME.get(found, found)


def page() -> str:
    """Return the page: packages by licence, those of images first."""
    in_images: dict[str, set[str]] = {}
    for_development: dict[str, set[str]] = {}
    of_images = {name for (name, _), locks in locked().items() if locks != ["dev"]}
    for name, _ in locked():
        group = in_images if name in of_images else for_development
        group.setdefault(licence(name), set()).add(name)
    lines = []
    for title, group in (("In images", in_images), ("Development and tests", for_development)):
        lines += [f"\n## {title}\n"]
        lines += [f"- {name}: {', '.join(sorted(names))}" for name, names in sorted(group.items())]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "LICENSES.md").write_text(page())


if __name__ == "__main__":
    main()
