"""Generated texts in the form of transformers' pipelines, or of TGI with `details` or `stream`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipe.backend.generation.decoding import LENGTH, Completion, Token
from recipe.backend.requests.payloads import Answers, Prepared


def shaped(answer: Any, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return texts, or an iterator over TGI's events, as JSON values, unless the request's own
    `form` formats its answer.

    By default a text includes its prompt, as in pipelines, but not with details or in a stream, as
    in TGI; `return_full_text` overrides that.

    Args:
        answer: `Answers` with a list of `Completion` for each prompt, or an iterator that yields
            that of a stream after each token.
        prepared: The request.
        tokenizer: Names the special tokens, which add nothing to a text.
    """
    if prepared.request.form is not None:
        return answer
    has_details = bool(prepared.parameters.get("details"))
    full = prepared.parameters.get("return_full_text")
    if full is None:
        full = not (has_details or isinstance(answer, Iterator))

    def whole(text: Completion) -> Any:
        prompt: Any = prepared.inputs.values[text.prompt] if full else ""
        if isinstance(prompt, str):
            return prompt + text.text
        *earlier, last = prompt
        if last["role"] != "assistant":
            return [*prompt, {"role": "assistant", "content": text.text}]
        return [*earlier, {**last, "content": last["content"] + text.text}]

    def details(text: Completion, **more: Any) -> dict[str, Any]:
        count, seed = len(text.tokens), prepared.parameters.get("seed")
        return {"finish_reason": text.finish, "generated_tokens": count, "seed": seed, **more}

    names = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))

    def token(one: Token) -> dict[str, Any]:
        return {**vars(one), "text": one.text or names.get(one.id, "")}

    def entry(text: Completion) -> dict[str, Any]:
        if not has_details:
            return {"generated_text": whole(text)}
        tokens = [*map(token, text.tokens)]
        return {"generated_text": whole(text), "details": details(text, prefill=[], tokens=tokens)}

    def events() -> Iterator[dict[str, Any]]:
        for number, text in enumerate(answer, 1):
            yield {
                "index": number,
                "token": token(text.tokens[-1]),
                "generated_text": whole(text) if text.finish else None,
                "details": details(text, input_length=prepared.tokens) if text.finish else None,
            }

    if isinstance(answer, Iterator):
        return events()
    entries = [[entry(text) for text in texts] for texts in answer]
    shown = Answers(entries, answer.truncated, answer.single)
    shown.unfinished = [
        index for index, texts in enumerate(answer) if any(text.finish == LENGTH for text in texts)
    ]
    return shown
