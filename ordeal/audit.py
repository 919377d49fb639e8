"""Compare known vulnerabilities of the images' locks with container/locks/vex.json: `make audit`.

pip-audit asks OSV for the packages of each lock. The counts by severity are printed as a table. The
exit code is 1 if a finding is not in vex.json, which says of each whether it can be exploited here,
or if vex.json names a version that no lock has any more.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("image", "image-transformers4", "gpu", "cpu", "neuron-xla")
SEVERITIES = ("critical", "high", "moderate", "low", "unknown")
PIP_AUDIT = "pip-audit==2.10.1"


@dataclass(frozen=True)
class Finding:
    """A known vulnerability of a locked package."""

    package: str
    version: str
    ids: frozenset[str]
    severity: str
    fixed: str

    @property
    def product(self) -> str:
        """Return the package as vex.json names it."""
        return f"pkg:pypi/{self.package}@{self.version}"


def read_statements(path: Path) -> dict[tuple[str, str], str]:
    """Return the status of each vulnerability, by each of its names, and product."""
    statuses = {}
    for statement in json.loads(path.read_text(encoding="utf-8"))["statements"]:
        vulnerability = statement["vulnerability"]
        for name in (vulnerability["name"], *vulnerability["aliases"]):
            for product in statement["products"]:
                statuses[name, product["@id"]] = statement["status"]
    return statuses


def find_vulnerabilities(lock: Path, osv: str) -> Iterator[Finding]:
    """Yield what pip-audit reports of a lock. Raise SystemExit if it cannot ask OSV."""
    url = f"{osv}/v1/query"
    command = [str(Path(sys.executable).with_name("uvx")), PIP_AUDIT, "--strict", "--no-deps",
               "--disable-pip", "--progress-spinner", "off", "--format", "json", "--requirement",
               str(lock), "--vulnerability-service", "osv", "--osv-url", url]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"pip-audit cannot check {lock.name}:\n{done.stderr[-2000:]}")
    for package in json.loads(done.stdout)["dependencies"]:
        for vulnerability in package["vulns"]:
            ids = frozenset([vulnerability["id"], *vulnerability["aliases"]])
            fixed = ", ".join(vulnerability["fix_versions"]) or "none"
            severity = find_severity(sorted(ids), osv)
            yield Finding(package["name"], package["version"], ids, severity, fixed)


def find_severity(ids: Sequence[str], osv: str) -> str:
    """Return the severity that GitHub's reviewers gave an advisory; `unknown` if they gave none."""
    for name in (name for name in ids if name.startswith("GHSA-")):
        with urllib.request.urlopen(f"{osv}/v1/vulns/{name}", timeout=60) as answer:
            entry: Mapping[str, Any] = json.load(answer)
        severity = str(entry.get("database_specific", {}).get("severity", "")).lower()
        if severity in SEVERITIES:
            return severity
    return "unknown"


def merge_findings(findings: Iterator[Finding]) -> list[Finding]:
    """Return findings that share a package and a name once: databases overlap."""
    merged: list[Finding] = []
    for finding in findings:
        same = [one for one in merged if one.product == finding.product and one.ids & finding.ids]
        for one in same:
            merged.remove(one)
        known = [one.severity for one in (*same, finding) if one.severity != "unknown"]
        merged.append(
            Finding(
                finding.package, finding.version, finding.ids.union(*(one.ids for one in same)),
                known[0] if known else "unknown", finding.fixed,
            )
        )  # fmt: skip
    return merged


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and what is not explained; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--osv", default="https://api.osv.dev", help="the server of OSV's API")
    parser.add_argument("--locks", type=Path, default=ROOT / "container" / "locks")
    arguments = parser.parse_args(argv)
    statuses = read_statements(arguments.locks / "vex.json")
    print(f"| lock | packages | {' | '.join(SEVERITIES)} | not affected |")
    print(f"|{'---|' * (len(SEVERITIES) + 3)}")
    problems, locked = [], set()
    for name in LOCKS:
        lock = arguments.locks / f"{name}.txt"
        pins = re.findall(r"^([\w.-]+)==([^ \n;\\]+)", lock.read_text(encoding="utf-8"), re.M)
        locked |= {f"pkg:pypi/{package}@{version}" for package, version in pins}
        findings = merge_findings(find_vulnerabilities(lock, arguments.osv))
        counts = Counter(finding.severity for finding in findings)
        known = [
            {statuses[key] for one in finding.ids if (key := (one, finding.product)) in statuses}
            for finding in findings
        ]
        row = [len(pins), *(counts[severity] for severity in SEVERITIES)]
        print(f"| {name} | {' | '.join(map(str, row))} | {known.count({'not_affected'})} |")
        problems += [
            f"{name}: {finding.package} {finding.version}, {', '.join(sorted(finding.ids))}, "
            f"{finding.severity}, fixed in {finding.fixed}: add it to vex.json, or update it"
            for finding, status in zip(findings, known, strict=True)
            if not status
        ]
    stale = {product for _, product in statuses} - locked
    problems += [f"vex.json: {product} is in no lock: take it out" for product in sorted(stale)]
    print("\n".join(["", *problems]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
