"""What a task declares about itself, without torch: its columns, options, head and routes.

Each folder of `recipe/tasks/` has a module `spec` with `SPECS`. `recipe.task_table` collects them.
Reading, detection, the doctor, requests and docs/DATA.md follow from the declaration.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from recipe import column_words
from recipe.option_fields import NoOptions

_SEPARATORS = re.compile(r"[\s_-]+")
_NUMBER = re.compile(r"\d+$|[\s_-][a-eA-E]$|(?<=[a-z])[A-E]$")


class CellKind(Enum):
    """What the cells of a column hold. `recipe.data.columns` checks the types."""

    ANY = "a value"
    TEXT = "a text"
    TEXTS = "a list of texts"
    TOKEN_IDS = "a list of token ids"
    ARTICLES = "SQuAD's articles or paragraphs"
    TURNS = "Gemini's turns: roles with parts of texts"
    SPANS = "labelled spans of a text"
    IMAGE = "an image or the path of one"


class Model(Enum):
    """What a base model is, by the classes that its config.json names."""

    DECODER = "a decoder"
    SEQ2SEQ = "an encoder with a decoder"
    MASKED = "an encoder with a masked-LM head"
    CLASSIFIER = "a sequence classifier"
    VISION = "an image classifier"
    ENCODER = "an encoder"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a sample, and how it is found in the columns of a file."""

    role: str
    """Its canonical name."""
    names: Sequence[str]
    """The names by which it is found: the canonical one first, then its aliases. Case, spaces, `_`
    and `-` do not matter. `{source_lang}` stands for the value of that hyperparameter."""
    kind: CellKind = CellKind.ANY
    setting: str = ""
    """The hyperparameter that names the column; without one, `columns` does."""
    names_of_task: Sequence[str] = ()
    """More aliases, which count only if the hyperparameter `task` is given."""
    weak_names: Sequence[str] = ()
    """Names that count only if no other column may be meant: `title` may be a part of a text."""
    words: frozenset[str] = frozenset()
    """Last words of names, or whole ones, that count as weak ones if no column has one of `names`:
    `clean_text`."""
    marks: frozenset[str] = frozenset()
    """The same for first words: `is_spam`."""
    is_heading: bool = False
    """Whether a title with the first words of a text counts: `review_title` of `review_body`."""
    is_optional: bool = False
    is_target: bool = False
    """Whether training learns it: requests and unlabelled test files lack it."""
    is_repeated: bool = False
    """Whether several columns may have the role: `negative_1`, `negative_2`."""
    is_numbered: bool = False
    """Whether a number or letter belongs to each of these names: `option_1`, `option_a`."""
    is_list: bool = False
    """Whether the hyperparameter may name several columns, separated by commas."""
    is_content: bool = True
    """Whether other tasks may not leave it unread. They may leave out identifiers, for example."""

    def is_like(self, name: str) -> bool:
        """Return whether a name ends in one of `words`, or begins with one of `marks`."""
        words = column_words.words_of(name)
        is_marked = len(words) > 1 and words[0] in self.marks
        return is_marked or column_words.ends_in(name, self.words)


