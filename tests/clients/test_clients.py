"""Calls of clients as their users write them, unmodified, each answered rightly or refused by name:
those of OpenAI, Hugging Face, Cohere and AWS, and libraries that use them, in Python and JavaScript,
and the JDK's."""

import json
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import chain
from tests.support.chain import REPLY
from tests.support.http_server import Quiet, read_body, running
from tests.support.sdk_environments import sdk_python, sdk_variables
from tests.support.servers import IN_FLOAT32, Running
from tests.support.tiny_models import save

pytestmark = pytest.mark.heavy
HERE = Path(__file__).parent
QUERY, TEXTS = "who", ["the film was good", "anna said paris was bad again .", "who"]
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vectors": ("BertModel", {}),
    "ranks": ("BertForSequenceClassification", {"num_labels": 1}),
    "labels": ("BertForSequenceClassification", {"id2label": {0: "sad", 1: "glad", 2: "neither"}}),
}
ANSWERED = {
    "python": {
        "openai_chat": "reply",
        "openai_chat_stream": "reply",
        "openai_chat_of_invocations": "reply",
        "openai_completion": "digits",
        "openai_embeddings": "vectors",
        "hub_text_generation": "digits, whole and streamed",
        "hub_chat": "reply",
        "hub_feature_extraction": "vector",
        "hub_sentence_similarity": "cosines",
        "hub_text_classification": "two labels",
        "cohere_rerank": "two ranks",
        "cohere_rerank_1": "ranks",
        "langchain_chat": "reply, whole and streamed",
        "langchain_embeddings": "vectors",
        "langchain_huggingface": "digits",
        "langchain_cohere_rerank": "two ranks",
        "llama_index_chat": "reply, whole and streamed",
        "llama_index_complete": "digits",
        "llama_index_embeddings": "vectors",
        "llama_index_rerank": "two ranks",
        "haystack_chat": "reply",
        "haystack_embeddings": "vectors",
        "litellm_chat": "reply, whole and streamed",
        "litellm_embedding": "vectors",
        "litellm_rerank_cohere": "two ranks",
        "litellm_rerank_infinity": "two ranks",
        "litellm_rerank_vllm": "two ranks",
        "litellm_rerank_jina": "two ranks",
        "litellm_rerank_tei": "two ranks",
        "boto3_session": "labels",
        "boto3_stream": "digits",
    },
    "javascript": {
        "openai_chat": "reply",
        "openai_chat_stream": "reply",
        "openai_embeddings": "vectors",
        "hub_text_generation": "digits",
        "hub_text_generation_stream": "digits",
        "hub_chat": "reply",
        "hub_feature_extraction": "raw vectors",
        "hub_sentence_similarity": "cosines",
        "hub_text_classification": "two labels",
        "cohere_rerank": "two ranks",
        "langchain_chat": "reply",
        "langchain_embeddings": "vectors",
        "aws_session": "labels",
    },
}
REFUSED = {
    "python": {
        "openai_tools": "400 - .*Only vLLM supports tools",
        "openai_json_schema": "400 - .*response_format is .* which only vLLM supports",
        "openai_responses": "404 - .*does not answer /v1/responses. Routes: /invocations",
        "cohere_chat": "404.*POST /v2/chat: Not Found. Routes: /ping, /invocations",
    },
    "javascript": {"openai_tools": "400 Only vLLM supports tools"},
}


def payload_part(payload: bytes) -> bytes:
    """Return an event of AWS's event streams: lengths, headers, the payload, and checksums."""
    named = {":message-type": "event", ":event-type": "PayloadPart",
             ":content-type": "application/octet-stream"}  # fmt: skip
    headers = b"".join(
        bytes([len(name)]) + name.encode() + struct.pack(">BH", 7, len(value)) + value.encode()
        for name, value in named.items()
    )
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack(">I", zlib.crc32(message))


