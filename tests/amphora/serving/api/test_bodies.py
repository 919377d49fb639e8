import io
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from amphora.serving.api import exchange, media, toolkit, write
from amphora.serving.api.canonical import ModelTraits
from amphora.serving.api.exchange import Exchange
from amphora.serving.api.write import Unencodable
from amphora.serving.protocol.media_types import Fault
from recipe.backend.requests import parameters, payloads
from recipe.backend.requests.payloads import BadRequest, Request
from recipe.spec import PAIRS
from tests.support.refusals import refused


def read(body: bytes, content_type: str, *columns: str) -> Exchange:
    """Read a body for a model of texts that was trained on these columns."""
    trained = dict(zip(("text", "text_pair"), columns, strict=False))
    traits = ModelTraits(texts=payloads.TEXT_KEYS, pairs=PAIRS, columns=trained)
    return exchange.read("/invocations", body, content_type, traits)


def requests_of(body: bytes, content_type: str, *columns: str) -> list[Request]:
    """Return the requests of a body as the recipe gets them."""
    return [Request(**one.values) for one in read(body, content_type, *columns).requests]


@pytest.mark.parametrize(
    ("content_type", "body", "texts"),
    [
        ("application/json", '{"inputs": "a"}', ["a"]),
        ("application/json", '["a", "b"]', ["a", "b"]),
        ("application/json", '{"text": "a"}', ["a"]),
        ("application/json", '{"inputs": [{"text": "a"}]}', ["a"]),
        ("application/json", '{"inputs": "a", "parameters": {"top_k": null}}', ["a"]),
        ("application/json", '{"inputs": "é"}', ["é"]),
        ("application/json", '{"inputs": "a", "inputs": "a"}', ["a"]),
        ("application/jsonlines", '"a"\n{"inputs": "b"}\n\n', ["a", "b"]),
        ("application/x-ndjson", '{"text": "a"}', ["a"]),
        ("text/csv", 'text\n"a, b"\r\n"c ""d"""', ["a, b", 'c "d"']),
        ("text/csv", "id,text\n1,a\n2,b\n", ["a", "b"]),
        ("text/csv", 'a\n""\nb\n\n\n', ["a", "", "b"]),
        ("text/csv", "id,text\n1,a\n,\n2,b\n", ["a", "", "b"]),
        ("text/csv", "text\n", ["text"]),
        ("text/csv", "text\na; b\nc; d\n", ["a; b", "c; d"]),
        ("text/csv", "a, b".join('""') + "\n" + "x" * 200_000, ["a, b", "x" * 200_000]),
        ("text/plain", "a line\nand another", ["a line\nand another"]),
    ],
)
def test_a_request_is_read(content_type: str, body: str, texts: list[str]) -> None:
    (request,) = requests_of(body.encode(), content_type)
    assert request.read(payloads.a_text) == texts
    assert request.parameters.get("top_k") is None


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("application/json", b"{", ["valid JSON", '{"inputs"']),
        ("application/json", b'{"input_text": "a"}', ["'input_text'", '{"inputs"']),
        ("application/json", b"{}", ["'inputs'"]),
        ("application/json", b'{"inputs": 5}', ["5", "not a text"]),
        ("application/json", b'{"inputs": ["a", null]}', ["null", "not a text"]),
        ("application/json", b'{"inputs": []}', ["no inputs"]),
        ("application/json", b'{"inputs": "a", "parameters": {"top_k": 0}}', ["top_k", "0"]),
        ("application/json", b'{"inputs": "a", "parameters": {"top_k": true}}', ["true"]),
        ("application/json", b'{"inputs": "a", "parameters": {"topk": 1}}', ["topk", "top_k"]),
        ("application/json", b'{"inputs": "a", "parameters": 3}', ["3", "top_k"]),
        ("application/json", b'"\xff"', ["UTF-8", "byte 1"]),
        ("application/json", b'{"inputs": "a", "inputs": "b"}', ["'inputs' stands", "twice"]),
        ("application/jsonlines", b'{"text": "a", "text": "b"}', ["Line 1: 'text' stands"]),
        ("application/jsonlines", b'{"b"\n{"c"\n', ["Line 1"]),
        ("application/jsonlines", b"\n", ["no inputs"]),
        ("text/csv", b"a, b\nc, d\n", ["row 1", "double quotes"]),
        ("text/csv", b'"a\n', ["CSV"]),
        ("text/csv", b"id,text\n1\n2\n", ["row 2"]),
        ("text/csv; header=present", b"text\n", ["no inputs"]),
        ("text/csv", b"Comment\ngood\n", ["'Comment': a header or a text?", "header=absent"]),
        ("text/csv", b"text\tlabel\na\t1\nb\t2\n", ["2 fields between '\\t'"]),
        ("text/csv", b"good film;1\nbad film;0\n", ["2 fields between ';'", "by commas"]),
        ("text/plain", b" ", ["no inputs"]),
    ],
)
def test_a_bad_request_is_told_what_is_right(
    content_type: str, body: bytes, words: list[str]
) -> None:
    with refused((BadRequest, Fault), *words):
        (request,) = requests_of(body, content_type)
        request = request.checked({"top_k"}, "text-classification", nullable={"top_k"})
        request.read(payloads.a_text)


