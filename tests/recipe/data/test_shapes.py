"""Tables in the shape of public data sets: read rightly, or refused with a line that works when it is
pasted; never read as something else.

An outcome is what is read: the task, and the column of each role. `? line > outcome` is a refusal, a
line of hyperparameters that it proposes, and what follows from that line; `?` alone is a refusal that
proposes lines; `! words` one with these words.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value

from recipe import task_table
from recipe.arguments import parse
from recipe.errors import RecipeError
from recipe.plan import detection
from tests.support.shape_lines import CONFIGURATIONS, proposed_lines
from tests.support.workbooks import workbook


def described(task: str, made: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the task, and the column from which each role is read: `causal-lm text=review`.

    A role that is no column as it stands has its first value, as JSON.
    """
    # Of columns that hold the same, the one that the log says is read.
    read = " ".join(made.data.notes)
    columns = dict(sorted(_columns(rows).items(), key=lambda item: repr(item[0]) not in read))
    words = [task]
    for role in made.train.column_names:
        if role in ("place", "bytes"):  # of an image
            continue
        cells = [_shown(cell, role, made) for cell in made.train[role]]
        names = [name for name, values in columns.items() if values[: len(cells)] == cells]
        words.append(f"{role}={names[0] if names else cells[0]}")
    return " ".join(words)


