"""SageMaker's SDKs in environments of their own, where a call to AWS is seen and goes nowhere."""

import json
import os
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIG = """\
SchemaVersion: '1.0'
SageMaker:
  PythonSDK:
    Modules:
      TelemetryOptOut: true
"""


@dataclass(frozen=True)
class Recorder:
    """Stands where AWS would, as its endpoint and as the proxy to everywhere; refuses everything."""

    seen: list[str] = field(default_factory=list)

    def start(self) -> ThreadingHTTPServer:
        seen = self.seen

        class Refuse(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                self.close_connection = True
                if self.raw_requestline:
                    seen.append(self.raw_requestline.decode().strip())
                    self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


@dataclass(frozen=True)
class Outcome:
    """What a program printed, and the value that it returned."""

    output: str
    value: Any


@dataclass(frozen=True)
class Sdk:
    """One of the SDKs: runs the functions of a file next to this one in its environment."""

    python: str
    programs: str
    folder: Path
    environ: dict[str, str]

    def __call__(self, function: str, **arguments: object) -> Outcome:
        given = json.dumps({"root": self.folder, **arguments}, default=str)
        done = subprocess.run(
            [self.python, str(HERE / self.programs), function, given],
            env=self.environ,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        output, _, value = done.stdout.rpartition("RETURNED ")
        return Outcome(output, json.loads(value))


def environment(folder: Path, bin_folder: str, address: str) -> dict[str, str]:
    """Variables of an SDK's process: no account, no telemetry, nothing of this machine's own."""
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "SM_", "SAGEMAKER_"))}
    return kept | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(config),
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": address,
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), address),
        **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1"),
        "PYTHONUNBUFFERED": "1",
    }
