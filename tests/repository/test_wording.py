"""Words that make English hard to read, kept out of all pages and of most Python; names that say nothing about
what they hold, refused; and what pages name."""

import re
import subprocess
import symtable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def clean_files() -> list[Path]:
    """Return the pages, and all Python that has none of the words yet."""
    folders = [ROOT / name for name in ("docs", "examples", "code", "container")]
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*"))]
    return sorted(
        path
        for path in paths
        if path.suffix in (".md", ".py")
        and "tasks" not in path.parts
        and path.parent.name != "data"
        and "image" not in path.name
    )


def test_plain_words() -> None:
    words = {
        r"beside (?:it|the|a|an|this|that|each|which)": "compared with, in addition to, next to",
        r"(?<!there\s)is no (?:number|file|folder|name|model|table|text)": "is not a ...",
        r"heeds?|heeded": "apply, follow",
        r"sees? to": "ensure",
        r"(?:is|are) asked(?: for)?": "is requested",
        r"(?:is|are|be) told": "is reported",
        r"as it is": "unchanged",
        r"without a word": "silently",
        r"words about": "a message about",
        r"in the stead of": "instead of",
        r"by itself": "alone, separately, automatically",
        r"whose a turn": "which turn",
        r"goes? on with": "continue with",
        r"good bye": "shutdown",
        r"makes? tokens|made tokens": "tokenize",
        r"texts? that (?:is|are) written|writing of texts": "generated text, generation",
        r"pictures?": "image",
        r"as ever": "as before",
        r"in the place of": "instead of",
        r"tells? (?:\w+ )?apart": "distinguish",
        r"what (?:became|becomes) of": "how many are left out, what happens to",
        r"speaks? of": "mention",
        r"is none for (?:the|an?)": "is rejected by",
        r"(?:is|are) gone": "has ended, no longer exists",
        r"mend(?:s|ed)?": "fix",
        r"of a user's own|of one's own|of your own": "your, user's",
    }
    alternatives = "|".join(rf"(?P<w{number}>{word})" for number, word in enumerate(words))
    pattern = re.compile(rf"\b(?:{alternatives})\b".replace(" ", r"\s+"), re.I)
    assert pattern.search("It is fast beside the other.")
    assert not pattern.search("The beside.py file is a number.")
    meanings = list(words.values())
    wrong = []
    for path in clean_files():
        text = re.sub(
            r"```.*?```|`[^`\n]*`",
            lambda code: "\n" * code[0].count("\n"),
            path.read_text(),
            flags=re.S,
        )
        for match in pattern.finditer(text):
            line = text[: match.start()].count("\n") + 1
            meaning = meanings[int(str(match.lastgroup)[1:])]
            wrong.append(f"{path.relative_to(ROOT)} line {line}: {match[0]!r}: {meaning}")
    assert not wrong, "\n".join(wrong)


def test_table_cells_are_short() -> None:
    # Characters: two lines of a table; a line more in the page that is made of help texts.
    longest_cell, longest_of_reference = 170, 250
    pages = [path for path in clean_files() if path.suffix == ".md"]
    tables = [
        (path.name, line)
        for path in pages
        for line in path.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert not [
        (page, line)
        for page, line in tables
        if max(map(len, line.split(" | ")))
        > (longest_of_reference if page == "REFERENCE.md" else longest_cell)
    ]


def test_pages_are_short() -> None:
    # In all pages that people write; a reader has to find a page among them.
    most_words, generated = 27_000, {"REFERENCE.md", "LICENSES.md"}
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.glob("docs/**/*.md"))
    assert sum(len(page.read_text().split()) for page in pages
               if page.exists() and page.name not in generated) <= most_words  # fmt: skip


def test_a_goal_is_reached_in_a_short_section() -> None:
    # The sections that answer what most users want, each within 300 words, examples included.
    goals = {
        "TRAINING.md": (
            "Train on your CSV",
            "Resume a stopped job",
            "Your own script",
            "Several processes and hosts",
            "LoRA on conversations",
            "Add a metric",
        ),
        "SERVING.md": (
            "Serve a model and send requests",
            "Your own inference.py",
            "Port, time-outs, batching",
        ),
        "USING.md": ("Which instance", "What it costs"),
    }
    for page, headings in goals.items():
        sections = re.split(r"^##+ ", (ROOT / "docs" / page).read_text(), flags=re.M)
        for heading in headings:
            (section,) = [text for text in sections if text.startswith(f"{heading}\n")]
            assert len(re.findall(r"\S*\w\S*", section)) <= 300, heading


