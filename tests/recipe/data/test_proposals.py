"""Headers of public exports: columns that names make clear are read, and of others the first line
that a refusal proposes is the one that a person means."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipe import task_table
from recipe.arguments import parse
from recipe.data import reading
from recipe.data.annotations import questions
from recipe.data.layout import shards
from recipe.errors import RecipeError
from recipe.plan import detection
from tests.support.shape_lines import CONFIGURATIONS, proposed_lines

KINDS: Mapping[str, Any] = {
    # Numbers that tell no class.
    "text": lambda n: (
        f"We waited {random.Random(n).random()} hours for the green house on the river."
    ),
    "title": lambda n: f"Green house {random.Random(n).random():.5f}",
    "class": lambda n: ["good", "bad", "fine"][n % 3],
    "flag": lambda n: n % 2,
    "stars": lambda n: n % 5 + 1,
    "score": lambda n: n % 7 / 7,
    "id": lambda n: n + 100,
    "date": lambda n: f"2024-03-{n % 28 + 1:02}",
    "letter": lambda n: "AB"[n % 2],
    "talk": lambda n: [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"{n}"}],
    "none": lambda n: "",
    "word": lambda n: f"a{n}@example.org",
    "same": lambda n: "green house",
    "split": lambda n: ["train", "train", "test"][n % 3],
    "sign": lambda n: n % 3 - 1,
    "several": lambda n: ["red;blue", "red;green", "blue", "green"][n % 4],
    "gaps": lambda n: ["good", "bad", ""][n % 3],
}


def table(columns: str, has_header: bool = True) -> str:
    """Return a CSV with columns of kinds: `Rezension:text, Stimmung:class`."""
    pairs = [column.rpartition(":")[::2] for column in columns.split(", ")]
    rows = [
        [f"{KINDS[kind](n)} ({number})" if kind == "text" else KINDS[kind](n)
         for number, (_, kind) in enumerate(pairs)]
        for n in range(30)
    ]  # fmt: skip
    lines = [",".join(map(str, row)) for row in rows]
    return "\n".join([",".join(name for name, _ in pairs)] * has_header + lines)


def outcome(folder: Path, model: str, argv: Mapping[str, str], monkeypatch: Any) -> str:
    """Return the task of a job and its columns: `text-classification text=a label=b`."""
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[model]))
    words = [word for name, value in argv.items() for word in (f"--{name}", value)]
    parsed = parse(["--model_id", str(folder), "--eval_strategy", "no", *words])
    selections = []

    def select(*args: Any, **kwargs: Any) -> Any:
        selections.append(reading_select(*args, **kwargs))
        return selections[-1]

    reading_select = reading.select_columns
    with monkeypatch.context() as patch:
        patch.setattr(reading, "select_columns", select)
        task, _ = detection.find(parsed, {"train": folder / "data"})
        task_table.load(task)({"train": folder / "data"}, dataclasses.replace(parsed, task=task))
    columns = selections[0].columns.items()
    return " ".join([task, *(f"{role}={'+'.join(names)}" for role, names in columns)])


@pytest.mark.parametrize(("model", "columns", "expected"), [
    ("masked", "data:text, battery:class, camera:class, display:class, price:same", "? text-classification text=data label=battery+camera+display"),
    ("masked", "title:text, company:word, description:text, data_science_job:flag", "? text-classification text=title text_pair=description label=data_science_job"),
    ("masked", "tweet:text, odio:stars, neutral:stars, etiqueta:stars", "text-classification text=tweet label=etiqueta"),
    ("masked", "complaint_text:text, cleaned_complaints:text, category:class", "? text-classification text=complaint_text label=category"),
    # Read at once.
    ("encoder", "Rezension:text, Stimmung:class", "text-classification text=Rezension label=Stimmung"),
    ("encoder", "本文:text, カテゴリ:class", "text-classification text=本文 label=カテゴリ"),
    ("masked", "Номер обращения:id, Текст обращения:text, Категория:class", "text-classification text=Текст обращения label=Категория"),
    ("masked", "Star Rating:stars, Review Title:title, Review Text:text, Developer Reply Text:text",
     "text-classification text=Review Title text_pair=Review Text label=Star Rating"),
    ("masked", "headline:text, category:class, short_description:text", "text-classification text=headline text_pair=short_description label=category"),
    ("masked", "title:title, body:text, verdict:class, score:id", "? text-classification text=title text_pair=body label=verdict"),
    ("masked", "текст:text, метка:class", "text-classification text=текст label=метка"),
    ("masked", "id:id, texto:text, etiqueta:class", "text-classification text=texto label=etiqueta"),
    ("masked", "qid:id, question_text:text, target:flag", "text-classification text=question_text label=target"),
    ("masked", "clean_text:text, is_depression:flag", "text-classification text=clean_text label=is_depression"),
    ("encoder", "comments:text, hate:class", "text-classification text=comments label=hate"),
    ("decoder", "user:text, assistant:text", "causal-lm prompt=user completion=assistant"),
    ("decoder", "问题:text, 回答:text", "causal-lm prompt=问题 completion=回答"),
    ("decoder", "article:text, summary:text", "causal-lm prompt=article completion=summary"),
    ("decoder", "input:text, gt:text", "causal-lm prompt=input completion=gt"),
    ("encoder", "query:text, pos:text", "sentence-embedding query=query text=pos"),
    ("encoder", "Unnamed: 0:id, Unnamed: 0:id, text:text, label:class", "text-classification text=text label=label"),
    ("encoder", "prompt:text, A:title, B:title, answer:letter", "multiple-choice question=prompt endings=A+B answer=answer"),
    ("masked", "title:title, body:text, rating:stars, reply:none", "text-classification text=title text_pair=body label=rating"),
    ("masked", "Titulo:title, Opinion:text, Calificacion:stars", "? text-classification text=Titulo text_pair=Opinion label=Calificacion"),
    ("masked", "标题:title, 内容:text, 类别:class", "text-classification text=标题 text_pair=内容 label=类别"),
    ("masked", "問い合わせ内容:text, 分類:class", "text-classification text=問い合わせ内容 label=分類"),
    ("masked", "Kundennummer:id, Kundenmeinung:text, Sterne:stars", "text-classification text=Kundenmeinung label=Sterne"),
    ("masked", "descripcion:text, calificacion:stars", "text-classification text=descripcion label=calificacion"),
    ("decoder", "db_id:class, query:text, question:text", "causal-lm prompt=question completion=query"),
    ("decoder", "text:text, url:id, language:class, token_count:id", "causal-lm text=text"),
    ("encoder", "query:text, answer:text", "sentence-embedding query=query text=answer"),
    ("masked", "Questions:text, A:title, B:title, Correct:letter", "multiple-choice question=Questions endings=A+B answer=Correct"),
    ("masked", "Betreff:title, Nachricht:text, label:class", "text-classification text=Betreff text_pair=Nachricht label=label"),
    ("masked", "Datum:date, Produkt:class, Bewertung:stars, Bewertungstext:text, Autor:title", "text-classification text=Bewertungstext label=Bewertung"),
    ("masked", "المستخدم:title, المراجعة:text, التقييم:stars", "text-classification text=المراجعة label=التقييم"),
    ("masked", "auteur:title, note:stars, commentaire:text", "text-classification text=commentaire label=note"),
    ("masked", "review_comment_title:title, review_comment_message:text, review_score:stars", "text-classification text=review_comment_title text_pair=review_comment_message label=review_score"),
    ("masked", "content:text, score:stars, replyContent:text", "text-classification text=content label=score"),
    ("masked", "descripcion:text, categoria:class, estado:letter", "text-classification text=descripcion label=categoria"),
    ("decoder", "flags:letter, instruction:text, category:class, intent:class, response:text", "causal-lm prompt=instruction completion=response"),
    ("decoder", "instruction:text, input:none, output:text, text:text", "causal-lm prompt=instruction input=input completion=output"),
    ("masked", "Anfrage:text, Abteilung:class, Eingangsdatum:date", "text-classification text=Anfrage label=Abteilung"),
    ("masked", "commentaire:text, polarité:flag", "text-classification text=commentaire label=polarité"),
    ("masked", "oggetto:title, messaggio:text, reparto:class", "text-classification text=oggetto text_pair=messaggio label=reparto"),
    ("encoder", "Sentiment:class, Sentiment_Polarity:score, Translated_Review:text", "text-classification text=Translated_Review label=Sentiment"),
    ("masked", "ticket_no:id, betreff:title, text:text, kategorie:class", "text-classification text=betreff text_pair=text label=kategorie"),
    ("masked", "review_text:text, summary:title, rating:stars", "text-classification text=summary text_pair=review_text label=rating"),
    # The first line.
    ("decoder", "Query:text, Agent Response:text, Intent:class", "causal-lm prompt=Query completion=Agent Response"),
    ("decoder", "Patient:text, Doctor:text, Description:text", "? causal-lm prompt=Patient completion=Doctor"),
    ("masked", "review_type:class, review_content:text, top_critic:flag", "text-classification text=review_content label=review_type"),
    ("masked", "Average_Score:score, Negative_Review:text, Positive_Review:text, Reviewer_Score:score",
     "? text-classification text=Negative_Review text_pair=Positive_Review label=Reviewer_Score"),
    ("encoder", "Song:title, Album:title, Lyrics:text, Explicit:flag", "? text-classification text=Lyrics label=Explicit"),
    ("encoder", "Recenzja:text, Odpowiedź:text, Gwiazdki:stars", "? text-classification text=Recenzja label=Gwiazdki"),
    ("masked", "title:title, description:text, category:class, priority:letter", "? text-classification text=title text_pair=description label=category"),
    ("masked", "Betreff:title, Text:text, Typ:class, Priorität:letter", "? text-classification text=Betreff text_pair=Text label=Typ"),
    ("masked", "title:title, text:text, score:id, by:title", "? text-classification text=title text_pair=text label=score"),
    ("masked", "Email:word, Score:stars, Feedback:text", "? text-classification text=Feedback label=Score"),
    ("masked", "sentiment:class, query:same, text:text", "? text-classification text=text label=sentiment"),
    ("masked", "Resume_str:text, Resume_html:text, Category:class", "? text-classification text=Resume_str label=Category"),
    ("masked", "avis:text, note:stars, type:split", "? text-classification text=avis label=note"),
    ("masked", "微博内容:text, 情感倾向:sign, 转发:flag", "? text-classification text=微博内容 label=情感倾向"),
    ("masked", "Ticket text:text, Ticket labels:several, Product type:class", "? text-classification text=Ticket text label=Ticket labels"),
    ("masked", "Ticket text:text, Ticket type:gaps, Ticket queue:flag", "? text-classification text=Ticket text label=Ticket queue"),
    ("masked", "Text:text, Summary:title, Score:stars", "text-classification text=Summary text_pair=Text label=Score"),
    ("masked", "Text:text, Language:class", "? text-classification text=Text label=Language"),
    ("encoder", "search_query:title, product_name:title, click_label:flag", "? text-classification text=search_query text_pair=product_name label=click_label"),
    ("masked", "Comment:text, Score:stars, Email:title, Name:title", "? text-classification text=Comment label=Score"),
    ("masked", "Id:id, Subject:title, Description:text, Status:class, Type:class, Priority:class", "? text-classification text=Subject text_pair=Description label=Type"),
    ("masked", "TITLE:text, CATEGORY:class, STORY:id, PUBLISHER:class", "? text-classification text=TITLE label=CATEGORY"),
    ("masked", "comment_text:text, toxic:flag, obscene:flag, threat:flag", "? text-classification text=comment_text label=toxic+obscene+threat"),
    ("masked", "body:text, verdict:class, isVerified:flag, stars:stars, review:text", "? text-classification text=body text_pair=review label=stars"),
    ("decoder", "title:title, ingredients:text, directions:text", "? causal-lm prompt=ingredients completion=directions"),
    ("encoder", "resume_text:text, job_description_text:text, label:class", "? text-classification text=resume_text text_pair=job_description_text label=label"),
    ("encoder", "product_title:title, search_term:title, relevance:score", "? sentence-embedding query=search_term text=product_title score=relevance"),
    ("encoder", "v1:class, v2:text, :none", "? text-classification text=v2 label=v1"),
    ("masked", "review_text:text, overall_rating:stars, churned:flag", "? text-classification text=review_text label=overall_rating"),
    ("encoder", "Avis du client:text, Note:stars", "text-classification text=Avis du client label=Note"),
    ("encoder", "premise:text, hypo:text, label:class", "? text-classification text=premise text_pair=hypo label=label"),
    ("encoder", "q1:text, q2:text, label:flag", "? text-classification text=q1 text_pair=q2 label=label"),
    ("encoder", "Summary:title, Description:text, Issue Type:class, Labels:title, Labels:title", "? text-classification text=Summary text_pair=Description label=Issue Type"),
    ("encoder", "Frage:text, Antwort:text", "? sentence-embedding query=Frage text=Antwort"),
    ("encoder", "frage:text, antwort_a:title, antwort_b:title, richtig:letter", "? multiple-choice question=frage endings=antwort_a+antwort_b answer=richtig"),
    ("decoder", "question:text, context:text, answer:text", "? causal-lm prompt=question input=context completion=answer"),
    ("decoder", "Customer Message:text, Agent Reply:text", "? causal-lm prompt=Customer Message completion=Agent Reply"),
    ("t5", "en:text, fr:text", "? translation source=en target=fr"),
    ("encoder", "query:text, document:text, is_relevant:flag, split_id:id", "? sentence-embedding query=query text=document score=is_relevant"),
    ("decoder", "query:text, reply:text, rating:stars", "? causal-lm prompt=query completion=reply"),
    ("decoder", "user:title, ts:score, text:text", "causal-lm text=text"),
    ("encoder", "title_1:title, title_2:title, match:flag", "? text-classification text=title_1 text_pair=title_2 label=match"),
    ("encoder", "song:title, artist:title, lyrics:text, genre:class", "text-classification text=lyrics label=genre"),
    ("encoder", "Title:title, Price:score, Brand:class, Reviews:text, Rating:stars", "? text-classification text=Reviews label=Rating"),
    ("encoder", "Game Title:title, Review:text, Recommended:class", "text-classification text=Review label=Recommended"),
    ("encoder", "Title:title, Director:title, Plot:text, Genre:class", "? text-classification text=Plot label=Genre"),
    ("encoder", "review:text, owner_reply:text, stars:stars", "? text-classification text=review label=stars"),
    ("encoder", "kommentar:text, antwort_text:text, stimmung:class", "? text-classification text=kommentar label=stimmung"),
    ("encoder", "post_text:text, response_text:text, label:class", "? text-classification text=post_text text_pair=response_text label=label"),
    ("encoder", "content:text, quoted_text:text, label:class", "? text-classification text=content label=label"),
    ("encoder", "title:title, description:text, has_logo:flag, employment_type:class, fraudulent:flag", "? text-classification text=title text_pair=description label=fraudulent"),
    ("encoder", "message:text, channel:class, account_type:class, churned:flag", "? text-classification text=message label=churned"),
    ("encoder", "post:text, topic:class, misinformation:flag", "? text-classification text=post label=misinformation"),
    ("encoder", "description:text, category:class, active:flag", "text-classification text=description label=category"),
    ("masked", "Title:title, Review:text, Polarity:stars, Town:class, Type:class", "? text-classification text=Title text_pair=Review label=Polarity"),
    ("encoder", "doc:text, code:text, label:flag", "? text-classification text=doc text_pair=code label=label"),
    # Two opinions.
    ("masked", "review_text:text, rating:stars, polarity:flag", "? text-classification text=review_text label=rating"),
    ("masked", "tweet:text, hate_class:class, Hate Rating:stars", "? text-classification text=tweet label=hate_class"),
    ("masked", "abusive_text:class, label:flag", "? text-classification text=abusive_text label=label"),
    # Of labels, who deals with a request, then what it is, and how urgent last; next to the text.
    ("masked", "Subject:title, Description:text, Priority:class, Group:class", "? text-classification text=Subject text_pair=Description label=Group"),
    ("masked", "Titre:title, Description:text, Priorité:class, Catégorie:class", "? text-classification text=Titre text_pair=Description label=Catégorie"),
    ("masked", "comment_text:text, comment_text_orig:text, conspiratorial:flag", "? text-classification text=comment_text label=conspiratorial"),
    ("masked", "comment_text:text, Sub1_Toxic:flag, Sub2_Engaging:flag, Sub3_Claim:flag", "? text-classification text=comment_text label=Sub1_Toxic+Sub2_Engaging+Sub3_Claim"),
    # Translations, in the order of the file.
    ("t5", "id:id, ja_sentence:text, en_sentence:text, note:text", "? translation source=ja_sentence target=en_sentence"),
    ("t5", "English (United States):text, French (France):text", "? translation source=English (United States) target=French (France)"),
    ("t5", "toxic_comment:text, neutral_comment1:text, neutral_comment2:text", "? summarization source=toxic_comment target=neutral_comment1"),
    ("decoder", "istruzione:text, contesto:text, risposta:text", "? causal-lm prompt=istruzione input=contesto completion=risposta"),
    ("decoder", "title:title, ask:text, answer:text, department:class", "? causal-lm prompt=ask completion=answer"),
    ("decoder", "text:text, language_score:score, url:id", "causal-lm text=text"),
    ("t5", "dialogue:text, summary:text, topic:class", "summarization source=dialogue target=summary"),
    ("masked", "comment:text, offensive_label:flag, link_post:id", "text-classification text=comment label=offensive_label"),
    ("masked", "sentence1:text, sentence2:text, gold_label:class, label1:class, label2:class", "text-classification text=sentence1 text_pair=sentence2 label=gold_label"),
    ("masked", "Message:text, Topic:class, CSAT rating:stars", "? text-classification text=Message label=Topic"),
    # What must change.
    ("encoder", "user_id:id, product_id:id, rating:stars", "! join the texts of queries and documents by them"),
    ("encoder", "age:stars, income:id, churn:flag", "! It has no column of texts"),
    ("decoder", "prompt:text, completion:text, label:flag", "? kto prompt=prompt completion=completion label=label"),
    ("encoder", "Sentence #:id, Word:letter, Tag:letter", "! has a word in each row"),
    ("encoder", "query:text, negative:text", "! Name the columns by task"),
])  # fmt: skip
def test_columns_are_found_or_proposed(
    model: str, columns: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.csv").write_text(table(columns))
    if expected[0] not in "?!":
        assert outcome(tmp_path, model, {}, monkeypatch) == expected
        return
    with pytest.raises(RecipeError) as refusal:
        outcome(tmp_path, model, {}, monkeypatch)
    lines = proposed_lines(refusal.value)
    assert len(lines) <= 3
    if expected[0] == "!":
        assert expected[2:] in str(refusal.value)
        assert not lines
        return
    assert outcome(tmp_path, model, lines[0], monkeypatch) == expected[2:]
    for line in lines[1:]:  # the others plan, too
        outcome(tmp_path, model, line, monkeypatch)


@pytest.mark.parametrize(("model", "columns", "argv", "expected"), [
    ("encoder", "q:text, passage:text, score:score", "task=sentence-embedding text_column=q text_pair_column=passage",
     "sentence-embedding query=q text=passage score=score"),
    ("decoder", "p:text, completion:text, label:flag", "prompt_column=p completion_column=completion", "! task=kto"),
    ("t5", "en:text, fr:text", "source_lang=en target_lang=fr", "translation source=en target=fr"),
    ("encoder", "frage:text, z:title, a:title, loesung:letter", "task=multiple-choice text_column=frage label_column=loesung columns=endings:z,endings:a",
     "multiple-choice question=frage endings=z+a answer=loesung"),
    ("decoder", "prompt:text, completion:text, feedback:class", "task=causal-lm", "! ignore_columns=feedback"),
    ("encoder", "score_given:stars, why:text, Tags:none", "text_column=why", "text-classification text=why label=score_given"),
    ("encoder", "comments:text, hate:class", "header=false", "! names columns, and header=false is given"),
])  # fmt: skip
def test_columns_that_are_named_are_read(
    model: str, columns: str, argv: str, expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.csv").write_text(table(columns))
    given = dict(pair.split("=", 1) for pair in argv.split())
    if expected[0] != "!":
        assert outcome(tmp_path, model, given, monkeypatch) == expected
        return
    with pytest.raises(RecipeError, match=expected[2:]):
        outcome(tmp_path, model, given, monkeypatch)


ROWS = table("text:text, label:class")
CONLL = "Ada\tB-PER\t1\nsat\tO\t1\n\nBo\tB-PER\t2\nsat\tO\t2\n\n" * 9


@pytest.mark.parametrize(("files", "task", "expected"), [
    ({"SemEval2016-train.csv": ROWS}, "", "text-classification text=text label=label"),
    ({"GermEval21.csv": ROWS}, "", "text-classification text=text label=label"),
    ({"UserTesting.csv": ROWS}, "", "text-classification text=text label=label"),
    ({"train_0.csv": ROWS, "train_few_all.csv": ROWS + "\nmore,good"}, "", "! would be read twice"),
    ({"a.csv": table("text:text, label:class, w:class").replace(",good", ",TRAIN").replace(",bad", ",TEST")},
     "", "! may hold the split of each row"),
    ({"a.txt": "words\tlabels\tsentence_id\n" + CONLL}, "token-classification", "! as have rows before another sentence"),
    ({"a.txt": "## guid\ttext 1\n" + CONLL.replace("\t1\n", "\n").replace("\t2\n", "\n")}, "token-classification",
     "token-classification tokens=tokens tags=tags"),
    ({"a.txt": CONLL}, "token-classification", "! label_column=column_2"),
    ({"a.csv": "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"}, "", "! git lfs pull"),
    ({"a.csv": "a.txt".ljust(257, "\0") + "ustar"}, "", "! Unpack it"),
])  # fmt: skip
def test_names_of_files_and_their_first_lines(
    files: dict[str, str], task: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name, text in files.items():
        (tmp_path / "data" / name).write_text(text)
    given = {"task": task} if task else {}
    if expected[0] != "!":
        assert outcome(tmp_path, "encoder", given, monkeypatch) == expected
        return
    with pytest.raises(RecipeError, match=expected[2:]):
        outcome(tmp_path, "encoder", given, monkeypatch)


def test_lines_are_tried_by_one_host_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """A host that refuses its shard must not wait for those that do not."""

    def gather(value: object) -> list[object]:
        raise AssertionError("exchanged between hosts")

    monkeypatch.setattr(shards, "gather_objects", gather)
    monkeypatch.setenv("WORLD_SIZE", "2")
    configured = {"train": {"S3DistributionType": "ShardedByS3Key"}}
    monkeypatch.setenv("SM_INPUT_DATA_CONFIG", json.dumps(configured))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATIONS["masked"]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.csv").write_text(table("title:title, review:text, stars:stars"))
    parsed = parse(["--model_id", str(tmp_path), "--eval_strategy", "no"])
    with pytest.raises(RecipeError, match="text_column=title,review"):
        detection.find(parsed, {"train": tmp_path / "data"})


def test_answers_without_one_place_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"question": f"who sat {n}?", "context": context, "answer": "Ada"}
        for n, context in enumerate(["Ada sat", "so Ada sat", "Ada saw Ada"] * 4)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    parsed = parse(["--model_id", "x", "--task", "question-answering", "--eval_strategy", "no"])
    made = questions.load({"train": tmp_path}, parsed)
    assert made.train["starts"][:] == [[0], [3]] * 4
    assert any("4 questions of" in note for note in made.notes)
    (tmp_path / "data.json").write_text(json.dumps(rows[2::3]))
    with pytest.raises(RecipeError, match=r"4 questions of .* at which each answer begins"):
        questions.load({"train": tmp_path}, parsed)
