"""The part of the Hugging Face hub that a push of small files uses: repositories and commits."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support import http_server

TOKEN = "hf_planted0123456789planted"


@dataclass
class PushHub:
    """The pushed files, and the requests to refuse."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    refuses: str = ""
    """Paths that contain this are answered 403; empty: none."""
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        if self.refuses and self.refuses in path:
            return 403, {"error": "You have read access only."}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid user token."}
        if path == "/api/repos/create":
            values = json.loads(body)
            name = "/".join(filter(None, [values.get("organization") or "me", values["name"]]))
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": self.url(name)}
            self.repositories[name] = {".gitattributes": b""}
            self.private[name] = bool(
                values.get("private") or values.get("visibility") == "private"
            )
            return 200, {"url": self.url(name), "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        match = re.match(r"/api/models/(\w[\w-]*/[\w.-]+)/(\w+)", path)
        if match is None or match[1] not in self.repositories:
            return 404, {"error": f"no {path}"}
        files = self.repositories[match[1]]
        if match[2] == "preupload":
            files_to_send = json.loads(body)["files"]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{**file, **how} for file in files_to_send]}
        if match[2] == "tree":
            kept = [
                {"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in files.items()
            ]
            return 200, kept
        if match[2] == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            url = f"{self.url(match[1])}/commit/{'0' * 40}"
            return 200, {"commitUrl": url, "commitOid": "0" * 40}
        return 200, {"sha": "0" * 40, "id": match[1], "siblings": []}

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextlib.contextmanager
def running() -> Iterator[PushHub]:
    """Yield the hub, served on a free port."""
    hub = PushHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = http_server.read_body(self)
            path = self.path.partition("?")[0]
            status, value = hub.answer(
                self.command, path, self.headers.get("Authorization", ""), body
            )
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http_server.running(Handler) as hub.port:
        yield hub
