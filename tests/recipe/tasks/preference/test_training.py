"""task=preference: pairs, losses and gradients as TRL's, references that a resume takes back."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, EvalPrediction

from recipe.batching import batches
from recipe.errors import CheckpointError, DataError
from recipe.models import flat_attention
from recipe.plan import batch_layout
from recipe.plan.table import Table
from recipe.reports import figures
from recipe.tasks.preference import tokens
from recipe.tasks.preference.task import PreferenceObjective
from recipe.tasks.preference.tokens import AnswerPairs
from recipe.training import preflight
from recipe.training.interruptions import EXIT_CODE, Interrupted
from tests.support import causal_kit
from tests.support.causal_kit import CHATML, MARKED, ODD
from tests.support.jobs import folders_of, run, write
from tests.support.packed_batches import to_train

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TEXTS = {
    "prompt": ["red cat:", "a much longer prompt about a blue dog:", "x", "one two three"],
    "chosen": ["catcat", "dogdogdog", "yes, gladly", " four five six seven eight"],
    "rejected": ["dog", "a bird that was not asked for", "no", " four"],
}
CASES = {
    "sigmoid": ("sigmoid", 0.1, 0.0),
    "strong": ("sigmoid", 0.5, 0.0),
    "hinge": ("hinge", 0.1, 0.0),
    "ipo": ("ipo", 0.2, 0.0),
    "robust": ("robust", 0.1, 0.2),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_kit.make_model("llama", tmp_path_factory.mktemp("start"))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def moved(model: Any) -> Any:
    """A model that has learned something."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=drawn)
    return model


def pairs_of(texts: dict[str, list[str]], are_talks: bool, length: int = 128) -> AnswerPairs:
    rows = datasets.Dataset.from_dict(texts)
    return tokens.tokenise("train", rows, are_talks, causal_kit.make_tokenizer(), length)


def log_probabilities(model: Any, pairs: AnswerPairs, packing: bool) -> torch.Tensor:
    """[pairs, 2], of one batch."""
    training = batches.Training(samples=pairs, size=len(pairs))
    objective = PreferenceObjective("sigmoid", 0.1, 0.0)
    loaded = to_train(model, objective, len(pairs), packing)
    layout, _ = batch_layout.layouts(loaded, training, {"evaluation": pairs}, Table())
    output: torch.Tensor = -model(**layout.tensors(pairs, np.arange(len(pairs)))).logits[..., 0]
    return output


@pytest.fixture(scope="module")
def library(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_length=40,
    )
    return DPOTrainer(
        moved(load(start)),
        ref_model=load(start),
        args=config,
        train_dataset=datasets.Dataset.from_dict(TEXTS),
        processing_class=causal_kit.make_tokenizer(),
    )


@pytest.mark.parametrize(("case", "packing"), [("sigmoid", False), *((c, True) for c in CASES)])
def test_losses_and_gradients_are_the_librarys(
    case: str, packing: bool, library: Any, start: Path
) -> None:
    kind, beta, smoothing = CASES[case]
    library.loss_types, library.beta, library.label_smoothing = [kind], beta, smoothing
    library.accelerator = Accelerator(cpu=True)  # a training by another test takes the state of one
    collated = library.data_collator([library.train_dataset[row] for row in range(4)])
    theirs = library.model
    theirs.zero_grad()
    expected = library.compute_loss(theirs, collated)
    expected.backward()
    pairs = pairs_of(TEXTS, False, 40)
    assert pairs.texts.lengths.max() == 40, "one is cut"
    objective = PreferenceObjective(kind, beta, smoothing)
    with torch.no_grad():
        pairs.refer(log_probabilities(load(start), pairs, packing).numpy())
    ours = moved(load(start))
    logits = torch.stack([-log_probabilities(ours, pairs, packing), torch.zeros(4, 2)], dim=-1)
    loss = objective.losses(logits, torch.from_numpy(pairs.labels), 0.0).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    largest = 0.0
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        largest = max(largest, float(other.grad.abs().max()))
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert largest > 1e-2
    scores = library._metrics["eval"]
    output = objective.score(EvalPrediction(logits.detach().numpy(), pairs.labels))
    for name, theirs_name in {
        "reward_accuracy": "rewards/accuracies",
        "reward_margin": "rewards/margins",
        "chosen_reward": "rewards/chosen",
        "rejected_logp": "logps/rejected",
    }.items():
        assert output[name] == pytest.approx(scores[theirs_name][-1], rel=1e-4, abs=1e-5), name


