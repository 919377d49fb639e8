"""Scores of a saved model, from what do_predict wrote or from the plain libraries' answers."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import plain_answers
from tests.support.plain_answers import Row, load

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    """A trained model, the one that it began as, the rows, and the lines of predictions.jsonl."""

    model: Path
    start: Path
    rows: Sequence[Row]
    lines: Sequence[Row]


def _class_scores(true: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
    from sklearn import metrics

    def mean(score: Any, average: str) -> float:
        return float(score(true, predicted, average=average, zero_division=0))

    return {
        "accuracy": float(metrics.accuracy_score(true, predicted)),
        "precision": mean(metrics.precision_score, "macro"),
        "recall": mean(metrics.recall_score, "macro"),
        "f1_macro": mean(metrics.f1_score, "macro"),
        "f1_weighted": mean(metrics.f1_score, "weighted"),
    }


def _loss(chances: Sequence[float]) -> float:
    return -float(np.log(chances).mean())


def classes(judged: Judged) -> Scores:
    """Return scikit-learn's scores, and the loss of the plain library's probabilities."""
    true = [row["label"] for row in judged.rows]
    assert [line["true"] for line in judged.lines] == true
    _, answers = plain_answers.classes(judged.model, judged.rows)
    assert [line["label"] for line in judged.lines] == [answer[0]["label"] for answer in answers]
    chances = [{entry["label"]: entry["score"] for entry in answer} for answer in answers]
    loss = _loss([scores[label] for scores, label in zip(chances, true, strict=True)])
    return {**_class_scores(true, [line["label"] for line in judged.lines]), "loss": loss}


def images(judged: Judged) -> Scores:
    """Return scikit-learn's scores. Lines are in the order of the files, class by class."""
    true = [line["true"] for line in judged.lines]
    assert Counter(true) == Counter(row["label"] for row in judged.rows)
    return _class_scores(true, [line["label"] for line in judged.lines])


def tags(judged: Judged) -> Scores:
    """Return seqeval's scores of entities, and the share of words with the right tag."""
    from seqeval import metrics

    true = [row["ner_tags"] for row in judged.rows]
    assert [line["true"] for line in judged.lines] == true
    predicted = [line["tags"] for line in judged.lines]
    return {
        "precision": float(metrics.precision_score(true, predicted, zero_division=0)),
        "recall": float(metrics.recall_score(true, predicted, zero_division=0)),
        "f1": float(metrics.f1_score(true, predicted, zero_division=0)),
        "accuracy": float(metrics.accuracy_score(true, predicted)),
    }


def _normal(text: str) -> list[str]:
    """Return the words that SQuAD's script compares."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def spans(judged: Judged) -> Scores:
    """Return the scores of SQuAD's script."""
    exact, overlaps = [], []
    for row, line in zip(judged.rows, judged.lines, strict=True):
        assert line["true"] == row["answers"]["text"]
        true, given = _normal(line["true"][0]), _normal(line["answer"])
        exact.append(true == given)
        common = sum((Counter(true) & Counter(given)).values())
        overlaps.append(2 * common / (len(true) + len(given)))
    return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(overlaps))}


def choices(judged: Judged) -> Scores:
    """Return scikit-learn's accuracy, and the loss of the written probabilities."""
    from sklearn.metrics import accuracy_score

    true = ["ABCD".index(row["answer"]) for row in judged.rows]
    assert [line["true"] for line in judged.lines] == true
    chances = [line["scores"][right] for line, right in zip(judged.lines, true, strict=True)]
    accuracy = accuracy_score(true, [line["index"] for line in judged.lines])
    return {"accuracy": float(accuracy), "loss": _loss(chances)}


def written(target: Callable[[Row], str]) -> Callable[[Judged], Scores]:
    """Return what scores generated texts by sacrebleu and rouge-score."""

    def scores(judged: Judged) -> Scores:
        import sacrebleu
        from rouge_score.rouge_scorer import RougeScorer

        true = [target(row) for row in judged.rows]
        assert [line["true"] for line in judged.lines] == true
        given = [line["text"] for line in judged.lines]
        kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        scorer = RougeScorer(kinds, use_stemmer=True)
        scored = [scorer.score(*pair) for pair in zip(true, given, strict=True)]
        means = {kind: 100 * float(np.mean([s[kind].fmeasure for s in scored])) for kind in kinds}
        bleu, chrf = sacrebleu.corpus_bleu(given, [true]), sacrebleu.corpus_chrf(given, [true])
        return {**means, "bleu": bleu.score, "chrf": chrf.score}

    return scores


def vectors(judged: Judged) -> Scores:
    """Return the scores of sentence-transformers' evaluator, over all texts as the corpus."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

    rows = judged.rows
    corpus = dict.fromkeys(row[key] for row in rows for key in ("positive", "negative"))
    evaluator: Any = InformationRetrievalEvaluator(
        {str(number): row["anchor"] for number, row in enumerate(rows)},
        {text: text for text in corpus},
        {str(number): {row["positive"]} for number, row in enumerate(rows)},
        accuracy_at_k=[1], precision_recall_at_k=[1, 10, 100], show_progress_bar=False,
    )  # fmt: skip
    actual = evaluator(SentenceTransformer(str(judged.model), device="cpu"))
    names = ("ndcg@10", "mrr@10", "recall@1", "recall@10", "recall@100")
    return {name.replace("@", "_at_"): actual[f"cosine_{name}"] for name in names}


def ranks(judged: Judged) -> Scores:
    """Return the scores of sentence-transformers' evaluator of rerankers."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    samples = []
    for row in judged.rows:
        right, wrong = (
            [t for t, label in zip(row["documents"], row["labels"], strict=True) if label == wanted]
            for wanted in (1, 0)
        )
        samples.append({"query": row["query"], "positive": right, "negative": wrong})
    evaluator: Any = CrossEncoderRerankingEvaluator(samples, show_progress_bar=False)  # type: ignore[arg-type]
    actual = evaluator(CrossEncoder(str(judged.model), device="cpu"))
    return {f"{name}_at_10": actual[f"{name}@10"] for name in ("ndcg", "mrr")}


def _log_chances(model: Any, tokenizer: Any, prompt: str, answer: str) -> tuple[Any, Any]:
    """Return the log-probability of each token of an answer and its end; whether each is likeliest."""
    import torch

    begin = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([*begin, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(begin) - 1 : -1].double()
    learned = ids[len(begin) :]
    chances = logits.log_softmax(-1).gather(-1, learned[:, None])[:, 0]
    return chances.numpy(), (logits.argmax(-1) == learned).numpy()


def completions(judged: Judged) -> Scores:
    """Return the perplexity of all learned tokens alike, and how many are the likeliest."""
    model, tokenizer = load(judged.model, "AutoModelForCausalLM")
    pairs = [
        _log_chances(model, tokenizer, row["prompt"], row["completion"]) for row in judged.rows
    ]
    chances, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return {"perplexity": math.exp(-chances.mean()), "token_accuracy": float(right.mean())}