def answered(body: bytes, content_type: str, *columns: str) -> tuple[list[Any], Exchange]:
    """Answer each text of a body by itself, as a model of the recipe would."""
    read_body = read(body, content_type, *columns)
    predictions: list[Any] = []
    while (index := len(predictions)) < len(read_body.requests):
        request: Any = read_body.requests[index]
        try:
            entries = Request(**request.values).read(payloads.a_text)
            predictions.append({"entries": entries, "truncated": [], "tokens": 1})
        except BadRequest as error:
            if not read_body.split(index):
                predictions.append(Fault(400, "bad_request", str(error)))
    lines, _ = read_body.write(predictions, "application/jsonlines")
    assert isinstance(lines, bytes)
    return [json.loads(line) for line in lines.splitlines()], read_body


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        ("application/jsonlines", b'"a"\n{"b"\n"c"\n', ["a", "Line 2", "c"]),
        ("application/jsonlines", b'7\n["a"]\n"b"\n"\xff"', ["7", ["a"], "b", "UTF-8"]),
        ("application/jsonlines", '{"inputs": "a\u2028b"}\n'.encode(), ["a\u2028b"]),
        ("application/jsonlines", b'"a"\n"\\ud800"\n', ["a", "Line 2: A text holds half"]),
        ("application/jsonlines", b'"a"\n{"inputs": "b", "top_k": 2}\n"c"', ["a", "b", "c"]),
        (
            "application/jsonlines",
            b'{"inputs": ["a", "b"]}\n"c"\n{"inputs": []}\n{"inputs": ["d", 7]}\n{"inputs": ["e"]}',
            [["a", "b"], "c", "no inputs", ["d", "7, not a text"], ["e"]],
        ),
        ("application/jsonlines", b'"a"\n\n"b"\n \n', ["a", "Line 2: it is blank", "b", "Line 4"]),
        ("text/csv", b"a\n\nb\n\n\n", ["a", "row 2 is blank", "b", "row 4", "row 5"]),
        ("text/csv", b'"a" b\n' * 300 + b"c\n", [*["is not valid"] * 300, "c"]),
        ("text/csv", b'a\n"b\nc\n', ["a", "row 2 is not valid", "c"]),
        ("text/csv", b'"a\nb"\n"c" d\ne\n', ["a\nb", "row 2 is not valid", "e"]),
        ("text/csv", b"a\n\xffb\nc\n", ["a", "row 2 is not UTF-8", "c"]),
        ("text/csv", b"a, b\nc\n", ["row 1", "c"]),
        ("text/csv", b"id,text\n1,a\n2\n3,c\n", ["a", "row 3", "c"]),
    ],
)
def test_each_record_has_its_own_answer_or_error(
    content_type: str, body: bytes, expected: list[Any]
) -> None:
    """In its place, and its position in a header."""
    answers, read_body = answered(body, content_type)
    assert len(answers) == len(expected)
    failed = []
    for index, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        pairs = zip(answer, wanted, strict=True) if isinstance(wanted, list) else [(answer, wanted)]
        for one, word in pairs:
            if isinstance(one, dict):
                assert word in one["error"]["message"]
                failed.append(index)
            else:
                assert one == word
    assert read_body.headers.get("X-Amphora-Failed", "") == ",".join(map(str, failed))


