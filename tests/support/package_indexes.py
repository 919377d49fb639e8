"""Code as the SDKs upload it, wheels, a package index behind a password, and AWS CodeArtifact's calls."""

import base64
import contextlib
import io
import json
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pip

from tests.support import http_server

AWS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "yyyyyyyy", "AWS_REGION": "us-east-1"}
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


def archive(path: Path, *members: tuple[str, str] | tarfile.TarInfo) -> Path:
    """Write a .tar.gz of (name, text) files and of members as given; return its path."""
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            name, text = member
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
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
    """An index whose /private/ takes `user` and `password`, and CodeArtifact with the repository `python`
    of the domain `team` at /pypi/, which takes the token that was given last."""

    folder: Path
    """Of the wheels."""
    user: str = "reader"
    password: str = "pass word/of @reader"
    tokens: list[str] = field(default_factory=list)
    """Those that were given, one for each call."""
    requested_paths: list[str] = field(default_factory=list)
    """The paths that were asked for with credentials that count."""
    seen_in_argv: list[str] = field(default_factory=list)
    """Command lines that held a token while pip spoke with this server."""
    address: str = ""

    @property
    def aws(self) -> dict[str, str]:
        """The variables with which boto3's CodeArtifact is this server."""
        return {**AWS, "AWS_ENDPOINT_URL_CODEARTIFACT": self.address}

    def reply(self, target: str, authorization: str) -> tuple[int, bytes, str]:
        """Status, body and media type."""
        parts = urlsplit(target)
        if parts.path.startswith("/v1/"):
            return self._codeartifact(parts.path, dict(parse_qsl(parts.query)))
        repository, _, rest = parts.path.strip("/").partition("/")
        login = (
            f"{self.user}:{self.password}" if repository == "private" else f"aws:{self.tokens[-1]}"
        )
        if authorization != f"Basic {base64.b64encode(login.encode()).decode()}":
            return 401, b"", "text/plain"
        self.requested_paths.append(parts.path)
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = process.read_bytes()
                self.seen_in_argv += [repr(line) for token in self.tokens if token.encode() in line]
        if rest.endswith(".whl"):
            return 200, (self.folder / rest.rpartition("/")[2]).read_bytes(), "application/zip"
        name = rest.strip("/").rpartition("/")[2].replace("-", "_")
        files = sorted(path.name for path in self.folder.glob(f"{name}-*.whl"))
        links = "".join(f'<a href="/{repository}/files/{file}">{file}</a>' for file in files)
        return (200 if files else 404), f"<html>{links}</html>".encode(), "text/html"

    def _codeartifact(self, path: str, query: dict[str, str]) -> tuple[int, bytes, str]:
        known = query.get("repository", "python") == "python"
        if query["domain"] == "denied" or not known:
            kind = "AccessDeniedException" if known else "ResourceNotFoundException"
            body = {"message": f"User: x is told {kind}", "__type": kind}
            return (403 if known else 404), json.dumps(body).encode(), kind
        assert query["domain-owner"] == "111122223333"
        answer: dict[str, object] = {"repositoryEndpoint": f"{self.address}/pypi/python/"}
        if path == "/v1/authorization-token":
            self.tokens.append(f"eyJ0b2tlbi5udW1iZXI.{len(self.tokens)}.of-codeartifact_")
            answer = {"authorizationToken": self.tokens[-1], "expiration": 1.9e9}
        return 200, json.dumps(answer).encode(), "application/json"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[IndexServer]:
    """The wheels in `folder`, by a real server."""
    index = IndexServer(folder)

    class Handler(http_server.Quiet):
        def do_GET(self) -> None:
            status, body, kind = index.reply(self.path, self.headers.get("Authorization", ""))
            headers = {"WWW-Authenticate": 'Basic realm="index"'} if status == 401 else {}
            if kind.endswith("Exception"):
                headers["x-amzn-ErrorType"], kind = kind, "application/json"
            self.reply(status, body, {"Content-Type": kind, **headers})

        do_POST = do_GET

    with http_server.running(Handler) as port:
        index.address = f"http://127.0.0.1:{port}"
        yield index
