"""Settings of the documentation site: `make docs` builds it from docs/ and the docstrings.

Sphinx, with MyST for the pages, which stay plain Markdown; docstrings.py and messages.py read code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path.insert(0, str(_HERE))

project = "Amphora"
_package = tomllib.loads((_ROOT / "container" / "pyproject.toml").read_text(encoding="utf-8"))
version = release = _package["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "mentions",
    "messages",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 3
# What stands between backticks in a docstring is code, as in Markdown.
default_role = "literal"

napoleon_use_rtype = False
napoleon_use_param = False

html_theme = "furo"
html_title = f"{project} {version}"
html_logo = html_favicon = "static/logo.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
smartquotes = False  # quotes in JSON and dashes of options would be unusable
html_copy_source = False
html_use_index = False
html_show_copyright = False
_GENERATED = ("REFERENCE", "LICENSES", "site/amphora", "site/errors", "site/recipe")
_COLOURS = {"brand-primary": "#a34a25", "brand-content": "#a34a25", "brand-visited": "#7a4a6a"}
_COLOURS_IN_THE_DARK = dict.fromkeys(("brand-primary", "brand-content"), "#e58a62")
html_theme_options = {
    "light_css_variables": {f"color-{name}": value for name, value in _COLOURS.items()},
    "dark_css_variables": {f"color-{name}": value for name, value in _COLOURS_IN_THE_DARK.items()},
}


def _edit_address() -> str:
    """Return where GitHub edits a file of the checkout's origin; nothing for other hosts."""
    command = ["git", "-C", str(_ROOT), "remote", "get-url", "origin"]
    origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    repository = re.search(r"github\.com[:/](.+?)(?:\.git)?$", origin)
    return f"https://github.com/{repository[1]}/edit/main" if repository else ""


def _add_edit_link(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """Have "Edit this page" name the file that a person edits; generated pages have none."""
    folder = _ROOT / "docs"
    source = folder / f"{page}.md"
    if app.config.edit_address and source.is_file():
        included = re.match(r"```\{include\} (\S+)", source.read_text(encoding="utf-8"))
        if included:
            source = (source.parent / included[1]).resolve()
        if page not in _GENERATED:
            path = source.relative_to(_ROOT).as_posix()
            context["theme_source_edit_link"] = f"{app.config.edit_address}/{path}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_config_value("edit_address", _edit_address(), "html", types=[str])
    app.connect("html-page-context", _add_edit_link)
