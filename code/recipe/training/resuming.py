"""A Trainer whose runs can be killed at any moment and end with the same weights."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from recipe.console import say
from recipe.errors import CheckpointError
from recipe.runtime import memory, sharded, xla
from recipe.runtime.device import everyones, leave_world
from recipe.storage import checkpoints
from recipe.storage.background import Background
from recipe.storage.checkpoints import Checkpoint
from recipe.training import snapshot, worlds
from recipe.training.interruptions import EXIT_CODE, Interrupted, Interruptions, evaluation_is_due
from recipe.training.snapshot import Snapshot
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
        self._folder = Path(str(args.output_dir))
        if self._saves:
            checkpoints.check_writable(self._folder)
        super().__init__(args=args, **others)
        self._interruptions = Interruptions(save_minutes if self._saves else None)
        self.add_callback(self._interruptions)
        self.before = TrainerState()
        """What training had reached when it was resumed."""
        self._writer = Background()
        self._copied: Snapshot | None = None
        """The last copy, whose memory the next one takes."""
        self._said_that_it_waits = False
        self._resumed_job: Mapping[str, Any] = {}
        self.add_callback(_BeforeSteps(self))

    def run(self) -> dict[str, float]:
        """Train, from the start or from the newest checkpoint, and give the Trainer's metrics.

        Raises:
            CheckpointError: no checkpoint can be written, or the newest is of another job.
            SystemExit: training was stopped, and can be resumed.
        """
        checkpoint = self._found() if self._saves else None
        self._interruptions.listen()
        if checkpoint is not None:
            say(f"resuming from {checkpoint.path}")
            self._resumed_job = checkpoint.job
            was, now = (job.get(checkpoints.CUT) or {} for job in (checkpoint.job, self.job))
            # What is not as it would be without the interruption.
            if was != now:
                say(
                    f"a step's {self.job[checkpoints.SAMPLES]} texts are cut into "
                    f"{worlds.shown(now)}, before into {worlds.shown(was)}: each step has the same "
                    "texts, its sums are rounded otherwise, and dropout is drawn anew"
                )
            elif self.args.device.type == "cuda" and not self.args.full_determinism:
                say(
                    "on this device some sums are made in no fixed order: the resumed training has "
                    "the same texts and random numbers, and its last digits may differ "
                    "(full_determinism=True takes kernels that repeat)"
                )
            self.before = TrainerState.load_from_json(str(checkpoint.path / _STATE))
            self._restore_beside(checkpoint.path)
        if checkpoint is not None and checkpoint.finished and not self.is_fsdp_enabled:
            self._take_over(checkpoint)
            say(
                f"this job was finished before, at step {self.state.global_step}: nothing is "
                "trained. To train anew, start with another checkpoints folder"
            )
            return {}
        try:
            trained: TrainOutput = super().train(
                resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path)
            )
        except _StoppedEarly:
            self.is_in_train = False
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_best_model()
            return {}
        if self._interruptions.cut_short:
            self.leave()
        return trained.metrics

    def leave(self) -> None:
        """End the process as one that was stopped.

        Raises:
            SystemExit: always.
        """
        self._writer.wait()
        kept = (
            f"checkpoint saved in {self._folder}; start again to continue"
            if self._saves
            else "nothing is saved: save_strategy=no"
        )
        say(f"stopped at step {self.state.global_step} of {self.state.max_steps}; {kept}")
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
            self.leave()
            raise

    def before_steps(self) -> None:
        """Called before the first step: the weights and the state are loaded, and on their
        devices, and no random number of the next step is drawn."""
        self.evaluate_what_is_due()

    def files_beside(self) -> dict[str, bytes]:
        """What else a checkpoint keeps, by the names of files; `restore` takes it back."""
        return {}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take back what `files_beside` gave; all processes are given it."""

    def _restore_beside(self, folder: Path) -> None:
        """Have `restore` called with a checkpoint's files, as the first process has them."""
        names, files = list(self.files_beside()), {}
        if self.is_world_process_zero():
            files = {name: (folder / name).read_bytes() for name in names}
        if names:
            self.restore(everyones(files)[0])

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

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log; the entry of the whole training comes before the Trainer looks for checkpoints."""
        if "train_runtime" in logs:
            self._writer.wait()
            self._copied = None
        super().log(logs, *arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """A forward and a backward pass; raises what a checkpoint could not be written for."""
        self._writer.check()
        return super().training_step(*arguments, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Take a snapshot, and write it while training goes on; where it ends, at once.

        There is one snapshot at a time: its memory is bounded, and so is what a failure costs. It
        is kept for the next one until training ends: a host takes several times as long to give
        new memory as a step waits for the copy.
        """
        self._writer.wait()
        self.store_flos()
        self._name_the_best()
        is_first = self.is_world_process_zero()
        beside = is_first and not self.control.should_training_stop and self._fits_in_memory()
        if not beside:
            self._copied = None
        snapshot_taken = self._snapshot(copies=beside)
        if not is_first:
            return
        if beside:  # else it may be the weights that are trained
            self._copied = snapshot_taken
        step, best = self.state.global_step, self.state.best_model_checkpoint
        finished = self.control.should_training_stop and not self._interruptions.cut_short
        needed = snapshot.bytes_of([snapshot_taken.weights, snapshot_taken.optimizer])

        def write() -> None:
            with checkpoints.writing(self._folder, step, needed) as folder:
                folder.mkdir(parents=True)
                snapshot_taken.write(folder)
                checkpoints.publish(self._folder, step, self.job, finished)
                checkpoints.forget(self._folder, self.args.save_total_limit, best)

        if beside:
            self._writer.start(write)
        else:
            write()

    def _fits_in_memory(self) -> bool:
        """Whether this host has twice the memory that a copy of the whole state takes."""
        optimizer: Any = self.optimizer
        live, _ = snapshot.weights_of(self._bare_model())
        needed = snapshot.bytes_of([live, optimizer.state_dict()])
        available, held = memory.available(), 0
        if self._copied is not None:
            held = snapshot.bytes_of([self._copied.weights, self._copied.optimizer])
        fits = available is None or 2 * needed <= available + held
        if not fits and not self._said_that_it_waits:
            say(
                f"checkpoints are written while training waits: a copy takes {needed / 1e9:.1f} GB,"
                f" and {(available or 0) / 1e9:.1f} GB of memory are free"
            )
            self._said_that_it_waits = True
        return fits

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _snapshot(self, copies: bool) -> Snapshot:
        """The state as it is now; of all but the first process it has the small files only.

        Args:
            copies: Whether it keeps its numbers while training goes on.
        """
        if xla.in_use():
            xla.sync()
        keeps = self.is_world_process_zero()
        model, optimizer = self._bare_model(), None
        live, weights_file = snapshot.weights_of(model)
        before = self._copied
        weights = sharded.on_host(live, keeps, copies, before and before.weights)
        whole = not self.args.save_only_model
        if whole:
            prepared: Any = self.optimizer
            optimizer = sharded.on_host(
                prepared.state_dict(), keeps, copies, before and before.optimizer
            )
        tokenizer: Any = self.processing_class

        def also(folder: Path) -> None:
            model.config.save_pretrained(folder)
            if weights_file == snapshot.ADAPTER:
                model.peft_config[model.active_adapter].save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

        return Snapshot(
            weights=weights,
            weights_file=weights_file,
            optimizer=optimizer,
            files=self._small_files(whole),
            also=also,
        )

    def _small_files(self, whole: bool) -> dict[str, bytes]:
        """The state of everything but weights and moments, as the Trainer reads it; by name.

        With the random states of all processes: hosts need not share a file system.
        """
        callbacks: list[Any] = [*self.callback_handler.callbacks, self.control]
        exported: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
        state = dataclasses.replace(self.state, stateful_callbacks=exported)
        with tempfile.TemporaryDirectory() as own:
            folder = Path(own)
            state.save_to_json(str(folder / _STATE))
            if whole:
                schedule: Any = self.lr_scheduler
                torch.save(schedule.state_dict(), folder / snapshot.SCHEDULER)
                scaler = getattr(self.accelerator, "scaler", None)
                if scaler is not None:
                    torch.save(scaler.state_dict(), folder / "scaler.pt")
                self._save_rng_state(own)
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= self.files_beside()
        own_states = {name: files[name] for name in files if name.startswith("rng_state")}
        for each in everyones(own_states):
            files |= each
        return files

    def _name_the_best(self) -> None:
        """Note where the best weights are, as the first process finds it on its disk."""
        step = self.state.best_global_step
        best = self._folder / f"checkpoint-{step}"
        is_there = bool(step) and (step == self.state.global_step or best.exists())
        if everyones(is_there)[0]:
            self.state.best_model_checkpoint = str(best)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Put a checkpoint's weights into the model; every process has the file."""
        folder = Path(resume_from_checkpoint)
        snapshot.load_weights(self._bare_model(), folder, reads=True, shares=False)

    def _load_best_model(self) -> None:
        """Put the best weights into the model; only the first process's host may have them."""
        best = Path(str(self.state.best_model_checkpoint))
        shares = self.args.world_size > 1 and not xla.in_use()
        reads = self.is_world_process_zero() or not shares
        snapshot.load_weights(self._bare_model(), best, reads, shares)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Go on with this process's random numbers, or draw anew where it was not there before."""
        saved = (self._resumed_job.get(checkpoints.CUT) or {}).get("processes")
        if checkpoint is None or saved in (None, self.args.world_size):
            super()._load_rng_state(checkpoint)
            return
        step, rank = self.state.global_step, self.args.process_index
        set_seed((self.args.seed + 1_000_003 * step + 7_919 * rank) % 2**32)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / snapshot.OPTIMIZER).is_file():
            return
        snapshot.load_optimizer(self.optimizer, Path(checkpoint))
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(
            torch.load(Path(checkpoint) / snapshot.SCHEDULER, weights_only=True)
        )

    def _found(self) -> Checkpoint | None:
        """The checkpoint to resume from, as the first process finds it, for all of them."""
        checkpoint: Checkpoint | None = None
        refused: CheckpointError | None = None
        requested = str(self.args.resume_from_checkpoint or "True")
        if self.is_world_process_zero():
            try:
                checkpoints.clean(self._folder)
                if requested.lower() in ("false", "0"):
                    checkpoints.set_aside(self._folder)
                elif requested.lower() in ("true", "1"):
                    checkpoint = checkpoints.newest(self._folder)
                else:
                    checkpoint = checkpoints.read(Path(requested))
                if checkpoint is not None:
                    checkpoints.check_same(checkpoint, self.job)
            except CheckpointError as error:
                refused = error
        checkpoint, refused = everyones((checkpoint, refused))[0]
        if refused is not None:
            raise refused
        return checkpoint

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """The weights and the state of a training that had ended."""
        self._load_from_checkpoint(str(checkpoint.path))
        self.state = TrainerState.load_from_json(str(checkpoint.path / _STATE))
        if evaluation_is_due(self.args, self.state):
            self._determine_best_metric(self.evaluate(), None)
            self._name_the_best()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()


class _StoppedEarly(Exception):
    """The evaluation before the first step ended training."""


class _BeforeSteps(TrainerCallback):
    """Has a training do what comes before its first step."""

    def __init__(self, trainer: Resumable) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See `Resumable.before_steps`."""
        self._trainer.before_steps()


def fingerprint(model: Module) -> str:
    """What tells the weights that training starts from apart from others, without reading all."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        whole = weight.detach()
        if xla.in_use():  # where a part of it would be a graph for each shape
            whole = whole.cpu()
        first_values = whole.flatten()[:64].to("cpu", torch.float32)
        digest.update(first_values.numpy().tobytes())
    return digest.hexdigest()[:16]
