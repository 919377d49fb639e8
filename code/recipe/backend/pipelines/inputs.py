"""What the pipelines of transformers read, by their tasks: the parts of an input, and parameters.

A pipeline opens strings as paths and URLs, so images, audio and videos are decoded before it gets
them, and a string that is one of these is never passed on.
"""

from __future__ import annotations

import inspect
import io
import json
import tempfile
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.backend import bounds, images, turns
from recipe.backend.bounds import Bound
from recipe.backend.pipelines import audio
from recipe.backend.requests.parameters import RULES, are_texts
from recipe.backend.requests.payloads import BadRequest, is_conversation
from recipe.errors import describe_error

GENERATION = (
    "max_new_tokens", "min_new_tokens", "num_beams", "do_sample", "temperature", "top_k", "top_p",
    "repetition_penalty", "no_repeat_ngram_size", "seed",
)  # fmt: skip
"""Parameters of the tasks whose models generate: arguments of `generate`, and a seed."""
WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("image", "images", "audio", "video"), "the file in base64"),
    **dict.fromkeys(("text", "texts", "speech"), "a text"),
    "pair": ["an image in base64", "another"],
    "table": {"name": ["a", "b"]},
    "boxes": [["a", [0, 0, 90, 20]]],
}
"""Values of each kind, for messages."""
_CLASSES, _LABELS = ("top_k", "function_to_apply"), ("candidate_labels", "hypothesis_template")


@dataclass(frozen=True, kw_only=True)
class PipelineInputs:
    """What a pipeline reads."""

    parts: Mapping[str, str]
    """Kinds of values, for each of which `InputReader` has a method: by "" that of an input itself,
    else those of the values of an object."""
    parameters: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    """The parts that an object may lack."""
    chats: bool = False
    """Whether an input may be a conversation."""
    generates: bool = False
    """Whether `GENERATION` are parameters, too, if the model generates."""

    @property
    def bare(self) -> str:
        """Return the kind of an input that is not an object; empty if there is none."""
        return self.parts.get("", "")

    def example(self, value: Any) -> Any:
        """Return an input, whose values `value` makes of their kinds."""
        if self.bare:
            return value(self.bare)
        return {key: value(kind) for key, kind in self.parts.items()}


def _reads(kind: str, *parameters: str, generates: bool = False) -> PipelineInputs:
    return PipelineInputs(parts={"": kind}, parameters=parameters, generates=generates)


TASKS: Mapping[str, PipelineInputs] = {
    "image-classification": _reads("image", *_CLASSES),
    "image-segmentation": _reads(
        "image", "subtask", "threshold", "mask_threshold", "overlap_mask_area_threshold"
    ),
    "image-feature-extraction": _reads("image", "pool"),
    "depth-estimation": _reads("image"),
    "object-detection": _reads("image", "threshold"),
    "zero-shot-image-classification": _reads("image", *_LABELS),
    "zero-shot-object-detection": _reads("image", "candidate_labels", "threshold", "top_k"),
    "image-to-image": _reads("image"),
    "image-to-text": _reads("image", generates=True),
    "mask-generation": _reads(
        "image", "points_per_batch", "points_per_crop", "crops_n_layers", "crop_overlap_ratio",
        "crop_n_points_downscale_factor", "pred_iou_thresh", "stability_score_thresh",
        "stability_score_offset", "mask_threshold", "crops_nms_thresh", "output_rle_mask",
        "output_bboxes_mask",
    ),
    "keypoint-matching": _reads("pair", "threshold"),
    "video-classification": _reads("video", *_CLASSES, "num_frames", "frame_sampling_rate"),
    "audio-classification": _reads("audio", *_CLASSES),
    "zero-shot-audio-classification": _reads("audio", *_LABELS),
    "automatic-speech-recognition": _reads(
        "audio", "chunk_length_s", "stride_length_s", "return_timestamps", "return_language",
        "language", "task", generates=True,
    ),
    "text-to-audio": _reads("speech", "speaker_embeddings", "seed", generates=True),
    "table-question-answering": PipelineInputs(
        parts={"query": "texts", "table": "table"}, parameters=("sequential",)
    ),
    "document-question-answering": PipelineInputs(
        parts={"image": "image", "question": "text", "word_boxes": "boxes"},
        optional=("image", "word_boxes"),
        parameters=("top_k", "doc_stride", "max_answer_len", "max_seq_len",
                    "handle_impossible_answer"),
    ),
    "visual-question-answering": PipelineInputs(
        parts={"image": "image", "question": "text"}, parameters=("top_k",)
    ),
    "image-text-to-text": PipelineInputs(
        parts={"images": "images", "text": "text"}, optional=("images",), chats=True,
        parameters=("return_full_text",), generates=True,
    ),
    "any-to-any": PipelineInputs(
        parts={"text": "text", "images": "images", "audio": "audio"}, chats=True,
        optional=("images", "audio"), parameters=("return_full_text",), generates=True,
    ),
}  # fmt: skip
"""Pipelines of other tasks read what `inputs_of` makes of them."""
CLASSIFIERS = {task for task, reads in TASKS.items() if reads.parameters[:2] == _CLASSES}
"""Tasks that answer with the classes of a file, at most `top_k` of them."""


