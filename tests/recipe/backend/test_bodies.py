import io
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from recipe.backend.requests import accept, answers, bodies, parameters, payloads
from recipe.backend.requests.payloads import BadRequest, UnsupportedContentType
from tests.support.refusals import refused


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
        ("application/jsonlines", '"a"\n\n{"inputs": "b"}\n', ["a", "b"]),
        ("application/x-ndjson", '{"text": "a"}', ["a"]),
        ("text/csv", 'text\n"a, b"\r\n"c ""d"""', ["a, b", 'c "d"']),
        ("text/csv", "id,text\n1,a\n2,b\n", ["a", "b"]),
        ("text/csv", 'a\n""\n\nb\n', ["a", "", "b"]),
        ("text/csv", "id,text\n1,a\n,\n2,b\n", ["a", "", "b"]),
        ("text/csv", "text\n", ["text"]),
        ("text/csv", "text\na; b\nc; d\n", ["a; b", "c; d"]),
        ("text/csv", "a, b".join('""') + "\n" + "x" * 200_000, ["a, b", "x" * 200_000]),
        ("text/plain", "a line\nand another", ["a line\nand another"]),
    ],
)
def test_a_request_is_read(content_type: str, body: str, texts: list[str]) -> None:
    request = bodies.read_request(body.encode(), content_type)
    assert list(request.read(payloads.a_text).values) == texts
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
        ("text/csv", b"Comment\ngood\n", ["'Comment': a header or a text?", "column text"]),
        ("text/csv", b"text\tlabel\na\t1\nb\t2\n", ["2 fields between '\\t'"]),
        ("text/csv", b"good film;1\nbad film;0\n", ["2 fields between ';'", "by commas"]),
        ("text/plain", b" ", ["no inputs"]),
    ],
)
def test_a_bad_request_is_told_what_is_right(
    content_type: str, body: bytes, words: list[str]
) -> None:
    with refused(BadRequest, *words):
        request = bodies.read_request(body, content_type)
        request = request.checked({"top_k"}, "text-classification", nullable={"top_k"})
        request.read(payloads.a_text)


@pytest.mark.parametrize(
    ("content_type", "body", "texts", "faults"),
    [
        ("application/jsonlines", b'"a"\n{"b"\n"c"\n', ["a", "c"], {1: "Line 2"}),
        (
            "application/jsonlines",
            b'7\n\n["a"]\n"b"\n"\xff"',
            ["a", "b"],
            {0: "7", 3: "UTF-8"},
        ),
        ("application/jsonlines", '{"inputs": "a\u2028b"}\n'.encode(), ["a\u2028b"], {}),
        ("text/csv", b"a, b\nc\n", ["c"], {0: "row 1"}),
        ("text/csv", b"id,text\n1,a\n2\n3,c\n", ["a", "c"], {1: "row 3"}),
    ],
)
def test_a_bad_record_is_its_own_fault(
    content_type: str, body: bytes, texts: list[str], faults: dict[int, str]
) -> None:
    request = bodies.read_request(body, content_type)
    inputs = request.read(payloads.a_text)
    assert list(inputs.values) == texts
    assert set(inputs.faults) == set(faults)
    for index, word in faults.items():
        assert word in inputs.faults[index]


def prepared(inputs: payloads.Inputs, request: Any = None) -> payloads.Prepared:
    return payloads.Prepared(
        request=request or payloads.Request(inputs=[]), inputs=inputs, sizes=[]
    )


def test_an_error_stands_in_its_records_place_in_every_format() -> None:
    request = prepared(payloads.Inputs(["a", "b"], {0: "bad, first", 2: "worse"}))
    error = {"error": {"code": "bad_request", "message": "bad, first"}}
    woven = payloads.restore_records(
        payloads.Answers([[0.5, 1.0], [2.0, 3.0]], truncated=[1]), request
    )
    assert woven == [
        error, [0.5, 1.0], {"error": {"code": "bad_request", "message": "worse"}}, [2.0, 3.0],
    ]  # fmt: skip
    assert (woven.truncated, woven.failed) == ([3], [0, 2])
    lines, _ = answers.write_answer(woven, "application/jsonlines")
    assert json.loads(lines.splitlines()[0]) == error
    rows = answers.write_answer(woven, "text/csv")[0]
    assert rows == b'error,"bad, first"\n0.5,1.0\nerror,worse\n2.0,3.0\n'
    array = np.load(io.BytesIO(answers.write_answer(woven, "application/x-npy")[0]))
    assert np.isnan(array).all(axis=1).tolist() == [True, False, True, False]


