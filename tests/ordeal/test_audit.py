"""`make audit`: pip-audit on small locks, against a server that answers as OSV does; and vex.json."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ordeal import audit
from tests.support.paths import ROOT

LOCKS = ROOT / "container" / "locks"
ADVISORIES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("transformers", "4.57.6"): [
        {"id": "PYSEC-2026-2289", "aliases": ["CVE-2026-4372", "GHSA-29pf-2h5f-8g72"]},
        {"id": "GHSA-29pf-2h5f-8g72", "aliases": ["CVE-2026-4372"]},
    ],
    ("jinja2", "3.1.6"): [{"id": "GHSA-aaaa-bbbb-cccc", "aliases": ["CVE-2099-1"]}],
}
SEVERITY = {"GHSA-29pf-2h5f-8g72": "HIGH", "GHSA-aaaa-bbbb-cccc": "LOW"}


def test_each_statement_is_complete_and_names_a_locked_version() -> None:
    document = json.loads((LOCKS / "vex.json").read_text())
    assert document["@context"] == "https://openvex.dev/ns/v0.2.0"
    locks = "".join((LOCKS / f"{name}.txt").read_text() for name in audit.LOCKS)
    for statement in document["statements"]:
        assert re.fullmatch(r"CVE-\d{4}-\d+", statement["vulnerability"]["name"])
        if statement["status"] == "not_affected":
            assert statement["impact_statement"] and statement["justification"]
        else:
            assert statement["status"] in ("affected", "under_investigation")
            assert statement.get("action_statement") or statement.get("status_notes")
        for product in statement["products"]:
            name, version = product["@id"].removeprefix("pkg:pypi/").split("@")
            assert re.search(rf"^{re.escape(name)}=={re.escape(version)}\b", locks, re.MULTILINE)


def test_the_page_has_the_counts() -> None:
    statements = json.loads((LOCKS / "vex.json").read_text())["statements"]
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(
        r"^\| ((?:[a-z\d-]+(?:, )?)+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE
    )
    counted = {name: tuple(map(int, row)) for names, *row in rows for name in names.split(", ")}
    assert counted.keys() == set(audit.LOCKS)
    for name in audit.LOCKS:
        lock = (LOCKS / f"{name}.txt").read_text()
        of_lock = [
            statement
            for statement in statements
            if any(
                re.search(rf"^{product['@id'][9:].replace('@', '==')}\b", lock, re.MULTILINE)
                for product in statement["products"]
            )
        ]
        texts = [one.get("impact_statement") or one["status_notes"] for one in of_lock]
        severities = [re.split(r"\W", text)[0] for text in texts]
        unaffected = sum(one["status"] == "not_affected" for one in of_lock)
        expected = (*map(severities.count, ("High", "Moderate", "Unscored")), unaffected)
        assert counted[name] == expected, name


def test_findings_that_share_a_name_are_one() -> None:
    def finding(*ids: str, severity: str = "unknown") -> audit.Finding:
        return audit.Finding("a", "1", frozenset(ids), severity, "none")

    merged = audit.merge_findings(
        iter([finding("PYSEC-1", "CVE-1"), finding("CVE-2"), finding("GHSA-1", "CVE-1", severity="high")])
    )  # fmt: skip
    assert [(sorted(one.ids), one.severity) for one in merged] == [
        (["CVE-2"], "unknown"),
        (["CVE-1", "GHSA-1", "PYSEC-1"], "high"),
    ]


@pytest.fixture
def osv() -> Iterator[str]:
    """A server that knows the advisories above."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = query["package"]["name"], query["version"]
            details = {"summary": "x", "published": "2026-01-01T00:00:00Z", "affected": []}
            listed = ADVISORIES.get(key, [])
            self.answer({"vulns": [{**details, **entry} for entry in listed]} if listed else {})

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            self.answer({"id": name, "database_specific": {"severity": SEVERITY[name]}})

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.heavy
def test_what_is_not_explained_fails(
    osv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in audit.LOCKS:
        (tmp_path / f"{name}.txt").write_text("idna==3.20\n")
    (tmp_path / "image.txt").write_text("transformers==4.57.6\naccelerate==1.8.1\n")
    (tmp_path / "vex.json").write_text((LOCKS / "vex.json").read_text())
    with (tmp_path / "gpu.txt").open("a") as lock:
        lock.write("accelerate==1.15.0\n")
    assert audit.main(["--osv", osv, "--locks", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| image | 2 | 0 | 1 | 0 | 0 | 0 | 1 |" in out
    assert "| cpu | 1 | 0 | 0 | 0 | 0 | 0 | 0 |" in out
    (tmp_path / "cpu.txt").write_text("jinja2==3.1.6\n")
    (tmp_path / "gpu.txt").write_text("idna==3.20\n")
    assert audit.main(["--osv", osv, "--locks", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "cpu: jinja2 3.1.6, CVE-2099-1, GHSA-aaaa-bbbb-cccc, low, fixed in none" in out
    assert "vex.json: pkg:pypi/accelerate@1.15.0 is in no lock" in out