def test_a_body_without_an_answer_is_refused_by_its_first_record() -> None:
    """Also if a later one is refused earlier, since it cannot be read."""
    with pytest.raises(Fault, match="is 7, not a text"):
        answered(b"7\nno JSON\n", "application/jsonlines")


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("application/jsonlines", b"", ["Line 1: it is blank"]),
        ("application/jsonlines", b"{\n\n", ["Line 1: The body is not valid JSON", "Line 2"]),
        ("text/csv", b"\n", ["row 1 is blank"]),
        ("text/csv", b"a, b\n", ["row 1 has 2 fields"]),
    ],
)
def test_a_batch_transform_gets_an_answer_to_each_record_also_if_none_is_valid(
    content_type: str, body: bytes, words: list[str]
) -> None:
    """Which fails by a single 400. A client gets that."""
    traits = ModelTraits()
    with pytest.raises(Fault):
        exchange.read("/invocations", body, content_type, traits)
    records = exchange.read("/invocations", body, content_type, traits, is_transform=True)
    lines, _ = records.write([], "application/jsonlines")
    assert isinstance(lines, bytes)
    for line, word in zip(lines.splitlines(), words, strict=True):
        assert word in json.loads(line)["error"]["message"]


def test_an_error_stands_in_its_records_place_in_every_format() -> None:
    error = {"error": {"code": "bad_request", "message": "bad, first"}}
    woven = [error, [0.5, 1.0], {"error": {"code": "x", "message": "worse"}}, [2.0, 3.0]]
    rows = write.entries(woven, "text/csv")[0]
    assert rows == b'error,"bad, first"\n0.5,1.0\nerror,worse\n2.0,3.0\n'
    array = np.load(io.BytesIO(write.entries(woven, "application/x-npy")[0]))
    assert np.isnan(array).all(axis=1).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("content_type", "words"),
    [
        ("application/zip", "application/json"),
        ("", "application/json"),
        ("application/json; charset=klingon", "klingon"),
        ("application/json; charset=latin-1", "utf-8"),
        ("application/x-npy", "application/json"),
        ("text/csv; header=maybe", "present, absent"),
    ],
)
def test_an_unknown_content_type_is_named(content_type: str, words: str) -> None:
    with pytest.raises(Fault, match=words) as caught:
        read(b'"a"', content_type)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("header", "body", "texts"),
    [
        ("absent", b"text\ngood\n", ["text", "good"]),
        ("absent", b"email\nphone\n", ["email", "phone"]),
        ("present", b"email\nphone\n", ["phone"]),
        ("PRESENT", b"id,text\n1,good\n", ["good"]),
    ],
)
def test_a_content_type_decides_whether_a_csv_has_a_header(
    header: str, body: bytes, texts: list[str]
) -> None:
    (request,) = requests_of(body, f"text/csv; header={header}")
    assert list(request.inputs) == texts


ANSWER: list[payloads.Label | list[payloads.Label]] = [
    {"label": "é,1", "score": 0.75},
    [{"label": "a", "score": 0.5}, {"label": "b", "score": 0.25}],
]


