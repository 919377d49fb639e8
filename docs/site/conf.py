"""Settings of the documentation site: `make docs` builds it from docs/ and the docstrings.

Sphinx, with MyST for the pages, which stay plain Markdown; the docstrings come by docstrings.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path.insert(0, str(_HERE))

project = "Amphora"
_package = tomllib.loads((_ROOT / "container" / "pyproject.toml").read_text(encoding="utf-8"))
version = release = _package["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.napoleon", "sphinx_copybutton", "docstrings", "mentions"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 3
# What stands between backticks in a docstring is code, as in Markdown.
default_role = "literal"

napoleon_use_rtype = False
napoleon_use_param = False

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_copyright = False
