"""Generated texts in the form of transformers' pipelines, or of TGI with `details` or `stream`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipe.backend.generation.decoding import LENGTH, Completion, Token
from recipe.backend.requests.payloads import Answers, Request


def shaped(answer: Any, request: Request) -> Any:
    """Return texts, or an iterator over events, as JSON values.

    By default a text includes its prompt, as in pipelines, but not with details or in a stream, as
    in TGI; `return_full_text` overrides that.

    Args:
        answer: `Answers` with a list of `Completion` for each prompt, or an iterator that yields
            that of a stream after each token.
        request: The request that is answered.
    """
    parameters = request.parameters
    full = parameters.get("return_full_text")
    if isinstance(answer, Iterator):
        return _events(answer, request, bool(full))
    has_details = bool(parameters.get("details"))
    if full is None:
        full = not has_details
    entries = []
    for texts, prompt in zip(answer, request.texts, strict=True):
        alternatives = []
        for text in texts:
            entry = {"generated_text": _with_prompt(prompt, text.text) if full else text.text}
            if has_details:
                tokens = [_token(token) for token in text.tokens]
                entry["details"] = {**_details(text, request), "prefill": [], "tokens": tokens}
            alternatives.append(entry)
        entries.append(alternatives)
    shown = Answers(entries, answer.truncated, answer.single)
    shown.unfinished = [
        place for place, texts in enumerate(answer) if any(text.finish == LENGTH for text in texts)
    ]
    return shown


def _with_prompt(prompt: Any, text: str) -> Any:
    """Return a prompt with its text; for a conversation, its messages and the assistant's."""
    if isinstance(prompt, str):
        return prompt + text
    messages: list[Mapping[str, Any]] = list(prompt)
    if messages[-1]["role"] != "assistant":
        return [*messages, {"role": "assistant", "content": text}]
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]


def _details(text: Completion, request: Request) -> dict[str, Any]:
    return {
        "finish_reason": text.finish,
        "generated_tokens": len(text.tokens),
        "seed": request.parameters.get("seed"),
    }


def _token(token: Token) -> dict[str, Any]:
    return {
        "id": token.id, "text": token.text, "logprob": token.logprob, "special": token.is_special,
    }  # fmt: skip


def _events(texts: Iterator[Completion], request: Request, full: bool) -> Iterator[dict[str, Any]]:
    """Yield TGI's events: one for each token, the last with the whole text."""
    for number, text in enumerate(texts, 1):
        whole: Any = None
        details = None
        if text.finish:
            whole = _with_prompt(request.texts[0], text.text) if full else text.text
            prompt_ids: Sequence[Any] = (request.token_ids or [[]])[0]
            details = {**_details(text, request), "input_length": len(prompt_ids)}
        token = _token(text.tokens[-1])
        yield {"index": number, "token": token, "generated_text": whole, "details": details}
