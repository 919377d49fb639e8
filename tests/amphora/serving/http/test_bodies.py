"""Bodies as they come over the wire: compressed, in many charsets, too large, announced first."""

from __future__ import annotations

import gzip
import json
import os
import socket
import zlib
from collections.abc import Callable
from http.client import HTTPConnection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amphora.serving.http import content_coding
from amphora.serving.protocol.media_types import Fault
from tests.support.servers import ECHO, Running, Start

LIMIT = 200_000
Coder = Callable[[bytes], bytes]


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(body) + compressor.flush()


CODERS: dict[str, Coder] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": lambda body: body,
}


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=3000), st.lists(st.sampled_from([*CODERS, "raw"]), max_size=4))
def test_what_was_coded_in_any_order_comes_back(body: bytes, names: list[str]) -> None:
    coded = body
    for name in names:
        coded = (CODERS | {"raw": raw_deflate})[name](coded)
    header = ", ".join(names).replace("raw", "Deflate")
    assert content_coding.decode(coded, content_coding.codings(header), LIMIT) == body


def test_gzip_of_several_members_and_padding_is_one_body() -> None:
    body = gzip.compress(b"one ") + gzip.compress(b"two") + b"\0" * 512
    assert content_coding.decode(body, ["gzip"], LIMIT) == b"one two"


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (gzip.compress(b"x" * 99)[:-9], "gzip"),
        (gzip.compress(b"x") + b"rubbish", "gzip"),
        (zlib.compress(b"x") + b"rubbish", "deflate"),
        (b'{"not": "compressed"}', "gzip"),
        (b"", "gzip"),
        (b"", "deflate"),
        (raw_deflate(os.urandom(99))[:-5], "deflate"),
    ],
    ids=["cut", "gzip-and-more", "zlib-and-more", "plain", "no-gzip", "no-deflate", "raw-cut"],
)
def test_a_broken_body_is_400(body: bytes, coding: str) -> None:
    with pytest.raises(Fault) as error:
        content_coding.decode(body, [coding], LIMIT)
    assert error.value.status == 400


@pytest.mark.parametrize("names", [["gzip"], ["deflate"], ["gzip", "gzip"], ["gzip", "deflate"]])
def test_a_bomb_is_refused_while_it_is_decoded(names: list[str]) -> None:
    bomb = bytes(LIMIT + 1)
    for name in names:
        bomb = CODERS[name](bomb)
    assert len(bomb) < 1000
    with pytest.raises(Fault) as error:
        content_coding.decode(bomb, names, LIMIT)
    assert error.value.status == 413
    assert len(content_coding.decode(CODERS["gzip"](bytes(LIMIT)), ["gzip"], LIMIT)) == LIMIT


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


@pytest.mark.parametrize("coding", CODERS)
def test_coded_requests_are_answered(server: Running, coding: str) -> None:
    for size in (10, 100_000):
        body = ("ü" * size).encode()[: LIMIT - 2]
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = server.http.post("/invocations", content=CODERS[coding](body), headers=headers)
        assert answer.status_code == 200
        assert answer.json() == {"body": body.decode(), "kind": "str"}


def test_a_bomb_over_http_is_413_and_an_unknown_coding_415_with_the_list(server: Running) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    answer = server.http.post("/invocations", content=bomb, headers={"content-encoding": "gzip"})
    assert answer.status_code == 413
    answer = server.http.post("/invocations", content=b"x", headers={"content-encoding": "br"})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, identity"
    assert "gzip, deflate, identity" in answer.json()["error"]["message"]


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
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
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
        connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
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
