"""Write docs/LICENSES.md, the packages of the images by licence: `make licences`."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("image", "gpu", "cpu", "neuron-xla")
_KIND = "License :: OSI Approved :: "
HEAD = """# Licences of the packages in images

Made by `make licences` from container/locks. The base's packages (torch and others) are not listed;
an image's SBOM has all.

"""
_SAME = {
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "BSD": "BSD License",
    "3-Clause BSD License": "BSD-3-Clause",
}


def locked() -> list[str]:
    """Return the names of all packages in the locks of images."""
    text = "".join((ROOT / "container" / "locks" / f"{lock}.txt").read_text() for lock in LOCKS)
    return sorted(set(re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)))


def licence(name: str) -> str:
    """Return the licence that the installed version declares, as one short line."""
    try:
        declared = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed where this was made"
    classifiers = declared.get_all("Classifier") or []
    listed = ", ".join(text.split(" :: ")[-1] for text in classifiers if _KIND in text)
    free_text = next(iter((declared.get("License") or "").strip().splitlines()), "")[:60]
    results = declared.get("License-Expression") or listed or free_text or "none declared"
    return _SAME.get(results, results)


def page() -> str:
    """Return the page: packages by licence."""
    groups: dict[str, list[str]] = {}
    for name in locked():
        groups.setdefault(licence(name), []).append(name)
    lines = [f"- {name}: {', '.join(names)}" for name, names in sorted(groups.items())]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "LICENSES.md").write_text(page())


if __name__ == "__main__":
    main()
