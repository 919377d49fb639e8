"""Change the product a little, see which test fails: `python -m ordeal.mutants --seed 42`.

Works on a copy below build/mutants. The tests run once with a recorder at each drawn line, which
also works in subprocesses; tests slower than 15 s are left out. Then each mutant is run against the
tests that reached its line, those with few seconds of tests first. Results are in results.jsonl; a
second call continues. `--only 7,12 --tests FILE` repeats mutants.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ordeal.common import ROOT, exit_code
from tests.support import preloading

WORK = ROOT if ROOT.name == "tree" else ROOT / "build" / "mutants" / "tree"
OUT = WORK.parent
PACKAGES = {"container/amphora": 0.45, "code/recipe": 0.55}
"""The share of each in the mutants."""
TESTS = ["tests/amphora", "tests/recipe"]
MARKS = "not docker and not heavy and not xla and not versions and not vllm"
SLOW = 15  # seconds of a test that is left out
LIMIT = 90  # seconds of the tests of a mutant, until it is not decided
LOGS = {"say", "print", "warn", "warning", "info", "error", "debug", "exception", "log", "lap"} | {
    "documented", "cast", "TypeVar", "NewType", "add_argument",
}  # fmt: skip
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-",
    ast.Sub: "+", ast.Mult: "//", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.BitOr: "&",
    ast.BitAnd: "|", ast.LShift: ">>", ast.RShift: "<<", ast.And: "or", ast.Or: "and",
}  # fmt: skip
RECORDER = """
import mmap, os
_seen, _map = set(), mmap.mmap(os.open({current!r}, os.O_RDONLY), 1024, prot=mmap.PROT_READ)
def _hit(number):
    test = _map[:].rstrip(b"\\0")
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        with open({hits!r}, "ab", 0) as file:
            file.write(b"%d %s\\n" % (number, test))
