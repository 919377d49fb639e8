"""A model that comes over a connection that breaks: an error that says so, and then it comes."""

import hashlib
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import http_server
from tests.support.jobs import Job
from tests.support.words import write_reviews


class Download(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download needs."""

    folder: Path
    breaks = True
    """Whether the weights end half-way, and each attempt to go on at once."""
    starts: ClassVar[list[int]] = []
    """At which byte each download of the weights was asked to start."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        match = re.fullmatch(r"/some/model/resolve/\w+/(.+)", self.path)
        file = self.folder / match[1] if match else None
        if file is None or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        is_weights = with_body and file.name == "model.safetensors"
        if is_weights:
            self.starts.append(start)
        if with_body:
            end = len(content) // 2 if is_weights and type(self).breaks else len(content)
            self.wfile.write(content[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.heavy
@pytest.mark.long
def test_a_broken_download_is_an_error_and_the_next_start_goes_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Download, "folder", tiny_model, raising=False)
    monkeypatch.setattr(Download, "breaks", True)
    data = write_reviews(tmp_path / "in" / "train.csv", 40).parent
    argv = ("--model_id", "some/model", "--max_steps", "2", "--batch_size", "8")
    job = Job(tmp_path, {"train": data}, argv)
    with http_server.running(Download) as port:
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "cache")}
        assert job.run(HF_HUB_OFFLINE="0", **where).codes == {1}
        last = job.errors.strip().splitlines()[-1]
        for words in ("ModelError", "some/model", "peer closed connection", "Start the job again"):
            assert words in last
        Download.breaks = False
        Download.starts.clear()
        job.finish(HF_HUB_OFFLINE="0", **where)
        assert Download.starts  # from the start, or from where it broke: as huggingface_hub likes
        assert job.files
