"""Every task by two processes with FSDP2 in bfloat16, beside one process in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import causal_kit, ranking_jobs, texts_and_pictures
from tests.support.words import WORDS
from tests.support.worlds import Training, run

pytestmark = pytest.mark.heavy
STEPS = ("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3")
ARGUMENTS = (*STEPS, "--save_total_limit", "9", "--logging_steps", "1", "--lr", "2e-3")
LORA = ("--lora_r", "4", "--lora_alpha", "8")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """What is trained: a task of a model's class, on rows or on what a maker writes."""

    task: str
    model: str
    make: Callable[[], Rows] | None = None
    more: tuple[str, ...] = ()


def texts() -> Rows:
    return [{"text": f"the film number {at} was {WORDS[3 + at % 4]}", "label": "np"[at % 4 < 2]}
            for at in range(64)]  # fmt: skip


def pairs() -> Rows:
    return [{"premise": f"the film number {at}", "hypothesis": f"film number {at + at % 2}",
             "label": "yn"[at % 2]} for at in range(64)]  # fmt: skip


def marks() -> Rows:
    return [{"text": f"the film number {at} was good", "label": at % 7 / 2} for at in range(64)]


def tagged() -> Rows:
    kinds = [("good", "B-PER"), ("bad", "B-LOC"), ("the", "O"), ("was", "O")]
    rows = []
    for at in range(64):
        words = [kinds[(at * 7 + place) % 4] for place in range(2 + at % 6)]
        rows.append({"tokens": [word for word, _ in words], "ner_tags": [tag for _, tag in words]})
    return rows


def asked() -> Rows:
    rows = []
    for at in range(64):
        context = " ".join([*["the film was"] * (at % 5), f"number {at % 10}", "good great"])
        answers = {"text": [str(at % 10)], "answer_start": [context.index("number") + 7]}
        rows.append({"id": str(at), "question": "the number", "context": context,
                     "answers": answers})  # fmt: skip
    return rows


CASES = {
    "classes": Case("text-classification", "bert", texts),
    "pairs": Case("text-classification", "bert", pairs),
    "numbers": Case("text-classification", "bert", marks, ("--problem_type", "regression")),
    "classes, LoRA": Case("text-classification", "bert", texts, LORA),
    "tags": Case("token-classification", "bert", tagged),
    "questions": Case("question-answering", "bert", asked),
    "embeddings": Case("sentence-embedding", "bert", lambda: ranking_jobs.triplets(64)),
    "embeddings in parts": Case(
        "sentence-embedding", "bert", lambda: ranking_jobs.triplets(64), ("--mini_batch_size", "2")
    ),
    "ranks": Case(
        "reranking", "bert", lambda: ranking_jobs.rows_of(ranking_jobs.lists(40)),
    ),
    "ranks of lists": Case(
        "reranking", "bert", lambda: ranking_jobs.lists(64), ("--listwise", "True")
    ),
    "completions of gpt2": Case("causal-lm", "gpt2", lambda: causal_kit.pairs(72)),
    "completions of llama": Case("causal-lm", "llama", lambda: causal_kit.pairs(72)),
    "completions, LoRA": Case("causal-lm", "llama", lambda: causal_kit.pairs(72), LORA),
    "completions, an adapter": Case(
        "causal-lm", "llama", lambda: causal_kit.pairs(72), (*LORA, "--lora_save", "adapter")
    ),
    "masked words": Case("masked-lm", "made"),
    "summaries": Case("summarization", "made"),
    "summaries, LoRA": Case("summarization", "made", None, LORA),
    "pictures": Case("image-classification", "made"),
    "pictures, LoRA": Case("image-classification", "made", None, LORA),
}  # fmt: skip
IN_EVERY_CHECK = ("completions, LoRA",)