"""


@dataclass(frozen=True)
class Mutant:
    """`new` in place of the bytes `start` to `end` of a module, an expression or a statement."""

    path: str
    kind: str
    line: int
    start: int
    end: int
    old: str
    new: str
    in_function: bool


def line_starts(source: bytes) -> list[int]:
    """Return the position of the first byte of each line."""
    return [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]


def called(node: Any) -> str:
    """Return the last name of what a call calls."""
    function = getattr(node, "func", None)
    return str(getattr(function, "id", getattr(function, "attr", "")))


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a module; none in annotations, docstrings, f-strings and log texts."""
    source = path.read_bytes()
    starts = line_starts(source)

    def span(node: Any) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: Any) -> str:
        return source[slice(*span(node))].decode()

    def joined(first: Any, operator: ast.AST, second: Any, last: Any) -> str:
        behind = source[span(second)[0] : span(last)[1]].decode()
        return f"({text(first)}) {SWAPS[type(operator)]} ({behind})"

    def replacement(node: Any, inside: bool) -> tuple[str, str] | None:
        match node:
            case ast.Compare(ops=[operator]):
                return "operator", joined(node.left, operator, *node.comparators * 2)
            case ast.BinOp() if type(node.op) in SWAPS and inside:
                return "operator", joined(node.left, node.op, node.right, node.right)
            case ast.BoolOp():
                return "operator", joined(node.values[0], node.op, node.values[1], node.values[-1])
            case ast.UnaryOp(op=ast.Not()):
                return "operator", f"bool({text(node.operand)})"
            case ast.Constant(value=bool()):
                return "number", str(not node.value)
            case ast.Constant(value=int() | float()):
                return "number", f"({text(node)} + 1)"
            case ast.Constant(value=str()) if node.value.strip() and " " not in node.value:
                return None if "\n" in text(node) else ("text", repr(f"{node.value}_"))
            case ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
                return "statement", "pass"
            case ast.Expr(value=ast.Call()) if called(node.value) not in LOGS:
                return "statement", "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                return "statement", "pass"
        return None

    def visit(node: Any, inside: bool) -> Iterator[Mutant]:
        name = called(node)
        is_text = isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)
        if is_text or name in LOGS or name.endswith(("Error", "Warning")):
            return
        changes = [(node, replacement(node, inside))]
        tests = getattr(node, "ifs", [])
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            tests = [node.test]
        changes += [(test, ("condition", f"not ({text(test)})")) for test in tests]
        for part, change in changes:
            if change is not None:
                name, (kind, new) = path.relative_to(WORK).as_posix(), change
                yield Mutant(name, kind, part.lineno, *span(part), text(part), new, inside)
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Raise) or is_docstring:
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "ops", "op", "ctx"):
                continue
            is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and field == "body"
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside or is_body)

    yield from visit(ast.parse(source), False)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return mutants of both packages, as many of each kind."""
    draw, chosen = random.Random(seed), list[Mutant]()
    for package, share in PACKAGES.items():
        # In a module without a function no recorder sees a test.
        paths = [p for p in sorted((WORK / package).rglob("*.py")) if b"def " in p.read_bytes()]
        mutants = [mutant for path in paths for mutant in mutants_of(path)]
        kinds = sorted({mutant.kind for mutant in mutants})
        for rest, kind in enumerate(kinds):
            some = [mutant for mutant in mutants if mutant.kind == kind]
            chosen += draw.sample(some, (round(count * share) + rest) // len(kinds))
    return chosen


def prepare() -> None:
    """Copy the project, its environment as hard links, and continue in the copy."""
    if not WORK.exists():
        WORK.mkdir(parents=True)
        listing = ["git", "ls-files", "-co", "--exclude-standard"]
        for name in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
            if (ROOT / name).exists():
                (WORK / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, WORK / name)
        subprocess.run(["cp", "-al", ROOT / ".venv", WORK / ".venv"], check=True)
        packages = next((WORK / ".venv" / "lib").glob("python*/site-packages"))
        for path in packages.glob("__pycache__/__editable__*"):
            path.unlink()
        for path in [*(WORK / ".venv" / "bin").iterdir(), *packages.glob("__editable__*")]:
            if path.is_file() and not path.is_symlink():
                text, mode = path.read_bytes(), path.stat().st_mode
                path.unlink()  # and not written to: it is a link to the original
                path.write_bytes(text.replace(os.fsencode(ROOT), os.fsencode(WORK)))
                path.chmod(mode)
    python = str(WORK / ".venv" / "bin" / "python")
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    os.chdir(WORK)
    os.execv(python, [python, "-m", "ordeal.mutants", *sys.argv[1:]])


def insert_recorders(name: str, mutants: list[tuple[int, Mutant]]) -> bytes:
    """Return a module that calls the recorder at each mutant; at the start of every function for
    those that are in none."""
    source = (WORK / name).read_bytes()
    tree, starts = ast.parse(source), line_starts(source)
    firsts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[min(len(node.body) - 1, ast.get_docstring(node) is not None)]
            if first.lineno > node.lineno and not hasattr(first, "decorator_list"):
                firsts.append(first)
    added: list[tuple[int, int, str]] = []
    for number, mutant in mutants:
        if not mutant.in_function:
            for first in firsts:
                call = f"{' ' * first.col_offset}_hit({number})\n"
                added.append((starts[first.lineno - 1], 1, call))
        elif mutant.kind == "statement":
            added.append((mutant.start, 2, f"_hit({number}); "))
        else:
            added += [(mutant.start, 2, f"(_hit({number}) or ("), (mutant.end, 0, "))")]
    future = next(s for s in tree.body if isinstance(s, ast.ImportFrom))
    added.append((starts[future.end_lineno or 0], -1, "from _hits import _hit\n"))
    for offset, _, text in sorted(added, key=lambda item: item[:2], reverse=True):
        source = source[:offset] + text.encode() + source[offset:]
    return source


class Watch:
    """Writes the running test to a file that the recorders map; keeps its time and outcome."""

    def __init__(self, current: Path) -> None:
        current.write_bytes(bytes(1024))
        self._map = mmap.mmap(os.open(current, os.O_RDWR), 1024)
        self.seconds: Counter[str] = Counter()
        self.not_passed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._map[:] = nodeid.encode()[:1024].ljust(1024, b"\0")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: self.seconds[test] for test in self.seconds if test not in self.not_passed}
        (OUT / "tests.json").write_text(json.dumps(passed))
        origins = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        libraries = [name for name, origin in origins.items() if "/site-packages/" in str(origin)]
        (OUT / "libraries.json").write_text(json.dumps([n for n in libraries if n != "_hits"]))


class Forker:
    """A fork from before the tests, which has the libraries and nothing of the product.

    In place of `subprocess.Popen` in `tests.support.preloading`: the processes that it starts
    import what the mutant changes, and no library.
    """

    def __init__(self) -> None:
        self._asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            self._asking.close()
            while (received := socket.recv_fds(answering, 1 << 20, 1))[0]:
                if not (pid := os.fork()):
                    answering.close()
                    self._serve(*json.loads(received[0]), received[1][0])
                os.close(received[1][0])
                answering.send(str(pid).encode())
            os._exit(0)
        answering.close()

    @staticmethod
    def _serve(command: list[str], environ: dict[str, str], ready_end: int) -> None:
        os.environ.clear()
        os.environ.update(environ)
        _, _, path, _, *imports = command
        for name in imports:
            importlib.import_module(name)
        if not imports:
            preloading._warm_up(Path(path).parent)
        gc.collect()
        gc.freeze()
        preloading._become(preloading._serve(path, ready_end))

    @contextlib.contextmanager
    def popen(
        self, command: list[str], env: dict[str, str], pass_fds: list[int]
    ) -> Iterator[SimpleNamespace]:
        """Start a process that forks for scripts."""
        socket.send_fds(self._asking, [json.dumps([command, env]).encode()], pass_fds)
        pid = int(self._asking.recv(64))
        yield SimpleNamespace(terminate=lambda: os.kill(pid, signal.SIGTERM))


def run_tests(arguments: list[str], log: Path, limit: float, plugins: list[Any]) -> int | None:
    """Run pytest in a fork, which has the libraries; return its exit code, None after the limit."""
    pid = os.fork()
    if not pid:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        preloading.subprocess = SimpleNamespace(  # type: ignore[assignment]
            Popen=Forker().popen, CompletedProcess=subprocess.CompletedProcess
        )
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*quiet, *arguments], plugins))
        sys.stdout.flush()
        os._exit(code)
    return exit_code(pid, limit, lambda: os.killpg(pid, signal.SIGKILL))


def record(mutants: list[Mutant], tests: list[str]) -> None:
    """Run tests once, to see which of them reach each mutant."""
    packages = next((WORK / ".venv" / "lib").glob("python*/site-packages"))
    recorder = RECORDER.format(current=str(OUT / "current"), hits=str(OUT / "hits"))
    (packages / "_hits.py").write_text(recorder)
    before = {name: (WORK / name).read_bytes() for name in {mutant.path for mutant in mutants}}
    try:
        for name in before:
            numbered = [item for item in enumerate(mutants) if item[1].path == name]
            (WORK / name).write_bytes(insert_recorders(name, numbered))
        options = ["-m", MARKS, f"--timeout={SLOW}", "--durations=60"]
        run_tests([*tests, *options], OUT / "record.log", 7200, [Watch(OUT / "current")])
    finally:
        for name, source in before.items():
            (WORK / name).write_bytes(source)


def tests_of(mutants: list[Mutant], budget: float) -> list[dict[str, float]]:
    """Return the tests of each mutant, with their seconds: of its own folder, quick ones, and those
    of few mutants first."""
    seconds: dict[str, float] = json.loads((OUT / "tests.json").read_text())
    reached: list[set[str]] = [set() for _ in mutants]
    for line in set((OUT / "hits").read_text().splitlines()):
        number, test = line.split(" ", 1)
        if test in seconds:
            reached[int(number)].add(test)
    reach = Counter(test for tests in reached for test in tests)
    chosen = []
    for mutant, tests in zip(mutants, reached, strict=True):
        words = set(mutant.path.removesuffix(".py").split("/"))

        def rank(test: str, words: set[str] = words) -> tuple[int, bool, str, int]:
            file = test.partition(".py::")[0]
            related = len(words & set(file.replace("test_", "").split("/")))
            return -related, seconds[test] > 2, file, reach[test]

        some: dict[str, float] = {}
        for test in sorted(tests, key=rank):
            if not some or sum(some.values()) + seconds[test] <= budget:
                some[test] = seconds[test]
        chosen.append(some)
    return chosen


def judge(number: int, mutant: Mutant, tests: list[str]) -> dict[str, Any]:
    """Run the tests of one mutant."""
    outcome, log, path = "not reached", OUT / f"mutant-{number}.log", WORK / mutant.path
    source = path.read_bytes()
    if tests:
        try:
            path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
            code = run_tests(["-x", *tests], log, LIMIT, [])
        finally:
            path.write_bytes(source)
        outcome = {None: "timeout", 0: "survived"}.get(code, "killed")
        if "Timeout (>" in log.read_text(errors="replace"):
            outcome = "timeout"
    return {"number": number, **asdict(mutant), "tests": len(tests), "outcome": outcome}


def import_all(names: Iterable[str]) -> None:
    """Import modules, for all forks; some are there for one test only."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main() -> None:
    """Prepare, record, judge; print the score."""
    parser = argparse.ArgumentParser(prog="python -m ordeal.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=210)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--budget", type=float, default=20, help="seconds of tests of a mutant")
    parser.add_argument("--only", default="", help="numbers of mutants")
    parser.add_argument("--tests", nargs="*", help="to record; with --only, to run")
    arguments = parser.parse_args()
    if ROOT != WORK:
        prepare()
    mutants = drawn(arguments.count, arguments.seed)
    import_all(preloading._LIBRARIES)
    if not (OUT / "tests.json").exists():
        record(mutants, arguments.tests or TESTS)
    import_all(json.loads((OUT / "libraries.json").read_text()))
    gc.freeze()
    tests = tests_of(mutants, arguments.budget)
    results = OUT / "results.jsonl"
    results.touch()
    last = {row["number"]: row for row in map(json.loads, results.read_text().splitlines())}
    only = [int(number) for number in arguments.only.split(",") if number]
    seconds = [sum(tests[number].values()) for number in range(len(mutants))]
    rest = [number for number in range(len(mutants)) if number not in last]
    for number in only or sorted(rest, key=lambda number: seconds[number]):
        chosen = (only and arguments.tests) or list(tests[number])
        last[number] = judge(number, mutants[number], chosen)
        with results.open("a") as file:
            file.write(json.dumps(last[number]) + "\n")
        shown = ("number", "outcome", "path", "line", "new")
        print(*(last[number][key] for key in shown), flush=True)
    for package in PACKAGES:
        outcomes = [row["outcome"] for row in last.values() if row["path"].startswith(package)]
        print(package, dict(Counter(outcomes)))


if __name__ == "__main__":
    main()