def inputs_of(task: str, kind: str, pipeline_class: Any) -> PipelineInputs:
    """Return what a task's pipeline reads. One that is not in `TASKS`, of transformers' `kind`
    (text, image, audio, video or multimodal), takes those of its parameters whose values are
    known, files as inputs themselves, and JSON without paths and URLs."""
    if task in TASKS:
        return TASKS[task]
    named = inspect.signature(pipeline_class._sanitize_parameters).parameters
    bare = kind if kind in ("image", "audio", "video") else "other"
    return PipelineInputs(parts={"": bare}, parameters=tuple(RULES.keys() & named.keys()))


def example_of(kind: str, text: str) -> Any:
    """Return a small value of a kind: grey images, half a second of a tone, and a text."""
    if kind in ("image", "images", "pair"):
        from PIL import Image

        out = io.BytesIO()
        Image.new("RGB", (64, 64), "grey").save(out, format="PNG")
        return [out.getvalue()] * 2 if kind == "pair" else out.getvalue()
    if kind == "audio":
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(bytes([0, 0, 0, 16]) * 4_000)
        return out.getvalue()
    return text if kind in ("text", "texts", "speech") else WORDS[kind]


@dataclass
class InputReader:
    """Reads the inputs of one request, and counts what they cost together. Its methods raise
    BadRequest for a value of another kind, and TooCostly if there is too much of it."""

    reads: PipelineInputs
    rate: int
    """Samples a second of the audio that the model reads."""
    texts: list[str] = field(default_factory=list)
    """Those that the model reads."""
    sent: dict[int, Any] = field(default_factory=dict)
    """What the client sent for a decoded file of a conversation, by its `id`."""
    videos: list[Any] = field(default_factory=list)
    """Temporary files, which are removed with the reader."""
    pixels: images.Pixels = field(default_factory=images.Pixels)
    seconds: audio.Seconds = field(default_factory=audio.Seconds)

    def read(self, value: Any) -> Any:
        """Return an input as the pipeline's argument."""
        turns.pause()
        parts = self.reads.parts
        if self.reads.chats and is_conversation(value):
            return [self._message(message) for message in value]
        if self.reads.chats and isinstance(value, str):
            return self.read_text(value)
        if self.reads.bare:
            return getattr(self, f"read_{self.reads.bare}")(value)
        given = dict(value) if isinstance(value, dict) else {}
        if "image" in given and "images" in parts:
            given.setdefault("images", given.pop("image"))
        if not given.keys() <= parts.keys() or not {*parts} - {*self.reads.optional} <= {*given}:
            example = {"inputs": self.reads.example(WORDS.get)}
            shown = "a file" if isinstance(value, bytes) else json.dumps(value, default=str)[:60]
            raise BadRequest(
                f"An input is {shown}, not an object of "
                f"{', '.join(parts)}. Send for example {json.dumps(example)}."
            )
        return {key: getattr(self, f"read_{parts[key]}")(cell) for key, cell in given.items()}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of a conversation, with decoded files."""
        content = message["content"]
        if not isinstance(message["role"], str) or not {*message} <= {"role", "content"}:
            raise BadRequest("A message has a role and its content, and nothing else.")
        if isinstance(content, str):
            return {"role": message["role"], "content": self.read_text(content)}
        if not isinstance(content, list):
            raise BadRequest("The content of a message is neither a text nor a list of parts.")
        return {"role": message["role"], "content": [self._part(part) for part in content]}

    def _part(self, part: Any) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and {*part} == {"type", "text"}:
            return {"type": "text", "text": self.read_text(part["text"])}
        kind = {"image_url": "image", "input_audio": "audio"}.get(str(kind), kind)
        values = [v for k, v in part.items() if k != "type"] if isinstance(part, dict) else []
        if kind not in ("image", "audio") or len(values) != 1:
            raise BadRequest(
                f"A part of a message is {json.dumps(part)[:60]}. Send for example "
                '{"type": "text", "text": "a text"} or {"type": "image", "image": "the image in '
                'base64"}.'
            )
        (value,) = values
        if isinstance(value, dict):  # OpenAI's form
            value = value.get("url", value.get("data"))
        decoded = getattr(self, f"read_{kind}")(value)
        self.sent[id(decoded)] = value
        return {"type": kind, kind: decoded}

    def read_image(self, value: Any) -> Any:
        """Return a PIL image."""
        return images.read(value, self.pixels)

    def read_images(self, value: Any) -> Any:
        """Return a PIL image or a list of these."""
        return [*map(self.read_image, value)] if isinstance(value, list) else self.read_image(value)

    def read_pair(self, value: Any) -> Any:
        """Return two PIL images."""
        if not isinstance(value, list) or len(value) != 2:
            raise BadRequest(
                f"An input is two images. Send for example {json.dumps(WORDS['pair'])}."
            )
        return [self.read_image(one) for one in value]

    def read_audio(self, value: Any) -> Any:
        """Return samples as a float32 array [samples]."""
        return audio.read(value, self.rate, self.seconds)

    def read_video(self, value: Any) -> str:
        """Return the path of a file with a video. The pixels of all its frames are counted."""
        import av

        data = images.data_of(value, "video")
        # Formats that name other files, such as playlists, would be followed.
        if data[4:8] != b"ftyp" and data[:4] != b"\x1aE\xdf\xa3" and data[8:12] != b"AVI ":
            raise BadRequest("The video is not one of MP4, WebM or AVI.")
        self.videos.append(file := tempfile.NamedTemporaryFile())  # noqa: SIM115
        file.write(data)
        file.flush()
        try:
            with av.open(file.name) as container:
                video = container.streams.video[0]
                count = sum(1 for packet in container.demux(video) if packet.size)
        except (av.error.FFmpegError, IndexError) as error:
            raise BadRequest(f"The video cannot be read: {describe_error(error)}") from error
        reason = f"{count:,} frames of {video.width:,} x {video.height:,}"
        bounds.hold(Bound.PIXELS, count * video.width * video.height, reason)
        return file.name

    def read_text(self, value: Any) -> str:
        """Return a text."""
        if not isinstance(value, str):
            raise BadRequest(f"A text is expected, but an input has {str(value)[:60]!r}.")
        self.texts.append(value)
        bounds.hold_text(*self.texts)
        return value

    def read_texts(self, value: Any) -> Any:
        """Return a text or a list of texts."""
        return [*map(self.read_text, value)] if are_texts(value) else self.read_text(value)

    def read_speech(self, value: Any) -> str:
        """Return a text to be spoken, about ten characters a second."""
        if not self.read_text(value).strip():
            raise BadRequest("The text is empty. Send what is to be spoken.")
        self.seconds.take(len(value) / 10)
        return str(value)

    def read_table(self, value: Any) -> dict[str, list[str]]:
        """Return a table's cells as texts, by its columns."""
        columns: dict[str, Any] = value if isinstance(value, dict) else {"": None}
        if any(not isinstance(cells, list) for cells in columns.values()):
            example = {"inputs": {"query": "a question", "table": WORDS["table"]}}
            raise BadRequest(f"A table has lists of cells. Send for example {json.dumps(example)}.")
        table = {name: [str(cell) for cell in cells] for name, cells in columns.items()}
        bounds.hold_text(*table, *(cell for cells in table.values() for cell in cells))
        return table

    def read_boxes(self, value: Any) -> Any:
        """Return words with their boxes."""
        try:
            # Outside of these, there is no embedding, on which CUDA ends the process.
            valid = all(
                isinstance(word, str)
                and len(box) == 4
                and all(type(side) is int and 0 <= side <= 1000 for side in box)
                for word, box in value
            )
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise BadRequest(
                "word_boxes are words with left, top, right and bottom in thousandths of the page: "
                f"{json.dumps(WORDS['boxes'])}."
            )
        bounds.hold_text(*(word for word, _ in value))
        return value

    def read_other(self, value: Any) -> Any:
        """Return a value for a pipeline that is not in `TASKS`: decoded if it is a file's bytes,
        else JSON, in which no text names a file."""
        if isinstance(value, bytes):
            try:
                return self.read_image(value)
            except BadRequest:
                return self.read_audio(value)
        if isinstance(value, str):
            images.refuse_location(value)
            if len(value) < 4096 and "\0" not in value and Path(value).exists():
                raise BadRequest(f"An input is {value[:60]!r}: paths are not followed.")
            return self.read_text(value)
        if isinstance(value, dict):
            return {key: self.read_other(cell) for key, cell in value.items()}
        return [*map(self.read_other, value)] if isinstance(value, list) else value
