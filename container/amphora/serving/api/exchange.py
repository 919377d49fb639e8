"""Reads the body of a request of any API as one or several requests to a model, and writes the
answer that follows from its predictions."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amphora.serving.api import huggingface, media, openai, tei, write
from amphora.serving.api.canonical import (
    ApiRequest,
    ModelTraits,
    error_entry,
    unfinished_prompts,
)
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
    records: list[tuple[int, int | None] | Fault] | None = None
    """For each line of JSON Lines or row of CSV the group of its request, and the number of its
    inputs if they are a list; or why it was refused. None for other bodies."""
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
        if not request.records or count < 2:
            return False
        size = max(1, count // _PARTS)
        self.requests[index : index + 1] = [
            replace(request, inputs=request.inputs[start : start + size])
            for start in range(0, count, size)
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
            self._note(Unfinished=unfinished_prompts(entries))
        elif self.nests_labels and request.single and not huggingface.is_ranking(request):
            answer, single = answer if isinstance(answer[0], list) else [answer], False
        return write.entries(answer, accept, single=single, pause=pause)

    def stream_type(self, accept: str) -> str:
        """Return the type of the only request's stream. Raise Fault (406) if none is accepted."""
        (request,) = self.requests
        return write.stream_type(accept, request.kinds, is_document=request.is_document)

    def _records_of(self, predictions: Sequence[Any]) -> list[Any]:
        """Return the answer to each record. Raise Fault if all were refused."""
        assert self.records is not None
        notes: dict[str, list[int]] = {"Truncated": [], "Failed": [], "Unfinished": []}
        parts: dict[int, list[Iterator[tuple[Any, str]]]] = {}
        for request, prediction in zip(self.requests, predictions, strict=True):
            parts.setdefault(request.group, []).append(_entries_of(request, prediction))
        rest = {group: itertools.chain.from_iterable(some) for group, some in parts.items()}
        answers: list[Any] = []
        faults: list[Fault] = []
        is_answered = False
        for index, record in enumerate(self.records):
            group, count = (0, None) if isinstance(record, Fault) else record
            some = (
                [(record, "Failed")]
                if isinstance(record, Fault)
                else [*itertools.islice(rest[group], count or 1)]
            )
            for note in {note for _, note in some if note}:
                notes[note].append(index)
            entries = []
            for entry, note in some:
                if note == "Failed":
                    faults.append(_advised(entry))
                    entry = error_entry(str(faults[-1]), faults[-1].code)
                else:
                    is_answered = True
                entries.append(entry)
            answers.append(entries[0] if count is None else entries)
        if not is_answered and self.raises_faults:
            raise faults[0]
        self._note(**notes)
        return answers

    def _note(self, **positions: Collection[int]) -> None:
        for name, indices in positions.items():
            if indices:
                self.headers[f"X-Amphora-{name}"] = ",".join(map(str, indices))


def _entries_of(request: ApiRequest, prediction: Any) -> Iterator[tuple[Any, str]]:
    """Yield the answer to each of a request's records, or what is wrong with it, with the header
    that lists it."""
    if isinstance(prediction, Fault):
        count = len(request.inputs) if request.records else 1
        yield from itertools.repeat((prediction, "Failed"), count)
    elif request.records:
        truncated = set(prediction["truncated"])
        for index, entry in enumerate(prediction["entries"]):
            is_failed = isinstance(entry, Exception)
            yield entry, "Failed" if is_failed else "Truncated" if index in truncated else ""
    else:
        document = request.answer(prediction)
        is_one = prediction.get("single") and not request.is_document
        is_cut = request.generates and unfinished_prompts(prediction["entries"])
        note = "Unfinished" if is_cut else "Truncated" if prediction.get("truncated") else ""
        yield document[0] if is_one else document, note


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
    if kind == media.TEXT:
        return Exchange(requests=[huggingface.read_text(body, model)])
    if kind == media.JSON:
        return Exchange(requests=[_read_any(body, model)])
    if not body.strip() and not is_transform:
        raise bad_request(f"The request holds no inputs. {model.example}")
    if kind == media.JSON_LINES:
        read_body = _gather(huggingface.read_lines(body, lambda line: _read_any(line, model)))
    else:
        rows = huggingface.read_csv(body, content_type, model)
        inputs = [row for row in rows if not isinstance(row, Fault)]
        if model.settings or not inputs:
            read_body = _gather(
                [
                    row
                    if isinstance(row, Fault)
                    else huggingface.read_document("", {"inputs": row}, model)
                    for row in rows
                ]
            )
        else:  # the same, in a tenth of the time
            read_body = Exchange(
                requests=[ApiRequest(inputs=inputs, records=True)],
                records=[row if isinstance(row, Fault) else (0, None) for row in rows],
            )
    if not read_body.requests and not is_transform:
        refused = [line for line in read_body.records or () if isinstance(line, Fault)]
        raise [*refused, bad_request(f"The request holds no inputs. {model.example}")][0]
    read_body.raises_faults = not is_transform
    return read_body


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
    if (
        not model.passed
        and route not in model.routes
        and not (route == routes.CHAT and model.settings)
    ):
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
    records: list[tuple[int, int | None] | Fault] = []
    alike: dict[str, int] = {}
    for line in lines:
        if isinstance(line, Fault):
            records.append(line)
        elif line.generates or line.form is not None or huggingface.is_ranking(line):
            records.append((len(requests), None))
            requests.append(replace(line, group=len(requests)))
        else:
            group = alike.setdefault(json.dumps(line.parameters, sort_keys=True), len(requests))
            if group == len(requests):
                first = replace(line, inputs=[], single=False, records=True, group=group)
                requests.append(first)
            requests[group].inputs.extend(line.inputs)  # type: ignore[attr-defined]
            records.append((group, None if line.single else len(line.inputs)))
    return Exchange(requests=requests, records=records)
