"""The answers of a saved model by the plain libraries, in the form in which they are served."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
NEW_TOKENS, LONGEST_ANSWER = 8, 30
WRITTEN = {"num_beams": 1, "min_new_tokens": 3, "max_new_tokens": NEW_TOKENS}


def _pipeline(folder: Path, task: str, **options: Any) -> Any:
    import transformers

    make: Any = transformers.pipeline
    return make(task, model=str(folder), device="cpu", **options)


def load(folder: Path, kind: str) -> tuple[Any, Any]:
    """Return a model, and its tokenizer; of an adapter, the adapted base model by PEFT."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if (folder / "adapter_config.json").exists():
        import peft

        return peft.AutoPeftModelForCausalLM.from_pretrained(str(folder)).eval(), tokenizer
    return getattr(transformers, kind).from_pretrained(folder).eval(), tokenizer


def _values(value: Any) -> Any:
    """Return NumPy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {name: _values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_values(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def classes(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for all labels of texts, and its answer."""
    texts = [row["text"] for row in rows]
    body = {"inputs": texts, "parameters": {"top_k": 9}}
    return body, _values(_pipeline(folder, "text-classification")(texts, top_k=9))


def tags(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for the tag of each token, and its answer."""
    texts = [" ".join(row["tokens"]) for row in rows]
    body = {"inputs": texts, "parameters": {"ignore_labels": []}}
    answers = _pipeline(folder, "token-classification", ignore_labels=[])(texts)
    return body, _values(answers)


def spans(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for answers, and these: the likeliest span of the model's two softmaxes."""
    import torch

    model, tokenizer = load(folder, "AutoModelForQuestionAnswering")
    questions = [{name: row[name] for name in ("question", "context")} for row in rows]
    answers = []
    for question in questions:
        encoded = tokenizer(question["question"], question["context"], return_tensors="pt")
        with torch.no_grad():
            output = model(**encoded)
        is_context = np.array([owner == 1 for owner in encoded.sequence_ids(0)])
        is_context[0] = True  # [CLS] stands for no answer
        start, end = (
            torch.where(torch.tensor(is_context), logits[0], -torch.inf).softmax(-1).numpy()
            for logits in (output.start_logits, output.end_logits)
        )
        start[0] = end[0] = 0.0
        scores = np.triu(start[:, None] * end[None]) - np.triu(
            np.ones((len(end),) * 2), LONGEST_ANSWER
        )
        first, last = np.unravel_index(scores.argmax(), scores.shape)
        begins, ends = (encoded.token_to_chars(int(index)) for index in (first, last))
        answers.append({
            "score": float(scores.max()), "start": begins.start, "end": ends.end,
            "answer": question["context"][begins.start : ends.end],
        })  # fmt: skip
    return {"inputs": questions}, answers


def choices(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for choices, and the model's."""
    import torch

    model, tokenizer = load(folder, "AutoModelForMultipleChoice")
    answers = []
    for row in rows:
        texts = row["choices"]
        encoded = tokenizer(
            [row["question"]] * len(texts), texts, padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            scores = model(**{name: value[None] for name, value in encoded.items()}).logits[0]
        scores = scores.softmax(-1)
        best = int(scores.argmax())
        answers.append({"choice": texts[best], "index": best, "scores": scores.tolist()})
    return {
        "inputs": [{name: row[name] for name in ("question", "choices")} for row in rows]
    }, answers


def vectors(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for vectors, and these by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    texts = [row["positive"] for row in rows]
    model = SentenceTransformer(str(folder), device="cpu")
    return {"inputs": texts}, model.encode(texts).tolist()


def ranks(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request to rank texts, and their scores by sentence-transformers, best first."""
    from sentence_transformers import CrossEncoder

    query, texts = rows[0]["query"], [text for row in rows for text in row["documents"]]
    scores = CrossEncoder(str(folder), device="cpu").predict([(query, text) for text in texts])
    ranked = sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])
    answer = [{"index": index, "score": score} for index, score in ranked]
    return {"query": query, "texts": texts}, answer


def _generate(folder: Path, kind: str, texts: Sequence[str], **options: Any) -> list[str]:
    """Return what a model generates for texts, one after another."""
    import torch

    model, tokenizer = load(folder, kind)
    prefix = getattr(model.config, "prefix", None) or ""
    generated = []
    for text in texts:
        encoded = tokenizer(prefix + text, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        with torch.no_grad():
            (output,) = model.generate(**encoded, **options)
        new = output if model.config.is_encoder_decoder else output[encoded["input_ids"].shape[1] :]
        generated.append(tokenizer.decode(new, skip_special_tokens=True))
    return generated


def written(
    source: Callable[[Row], str], key: str = "generated_text"
) -> Callable[[Path, Sequence[Row]], tuple[Any, Any]]:
    """Return what makes a request for generated texts, and these by `generate`, under `key`."""

    def answer(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
        texts = [source(row) for row in rows]
        answers = _generate(folder, "AutoModelForSeq2SeqLM", texts, **WRITTEN)
        body = {"inputs": texts, "parameters": WRITTEN}
        return body, [{key: text} for text in answers]

    return answer


def completions(prompt: Callable[[Row], str]) -> Callable[[Path, Sequence[Row]], tuple[Any, Any]]:
    """Return what makes a request for completions, and these by `generate`."""

    def answer(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
        texts = [prompt(row) for row in rows]
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        answers = _generate(folder, "AutoModelForCausalLM", texts, **options)
        parameters = {"max_new_tokens": NEW_TOKENS, "return_full_text": False}
        body = {"inputs": texts, "parameters": parameters}
        return body, [[{"generated_text": text}] for text in answers]

    return answer


def masks(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for masked words, and its answer."""
    texts = [f"{row['text']} [MASK]" for row in rows]
    return {"inputs": texts}, _values(_pipeline(folder, "fill-mask")(texts))


def images(folder: Path, rows: Sequence[Row]) -> tuple[Any, Any]:
    """Return a request for the class of an image, and its answer."""
    from PIL import Image

    image, out = Image.fromarray(rows[0]["image"]), io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue(), _values(_pipeline(folder, "image-classification")(image))
