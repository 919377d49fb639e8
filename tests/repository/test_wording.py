"""Words that make English hard to read, kept out of all pages and of the Python that is clean.

Add a folder to CLEAN once it has none of them.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLEAN = (
    *sorted(path.name for path in ROOT.glob("*.md")),
    "docs",
    "examples",
    *sorted(f"code/{path.name}" for path in (ROOT / "code").glob("*.py")),
    *sorted(f"code/recipe/{path.name}" for path in (ROOT / "code" / "recipe").glob("*.py")),
    *(f"code/recipe/backend/{name}" for name in ("generation", "requests", "saved", "static")),
    "code/recipe/batching",
    "code/recipe/compat",
    "code/recipe/data/layout",
    "code/recipe/inference",
    "code/recipe/models",
    "code/recipe/plan",
    "code/recipe/reports",
    "code/recipe/runtime",
    "code/recipe/storage",
    "code/recipe/tokenization",
    "code/recipe/training",
    "container",
)
WORDS = {
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
_ALTERNATIVES = "|".join(rf"(?P<w{number}>{word})" for number, word in enumerate(WORDS))
PATTERN = re.compile(rf"\b(?:{_ALTERNATIVES})\b".replace(" ", r"\s+"), re.I)


def files() -> list[Path]:
    results = [
        path
        for name in CLEAN
        for path in ([ROOT / name] if "." in name else (ROOT / name).rglob("*"))
    ]
    return sorted(path for path in results if path.suffix in (".md", ".py"))


def test_plain_words() -> None:
    meanings = list(WORDS.values())
    wrong = []
    for path in files():
        text = re.sub(
            r"```.*?```|`[^`\n]*`",
            lambda code: "\n" * code[0].count("\n"),
            path.read_text(),
            flags=re.S,
        )
        for match in PATTERN.finditer(text):
            line = text[: match.start()].count("\n") + 1
            meaning = meanings[int(str(match.lastgroup)[1:])]
            wrong.append(f"{path.relative_to(ROOT)} line {line}: {match[0]!r}: {meaning}")
    assert not wrong, "\n".join(wrong)


def test_table_cells_are_short() -> None:
    # A phrase may stand on two lines.
    # Characters: two lines of a table.
    longest_cell = 170
    pages = [path for path in files() if path.suffix == ".md"]
    tables = [
        (path.name, line)
        for path in pages
        for line in path.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert not [
        (page, line) for page, line in tables if max(map(len, line.split(" | "))) > longest_cell
    ]


def test_pages_are_short() -> None:
    # In all pages; a reader has to find a page among them.
    most_words = 27_000
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.splitlines()] or list(ROOT.glob("docs/**/*.md"))
    assert sum(len(page.read_text().split()) for page in pages if page.exists()) <= most_words


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


def test_a_wrong_word_is_found() -> None:
    assert PATTERN.search("It is fast beside the other.")
    assert not PATTERN.search("The beside.py file is a number.")


ROOTS = [
    ROOT / folder
    for folder in (
        "code",
        "code/recipe",
        "container",
        "container/amphora",
        "container/amphora/serving",
    )
]
_PACKAGES = "|".join(
    sorted({child.parent.name for root in ROOTS for child in root.glob("*/__init__.py")})
)


def exists(name: str) -> bool:
    """Return whether a dotted name is a package, a module, or what a module defines."""
    for root in ROOTS:
        path = root.joinpath(*name.split("."))
        if (path / "__init__.py").exists() or path.with_suffix(".py").exists():
            return True
        module = path.parent.with_suffix(".py")
        if module.exists() and re.search(rf"\b{path.name}\b", module.read_text()):
            return True
    return False


def test_modules_that_a_page_names_exist() -> None:
    pages_with_modules = [
        path
        for path in [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
        if path.name != "removed.md"
    ]
    named = re.compile(rf"`((?:{_PACKAGES})(?:\.(?!py`)[a-z_]\w*)+)`")
    for page in pages_with_modules:
        names = set(named.findall(page.read_text()))
        assert not [name for name in sorted(names) if not exists(name)], page.name


def test_modules_in_the_tables_of_the_architecture_exist() -> None:
    """Check the first column, and the modules that the second one lists."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    tables = text.split("## Where things are")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, |: )?)+) \| (.+) \|$", tables, re.MULTILINE)
    packages = [re.findall(r"`([\w.]+)`", packages) for packages, _ in rows]
    assert sum(map(len, packages)) > 20
    for of_row, (_, contents) in zip(packages, rows, strict=True):
        assert all(exists(name) or exists(f"data.{name}") for name in of_row), of_row
        if len(of_row) == 1 and of_row != ["tasks"]:
            modules = re.findall(r"`([a-z_0-9]+)`", contents)
            missing = [name for name in modules if not exists(f"{of_row[0]}.{name}")]
            assert set(missing) <= {"sitecustomize"}, missing