def test_an_answer_has_the_first_accepted_type_that_can_hold_it() -> None:
    body, kind = write.entries(ANSWER, "image/png, */*;q=0.1")
    assert (json.loads(body), kind) == (ANSWER, "application/json")
    lines, kind = write.entries(ANSWER, "image/png, application/jsonlines")
    assert [json.loads(line) for line in lines.splitlines()] == ANSWER
    assert kind == "application/jsonlines"
    body, _ = write.entries(ANSWER, "text/csv")
    assert body.decode() == '"é,1",0.75\na,0.5,b,0.25\n'
    vectors = [[0.5, 1.0], [2.0, -3.0]]
    assert write.entries(vectors, "text/csv")[0] == b"0.5,1.0\n2.0,-3.0\n"
    array = np.load(io.BytesIO(write.entries(vectors, "application/x-npy")[0]))
    assert (array.dtype, array.tolist()) == (np.float32, vectors)
    with pytest.raises(Fault, match="vectors"):
        write.entries(ANSWER, "application/x-npy")
    with pytest.raises(Fault, match="'image/png'"):
        write.entries(ANSWER, "image/png")
    accepted = "application/x-npy, application/json;q=0.5"
    assert write.entries(ANSWER, accepted)[1] == "application/json"


TOKENS = [{"token": {"text": "a"}}, {"token": {"text": "é"}}]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/plain", ["a", "é"]),
        ("*/*", ['data: {"token":{"text":"a"}}\n\n', 'data: {"token":{"text":"é"}}\n\n']),
        ("application/jsonlines", ['{"token":{"text":"a"}}\n', '{"token":{"text":"é"}}\n']),
    ],
)  # fmt: skip
def test_tokens_are_written_one_by_one(accept: str, expected: list[str]) -> None:
    kinds = [media.EVENTS, media.JSON_LINES, media.TEXT]
    kind = write.stream_type(accept, kinds, is_document=False)
    pieces = list(write.stream(iter(TOKENS), kind))
    assert [piece.decode() for piece in pieces] == expected


def test_a_stream_that_breaks_off_says_so_before_its_connection_breaks() -> None:
    def tokens() -> Iterator[Any]:
        yield TOKENS[0]
        raise RuntimeError("secret")

    events = write.stream(tokens(), media.EVENTS)
    next(events)
    event = next(events)
    assert b'"error":{"message":"The generation failed' in event
    assert b"secret" not in event
    with pytest.raises(RuntimeError):
        next(events)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"[" * 100_000, "application/json"),
        (b"1" * 5_000, "application/json"),
        (b"[" * 100_000, "application/jsonlines"),
        (b'["good", "\\udfff"]', "application/json"),
    ],
)
def test_a_body_made_up_to_harm_is_refused_at_once(body: bytes, kind: str) -> None:
    with pytest.raises(Fault) as caught:
        read(body, kind)
    assert caught.value.status == 400


PAIR = {"text": "a", "text_pair": "b"}


@pytest.mark.parametrize(
    ("body", "columns", "texts"),
    [
        ("id,Sentence1,sentence2\n1,a,b\n", ("sentence1", "sentence2"), [PAIR]),
        ("sentence2,sentence1,label\nb,a,0\n", ("sentence1", "sentence2"), [PAIR]),
        # The model's own column, and not the one whose name is usual.
        ("title,headline\nt,h\n", ("headline",), ["h"]),
        ("satz,art\ngut,1\n", ("satz",), ["gut"]),
        ("Comment\ngood\n", ("Comment",), ["good"]),
        ("Comment\n", ("Comment",), ["Comment"]),
        # A header that lacks one of them, and none at all.
        ("text,text_pair\na,b\n", ("sentence1", "sentence2"), [PAIR]),
        ("a\nb\n", ("headline",), ["a", "b"]),
    ],
)
def test_csv_is_read_by_the_columns_that_a_model_was_trained_on(
    body: str, columns: tuple[str, ...], texts: list[Any]
) -> None:
    (request,) = requests_of(body.encode(), "text/csv", *columns)
    assert list(request.inputs) == texts