def made(case: Case, folder: Path, tiny_model: Path) -> tuple[Path, str, dict[str, str], list[str]]:
    """The model, without dropout; training data; the variables of other channels; arguments."""
    if case.make is None:
        kind = texts_and_pictures.make(case.task, folder / "kind")
        test = {"SM_CHANNEL_TEST": str(kind.channels["test"])}
        return kind.model, str(kind.channels["train"]), test, kind.arguments
    data = ranking_jobs.write(folder / "data", case.make())
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    start, kind_of_model, length = tiny_model, AutoModel, "40"
    if case.model != "bert":
        start = causal_kit.make_model(case.model, folder / "start")
        kind_of_model, length = AutoModelForCausalLM, "64"
    # A head is drawn as large as the rest, so that the losses of samples differ.
    large: Any = {"initializer_range": 0.3}
    if case.model == "bert":
        large |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = kind_of_model.from_pretrained(start, **large)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim > 1 else 1
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(start).save_pretrained(folder / "model")
    return folder / "model", str(data), {}, ["--max_length", length]


def losses(training: Training) -> tuple[dict[int, float], list[float]]:
    """Those of each step, and of the evaluations."""
    trained = re.findall(r"metric step=(\d+) \S+ loss=(\S+)", training.log())
    evaluated = re.findall(r"eval_loss=(\S+)", training.log())
    return {int(step): float(loss) for step, loss in trained}, list(map(float, evaluated))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_EVERY_CHECK)) for name in CASES],
)
def test_shards_in_bfloat16_learn_what_one_process_does(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    model, data, environment, arguments = made(case, tmp_path, tiny_model)
    argv = ["--task", case.task, "--model_id", str(model), *ARGUMENTS, *arguments, *case.more]
    sharded = [*argv, "--batch_size", "4", "--bf16", "True", "--mp_parameters", "partitions=2"]

    def training(folder: str, processes: int, its_argv: list[str], **more: Any) -> Training:
        return Training(
            base=str(tmp_path / folder), data=data, argv=its_argv, processes=processes,
            environment=environment, **more,
        )  # fmt: skip

    one = training("one", 1, [*argv, "--batch_size", "8", "--bf16", "False"])
    two = training("two", 2, sharded)
    rest = training("rest", 2, sharded, checkpoint=two.path(3))
    for each, codes in zip((one, two, rest), run(one, two, rest, timeout=280), strict=True):
        assert set(codes) == {0}, each.log()
    assert "sharded over 2 processes (FSDP2)" in two.log()
    expected, at_the_end = losses(one)
    found, evaluated = losses(two)
    assert len(expected) == 6 and max(expected.values()) > 1.05 * min(expected.values())
    assert found == pytest.approx(expected, rel=0.02)
    assert len(evaluated) == len(at_the_end) > 0
    # An embedding's evaluation contrasts as many texts as a process has in a batch: 4 and 8.
    if case.task != "sentence-embedding":
        assert evaluated == pytest.approx(at_the_end, rel=0.02)
    # Float32 has digits that bfloat16 has not: sums of losses are not rounded to it.
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in found.values())

    assert f"resuming from {rest.path(3)}" in rest.log()
    assert losses(rest)[0] == {step: loss for step, loss in found.items() if step > 3}
    (file,) = (tmp_path / "two" / "model").glob("*model.safetensors")
    weights, again = (load_file(tmp_path / each / "model" / file.name) for each in ("two", "rest"))
    in_one_process = load_file(tmp_path / "one" / "model" / file.name)
    assert weights.keys() == again.keys() == in_one_process.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, again[key]), key
        assert weight.dtype == in_one_process[key].dtype and weight.isfinite().all(), key
    loads(tmp_path / "two" / "model", weights)


def loads(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """See that the library's own class takes the saved weights, and all of them."""
    import peft
    import transformers

    if (folder / "adapter_config.json").exists():
        asked = json.loads((folder / "adapter_config.json").read_text())
        base = transformers.AutoModelForCausalLM.from_pretrained(asked["base_model_name_or_path"])
        adapted: Any = peft.PeftModel.from_pretrained(base, str(folder))
        stored = peft.get_peft_model_state_dict(adapted)
        assert stored.keys() == weights.keys()
        return
    config = json.loads((folder / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    loaded, info = architecture.from_pretrained(folder, output_loading_info=True)
    missing = {each for each in info["missing_keys"] if "pooler" not in each}
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"]
    # Files have other names than models in some families.
    loaded.save_pretrained(folder.parent / "again")
    again = load_file(folder.parent / "again" / "model.safetensors")
    assert all(torch.equal(again[key].float(), weight.float()) for key, weight in weights.items())
