"""Adapters over one base beside the same adapters merged into bases of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from recipe.errors import ModelError
from recipe.inference import registry, turns
from recipe.inference.adapters import AdaptedTask, Adapter, UnfitAdapter, UnknownAdapter
from recipe.inference.apis import reading
from recipe.inference.payloads import Answers, Request
from tests.support.adapter_kit import adapter, merged
from tests.support.serving_kit import save

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TEXTS = ["the film was good", "anna said", "paris again . who was bad in the film"]


class List:
    """The list of adapters, as the server's front keeps it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[str, Any] = {}
        self.count = 0
        self.write()

    def add(self, name: str, folder: Path) -> None:
        self.count += 1
        self.entries[name] = {"path": str(folder), "number": self.count}
        self.write()

    def remove(self, name: str) -> None:
        del self.entries[name]
        self.write()

    def write(self) -> None:
        beside = self.file.with_name("next")
        beside.write_text(json.dumps(self.entries))
        beside.replace(self.file)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("LlamaForCausalLM", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "lora_alpha": 16},
        {"target_modules": ["o_proj", "down_proj"], "use_dora": True},
    ]
    return [
        adapter(base, folder / str(seed), AutoModelForCausalLM, seed, task_type="CAUSAL_LM", **kind)
        for seed, kind in enumerate(kinds)
    ]


@pytest.fixture
def listing(tmp_path: Path) -> List:
    return List(tmp_path / "adapters.json")


@pytest.fixture
def load(listing: List, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], AdaptedTask]:
    monkeypatch.setenv("AMPHORA_DTYPE", "float32")

    def loaded(folder: Path) -> AdaptedTask:
        task = registry.load(str(folder), {"AMPHORA_ADAPTERS_FILE": str(listing.file)})
        assert isinstance(task, AdaptedTask)
        return task

    return loaded


