"""The routes of TEI and TGI that ask the tokenizer alone: tokenize and decode."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from recipe.backend import bounds
from recipe.backend.bounds import Bound
from recipe.backend.requests.parameters import FLAG, TEXT, TEXT_OR_TEXTS, Rule, are_ids, faults
from recipe.backend.requests.payloads import (
    BadRequest,
    Document,
    Request,
    TokenIds,
    check_ids,
    refuse,
)
from recipe.tasks.causal_lm.serve import Generator
from recipe.tasks.sentence_embedding.serve import Embedder

TOKENIZE, DECODE = "/tokenize", "/decode"
ROUTES = (TOKENIZE, DECODE)
_RULES: Mapping[str, Mapping[str, Rule]] = {
    TOKENIZE: {
        "inputs": TEXT_OR_TEXTS,
        "add_special_tokens": FLAG,
        "prompt_name": TEXT,
        "parameters": Rule(lambda value: isinstance(value, dict), "an object"),
    },
    DECODE: {
        "ids": Rule(
            lambda value: (
                are_ids(value)
                or (isinstance(value, list) and value != [] and all(map(are_ids, value)))
            ),
            "token ids, or a list of such lists",
        ),
        "skip_special_tokens": FLAG,
    },
}


def read(path: str, document: Any) -> Request:
    """The request that a body of one of the routes makes.

    Raises:
        BadRequest: A key is unknown, or has a value that it may not have.
    """
    rules = _RULES[path]
    needed = next(iter(rules))
    if not isinstance(document, dict):
        raise BadRequest(f"The body is not an object with {needed}.")
    body = {name: value for name, value in document.items() if value is not None}
    wrong = faults(body, rules)
    if unknown := sorted(set(body) - set(rules)):
        wrong.append(f"{path} does not take {', '.join(unknown)}, but {', '.join(sorted(rules))}")
    if needed not in body:
        wrong.append(f"{needed} is not there")
    refuse(wrong, body, rules)
    given = body[needed]
    if path == DECODE:
        texts: list[Any] = [TokenIds(ids) for ids in ([given] if are_ids(given) else given)]
    else:
        texts = [given] if isinstance(given, str) else given
    # Of a token the answer says five things.
    bounds.hold(Bound.ANSWER, 5 * sum(map(len, texts)))
    if path == TOKENIZE:
        bounds.hold_text(*texts)
    return Request(texts=texts, parameters=body, single=not isinstance(given, list))


def answer(request: Request, model: Any) -> Document | BadRequest:
    """The tokens of the texts: of a list for each in TEI's form, of a model that writes texts, for
    which TGI takes one text, a list of them; or the texts of token ids.

    Args:
        request: What `read` returned.
        model: What is served.
    """
    vectors = model.vectors if isinstance(model, Embedder) else None
    tokenizer: Any = vectors.tokenizer if vectors else model.loaded.tokenizer
    body = request.parameters
    if request.route == DECODE:
        skips = body.get("skip_special_tokens", True)
        try:
            known = [list(check_ids(ids, len(tokenizer))) for ids in request.texts]
        except BadRequest as error:
            return error
        return Document([tokenizer.decode(ids, skip_special_tokens=skips) for ids in known])
    prompts = vectors.prompts if vectors else {}
    name = body.get("prompt_name")
    if name is not None and name not in prompts:
        has = ", ".join(sorted(prompts)) or "none"
        return BadRequest(f"prompt_name is {name!r}, and the model has {has}.", "prompt_name")
    prompt = "" if name is None else prompts[name]
    specials = body.get("add_special_tokens", True)
    is_tgis = isinstance(model, Generator)
    rows = [_tokens(tokenizer, prompt + text, specials, is_tgis) for text in request.texts]
    return Document(rows[0] if is_tgis and request.single else rows)


def _tokens(tokenizer: Any, text: str, specials: bool, is_tgis: bool) -> list[dict[str, Any]]:
    """The tokens of a text, with their places in its UTF-8 if the tokenizer tells them."""
    wanted = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    encoded = tokenizer(text, add_special_tokens=specials, verbose=False, **wanted)
    ids = encoded["input_ids"]
    offsets = encoded.get("offset_mapping") or [(0, 0)] * len(ids)
    places = list(itertools.accumulate((len(sign.encode()) for sign in text), initial=0))
    names, own = tokenizer.convert_ids_to_tokens(ids), set(tokenizer.all_special_ids)
    tokens = []
    for number, name, (start, stop) in zip(ids, names, offsets, strict=True):
        special = number in own
        where = {"start": places[start], "stop": places[stop]}
        shown = text[start:stop] if stop > start else name
        if is_tgis:
            tokens.append({"id": number, "text": shown, **where})
        else:
            where = dict.fromkeys(where) if special else where
            shown = name if special else shown
            tokens.append({"id": number, "text": shown, "special": special, **where})
    return tokens
