"""A package index behind a password, and the two calls of AWS CodeArtifact that lead to it."""

import base64
import contextlib
import json
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pip

from tests.support import http_server

ARN = "arn:aws:codeartifact:eu-west-1:111122223333:repository/team/python"
DENIED = "arn:aws:codeartifact:eu-west-1:111122223333:repository/denied/python"
ABSENT = "arn:aws:codeartifact:eu-west-1:111122223333:repository/team/absent"


def wheel(
    folder: Path, name: str, value: str = "installed", needs: str = "", version: str = "1.0"
) -> Path:
    """Write a wheel of one module whose VALUE is `value`, without an index or a build."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"VALUE = {value!r}")
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        archive.writestr(f"{info}/METADATA", about)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return path


def bare_environment(folder: Path) -> Path:
    """Make an environment that has only pip, by a link, since to install it takes seconds.

    Returns:
        Its folder of programs.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    # Else pip removes the whole folder, and itself, with the last package in it.
    (site / "kept").touch()
    return folder / "bin"


@dataclass
class IndexServer:
    """What the server is asked, and what it gives.

    /open and /private hold the same wheels; /private asks for `user` and `password`, and so does
    the repository `python` of CodeArtifact's domain `team`, for the token that was given last.
    """

    folder: Path
    user: str = "reader"
    password: str = "pass word/of @reader"
    tokens: list[str] = field(default_factory=list)
    """Those that were given, one for each call."""
    requested_paths: list[str] = field(default_factory=list)
    """The paths that were asked for with credentials that count."""
    refused: list[str] = field(default_factory=list)
    seen_in_argv: list[str] = field(default_factory=list)
    """Command lines that held a token while pip spoke with this server."""
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def aws(self) -> dict[str, str]:
        """The variables with which boto3's CodeArtifact is this server."""
        return {
            "AWS_ENDPOINT_URL_CODEARTIFACT": self.address,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "yyyyyyyy",
        }

    def reply(self, method: str, target: str, authorization: str) -> tuple[int, bytes, str]:
        """Status, body and media type."""
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path in ("/v1/authorization-token", "/v1/repository/endpoint"):
            return self._codeartifact(method, parts.path, query)
        repository, _, rest = parts.path.strip("/").partition("/")
        logins = {"open": "", "private": f"{self.user}:{self.password}"}
        logins["pypi"] = f"aws:{self.tokens[-1]}" if self.tokens else "nobody:yet"
        login = logins.get(repository)
        expected = f"Basic {base64.b64encode((login or '').encode()).decode()}"
        if login is None or (login and authorization != expected):
            self.refused.append(parts.path)
            return (404 if login is None else 401), b"", "text/plain"
        self.requested_paths.append(parts.path)
        for token in self.tokens:
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = process.read_bytes()
                    self.seen_in_argv += [repr(line)] if token.encode() in line else []
        if rest.endswith(".whl"):
            return 200, (self.folder / rest.rpartition("/")[2]).read_bytes(), "application/zip"
        name = rest.strip("/").rpartition("/")[2].replace("-", "_")
        results = sorted(path.name for path in self.folder.glob(f"{name}-*.whl"))
        links = "".join(f'<a href="/{repository}/files/{file}">{file}</a>' for file in results)
        return (200 if results else 404), f"<html>{links}</html>".encode(), "text/html"

    def _codeartifact(
        self, method: str, path: str, query: dict[str, str]
    ) -> tuple[int, bytes, str]:
        known = query.get("repository", "python") == "python"
        if query["domain"] == "denied" or not known:
            kind = "AccessDeniedException" if known else "ResourceNotFoundException"
            body = {"message": f"User: x is told {kind}", "__type": kind}
            return (403 if known else 404), json.dumps(body).encode(), kind
        assert query["domain-owner"] == "111122223333"
        if path == "/v1/authorization-token":
            assert method == "POST"
            self.tokens.append(f"eyJ0b2tlbi5udW1iZXI.{len(self.tokens)}.of-codeartifact_")
            answer = {"authorizationToken": self.tokens[-1], "expiration": 1.9e9}
        else:
            assert query["format"] == "pypi"
            answer = {"repositoryEndpoint": f"{self.address}/pypi/python/"}
        return 200, json.dumps(answer).encode(), "application/json"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[IndexServer]:
    """The wheels in `folder`, by a real server."""
    index = IndexServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, kind = index.reply(
                self.command, self.path, self.headers.get("Authorization", "")
            )
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
            if kind.endswith("Exception"):
                self.send_header("x-amzn-ErrorType", kind)
            self.send_header("Content-Type", kind if "/" in kind else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http_server.running(Handler) as index.port:
        yield index
