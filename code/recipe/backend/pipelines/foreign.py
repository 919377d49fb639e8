"""The tasks that no `serve` answers, by pipelines of transformers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.pipelines import PIPELINE_REGISTRY

from recipe.backend import bounds, turns, zero_shot
from recipe.backend.bounds import Bound
from recipe.backend.generation.decoding import set_seed
from recipe.backend.pipelines.inputs import (
    CLASSIFIERS,
    GENERATION,
    WORDS,
    InputReader,
    PipelineInputs,
    example_of,
    inputs_of,
)
from recipe.backend.pipelines.library import lacks_library, load_pipeline, registered_name
from recipe.backend.requests.payloads import TEXT_KEYS, BadRequest, Request
from recipe.backend.requests.probes import draw_images
from recipe.backend.served_task import ServedTask
from recipe.compat import UNBOUNDED, positions_of
from recipe.errors import describe_error
from recipe.models.sources.origin import Origin

_FAULTS = (ValueError, TypeError, KeyError, IndexError, AssertionError, RuntimeError, NameError)
"""What pipelines raise for inputs that they cannot read: the model has answered others at start."""
_OF_INPUTS = re.compile(r"\b(sizes?|shapes?|dimensions?|length)\b", re.IGNORECASE)
"""What a RuntimeError is about that torch raises for inputs that are too short or too long."""
_RATE, _NEW_TOKENS, _BEAMS = 16_000, 256, 5
"""What pipelines assume."""
_MOST_BEAMS = 64
_MOST_CELLS = 8
"""The most cells of a table, as a multiple of the tokens that the model reads."""


@dataclass(frozen=True, kw_only=True)
class Foreign(ServedTask):
    """A task that a pipeline of transformers answers, one request at a time."""

    task: str
    pipeline: Any
    reads: PipelineInputs
    rate: int
    """Samples a second of the audio that the model reads."""
    limit: int
    """The tokens of a text that the model reads, with those that it generates."""

    @classmethod
    def load(cls, origin: Origin, task: str, environ: Mapping[str, str]) -> Foreign:
        """Load the pipeline of a task (`load_pipeline`)."""
        pipeline = load_pipeline(origin, task, environ)
        kind = PIPELINE_REGISTRY.supported_tasks[registered_name(task)].get("type", "")
        reads = inputs_of(task, kind, pipeline)
        if reads.generates and pipeline.model.can_generate():
            reads = replace(reads, parameters=(*reads.parameters, *GENERATION))
        if "seed" not in reads.parameters:
            turns.pause_before_calls(pipeline.model)
        processor = getattr(pipeline, "processor", None)
        extractor = pipeline.feature_extractor or getattr(processor, "feature_extractor", None)
        rate = getattr(extractor, "sampling_rate", None) or _RATE
        texts: Any = pipeline.model.config.get_text_config()
        limits = [getattr(texts, "max_position_embeddings", None), positions_of(pipeline.model)]
        if "max_new_tokens" not in reads.parameters:
            limits.append(getattr(pipeline.tokenizer, "model_max_length", None))
        limit = int(min(number for number in limits if number))
        return cls(task=task, pipeline=pipeline, reads=reads, rate=rate, limit=limit)

    def example(self, text: str) -> Request | None:
        """Return a request that costs little; None if none is known for the task."""
        if self.reads.bare in ("other", "video"):
            return None
        tokenizer = self.pipeline.tokenizer
        # Not all models read a whole sentence, least of all of languages without spaces.
        while tokenizer is not None and len(tokenizer.tokenize(text)) > max(1, self.limit // 2):
            text = text[: len(text) // 2]
        parameters: dict[str, Any] = {
            name: value for name, value in _EXAMPLES.items() if name in self.reads.parameters
        }
        config = self.pipeline.model.config
        if self.reads.bare == "speech":
            # A few tokens of music make no sound, and Bark's three models have no common length.
            parameters = {} if config.model_type == "bark" else {**parameters, "max_new_tokens": 16}
            parameters = {k: v for k, v in parameters.items() if k in self.reads.parameters}
            if size := getattr(config, "speaker_embedding_dim", 0):
                parameters["speaker_embeddings"] = [0.0] * size
        value = self.reads.example(functools.partial(example_of, text=text))
        processor: Any = getattr(self.pipeline, "processor", None)
        if self.reads.chats:
            # Models of any-to-any may read no images.
            image = None if "audio" in self.reads.parts else value["images"]
            if getattr(processor, "chat_template", None):
                parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
                value = [{"role": "user", "content": parts[image is None :]}]
            elif image is None:
                value = text
            else:
                token = getattr(processor, "image_token", "")
                value = {"images": image, "text": f"{token}{text}"}
        return Request(inputs=[value], single=True, parameters=parameters)

    def probes(self) -> Sequence[Request]:
        if self.task != "image-classification":
            return ()
        labels = len(self.pipeline.model.config.id2label)
        parameters = {"top_k": labels, "function_to_apply": "none"}
        images = draw_images()
        return [Request(inputs=[image], single=True, parameters=parameters) for image in images]

    @property
    def form(self) -> str:
        bare, parts = self.reads.bare, self.reads.parts
        if bare in ("image", "audio", "video"):
            return f"{bare}-labels" if "candidate_labels" in self.reads.parameters else bare
        if self.reads.chats and "images" in parts:
            processor: Any = getattr(self.pipeline, "processor", None)
            return "image-text" if getattr(processor, "chat_template", None) else "json"
        if {"image", "question"} <= parts.keys():
            return "image-question"
        return "text" if bare == "speech" else "json"

    def describe(self) -> dict[str, Any]:
        described = super().describe()
        if described["form"] == "json" and self.reads.bare != "other":
            described["example_body"] = {"inputs": self.reads.example(WORDS.get)}
        if self.task in CLASSIFIERS:
            described["labels"] = len(self.pipeline.model.config.id2label)
        if not (keys := [key for key in self.reads.parts if key]):
            if self.reads.bare in ("image", "audio", "video"):
                example = 'Send the file, or for example {"inputs": "the file in base64"}.'
                described["bodies"]["example"] = example
            return described
        # The parts of an object may stand in the body itself.
        pairs = [*itertools.permutations([*keys, "image"], 2)]
        return {**described, "bodies": {"texts": TEXT_KEYS[:1], "pairs": pairs}}

    def prepare(self, request: Request) -> Request:
        """Return the pipeline's inputs. Each has the size 1, since its tokens are unknown."""
        request = self._checked(request)
        if self.reads.bare == "pair" and isinstance(request.inputs[0], str):
            request = replace(request, inputs=[request.inputs], single=True)
        reader = InputReader(self.reads, self.rate)
        values = request.read(reader.read)
        if "candidate_labels" in self.reads.parameters:
            labels, hypotheses = zero_shot.labels_and_hypotheses(request, len(values))
            parameters = {**request.parameters, "candidate_labels": labels}
            request = replace(request, parameters=parameters)
            reader.texts += hypotheses if "hypothesis_template" in parameters else labels
        arguments = self._arguments(request, reader)
        if self.limit < UNBOUNDED and reader.texts:
            # Without an embedding of a position, CUDA ends the process. Two tokens are special.
            longest = 2 + max(len(self.pipeline.tokenizer.tokenize(text)) for text in reader.texts)
            room = self.limit - longest
            new = request.parameters.get("max_new_tokens", 0)
            if room < new:
                raise BadRequest(
                    f"A text of {longest:,} tokens and {new:,} new ones: the model's limit is "
                    f"{self.limit:,} in all. Shorten them."
                )
            if not new and "generate_kwargs" in arguments and room < _NEW_TOKENS:
                arguments["generate_kwargs"]["max_new_tokens"] = max(1, room)
        cut = [
            index
            for index, value in enumerate(values)
            if getattr(self.pipeline, "type", "") == "tapas" and self._is_cut(value)
        ]
        sizes = [1] * len(values)
        return replace(request, values=values, sizes=sizes, truncated=cut, work=(reader, arguments))

    def _is_cut(self, value: Mapping[str, Any]) -> bool:
        """Return whether TAPAS drops rows of a table, which has more tokens than it reads. Raise
        BadRequest for one of which it would read far more first, or a place has no embedding,
        which ends the process on CUDA."""
        import pandas as pd  # type: ignore[import-untyped]

        questions = value["query"] if isinstance(value["query"], list) else [value["query"]]
        columns = value["table"].values()
        _, column_ids, row_ids, *_ = self.pipeline.model.config.type_vocab_sizes
        rows = max(map(len, columns), default=0)

        def hold(what: str, count: int, most: int) -> None:
            if count > most:
                raise BadRequest(
                    f"A table of {count:,} {what} is too large: {most:,} are the limit. Send the "
                    "part that the question is about."
                )

        hold("columns", len(columns), column_ids - 1)
        hold("cells", len(questions) * rows * len(columns), _MOST_CELLS * self.limit)
        table = pd.DataFrame({name: pd.Series(cells) for name, cells in value["table"].items()})
        table, tokenize = table.fillna(""), self.pipeline.tokenizer
        if rows >= row_ids:
            kept = tokenize(table, questions, truncation="drop_rows_to_fit")["token_type_ids"]
            hold("rows", max(types[2] for one in kept for types in one), row_ids - 1)
        try:
            encoded = tokenize(table, questions, truncation=False)
        except ValueError:  # more rows than the tokenizer counts
            return True
        return any(len(ids) > self.limit for ids in encoded["input_ids"])

    def _checked(self, request: Request) -> Request:
        """Return a request with valid parameters, within the bounds of what they cost."""
        given = dict(request.parameters)
        nested = given.pop("generate_kwargs", None) or {}
        if not isinstance(nested, dict) or given.keys() & nested.keys():
            raise BadRequest("generate_kwargs is no object, or repeats a parameter.")
        request = replace(request, parameters={**given, **nested})
        request = request.checked({*self.reads.parameters}, self.task)
        given = dict(request.parameters)
        if "max_new_tokens" in self.reads.parameters:
            new, beams = given.get("max_new_tokens", _NEW_TOKENS), given.get("num_beams", _BEAMS)
            reason = f"{len(request.inputs):,} inputs x {beams:,} beams x {new:,} new tokens"
            bounds.hold(Bound.WRITTEN, len(request.inputs) * beams * new, reason)
        limits = {"max_new_tokens": self.limit, "max_seq_len": self.limit, "num_beams": _MOST_BEAMS}
        for name, most in limits.items():
            if given.get(name, 0) > most:
                raise BadRequest(f"{name} is {given[name]}, and the limit is {most}.", name)
        if (length := given.get("chunk_length_s")) is not None:
            strides = given.get("stride_length_s", length / 6)
            strides = strides if isinstance(strides, list) else [strides, strides]
            if length - sum(strides) < 1:
                raise BadRequest(
                    f"Chunks of {length} s that share {sum(strides):g} s: leave 1 s to each.",
                    "chunk_length_s",
                )
        if "points_per_crop" in self.reads.parameters:
            side = given.get("points_per_crop", 32)
            crops = sum(4**layer for layer in range(given.get("crops_n_layers", 0) + 1))
            bounds.hold(Bound.ROWS, side**2 * crops, f"{side:,}^2 points x {crops:,} crops")
        return request

    def _arguments(self, request: Request, reader: InputReader) -> dict[str, Any]:
        """Return the keyword arguments of the pipeline."""
        arguments = {k: v for k, v in request.parameters.items() if k != "seed"}
        if "max_new_tokens" in self.reads.parameters:
            names = [name for name in (*GENERATION, "language", "task") if name in arguments]
            arguments["generate_kwargs"] = {name: arguments.pop(name) for name in names}
        if voice := arguments.pop("speaker_embeddings", None):
            arguments["forward_params"] = {"speaker_embeddings": torch.tensor([voice])}
        if "points_per_batch" in self.reads.parameters:
            # Each point has three masks of the image's size.
            most = max(1, Bound.SCORES.most // (3 * reader.pixels.largest))
            arguments["points_per_batch"] = min(arguments.get("points_per_batch", 64), most)
        return arguments

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """Return the pipeline's answers to each request, or an exception in their place."""
        answers: list[Any] = []
        for prepared in requests:
            try:
                answers.append(self._answer(prepared))
            except (BadRequest, RuntimeError) as error:
                answers.append(error)
        return answers

    def _answer(self, prepared: Request) -> dict[str, Any]:
        """Return the pipeline's answer to each input, or BadRequest if it cannot read it. Raise
        RuntimeError if the device fails."""
        reader, arguments = prepared.work
        answers: list[Any] = []
        count = 0
        if "seed" in self.reads.parameters:
            set_seed(prepared.parameters.get("seed"), 0)
        for value in prepared.values:
            try:
                answer = self.pipeline(value, **arguments)
            except ImportError as error:
                raise lacks_library(self.task, error) from error
            except _FAULTS as error:
                if isinstance(error, RuntimeError) and not _OF_INPUTS.search(str(error)):
                    raise
                why = f"{type(error).__name__}: {describe_error(error)}"
                answers.append(BadRequest(f"The input cannot be answered for {self.task}: {why}"))
            else:
                count += _size_of(answer)
                bounds.hold(Bound.ANSWER, count)
                answers.append(_restored(answer, reader.sent) if reader.sent else answer)
        return prepared.answer(answers, single=prepared.single)


_EXAMPLES = {
    "candidate_labels": ["a", "b"], "points_per_crop": 2, "max_new_tokens": 2, "num_beams": 1,
}  # fmt: skip


def _size_of(answer: Any) -> int:
    """Return the number of values in an answer, without those of images."""
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        return int(np.prod(answer.shape))
    if isinstance(answer, Mapping):
        return sum(map(_size_of, answer.values()))
    return sum(map(_size_of, answer)) if isinstance(answer, (list, tuple)) else 1


def _restored(answer: Any, sent: Mapping[int, Any]) -> Any:
    """Return an answer that repeats a conversation with what the client sent for its files."""
    if isinstance(answer, dict):
        return {key: _restored(value, sent) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_restored(value, sent) for value in answer]
    return sent.get(id(answer), answer)
