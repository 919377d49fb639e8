"""Bodies: compressed, in many charsets, too large, announced by Expect."""

import json
import socket
from http.client import HTTPConnection

import pytest

from tests.support.servers import ECHO, Running, Start

LIMIT = 200_000


@pytest.fixture(scope="module")
def server(shared: Start) -> Running:
    """Echoes what its handlers were given, and as what."""
    code = """
    import json

    def model_fn(model_dir):
        return None

    def input_fn(body, content_type):
        return {"body": body if isinstance(body, str) else body.decode("latin-1"),
                "kind": type(body).__name__}

    def predict_fn(data, model):
        return data
    """
    code = code.rstrip() + "\n\n" + ECHO[ECHO.index("    def output_fn") :]
    return shared(code, SAGEMAKER_MAX_PAYLOAD_IN_MB=str(LIMIT / 2**20)).ready()


def test_a_compressed_body_is_415(server: Running) -> None:
    for coding, status in (("identity", 200), ("gzip", 415), ("br, gzip", 415)):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = server.http.post("/invocations", content=b"1", headers=headers)
        assert answer.status_code == status
    assert answer.headers["accept-encoding"] == "identity"
    assert "without compression" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "charset", ["utf-8", "latin-1", "ISO-8859-1", '"utf-16"', "utf-16-le", "cp1252"]
)
def test_text_is_decoded_from_its_charset(server: Running, charset: str) -> None:
    body = '{"text": "größer"}'
    answer = server.http.post(
        "/invocations",
        content=body.encode(charset.strip('"')),
        headers={"content-type": f"application/json; charset={charset}"},
    )
    assert answer.json() == {"body": body, "kind": "str"}


@pytest.mark.parametrize("charset", ["klingon", "hex", "rot13", "zip", "idna", "unicode_escape"])
def test_an_unknown_charset_is_415(server: Running, charset: str) -> None:
    headers = {"content-type": f"text/csv; charset={charset}"}
    answer = server.http.post("/invocations", content=b"61", headers=headers)
    assert answer.status_code == 415
    assert charset in answer.json()["error"]["message"]


def test_bytes_that_are_not_of_their_charset_are_400(server: Running) -> None:
    headers = {"content-type": "application/json; charset=utf-16"}
    assert server.http.post("/invocations", content=b"abc", headers=headers).status_code == 400


def test_an_announced_body_is_asked_for_or_refused_before_it_is_sent(server: Running) -> None:
    def first_line(length: int, path: str = "/invocations") -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=240) as sock:
            sock.sendall(
                b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % (path.encode(), length)
            )
            return sock.recv(65536).partition(b"\r\n")[0]

    assert first_line(LIMIT) == b"HTTP/1.1 100 Continue"
    assert first_line(LIMIT + 1) == b"HTTP/1.1 413 Request Entity Too Large"
    assert first_line(9, "/nowhere") == b"HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("path", ["/ping", "/invocations", "/metrics", "//evil.test", "/a/"])
def test_nothing_redirects_to_what_host_says(server: Running, path: str) -> None:
    for slashed in (path, f"{path}/"):
        connection = HTTPConnection("127.0.0.1", server.port, timeout=240)
        method = "POST" if "invocations" in path else "GET"
        headers = {"host": "evil.test", "content-type": "application/json"}
        connection.request(method, slashed, body="1" if method == "POST" else None, headers=headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        expected = 200 if path in ("/ping", "/invocations") or slashed == "/metrics" else 404
        assert answer.status == expected
        assert answer.getheader("location") is None
        if expected == 404:
            assert json.loads(text)["error"]["code"] == "not_found"
