"""Traces of a real server: what it tells a collector, and what it does where it cannot."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from amphora.serving import tracing
from tests.support.http_server import running
from tests.support.servers import STREAM, Running, Start

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUEST = "POST /invocations"
CODE = """
    import json, os

    def model_fn(model_dir):
        return None

    def input_fn(body, content_type, context):
        return {"asked": json.loads(body), "traceparent": context.headers.get("traceparent")}

    def predict_batch_fn(inputs, model):
        if any(each["asked"] == "crash" for each in inputs):
            os._exit(3)
        return [KeyError("broken") if each["asked"] == "break" else each for each in inputs]

    def predict_fn(data, model):
        return predict_batch_fn([data], model)[0]
"""
SDK = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_TRACES_EXPORTER": "console"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "mine"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/t"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
         ["otlp_proto_grpc"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
          "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
         ["otlp (http/json)"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console,otlp"}, ["otlp_proto_http", "console"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
    ],
)  # fmt: skip
def test_the_variables_say_who_gets_traces(environ: dict[str, str], expected: list[str]) -> None:
    assert list(dict.fromkeys(tracing.exporters(environ))) == expected


def printed(server: Running, last: str, count: int = 1) -> list[dict[str, Any]]:
    """The spans on stdout, as the SDK's own exporter prints them, with `count` of the name `last`."""
    decoder = json.JSONDecoder()
    end = time.monotonic() + 60
    while True:
        spans = []
        for found in re.finditer(r'^\{\n    "name"', text := server.log, re.MULTILINE):
            with contextlib.suppress(ValueError):
                spans.append(decoder.raw_decode(text, found.start())[0])
        if sum(span["name"] == last for span in spans) >= count or time.monotonic() > end:
            return spans
        time.sleep(0.05)


@pytest.fixture(scope="module")
def traced(shared: Start) -> Running:
    return shared(CODE, **SDK, OTEL_RESOURCE_ATTRIBUTES="service.name=mine,team=a").ready()


def of_trace(spans: list[dict[str, Any]], trace: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["context"]["trace_id"] == f"0x{trace}"]


def test_a_request_and_its_worker_stand_below_the_clients_span(traced: Running) -> None:
    answer = traced.invoke("go", traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b")
    traced.invoke("secret body")
    spans = printed(traced, REQUEST, 2)
    worker, request = of_trace(spans, TRACE)
    assert (request["name"], request["kind"]) == (REQUEST, "SpanKind.SERVER")
    assert (request["parent_id"], worker["parent_id"]) == (
        f"0x{PARENT}",
        request["context"]["span_id"],
    )
    # What the handlers record stands below their worker's span.
    seen = answer.json()["traceparent"]
    assert seen == f"00-{TRACE}-{worker['context']['span_id'].removeprefix('0x')}-01"
    assert request["attributes"]["http.response.status_code"] == 200
    assert request["attributes"]["amphora.request_id"] == answer.headers["x-request-id"]
    assert worker["attributes"]["amphora.batch.size"] == 1
    assert request["start_time"] <= worker["start_time"] <= worker["end_time"]
    assert request["resource"]["attributes"]["service.name"] == "mine"
    lines = [json.loads(line) for line in traced.log.splitlines() if line.startswith('{"time"')]
    assert lines[0]["trace_id"] == TRACE
    assert "secret body" not in traced.log
    assert {span["name"] for span in spans} == {REQUEST, "model worker"}, "no probe has one"


def test_what_fails_says_so_and_a_second_try_is_a_second_span(traced: Running) -> None:
    parents = {word: f"{number:032x}" for number, word in enumerate(("break", "crash"), 1)}
    for word, trace in parents.items():
        assert traced.invoke(word, traceparent=f"00-{trace}-{PARENT}-01").status_code == 500
    assert traced.http.get("/nowhere").status_code == 404
    spans = printed(traced, "GET")
    found = {
        word: [
            (span["name"], span["status"]["status_code"], span["attributes"].get("error.type"))
            for span in of_trace(spans, trace)
        ]
        for word, trace in parents.items()
    }
    request = (REQUEST, "ERROR", "500")
    died = ("model worker", "ERROR", "worker_died")
    assert found["break"] == [("model worker", "ERROR", "handler_failed"), request]
    assert found["crash"][0] == died
    assert found["crash"][-1] == request
    assert len(found["crash"]) == 3
    (missing,) = (span for span in spans if span["name"] == "GET")
    assert missing["attributes"]["url.path"] == "/nowhere"
    assert missing["status"]["status_code"] == "UNSET", "the client's fault"


def test_a_stream_tells_its_first_chunk(start: Start) -> None:
    server = start(STREAM, **SDK).ready()
    assert server.invoke({"words": 3, "pause": 0.05}).text == "word0 word1 word2 "
    worker, request = printed(server, REQUEST)
    assert [event["name"] for event in worker["events"]] == ["first chunk"]
    assert worker["events"][0]["timestamp"] < worker["end_time"] <= request["end_time"]
    server.invoke({"words": 1})
    # What is recorded is sent before the end.
    assert server.stop() == 0
    assert len(printed(server, REQUEST, 2)) == 4


def test_without_the_exporter_it_serves_and_says_what_to_install(start: Start) -> None:
    server = start(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_HEADERS="x-account=very-private-42",
    ).ready()
    assert server.invoke(1).json()["echo"] == 1
    assert (
        "Nothing is traced: no installed package has the exporter 'otlp_proto_grpc'" in server.log
    )
    assert "Install opentelemetry-exporter-otlp-proto-grpc" in server.log
    assert "very-private-42" not in server.log


@pytest.fixture
def collector() -> Iterator[tuple[int, list[Any]]]:
    """A collector's port, and the requests that it has got, decoded."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, self.headers, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with running(Handler) as port:
        yield port, got


def test_a_collector_gets_otlp(start: Start, collector: tuple[int, list[Any]]) -> None:
    port, got = collector
    server = start(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        OTEL_EXPORTER_OTLP_HEADERS="x-account=very-private-42",
    ).ready()
    server.invoke("go", traceparent=f"00-{TRACE}-{PARENT}-01")
    assert server.stop() == 0
    assert got, server.log
    path, headers, request = got[0]
    assert (path, headers["x-account"]) == ("/v1/traces", "very-private-42")
    (resource,) = request.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "amphora"
    worker, asked = resource.scope_spans[0].spans
    assert {span.trace_id.hex() for span in (worker, asked)} == {TRACE}
    assert (asked.parent_span_id.hex(), worker.parent_span_id) == (PARENT, asked.span_id)
    assert "very-private-42" not in server.log


@pytest.mark.heavy
def test_a_collector_that_is_gone_holds_up_nothing(start: Start) -> None:
    server = start(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9").ready()
    assert server.invoke(1).status_code == 200
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 15
