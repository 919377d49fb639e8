"""Reads the body of a request of any API as one or several requests to a model, and writes the
answer that follows from its predictions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amphora.serving.api import huggingface, media, openai, tei, write
from amphora.serving.api.canonical import LENGTH, ApiRequest, ModelTraits
from amphora.serving.protocol import routes
from amphora.serving.protocol.media_types import Fault, bad_request

# Routes by a key of their bodies, for bodies without `inputs`.
_KEYS = {"messages": routes.CHAT, "prompt": routes.COMPLETIONS, "input": routes.EMBEDDINGS}
_PARTS = 32
"""Into how many requests a refused one is split: few are prepared again for one invalid record, and
none more than a few times if all are."""
_READERS: Mapping[str, Callable[[str, Any, ModelTraits], ApiRequest]] = {
    **dict.fromkeys((routes.CHAT, routes.COMPLETIONS, routes.EMBEDDINGS), openai.read),
    **dict.fromkeys((*routes.TEI, *routes.RANKING), tei.read),
    **dict.fromkeys(routes.TGI, huggingface.read_document),
}


@dataclass(kw_only=True)
class Exchange:
    """The requests of one body, and what is known of their answers."""

    requests: list[ApiRequest]
    records: list[bool | Fault] | None = None
    """Of each line of JSON Lines or row of CSV whether it is a list of inputs, or why it was
    refused. None for other bodies."""
    headers: dict[str, str] = field(default_factory=dict)
    """The headers X-Amphora-*, which list positions of inputs or records."""
    raises_faults: bool = True
    """Whether a body is refused if all of its records are."""
    nests_labels: bool = False
    """Whether the labels of one text are a list in a list, as Hugging Face's clients expect, which
    take the first entry; their pipeline's is a list."""

    def split(self, index: int) -> bool:
        """Replace a request by several with fewer inputs each, so that an invalid record costs no
        other's answer. Return False if all of its inputs are of one record."""
        request = self.requests[index]
        count = len(request.inputs)
        if not request.records or not request.mergeable or count < 2:
            return False
        size = max(1, count // _PARTS)
        parts = [slice(start, start + size) for start in range(0, count, size)]
        self.requests[index : index + 1] = [
            replace(request, inputs=request.inputs[part], records=request.records[part])
            for part in parts
        ]
        return True

    def write(
        self, predictions: Sequence[Any], accept: str, pause: Callable[[], None] = lambda: None
    ) -> tuple[bytes | Iterator[bytes], str]:
        """Return the answer's body and type.

        Args:
            predictions: For each request its prediction, an iterator if it streams, or a Fault.
            accept: The Accept header.
            pause: Called within long answers.

        Raises:
            Fault: No record was answered, or no accepted type can hold the answer.
            Unencodable: The answer contains NaN or infinity.
        """
        if self.records is not None:
            return write.entries(self._records_of(predictions), accept, pause=pause)
        ((request, prediction),) = zip(self.requests, predictions, strict=True)
        if isinstance(prediction, Fault):
            raise prediction
        if request.streams:
            kind = self.stream_type(accept)
            return write.stream(request.events(prediction), kind), kind
        entries, single = prediction["entries"], prediction.get("single", False)
        for index, entry in enumerate(entries, 1):
            if isinstance(entry, Exception):
                where = f"Input {index}: " if len(request.inputs) > 1 else ""
                raise bad_request(f"{where}{entry}") from entry
        self._note(Truncated=prediction.get("truncated", ()))
        answer = request.answer(prediction)
        if request.is_document:
            return write.document(answer, pause)
        if request.generates:
            self._note(Unfinished=_unfinished(entries))
        elif self.nests_labels and request.single and not request.compares:
            answer, single = answer if isinstance(answer[0], list) else [answer], False
        return write.entries(answer, accept, single=single, pause=pause)

    def stream_type(self, accept: str) -> str:
        """Return the type of the only request's stream. Raise Fault (406) if none is accepted."""
        (request,) = self.requests
        return write.stream_type(accept, request.kinds, is_document=request.is_document)

    def _records_of(self, predictions: Sequence[Any]) -> list[Any]:
        """Return the answer to each record. Raise Fault if all were refused."""
        assert self.records is not None
        parts: list[list[tuple[Any, str]]] = [
            [(record, "Failed")] if isinstance(record, Fault) else [] for record in self.records
        ]
        for request, prediction in zip(self.requests, predictions, strict=True):
            for index, entry, note in _entries_of(request, prediction):
                parts[index].append((entry, note))
        notes: dict[str, list[int]] = {"Truncated": [], "Failed": [], "Unfinished": []}
        answers: list[Any] = []
        faults: list[Fault] = []
        for index, (record, part) in enumerate(zip(self.records, parts, strict=True)):
            entries = []
            for entry, note in part:
                if note and notes[note][-1:] != [index]:
                    notes[note].append(index)
                if note == "Failed":
                    faults.append(fault := _advised(entry))
                    entry = {"error": {"code": fault.code, "message": str(fault)}}
                entries.append(entry)
            answers.append(entries if record is True else entries[0])
        if self.raises_faults and len(faults) == sum(map(len, parts)):
            raise faults[0]
        self._note(**notes)
        return answers

    def _note(self, **positions: Collection[int]) -> None:
        for name, indices in positions.items():
            if indices:
                self.headers[f"X-Amphora-{name}"] = ",".join(map(str, indices))


def _unfinished(texts: Sequence[Sequence[Mapping[str, Any]]]) -> list[int]:
    """Return the positions of the prompts that have a text which ended at the token limit."""
    return [
        index for index, some in enumerate(texts) if any(text["finish"] == LENGTH for text in some)
    ]


def _entries_of(request: ApiRequest, prediction: Any) -> Iterator[tuple[int, Any, str]]:
    """Yield the record of each of a request's answers, and the answer, or what is wrong, with the
    header that lists it."""
    if isinstance(prediction, Fault):
        yield from ((index, prediction, "Failed") for index in request.records)
    elif request.mergeable:
        truncated = set(prediction["truncated"])
        pairs = zip(request.records, prediction["entries"], strict=True)
        for number, (index, entry) in enumerate(pairs):
            is_failed = isinstance(entry, Exception)
            yield index, entry, "Failed" if is_failed else "Truncated" * (number in truncated)
    else:
        document = request.answer(prediction)
        is_one = prediction.get("single") and not request.is_document
        is_cut = request.generates and _unfinished(prediction["entries"])
        note = "Unfinished" if is_cut else "Truncated" if prediction.get("truncated") else ""
        yield request.records[0], document[0] if is_one else document, note


def _advised(error: Exception) -> Fault:
    """Return what is wrong with a record, with what a batch transform does for an unknown key."""
    fault = error if isinstance(error, Fault) else bad_request(str(error))
    message = str(fault)
    if fault.param and re.search(rf"{re.escape(repr(fault.param))}.* (is|are) not ", message):
        message += (
            f" If {fault.param!r} is your own, keep it from the model by SageMaker's InputFilter,"
            " and join it to the answer by JoinSource."
        )
    advised = Fault(fault.status, fault.code, message, fault.param)
    advised.__cause__ = error.__cause__
    return advised


def read(
    route: str, body: bytes, content_type: str, model: ModelTraits, *, is_transform: bool = False
) -> Exchange:
    """Read a body in Hugging Face's form, OpenAI's, TEI's or TGI's.

    Args:
        is_transform: Whether a batch transform job sends it: then records that are refused are
            answered, also if there are no others, since a 400 would cost the whole file.

    Raises Fault: 415 for an unknown content type, 400 for a wrong body.
    """
    kind = media.media_type(content_type)
    if route in _READERS or route in model.passed.values():
        if kind != media.JSON:
            raise media.unsupported_type(f"{route} takes {media.JSON}, not {content_type!r}.")
        return Exchange(requests=[_read_route(route, huggingface.read_json(body, model), model)])
    if kind.partition("/")[0] in media.FILES:
        return Exchange(requests=[huggingface.read_file(body)])
    known = (media.JSON, media.JSON_LINES, media.CSV, media.TEXT)
    if kind not in known:
        raise media.unsupported_type(
            f"Content-Type {content_type!r} is not supported. Send {', '.join(known)}, or an "
            "image, audio or video if the model's task reads them."
        )
    media.check_utf8(content_type)
    if kind in (media.JSON, media.TEXT):
        read_one = _read_any if kind == media.JSON else huggingface.read_text
        return Exchange(requests=[read_one(body, model)])
    if not body.strip() and not is_transform:
        raise model.no_inputs()
    if kind == media.JSON_LINES:
        exchange = _gather(huggingface.read_lines(body, lambda line: _read_any(line, model)))
    else:
        exchange = _gather_rows(huggingface.read_csv(body, content_type, model), model)
    if not exchange.requests and not is_transform:
        refused = [line for line in exchange.records or () if isinstance(line, Fault)]
        raise [*refused, model.no_inputs()][0]
    exchange.raises_faults = not is_transform
    return exchange


def _read_any(body: bytes, model: ModelTraits) -> ApiRequest:
    """Read a JSON body by the keys that it has."""
    document = huggingface.read_json(body, model)
    if isinstance(document, dict) and (route := route_of(document, model)):
        return _read_route(route, document, model)
    return huggingface.read_document("", document, model)


def _read_route(route: str, document: Any, model: ModelTraits) -> ApiRequest:
    """Read a body of a route. Raise Fault: 400 if the model does not answer it, or the body is
    invalid; 404 if it names an adapter that is not loaded."""
    if isinstance(document, dict) and isinstance(named := document.get("model"), str):
        model = model.addressed(named)
    if route in (routes.CHAT, routes.COMPLETIONS):
        document = openai.replace_do_sample(document)
    if route in model.passed.values():
        if not isinstance(document, dict):
            raise bad_request("The body is not an object.")
        streams = bool(document.get("stream"))
        return ApiRequest(
            inputs=(), parameters=document, route=route, streams=streams, form=lambda answer: answer
        )
    # Without a chat template, the model itself raises the error.
    is_chat = route == routes.CHAT and model.settings
    if not (model.passed or route in model.routes or is_chat):
        known = ", ".join(model.routes)
        answered = f"answers {known}" if known else "answers none of these APIs"
        raise bad_request(f"The body is one of {route}, but this model {answered}.")
    request = _READERS[route](route, document, model)
    return replace(request, adapter=model.adapter) if model.adapter else request


def route_of(document: Mapping[str, Any], model: ModelTraits) -> str:
    """Return the route of OpenAI's or Jina's API for a body; empty for bodies of other APIs. Raise
    Fault (400) if it has keys of several routes."""
    if "inputs" in document:
        return ""
    if {"query", "documents"} <= set(document) and not model.settings:
        return routes.RERANK_1
    keys = model.passed or _KEYS
    named = [key for key in keys if key in document]
    # `input` without `model` may name a text in Hugging Face's form.
    if named == ["input"] and "model" not in document and "input" in model.texts:
        return ""
    if len(named) > 1:
        both = " and ".join(named)
        raise bad_request(f"The body has {both}, which belong to different APIs: keep one.")
    return keys[named[0]] if named else ""


def _gather(lines: Sequence[ApiRequest | Fault]) -> Exchange:
    """Return the exchange of records: those of equal parameters are one request."""
    requests: list[ApiRequest] = []
    records: list[bool | Fault] = []
    alike: dict[str, tuple[list[Any], list[int]]] = {}
    for index, line in enumerate(lines):
        if isinstance(line, Fault):
            records.append(line)
            continue
        records.append(line.mergeable and not line.single)
        if not line.mergeable:
            requests.append(replace(line, records=[index]))
            continue
        parameters = json.dumps(line.parameters, sort_keys=True)
        if parameters not in alike:
            alike[parameters] = [], []
            inputs, owners = alike[parameters]
            requests.append(replace(line, inputs=inputs, single=False, records=owners))
        inputs, owners = alike[parameters]
        inputs.extend(line.inputs)
        owners.extend([index] * len(line.inputs))
    return Exchange(requests=requests, records=records)


def _gather_rows(rows: Sequence[Any], model: ModelTraits) -> Exchange:
    """Return the exchange of the inputs of CSV's rows."""
    if model.settings:

        def read_row(row: Any) -> Any:
            return huggingface.read_document("", {"inputs": row}, model)

        return _gather([row if isinstance(row, Fault) else read_row(row) for row in rows])
    # The same, in a tenth of the time.
    owners = [index for index, row in enumerate(rows) if not isinstance(row, Fault)]
    inputs = [rows[index] for index in owners]
    requests = [ApiRequest(inputs=inputs, records=owners)] if inputs else []
    records = [row if isinstance(row, Fault) else False for row in rows]
    return Exchange(requests=requests, records=records)
