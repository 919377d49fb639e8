"""Evaluation by generation: the model answers prompts of the evaluation data (do_generate)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from recipe.batching.batches import Samples
from recipe.console import say
from recipe.data.column_names import MESSAGES, PROMPT
from recipe.data.held_out import DataSets
from recipe.errors import DataError, HyperparameterError
from recipe.reports.last_answers import PredictedAnswers
from recipe.reports.section import Section, spread_rows
from recipe.runtime.device import gather_objects
from recipe.settings import ModelSettings, split_values
from recipe.tasks import completion_judges
from recipe.tasks.base import whole_model
from recipe.tasks.causal_lm import answer_scores
from recipe.tasks.causal_lm.exchanges import (
    PromptAnswer,
    answer_prompts,
    read_exchanges,
    written_turn,
)

_USUAL_TOKENS, _SHOWN, _TRIED = 256, 8, 2


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswers(PredictedAnswers):
    """Answers to prompts of a split."""

    exchanges: Sequence[PromptAnswer]
    texts: Sequence[str]
    before: Mapping[int, str] = field(default_factory=dict)
    """Answers of the model before training, by rows."""
    count: int
    """The rows of the split."""

    def __len__(self) -> int:
        return len(self.texts)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield for each row the line that do_predict writes."""
        for exchange, text in zip(self.exchanges, self.texts, strict=True):
            yield {"row": exchange.row, "text": text, "true": exchange.answer}

    def sections(self) -> Sequence[Section]:
        """Return a table of some prompts, expected answers, and those before and after training."""
        given = dict(zip((one.row for one in self.exchanges), self.texts, strict=True))
        rows = []
        for exchange in _some(self.exchanges):
            before = [self.before.get(exchange.row, "")] if self.before else []
            cells = [exchange.shown, exchange.answer, *before, given[exchange.row]]
            rows.append(cells)
        columns = ("prompt", "expected", *(["before"] if self.before else []), "after")
        return [
            Section(
                title=f"Answers, {self.split} data",
                note=f"The scores are of {len(self)} of {self.count} rows.",
                columns=columns,
                rows=rows,
            )
        ]


def _some(exchanges: Sequence[PromptAnswer]) -> list[PromptAnswer]:
    """Return those that a report shows."""
    return [exchanges[position] for position in spread_rows(len(exchanges), _SHOWN)]


class Answering:
    """Lets the model answer prompts at each evaluation, and scores the answers."""

    def __init__(
        self, settings: ModelSettings, data: DataSets, scores: str, code: Path | None
    ) -> None:
        """
        Args:
            scores: The hyperparameter generated_scores.
            code: The channel code, if there is one.

        Raises:
            HyperparameterError: A score is unknown, the data has no prompts, or the weights will be
                sharded.
            DataError: The evaluation data is sharded, or a function of rewards.py fails for its
                first rows.
        """
        self._settings, self._data = settings, data
        self._splits: list[tuple[str, Dataset, Samples]] = []
        self._written: dict[tuple[str, int], str] = {}
        self._has_logged = False
        self.before: Mapping[int, str] = {}
        self.last: GeneratedAnswers | None = None
        """The answers of the last evaluation."""
        if not {PROMPT, MESSAGES} & {*data.evaluation.column_names}:
            raise HyperparameterError(
                "do_generate=True asks for answers to prompts, and the data has texts without.",
                "Leave it out, or give columns of prompts and completions, or of messages.",
            )
        if settings.passed.get("fsdp"):
            raise HyperparameterError(
                "do_generate=True needs all weights on one device, and fsdp=True shards them.",
                "Leave one of them out.",
            )
        if data.sharded & {"evaluation", "test"}:
            raise DataError(
                "do_generate=True answers the same evaluation rows on all hosts, and they are "
                "sharded (ShardedByS3Key).",
                "Give evaluation data in a channel of its own, FullyReplicated.",
            )
        names = split_values(scores)
        plain = {name: answer_scores.BY_ANSWER.get(name) for name in answer_scores.NAMES}
        functions = completion_judges.find_judges("generated_scores", names, plain, code)  # type: ignore[arg-type]
        mine = {
            name: completion_judges.CheckedJudge(name, function, self._where, "score")
            for name, function in functions.items()
            if name not in plain
        }
        self.names: Mapping[str, Any] = {**functions, **mine}
        if first := read_exchanges(data.evaluation, range(min(_TRIED, len(data.evaluation)))):
            for text in ("", None):
                answer_scores.score(
                    mine, first, [one.answer if text is None else text for one in first], str
                )

    def remember(self, name: str, split: Dataset, samples: Samples) -> None:
        """Keep a split whose samples will be evaluated."""
        self._splits.append((name, split, samples))

    def _where(self, prompt: Any) -> str:
        """Return the file and line of the row with a prompt."""
        for use, split in (("evaluation", self._data.evaluation), ("test", self._data.test)):
            for exchange in read_exchanges(split, range(len(split))) if split is not None else ():
                if exchange.prompt == prompt:
                    return self._data.where(use, exchange.row)
        return repr(prompt)[:80]

    def _chosen(self, split: Dataset) -> list[PromptAnswer]:
        """Return the prompts that are answered, the same in each evaluation."""
        most = len(split) if self._settings.predicts else self._settings.generated_rows
        return read_exchanges(split, spread_rows(len(split), most))

    def _answers(self, trainer: Any, exchanges: Sequence[PromptAnswer]) -> Mapping[int, str] | None:
        """Return the answers of all processes together; None if no process has the whole model."""
        if (whole := whole_model(trainer)) is None:
            if not self._has_logged:
                say("do_generate: no prompt is answered, since XLA is in use")
            self._has_logged = True
            return None
        args, most = trainer.args, self._settings.max_completion_length or _USUAL_TOKENS
        mine = exchanges[args.process_index :: args.world_size]
        with trainer.compute_loss_context_manager():
            answers = answer_prompts(*whole, mine, most)
        return {row: text for part in gather_objects([*answers.items()]) for row, text in part}

    def answer_before(self, trainer: Any) -> None:
        """Keep the answers before training that a report shows. All processes call it."""
        split = self._data.evaluation if self._data.test is None else self._data.test
        self.before = self._answers(trainer, _some(self._chosen(split))) or {}

    def scores(self, trainer: Any, samples: Samples) -> dict[str, float]:
        """Return the scores of the answers to prompts of an evaluated split."""
        name, split = next((name, split) for name, split, made in self._splits if made is samples)
        exchanges = self._chosen(split)
        answers = self._answers(trainer, exchanges)
        if answers is None:
            return {}
        kept = [exchange for exchange in exchanges if exchange.row in answers]
        if len(kept) < len(exchanges) and not self._has_logged:
            say(
                f"do_generate: {len(exchanges) - len(kept)} of {len(exchanges)} prompts leave no "
                "room for an answer, and are left out"
            )
            self._has_logged = True
        texts = [answers[exchange.row] for exchange in kept]
        judged = "test" if self._data.test is not None else "evaluation"
        self.last = GeneratedAnswers(
            split=name, exchanges=kept, texts=texts, count=len(split),
            before=self.before if name == judged else {},
        )  # fmt: skip
        tokenizer = trainer.processing_class

        def written(exchange: PromptAnswer) -> str:
            key = name, exchange.row
            if key not in self._written:
                self._written[key] = written_turn(exchange, tokenizer) if exchange.turn else ""
            return self._written[key]

        return answer_scores.score(self.names, kept, texts, written) if kept else {}
