"""A Trainer whose runs can be killed at any moment and end with the same weights."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, TrainOutput

from recipe.console import say
from recipe.errors import CheckpointError
from recipe.runtime import xla
from recipe.runtime.device import everyones, leave_world
from recipe.storage import checkpoints
from recipe.storage.checkpoints import Checkpoint
from recipe.training.interruptions import EXIT_CODE, Interrupted, Interruptions, evaluation_is_due
from recipe.training.xla_trainer import XlaTrainer

_STATE = "trainer_state.json"


class Resumable(XlaTrainer):
    """HF Trainer with whole checkpoints, which it resumes from by itself.

    The Trainer restores weights, optimizer, schedule, scaler, random states and the position in
    the data. What is added: checkpoints that are never half-written (`checkpoints`), stops that all
    processes agree on (`interruptions`), and evaluations that a kill has come before.

    Attributes:
        job: What must be the same for a checkpoint to be of this job.
    """

    job: Mapping[str, Any]

    def __init__(
        self, *, args: TrainingArguments, save_minutes: float | None = None, **others: Any
    ) -> None:
        self._saves = args.save_strategy != SaveStrategy.NO
        if self._saves:
            checkpoints.check_writable(Path(str(args.output_dir)))
        super().__init__(args=args, **others)
        self._interruptions = Interruptions(save_minutes if self._saves else None)
        self.add_callback(self._interruptions)
        self.before = TrainerState()
        """What training had reached when it was resumed."""
        self._aside: Path | None = None
        self.add_callback(_DueEvaluation(self))

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def run(self) -> dict[str, float]:
        """Train, from the start or from the newest checkpoint, and give the Trainer's metrics.

        Raises:
            CheckpointError: no checkpoint can be written, or the newest is of another job.
            SystemExit: training was stopped, and can be resumed.
        """
        found = self._found() if self._saves else None
        self._interruptions.listen()
        if found is not None:
            say(f"resuming from {found.path}")
            self.before = TrainerState.load_from_json(str(found.path / _STATE))
        if found is not None and found.finished and not self.is_fsdp_enabled:
            self._take_over(found)
            return {}
        try:
            trained: TrainOutput = super().train(
                resume_from_checkpoint=None if found is None else str(found.path)
            )
        except _StoppedEarly:
            self.is_in_train = False
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_best_model()
            return {}
        if self._interruptions.cut_short:
            self._leave()
        return trained.metrics

    def _leave(self) -> None:
        kept = (
            f"resume from {self._folder}" if self._saves else "nothing is saved: save_strategy=no"
        )
        say(f"stopped after step {self.state.global_step} of {self.state.max_steps}; {kept}")
        leave_world()
        raise SystemExit(EXIT_CODE)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """Metrics of an evaluation.

        Raises:
            SystemExit: a stop was asked for; the state before the evaluation is saved.
        """
        try:
            return super().evaluate(eval_dataset, *args, **options)
        except Interrupted:
            # After training there is one of its end, and the weights may be the best ones by now.
            if self._saves and self.is_in_train:
                self._save_checkpoint(self.model_wrapped, None)
            self._leave()
            raise

    def evaluate_what_is_due(self) -> None:
        """Make the evaluation that the checkpoint was saved too early for, if there is one.

        Called before the first step. If that evaluation ends training, as an early stop does, no
        step may follow: the undisturbed training made none.
        """
        if not evaluation_is_due(self.args, self.state):
            return
        self._determine_best_metric(self.evaluate(), None)
        if self.control.should_training_stop:
            self._save_checkpoint(self.model_wrapped, None)
            raise _StoppedEarly

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or self._folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside, then give it its place."""
        step = self.state.global_step
        needed = _bytes_of_a_checkpoint(self.model)
        with checkpoints.writing(self._folder, step, needed) as written:
            self._aside = written.parent
            try:
                if self.is_world_process_zero():
                    written.mkdir(parents=True)
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
            finally:
                self._aside = None
            self._name_the_best()
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                self.state.save_to_json(str(written / _STATE))
                finished = self.control.should_training_stop and not self._interruptions.cut_short
                checkpoints.publish(self._folder, step, self.job, finished)
                best = self.state.best_model_checkpoint
                checkpoints.forget(self._folder, self.args.save_total_limit, best)
        self.accelerator.wait_for_everyone()

    def _name_the_best(self) -> None:
        step = self.state.best_global_step
        best = self._folder / f"checkpoint-{step}"
        if step and (step == self.state.global_step or best.exists()):
            self.state.best_model_checkpoint = str(best)

    def _save_rng_state(self, output_dir: str) -> None:
        """All processes' random states, by the first one: hosts need not share a file system."""
        with tempfile.TemporaryDirectory() as own:
            super()._save_rng_state(own)
            states = {path.name: path.read_bytes() for path in Path(own).iterdir()}
        for each in everyones(states):
            if self.is_world_process_zero():
                for name, content in each.items():
                    (Path(output_dir) / name).write_bytes(content)

    def _found(self) -> Checkpoint | None:
        """The checkpoint to resume from, the same for all processes."""
        found: Checkpoint | CheckpointError | None = None
        if self.is_world_process_zero():
            try:
                found = self._find()
            except CheckpointError as error:
                found = error
        found = everyones(found)[0]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _find(self) -> Checkpoint | None:
        asked = str(self.args.resume_from_checkpoint or "True")
        checkpoints.clean(self._folder)
        if asked.lower() in ("false", "0"):
            checkpoints.set_aside(self._folder)
            return None
        is_path = asked.lower() not in ("true", "1")
        found = checkpoints.read(Path(asked)) if is_path else checkpoints.newest(self._folder)
        if found is not None:
            checkpoints.check_same(found, self.job)
        return found

    def _take_over(self, found: Checkpoint) -> None:
        """The weights and the state of a training that had ended."""
        self._load_from_checkpoint(str(found.path))
        self.state = TrainerState.load_from_json(str(found.path / _STATE))
        if evaluation_is_due(self.args, self.state):
            self._determine_best_metric(self.evaluate(), None)
            self._name_the_best()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()


class _StoppedEarly(Exception):
    """The evaluation before the first step ended training."""


class _DueEvaluation(TrainerCallback):
    """Has a resumed training make up for the evaluation that a stop came before."""

    def __init__(self, trainer: Resumable) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The weights and the state are loaded, and no random number of the next step is drawn."""
        self._trainer.evaluate_what_is_due()


def _bytes_of_a_checkpoint(model: Any) -> int:
    """What is trained, and AdamW's two moments of it in float32."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return sum(weight.nbytes + 8 * weight.numel() for weight in trained)


def fingerprint(model: Module) -> str:
    """What tells the weights that training starts from apart from others, without reading all."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        whole = weight.detach()
        if xla.in_use():  # where a part of it would be a graph for each shape
            whole = whole.cpu()
        some = whole.flatten()[:64].to("cpu", torch.float32)
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]