def ask(task: AdaptedTask, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers to several requests in one batch, each to the adapter that it names."""
    requests = []
    for name, body in asked:
        request = reading.read(json.dumps(body).encode(), "application/json", "/invocations")
        request.adapter = name
        task.measure(request)
        requests.append(request)
    answers = []
    for prediction in task.predict(requests):
        answer = prediction() if callable(prediction) else prediction
        answers.append(list(answer) if isinstance(answer, Answers) else answer)
    return answers


GENERATE = {"inputs": TEXTS, "parameters": {"max_new_tokens": 12, "do_sample": False}}


def test_each_answers_as_if_it_were_merged_and_alone(
    base: Path,
    adapters: list[Path],
    listing: List,
    load: Callable[[Path], AdaptedTask],
    tmp_path: Path,
) -> None:
    task = load(base)
    expected = {"": registry.load(str(base), {}).predict([request(GENERATE)])[0]}
    for place, folder in enumerate(adapters):
        listing.add(f"a{place}", folder)
        alone = registry.load(str(merged(base, folder, tmp_path / f"merged{place}")), {})
        expected[f"a{place}"] = alone.predict([request(GENERATE)])[0]
    answers = {name: list(answer) for name, answer in expected.items()}
    assert len({json.dumps(answer) for answer in answers.values()}) == 4, "they must differ"

    mixed = ["a1", "", "a0", "a1", "a2", ""]
    got = ask(task, *((name, GENERATE) for name in mixed))
    assert got == [answers[name] for name in mixed]

    listing.remove("a1")
    with pytest.raises(UnknownAdapter, match=r"no model 'a1', but 'model' and its adapters a0, a2"):
        ask(task, ("a1", GENERATE))
    assert ask(task, ("a0", GENERATE), ("", GENERATE)) == [answers["a0"], answers[""]]
    # Another one of the same name.
    listing.add("a1", adapters[2])
    assert ask(task, ("a1", GENERATE)) == [answers["a2"]]
    for name in list(listing.entries):
        listing.remove(name)
    assert ask(task, ("", GENERATE)) == [answers[""]]
    listing.add("a0", adapters[0])
    assert ask(task, ("a0", GENERATE), ("", GENERATE)) == [answers["a0"], answers[""]]


def request(body: dict[str, Any]) -> Request:
    return reading.read(json.dumps(body).encode(), "application/json", "/invocations")


def test_turns_between_two_adapters_do_not_mix_them(
    base: Path,
    adapters: list[Path],
    listing: List,
    load: Callable[[Path], AdaptedTask],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that are read in turns, a token of each."""
    for place, folder in enumerate(adapters):
        listing.add(f"a{place}", folder)
    monkeypatch.setattr(turns, "_pause", lambda until: None)
    task = load(base)
    names = ["a0", "", "a1", "a2"]
    alone = [stream(task, name) for name in names]
    expected = [list(events) for events in alone]
    together = [stream(task, name) for name in names]
    events: list[list[Any]] = [[] for _ in names]
    for _ in range(max(map(len, expected))):
        for own, iterator in zip(events, together, strict=True):
            own.extend([event] if (event := next(iterator, None)) is not None else [])
    assert events == expected
    assert len({str(own) for own in expected}) == 4


def stream(task: AdaptedTask, name: str) -> Iterator[Any]:
    body = {**GENERATE, "inputs": TEXTS[0], "stream": True}
    (events,) = ask(task, (name, body))
    return iter(events)


def test_an_encoder_is_computed_by_its_own_adapter(
    listing: List, load: Callable[[Path], AdaptedTask], tmp_path: Path
) -> None:
    """An encoder-decoder's first call in `generate` is one of its encoder alone."""
    auto = AutoModelForSeq2SeqLM
    base = save("T5ForConditionalGeneration", tmp_path / "model", 13)
    body = {"inputs": TEXTS[0], "parameters": {"max_new_tokens": 8}}
    expected = {"": registry.load(str(base), {}).predict([request(body)])[0]}
    for name, seed in (("a0", 1), ("a1", 2)):
        folder = adapter(base, tmp_path / name, auto, seed, target_modules=["q", "v"])
        listing.add(name, folder)
        alone = registry.load(str(merged(base, folder, tmp_path / f"merged-{name}", auto)), {})
        expected[name] = alone.predict([request(body)])[0]
    answers = {name: list(answer) for name, answer in expected.items()}
    assert len({json.dumps(answer) for answer in answers.values()}) == 3, "they must differ"
    names = ["a0", "", "a1", "a0", "a0", "a1", ""]
    task = load(base)
    assert [ask(task, (name, body))[0] for name in names] == [answers[name] for name in names]


def test_what_is_being_written_by_an_adapter_that_goes_ends_with_the_reason(
    base: Path, adapters: list[Path], listing: List, load: Callable[[Path], AdaptedTask]
) -> None:
    task = load(base)
    for place in (0, 1):
        listing.add(f"a{place}", adapters[place])
    whole = list(stream(task, "a1"))
    going, staying = stream(task, "a0"), stream(task, "a1")
    begun = [next(going), next(staying)]
    listing.remove("a0")
    assert ask(task, ("", GENERATE))
    with pytest.raises(UnknownAdapter, match="unloaded before its answer was whole"):
        begun += list(going)
    assert [begun[1], *staying] == whole


def test_a_classifiers_head_comes_with_its_adapter(
    tiny_model: Path, listing: List, load: Callable[[Path], AdaptedTask], tmp_path: Path
) -> None:
    auto = AutoModelForSequenceClassification
    torch.manual_seed(7)
    model = auto.from_pretrained(tiny_model, id2label={0: "no", 1: "yes"})
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_bytes((tiny_model / name).read_bytes())
    task = load(tmp_path / "base")
    (before,) = ask(task, ("", {"inputs": TEXTS}))
    for seed in range(2):
        folder = adapter(tmp_path / "base", tmp_path / str(seed), auto, seed, task_type="SEQ_CLS")
        listing.add(str(seed), folder)
    answers = ask(task, ("1", {"inputs": TEXTS}), ("", {"inputs": TEXTS}), ("0", {"inputs": TEXTS}))
    for seed, answer in zip(("1", "", "0"), answers, strict=True):
        model = auto.from_pretrained(tmp_path / "base")
        if seed:
            model = PeftModel.from_pretrained(model, str(tmp_path / seed))
        tokenizer = task.base.loaded.tokenizer
        with torch.inference_mode():
            logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
        for own, row in zip(logits, answer, strict=True):
            score = float(own.softmax(0).max())
            (best,) = row if isinstance(row, list) else [row]
            assert best["label"] == ("no", "yes")[int(own.argmax())]
            assert best["score"] == pytest.approx(score, abs=1e-5)
    assert answers[1] == before and answers[0] != before != answers[2]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj"], "bias": "all"}, {"target_modules": ["q_proj", "embed_tokens"]}],
    ids=["biases", "embeddings"],
)
def test_what_would_change_the_base_is_refused(
    base: Path,
    listing: List,
    load: Callable[[Path], AdaptedTask],
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    task = load(base)
    (before,) = ask(task, ("", GENERATE))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.lm_head.bias = torch.nn.Parameter(torch.ones(model.config.vocab_size))
    get_peft_model(model, LoraConfig(r=2, **settings)).save_pretrained(tmp_path / "adapter")
    listing.add("a", tmp_path / "adapter")
    (answer,) = ask_or_error(task, "a")
    assert isinstance(answer, UnfitAdapter)
    assert "changes weights of the base" in str(answer)
    assert ask(task, ("", GENERATE)) == [before]


def ask_or_error(task: AdaptedTask, name: str) -> list[Any]:
    asked = request(GENERATE)
    asked.adapter = name
    return task.predict([asked])


def test_an_adapter_of_another_base_is_refused_and_others_go_on(
    base: Path,
    adapters: list[Path],
    listing: List,
    load: Callable[[Path], AdaptedTask],
    tmp_path: Path,
) -> None:
    wide = save("LlamaForCausalLM", tmp_path / "wide", hidden_size=48)
    other = adapter(
        wide, tmp_path / "other", AutoModelForCausalLM, 0,
        task_type="CAUSAL_LM", target_modules=["q_proj"],
    )  # fmt: skip
    kind = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    )
    kind.save_pretrained(tmp_path / "ia3")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in adapters[0].iterdir():
        (broken / path.name).write_bytes(path.read_bytes()[:-100])
    (broken / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    task = load(base)
    (before,) = ask(task, ("", GENERATE))
    for name, folder in (("other", other), ("ia3", tmp_path / "ia3"), ("broken", broken)):
        listing.add(name, folder)
        (answer,) = ask_or_error(task, name)
        assert isinstance(answer, UnfitAdapter), (name, answer)
        assert str(folder) in str(answer)
        assert ask(task, ("", GENERATE)) == [before]
    listing.add("a0", adapters[0])
    (answer,) = ask(task, ("a0", GENERATE))
    assert answer != before
    with pytest.raises(ModelError, match="other"):
        load(base)


def edited(folder: Path, **settings: Any) -> None:
    """Change an adapter's own settings."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


ODD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"target_modules": ["q_proj", "input_layernorm"]}, "not supported"),  # half-way
    ({"init_lora_weights": "pissa"}, {}, "would change the base for all"),
    ({"init_lora_weights": "olora"}, {}, "would change the base for all"),
    ({"alora_invocation_tokens": [6, 7]}, {}, "alora_invocation_tokens"),
    ({"layer_replication": [[0, 2], [0, 2]]}, {}, "layer_replication"),
    ({}, {"use_wonder": True}, "use_wonder=True"),
]


def test_what_a_shared_base_cannot_do_is_refused_and_leaves_the_base_as_it_was(
    base: Path,
    adapters: list[Path],
    listing: List,
    load: Callable[[Path], AdaptedTask],
    tmp_path: Path,
) -> None:
    task = load(base)
    (before,) = ask(task, ("", GENERATE))
    for number, (settings, later, reason) in enumerate(ODD):
        folder = adapter(
            base, tmp_path / str(number), AutoModelForCausalLM, 1,
            task_type="CAUSAL_LM", target_modules=["q_proj"], **settings,
        )  # fmt: skip
        edited(folder, **later)
        listing.add("odd", folder)
        (answer,) = ask_or_error(task, "odd")
        assert isinstance(answer, UnfitAdapter) and reason in str(answer)
        assert ask(task, ("", GENERATE)) == [before], reason
        listing.remove("odd")
        if not number:
            listing.add("a0", adapters[0])
            (by_adapter,) = ask(task, ("a0", GENERATE))
            assert by_adapter != before
        assert ask(task, ("a0", GENERATE), ("", GENERATE)) == [by_adapter, before], reason
    alone = registry.load(str(merged(base, adapters[0], tmp_path / "merged")), {})
    assert list(alone.predict([request(GENERATE)])[0]) == by_adapter


def test_an_adapter_of_the_embeddings_answers_and_so_does_the_base(
    listing: List, load: Callable[[Path], AdaptedTask], tmp_path: Path
) -> None:
    base = save("GPT2LMHeadModel", tmp_path / "gpt2")
    task = load(base)
    (before,) = ask(task, ("", GENERATE))
    auto = AutoModelForCausalLM
    folder = adapter(base, tmp_path / "wte", auto, 0, task_type="CAUSAL_LM", target_modules=["wte"])
    listing.add("wte", folder)
    (answer,) = ask(task, ("wte", GENERATE))
    assert answer != before == ask(task, ("", GENERATE))[0]
    whole = PeftModel.from_pretrained(auto.from_pretrained(base), str(folder)).eval()
    ids = torch.tensor([[7, 8, 9]])
    view = task._task(task._current()["wte"]).loaded.model
    with torch.inference_mode():
        assert torch.allclose(view(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-4)


def test_a_tokenizer_with_more_tokens_than_the_base_is_refused(
    base: Path, listing: List, load: Callable[[Path], AdaptedTask], tmp_path: Path
) -> None:
    task = load(base)
    folder = adapter(
        base, tmp_path / "a", AutoModelForCausalLM, 0,
        task_type="CAUSAL_LM", target_modules=["q_proj"],
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(base)
    known = len(tokenizer)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    listing.add("a", folder)
    (answer,) = ask_or_error(task, "a")
    assert f"its tokenizer has {known + 1} tokens, and the model {known}" in str(answer)


def test_another_base_on_the_hub_is_told(
    base: Path,
    adapters: list[Path],
    listing: List,
    load: Callable[[Path], AdaptedTask],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = load(base)
    task._origin = replace(task._origin, place="maker/model", tokenizer_place=str(base))
    for name, told in (("maker/Model", False), ("maker/other", True), (str(base), False)):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(adapters[0], folder)
        edited(folder, base_model_name_or_path=name)
        task._tell_of_another_base(Adapter("a", str(folder), 1))
        assert ("trained on maker/other, served on maker/model" in capsys.readouterr().out) == told


def test_models_of_sentence_transformers_are_refused_at_start(
    listing: List, load: Callable[[Path], AdaptedTask], tmp_path: Path
) -> None:
    """Their own library loads them, without an adapter."""
    from sentence_transformers import SentenceTransformer

    save("BertModel", tmp_path / "bert")
    SentenceTransformer(str(tmp_path / "bert")).save(str(tmp_path / "model"))
    with pytest.raises(ModelError, match="AMPHORA_ADAPTERS is set"):
        load(tmp_path / "model")