def test_a_decision_has_its_parts_and_a_row_of_the_index() -> None:
    decisions = [
        path
        for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))
        if path.name not in ("index.md", "kept.md", "removed.md")
    ]
    for page in decisions:
        text = page.read_text()
        parts = [text.index(part) for part in ("**Context.**", "**Choice.**", "**Revisit when**")]
        assert parts == sorted(parts), page.name
        assert len(text.split()) <= 250, page.name
        assert f"| [{page.stem}]({page.name}) |" in (page.parent / "index.md").read_text()


def test_modules_that_pages_name_exist() -> None:
    """In the text, and in both columns of the architecture's tables."""
    packages = ("", "recipe", "amphora", "amphora/serving")
    roots = [ROOT / top / package for top in ("code", "container") for package in packages]
    roots = [root for root in roots if root.is_dir()]

    def exists(name: str) -> bool:
        """Return whether a dotted name is a package, a module, or what a module defines."""
        for root in roots:
            path = root.joinpath(*name.split("."))
            if (path / "__init__.py").exists() or path.with_suffix(".py").exists():
                return True
            module = path.parent.with_suffix(".py")
            if module.exists() and re.search(rf"\b{path.name}\b", module.read_text()):
                return True
        return False

    known = "|".join(
        sorted({init.parent.name for root in roots for init in root.glob("*/__init__.py")})
    )
    named = re.compile(rf"`((?:{known})(?:\.(?!py`)[a-z_]\w*)+)`")
    for page in [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]:
        # What is no longer there; names of columns, which may have points.
        is_checked = page.name not in ("removed.md", "REFERENCE.md")
        names = set(named.findall(page.read_text())) if is_checked else ()
        assert not [name for name in sorted(names) if not exists(name)], page.name
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    tables = text.split("## Where things are")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, |: )?)+) \| (.+) \|$", tables, re.MULTILINE)
    first = [re.findall(r"`([\w.]+)`", cell) for cell, _ in rows]
    assert sum(map(len, first)) > 20
    for of_row, (_, contents) in zip(first, rows, strict=True):
        assert all(exists(name) or exists(f"data.{name}") for name in of_row), of_row
        if len(of_row) == 1 and of_row != ["tasks"]:
            modules = re.findall(r"`([a-z_0-9]+)`", contents)
            missing = [name for name in modules if not exists(f"{of_row[0]}.{name}")]
            assert set(missing) <= {"sitecustomize"}, missing


@pytest.mark.parametrize(
    "folder", ("code", "container", "tests", "benchmarks", "ordeal", "examples")
)
def test_names_say_what_they_hold(folder: str) -> None:
    vague = r"(?i)_?(of|at|places?|said|told|asked|found|beside|each|own|like)"
    # Functions do not begin with one; `from_x`, `to_x`, `as_x`, `with_x` and `on_x` are conventional.
    preposition = r"_?(about|above|around|at|before|below|beside|between|by|for|in|into|near|of|over|under|without)_"

    def wrong_names(source: str) -> list[tuple[int, str]]:
        """Return the line of its scope and the name of each identifier that has to be renamed: a local
        name, a parameter, a function or a class."""
        wrong, scopes = [], [symtable.symtable(source, "a module", "exec")]
        while scopes:
            scope = scopes.pop()
            scopes += scope.get_children()
            names = [name for name in scope.get_identifiers() if re.fullmatch(vague, name)]
            symbols = map(scope.lookup, names)
            bound = [
                item.get_name() for item in symbols if item.is_assigned() or item.is_parameter()
            ]
            if scope.get_type() == "function" and re.match(preposition, scope.get_name()):
                bound.append(scope.get_name())
            wrong += [(scope.get_lineno(), name) for name in bound]
        return wrong

    source = "def of_rows(at): return [each for each in at]\nclass Beside: ...\ndef on_save(): ..."
    assert sorted(name for _, name in wrong_names(source)) == ["Beside", "at", "each", "of_rows"]
    wrong = [
        f"{path.relative_to(ROOT)}, scope of line {line}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in wrong_names(path.read_text(encoding="utf-8"))
    ]
    assert not wrong