@dataclass(frozen=True)
class Form:
    """One way to write the samples of a task: a set of columns that must all exist."""

    columns: tuple[Column, ...]
    pairs: Sequence[tuple[str, str]] = ()
    """The names of the first two columns, which count only together: `source` alone is no column of
    a sample. The first pair that a file has is read."""
    needs_task: bool = False
    """Whether the form is read only if the hyperparameter `task` is given."""
    extras: Sequence[str] = ()
    """Names of columns that may be left unread: they repeat or annotate the sample."""
    is_of_reports: bool = False
    """Whether rows are often reports with several columns of classes, of which any may be meant."""

    def __getitem__(self, role: str) -> Column:
        return next(column for column in self.columns if column.role == role)

    @property
    def is_pair(self) -> bool:
        """Return whether two columns are found by the names of a pair."""
        return bool(self.pairs)

    def with_pair(self, pair: tuple[str, str]) -> Form:
        """Return the form whose first two columns have the names of one pair, and no others."""
        named = (
            replace(column, names=(name,), words=frozenset())
            for column, name in zip(self.columns, pair, strict=False)
        )
        return replace(self, columns=(*named, *self.columns[2:]))

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles of its columns."""
        return tuple(column.role for column in self.columns)


@dataclass(frozen=True, kw_only=True)
class Served:
    """How saved models of a task answer requests."""

    load: str
    """What loads a model of an `Origin` (recipe.models.sources): `module:name`, in `recipe/`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments of `load`."""
    architectures: tuple[str, ...] = ()
    """The Auto classes of transformers whose models have the task's head."""
    adapters: tuple[str, ...] = ()
    """peft's names of the task."""
    inputs: Sequence[Form] = ()
    """What an input of a request may hold, the usual form first; empty: a text alone."""
    routes: tuple[str, ...] = ()
    """The routes of APIs that its models may answer; `ServedTask.lacking` are exceptions."""
    form: str = "json"
    """The form of the page at / to try the model with."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task: a value of the hyperparameter `task`."""

    name: str
    folder: str
    """Below `recipe/tasks/`. Its module `task` defines `TASK`, a `recipe.tasks.base.Task`."""
    forms: Sequence[Form] = ()
    """The first form whose columns a file has is read."""
    models: frozenset[Model] = frozenset(Model)
    """The base models for which the task is chosen, if the columns also fit another task."""
    mixes_forms: bool = False
    """Whether files of other splits may have another form than the training data."""
    recognises_files: str = ""
    """The function that recognises channels whose files are no tables: `module:name`, in `recipe/`.
    It returns in words what it recognised, or None."""
    owns_settings: bool = False
    """Whether columns that text_column and label_column name are for this task if none is given."""
    options: type = NoOptions
    """A frozen dataclass: the hyperparameters of this task only (`recipe.option_fields`)."""
    shared_options: Sequence[str] = ()
    """Hyperparameters that several tasks take, not all, and that name no column."""
    learning_rates: tuple[float, float] = (5e-5, 2e-4)
    """The default peak, for all weights and for LoRA. docs/REFERENCE.md lists them."""
    served: Mapping[str, Served] = field(default_factory=dict)
    """What answers requests with the saved model, by the hub's names of the tasks."""
    served_as: str = ""
    """The task that answers with its models if `served` is empty: another one's, or a pipeline's of
    transformers."""
    rank: int = 0
    """If two tasks could serve a model, the one with the lower rank does."""

    @property
    def is_chosen_by_name(self) -> bool:
        """Return whether the task is never detected."""
        return not self.models

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the hyperparameters that this task takes and not every other one does."""
        columns = [column.setting for form in self.forms for column in form.columns]
        names = [*columns, *self.shared_options, *(item.name for item in fields(self.options))]
        return tuple(dict.fromkeys(name for name in names if name not in ("", "text_column")))


TRAINED_TASK = "trained_task"
"""The field of a saved config.json with the task of the job, the class of the model, and the
columns of the training data (`recipe.tasks.base.Task.request_columns`)."""
INT8_OPTIONS = ("quantize", "max_score_loss", "max_flips")
"""Hyperparameters of the tasks whose encoders can be quantized."""
IDENTIFIERS = frozenset({"id", "idx", "index", "uid", "guid", "url", "unnamed", "indexlevel0"})
"""Normalized names of columns that may stand beside texts without a question."""
DESCRIPTIONS = frozenset({
    *("date", "datetime", "time", "timestamp", "created", "createdat", "updatedat", "year"),
    *("author", "authors", "user", "username", "source", "link", "lang", "language", "locale"),
    *("country", "city", "state", "location", "version", "file", "filename", "path", "license"),
    *("authorname", "publisher", "journal", "hostname", "subreddit", "brand"),
})  # fmt: skip
"""Normalized names of columns that describe a sample and are no part of it."""


@functools.lru_cache(maxsize=4096)
def normalize_name(name: str) -> str:
    """Return a column name without case, spaces, `_` and `-`."""
    return _SEPARATORS.sub("", name.strip().lower())


@functools.lru_cache(maxsize=4096)
def name_stem(name: str) -> str:
    """Return a normalized name without its number or letter: `answer` for `answer_1`, `answerA`."""
    return normalize_name(_NUMBER.sub("", name.strip()))


# The columns that several tasks share.
TEXT_NAMES = (
    *("text", "texts", "sentence", "review", "content", "tweet", "comment", "comment_text", "body"),
    *("message", "review_body", "review_text", "document", "article", "description", "question"),
    *("query", "utterance", "headline", "title", "input", "inputs", "abstract", "claim", "email"),
    *("essay", "excerpt", "post", "statement", "utt"),
)
TEXT = Column(
    role="text",
    names=(*TEXT_NAMES, "text_a"),
    kind=CellKind.TEXT,
    setting="text_column",
    weak_names=("title", "headline", "description", "email"),  # `email` may be an address
    words=column_words.TEXTS | column_words.QUESTIONS,
)
HEADING = Column(
    role="text",
    names=("subject", "headline", "review_title", "question_title"),
    kind=CellKind.TEXT,
    setting="text_column",
    words=column_words.SUBJECTS,
    is_heading=True,
)
HEADED = replace(
    TEXT,
    role="text_pair",
    names=(
        *(name for name in TEXT_NAMES if name not in ("title", "headline", "email")),
        *("question_content", "short_description"),
    ),
    setting="text_pair_column",
    weak_names=(),
)
"""A text below a heading."""
TITLE = Column(
    role="text",
    names=("title", "short_description", *sorted(column_words.TITLES - {"title"})),
    kind=CellKind.TEXT,
    setting="text_column",
    is_content=False,
)
BODY = replace(
    HEADED,
    names=("text", "review_content", *sorted(column_words.BODIES - {"text"})),
    words=frozenset(),
)
TEXT_PAIR = Column(
    role="text_pair", names=("text_pair",), kind=CellKind.TEXT, setting="text_pair_column"
)
TOKEN_IDS = Column(role="input_ids", names=("input_ids",), kind=CellKind.TOKEN_IDS)
LABEL_NAMES = (
    *("label", "labels", "class", "class_index", "y", "target", "category", "sentiment"),
    *("emotion", "intent", "topic", "rating", "stars", "choice", "score", "stance"),
    "cats",  # spaCy's and doccano's
)
ANNOTATORS = frozenset(f"label{number}" for number in range(1, 6))
"""SNLI's labels of single annotators, which may be left unread for its gold_label."""
SCORE_NAMES = (
    *("score", "similarity", "similarity_score", "relatedness_score", "relevance", "grade"),
    *("relevance_score", "is_relevant", "relevant"),
)
PAIR_LABEL_NAMES = (
    *(
        *(name for name in LABEL_NAMES if name not in ("category", "topic")),
        "gold_label",
        "is_duplicate",
        "duplicate",
        "duplicates",
        "is_match",
        "is_paraphrase",
        "quality",
    ),
    *(*SCORE_NAMES, "entailment_judgment", "entailment", "esci_label"),
)
LABEL = Column(
    role="label",
    names=LABEL_NAMES,
    setting="label_column",
    weak_names=("score", "category", "topic"),  # `score` may count votes
    words=column_words.LABELS,
    marks=column_words.LABEL_MARKS,
    is_target=True,
    is_list=True,
)
TWINS = [
    (f"{name}{first}", f"{name}{second}")
    for name in ("sentence", "text", "question", "s", "string", "title", "sent", "input")
    for first, second in ("12", "ab", "01")
]
PAIRS: Sequence[tuple[str, str]] = (
    ("premise", "hypothesis"),
    ("context", "hypothesis"),
    *(("text", second) for second in ("hypothesis", "text_pair", "pair", "aspect")),
    *(("sentence", second) for second in ("hypothesis", "sentence_pair", "aspect")),
    *(
        ("question", second)
        for second in ("sentence", "passage", "context", "paragraph", "document", "answer")
    ),
    *(
        ("query", second)
        for second in ("passage", "document", "doc", "text", "title", "product_title", "answer",
                       "response")
    ),
    ("claim", "evidence"),
    ("claim", "sentence"),
    ("context", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("anchor", "target"),
    ("anchor", "positive"),
    ("anchor", "candidate"),
    *TWINS,
    ("#1 String", "#2 String"),
)  # fmt: skip
"""The names of the two texts of a pair, in the order in which they are read."""
PROMPT_NAMES = ("prompt", "instruction", "question", "query", "input", "inputs", "problem")
COMPLETION_NAMES = ("completion", "response", "answer", "output", "target", "targets", "solution")
SUMMARY_PAIRS: Sequence[tuple[str, str]] = (
        ("document", "summary"), ("article", "highlights"), ("dialogue", "summary"),
        ("article", "summary"), ("text", "summary"), ("article", "abstract"),
        ("description", "abstract"), ("report", "summary"), ("body", "summary"),
        ("content", "summary"), ("news_body", "news_title"), ("extract_text", "summary_text"),
        ("transcript", "summary"), ("documents", "tldr"), ("text", "tldr"), ("text", "headline"),
        ("text", "headlines"), ("article", "headline"), ("text", "abstract"),
        ("email_body", "subject_line"),
    )  # fmt: skip
"""The names of a text and of its summary."""
MESSAGES_NAMES = ("messages", "conversations", "conversation", "chat")
CHOSEN_NAMES = (
    *("chosen", "chosen_response", "chosen_answer", "response_chosen", "accepted"),
    *("chosen.value", "preferred_output"),
)
REJECTED_NAMES = (
    *("rejected", "rejected_response", "rejected_answer", "response_rejected"),
    *("rejected.value", "non_preferred_output"),
)
"""Columns of preference pairs, which tasks of post-training read."""
TALK_NAMES = (*MESSAGES_NAMES, "input.messages")
"""Columns of conversations that judged answers end (OpenAI has the last one)."""
PREFERENCES = (
    "Give task=dpo for a model that prefers the chosen answers (or task=orpo, without a reference "
    "model), or task=reward for a model that scores answers."
)

LABEL_IS_ABOUT = "what the label is about"
CONTEXT, LEARNED_PARTS = "what the model would see with the text", "which part of it is learned"
TEXTS_OF_SAMPLES = frozenset({
    *("text", "sentence", "content", "tweet", "comment", "body", "message", "document", "article"),
    *("description", "question", "query", "utterance", "headline", "post", "statement", "context"),
    *("passage", "paragraph", "snippet", "turn", "history", "schema", "knowledge", "answer"),
    "reply", "response",
})  # fmt: skip
"""Nouns at the end of names of texts that belong to a sample, such as `parent_comment`."""
HEADS_OF_TEXTS = frozenset({"title", "subject", "caption", "abstract"})
"""Nouns at the end of names of parts of another text: `review_title` beside `review_body`."""
PARTS_OF_SAMPLES: Mapping[str, str] = {
    name: why
    for why, names in {
        LABEL_IS_ABOUT: (
            *("word", "target_word", "span", "span_text", "span1_text", "span2_text", "span_index"),
            *("term", "aspect", "e1", "e2", "entity", "entity1", "entity2", "head", "tail", "h"),
            *("t", "subj", "obj", "mention", "start", "end", "distance", "relations"),
        ),
        CONTEXT: (
            *("image", "images", "video", "videos", "audio", "audios", "system", "system_prompt"),
            *("system_message", "history", "prefix", "tools", "functions", "story", "contexts"),
            *(
                "documents",
                "summaries",
                "knowledge",
                "schema",
                "dialogue",
                "dialog",
                "hypothesis",
                "subject",
            ),
            *("reply_to", "old_code", "new_code", "bbox", "bboxes", "boxes", "objects", "xmin"),
            *("chat_template_kwargs", "tool_calls", "function_call", "position_ids"),
            *("reasoning", "reasoning_content", "thinking", "thoughts", "cot", "complex_cot"),
            *("chain_of_thought", "rationale", "support", "choices", "options", "endings"),
            *("role", "parent_id", "completions", "distractor", "correct_answer", "selftext"),
            *("pros", "cons", "transcript", "transcription", "lyrics", "plot", "synopsis"),
        ),
        LEARNED_PARTS: (
            *("train", "train_detail", "loss_mask", "assistant_masks", "completion_mask"),
            *("prompt_mask", "assistant_mask", "weight", "weights", "sample_weight"),
            *("loss", "loss_weight", "loss_weights", "label_mask", "target_mask", "target_ids"),
            *("trainable", "mask", "masked", "prompt_length"),
        ),
    }.items()
    for name in names
}
"""Names of columns that belong to a sample although no task, or not every task, reads them, with
the reason."""