def test_each_record_has_one_line() -> None:
    body = b'{"inputs": ["a", "b"]}\n"c"\n{"inputs": []}\n{"inputs": ["d", 7]}\n{"inputs": ["e"]}'
    request = bodies.read_request(body, "application/jsonlines")
    inputs = request.read(payloads.a_text)
    assert inputs.values == ["a", "b", "c", "d", "e"]
    prediction = payloads.Answers(list(range(5)), truncated=[1, 4])
    prediction.unfinished = [3]
    woven = payloads.restore_records(prediction, prepared(inputs, request))
    assert woven[:2] == [[0, 1], 2]
    assert "is empty" in woven[2]["error"]["message"]
    assert woven[3][0] == 3
    assert "7, not a text" in woven[3][1]["error"]["message"]
    assert woven[4:] == [[4]]
    assert (woven.truncated, woven.failed, woven.unfinished) == ([0, 4], [2, 3], [3])
    lines, _ = answers.write_answer(woven, "application/jsonlines")
    assert [json.loads(line) for line in lines.splitlines()] == woven


@pytest.mark.parametrize(
    ("content_type", "words"),
    [
        ("application/zip", "application/json"),
        ("", "application/json"),
        ("application/json; charset=klingon", "klingon"),
        ("application/json; charset=latin-1", "utf-8"),
        ("application/x-npy", "application/json"),
        ("text/csv; header=absent", "Leave header out"),
    ],
)
def test_an_unknown_content_type_is_named(content_type: str, words: str) -> None:
    with pytest.raises(UnsupportedContentType, match=words):
        bodies.read_request(b'"a"', content_type)


ANSWER: list[payloads.Label | list[payloads.Label]] = [
    {"label": "é,1", "score": 0.75},
    [{"label": "a", "score": 0.5}, {"label": "b", "score": 0.25}],
]


def test_an_answer_has_the_first_accepted_type_that_can_hold_it() -> None:
    body, kind = answers.write_answer(ANSWER, "image/png, */*;q=0.1")
    assert (json.loads(body), kind) == (ANSWER, "application/json")
    lines, kind = answers.write_answer(ANSWER, "image/png, application/jsonlines")
    assert [json.loads(line) for line in lines.splitlines()] == ANSWER
    assert kind == "application/jsonlines"
    body, _ = answers.write_answer(ANSWER, "text/csv")
    assert body.decode() == '"é,1",0.75\na,0.5,b,0.25\n'
    vectors = [[0.5, 1.0], [2.0, -3.0]]
    assert answers.write_answer(vectors, "text/csv")[0] == b"0.5,1.0\n2.0,-3.0\n"
    array = np.load(io.BytesIO(answers.write_answer(vectors, "application/x-npy")[0]))
    assert (array.dtype, array.tolist()) == (np.float32, vectors)
    with pytest.raises(UnsupportedContentType, match="vectors"):
        answers.write_answer(ANSWER, "application/x-npy")
    with pytest.raises(UnsupportedContentType, match="'image/png'"):
        answers.write_answer(ANSWER, "image/png")
    accepted = "application/x-npy, application/json;q=0.5"
    assert answers.write_answer(ANSWER, accepted)[1] == "application/json"


TOKENS = [{"token": {"text": "a"}}, {"token": {"text": "é"}}]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/plain", ["a", "é"]),
        ("*/*", ['data: {"token": {"text": "a"}}\n\n', 'data: {"token": {"text": "é"}}\n\n']),
        ("application/jsonlines", ['{"token": {"text": "a"}}\n', '{"token": {"text": "é"}}\n']),
    ],
)  # fmt: skip
def test_tokens_are_written_one_by_one(accept: str, expected: list[str]) -> None:
    pieces = list(answers.write_answer(iter(TOKENS), accept)[0])
    assert [piece.decode() for piece in pieces] == expected


def test_a_stream_that_breaks_off_says_so_before_its_connection_breaks() -> None:
    def tokens() -> Iterator[Any]:
        yield TOKENS[0]
        raise RuntimeError("secret")

    events = answers.write_answer(tokens(), "text/event-stream")[0]
    next(events)
    event = next(events)
    assert b'"error": {"message": "The generation failed' in event
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
    with pytest.raises(BadRequest):
        bodies.read_request(body, kind)


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
    request = bodies.read_request(body.encode(), "text/csv")
    assert list(request.read(lambda value: value, columns).values) == texts


def test_rows_without_the_models_columns_are_their_own_fault() -> None:
    body = b"id,sentence1,sentence2\n1,a,b\n2,c\n3,d,e\n"
    request = bodies.read_request(body, "text/csv")
    inputs = request.read(lambda value: value, ("sentence1", "sentence2"))
    assert list(inputs.values) == [PAIR, {"text": "d", "text_pair": "e"}]
    assert "row 3" in inputs.faults[1]
    unknown = bodies.read_request(b"id,one,other\n1,a,b\n", "text/csv")
    with pytest.raises(BadRequest, match="columns that the model was trained on"):
        unknown.read(lambda value: value, ("premise", "hypothesis"))


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
        ours = accept.preferred(header, offers)
        if len({entry.partition(";")[0] for entry in chosen}) == len(chosen):
            assert set(ours) == {offer for offer in offers if weights[offer] > 0}, header
            assert [weights[offer] for offer in ours] == sorted(
                (weights[offer] for offer in ours), reverse=True
            ), header
