"""Encoder-decoders and decoders whose requests take turns, compared with `generate` for each."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from amphora.serving.worker.job_threads import TurnJob, Turns
from recipe.backend import turns
from recipe.backend.requests.payloads import Request
from recipe.models.sources.origin import Origin
from recipe.tasks.causal_lm.serve import Generator
from recipe.tasks.text_to_text.serve import TextGenerator
from tests.support.serving_kit import Handlers, predict, request, save

TEXTS = ["the film was good", "anna said again", "in paris who was bad in the film", "who", "good"]


def made(kind: str, folder: Path) -> TextGenerator:
    return Handlers(save(kind, folder, 13), HF_TASK="text2text-generation").model  # type: ignore[return-value]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> TextGenerator:
    return made("T5ForConditionalGeneration", tmp_path_factory.mktemp("model"))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """A worker's, by which predictions take their turns."""
    worker = Turns(lambda: True)
    monkeypatch.setattr(turns, "_pause", worker.pause)
    return worker


def oracle(model: TextGenerator, texts: Sequence[str], settings: dict[str, Any]) -> list[Any]:
    """What transformers alone writes: for each text by itself, or, since what is drawn depends on
    what is drawn beside it, for the texts of a seeded request together."""
    reader: Any = model.loaded.tokenizer
    generating: Any = model.loaded.model
    options = {"num_beams": 4, **settings}
    seed = options.pop("seed", None)
    entries: list[Any] = []
    for some in [[text] for text in texts] if seed is None else [texts]:
        encoded = reader(some, return_tensors="pt", padding=True)
        encoded.pop("token_type_ids", None)
        if seed is not None:
            torch.manual_seed(seed)
        with torch.inference_mode():
            output = generating.generate(**encoded, **options)
        written = [
            {"generated_text": text}
            for text in reader.batch_decode(output, skip_special_tokens=True)
        ]
        count = len(written) // len(some)
        entries += (written[start : start + count] for start in range(0, len(written), count))
    single = all(len(entry) == 1 for entry in entries)
    return [entry for (entry,) in entries] if single else entries


def together(jobs: Turns, model: Any, batches: Sequence[Sequence[Request]]) -> list[Any]:
    """The answers to batches of requests that come a turn after each other, and then are all at
    work; each request has a thread of its own."""
    answers: list[Any] = []

    def answer(index: int, later: Callable[[], Any]) -> None:
        answers[index] = later()

    for batch in batches:
        indices = range(len(answers), len(answers) + len(batch))
        answers += [None] * len(batch)
        works = zip(indices, predict(model, batch), strict=True)
        jobs.add([partial(answer, index, later) for index, later in works])
        jobs.give()
    while len(jobs):
        jobs.give()
    return answers


def test_requests_that_are_written_in_turns_are_answered_as_generate_does(
    t5: TextGenerator, jobs: Turns
) -> None:
    SETTINGS: list[dict[str, Any]] = [
        {"num_beams": 1, "max_new_tokens": 10},
        {"num_beams": 3, "max_new_tokens": 6, "length_penalty": 0.5},
        {"num_beams": 1, "do_sample": True, "seed": 5, "max_new_tokens": 8, "temperature": 1.5},
        {"num_beams": 2, "do_sample": True, "seed": 7, "max_new_tokens": 6},
        {"num_beams": 1, "min_length": 5, "max_length": 9, "repetition_penalty": 1.3},
    ]
    requested = [(TEXTS[:1], setting) for setting in SETTINGS] + [
        (TEXTS, setting) for setting in SETTINGS[:3]
    ]
    expected = [oracle(t5, texts, settings) for texts, settings in requested]
    requests = [request(texts, **settings) for texts, settings in requested]
    # In one batch, in which some are written with others, and each in a batch of its own.
    for size in (len(requests), 1):
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        slices = jobs.slices
        answers = together(jobs, t5, batches)
        for (texts, settings), answer, wanted in zip(requested, answers, expected, strict=True):
            assert list(answer) == wanted, f"{size}, {texts}: {settings}"
        assert jobs.slices - slices > 3 * len(requests)
    assert len({json.dumps(answer) for answer in expected}) > len(requested) // 2, (
        "they must differ"
    )


