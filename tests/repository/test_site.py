"""The documentation site: built without a warning, every link of it leads somewhere."""

import json
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs`."""
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    folders = ["-c", str(DOCS / "site"), "-d", str(site / ".doctrees"), str(source), str(site)]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, *folders],
        text=True,
        capture_output=True,
        cwd=ROOT,
    )


class Page(HTMLParser):
    """The addresses that a page links to, and its own anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.links += [attributes[name] or "" for name in ("href", "src") if name in attributes]
        self.anchors |= {attributes[name] or "" for name in ("id", "name") if name in attributes}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(DOCS, folder)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@pytest.mark.heavy
def test_every_link_leads_to_a_page_and_its_place(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 20
    checked, broken = 0, []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            checked += 1
            anchor = unquote(parts.fragment)
            if not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(site.resolve())}: {link}")
    assert checked > 1000
    assert not broken, broken[:20]


@pytest.mark.heavy
def test_pages_mentions_and_docstrings_are_there(site: Path) -> None:
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    home = Page(site / "index.html")
    assert {"TRAINING.html", "SERVING.html", "site/examples.html", "site/recipe.html"} <= set(
        home.links
    )
    # A section that a page names after the page.
    assert "TRAINING.html#packages-for-your-code" in Page(site / "ESTIMATORS.html").links
    package = site / "site" / "amphora.html"
    assert {"amphora-contract-job", "amphora-common-logs"} <= Page(package).anchors
    text = re.sub(r"<[^>]*>", "", package.read_text())
    assert "read_job(environ" in text and "class Job" in text
    assert "recipe-tasks-base" in Page(site / "site" / "recipe.html").anchors


@pytest.mark.heavy
def test_what_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """A mention, an anchor and a page."""
    source = tmp_path / "docs"
    source.mkdir()
    text = "see docs/NOWHERE.md, [this](#nowhere) and [that](other.md)"
    (source / "index.md").write_text(f"# A page\n\n{text}\n")
    built = build(source, tmp_path / "site")
    assert built.returncode != 0
    for says in ("docs/NOWHERE.md is mentioned, and is no page", "'nowhere'", "other.md"):
        assert says in built.stderr


def test_the_pages_are_what_the_code_says() -> None:
    program = (
        "import json, runpy; print(json.dumps(runpy.run_path('docs/reference.py')['pages']()))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for path, text in json.loads(made).items():
        assert (ROOT / path).read_text() == text, "run: .venv/bin/python docs/reference.py"
        assert "text-classification" in text


def test_the_drawings_are_what_the_program_draws() -> None:
    drawings = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))["DRAWINGS"]
    assert len(drawings) >= 4
    for name, draw in drawings.items():
        committed = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert committed == draw().text(), "run: .venv/bin/python docs/diagrams.py"
