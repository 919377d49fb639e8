"""Turn mentions of pages into links, since pages are read as plain text too.

`docs/DATA.md` in a page or a docstring becomes a link with that page's title, and `docs/DATA.md,
Columns` one to its section. A page that does not exist is a warning, which fails the build.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata

_MENTION = re.compile(
    r"(?<![\w/.-])(?P<folder>docs/decisions/|docs/|examples/)?"
    r"(?P<name>[A-Z]+|(?<=decisions/)[a-z]+)\.md\b"
)
# Pages of the checkout that do not stand in docs/. A README.md may be anybody's.
_ELSEWHERE = {
    "CHANGELOG": "site/changelog",
    "CONTRIBUTING": "site/contributing",
    "SECURITY": "site/security",
    "examples/README": "site/examples",
}
_PASSED_OVER = {"README"}
_log = logging.getLogger(__name__)


def _link(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Replace the mentions in one page by links."""
    builder = app.builder
    for text in list(tree.findall(nodes.Text)):
        if isinstance(text.parent, (nodes.literal, nodes.reference, nodes.FixedTextElement)):
            continue
        source, end = text.astext(), 0
        parts: list[nodes.Node] = []
        for mention in _MENTION.finditer(source):
            folder = (mention["folder"] or "").removeprefix("docs/")
            name = folder + mention["name"]
            if name in _PASSED_OVER:
                continue
            target = _ELSEWHERE.get(name, name)
            if target not in app.env.found_docs:
                _log.warning("%s is mentioned, and is no page", mention[0], location=page)
                continue
            title = app.env.titles[target].astext()
            anchor, until = "", mention.end()
            for reference in app.env.tocs[target].findall(nodes.reference):
                words = r"\s+".join(map(re.escape, reference.astext().split()))
                section = re.compile(rf",\s+{words}\b").match(source, mention.end())
                if section and reference["anchorname"] and section.end() > until:
                    anchor, until = reference["anchorname"], section.end()
            address = builder.get_relative_uri(page, target) + anchor
            parts += [
                nodes.Text(source[end : mention.start()]),
                nodes.reference(
                    "", title + source[mention.end() : until], refuri=address, internal=True
                ),
            ]
            end = until
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(source[end:])])


def setup(app: Sphinx) -> ExtensionMetadata:
    """Called by Sphinx."""
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