def test_rows_without_the_models_columns_are_their_own_fault() -> None:
    body = b"id,sentence1,sentence2\n1,a,b\n2,c\n3,d,e\n"
    read_body = read(body, "text/csv", "sentence1", "sentence2")
    (request,) = read_body.requests
    assert request.inputs == [PAIR, {"text": "d", "text_pair": "e"}]
    assert read_body.records is not None and "row 3" in str(read_body.records[1])
    traits = ModelTraits(columns={"question": "frage", "context": "absatz"})
    body = b"absatz,frage\na,b\n"
    (request,) = exchange.read("/invocations", body, "text/csv", traits).requests
    assert request.inputs == [{"question": "b", "context": "a"}]  # type: ignore[union-attr]
    with pytest.raises(Fault, match="columns that the model was trained on"):
        read(b"id,one,other\n1,a,b\n", "text/csv", "premise", "hypothesis")


@pytest.mark.parametrize(
    ("value", "is_right"),
    [(0.5, True), (1, True), (10**400, False), (float("inf"), False), (True, False), ("1", False)],
)
def test_a_number_is_finite_whatever_its_size(value: Any, is_right: bool) -> None:
    assert parameters.number(0, 2).is_right(value) is is_right


def test_accept_is_read_as_werkzeug_reads_it() -> None:
    """The best of what is offered, over all headers of up to three entries of these."""
    offers = ["application/json", "text/csv", "text/plain"]
    ranges = [*offers, "text/*", "*/*", 'image/png; x="a,b"']
    entries = [f"{name}{q}" for name in ranges for q in ("", ";q=0.5", "; q=0.2", ";q=0")]
    random = Random(0)
    for _ in range(1000):
        chosen = random.sample(entries, random.randint(1, 3))
        header = ", ".join(chosen)
        theirs = parse_accept_header(header, MIMEAccept)
        weights = {offer: theirs.quality(offer) for offer in offers}
        ours = media.preferred(header, offers)
        if len({entry.partition(";")[0] for entry in chosen}) == len(chosen):
            assert set(ours) == {offer for offer in offers if weights[offer] > 0}, header
            assert [weights[offer] for offer in ours] == sorted(
                (weights[offer] for offer in ours), reverse=True
            ), header


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    prediction = [{"label": "a", "score": float("nan")}]
    for accept in ("application/json", "application/jsonlines", "text/csv"):
        with pytest.raises(Unencodable, match="weights"):
            write.entries(prediction, accept)
    with pytest.raises(Unencodable, match="NaN"):
        write.entries([[0.5, float("inf")]], "application/x-npy")

    def pieces() -> Iterator[Any]:
        raise RuntimeError("no memory")
        yield {}

    with pytest.raises(RuntimeError, match="no memory"):
        write.stream(pieces(), "text/event-stream")


def test_a_long_answer_is_written_with_pauses() -> None:
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1

    matrix = np.random.default_rng(0).random((3000, 8)).tolist()
    for value in (
        [[matrix]], [matrix, [1.5]], {"data": [{"embedding": row} for row in matrix], "n": None},
        [{"label": "é", "score": 0.5}] * 5000, [], {}, [[], {}], "text", 3, {"a": {"b": [1]}},
    ):  # fmt: skip
        pauses = 0
        expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert write.document(value, pause)[0].decode() == expected
        assert pauses >= (4 if len(expected) > 10_000 else 0)


def test_an_error_names_no_object_in_memory() -> None:
    with pytest.raises(Fault, match=r"readable image: cannot identify image file\.$"):
        toolkit.decode(b"abc", "image/png")


def test_many_invalid_records_cost_only_their_own_answers() -> None:
    lines = [b"7"] * 2_000
    lines[1_200] = b'"a"'
    answers, _ = answered(b"\n".join(lines), "application/jsonlines")
    assert answers[1_200] == "a"
    assert sum("error" in answer for answer in answers) == len(lines) - 1
