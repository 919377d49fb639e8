"""What a run of tests does with failures, and shows at its end.

With RERUN_LOG set to a file, as .ci/run does, a test that failed is run once more, in a process of its
own after all others. If it then passes, it failed because of its company or of the load: the run
passes, shows the first failure, and appends the test's name to the file.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ALONE = "passed only when alone"
MOST_RERUNS = 10
"""More failures than these have one cause, which is a fault."""
# Before any test has changed it.
_ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RERUN_LOG", "PYTEST_ADDOPTS")}


def _passes_alone(name: str, config: pytest.Config, reporter: Any) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", name],
        cwd=config.rootpath, env=_ENVIRON, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        reporter.write_sep("=", f"failed again, alone: {name}")
        reporter.write_line(done.stdout)
    return done.returncode == 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(session.config, "workerinput") or reporter is None:
        return
    stats = reporter.stats
    if exitstatus == pytest.ExitCode.OK and stats.get("skipped") and not stats.get("passed"):
        reporter.write_line("\nEvery test was skipped, which is a failure: see the reasons.")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    log = os.environ.get("RERUN_LOG")
    if not log or exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    failures = [*stats.get("failed", []), *stats.get("error", [])]
    names = dict.fromkeys(report.nodeid for report in failures)
    if len(names) > MOST_RERUNS or not all(hasattr(report, "when") for report in failures):
        return
    alone = {name for name in names if _passes_alone(name, session.config, reporter)}
    for kind in ("failed", "error"):
        kept = [report for report in stats.pop(kind, []) if report.nodeid not in alone]
        stats |= {kind: kept} if kept else {}
    if alone:
        stats[ALONE] = [report for report in failures if report.nodeid in alone]
        with Path(log).open("a") as lines:
            lines.writelines(f"{name}\n" for name in names if name in alone)
    if alone == set(names):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    for report in terminalreporter.stats.get(ALONE, []):
        terminalreporter.write_sep("=", f"{ALONE}: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    if config.getoption("durations"):
        seconds: Counter[str] = Counter()
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(
                report, "duration", 0
            )
        terminalreporter.write_sep("=", "slowest 10 files")
        for name, spent in seconds.most_common(10):
            terminalreporter.write_line(f"{spent:7.1f} s {name}")