@pytest.fixture(scope="module")
def urls(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """The addresses of the servers, and of what stands in for SageMaker's runtime."""
    with ExitStack() as stack:
        servers = {}
        for name in ("chats", *MODELS):
            base = tmp_path_factory.mktemp(name)
            if name == "chats":
                chain.save(base / "model")
            else:
                kind, options = MODELS[name]
                save(kind, base / "model", seed=4, **options)
            servers[name] = stack.enter_context(Running(base, {**preloaded, **IN_FLOAT32}))
        urls = {name: f"http://127.0.0.1:{one.ready().port}" for name, one in servers.items()}

        class Runtime(Quiet):
            """SageMaker's runtime: it forwards to the container at /invocations."""

            def do_POST(self) -> None:
                if self.path.endswith("/invocations-response-stream"):
                    self.stream()
                    return
                headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
                answer = httpx.post(
                    f"{urls['labels']}/invocations", content=read_body(self), headers=headers
                )
                names = ("content-type", "x-amzn-sagemaker-custom-attributes")
                kept = {name: answer.headers[name] for name in names if name in answer.headers}
                self.reply(answer.status_code, answer.content, kept)

            def stream(self) -> None:
                """Wrap the container's chunks, cut anywhere, in AWS's events."""
                body = read_body(self)
                with httpx.stream("POST", f"{urls['chats']}/invocations", content=body) as answer:
                    self.send_response(answer.status_code)
                    self.send_header("Content-Type", "application/vnd.amazon.eventstream")
                    self.send_header(
                        "X-Amzn-SageMaker-Content-Type", answer.headers["content-type"]
                    )
                    self.end_headers()
                    for chunk in answer.iter_bytes(7):
                        self.wfile.write(payload_part(chunk))

        yield {**urls, "aws": f"http://127.0.0.1:{stack.enter_context(running(Runtime))}"}


@pytest.fixture(scope="module")
def outcomes(
    urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each call of a language returns, or its error."""
    folder, python = tmp_path_factory.mktemp("calls"), Path(sdk_python("clients"))
    shutil.copy(HERE / "calls.mjs", folder)
    (folder / "node_modules").symlink_to(python.parents[1] / "node_modules")
    environ = {
        **sdk_variables(folder, urls["aws"]), "PATH": os.environ["PATH"],
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False",
    }  # fmt: skip
    programs = {
        "python": [python, "-W", "ignore", HERE / "calls.py"],
        "javascript": [python.with_name("node"), folder / "calls.mjs"],
    }
    result = {}
    with ExitStack() as stack:
        # Side by side.
        processes = {}
        for language, program in programs.items():
            log = stack.enter_context((folder / f"{language}.log").open("w+"))
            command = [*program, *urls.values()]
            process = subprocess.Popen(
                command, env=environ, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=log
            )
            processes[language] = stack.enter_context(process), log
        for language, (process, log) in processes.items():
            printed, _ = process.communicate()
            log.seek(0)
            assert process.returncode == 0, log.read()[-4000:]
            result[language] = json.loads(printed.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def expected(urls: dict[str, str]) -> dict[str, Any]:
    """What the servers answer to plain requests, as tests of their routes compare it."""

    def post(server: str, route: str, body: Any) -> Any:
        return httpx.post(urls[server] + route, json=body).raise_for_status().json()

    entries = post("ranks", "/rerank", {"query": QUERY, "texts": TEXTS})
    ranks = [[entry["index"], entry["score"]] for entry in entries]
    labels = post("labels", "/invocations", {"inputs": TEXTS})
    two = post("labels", "/invocations", {"inputs": TEXTS[0], "parameters": {"top_k": 2}})
    vectors = post("vectors", "/embed", {"inputs": TEXTS})
    similarity = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    return {
        "reply": REPLY,
        "reply, whole and streamed": [REPLY, REPLY],
        "digits": "345",
        "digits, whole and streamed": ["12345", "3", "4", "5"],
        "vectors": vectors,
        "vector": vectors[0],
        "raw vectors": post("vectors", "/invocations", {"inputs": TEXTS}),
        "cosines": post("vectors", "/invocations", {"inputs": similarity}),
        "ranks": ranks,
        "two ranks": ranks[:2],
        "labels": [[entry["label"], entry["score"]] for entry in labels],
        "two labels": [[entry["label"], entry["score"]] for entry in two],
    }


def assert_like(value: Any, other: Any) -> None:
    """Compare lists of texts and numbers, which base64 and batches round."""
    if isinstance(other, list):
        assert len(value) == len(other)
        for one, another in zip(value, other, strict=True):
            assert_like(one, another)
    else:
        assert value == (pytest.approx(other, abs=1e-5) if isinstance(other, float) else other)


def calls_of(table: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    return [(language, *row) for language, rows in table.items() for row in rows.items()]


@pytest.mark.parametrize(("language", "name", "what"), calls_of(ANSWERED))
def test_a_call_is_answered(
    outcomes: dict[str, Any], expected: dict[str, Any], language: str, name: str, what: str
) -> None:
    outcome = outcomes[language][name]
    assert "error" not in outcome, outcome
    assert_like(outcome["value"], expected[what])


@pytest.mark.parametrize(("language", "name", "words"), calls_of(REFUSED))
def test_a_call_is_refused_by_name(
    outcomes: dict[str, Any], language: str, name: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(outcomes[language][name].get("error", "it is answered"))


def test_each_call_is_in_the_tables(outcomes: dict[str, Any]) -> None:
    for language, calls in outcomes.items():
        assert {*calls} == {*ANSWERED[language], *REFUSED[language]}


def test_the_client_of_the_jdk_offers_an_upgrade_and_is_answered(
    urls: dict[str, str], expected: dict[str, Any]
) -> None:
    if shutil.which("javac") is None:
        pytest.skip("needs a JDK, for Java's client")
    command = ["java", HERE / "Calls.java", *urls.values()]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    status, answer = done.stdout.splitlines()
    (label,) = json.loads(answer)
    assert status == "200"
    assert_like([label["label"], label["score"]], expected["two labels"][0])