def test_smoothing_is_that_of_conservative_dpo(library: Any, start: Path) -> None:
    """The library has it in `aot` only, which of one pair is nothing else."""
    library.loss_types, library.beta, library.label_smoothing = ["aot"], 0.1, 0.2
    texts = {name: values[1:2] for name, values in TEXTS.items()}
    pairs = pairs_of(texts, False, 40)
    with torch.no_grad():
        expected = library.compute_loss(
            library.model, library.data_collator([library.train_dataset[1]])
        )
        pairs.refer(log_probabilities(load(start), pairs, True).numpy())
        now = log_probabilities(moved(load(start)), pairs, True)
    objective = PreferenceObjective("sigmoid", 0.1, 0.2)
    logits = torch.stack([-now, torch.zeros(1, 2)], dim=-1)
    loss = objective.losses(logits, torch.from_numpy(pairs.labels), 0.0)
    torch.testing.assert_close(loss[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", causal_kit.KINDS)
def test_packed_answers_are_as_likely_as_alone(kind: str, start: Path, tmp_path: Path) -> None:
    model = moved(load(start if kind == "llama" else causal_kit.make_model(kind, tmp_path)))
    pairs = pairs_of(TEXTS, False)
    with torch.no_grad():
        alone = []
        for row in range(len(pairs.texts)):
            ids = torch.from_numpy(pairs.texts.tokens(row).astype(np.int64))
            likely = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
            positions, following = (
                torch.from_numpy(successor) for successor in pairs.texts.successors(row)
            )
            alone.append(likely[positions, following.long()].sum())
        expected = torch.stack(alone).view(-1, 2)
        for packing in (True, False):
            actual = log_probabilities(model, pairs, packing)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        flat_attention.use(model)  # as on a GPU: end to end in one row
        actual = log_probabilities(model, pairs, True)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def shown(pairs: AnswerPairs, document: int) -> str:
    return causal_kit.show_learned(causal_kit.make_tokenizer(), pairs.texts, document)


def test_what_does_not_fit_is_cut_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        "prompt": ["one:", "a prompt that fills it:", "two:", "three:"],
        "chosen": ["abc", "abc", "abcdefghijkl", "abcdefghij"],
        "rejected": ["abd", "abd", "abcdefghijkm", "xbcdefghij"],
    }
    pairs = pairs_of(texts, False, 12)
    assert pairs.rows.tolist() == [0, 3]
    assert [shown(pairs, row) for row in range(4)] == [
        "one:[abc</s>]", "one:[abd</s>]", "three:[abcdef]", "three:[xbcdef]",
    ]  # fmt: skip
    assert pairs.labels[:, 2:].tolist() == [[4, 4], [6, 6]]
    output = capsys.readouterr().out
    assert "2 pairs, 40 tokens, 10 of them of chosen answers and 10 of rejected ones" in output
    assert "1 chosen and 1 rejected answers are cut at 12 tokens" in output
    assert "2 pairs are left out" in output
    assert "row 1 ('a prompt that fills it:'), row 2 ('two:')" in output
    with pytest.raises(DataError, match=r"No pair of the train data .*max_length \(12"):
        pairs_of({name: values[1:2] for name, values in texts.items()}, False, 12)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
                 "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n[so<|im_end|>\n]"),
        (MARKED, "user: hi\nassistant: yes</s>\nuser: why\nassistant: [so</s>]\n"),
        (ODD, "hi (user)yes (assistant)why (user)[so (assistant)<end></s>]"),
    ],
)  # fmt: skip
def test_of_a_conversation_the_last_answer_is_learned(
    template: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = ("user", "assistant", "user")
    prompt = [{"role": r, "content": c} for r, c in zip(roles, ("hi", "yes", "why"), strict=True)]
    answers = [
        json.dumps([{"role": "assistant", "content": content}]) for content in ("so", "no idea")
    ]
    rows = datasets.Dataset.from_dict(
        {"prompt": [json.dumps(prompt)], "chosen": answers[:1], "rejected": answers[1:]}
    )
    reader = causal_kit.make_tokenizer()
    reader.chat_template = template
    pairs = tokens.tokenise("train", rows, True, reader, 128)
    assert shown(pairs, 0) == expected
    tokens.tokenise("train", datasets.Dataset.from_dict(TEXTS), False, reader, 128)
    output = capsys.readouterr().out
    assert ("does not tell the answers apart in 1" in output) == (template == ODD)
    assert output.count("chat template, which is not applied to plain texts") == 1, "for the texts"
    assert "no idea" in shown(pairs, 1)


def better(count: int, first: int = 0) -> list[dict[str, str]]:
    """A prompt names an animal; so does the chosen answer, and the rejected one another."""
    rows = causal_kit.pairs(first + count)[first:]
    return [
        {
            "prompt": row["prompt"],
            "chosen": row["completion"],
            "rejected": next(
                animal for animal in causal_kit.ANIMALS if animal not in row["prompt"]
            ),
        }
        for row in rows
    ]


ARGV = ("--batch_size", "8", "--epochs", "1", "--lr", "3e-3", "--max_length", "64", "--save_steps",
        "10")  # fmt: skip


@pytest.fixture(scope="module")
def trained(start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    base = tmp_path_factory.mktemp("job")
    channels = {
        "train": write(base / "train", better(160)),
        "validation": write(base / "validation", better(24, 160), "validation"),
        "test": write(base / "test", better(24, 184), "test"),
    }
    argv = (*ARGV, "--task", "preference", "--eval_on_start", "True")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda figure, path: "")  # it takes a second
        return base, run(base, start, channels, *argv, has_report=True)


def test_a_run_begins_at_no_margin_and_reports_it(trained: tuple[Path, dict[str, float]]) -> None:
    base, metrics = trained
    assert metrics["eval_reward_accuracy"] > 0.9
    margin = metrics["eval_chosen_reward"] - metrics["eval_rejected_reward"]
    assert metrics["eval_reward_margin"] == pytest.approx(margin, rel=1e-5)
    state = json.loads((base / "checkpoints" / "checkpoint-20" / "trainer_state.json").read_text())
    at_start = state["log_history"][0]
    assert at_start["eval_reward_margin"] == 0.0, "exactly: the references are of the same batches"
    assert at_start["eval_loss"] == pytest.approx(np.log(2))
    page = (base / "output" / "data" / "report.html").read_text()
    for words in (
        "Margins, test data",
        "lowest and the highest",
        "Generated text, evaluation data",
    ):
        assert words in page
    assert "DPO, sigmoid loss, beta 0.1" in (base / "model" / "README.md").read_text()


def test_a_resumed_run_takes_its_references_from_the_checkpoint(
    trained: tuple[Path, dict[str, float]],
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, metrics = trained
    channels = {name: base / name for name in ("train", "validation", "test")}
    shutil.copytree(
        base / "checkpoints" / "checkpoint-10", tmp_path / "checkpoints" / "checkpoint-10"
    )

    def asked_again(self: Any, ask: Any) -> None:
        raise AssertionError("the trained model is asked")

    monkeypatch.setattr(PreferenceObjective, "refer", asked_again)
    argv = (*ARGV, "--task", "preference", "--eval_on_start", "True")
    again = run(tmp_path, start, channels, *argv)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (base, tmp_path)]
    assert weights[0] == weights[1]
    kept = [
        (folder / "checkpoints" / "checkpoint-20" / "references.safetensors").read_bytes()
        for folder in (base, tmp_path)
    ]
    assert kept[0] == kept[1]
    scores = [name for name in metrics if "reward" in name or name.endswith("_loss")]
    assert {name: again[name] for name in scores if "train" not in name} == {
        name: metrics[name] for name in scores if "train" not in name
    }
    finished = run(tmp_path, start, channels, *argv)
    assert finished["eval_reward_margin"] == metrics["eval_reward_margin"], "it had ended"
    # Of data that has changed the checkpoint knows nothing.
    channels["validation"] = write(tmp_path / "other", better(30, 150), "validation")
    with pytest.raises(CheckpointError, match="evaluation data has changed"):
        run(tmp_path, start, channels, *argv)


def test_a_stop_before_the_first_step_is_one(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(self: Any, ask: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(PreferenceObjective, "refer", stopped)
    with pytest.raises(SystemExit) as left:
        run(tmp_path, start, {"train": write(tmp_path / "train", better(20))}, *ARGV)
    assert left.value.code == EXIT_CODE
    assert not (tmp_path / "model").exists()
    assert not list((tmp_path / "checkpoints").glob("checkpoint-*"))


def test_doctor_tells_of_it(start: Path, tmp_path: Path) -> None:
    channels = {"train": write(tmp_path, better(40)), "model": start}
    folders = folders_of(tmp_path, channels)
    argv = ["--max_length", "16", "--lr", "5e-5"]
    results = {finding.what: finding for finding in preflight.inspect(argv, folders, 1)}
    assert str(results["task"]).startswith("preference (by its columns: ")
    assert "of 76 texts" in results["lengths"].detail, "two of each row that is not held out"
    assert results["learning rate"].level == "warning"
    assert results["steps"].detail.startswith("2 an epoch")
