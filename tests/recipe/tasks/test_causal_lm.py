"""task=causal-lm: what is read, what of it is learned, and a run whose model is served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipe.batching import batches
from recipe.batching.document_batches import Documents
from recipe.data import language_modeling
from recipe.data.files import formats
from recipe.errors import DataError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.plan import batch_layout
from recipe.plan.table import Table
from recipe.storage import atomic
from recipe.task_table import TASKS
from recipe.tasks.causal_lm import task as causal_lm
from recipe.tokenization import chat
from recipe.tokenization import documents as causal_tokens
from recipe.training import preflight
from tests.support import causal_kit
from tests.support.causal_kit import CHATML, MARKED, ODD
from tests.support.jobs import Job, folders_of, write
from tests.support.packed_batches import documents_of, to_train
from tests.support.serving_kit import Handlers

# As some models: what was thought is not repeated once the conversation goes on.
FORGETFUL = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.role == 'assistant' and loop.last %}(thought){% endif %}{{ message.content }}",
)
UNENDED = MARKED.replace("{{ eos_token }}", "")
"""No token ends a turn."""
MARKED_INSIDE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}</s>{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
"""The marks leave out what ends a turn."""
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so."},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = causal_kit.make_tokenizer()
    return made


def tokenize_split(
    tokenizer: PreTrainedTokenizerBase, long_texts: str | None = None, length: int = 64, **data: Any
) -> Documents:
    split = datasets.Dataset.from_dict(data)
    return causal_tokens.tokenize_split("train", split, tokenizer, length, long_texts)


@pytest.mark.parametrize("length", [5, 7, 12, 40])
def test_every_token_of_a_split_text_is_learned_once(
    tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    documents = tokenize_split(tokenizer, length=length, text=[text])
    assert documents.lengths.max() <= length
    assert documents.lengths.min() >= 2
    learned = tokenizer.decode(documents.token_ids[documents.learned])
    assert learned == f"{text[1:]}</s>"


LONG_PAIRS = {"prompt": ["abcdef", "abcdefgh"], "completion": ["ghijkl", "x"]}


@pytest.mark.parametrize(
    ("data", "long_texts", "expected"),
    [
        ({"text": ["abc", "", "d"]}, None, ["a[bc</s>]", "d[</s>]"]),
        ({"prompt": ["one:"], "completion": ["two"]}, None, ["one:[two</s>]"]),
        ({"text": ["abcdefghijkl"]}, "truncate", ["a[bcdefgh]"]),
        # Pairs are truncated by themselves; one whose prompt fills all has nothing to learn.
        (LONG_PAIRS, None, ["abcdef[gh]"]),
        (LONG_PAIRS, "split", ["abcdef[gh]", "h[ijkl</s>]", "h[x</s>]"]),
    ],
)
def test_what_follows_a_prompt_or_a_first_token_is_learned(
    tokenizer: PreTrainedTokenizerBase,
    data: dict[str, list[str]],
    long_texts: str | None,
    expected: list[str],
) -> None:
    documents = tokenize_split(tokenizer, long_texts, 8, **data)
    assert [
        causal_kit.show_learned(tokenizer, documents, row) for row in range(len(documents))
    ] == expected
    assert documents.labels.sum() == documents.learned.sum()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "user:\nhi\nassistant:\n[yes?</s>\n]user:\nwhy\nassistant:\n[so.</s>\n]"),
        (
            CHATML,
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yes?<|im_end|>\n]"
            "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n[so.<|im_end|>\n]",
        ),
        (
            FORGETFUL,
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[(thought)yes?<|im_end|>\n]\n"
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes?<|im_end|>\n"
            "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n[(thought)so.<|im_end|>\n]",
        ),
        (MARKED, "user: hi\nassistant: [yes?</s>]\nuser: why\nassistant: [so.</s>]\n"),
        (UNENDED, "user: hi\nassistant: [yes?]\nuser: why\nassistant: [so.</s>]"),
        (MARKED_INSIDE, "user: hi\nassistant: [yes?</s>]user: why\nassistant: [so.</s>]"),
    ],
)
def test_of_a_conversation_the_assistants_turns_are_learned(
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    expected: str,
) -> None:
    tokenizer.chat_template = template
    documents = tokenize_split(tokenizer, "split", 128, messages=[json.dumps(TALK)])
    every = [causal_kit.show_learned(tokenizer, documents, row) for row in range(len(documents))]
    assert "\n".join(every) == expected
    output = capsys.readouterr().out
    assert "; 2 of 2 assistant turns are learned\n" in output
    ends = {None: {"</s>"}, CHATML: {"<|im_end|>"}, FORGETFUL: {"<|im_end|>"}}
    stops = causal_tokens.stop_tokens(documents, tokenizer, 128)
    assert {*tokenizer.convert_ids_to_tokens(list(stops))} == ends.get(template, {"</s>"})
    assert ("a simple one" in output) == (template is None)
    assert tokenizer.chat_template, "it is saved with the model"


@pytest.mark.parametrize(
    ("template", "exact"),
    [("qwen3", False), ("llama3", True), ("gptoss", False)],
)
def test_as_many_turns_are_learned_as_by_trl(
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    template: str,
    exact: bool,
) -> None:
    """TRL replaces a template that rewrites turns by one that does not (`*_training.jinja`)."""
    from trl import chat_template_utils

    folder = Path(chat_template_utils.__file__).parent / "chat_templates"
    tokenizer.bos_token = "</s>"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    call = {"type": "function", "function": {"name": "paint", "arguments": {"colour": "red"}}}
    talk = list(TALK)
    if template.startswith("qwen"):
        talk += [
            {"role": "user", "content": "paint it"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "it is red"},
        ]
    documents = tokenize_split(tokenizer, length=4096, messages=[json.dumps(talk)])
    turns = sum(one["role"] == "assistant" for one in talk)
    assert f"; {turns} of {turns} assistant turns are learned\n" in capsys.readouterr().out
    tokenizer.chat_template = (folder / f"{template}_training.jinja").read_text()
    theirs = tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True
    )
    of_trl = "".join(
        tokenizer.decode([token])
        for token, mark in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
        if mark
    )
    learned = tokenizer.decode(documents.token_ids[documents.learned].tolist())
    for words in ("yes?", "so."):
        assert words in of_trl
        assert learned.count(words) == 1
    if exact:  # but for line ends after a turn, and the end token
        ours, other = (text.replace("\n", "").replace("</s>", "") for text in (learned, of_trl))
        assert ours == other


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_a_turn_of_no_weight_is_not_learned(
    tokenizer: PreTrainedTokenizerBase, template: str | None, mark: dict[str, Any]
) -> None:
    tokenizer.chat_template = template
    talk = [TALK[0], TALK[1] | mark, *TALK[2:]]
    learned = causal_kit.show_learned(
        tokenizer, tokenize_split(tokenizer, "split", 128, messages=[json.dumps(talk)])
    )
    assert learned.count("[") == 1
    assert "yes?" in learned.partition("[")[0]
    assert "so." in learned.partition("[")[2]


@pytest.mark.parametrize("template", [None, CHATML, MARKED, FORGETFUL])
@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "be kind"}]])
def test_a_turn_that_begins_a_conversation_is_learned(
    tokenizer: PreTrainedTokenizerBase, template: str | None, before: list[dict[str, str]]
) -> None:
    tokenizer.chat_template = template
    talk = json.dumps([*before, {"role": "assistant", "content": "welcome"}, *TALK])
    documents = tokenize_split(tokenizer, "split", 256, messages=[talk])
    learned = tokenizer.decode(documents.token_ids[documents.learned].tolist())
    positions = [learned.index(words) for words in ("welcome", "yes?", "so.")]
    assert positions == sorted(positions)
    assert not any(words in learned for words in ("hi", "why", "kind", "assistant"))


@pytest.mark.parametrize(("files", "words"), [
    ({"train.jsonl": '{"instruction": "do", "response": "done"}\n' * 3,
      "template.json": '{"prompt": "Do: {instruction}", "completion": " {answer}"}'},
     r"template.json names the columns answer, which .*train.jsonl lacks"),
    *(({"train.jsonl": '{"text": "a text"}\n' * 3, "template.json": template},
       r"template.json is not a template of JumpStart")
      for template in ('{"prompt": "Do"}', '{"prompt": "{}", "completion": "{text}"}', "[]",
                       '{"prompt": "{a", "completion": "{text}"}',
                       '{"prompt": "{text:>9}", "completion": "{text}"}')),
    ({"train.jsonl": '{"text": ["a"], "q": 1}\n' * 3,
      "template.json": '{"prompt": "{q}", "completion": "{text}"}'},
     r"line 1 has no text in column 'text'"),
    ({"train.txt": "a text\n" * 3, "template.json": '{"prompt": "", "completion": "{a}"}'},
     r"names the columns a, which .*train.txt lacks"),
    ({"corpus.jsonl": '{"_id": "d", "text": "a text of it"}\n' * 3,
      "qrels.tsv": "query-id\tcorpus-id\tscore\n" + "q1\td1\t1\n" * 3},
     r"qrels.tsv lacks .text., read in the training data"),
    ({"corpus": "Well, he said.\n" * 9}, r"may be a table or text.*corpus\.txt.*corpus\.csv"),
])  # fmt: skip
def test_files_that_hold_something_else_are_no_texts(
    files: dict[str, str], words: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        load(tmp_path)
    if "corpus" in files:
        (tmp_path / "corpus").rename(tmp_path / "corpus.txt")
        assert set(load(tmp_path).train["text"]) == {"Well, he said."}


@pytest.mark.parametrize(
    ("template", "talk", "words"),
    [
        (None, TALK[:1], "train data has 1 documents, but none of their tokens"),
        ("{{ raise_exception('only the user speaks') }}", TALK,
         r"conversation of row 0 .*only the user speaks"),
        (ODD, TALK, r"row 0 .*it writes the messages before message 1.*train_on_prompt=True"),
    ],
)  # fmt: skip
def test_conversations_from_which_nothing_can_be_learned_are_refused(
    tokenizer: PreTrainedTokenizerBase, template: str | None, talk: Any, words: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=words):
        tokenize_split(tokenizer, messages=[json.dumps(talk)])


def load(folder: Path, **options: Any) -> language_modeling.Texts:
    settings = Hyperparameters(task="causal-lm", **options)
    return language_modeling.load({"train": folder}, settings, TASKS["causal-lm"])


PAIR = {"instruction": "do", "response": "done", "id": 7}


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"),
    [
        ("a.txt", "one\ntwo\n\nthree\n", {"text": ["one", "two", "three"]}, "txt (a text is a line)"),
        ("a", "one, 1\ntwo\nthree, 3, 3\n", {"text": ["one, 1", "two", "three, 3, 3"]}, "txt"),
        ("a.csv", 'text\n"one, 1"\ntwo\nthree\n', {"text": ["one, 1", "two", "three"]}, "csv"),
        ("a.csv", 'prompt,completion\na,b\nc,d\n', {"prompt": ["a", "c"], "completion": ["b", "d"]}, "csv"),
        ("a.jsonl", f"{json.dumps(PAIR)}\n" * 2, {"prompt": ["do"] * 2, "completion": ["done"] * 2}, "not read: id"),
        ("a.jsonl", f"{json.dumps({'messages': TALK})}\n" * 2, {"messages": [json.dumps(TALK)] * 2}, "messages 'messages'"),
        ("a.jsonl", '{"input_ids": [5, 6], "attention_mask": [1, 0]}\n' * 2, {"input_ids": [[5]] * 2}, "input_ids 'input_ids'"),
    ],
)  # fmt: skip
def test_what_is_read(
    tmp_path: Path, name: str, content: str, columns: dict[str, Any], expected: str
) -> None:
    (tmp_path / name).write_text(content)
    texts = load(tmp_path)
    both = datasets.concatenate_datasets([texts.train, texts.evaluation])
    assert set(both.column_names) == set(columns)
    for column, values in columns.items():
        assert sorted(both[column]) == sorted(values)
    assert expected in "\n".join(texts.notes)
    assert f"1 of {len(both)} training rows held out, seed 42" in "\n".join(texts.notes)


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [("paragraph", ["one\ntwo", "three"]), ("document", ["one\ntwo\n\nthree"])],
)
def test_what_a_text_is_in_a_plain_file(
    tmp_path: Path, sample_by: str, expected: list[str]
) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("one\r\ntwo\r\n\r\nthree\r\n")
    assert list(load(tmp_path, sample_by=sample_by).train["text"]) == expected
    part = formats.read_texts(tmp_path / "train.txt", sample_by)
    assert list(part.lines) == [1, 4][: len(expected)]


def spoken_parts(role: str, *parts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": part} for part in parts]}


GPT = {"user": "human", "assistant": "gpt"}
SPELLINGS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "sharegpt": lambda role, text: {"from": GPT[role], "value": text, "weight": None},
    "chatgpt": lambda role, text: {"from": role.replace("assistant", "chatgpt"), "value": text},
    "parts": spoken_parts,
    "split": lambda role, text: spoken_parts(role, text[:1], text[1:]),
    "mixed": lambda role, text: (
        {"role": role, "content": text} if role == "user" else spoken_parts(role, text)
    ),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_conversations_of_other_forms_are_the_same(
    tmp_path: Path, spelling: str, suffix: str
) -> None:
    talk: Any = [SPELLINGS[spelling](turn["role"], turn["content"]) for turn in TALK]
    # A column of Parquet has one type.
    talk = json.dumps(talk) if (suffix, spelling) == ("parquet", "mixed") else talk
    rows = [{"conversations": talk}] * 3
    if suffix == "jsonl":
        write(tmp_path, rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert list(load(tmp_path).train["messages"]) == [json.dumps(TALK)] * 2


SYSTEM = {"role": "system", "content": "be kind"}
MUTED = {"train": False}
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages and system": ({"system": "be kind", "messages": TALK}, [SYSTEM, *TALK]),
    "bedrock": (
        {
            "schemaVersion": "bedrock-conversation-2024", "system": [{"text": "be "}, {"text": "kind"}],
            "messages": [{"role": m["role"], "content": [{"text": m["content"]}]} for m in TALK],
        },
        [SYSTEM, *TALK],
    ),
    "the same system twice": ({"system": "be kind", "messages": [SYSTEM, *TALK]}, [SYSTEM, *TALK]),
    "openorca": (
        {"id": "a1", "system_prompt": "be kind", "question": "hi", "response": "yes?"},
        [SYSTEM, *TALK[:2]],
    ),
    "llamafactory": (
        {"instruction": "hi", "input": "you", "output": "yes?", "system": "be kind"},
        [SYSTEM, {"role": "user", "content": "hi\nyou"}, TALK[1]],
    ),
    "trl": ({"prompt": TALK[:1], "completion": TALK[1:2]}, TALK[:2]),
    "trl with earlier turns": (
        {"prompt": TALK[:3], "completion": TALK[3:]}, [TALK[0], TALK[1] | MUTED, *TALK[2:]],
    ),
    "a list and a text": ({"prompt": TALK[:1], "completion": "yes?"}, TALK[:2]),
    "jumpstart's dialog": ({"dialog": TALK}, TALK),
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
def test_conversations_in_several_columns_are_joined(tmp_path: Path, form: str) -> None:
    row, expected = ROWS[form]
    write(tmp_path, [row] * 3)
    loaded = load(tmp_path)
    assert [json.loads(talk) for talk in loaded.train["messages"]] == [expected] * 2
    for name in ("prompt", "completion"):
        assert name not in loaded.train.column_names


def test_two_system_prompts_are_refused_and_empty_ones_change_nothing(tmp_path: Path) -> None:
    other = {**SYSTEM, "content": "be rude"}
    write(tmp_path, [{"system": "be kind", "messages": [other, *TALK]}] * 3)
    with pytest.raises(DataError, match=r"line 1 has two system prompts: 'be kind' and 'be rude'"):
        load(tmp_path)
    write(tmp_path, [{"system": " ", "instruction": "hi", "input": "", "output": "yes?"}] * 3)
    assert set(load(tmp_path).train["completion"]) == {"yes?"}


def test_jumpstarts_template_makes_prompts(tmp_path: Path) -> None:
    template = {"prompt": "Q: {question}\n{{{hint}}}\n", "completion": "A: {answer}"}
    (tmp_path / "template.json").write_text(json.dumps(template))
    write(tmp_path, [{"question": "why", "hint": None, "answer": 3, "text": "unread"}] * 3)
    loaded = load(tmp_path)
    assert set(loaded.train["prompt"]) == {"Q: why\n{}\n"}
    assert set(loaded.train["completion"]) == {"A: 3"}
    assert "jsonl, prompts by template.json" in "\n".join(loaded.notes)


def test_prompts_are_alpacas(tmp_path: Path) -> None:
    rows = [{"instruction": "add", "input": text, "output": "3"} for text in ("1 {2}", "", None)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    loaded = load(tmp_path)
    both = datasets.concatenate_datasets([loaded.train, loaded.evaluation])
    assert set(both["completion"]) == {"3"}
    given, *without = sorted(both["prompt"], key=len, reverse=True)
    assert given == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        "add\n\n### Input:\n1 {2}\n\n### Response:"
    )
    assert set(without) == {
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nadd\n\n### Response:"
    }
    assert "Alpaca's template" in "\n".join(loaded.notes)
    assert set(load(tmp_path, prompt_column="instruction").train["prompt"]) == {"add"}


def test_doctor_counts_what_is_cut(tmp_path: Path) -> None:
    model = causal_kit.make_model("gpt2", tmp_path / "start")
    channels = {"train": write(tmp_path / "in", causal_kit.pairs(240)), "model": model,
                "test": write(tmp_path / "test", causal_kit.pairs(20), "test")}  # fmt: skip
    folders = folders_of(tmp_path, channels)
    argv = ["--task", "causal-lm", "--max_length", "8", "--batch_size", "16", "--epochs", "1"]
    results = {finding.what: finding for finding in preflight.inspect(argv, folders, 1)}
    assert "240" in results["lengths"].detail
    assert "100.0% of the texts are longer than 8 tokens" in results["truncation"].detail
    assert results["steps"].detail.startswith("15 an epoch")
    split = preflight.inspect([*argv, "--long_texts", "split"], folders, 1)
    (steps,) = (finding.detail for finding in split if finding.what == "steps")
    assert int(steps.split()[0]) > 30


@pytest.mark.parametrize(("free", "level"), [(1 << 20, None), (8_000, "warning"), (2_000, "error")])
def test_doctor_tells_that_tokens_have_no_room(
    free: int, level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = causal_kit.make_model("gpt2", tmp_path / "start")
    channels = {"train": write(tmp_path / "in", causal_kit.pairs(240)), "model": model,
                "test": write(tmp_path / "test", causal_kit.pairs(20), "test")}  # fmt: skip
    argv = ["--task", "causal-lm", "--max_length", "8"]
    monkeypatch.setattr(atomic, "free_bytes", lambda _: free)
    findings = preflight.inspect(argv, folders_of(tmp_path, channels), 1)
    rooms = [finding for finding in findings if finding.what == "disk"]
    assert [finding.level for finding in rooms] == ([] if level is None else [level])
    assert all("use a larger volume" in finding.detail for finding in rooms)


def test_a_model_that_cannot_be_packed_is_padded() -> None:
    """With the losses that tests/recipe/batching/test_packing.py compares."""
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    documents = documents_of([12, 8])
    given: Any = (
        batches.Training(samples=documents, size=2),
        {"evaluation": documents},
        (table := Table()),
    )
    layout, _ = batch_layout.layouts(to_train(model, causal_lm.NEXT_TOKENS, 2), *given)
    assert table.rows[0].reason == "bloom cannot be packed"
    assert model(**layout.tensors(documents, np.array([0, 1]))).logits.shape == (2, 2)
    with pytest.raises(HyperparameterError, match=r"packing has value True.*bloom.*llama"):
        batch_layout.layouts(to_train(model, causal_lm.NEXT_TOKENS, 2, True), *given)


@pytest.mark.heavy
def test_a_served_chat_model_stops_where_its_template_ends_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model's end token is another one, and earlier turns are learned, too."""
    model = causal_kit.make_model("llama", tmp_path / "start")
    reader = transformers.AutoTokenizer.from_pretrained(model)
    reader.chat_template = FORGETFUL
    reader.save_pretrained(model)
    turns = ("prompt", "completion", "again", "no")
    rows = [
        {"messages": [{"role": role, "content": one.get(turn, turn)}
                      for role, turn in zip(("user", "assistant") * 2, turns, strict=True)]}
        for one in causal_kit.pairs(240)
    ]  # fmt: skip
    argv = ("--task", "causal-lm", "--epochs", "8", "--lr", "1e-2", "--batch_size", "16")
    job = Job(tmp_path, {"train": write(tmp_path / "in", rows), "model": model}, argv)
    job.run_here()
    assert "stop tokens     </s>, <|im_end|> (the model's" in capsys.readouterr().out
    saved = json.loads((job.model / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 2]
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [turn.format(f"{animal}:") for animal in ("blue cat", "red dog")]
    prompts.append(f"{prompts[1]}dog<|im_end|>\n" + turn.format("again"))
    parameters = {"max_new_tokens": 40, "return_full_text": False}
    answers = Handlers(job.model).ask({"inputs": prompts, "parameters": parameters})
    texts = [entry["generated_text"].removesuffix("<|im_end|>") for (entry,) in answers]
    assert texts == ["(thought)catcatcat", "(thought)dog", "(thought)no"]


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' +"
    " m['role'] + ' ' + m['content'] }}{% for call in m.tool_calls %}{{ call.function.name + ' ' +"
    " call.function.arguments | tojson }}{% endfor %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}]


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "paint", "arguments": arguments}}
    return [
        {"role": "user", "content": "paint it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "it is red"},
    ]


def read_talks(folder: Path, *rows: dict[str, Any]) -> list[Any]:
    """The conversations of the training channel, as they are kept."""
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    channels = {
        name: write(folder / name, lines)
        for name, lines in {"train": rows, "validation": [{"messages": plain}]}.items()
    }
    texts = language_modeling.load(channels, Hyperparameters(), TASKS["causal-lm"])
    assert "not read" not in "\n".join(texts.notes), "of which tools are a part"
    return [json.loads(text) for text in texts.train["messages"]]


def test_calls_and_tools_are_learned_as_the_template_writes_them(tmp_path: Path) -> None:
    """Of the assistant's turns alone; whether they come as objects or as JSON."""
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = CALLS
    kept = read_talks(
        tmp_path,
        {"messages": calling({"colour": "red"}), "tools": TOOLS},
        {"messages": calling({"colour": "red"})},
    )
    (as_json,) = read_talks(
        tmp_path / "json", {"messages": calling('{"colour": "red"}'), "tools": json.dumps(TOOLS)}
    )
    assert sorted(kept, key=len) == [as_json, as_json["messages"]]
    (written,) = chat.write(tokenizer, **as_json)
    assert isinstance(written, chat.Written)
    text = "".join(part for part, _ in written.parts)
    assert text == tokenizer.apply_chat_template(as_json["messages"], tools=TOOLS, tokenize=False)
    assert [part for part, is_learned in written.parts if is_learned] == [
        'paint {"colour": "red"}</s>', "it is red</s>"
    ]  # fmt: skip


@pytest.mark.parametrize("ignored", ["tools", "tool_calls"])
def test_a_template_that_ignores_them_is_refused(ignored: str) -> None:
    tokenizer = causal_kit.make_tokenizer()
    tokenizer.chat_template = CALLS.replace(ignored, "nothing")
    with pytest.raises(TemplateError, match=r"ignores tools|drops 'paint' of the tool_calls"):
        chat.write(tokenizer, [{**one, "content": one["content"] or ""} for one in calling({"a": 1})],
                   tools=TOOLS)  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "ignored"),
    [
        ({"role": "user", "content": "see", "images": ["a.png"]}, "it ignores images"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "it ignores function_call"),
        ({"role": "assistant", "content": "so", "reasoning_content": "as"},
         "'as' of the reasoning_content of message 2"),
        ({"role": "system", "content": "be kind"}, "ignores message 2 .* of the role system"),
    ],
)  # fmt: skip
def test_a_template_that_ignores_a_part_of_a_turn_is_refused(
    turn: dict[str, Any], ignored: str
) -> None:
    tokenizer = causal_kit.make_tokenizer()
    skip = "{% for m in messages if m['role'] != 'system' %}"
    tokenizer.chat_template = CALLS.replace("{% for m in messages %}", skip)
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chat.write(tokenizer, [*plain, *plain])
    with pytest.raises(TemplateError, match=ignored):
        chat.write(tokenizer, [*plain, turn, *plain])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": calling({"a": 1})}, {"messages": calling({"b": 1})}], "null values"),
        ([{"messages": calling("red")}], "a tool call that cannot be read"),
        ([{"messages": calling({"a": 1}), "tools": "paint"}], "not a list of objects"),
    ],
)
def test_calls_that_may_be_misread_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], words: str
) -> None:
    """Keys that only other rows have come as nulls, for example."""
    with pytest.raises(DataError, match=words):
        read_talks(tmp_path, *rows)