def _columns(rows: Sequence[Any]) -> dict[str, list[str]]:
    flat = [dict(_flat("", row)) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    return {name: [_shown(row.get(name)) for row in flat] for name in names}


def _flat(prefix: str, row: Any) -> Iterator[tuple[str, Any]]:
    for name, value in row.items() if isinstance(row, dict) else ():
        yield f"{prefix}{name}", value
        yield from _flat(f"{prefix}{name}.", value)


def _shown(value: Any, role: str = "", made: Any = None) -> str:
    labels = getattr(getattr(made, "data", None), "labels", None)
    if role == "label" and labels is not None:
        value = labels.show(np.asarray(value).tolist()) if value is not None else value
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value[:1] in "[{" else value
        except ValueError:
            return value
    return value if isinstance(value, str) else json.dumps(value, default=str)


_WORDS = ["the", "cat", "sat", "on", "a", "mat", "in", "rome", "with", "green", "film", "house", "number", "river", "stone", "light"]  # fmt: skip
_DRAWN = random.Random(1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A table, the model that is to learn it, and its outcome."""

    model: str
    content: Callable[..., Any]
    outcome: str
    argv: str
    features: Any
    file: str
    """Empty if `content` returns the texts of files by their names, and not a row by its number."""

    def rows(self) -> list[Any]:
        """Return the rows; none if the content is files."""
        _DRAWN.seed(1)
        return [self.content(number) for number in range(24)] if self.file else []

    def read(self, folder: Path, given: Mapping[str, str]) -> tuple[str, Any]:
        """Return the task that is found and its data sets. Raises RecipeError as the job would."""
        model, data = folder / "model", folder / "train"
        for path in (model, data):
            path.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIGURATIONS[self.model]))
        rows = self.rows()
        if self.features is not None:
            table = Dataset.from_list(rows, features=Features(self.features))
            table.to_parquet(data / self.file)
        elif self.file:
            lines = map(json.dumps, rows)
            text = json.dumps(rows) if self.file.endswith(".json") else "\n".join(lines)
            (data / self.file).write_text(text)
        for name, text in ({} if self.file else self.content()).items():
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        argv = [word for key, value in given.items() for word in (f"--{key}", value)]
        parsed = parse(["--model_id", str(model), "--eval_strategy", "no", *argv])
        channels = {"train": data}
        task, _ = detection.find(parsed, channels)
        return task, task_table.load(task)(channels, dataclasses.replace(parsed, task=task))


def shape(
    name: str, model: str, row: Callable[[int], Any], outcome: str, argv: str = "",
    features: Mapping[str, Any] | None = None, file: str = "",
) -> Any:  # fmt: skip
    """Return a table of rows."""
    file = file or ("train.jsonl" if features is None else "train.parquet")
    return pytest.param(Shape(model, row, outcome, argv, features, file), id=name)


def files(name: str, model: str, content: Callable[[], Any], outcome: str, argv: str = "") -> Any:
    """Return a table of files."""
    return pytest.param(Shape(model, content, outcome, argv, None, ""), id=name)


def s(words: int = 12) -> str:
    """Return a text."""
    return " ".join(_DRAWN.choices(_WORDS, k=words))


def o(*values: Any) -> Any:
    """Return one of some values."""
    return _DRAWN.choice(values)


def chat(key="messages", r="role", c="content", u="user", a="assistant", **more):  # type: ignore[no-untyped-def]
    """Return a function that makes conversations."""
    return lambda n: {
        key: [{r: u, c: s()}, {r: a, c: s()}],
        **{name: value(n) if callable(value) else value for name, value in more.items()},
    }


def annotated(number: int) -> dict[str, Any]:
    """Return a row of Prodigy's ner.manual; each seventh was ignored."""
    if number % 7 == 3:
        return {"text": "no idea", "_input_hash": number, "answer": "ignore"}
    span = {"start": 0, "end": 3, "label": "PERSON"}
    return {"text": f"Ada {s()}", "_input_hash": number, "spans": [span], "answer": "accept"}


def tagged(**more: Any) -> Callable[[int], Any]:
    """Return a function that makes tagged words."""
    return lambda n: {"tokens": ["Ada", "sat"], "ner_tags": [1, 0], **more}


def studio(number: int, *annotations: Sequence[Any]) -> dict[str, Any]:
    """Return a task of Label Studio with the results of each annotation."""
    given = [{"id": number, "result": results, "was_cancelled": False} for results in annotations]
    return {"id": number, "data": {"text": "Ada sat"}, "annotations": given, "predictions": []}


def choices(*names: str) -> dict[str, Any]:
    """Return a result of Label Studio's choices."""
    value = {"choices": [*names]}
    return {"from_name": "mood", "to_name": "text", "type": "choices", "value": value}


def truth(kind: str, given: Any, job: str = "x-y", **about: Any) -> dict[str, Any]:
    """Return a row of a manifest of Ground Truth."""
    return {
        "source": "Ada sat",
        job: given,
        f"{job}-metadata": {"type": f"groundtruth/{kind}", **about},
    }


LABELS = {"from_name": "ner", "to_name": "text", "type": "labels",
          "value": {"start": 0, "end": 3, "text": "Ada", "labels": ["PER"]}}  # fmt: skip
ADA = "number 7 Ada sat in Rome"
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
STRINGS = List(Value("string"))
SQUAD = {"id": "1", "title": "t", "context": ADA, "question": "who sat?",
         "answers": {"text": ["Ada"], "answer_start": [9]}}  # fmt: skip
NER = {"tokens": STRINGS, "ner_tags": List(ClassLabel(names=["O", "B-PER"]))}


@pytest.mark.parametrize("shape", [
    shape("wic", "masked", lambda n:{"word":o("bank","play"),"sentence1":s(),"sentence2":s(),"start1":n%5,"end1":n%5+4,"start2":n%6,"end2":n%6+4,"label":n%2,"idx":n},
          "? task=text-classification ignore_columns=word,start1,end1,start2,end2 > text-classification text=sentence1 text_pair=sentence2 label=label"),
    shape("copa", "masked", lambda n:{"premise":s(),"choice1":s(5),"choice2":s(5),"question":o("cause","effect"),"label":n%2,"idx":n},
          "multiple-choice query=premise texts=[\"effect number the rome house on\", \"effect light stone the the with\"] scores=[1.0, 0.0]"),
    shape("winogrande", "masked", lambda n:{"sentence":s()+" _ "+s(),"option1":o("Ann","Bob"),"option2":o("Cy","Di"),"answer":str(1+n%2)},
          "? task=multiple-choice > multiple-choice query=sentence texts=[\"Ann\", \"Di\"] scores=[1.0, 0.0]"),
    shape("swag", "masked", lambda n:{"video-id":f"v{n}","startphrase":s(),"sent1":s(),"sent2":s(2),"gold-source":"gold","ending0":s(),"ending1":s(),"ending2":s(),"ending3":s(),"label":n%4},
          "multiple-choice query=sent1 texts=[\"on in the on rome rome on on on rome a the river with\", \"on in film sat light river cat mat house house stone in river film\""),
    shape("hellaswag", "masked", lambda n:{"ind":n,"activity_label":o("Baking","Tennis"),"ctx_a":s(),"ctx_b":s(2),"ctx":s(),"endings":[s() for _ in range(4)],"source_id":f"a{n}","split":"train","split_type":"indomain","label":str(n%4)},
          "multiple-choice query=ctx texts=endings scores=[1.0, 0.0, 0.0, 0.0]"),
    shape("snli", "masked", lambda n:{"premise":s(),"hypothesis":s(6),"label":(n%4)-1},
          "? missing_labels=-1 > text-classification text=stone the the with light in on in the on rome rome text_pair=on on on rome a the label=0"),
    shape("toxic sbic", "masked", lambda n:{"whoTarget":o("1.0","0.0"),"intentYN":o("1.0","0.0"),"sexYN":o("1.0","0.0"),"offensiveYN":o("1.0","0.5"),"post":s(),"targetMinority":o("","women"),"dataSource":o("reddit","twitter")},
          "? task=text-classification label_column=whoTarget,intentYN,sexYN > text-classification text=post label=whoTarget, intentYN"),
    shape("tweet_eval float labels with NaN", "masked", lambda n:{"text":s(),"label":float("nan") if n==7 else float(n%2)},
          "? missing_labels=empty > text-classification text=sat river number a rome rome film number cat the river in label=0"),
    shape("sts with NaN", "masked", lambda n:{"sentence1":s(),"sentence2":s(),"score":float("nan") if n==7 else n%6/5},
          "? task=text-classification label_column=score missing_labels=empty > text-classification text=sat river"),
    shape("sts of whole numbers", "encoder", lambda n:{"sentence1":s(),"sentence2":s(),"score":n%6},
          "? task=sentence-embedding > sentence-embedding query=sentence1 texts=[\"number the rome house on light stone the the with light in\"] scores=[0.0]"),
    shape("go_emotions", "masked", lambda n:{"text":s(),"labels":[n%5] if n%3 else [n%5,(n+1)%5],"id":f"e{n}"},
          "text-classification text=text label=0, 1"),
    shape("subj with split col", "masked", lambda n:{"text":s(),"label":n%2,"split":"train" if n%5 else "test"},
          "text-classification text=number the rome house on light stone the the with light in label=1"),
    shape("Label Studio's JSON-MIN", "masked", lambda n:{"id":n,"text":"Ada "+s(),"label":[{"start":0,"end":3,"text":"Ada","labels":["PER"]}],"annotator":1,"annotation_id":n,"created_at":"2024-01-01","lead_time":1.5},
          "token-classification tokens=[\"Ada\", \"sat\", \"river\", \"number\", \"a\", \"rome\", \"rome\", \"film\", \"number\", \"cat\", \"the\", \"river\", \"in\"] tags=[\"B-PER\", \"O\", \"O\", \"O\", "),
    shape("conll2003", "masked", lambda n:{"id":str(n),"tokens":["Ada","saw","Rome"],"pos_tags":[22,38,22],"chunk_tags":[11,21,11],"ner_tags":[1,0,5]},
          "token-classification tokens=tokens tags=[\"1\", \"0\", \"5\"]"),
    shape("gliner", "masked", lambda n:{"tokenized_text":["Ada","saw","Rome"],"ner":[[0,0,"person"],[2,2,"city"]]},
          "! Name the columns"),
    shape("triviaqa", "decoder", lambda n:{"question":s(6),"question_id":f"q{n}","answer":{"value":"Ada","aliases":["Ada L"],"type":"W"},"entity_pages":[]},
          "causal-lm prompt=question completion=answer.value"),
    shape("race", "masked", lambda n:{"example_id":f"r{n}","article":s(60),"answer":"ABCD"[n%4],"question":s(),"options":[s(3)]*4},
          "multiple-choice query=article texts=[\"sat with house film mat rome with number with in rome the the house light\", \"sat with house film mat rome with number with"),
    shape("capybara", "decoder", lambda n:{"source":"x","conversation":[{"input":s(),"output":s()}]},
          "causal-lm messages=[{\"role\": \"user\", \"content\": \"sat river number a rome rome film number cat the river in\"}, {\"role\": \"assistant\", \"content\": \"number"),
    shape("oasst tree", "decoder", lambda n:{"message_id":f"m{n}","parent_id":None,"text":s(),"role":o("prompter","assistant"),"lang":o("en","es"),"review_count":3,"rank":n%3},
          "? task=causal-lm text_column=text > causal-lm text=text"),
    shape("openr1", "decoder", lambda n:{"problem":s(),"solution":s(),"answer":str(n),"problem_type":o("Algebra","NT"),"question_type":"mcq","source":"x","generations":[s()]},
          "? task=causal-lm completion_column=solution > causal-lm prompt=problem completion=solution"),
    shape("ultrafeedback bin", "decoder", lambda n:{"prompt":"q","prompt_id":f"p{n}","chosen":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"rejected":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"messages":[{"role":"user","content":"q"},{"role":"assistant","content":s()}],"score_chosen":8.0,"score_rejected":5.0},
          "! task=dpo"),
    shape("pairs with their ratings", "decoder", lambda n: {"prompt": s(), "chosen": s(), "rejected": s(), "chosen_rating": 4.5, "rejected_rating": 1, "status": "submitted"},
          "dpo prompt=prompt chosen=chosen rejected=rejected", argv="task=dpo"),
    shape("Gemini's turns", "decoder", lambda n: {"systemInstruction": {"role": "system", "parts": [{"text": "be brief"}]}, "contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "y"}, {"text": "es"}]}]},
          'causal-lm messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'),
    shape("Gemini's turns without a system", "decoder", lambda n: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "yes"}]}]},
          'causal-lm messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]'),
    shape("Gemini's calls", "decoder", lambda n: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"functionCall": {"name": "f"}}]}]},
          "! message 1 (model, from 0) has a part that is not a text"),
    shape("texts called contents", "decoder", lambda n: {"contents": s()},
          "? task=causal-lm > causal-lm text=contents"),
    shape("ShareGPT's calls", "decoder", lambda n: {"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": null}}'}, {"from": "observation", "value": "3"}, {"from": "gpt", "value": "3!"}]},
          'causal-lm messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": null}}}]}, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3!"}]'),
    shape("LLaMA-Factory's parts", "decoder", lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}, {"role": "assistant", "content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}]}]},
          'causal-lm messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]'),
    shape("LLaMA-Factory's parts without a value", "decoder", lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}, {"role": "assistant", "content": [{"type": "reasoning", "value": None}, {"type": "text", "value": "yes"}]}]},
          "! has a part that is not a text"),
    shape("LLaMA-Factory's calls", "decoder", lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}, {"role": "assistant", "content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {}}'}]}]},
          'causal-lm messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}]'),
    shape("LLaMA-Factory's parts beside their value", "decoder", lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}, {"role": "assistant", "reasoning_content": "so", "content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}]}]},
          "! has a part that is not a text"),
    shape("LLaMA-Factory's parts in another order", "decoder", lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "value": "hi"}]}, {"role": "assistant", "content": [{"type": "text", "value": "yes"}, {"type": "reasoning", "value": "hm"}]}]},
          "! has a part that is not a text"),
    shape("shp", "decoder", lambda n:{"post_id":f"p{n}","domain":o("askx","asky"),"upvote_ratio":0.9,"history":s(20),"c_root_id_A":"a","human_ref_A":s(),"human_ref_B":s(),"labels":n%2,"score_A":5,"score_B":9},
          "?"),
    shape("kto", "decoder", lambda n:{"prompt":s(),"completion":s(),"label":n%2==0},
          "! task=kto"),
    shape("summarize feedback", "decoder", lambda n:{"info":{"id":f"t{n}","post":s(40),"title":s(4)},"summaries":[{"text":s()},{"text":s()}],"choice":n%2},
          "? task=text-classification text_column=info.title,info.post > text-classification text=info.title text_pair=info.post label=choice"),
    shape("esci", "masked", lambda n:{"query":s(3),"product_title":s(8),"esci_label":o("Exact","Irrelevant"),"product_locale":"us"},
          "text-classification text=query text_pair=product_title label=esci_label"),
    shape("ms marco v1", "masked", lambda n:{"answers":[s(3)],"passages":{"is_selected":[1,0],"passage_text":[s(),s()],"url":["a","b"]},"query":s(4),"query_id":n,"query_type":"description","wellFormedAnswers":[]},
          "? task=reranking > reranking text=on rome rome on text_pair=a rome rome film number cat the river in number the rome label=1"),
    shape("opus", "t5", lambda n:{"id":str(n),"translation":{"en":s(),"fr":s()}},
          "? task=translation source_lang=en target_lang=fr > translation source=translation.en target=translation.fr"),
    shape("images beside", "decoder", chat("messages",images=lambda n:["a.jpg"]),
          "! script of your own"),
    shape("boolq", "masked", lambda n: {"question": s(), "answer": n % 2 == 0, "passage": s()},
          "? task=text-classification label_column=answer > text-classification text=question text_pair=passage label=True"),
    shape("Prodigy's spans", "masked", annotated,
          "token-classification tokens=[\"Ada\", \"sat\""),
    shape("Prodigy's one class", "masked", lambda n: {"text": s(), "label": "SPORT", "_input_hash": n, "answer": ["accept", "reject", "ignore"][n % 3]},
          "text-classification text=sat river number a rome rome film number cat the river in label=accept"),
    shape("Prodigy's one class, with what its interface shows", "masked", lambda n: {"text": s(), "label": "SPORT", "spans": [], "meta": {"score": n / 50}, "score": n / 50, "_input_hash": n, "answer": o("accept", "reject")},
          "text-classification text=text label=answer"),
    shape("Prodigy's answers beside lists of labels", "masked", lambda n: {"text": s(), "label": [o("A", "B")], "_input_hash": n, "answer": "accept"},
          "! with the decision of annotators on each row"),
    shape("Prodigy's answers without a class", "masked", lambda n: {"text": s(), "_input_hash": n, "answer": o("accept", "reject")},
          "? label_column=answer missing_labels=ignore > text-classification text=text label=answer"),
    shape("Prodigy's choices", "masked", lambda n: {"text": s(), "options": [{"id": "A", "text": "a"}, {"id": "B", "text": "b"}], "accept": ["AB"[n % 2]], "_task_hash": n, "answer": ["accept", "reject"][n % 5 == 0]},
          "? task=text-classification label_column=accept > text-classification text=number the rome"),
    shape("Prodigy's choices of a word", "masked", lambda n: {"text": s(), "_input_hash": n, "options": [{"id": "WATER", "text": "WATER"}], "accept": [o("WATER", "ROADS")], "answer": "accept"},
          "? task=text-classification label_column=accept > text-classification text=text label=WATER"),
    shape("Prodigy's relations", "masked", lambda n: {**annotated(n), "relations": [{"head": 0, "child": 2, "label": "IN"}]},
          "? task=token-classification ignore_columns=relations > token-classification tokens=[\"Ada\""),
    shape("Prodigy's relations, none of them made", "masked", lambda n: {**annotated(n), "relations": []},
          "token-classification tokens=[\"Ada\""),
    shape("Argilla's responses", "masked", lambda n: {"id": f"r{n}", "status": o("completed", "pending"), "text": s(), "calidad": {"responses": [o("alta", "baja")], "responses.users": [f"u{n}"], "suggestion": o("alta", "baja"), "suggestion.agent": o("a", "b")}},
          "? task=text-classification label_column=calidad.responses > text-classification text=text label="),
    shape("Argilla's suggestions alone", "masked", lambda n: {"text": s(), "topic": {"suggestion": o("a", "b")}},
          "text-classification text=text label=topic.suggestion"),
    shape("tags between spaces", "masked", lambda n: {"words": "Ada sat", "slots": "B-PER O"},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    shape("spans of other keys", "masked", lambda n: {"text": "Ada sat", "entities": [{"name": "Ada", "span": [0, 3], "type": "PER"}]},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    shape("answers without their places", "masked", lambda n: {"question": s(), "context": f"Ada sat in house {n + 30}", "answer": f"house {n + 30}" if n % 4 else "nowhere"},
          "? task=question-answering > question-answering"),
    shape("a label, and other classes", "masked", lambda n: {"text": s(), "label": n % 2, "category": o("a", "b"), "rating": n % 5},
          "text-classification text=text label=label"),
    shape("a corrected label", "masked", lambda n: {"text": s(), "label": n % 2, "corrected_label": n % 3},
          "? task=text-classification text_column=text label_column=label > text-classification text=text label=label"),
    shape("a label that is always the same", "decoder", lambda n: {"id": n, "by": "ann", "text": s(), "type": "comment"},
          "? task=causal-lm > causal-lm text=text"),
    shape("a page and its address", "masked", lambda n: {"text": s(), "timestamp": f"2024-01-{n + 1}T00:00", "url": f"https://example.org/{n}"},
          "masked-lm text=text"),
    shape("answers that are judged in Dutch", "decoder", lambda n: {"vraag": s(), "antwoord": s(), "duim_omhoog": n % 2},
          "? task=causal-lm prompt_column=vraag completion_column=antwoord ignore_columns=duim_omhoog > causal-lm prompt=vraag completion=antwoord"),
    shape("a title in Indonesian", "masked", lambda n: {"Judul": s(3), "Isi Berita": s(), "Kategori": o("a", "b")},
          "text-classification text=Judul text_pair=Isi Berita label=Kategori"),
    shape("Mechanical Turk", "masked", lambda n: {"HITId": f"h{n}", "Title": "Judge a review", "Keywords": "a, b", "Input.review": s(), "Answer.mood": o("good", "bad")},
          "text-classification text=Input.review label=Answer.mood"),
    shape("Mechanical Turk, with a split", "masked", lambda n: {"HITId": f"h{n}", "Input.text": s(), "Answer.label": o("good", "bad"), "split": ["train", "train", "test"][n % 3]},
          "? task=text-classification text_column=Input.text label_column=Answer.label > text-classification text=sat river number a rome rome film number cat the river in label=good"),
    shape("texts beside a column of an answer", "masked", lambda n: {"text": s(), "label": o("good", "bad"), "Input.x": "a", "Answer.y": "b"},
          "? task=text-classification ignore_columns=Answer.y > text-classification text=text label=label"),
    shape("labels with values", "masked", lambda n: {"text": s(), "labels": [{"name": "a", "value": n / 50}, {"name": "b", "value": 0.9}]},
          "! is data of token classification"),
    files("a source and its target, for a decoder", "decoder", lambda: {"source.txt": "Hello there, friend.\n" * 3, "target.txt": "Hallo, mein Freund.\n" * 3},
          "! is a plain text, without a label"),
    files("TREC, for a decoder", "decoder", lambda: {"train.txt": "".join(f"{k} How did number {n} develop ?\n" for n in range(9) for k in ("DESC:manner", "ENTY:animal"))},
          "! is a plain text, without a label"),
    shape("Toloka", "masked", lambda n: {"INPUT:text": s(), "OUTPUT:mood": o("good", "bad"), "GOLDEN:result": "", "HINT:text": "", "ASSIGNMENT:worker_id": f"w{n}"},
          "text-classification text=INPUT:text label=OUTPUT:mood"),
    shape("a survey", "masked", lambda n: {"Abteilung": o("a", "b"), "Zufriedenheit (1-5)": 1 + n % 5, "Was können wir verbessern?": s()},
          "! text_column='Was können wir verbessern?' label_column='Zufriedenheit (1-5)' ("),
    shape("fake news", "encoder", lambda n: {"title": s(5), "text": s(), "subject": o("politics", "world"), "date": f"December {1 + n % 30}, 2017"},
          "? task=text-classification text_column=title,text label_column=subject > text-classification text=title text_pair=text label=subject"),
    shape("ag_news", "masked", lambda n: {"Class Index": 1 + n % 4, "Title": s(6), "Description": s()},
          "text-classification text=Title text_pair=Description label=Class Index"),
    shape("commonsense_qa", "masked", lambda n: {"id": str(n), "question": {"stem": s(), "question_concept": "sun", "choices": [{"text": o("sun", "air"), "label": letter} for letter in "ABCD"]}, "answerKey": "ABCD"[n % 4]},
          "multiple-choice query=question.stem texts=[\"sun\", \"air\", \"air\", \"sun\"] scores=[1.0, 0.0, 0.0, 0.0]"),
    shape("choices that are numbers", "masked", lambda n: {"question": s(), "option_1": n, "option_2": n + 1, "answer": n % 2},
          "! fewer than two choices"),
    shape("wikiann", "masked", tagged(langs=["en", "en"], spans=["PER: Ada"]),
          "token-classification tokens=tokens tags=[\"B-PER\", \"O\"]", features={**NER, "langs": STRINGS, "spans": STRINGS}),
    shape("universal_dependencies", "masked", lambda n: {"text": "Ada sat", "tokens": ["Ada", "sat"], "lemmas": ["a", "b"], "upos": [0, 1], "head": ["1", "0"]},
          "token-classification tokens=tokens tags=[\"PROPN\", \"VERB\"]", features={"text": Value("string"), "tokens": STRINGS, "lemmas": STRINGS, "upos": List(ClassLabel(names=["PROPN", "VERB"])), "head": STRINGS}),
    shape("doccano", "masked", lambda n: {"id": n, "text": ADA, "label": [[9, 12, "PER"]]},
          "token-classification tokens=[\"number\", \"7\", \"Ada\", \"sat\", \"in\", \"Rome\"] tags=[\"O\", \"O\", \"B-PER\", \"O\", \"O\", \"O\"]"),
    shape("spans, though classes are asked for", "masked", lambda n: {"text": ADA, "label": [[9, 12, "PER"]]},
          "! Give task=token-classification", argv="task=text-classification"),
    shape("lists of other lengths", "masked", lambda n: {"Sentence": ADA, "Tag": "['O', 'B-PER']"},
          "! no spans that can be read", argv="task=token-classification"),
    shape("squad with another context", "masked", lambda n: {**SQUAD, "paragraph": s()},
          "? task=question-answering columns=context:context > question-answering id=id question=question context=context answers=answers.text starts=answers.answer_start"),
    shape("mrqa", "masked", lambda n: {"context": ADA, "qid": str(n), "question": "who sat?", "detected_answers": {"text": ["Ada"]}, "answers": ["Ada"]},
          "! would not be read by question-answering", argv="task=question-answering"),
    shape("duorc", "masked", lambda n: {"plot": s(30), "question": "who?", "answers": ["Ada"]},
          "? task=sentence-embedding text_column=question,answers > sentence-embedding query=question texts=answers scores=[1.0]"),
    shape("tevatron", "masked", lambda n: { "query_id": str(n), "query": f"q {n}", "positive_passages": [{"docid": "1", "title": "T", "text": "yes"}], "negative_passages": [{"docid": "2", "title": "T", "text": "no"}], },
          "sentence-embedding query=query texts=[\"T yes\", \"T no\"] scores=[1.0, 0.0]"),
    shape("bge", "masked", lambda n: {"query": f"q {n}", "pos": ["yes"], "neg": ["no", "not"], "pos_scores": [1.0], "neg_scores": [0.1, 0.2], "prompt": "find"},
          "sentence-embedding query=query texts=[\"yes\", \"no\", \"not\"] scores=[1.0, 0.0, 0.0]"),
    shape("wiki_qa", "classifier", lambda n: {"question": f"q {n // 2}", "answer": f"a {n}", "label": n % 2},
          "reranking text=question text_pair=answer label=label", argv="task=reranking", features={"question": Value("string"), "answer": Value("string"), "label": ClassLabel(names=["0", "1"])}),
    shape("mrpc, again", "classifier", lambda n: {"sentence1": s(), "sentence2": s(), "label": n % 2},
          "! must hold numbers", argv="task=reranking", features={"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=["not_equivalent", "equivalent"])}),
    shape("ms_marco", "classifier", lambda n: { "answers": ["x"], "query": f"q {n}", "query_id": n, "wellFormedAnswers": ["x"], "passages": {"is_selected": [0, 1], "passage_text": ["no", "yes"], "url": ["a", "b"]}, },
          "reranking text=q 0 text_pair=no label=0"),
    shape("a corpus of BEIR", "masked", lambda n: {"_id": f"d{n}", "title": f"t {n}", "text": "it"},
          "sentence-embedding query=title texts=[\"it\"] scores=[1.0]", argv="task=sentence-embedding"),
    shape("pairs of three grades, named", "masked", lambda n: {"sentence1": "a", "sentence2": "b", "label": n % 3},
          "sentence-embedding query=sentence1 texts=[\"b\"] scores=[0.0]", argv="task=sentence-embedding label_column=label"),
    shape("pairs with distances", "masked", lambda n: {"sentence1": s(), "sentence2": s(), "distance": n / 99},
          "? ignore_columns=distance > sentence-embedding query=sentence1 texts=[\"number the rome house on light stone the the with light in\"] scores=[1.0]", argv="task=sentence-embedding"),
    shape("qmsum", "t5", lambda n: {"document": "long", "query": s(), "summary": "short"},
          "? task=summarization ignore_columns=query > summarization source=document target=summary"),
    shape("aya collection, several languages", "t5", lambda n: {"inputs": "cat", "targets": "chat", "target_lang": ["fra", "deu"][n % 2]},
          "? text_column=inputs > translation source=inputs target=targets", argv="task=translation"),
    shape("one direction of several", "t5", lambda n: {"source": "cat", "target": "chat", "target_lang": "fra"},
          "translation source=source target=target", argv="task=translation"),
    shape("openbookqa", "classifier", lambda n: {"question": s(), "choices": {"text": [*"abcd"], "label": [*"ABCD"]}, "answerKey": "ABCD"[n % 4]},
          "multiple-choice query=question texts=choices.text scores=[1.0, 0.0, 0.0, 0.0]"),
    shape("arc in a CSV", "classifier", lambda n: {"question": s(), "choices": str({"text": [*"ab"]}), "answerKey": "AB"[n % 2]},
          "! does not hold lists of texts. Write rows "),
    shape("kto for a language model", "decoder", lambda n: {"prompt": f"hi {n}", "completion": f"yes {n}", "label": n % 2 == 1},
          "! task=kto", argv="task=causal-lm"),
    shape("a completion and a rejected one", "decoder", lambda n: {"prompt": s(), "completion": s(), "rejected": s()},
          "? task=causal-lm ignore_columns=rejected > causal-lm prompt=prompt completion=completion"),
    shape("completions that are missing", "decoder", lambda n: {"prompt": f"hi {n}", "completion": [None, " ", "yes"][n % 3]},
          "causal-lm prompt=hi 2 completion=yes"),
    shape("no completion at all", "decoder", lambda n: {"prompt": f"hi {n}", "completion": ""},
          "! no completion in any row", argv="task=causal-lm"),
    shape("medical o1", "decoder", lambda n: {"Question": s(), "Complex_CoT": s(), "Response": s()},
          "? task=causal-lm ignore_columns=Complex_CoT > causal-lm prompt=Question completion=Response"),
    shape("LLaMA-Factory's pairs", "decoder", lambda n: {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
          '? task=dpo > dpo chosen=[{"role": "assistant", "content": "yes"}] rejected=[{"role": "assistant", "content": "no"}] prompt=[{"role": "user", "content": "hi"}]'),
    shape("OpenAI's pairs", "decoder", lambda n: {"input": {"messages": TURNS[:1], "tools": [], "parallel_tool_calls": True}, "preferred_output": TURNS[1:], "non_preferred_output": [{"role": "assistant", "content": "no"}]},
          "? task=dpo > dpo chosen=preferred_output rejected=non_preferred_output prompt=input.messages"),
    shape("OpenAI's pairs with tools", "decoder", lambda n: {"input": {"messages": TURNS[:1], "tools": [{"name": "f"}]}, "preferred_output": TURNS[1:], "non_preferred_output": [{"role": "assistant", "content": "no"}]},
          "! would not be read by dpo", argv="task=dpo"),
    shape("pairs of equal answers", "decoder", lambda n: {"prompt": s(), "chosen": "yes", "rejected": o("yes", "no")},
          "! have equal chosen and rejected answers, such as"),
    shape("pairs after an answer", "decoder", lambda n: {"messages": TURNS, "chosen": "yes", "rejected": "no"},
          "! a conversation that ends with an answer", argv="task=dpo"),
    shape("pairs of other conversations", "decoder", lambda n: {"messages": [{"role": "user", "content": "why"}], "chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "no"}]},
          "! different prompts", argv="task=dpo"),
    shape("Alpaca's pairs", "decoder", lambda n: {"instruction": "sum", "input": "" if n % 2 else "1 2", "chosen": "3", "rejected": "4"},
          "? task=dpo > dpo prompt=Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately completes the request.\n\n### Instruction:\nsum\n\n### Input:\n1 2\n\n### Response: chosen=chosen"),
    shape("Alpaca's pairs of messages", "decoder", lambda n: {"instruction": "sum", "input": "1 2", "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "no"}]},
          'dpo prompt=[{"role": "user", "content": "sum\\n1 2"}] chosen=chosen', argv="task=dpo"),
    shape("pairs by other names", "decoder", lambda n: {"ticket": n, "customer_message": s(), "better_reply": s(), "worse_reply": s(), "reviewer": o("Ann", "Bob"), "comment": s() if n % 3 else ""},
          "? task=dpo prompt_column=customer_message columns=chosen:better_reply,rejected:worse_reply > dpo prompt=customer_message chosen=better_reply rejected=worse_reply"),
    shape("pairs in Dutch, by the task", "decoder", lambda n: {"klantvraag": s(), "gekozen_antwoord": s(), "afgewezen_antwoord": s()},
          "? prompt_column=klantvraag columns=chosen:gekozen_antwoord,rejected:afgewezen_antwoord > dpo prompt=klantvraag chosen=gekozen_antwoord rejected=afgewezen_antwoord", argv="task=dpo"),
    shape("judged conversations", "decoder", chat(label=lambda n: n % 2 == 0),
          "? task=kto > kto label=label prompt=[{"),
    shape("LLaMA-Factory's judgements", "decoder", chat("conversations", r="from", c="value", u="human", a="gpt", kto_tag=lambda n: n % 2 == 0),
          "? task=kto > kto label=kto_tag prompt=[{"),
    shape("a flag beside directions", "decoder", lambda n: {"title": s(3), "ingredients": s(), "directions": s(), "vegan": n % 2 == 0},
          "? task=causal-lm prompt_column=ingredients completion_column=directions ignore_columns=vegan > causal-lm prompt=ingredients completion=directions"),
    shape("judged lists of messages", "decoder", lambda n: {"prompt": TURNS[:1], "completion": TURNS[1:], "label": n % 2 == 0},
          "? task=kto > kto prompt=prompt completion=completion label=label"),
    shape("a judged answer without a prompt", "decoder", lambda n: {"messages": TURNS[1:], "label": n % 2 == 0},
          "! have no prompt", argv="task=kto"),
    shape("thumbs of 1 and -1", "decoder", lambda n: {"id": n, "type": "rating", "prompt": s(), "response": s(), "rating": n % 2 * 2 - 1},
          "? task=kto > kto prompt=prompt completion=response label=false"),
    shape("thumbs of 1, 0 and -1", "decoder", lambda n: {"prompt": s(), "response": s(), "rating": n % 3 - 1},
          "! no label of true and false, but '-1'", argv="task=kto label_column=rating"),
    files("thumbs of files that differ", "decoder", lambda: {f"{low}.csv": "prompt,completion,label\n" + "".join(f"{s()},{s()},{(1, low)[n % 2]}\n" for n in range(24)) for low in (0, -1)},
          "! judge answers by different words: -1, 0, 1", argv="task=kto"),
    files("thumbs, one in each file", "decoder", lambda: {f"{high}.csv": "prompt,completion,label\n" + "".join(f"{s()},{s()},{high}\n" for n in range(24)) for high in (1, -1)},
          "kto prompt=", argv="task=kto"),
    files("answers that are good or bad", "decoder", lambda: {"a.csv": "질문,답변,평가,평가자\n" + "".join(f"{s()},{s()},{('bad', 'good')[n % 2]},김민수\n" for n in range(24))},
          "? task=kto prompt_column=질문 completion_column=답변 label_column=평가 > kto prompt="),
    shape("cifar100", "vit", lambda n: {"img": {"bytes": b"\x89PNG", "path": None}, "fine_label": n % 3, "coarse_label": n % 2},
          "? task=image-classification label_column=fine_label > image-classification file=img.path label=a", features={"img": Image(decode=False), "fine_label": ClassLabel(names=[*"abc"]), "coarse_label": ClassLabel(names=[*"ab"])}),
    shape("addresses of pictures", "vit", lambda n: {"image": f"http://a/{n}.jpg", "label": n % 2},
          "! names the image"),
    shape("question and long answer", "decoder", lambda n: {'question': s(), 'long_answer': s()},
          "causal-lm prompt=question completion=long_answer", argv="task=causal-lm"),
    shape("text and summary for an encoder", "masked", lambda n: {'text': s(), 'summary': s()},
          "? task=masked-lm text_column=text > masked-lm text=text"),
    shape("trees of replies", "decoder", lambda n: {'message_tree_id': str(n), 'prompt': {'text': s(), 'role': 'prompter', 'replies': [{'text': s(), 'role': 'assistant'}]}},
          "? text_column=prompt.text > causal-lm text=prompt.text", argv="task=causal-lm"),
    shape("a student's answer", "masked", lambda n: {'question': s(), 'reference_answer': s(), 'student_answer': s(), 'score': n / 4},
          "! 'reference_answer'"),
    shape("tokens with their texts", "masked", lambda n: {'tokens': ['a', 'b'], 'ner_tags': ['O', o('B-X', 'O')], 'raw_text': 'a b', 'full_text': 'a b'},
          "token-classification tokens=tokens tags=ner_tags"),
    shape("a dialogue, a question and choices", "masked", lambda n: {'dialogue': ['M: hi', 'W: yes'], 'question': s(), 'choice': [*'abc'], 'answer': 'a'},
          "? task=text-classification ignore_columns=dialogue > text-classification text=question text_pair=answer label=a, b, c"),
    shape("boxes of objects", "vit", lambda n: {'image': 'a.png', 'label': o('cat', 'dog'), 'xmin': 1, 'ymin': 1, 'xmax': 3, 'ymax': 3},
          "? task=image-classification ignore_columns=xmin > ! there is no file"),
    shape("a summary in a list", "t5", lambda n: {'id': n, 'text': s(), 'label': [f'{s()} {n}']},
          "! classes that no two lists share"),
    shape("rewards of steps", "decoder", lambda n: {'prompt': s(), 'completions': [s(), s()], 'labels': [True, n % 2 == 0]},
          "! Name the columns"),
    shape("a prompt that holds the answer", "decoder", lambda n: {'instruction': f'do {n}', 'input': '', 'output': f'it is done {n}', 'prompt': f'### Instruction: do {n} ### Response: it is done {n}'},
          "causal-lm prompt=Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\ndo 0\n\n### Response:"),
    shape("a prompt that holds the answer, named", "decoder", lambda n: {'instruction': f'do {n}', 'output': f'it is done {n}', 'prompt': f'### Instruction: do {n} ### Response: it is done {n}'},
          "? task=causal-lm text_column=prompt > ?", argv="prompt_column=prompt completion_column=output"),
    shape("a prompt that holds the answer, alone", "decoder", lambda n: {'prompt': f'### Instruction: do {n} ### Response: it is done {n}', 'completion': f'it is done {n}'},
          "? task=causal-lm text_column=prompt > causal-lm text=prompt"),
    shape("a prompt that lists the choices", "decoder", lambda n: {'prompt': f'{s()}? yes or no', 'completion': o('yes', 'no')},
          "causal-lm prompt=prompt completion=completion"),
    shape("tokens with masked labels", "decoder", lambda n: {'input_ids': [5, 6, 7, 8], 'attention_mask': [1, 1, 1, 1], 'labels': [-100, -100, 7, 8]},
          "? task=causal-lm ignore_columns=labels > causal-lm input_ids=input_ids"),
    shape("details of learned tokens", "decoder", lambda n: {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes it is', 'train_detail': [{'begin_offset': 0, 'end_offset': 2, 'train': False}]}]},
          "! train_detail"),
    *(
        shape(f"a turn with {key}={value}", "decoder", lambda n, role=role, key=key, value=value: {'messages': [{**turn, key: value} if turn['role'] == role else turn for turn in TURNS]},
              f"! {key}={json.dumps(value)}")
        for role, key, value in [('assistant', 'loss', False), ('assistant', 'masked', True), ('assistant', 'weight', 0.5), ('assistant', 'train', 'false'), ('user', 'train', True)]
    ),
    *(
        shape(f"tokens with {name}", "decoder", lambda n, name=name, value=value: {'input_ids': [5, 6, 7], name: value},
              f"? task=causal-lm ignore_columns={name} > causal-lm input_ids=input_ids")
        for name, value in [('loss_weights', [0, 0, 1]), ('target_ids', [6, 7, 8]), ('position_ids', [0, 1, 0]), ('prompt_length', 2)]
    ),
    shape("tokens of another name", "decoder", lambda n: {'ids': [5, 6, 7]},
          "causal-lm input_ids=ids", argv="task=causal-lm columns=input_ids:ids"),
    shape("minus one, zero and one", "masked", lambda n: {'text': s(), 'label': n % 3 - 1},
          "? problem_type=single_label_classification > text-classification text=text label=label"),
    shape("minus one and one", "masked", lambda n: {'text': s(), 'label': n % 2 * 2 - 1},
          "text-classification text=text label=label"),
    shape("plus, zero and minus", "masked", lambda n: {'text': s(), 'label': '+0-'[n % 3]},
          "text-classification text=text label=label"),
    shape("NA as a class", "masked", lambda n: {'text': s(), 'label': ['NA', 'EU', 'AS'][n % 3]},
          "? problem_type=single_label_classification > text-classification text=text label=label"),
    shape("MySQL's null as a class", "masked", lambda n: {'text': s(), 'label': ['\\N', 'yes', 'no'][n % 3]},
          "? missing_labels=\\N > text-classification text=number the rome house on light stone the the with light in label=yes"),
    shape("file names as texts", "masked", lambda n: {'text': f'{n}.txt', 'label': n % 2},
          "! names files"),
    shape("sentences as classes", "masked", lambda n: {'text': s(), 'label': f'{s()} {n}'},
          "? problem_type=single_label_classification > text-classification text=text label=label"),
    shape("lists of offsets as classes", "masked", lambda n: {'text': s(), 'label': [n % 5, n % 5 + 4]},
          "? problem_type=multi_label_classification > text-classification text=text label=0, 4"),
    shape("offsets of toxic characters", "masked", lambda n: {'text': s(), 'spans': [*range(n % 5, n % 5 + 4)]},
          "! no spans that can be read"),
    shape("columns that differ in case", "masked", lambda n: {'text': s(), 'label': n % 2, 'Label': n % 3},
          "? task=text-classification label_column=label > text-classification text=text label=label"),
    shape("tags with underscores", "masked", lambda n: {'tokens': ['Ada', 'sat'], 'ner_tags': ['B_PER', 'O']},
          "! which are not entities"),
    *(
        shape(f"tags such as {tag} and {other}", "masked", lambda n, tag=tag, other=other: {'tokens': ['Ada', 'sat'], 'ner_tags': [tag, other]},
              "! which are not entities")
        for tag, other in [('B:PER', 'O'), ('B-PER', 'o'), ('B-PER', 'LOC')]
    ),
    shape("entities without words outside", "masked", lambda n: {'tokens': ['Ada', 'Rome'], 'ner_tags': ['S-PER', 'S-LOC']},
          "token-classification tokens=tokens tags=[\"B-PER\", \"B-LOC\"]"),
    shape("words that begin with their language", "masked", lambda n: {'tokens': ['en:Ada', 'en:sat'], 'ner_tags': ['B-PER', 'O']},
          "! sed -i 's/^en://' train.jsonl"),
    shape("tags without positions", "masked", lambda n: {'tokens': ['Ada', 'sat'], 'ner_tags': ['PER', 'O']},
          "token-classification tokens=tokens tags=ner_tags"),
    shape("decimal codes", "masked", lambda n: {'text': s(), 'label': ['401.9', '3.10', '250.00'][n % 3]},
          "! a letter in front: c250.00"),
    shape("decimal codes as numbers", "masked", lambda n: {'text': s(), 'label': ['401.9', '3.10', '250.00'][n % 3]},
          "? problem_type=regression > text-classification text=text label=401.9"),
    shape("lists of codes", "masked", lambda n: {'text': s(), 'label': [['401.9'], ['3.10', '401.9']][n % 2]},
          "! Write codes with a letter in front"),
    shape("null in a list of labels", "masked", lambda n: {'text': s(), 'labels': [o('a', 'b'), None] if n == 5 else [o('a', 'b')]},
          "! null] in column 'labels'"),
    shape("a list as one class", "masked", lambda n: {'text': s(), 'label': [['a'], ['b', 'c']][n % 2]},
          "! not a class", argv="problem_type=single_label_classification"),
    shape("content parts of text", "decoder", lambda n: {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'hi'}]}, {'role': 'assistant', 'content': [{'type': 'text', 'text': 'yes'}]}]},
          "causal-lm messages=[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"yes\"}]"),
    shape("null content of a tool call", "decoder", lambda n: {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': None, 'tool_calls': [{'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]}, {'role': 'tool', 'content': '1'}, {'role': 'assistant', 'content': 'yes'}], 'tools': '[{"type": "function", "function": {"name": "f"}}]'},
          "causal-lm messages={\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"type\": \"function\", \"function\": {\"name\""),
    shape("smoothing chooses no task", "masked", lambda n: {'text': s(), 'label': n % 2},
          "text-classification text=text label=label", argv="label_smoothing_factor=0.1"),
    shape("three texts", "masked", lambda n: {'premise': s(), 'said': s(), 'heard': s(), 'label': n % 2},
          "? task=text-classification text_column=premise > text-classification text=premise label=label"),
    shape("anchor and target", "masked", lambda n: {'id': n, 'anchor': s(), 'target': s(), 'score': n / 60},
          "sentence-embedding query=anchor texts=[\"number the rome house on light stone the the with light in\"] scores=[0.0]"),
    shape("subject and category", "masked", lambda n: {'subject': s(), 'category': o('Home', 'Garden'), 'label': n % 2},
          "text-classification text=subject label=label"),
    shape("translations by language", "t5", lambda n: {'en': s(), 'de': s()},
          "translation source=en target=de", argv="source_lang=en target_lang=de"),
    shape("lists to rerank", "classifier", lambda n: {'query': s(), 'documents': [s(), s()], 'labels': [1, 0]},
          "reranking text=sat river number a rome rome film number cat the river in text_pair=number the rome house on light stone the the with light in label=1"),
    files("pandas' positions as a header", "masked", lambda: {'train.csv': '0,1\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24))},
          "? task=text-classification text_column=0 label_column=1 > text-classification"),
    files("a first row whose label occurs nowhere else", "masked", lambda: {'train.csv': 'so it goes on,neutral\n' + ''.join(f'{s()},{o("good", "bad")}\n' for n in range(24))},
          "? header=false task=text-classification text_column=column_0 label_column=column_1 > text-classification text=so it goes on label=neutral"),
    files("a first row that occurs again", "masked", lambda: {'train.tsv': ''.join(f'{s() if n % 9 else "so it goes on"}\t{"good" if n % 2 else "poor"}\n' for n in range(24))},
          "? header=false task=text-classification text_column=column_0 label_column=column_1 > text-classification text=so it goes on label=poor"),
    files("indices of pandas, written twice", "masked", lambda: {'train.csv': ',Unnamed: 0,text,label\n' + ''.join(f'{n},{n},{s()},{n % 2}\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("blanks around the names of columns", "masked", lambda: {'train.tsv': 'id\ttext \t label\n' + ''.join(f'{n}\t{s()}\t{n % 2}\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("a survey of Qualtrics", "masked", lambda: {'train.csv': 'ResponseId,Q2,Q2 - Sentiment\nResponse ID,How was it?,How was it? - Sentiment\n"{""ImportId"":""_recordId""}","{""ImportId"":""QID2_TEXT""}","{""ImportId"":""QID2_S""}"\n' + ''.join(f'R_{n},{s()},{o("Good", "Bad")}\n' for n in range(24))},
          "? task=text-classification text_column=Q2 > text-classification text="),
    files("texts that are rewritten", "t5", lambda: {'train.csv': 'shipment_id,raw_address,clean_address,verified_by\n' + ''.join(f'{n},{n} main st apt{n % 9} boston,"{n} Main Street, Boston",lena{n}\n' for n in range(24))},
          "? task=text2text-generation text_column=raw_address label_column=clean_address > text2text-generation source=0 main st apt0 boston"),
    files("lettered choices, and the right one", "masked", lambda: {'train.csv': 'id,text,question,A,B,correct,alternative\n' + ''.join(f'{n},{s()},{s()}?,{n} in Rome ,{n} at home ,{n} at home,B\n' for n in range(24))},
          "? task=multiple-choice > multiple-choice query=sat river"),
    files("a header of unknown names", "masked", lambda: {'train.csv': 'v1,v2\n' + ''.join(f'{o("ham", "spam")},{s()}\n' for n in range(24))},
          "? task=text-classification text_column=v2 label_column=v1 > text-classification"),
    files("a header of known names", "masked", lambda: {'train.csv': 'id,Review Text,Rating\n' + ''.join(f'{n},{s()},{n % 3}\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("no header", "masked", lambda: {'train.csv': ''.join(f'{o("ham", "spam")},{s()}\n' for n in range(24))},
          "? header=false task=text-classification text_column=column_1 label_column=column_0 > text-classification text=green number cat cat number rome in on rome stone in green label=ham"),
    files("triples without a header", "masked", lambda: {'train.csv': ''.join(f'{s()},{s()},{o("yes", "no")}\n' for n in range(24))},
          "? header=false task=text-classification text_column=column_0,column_1 label_column=column_2 > text-classification text=sat river number a rome rome film number cat the river in text_pair=number"),
    files("a file for each class", "masked", lambda: {'Fake.csv': 'title,text,subject,date\n' + ''.join(f'{s(2)},{s()},{o("News", "politics")},2017\n' for n in range(24)), 'True.csv': 'title,text,subject,date\n' + ''.join(f'{s(2)},{s()},{o("politicsNews", "worldnews")},2017\n' for n in range(24))},
          "? problem_type=single_label_classification > text-classification text=number a rome rome film number cat the river in number the label=politics", argv="task=text-classification text_column=text label_column=subject"),
    files("predictions beside the data", "masked", lambda: {'train.csv': 'text,label\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24)), 'test_predictions.csv': 'text,label\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("labels of the test in a file", "masked", lambda: {'train.csv': 'id,text,label\n' + ''.join(f'{n},{s()},{n % 2}\n' for n in range(24)), 'test.csv': 'id,text\n' + ''.join(f'{n},{s()}\n' for n in range(24)), 'test_labels.csv': 'id,label\n' + ''.join(f'{n},{n % 2}\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("labels of the test that are -1 in some columns", "masked", lambda: {'train.csv': 'text,a,b\n' + ''.join(f'{s()},{n % 2},{n % 3 // 2}\n' for n in range(24)), 'test.csv': 'text,a,b\n' + ''.join(f'{s()},{n % 3 - 1},{n % 3 - 1}\n' for n in range(24))},
          "? missing_labels=-1 > text-classification text=sat river number a rome rome film number cat the river in label=(none)", argv="label_column=a,b"),
    files("a class called as splits are", "masked", lambda: {'train.csv': 'text,label\n' + ''.join(f'{s()},{o("Training", "Development")}\n' for n in range(24))},
          "? label_column=label > text-classification"),
    files("folders of texts", "masked", lambda: {f'{name}/{n}.txt': s() for name in ('train', 'pos', 'neg') for n in range(8)},
          "! path.parts[1]"),
    files("JSON of columns by split", "masked", lambda: {'rows.json': json.dumps({name: {'text': [s() for _ in range(24)], 'label': [n % 2 for n in range(24)]} for name in ('train', 'test')})},
          "! not a list of rows"),
    files("fastText's lines", "masked", lambda: {'train.txt': ''.join(f'__label__{n % 2} {s()}\n' for n in range(24))},
          "! label_separator=; if lines have several labels"),
    shape("a title and notes", "masked", lambda n: {'title': s(), 'notes': s(), 'label': n % 2},
          "? task=text-classification text_column=title,notes > text-classification text=title text_pair=notes label=label"),
    shape("an aspect term", "masked", lambda n: {'sentence': s(), 'Aspect Term': o('food', 'staff'), 'label': n % 2},
          "? task=text-classification ignore_columns=Aspect Term > text-classification text=sentence label=label"),
    shape("social_i_qa", "masked", lambda n: {'context': s(), 'question': s(), 'answerA': s(2), 'answerB': s(2), 'answerC': s(2), 'label': str(1 + n % 3)},
          "multiple-choice query=context texts=[\"number the rome house on light stone the the with light in on in\", \"number the rome house on light stone the the with ligh"),
    shape("options and a correct answer", "masked", lambda n: {'Question': s(), 'Option A': s(2), 'Option B': s(2), 'Correct Answer': 'AB'[n % 2]},
          "multiple-choice query=Question texts=[\"number the\", \"rome house\"] scores=[1.0, 0.0]"),
    shape("a context and a response", "decoder", lambda n: {'Context': s(), 'Response': s()},
          "causal-lm prompt=Context completion=Response"),
    shape("two languages", "t5", lambda n: {'en': s(), 'fr': s()},
          "? task=translation text_column=en label_column=fr > translation source=en target=fr"),
    shape("a split as numbers", "masked", lambda n: {'text': s(), 'label': n % 2, 'split': n % 3},
          "? ignore_columns=split > text-classification text=text label=label"),
    shape("a split as class names", "masked", lambda n: {'text': s(), 'label': str(n % 2), 'split': n % 5 == 0},
          "? ignore_columns=split > text-classification text=text label=label",
          features={'text': Value("string"), 'label': Value("string"), 'split': ClassLabel(names=["train", "test"])}),
    *(
        shape(f"a flag called {name}", "masked", lambda n, name=name: {'text': s(), 'label': n % 2, name: n % 5 == 0},
              f"? ignore_columns={name} > text-classification text=text label=label")
        for name in ("isTest", "in_test", "IS HOLDOUT")
    ),
    shape("lists in some rows", "masked", lambda n: {'text': s(), 'label': ['a', ['a', 'b']][n % 2]},
          "! or in some rows only"),
    shape("tags of a CSV with names", "masked", lambda n: {'tokens': "['Ada', 'sat']", 'ner_tags': '[1, 0]'},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]", argv="class_names=O,B-PER"),
    *(
        files(f"{name} in the second file only", model, lambda name=name, rows=rows: {'a.jsonl': json.dumps(rows) + "\n", 'b.jsonl': json.dumps({**rows, name: [{'type': 'function'}] if name == 'tools' else s()}) + "\n"},
              f"? ignore_columns={name} > {outcome}")
        for name, model, rows, outcome in [
            ("tools", "decoder", {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]}, "causal-lm messages="),
            ("system", "decoder", {'prompt': 'hi', 'completion': 'yes'}, "causal-lm prompt=hi completion=yes"),
            ("context", "masked", {'question': 'who?', 'choices': ['a', 'b'], 'answer': 0}, "multiple-choice query=who? texts=[\"a\", \"b\"] scores=[1.0, 0.0]"),
        ]
    ),
    files("a context that the first file leaves empty", "masked", lambda: {'a.csv': 'text,context,label\n' + ''.join(f'{s()},,{n % 2}\n' for n in range(24)), 'b.csv': 'text,context,label\n' + ''.join(f'{s()},{s()},{n % 2}\n' for n in range(24))},
          "? ignore_columns=context > text-classification text=sat river number a rome rome film number cat the river in label=0"),
    files("splits of the hub that repeat rows", "decoder", lambda: {f'data/train_{kind}-00000-of-00001.jsonl': json.dumps({'text': s()}) for kind in ('sft', 'gen')},
          "! holds several splits of training data: train_gen, train_sft"),
    files("rounds of the hub", "decoder", lambda: {f'data/train_r{n}-00000-of-00001.jsonl': json.dumps({'text': s()}) for n in (1, 2)},
          "causal-lm text=sat river number a rome rome film number cat the river in"),
    files("the same rows in two formats", "masked", lambda: {'train.csv': f'text,label\n{s()},0\n{s()},1\n', 'train.jsonl': json.dumps({'text': s(), 'label': 0})},
          "! would be read twice"),
    files("a table of prompts called .txt", "decoder", lambda: {'train.txt': 'prompt,completion\n' + ''.join(f'{s()},{s()}\n' for n in range(24))},
          "! Rename it to train.csv"),
    files("conversations alone in a CSV", "decoder", lambda: {'train.csv': 'messages\n' + '"[{""role"": ""user"", ""content"": ""hi""}, {""role"": ""assistant"", ""content"": ""yes""}]"\n' * 24},
          "causal-lm messages=[{\"role\": \"user\", \"content\": \"hi\"}"),
    files("cells in single quotes", "masked", lambda: {'train.csv': "'text','label'\n" + ''.join(f"'{s()}','{n % 2}'\n" for n in range(24))},
          "! has cells in single quotes"),
    files("single quotes where cells need them", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};'It''s \"{s()}; {s()}'\n{n % 2};{s()}\n" for n in range(24))},
          "text-classification text=It's \"sat river"),
    files("single quotes that no cell needs", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};{s()}{'; or' * (n == 9)}\n{n % 2};'{s()}'\n" for n in range(24))},
          "! has 3 fields where the first row has 2"),
    files("single quotes around a word", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};'It; is'\n{n % 2};'Ada' {s()}\n" for n in range(24))},
          "! has 3 fields where the first row has 2"),
    files("apostrophes that begin texts with the delimiter", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};'Twas; {s()}\n{n % 2};{s()}'\n{n % 2};{s()}\n" for n in range(24))},
          "! has 3 fields where the first row has 2"),
    files("single quotes around several lines further down", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};'{s()}; {s()}'\n" for n in range(240)) + "1;'two\nlines'\n"},
          "! it has several lines in single quotes"),
    files("double quotes in a table with apostrophes", "masked", lambda: {'train.csv': "label;text\n" + ''.join(f"{n % 2};\"'Twas; {s()}\"\n{n % 2};'tis {s()}\n" for n in range(24))},
          "text-classification text='Twas; "),
    files("blanks before quotes", "masked", lambda: {'train.csv': 'label, text\n' + ''.join(f'{n % 2}, "{s()}"\n' for n in range(24))},
          "! has a blank between a delimiter and a quote"),
    files("a title above a table", "masked", lambda: {'train.csv': 'Export of May\ntext,label\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24))},
          "! Remove lines above the names of the columns"),
    files("nested entities of other kinds", "masked", lambda: {'train.tsv': '1\tAda\tB-PER\tO\n2\tsat\tO\tO\n3\tRome\tB-LOC\tB-PART\n\n' * 24},
          "? task=token-classification label_column=column_3 > token-classification tokens=[\"Ada\", \"sat\", \"Rome\"] tags=[\"B-PER\", \"O\", \"B-LOC\"]"),
    files("nested entities of which one column has none", "masked", lambda: {'train.tsv': '#\thttp://a [2009-10-17]\n1\tAda\tB-PER\tO\n2\tsat\tO\tO\n\n' * 24},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    files("nested entities on some lines", "masked", lambda: {'train.txt': 'Bank B-ORG\nof I-ORG\nRome I-ORG B-GPE\n. O\n\n' * 24},
          "? task=token-classification label_column=column_2 > token-classification tokens=[\"Bank\", \"of\", \"Rome\", \".\"] tags=[\"B-ORG\", \"I-ORG\", \"I-ORG\", \"O\"]"),
    files("entities before their quality", "masked", lambda: {'train.tsv': 'So\tO\t\t\nit\tB-Claim\tHigh\t\n.\tO\t\t\n\n' * 24},
          "token-classification tokens=[\"So\", \"it\", \".\"] tags=[\"O\", \"B-Claim\", \"O\"]"),
    files("entities before other tags of words", "masked", lambda: {'train.tsv': 'Ada\tB-PER\tNNP\nsat\tO\tVBD\n.\tO\t.\n\n' * 24},
          "? task=token-classification label_column=column_2 > token-classification tokens=[\"Ada\", \"sat\", \".\"] tags=[\"B-PER\", \"O\", \"O\"]"),
    files("sentences with kinds of entities", "masked", lambda: {'train.tsv': 'Ada\tPER\nsat\tO\n.\tO\n\n' * 24},
          "token-classification tokens=[\"Ada\", \"sat\", \".\"] tags=[\"PER\", \"O\", \"O\"]"),
    files("words in rows, with the first of a sentence named", "masked", lambda: {'ner_dataset.csv': 'Sentence #,Word,POS,Tag\n' + ''.join(f'Sentence: {n},None,NNP,B-PER\n,"sat, null",VBD,O\n' for n in range(24))},
          "token-classification tokens=[\"None\", \"sat, null\"] tags=[\"B-PER\", \"O\"]"),
    files("words in rows of plain text, with all sentences named", "masked", lambda: {'train.txt': 'words\tlabels\tsentence_id\n' + ''.join(f'Ada\tBNEP\t{n}.0\nsat\tO\t{n}.0\n' for n in range(24))},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"BNEP\", \"O\"]"),
    files("words in rows of documents, with their splits", "masked", lambda: {'a.csv': 'doc_id,sent_id,token,ner,split\n' + ''.join(f'{n},0,w{n},{tag},{"test" if n > 19 else "train"}\n' for n in range(24) for tag in ('O', 'B-PER'))},
          "token-classification tokens=[\"w0\", \"w0\"] tags=[\"O\", \"B-PER\"]"),
    shape("words in rows with a label of another name", "masked", lambda n: {'sentence_idx': n // 3, 'word': o('Ada', 'sat'), 'label': o('B-PER', 'O')},
          "? task=token-classification > token-classification"),
    files("words in rows of documents", "masked", lambda: {'a.csv': 'text_id,sentence_id,word,tag\n' + ''.join(f'{n},1,Ada,B-PER\n{n},1,sat,O\n' for n in range(24))},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    files("words in rows of several splits", "masked", lambda: {'a.csv': 'sentence_id,word,tag,split\n' + ''.join(f'{n},Ada,B-PER,train\n{n},sat,O,test\n' for n in range(24))},
          "! line 3 has 'test' in column 'split', and other rows of its sentence 'train'"),
    shape("words in rows, not together", "masked", lambda n: {'sentence_id': n // 2 % 5, 'word': o('Ada', 'sat'), 'tag': o('B-PER', 'O')},
          "! has '0' in column 'sentence_id', as have rows before another sentence"),
    files("words in rows, named in some of them", "masked", lambda: {'a.csv': 'sentence_id,word,tag\n' + '1,Ada,B-PER\n1,sat,O\n,sat,O\n2,Bo,B-PER\n'},
          "! line 3 has '1' in column 'sentence_id', as have rows before another sentence"),
    files("words in rows, the first of no sentence", "masked", lambda: {'a.csv': 'sentence_id,word,tag\n,Ada,B-PER\n1,sat,O\n,sat,O\n2,Bo,B-PER\n,sat,O\n'},
          "! line 2 has '' in column 'sentence_id'"),
    shape("words in rows beside a text", "masked", lambda n: {'sentence_id': n // 2, 'sentence': s(), 'token': o('Ada', 'sat'), 'complexity': o('0.1', '0.2')},
          "?"),
    shape("words in rows beside short texts", "masked", lambda n: {'sentence': ('Ada sat', 'Bo ran', 'so be it')[n // 8], 'word': o('Ada', 'sat'), 'tag': o('B-PER', 'O')},
          "! has a word in each row"),
    shape("words in rows of no known sentence", "masked", lambda n: {'number': n // 2, 'word': o('Ada', 'sat'), 'tag': o('B-PER', 'O')},
          "! has a word in each row"),
    files("words and tags between bars", "masked", lambda: {'train.txt': '# B_x|B_ORG\na b|I_ORG\n||O\n\nsat|O\n.|O\n\n' * 24},
          "token-classification tokens=[\"# B_x\", \"a b\", \"|\"] tags=[\"B-ORG\", \"I-ORG\", \"O\"]"),
    files("a bar and no tag below others", "masked", lambda: {'train.txt': 'Ada|B-PER\nsat|O\n\nsat|O\n.|O\n\n' * 48 + 'Bo\n'},
          "! has 1 columns, the lines before it 2"),
    files("two tags between bars", "masked", lambda: {'train.txt': 'Bo B-PER|O\nsat O|O\n\nBo B-PER|O\nsat O|B-X\n\n' * 24},
          "! may name its columns"),
    files("texts and classes between bars in groups", "masked", lambda: {'train.txt': 'fine|good\nawful|bad\n\n' * 24},
          "! may name its columns"),
    files("texts of one word in groups", "masked", lambda: {'train.tsv': 'fine\tgood\nawful\tbad\n\n' * 24},
          "? task=token-classification > token-classification"),
    files("words and kinds of entities", "masked", lambda: {'train.txt': 'Ada\tperson\nsat\tO\nin\tO\nRome\tplace\n\n' * 24},
          "? task=token-classification > token-classification tokens=[\"Ada\", \"sat\", \"in\", \"Rome\"] tags=[\"person\", \"O\", \"O\", \"place\"]"),
    files("a list of rows beside columns", "masked", lambda: {'rows.json': json.dumps({'train': [{'text': s(), 'label': n % 2} for n in range(24)], 'test': {'text': [s()], 'label': [1]}})},
          "! not a list of rows"),
    files("a quote that opens in one row and closes in another", "masked", lambda: {'train.csv': 'label,text\n' + ''.join(f'{n % 2},' + ('"' * (n == 3)) + s() + ('"' * (n == 6)) + '\n' for n in range(24))},
          "! these lines look like rows"),
    files("texts of several lines", "masked", lambda: {'train.csv': 'label,text\n' + ''.join(f'{n % 2},"{s()}\nin Rome, {s()}"\n' for n in range(24))},
          "text-classification text=sat river number a rome rome film number cat the river in\nin Rome, "),
    *(
        files(f"JSON by {name}", model, lambda keyed=keyed, indent=indent: {'train.json': json.dumps(keyed(), indent=indent)}, outcome)
        for name, model, keyed, outcome in [
            ("keys of rows", "masked", lambda: {f'{n}ab': {'text': s(), 'label': n % 2} for n in range(24)}, "text-classification text=sat river"),
            ("numbers of rows", "masked", lambda: {str(n): {'text': s(), 'label': n % 2, **({'note': 'x'} if n else {})} for n in range(24)}, "text-classification text=sat river"),
            ("keys of rows of other names", "t5", lambda: {f'{n}ab': {'disfluent': s(), 'fluent': s()} for n in range(24)}, "? task=text2text-generation text_column=disfluent label_column=fluent > text2text-generation source=sat river"),
            ("keys of rows with ids", "masked", lambda: {f'k{n}': {'id': n, 'text': s(), 'label': n % 2} for n in range(24)}, "text-classification text=sat river"),
            ("columns", "masked", lambda: {'text': {n: s() for n in range(24)}, 'label': {n: n % 2 for n in range(24)}}, "! not a list of rows"),
            ("a head before keys of rows", "masked", lambda: {'version': {'text': '1.0', 'label': 'z'}, **{f'k{n}': {'text': s(), 'label': 'ab'[n % 2]} for n in range(24)}}, "! not a list of rows"),
            ("columns of other names", "masked", lambda: {'v1': {f'k{n}': s() for n in range(24)}, 'v2': {f'k{n}': n % 2 for n in range(24)}}, "! not a list of rows"),
            ("splits", "masked", lambda: {split: {'text': s(), 'label': 1} for split in ('train', 'test')}, "! not a list of rows"),
            ("texts", "masked", lambda: {s(): {'summary': s(), 'label': n % 2} for n in range(24)}, "! not a list of rows"),
            ("one key", "masked", lambda: {'k': {'text': s(), 'label': 1}}, "! not a list of rows"),
            ("keys of other objects", "masked", lambda: {'a': {'text': s()}, 'b': {'size': 1, 'unit': 'm', 'label': 1}}, "! not a list of rows"),
            ("splits of pairs", "masked", lambda: {split: [[s(), 'a'], [s(), 'b']] for split in ('train', 'val')}, "! not a list of rows"),
        ]
        for indent in (None, 1)
    ),
    shape("columns that are called as Ground Truth's reasons", "masked", lambda n: {'text': s(), 'label': n % 2, 'of Ground Truth': 'x', 'failure-reason': None},
          "text-classification text=text label=label", argv="text_column=text label_column=label"),
    shape("a column called of Ground Truth", "masked", lambda n: {'text': s(), 'label': n % 2, 'of Ground Truth': 'x'},
          "text-classification text=text label=label", argv="text_column=text label_column=label"),
    shape("metadata of another tool", "masked", lambda n: {'text': s(), 'label': n % 2, 'page-metadata': {'number': n}},
          "text-classification text=text label=label"),
    *(
        files(f"Ground Truth's manifest with {name}", "masked", lambda rows=rows: {'output.manifest': ''.join(json.dumps(row) + '\n' for n in range(24) for row in rows(n))}, outcome)
        for name, rows, outcome in [
            ("entities", lambda n: [truth('text-span', {'annotations': {'entities': [{'label': 'PER', 'startOffset': 0, 'endOffset': 3}] * (n % 5 > 0)}})], "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"O\", \"O\"]"),
            ("classes", lambda n: [truth('text-classification', n % 2, **{'class-name': 'ba'[n % 2]})], "text-classification text=Ada sat label=b"),
            ("several classes", lambda n: [truth('text-classification-multilabel', [2, 0, 1][n % 2:], **{'class-map': {'0': 'a', '1': 'b', '2': 'c'}})], "text-classification text=Ada sat label=a, b, c"),
            ("failures", lambda n: [truth('text-classification', n % 2, **({'failure-reason': 'x'} if n == 0 else {'class-name': 'ba'[n % 2]}))], "text-classification text=Ada sat label=a"),
            ("another job", lambda n: [{**truth('text-classification', 0, **{'class-name': 'a'}), 'b': 0, 'b-metadata': {'class-name': 'b'}}], "! jq -c 'del(.[\"b\"], .[\"b-metadata\"])'"),
            ("another job further down", lambda n: [truth('text-classification', 0, 'ab'[n == 20], **{'class-name': 'a'})], "! Keep those of one job"),
            ("rows without labels", lambda n: [truth('text-classification', n % 2, **{'class-name': 'ba'[n % 2]}), {'source': 'Ada sat'}], "! line 2 is of a manifest of Ground Truth"),
            ("a class without a name", lambda n: [truth('text-classification-multilabel', [n % 3], **{'class-map': {'0': 'a', '1': 'b'}})], "! line 3 is of a manifest of Ground Truth"),
            ("a column text", lambda n: [{**truth('text-classification', n % 2, **{'class-name': 'ba'[n % 2]}), 'text': 'Bo'}], "! without a column text or label"),
            ("other labels", lambda n: [truth('custom', {'a': 1})], "! is of a manifest of Ground Truth, with the labels ['x-y']"),
            ("failures without labels", lambda n: [truth('text-classification', n % 2, **{'class-name': 'ba'[n % 2]}), {'source': 'Bo', 'x-y-metadata': {'failure-reason': 'x'}}], "text-classification text=Ada sat label=b"),
            ("texts elsewhere", lambda n: [{'source-ref': 's3://b/1.txt', 'x': 0, 'x-metadata': {'class-name': 'a', 'type': 'groundtruth/text-classification'}}], "! Write its text as source"),
        ]
    ),
    *(
        files(f"Label Studio's tasks with {name}", "masked", lambda results=results: {'project.json': json.dumps([studio(n, *results(n)) for n in range(24)])}, outcome, argv=argv)
        for name, results, outcome, argv in [
            ("labels", lambda n: [[LABELS]], "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]", ""),
            ("labels in some", lambda n: [[LABELS] * (n > 0)], "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"O\", \"O\"]", ""),
            ("choices", lambda n: [[choices("ab"[n % 2])]], "text-classification text=Ada sat label=a", ""),
            ("several choices", lambda n: [[choices(*"abc"[n % 2:])]], "text-classification text=Ada sat label=a, b, c", ""),
            ("choices in some", lambda n: [[choices("ab"[n % 2])]] * (n > 0), "? missing_labels=empty > text-classification text=Ada sat label=b", ""),
            ("choices and labels", lambda n: [[LABELS, choices("ab"[n % 2])]], "! with both choices and labels", ""),
            ("no annotation", lambda n: [], "! row 0 has no annotation, nor has another task", ""),
            ("an empty choice", lambda n: [[choices(*"ab"[n % 2] * (n > 0))]], "? missing_labels=empty > text-classification text=Ada sat label=b", ""),
            ("empty annotations", lambda n: [[]], "! row 0 has no annotation", ""),
            ("no annotation of some", lambda n: [[LABELS]] * (n > 0), "! row 0 has no annotation", ""),
            ("two annotators", lambda n: [[LABELS], [LABELS]], "! of Label Studio has not one annotation", ""),
            ("two controls", lambda n: [[LABELS, {**LABELS, 'from_name': 'b'}]], "! Export JSON-MIN", ""),
            ("relations", lambda n: [[LABELS, {'type': 'relation', 'from_id': 'a'}]], "! Export JSON-MIN", ""),
            ("choices of spans", lambda n: [[{**LABELS, 'type': 'choices', 'value': {'start': 0, 'end': 3, 'choices': ['a']}}]], "! Export JSON-MIN", ""),
        ]
    ),
    *(
        shape(f"Label Studio's tasks with {name}", "masked", lambda n, results=results: studio(n, results), "! of Label Studio has not one annotation")
        for name, results in [
            ("a choice as a string", [{**choices(), 'value': {'choices': 'pos'}}]),
            ("null for choices", [{**choices(), 'value': {'choices': None}}]),
            ("a number for a choice", [{**choices(), 'value': {'choices': [1]}}]),
            ("a number for a value", [{**choices(), 'value': 3}]),
            ("a list for a type", [{**choices('a'), 'type': ['choices']}]),
            ("strings for results", ['a']),
            ("null for results", None),
            ("labels without an end", [{**LABELS, 'value': {'start': 0, 'labels': ['PER']}}]),
            ("labels without names", [{**LABELS, 'value': {'start': 0, 'end': 3, 'text': 'Ada'}}]),
        ]
    ),
    shape("Label Studio's tasks that were all cancelled", "masked", lambda n: {**studio(n), 'annotations': [{'result': [LABELS], 'was_cancelled': True}]},
          "! line 1 has no annotation, nor has another task"),
    shape("Label Studio's labels of one of two texts", "masked", lambda n: {**studio(n, [LABELS]), 'data': {'text': 'Ada sat', 'other': s()}},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    shape("Label Studio's labels of another text", "masked", lambda n: {**studio(n, [{**LABELS, 'to_name': 'other'}]), 'data': {'text': s(), 'other': 'Ada sat'}},
          "! and not 'Ada', its text", argv="task=token-classification"),
    shape("Label Studio's labels of a text that is not told", "masked", lambda n: {**studio(n, [{**LABELS, 'value': {'start': 0, 'end': 3, 'labels': ['PER']}}]), 'data': {'text': s(), 'other': 'Ada sat'}},
          "! for labels of one text"),
    shape("Label Studio's tasks whose data has a label", "masked", lambda n: {**studio(n, [choices("a")]), 'data': {'text': s(), 'label': 1}},
          "! its data has a label"),
    files("Label Studio's tasks on more lines than a block has", "masked", lambda: {'train.jsonl': ''.join(json.dumps(studio(n, [LABELS if n < 10_000 else choices("a")])) + '\n' for n in range(10_001))},
          "! with both choices and labels"),
    files("Label Studio's tasks on lines, the last without an annotation", "masked", lambda: {'train.jsonl': ''.join(json.dumps(studio(n, *[[LABELS]] * (n < 10_000))) + '\n' for n in range(10_001))},
          "! line 10001 has no annotation"),
    shape("data and annotations of another tool", "masked", lambda n: {'data': {'text': 'Ada sat'}, 'annotations': [7]},
          "! no spans that can be read"),
    shape("cluener", "masked", lambda n: {'text': 'Ada 在罗马', 'label': {'address': {'罗马': [[5, 6]]}} if n % 3 else {'name': {'Ada': [[0, 2]]}, 'address': {'罗马': [[5, 6]]}}},
          "token-classification tokens=[\"Ada\", \"\\u5728\", \"\\u7f57\\u9a6c\"] tags=[\"B-name\", \"O\", \"B-address\"]"),
    shape("cluener, some without entities", "masked", lambda n: {'text': '罗马在', 'label': {'address': {'罗马': [[0, 1]]}} if n else {}},
          "token-classification tokens=[\"\\u7f57\\u9a6c\\u5728\"] tags=[\"O\"]", argv="task=token-classification"),
    shape("cluener, the ends excluded", "masked", lambda n: {'text': '罗马在', 'label': {'address': {'罗马': [[0, 2]]}}},
          "! which holds '罗马在' and not '罗马'", argv="task=token-classification"),
    files("a table made of SQuAD", "masked", lambda: {'train.csv': 'question,context,answer_start,text\n' + 'who?,Ada sat,0,Ada\n' * 24},
          "question-answering id=0 question=who? context=Ada sat answers=[\"Ada\"] starts=[0]"),
    shape("a category beside a flag", "masked", lambda n: {'text': s(), 'category': o('a', 'b'), 'is_spam': str(n % 2 == 0)},
          "? task=text-classification label_column=is_spam > text-classification text=text label=is_spam"),
    shape("prompts in lists", "decoder", lambda n: {'prompt': json.dumps([s()]), 'response': s()},
          "! holds lists, written as strings"),
    files("a file called devel", "masked", lambda: {'train.csv': f'text,label\n{s()},a\n{s()},b\n', 'devel.csv': f'text,label\n{s()},c\n'},
          "! which is in the validation data but not in the training data"),
    files("a file called tst", "masked", lambda: {'trn.csv': f'text,label\n{s()},a\n{s()},b\n', 'tst.csv': f'text,label\n{s()},c\n'},
          "! which is in the test data but not in the training data"),
    files("CoNLL-2003's files", "masked", lambda: {'eng.train': 'Ada B-PER\nsat O\n\n' * 24, 'eng.testa': 'Bo B-PER\nsat O\n\n' * 4},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    shape("medqa", "masked", lambda n: {'question': s(), 'answer': 'x y', 'options': {'A': s(2), 'B': s(2)}, 'answer_idx': 'AB'[n % 2]},
          "? task=multiple-choice label_column=answer_idx > multiple-choice query=question texts=[\"number the\", \"rome house\"] scores=[1.0, 0.0]"),
    shape("jcommonsenseqa", "masked", lambda n: {'q_id': n, 'question': s(), **{f'choice{i}': s(1 + i) for i in range(5)}, 'label': n % 5},
          "multiple-choice query=question texts=[\"number\", \"the rome\", "),
    shape("parsinlu", "masked", lambda n: {'question': s(), 'candidates': [s(2), s(3)], 'answer': str(1 + n % 2), 'category': o('math', 'logic')},
          "multiple-choice query=question texts=candidates scores=[1.0, 0.0]"),
    shape("head_qa", "masked", lambda n: {'name': 'c', 'category': o('a', 'b'), 'qid': n, 'qtext': s(), 'ra': 1 + n % 2, 'answers': [{'aid': 1, 'atext': s(2)}, {'aid': 2, 'atext': s(3)}]},
          "? task=multiple-choice label_column=ra > multiple-choice query=qtext texts=[\""),
    shape("choices with a flag", "masked", lambda n: {'question': s(), 'choices': [{'option': s(2), 'is_correct': 1 - n % 2}, {'option': s(3), 'is_correct': n % 2}], 'answer': n % 2},
          "! does not hold lists of texts", argv="task=multiple-choice"),
    shape("choices, one of them null", "masked", lambda n: {'question': s(), 'choices': [{'text': s(2), 'label': 'A'}, None if n == 9 else {'text': s(3), 'label': 'B'}], 'answer': 'AB'[n % 2]},
          "! line 10 has fewer than two choices, or an empty one", argv="task=multiple-choice"),
    shape("choices that differ by a space", "masked", lambda n: {'question': s(), 'choices': ['x ', 'x', 'y'], 'answer': ['x', 'x ', 'y'][n % 3]},
          "multiple-choice query=question texts=choices scores=[0.0, 1.0, 0.0]", argv="task=multiple-choice"),
    shape("arc for a decoder", "decoder", lambda n: {'question': s(), 'choices': {'text': [*'abcd'], 'label': [*'ABCD']}, 'answerKey': 'ABCD'[n % 4]},
          "! the model (a decoder) cannot learn multiple-choice"),
    files("questions with choices and no header", "masked", lambda: {'train.csv': ''.join(f'{s()},{n} in Rome,{n} at home,{n} cats,{n} stones,{o(*"ABCD")}\n' for n in range(24))},
          "? header=false task=multiple-choice text_column=column_0 label_column=column_5 columns=endings:column_1,endings:column_2,endings:column_3,endings:column_4 > multiple-choice query=sat river"),
    shape("reclor", "masked", lambda n: {'context': s(), 'question': s(), 'answers': [s(2), s(2)], 'label': n % 2},
          "? task=multiple-choice > multiple-choice query=context"),
    shape("dolly", "decoder", lambda n: {'instruction': f'do {n}', 'context': s() if n else '', 'response': s()},
          "causal-lm prompt=Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\ndo 0\n"),
    shape("a description and code", "decoder", lambda n: {'text': s(), 'code': s()},
          "? task=causal-lm prompt_column=text completion_column=code > causal-lm prompt=text completion=code"),
    shape("conversations of another name", "decoder", lambda n: {"talk": TURNS},
          "? task=causal-lm messages_column=talk > causal-lm messages=talk"),
    shape("intents with tags of words", "masked", lambda n: {'text': 'Ada sat', 'tokens': ['Ada', 'sat'], 'ner_tags': ['B-PER', 'O'], 'intent': o('go', 'stay')},
          "text-classification text=text label=intent", argv="text_column=text label_column=intent"),
    shape("columns of truth values", "masked", lambda n: {'text': s(), 'toxic': n % 2 == 0, 'insult': n % 3 == 0},
          "? task=text-classification label_column=toxic,insult > text-classification text=text label=toxic, insult"),
    shape("aspects with opinions", "masked", lambda n: {'text': s(), 'food': ["good", "bad", None][n % 3], 'staff': ["good", None, "bad"][n % 3]},
          "text-classification text=text label=food: good, staff: good", argv="label_column=food,staff"),
    shape("aspects with numbers", "masked", lambda n: {'text': s(), 'food': n % 4, 'staff': n % 3},
          "! problem_type=multi_label_classification if each number", argv="label_column=food,staff"),
    shape("aspects with numbers as classes", "masked", lambda n: {'text': s(), 'food': n % 4, 'staff': n % 3},
          "text-classification text=text label=food: 0, staff: 0", argv="label_column=food,staff problem_type=multi_label_classification"),
    shape("several numbers", "masked", lambda n: {'text': s(), 'valence': n / 4, 'arousal': n % 5},
          "text-classification text=text label=valence 0, arousal 0", argv="label_column=valence,arousal"),
    shape("several whole numbers", "masked", lambda n: {'text': s(), 'valence': n % 4, 'arousal': n % 5},
          "! Give problem_type=regression to learn the numbers, problem_type=multi_label_classification", argv="label_column=valence,arousal"),
    shape("several whole numbers that are numbers", "masked", lambda n: {'text': s(), 'valence': n % 4, 'arousal': n % 5},
          "text-classification text=text label=valence 0, arousal 0", argv="label_column=valence,arousal problem_type=regression"),
    shape("several numbers and codes", "masked", lambda n: {'text': s(), 'valence': f"{n % 4}.{n % 11}", 'arousal': f"{n % 5}.5"},
          "! Give problem_type=regression if they are numbers", argv="label_column=valence,arousal"),
    shape("a number and a class", "masked", lambda n: {'text': s(), 'valence': n / 4, 'arousal': o("low", "high")},
          "! holds numbers with fractions", argv="label_column=valence,arousal"),
    shape("shares of opinions", "classifier", lambda n: {'text': s(), 'positive': n / 24, 'negative': 1 - n / 24},
          "! is not text: it holds numbers"),
    shape("a record named as the label", "masked", lambda n: {'text': s(), 'meta': {'a': n % 2, 'b': 'x'}},
          "! would not be read", argv="task=text-classification label_column=meta"),
    shape("tags of words in strings", "masked", lambda n: {'text': s(n % 3 + 2), 'label': str(["DT", "NN", "VB", "IN"][: n % 3 + 2])},
          "! token classification"),
    shape("repeated tags in strings", "masked", lambda n: {'text': s(n % 3 + 2), 'label': str(["B-X", "O", "O", "O"][: n % 3 + 2])},
          "! written as strings"),
    shape("marks in lists of two lengths", "masked", lambda n: {'text': s(), 'label': ["[0, 1]", "[1, 0, 1]"][n % 2]},
          "! written as strings"),
    shape("marks with a gap beside marks", "masked", lambda n: {'text': s(), 'a': n % 2, 'b': [None, 0, 1][n % 3]},
          "! missing_labels=empty", argv="label_column=a,b"),
    files("marks in one file, grades in another", "masked", lambda: {f'train_{k}.csv': 'text,a,b\n' + ''.join(f'{s()} {k},{n % 2},{n % (2 + k)}\n' for n in range(24)) for k in (0, 1)},
          "! hold 0 and 1 in", argv="label_column=a,b problem_type=multi_label_classification"),
    files("a workbook beside its sheet", "masked", lambda: {'train.xlsx': workbook({"A": [["text", "label"], *[[s(), n % 2] for n in range(24)]]}), 'train - Sheet1.csv': 'text,label\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24))},
          "! read twice"),
    files("lists of 0 and 1 of other lengths in the test", "masked", lambda: {'train.csv': 'text,label\n' + ''.join(f'{s()},"{[n % 2, 1, 0]}"\n' for n in range(24)), 'test.csv': f'text,label\n{s()},[1]\n'},
          "! 0 or 1 for each of 3 classes"),
    files("a score after known names", "encoder", lambda: {'train.csv': 'question,answer,7.5\n' + ''.join(f'{s()},{s()},{n / 2}\n' for n in range(24))},
          "sentence-embedding query=question", argv="task=sentence-embedding text_column=column_0,column_1 label_column=column_2"),
    shape("aspects beside a list", "masked", lambda n: {'text': s(), 'food': o("a", "b"), 'staff': ["a"]},
          "! holds lists", argv="text_column=text label_column=food,staff"),
    shape("evidence in lists", "masked", lambda n: {'claim': s(), 'label': o('yes', 'no'), 'evidence': [[1, 'x']]},
          "? ignore_columns=evidence > text-classification text=claim label=label"),
    shape("names of images", "vit", lambda n: {'image_id': f'{n}.jpg', 'label': n % 2},
          "? task=image-classification image_column=image_id > ! such as images/0.jpg"),
    files("spaCy's pairs, one a line", "masked", lambda: {'train.jsonl': json.dumps(['Ada sat', {'entities': [[0, 3, 'PER']]}]) + '\n' + json.dumps(['Bo sat', {'entities': [[0, 2, 'PER']]}])},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    files("Ground Truth's images", "vit", lambda: {'output.manifest': json.dumps({'source-ref': 's3://b/1.jpg', 'a': 0, 'a-metadata': {'class-name': 'x', 'type': 'groundtruth/image-classification'}})},
          "! {file_name: (.[\"source-ref\"] | split(\"/\") | last), label: "),
    files("a plain text for a decoder", "decoder", lambda: {'input.txt': 'All:\nSpeak, speak.\n' * 9},
          "causal-lm text=All:"),
    files("classes in folders of texts, for a decoder", "decoder", lambda: {'pos/1.txt': 'Good.\n', 'neg/1.txt': 'Bad.\n'},
          "! is a plain text, without a label"),
    files("a chat of WhatsApp", "decoder", lambda: {'chat.txt': '12/05/23, 10:31 PM - Ada: are we on for tomorrow then?\n12/05/23, 10:32 PM - Bo: yes, at ten, at the station\n' * 9},
          "causal-lm text=12/05/23, 10:31 PM - Ada: are we on for tomorrow then?"),
    files("indices of pandas, twice", "masked", lambda: {'a.csv': ',Unnamed: 0.1,Unnamed: 0,Unnamed: 0,text,label\n' + ''.join(f'{n},{n},{n},{n},row {n},{"ab"[n % 2]}\n' for n in range(9))},
          "text-classification text=row 0 label=a"),
    shape("GitHub's labels", "masked", lambda n: {'title': s(4), 'body': s(), 'labels': [{'id': n % 3, 'name': f'kind-{n % 3}', 'color': 'd73a4a'}]},
          "text-classification text=title text_pair=body label=kind-0"),
    shape("entities and classes of doccano", "masked", lambda n: {'text': 'Ada sat', 'entities': [[0, 3, 'PER']], 'cats': [f'c{n % 2}']},
          "? task=text-classification ignore_columns=entities > text-classification text=text label=c0"),
    shape("an intent called None", "masked", lambda n: {'text': s(), 'intent': o('None', 'Book'), 'entities': [{'entity': 'city', 'startPos': 1, 'endPos': 2}]},
          "? task=text-classification ignore_columns=entities problem_type=single_label_classification > text-classification text=text label=intent"),
    shape("hatexplain", "masked", lambda n: {'id': str(n), 'post_tokens': s(6).split(), 'label': n % 3},
          "? task=text-classification text_column=post_tokens > text-classification text=sat river number a rome rome label=label"),
    shape("words with a label", "masked", lambda n: {'tokens': s(6).split(), 'label': n % 3},
          "? text_column=tokens > text-classification text=sat river number a rome rome label=label", argv="task=text-classification"),
    shape("texts that are lists", "masked", lambda n: {'text': s(6).split(), 'label': n % 3},
          "! Give text_column=text if the texts of each list are joined by spaces", argv="task=text-classification"),
    shape("words with tags and a label", "masked", lambda n: {'tokens': ['Ada', 'sat'], 'ner_tags': ['B-PER', 'O'], 'label': n % 3},
          "! give ignore_columns=ner_tags if it is not learned", argv="text_column=tokens"),
    shape("sentences, each with a label", "masked", lambda n: {'sentences': [s(), s()], 'labels': [o('a', 'b'), o('a', 'b')]},
          "! has a value for each text", argv="task=text-classification text_column=sentences"),
    shape("coqa", "decoder", lambda n: {'questions': [s(4), s(4)], 'answers': [s(2), s(2)]},
          "! has a value for each text in the lists of 'answers'", argv="prompt_column=questions completion_column=answers"),
    shape("common_gen", "t5", lambda n: {'concept_set_idx': n, 'concepts': ['ski', 'hill'], 'target': s()},
          "? task=text2text-generation text_column=concepts > text2text-generation source=ski hill target=target"),
    shape("jfleg", "t5", lambda n: {'sentence': s(), 'corrections': ['', s(3), s()]},
          "? text_column=sentence label_column=corrections > text2text-generation source=sentence target=number the rome", argv="task=text2text-generation"),
    shape("answers of ms marco", "decoder", lambda n: {'query': s(5), 'query_id': n, 'answers': [s(3)] if n % 5 else []},
          "? task=causal-lm completion_column=answers > causal-lm prompt=rome film number cat the completion=river in number"),
    shape("lists of completions", "decoder", lambda n: {'prompt': s(), 'completion': [s(), s()]},
          "! Give completion_column=completion if the first text of each list is learned", argv="task=causal-lm"),
    shape("daily_dialog", "decoder", lambda n: {'dialog': ['hi', 'yes', 'so'], 'act': [1, 2, 1], 'emotion': [0, 0, 1]},
          "? task=causal-lm messages_column=dialog > causal-lm messages=[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"yes\"}, {\"role\": \"user\", \"content\": \"so\"}]"),
    *(
        shape(f"turns called {name}", "decoder", lambda n, name=name: {name: ['hi', 'yes']},
              "? messages_column=" + name + " > causal-lm messages=[{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"yes\"}]", argv="task=causal-lm")
        for name in ("dialogue", "conversation", "utterances")
    ),
    shape("turns of which one is missing", "decoder", lambda n: {'dialog': ['hi', None, 'so']},
          "! has no content (null)", argv="messages_column=dialog"),
    shape("an exchange without an answer", "decoder", lambda n: {'conversation': [{'input': s(), 'output': None}]},
          "! has no 'role'"),
    *(
        files(f"CoNLL in {name} that begins with {word}", "masked", lambda name=name, word=word: {name: f'{word} O\nAda B-PER\n\nBo B-PER\nsat O\n\n' * 24},
              f"token-classification tokens={json.dumps([word, 'Ada'])} tags=[\"O\", \"B-PER\"]")
        for name in ("a.conll", "a.iob2", "a.txt", "a") for word in ("[", "{'s", '["x"', "[]")
    ),
    files("CoNLL of three columns that begins with two brackets", "masked", lambda: {'a.bio': '[ [ O\nAda N B-PER\n\nBo N B-PER\nsat V O\n\n' * 24},
          "token-classification tokens=[\"[\", \"Ada\"] tags=[\"O\", \"B-PER\"]"),
    files("entities before other columns", "masked", lambda: {'a.txt': 'EU\tB-ORG\tNNP\t0\nsat\tO\tVBD\t1\n.\tO\t.\t2\n\n' * 24},
          "? task=token-classification label_column=column_2 > token-classification tokens=[\"EU\", \"sat\", \".\"] tags=[\"B-ORG\", \"O\", \"O\"]"),
    files("CoNLL of other tags that begins with brackets", "masked", lambda: {'a.txt': '[ [ O\nAda N person\n\nBo N person\nsat V O\n\n' * 24},
          "token-classification tokens=[\"[\", \"Ada\"] tags=[\"O\", \"person\"]", argv="task=token-classification"),
    files("JSON Lines called .bio", "masked", lambda: {'a.bio': '{"tokens": ["Ada", "sat"], "ner_tags": ["B-PER", "O"]}\n{"tokens": ["a", "b"], "ner_tags": ["O", "O"]}\n\n' * 12},
          "token-classification tokens=[\"Ada\", \"sat\"] tags=[\"B-PER\", \"O\"]"),
    files("a JSON document called .conll", "masked", lambda: {'a.conll': '[\n {"tokens": ["Ada"],\n "ner_tags": ["B-PER"]},\n\n {"tokens": ["a"],\n "ner_tags": ["O"]}\n]'},
          "token-classification tokens=[\"Ada\"] tags=[\"B-PER\"]"),
    files("a header, though header=false", "masked", lambda: {'a.csv': 'text,label\n' + ''.join(f'{s()},{n % 2}\n' for n in range(24))},
          "! names columns, and header=false is given", argv="header=false"),
])  # fmt: skip
def test_a_table_is_read_or_refused_with_a_line_that_works(shape: Shape, tmp_path: Path) -> None:
    given = dict(pair.split("=", 1) for pair in shape.argv.split())
    for step in shape.outcome.split(" > "):
        if step[0] not in "?!":
            task, made = shape.read(tmp_path, given)
            assert described(task, made, shape.rows()).startswith(step)
            return
        with pytest.raises(RecipeError) as refusal:
            shape.read(tmp_path, given)
        if step[0] == "!":
            assert step[2:] in str(refusal.value).replace("\n", " ")
            return
        lines = proposed_lines(refusal.value)
        assert lines
        if step == "?":
            return
        proposed = {" ".join(f"{key}={value}" for key, value in one.items()): one for one in lines}
        assert step[2:] in proposed
        chosen = proposed.pop(step[2:])
        # Another line is read, too, or asks something else.
        for line in list(proposed.values())[-1:]:
            try:
                shape.read(tmp_path, {**given, **line})
            except RecipeError as other:
                assert str(other) != str(refusal.value)
        given |= chosen


def test_the_log_says_how_lists_are_read(tmp_path: Path) -> None:
    made = Shape("t5", lambda n: {"source": ["ski", "hill"], "target": [s()] * (1 + n % 3)},
                 "", "", None, "train.jsonl")  # fmt: skip
    given = {"task": "text2text-generation", "text_column": "source", "label_column": "target"}
    _, read = made.read(tmp_path, given)
    log = "\n".join(read.data.notes)
    assert "the texts of each list are joined by spaces, in column 'source'" in log
    assert "the first text of each list is learned, in column 'target'" in log


def test_the_log_says_how_a_manifest_is_read(tmp_path: Path) -> None:
    rows = [truth("text-classification", n % 2, **{"class-name": "ab"[n % 2]}) for n in range(24)]
    failed = [truth("text-classification", 0, **{"failure-reason": "?"})] * 2
    made = Shape("masked", lambda n: [*failed, *rows][n], "", "", None, "train.jsonl")
    _, read = made.read(tmp_path, {"task": "text-classification"})
    log = "\n".join(read.data.notes)
    assert "'text' is its source, 'label' the class-name of its job 'x-y'" in log
    assert "2 rows have a failure-reason and are not used" in log


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl", "a.json", "a.conll", "b.txt", "a.txt.gz", "a.csv.gz"]
)
@pytest.mark.parametrize(
    "encoding",
    [
        "windows-1252",
        "latin-1",
        "iso8859-15",
        "cp1251",
        "gb18030",
        "shift_jis",
        "utf-16-le",
        "utf-16",
    ],
)
def test_files_of_other_encodings_are_read(name: str, encoding: str, tmp_path: Path) -> None:
    word = {
        "cp1251": "привет",
        "gb18030": "联通酒店",
        "shift_jis": "ホテル",
        "iso8859-15": "Œuvre",
    }.get(encoding, "Déjà")
    rows = [{"text": f"{word} {s()}", "label": "ab"[n % 2]} for n in range(24)]
    text = {
        "csv": "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows),
        "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "json": json.dumps(rows, ensure_ascii=False, indent=1),
        "conll": f"{word} B-PER\nsat O\n\n" * 24,
        "txt": "".join(f"{row['text']}\n" for row in rows),
    }[name.split(".")[1]]  # fmt: skip
    data = text.encode(encoding).removeprefix(codecs.BOM_UTF16_LE)
    data = gzip.compress(data) if name.endswith(".gz") else data
    kind = name.split(".")[1]
    given = {"task": "masked-lm"} if kind == "txt" else {}
    made = Shape("masked", lambda: {name: data}, "", "", None, "")
    if not encoding.startswith("utf"):
        with pytest.raises(RecipeError, match="encoding="):
            made.read(tmp_path, given)
    task, read = made.read(tmp_path, {"encoding": encoding, **given})
    tasks = {"txt": "masked-lm", "conll": "token-classification"}
    assert task == tasks.get(kind, "text-classification")
    (column,) = {"text", "tokens"} & {*read.train.column_names}
    first = read.train[0][column]
    assert (first[0] if column == "tokens" else first).startswith(word)


def test_a_byte_order_mark_decides_an_encoding(tmp_path: Path) -> None:
    text = "text,label\n" + "".join(f"Déjà {s()},{n % 2}\n" for n in range(24))
    files_by_name = {
        "a.csv": text.encode("utf-8-sig"),
        "b.csv": text.encode("utf-16"),
        "c.csv": text.encode("cp1252"),
    }
    made = Shape("masked", lambda: files_by_name, "", "", None, "")
    _, read = made.read(tmp_path, {"encoding": "cp1252"})
    assert all(row.startswith("Déjà") for row in read.train["text"])


def test_lines_name_the_encoding_that_a_file_seems_to_have(tmp_path: Path) -> None:
    text = "subject,body,queue,priority\n" + "".join(
        f"Gerät {s(3)},beschädigt {s()},{'ab'[n % 2]},{'xyz'[n % 3]}\n" for n in range(24)
    )
    made = Shape("masked", lambda: {"a.csv": text.encode("cp1252")}, "", "", None, "")
    with pytest.raises(RecipeError, match="line 2 is not utf-8") as refusal:
        made.read(tmp_path, {})
    for line in proposed_lines(refusal.value):
        assert line["encoding"] == "windows-1252"
        _, read = made.read(tmp_path, line)
        assert "ä" in read.train["text"][0]


def test_a_headers_refusal_reads_the_encoding(tmp_path: Path) -> None:
    text = "v1,v2\n" + "".join(f"{'ab'[n % 2]},Déjà {s()}\n" for n in range(24))
    made = Shape("masked", lambda: {"a.csv": text.encode("cp1252")}, "", "", None, "")
    with pytest.raises(RecipeError) as refusal:
        made.read(tmp_path, {"encoding": "windows-1252"})
    line = {"task": "text-classification", "text_column": "v2", "label_column": "v1"}
    assert line in proposed_lines(refusal.value)
    made.read(tmp_path, {"encoding": "windows-1252", **line})