@pytest.mark.parametrize(
    "penalties", [{"encoder_no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 30.0}]
)
def test_padding_weighs_nothing_where_the_models_settings_weigh_the_source(
    penalties: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padding token that the model also writes was forbidden, or called for, beside others."""
    bart = made("BartForConditionalGeneration", tmp_path)
    settings = {"num_beams": 1, "max_new_tokens": 5}
    for name, value in penalties.items():
        monkeypatch.setattr(bart.loaded.model.generation_config, name, value)
    plain = oracle(bart, ["who"], settings)[0]["generated_text"]
    reader: Any = bart.loaded.tokenizer
    reader.pad_token = plain.split()[0]
    requests = [request(text, **settings) for text in TEXTS]
    expected = [oracle(bart, [text], settings) for text in TEXTS]
    assert [list(answer) for answer in predict(bart, requests)] == expected
    (answer,) = predict(bart, [request(TEXTS, **settings)])
    assert list(answer) == [entry for (entry,) in expected]


def test_a_text_that_ends_early_does_not_wait_for_the_whole_of_one_like_it(
    tmp_path: Path, jobs: Turns
) -> None:
    """Requests with nothing but their texts are all alike, however long what is written becomes."""
    bart = made("BartForConditionalGeneration", tmp_path)
    reader: Any = bart.loaded.tokenizer
    generating: Any = bart.loaded.model
    settings = {"num_beams": 1, "max_new_tokens": 24}
    written = {}
    for text in TEXTS:
        encoded = reader([text], return_tensors="pt")
        encoded.pop("token_type_ids", None)
        written[text] = generating.generate(**encoded, **settings)[0, 1:].tolist()
    # An end that one of them comes to soon, and another one never.
    long, short, end = next(
        (one, other, written[other][index])
        for index in range(1, 5)
        for one in TEXTS
        for other in TEXTS
        if len(written[one]) == 24 and written[other][index] not in written[one]
    )
    generating.generation_config.eos_token_id = end
    generating.generation_config.forced_eos_token_id = None
    expected = {text: oracle(bart, [text], settings) for text in (long, short)}
    ends: list[tuple[str, Any]] = []

    def answer(text: str, later: Callable[[], Any]) -> None:
        ends.append((text, list(later())))

    jobs.add([partial(answer, long, *predict(bart, [request(long, **settings)]))])
    for _ in range(5):
        jobs.give()
    begun = jobs.slices
    shorts = [predict(bart, [request(short, **settings)])[0] for _ in range(2)]
    jobs.add([partial(answer, short, later) for later in shorts])
    while not ends:
        jobs.give()
    assert ends == [(short, expected[short])]
    # A few of the other's tokens, those of its own and what begins and ends them.
    assert jobs.slices - begun <= 14
    while len(jobs):
        jobs.give()
    assert ends[1:] == [(short, expected[short]), (long, expected[long])]


def test_what_comes_meanwhile_is_written_together_but_what_is_shorter_at_once(
    t5: TextGenerator, jobs: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_beams": 1, "max_new_tokens": 15, "min_new_tokens": 15}
    generate = type(t5.loaded.model).generate
    sizes: list[tuple[int, ...]] = []

    def counted(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(tuple(input_ids.shape))
        return generate(self, input_ids=input_ids, **options)

    texts = [" ".join([*TEXTS[:3], text]) for text in (*TEXTS[:3], *TEXTS[3:], "bad")]
    expected = [oracle(t5, [text], settings) for text in (*texts, "who")]
    monkeypatch.setattr(type(t5.loaded.model), "generate", counted)
    answers: dict[int, Any] = {}
    added: list[TurnJob] = []

    def ask(position: int, text: str) -> None:
        (later,) = predict(t5, [request(text, **settings)])
        added.extend(jobs.add([lambda: answers.update({position: list(later())})]))
        while not added[-1].turns:
            jobs.give()

    for index, text in enumerate(texts[:4]):
        ask(index, text)
    # The second one's client leaves while it waits, the third one's before it has had a turn.
    jobs.leave(added[1])
    (unread,) = jobs.add([predict(t5, [request(texts[4], **settings)])[0]])
    jobs.leave(unread)
    del unread
    ask(5, texts[5])
    assert [rows for rows, _ in sizes] == [1], "the others wait for the first"
    ask(6, "who")
    assert [rows for rows, _ in sizes] == [1, 1]
    assert sizes[1][1] * 4 <= sizes[0][1]
    while len(jobs):
        jobs.give()
    assert [rows for rows, _ in sizes] == [1, 1, 5]
    assert answers == {position: expected[position] for position in (0, 2, 3, 5, 6)}


def test_others_are_answered_if_the_client_of_who_generates_for_them_leaves(
    t5: TextGenerator, jobs: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_beams": 1, "max_new_tokens": 9, "min_new_tokens": 9}
    expected = [oracle(t5, [text], settings) for text in TEXTS[:3]]
    answers: dict[int, Any] = {}

    def answer(index: int, later: Callable[[], Any]) -> None:
        answers[index] = list(later())

    laters = predict(t5, [request(text, **settings) for text in TEXTS[:3]])
    working, *others = jobs.add([partial(answer, *pair) for pair in enumerate(laters)])
    for _ in range(5):
        jobs.give()
    assert working.turns and others[0].turns
    jobs.leave(working)
    while len(jobs):
        assert jobs.is_runnable, "they wait for each other"
        jobs.give()
    assert answers == {1: expected[1], 2: expected[2]}
    # Who is not in a job cannot wait for one.
    running, waiting = predict(t5, [request(text, **settings) for text in TEXTS[:2]])
    jobs.add([partial(answer, 0, running)])
    jobs.give()
    assert list(waiting()) == expected[1]
    while len(jobs):
        jobs.give()
    assert answers[0] == expected[0]


def test_what_does_not_fit_together_is_written_apart(
    t5: TextGenerator, jobs: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before: a request that fails by itself has failed, and its neighbours are answered."""

    class Full(torch.OutOfMemoryError):
        """A device's memory is full."""

    settings = {"num_beams": 1, "max_new_tokens": 6}
    expected = [oracle(t5, [text], settings) for text in TEXTS[:2]]
    generate = type(t5.loaded.model).generate
    rows: list[int] = []

    def narrow(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        rows.append(len(input_ids))
        if len(input_ids) > 2:
            raise Full("out of memory")
        return generate(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(t5.loaded.model), "generate", narrow)
    requests = [request(text, **settings) for text in TEXTS[:2]] + [request(TEXTS[:3], **settings)]
    answers: dict[int, Any] = {}

    def answer(index: int, later: Callable[[], Any]) -> None:
        try:
            answers[index] = list(later())
        except torch.OutOfMemoryError as error:
            answers[index] = str(error)

    laters: Iterator[Any] = enumerate(predict(t5, requests))
    jobs.add([partial(answer, index, later) for index, later in laters])
    while len(jobs):
        jobs.give()
    assert answers == {0: expected[0], 1: expected[1], 2: "out of memory"}
    assert rows == [5, 1, 1, 3]


def test_a_list_of_more_texts_than_a_call_takes_has_seeds_of_its_own_for_each_call(
    t5: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_beams": 1, "do_sample": True, "max_new_tokens": 5, "temperature": 2.0}
    texts = [TEXTS[0]] * 40
    (answer,) = predict(t5, [request(texts, seed=2**64 - 5, **settings)])
    first = oracle(t5, texts[:32], {**settings, "seed": 2**64 - 5})
    rest = oracle(t5, texts[32:], {**settings, "seed": 27})
    assert list(answer) == first + rest
    assert rest != first[:8]
    (again,) = predict(t5, [request(texts, seed=2**64 - 5, **settings)])
    assert list(again) == list(answer)
    unseeded = [list(predict(t5, [request(texts, **settings)])[0]) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_decoders_prompts_gather_too(
    tmp_path: Path, jobs: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that arrive while a prompt like them is continued share the next call."""
    model = Generator.load(Origin(str(save("LlamaForCausalLM", tmp_path)), {}))
    settings = {"max_new_tokens": 12, "min_new_tokens": 12}
    batches = [[request(text, generates=True, **settings)] for text in TEXTS]
    with monkeypatch.context() as patch:
        patch.setattr(turns, "_pause", None)
        expected = [list(predict(model, batch)[0]) for batch in batches]
    generate = type(model.loaded.model).generate
    sizes: list[int] = []

    def counted(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        sizes.append(len(input_ids))
        return generate(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(model.loaded.model), "generate", counted)
    assert [list(answer) for answer in together(jobs, model, batches)] == expected
    assert sum(sizes) == len(TEXTS) > len(sizes)
