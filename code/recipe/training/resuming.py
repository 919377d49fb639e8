"""Make HF Trainer resumable: a run that is killed at any moment ends with the same weights."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers import trainer as hf_trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy, TrainOutput

from recipe.console import say
from recipe.errors import CheckpointError
from recipe.plan import batch_layout
from recipe.runtime import distribution, memory, sharded, xla
from recipe.runtime.device import gather_objects, leave_world
from recipe.storage import checkpoints
from recipe.storage.checkpoints import Checkpoint
from recipe.training import snapshot
from recipe.training.forecast import Forecast
from recipe.training.interruptions import (
    EXIT_CODE,
    EvaluationInterrupted,
    Interruptions,
    evaluation_is_due,
)
from recipe.training.snapshot import Snapshot

_STATE, _BUDGET = "trainer_state.json", "budget.json"


class Resumable(Trainer):
    """Extend HF Trainer by complete checkpoints and automatic resuming.

    The Trainer restores weights, optimizer, schedule, scaler, random states and the position in
    the data. This class adds checkpoints that are complete or absent (`checkpoints`), stops that
    all processes agree on (`interruptions`), and evaluations that a kill prevented. On the legacy
    stack torch-xla, one graph serves all steps, and hosts exchange values over their network.

    Args:
        save_minutes: The age of a checkpoint after which another one is saved.
        forecast: Measures the training, and ends it by a budget.
        leave_model: Called by all processes, with this and the step of the model's weights, if
            training is stopped.
        callbacks: The Trainer's, called after those of this class.

    Attributes:
        job: Values that must equal those in a checkpoint to resume from it.
    """

    job: Mapping[str, Any]

    def __init__(
        self,
        *,
        args: TrainingArguments,
        save_minutes: float | None = None,
        forecast: Forecast | None = None,
        leave_model: Callable[[Any, int], None] = lambda trainer, step: None,
        callbacks: Sequence[TrainerCallback] = (),
        **others: Any,
    ) -> None:
        self._saves = args.save_strategy != SaveStrategy.NO
        self._folder = Path(str(args.output_dir))
        if self._saves:
            checkpoints.check_writable(self._folder)
        super().__init__(args=args, **others)
        distribution.shard(self)
        for printed in (PrinterCallback, ProgressCallback):
            self.remove_callback(printed)
        if xla.is_used():
            self.add_callback(_Syncs())
            # accelerate's version accepts only its own loaders on torch-xla.
            training_loop: Any = hf_trainer
            training_loop.skip_first_batches = _skip_first_batches
        self._interruptions = Interruptions(save_minutes if self._saves else None)
        self.add_callback(self._interruptions)
        self.before = TrainerState()
        """The state at the beginning of this run."""
        self._leave_model, self.forecast = leave_model, forecast
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = Future[None]()
        """The last checkpoint, whose error the next step raises."""
        self._written.set_result(None)
        self._copied: Snapshot | None = None
        """The last copy; the next one reuses its memory."""
        self._has_logged_waiting = self._is_finished = False
        self._resumed_job: Mapping[str, Any] = {}
        hook: Any = TrainerCallback()
        hook.on_train_begin = lambda *args, **kwargs: self._run_due_evaluation()
        self.add_callback(hook)
        for callback in (*([forecast] if forecast else ()), *callbacks):
            self.add_callback(callback)

    def run(self) -> dict[str, float]:
        """Train from the beginning or from the newest checkpoint; return the Trainer's metrics.
        Raise CheckpointError if checkpoints cannot be written, or the newest belongs to another
        job, and SystemExit if training was stopped and can be resumed."""
        checkpoint = self._latest_checkpoint() if self._saves else None
        self._interruptions.listen()
        if checkpoint is not None:
            say(f"resuming from {checkpoint.path}")
            self._resumed_job = checkpoint.job
            was, now = (job.get(checkpoints.CUT) or {} for job in (checkpoint.job, self.job))
            # Log why the results may differ from those without the interruption.
            if was != now:
                say(
                    f"a step's {self.job[checkpoints.SAMPLES]} texts are split into "
                    f"{batch_layout.shown(now)}, before into {batch_layout.shown(was)}: each step "
                    "has the same texts, but rounding and dropout differ"
                )
            elif self.args.device.type == "cuda" and not self.args.full_determinism:
                say(
                    "some kernels of this device are not deterministic: the resumed training has "
                    "the same texts and random numbers, but its last digits may differ "
                    "(full_determinism=True selects deterministic kernels)"
                )
            self.before = TrainerState.load_from_json(str(checkpoint.path / _STATE))
            # Early stopping would count an evaluation before the first step once more.
            self.args.eval_on_start &= self.before.global_step == 0
            if self._budget is not None:
                is_first = self.is_world_process_zero()
                spent = (checkpoint.path / _BUDGET).read_bytes() if is_first else b""
                self._budget.restore(gather_objects(spent)[0])
        if checkpoint is not None and checkpoint.finished:
            say(
                f"this job was finished before, at step {self.before.global_step}: nothing is "
                "trained. To train again, use an empty checkpoints folder (another --out)"
            )
            self._is_finished = True
        try:
            trained: TrainOutput = super().train(
                resume_from_checkpoint=None if checkpoint is None else str(checkpoint.path)
            )
        except _NoSteps:
            self.is_in_train = False
            self._load_best_if_kept()
            return {}
        if self._interruptions.cut_short:
            self.leave()
        return trained.metrics

    def leave(self) -> None:
        """Write the model so far, and end the process with the exit code of a stopped training."""
        self._written.result()
        kept = (
            f"checkpoint saved in {self._folder}; start again to continue"
            if self._saves
            else "nothing is saved: save_strategy=no"
        )
        say(f"stopped at step {self.state.global_step} of {self.state.max_steps}; {kept}")
        if step := self.state.global_step:
            best = self.state.best_model_checkpoint
            if (
                gather_objects(best is not None and Path(best).is_dir())[0]
                and self._load_best_if_kept()
            ):
                step = self.state.best_global_step or 0
            self._leave_model(self, step)
        leave_world()
        raise SystemExit(EXIT_CODE)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluate, and return the metrics. Raise SystemExit if a stop was requested; the state
        before the evaluation is saved."""
        try:
            return super().evaluate(eval_dataset, *args, **options)
        except EvaluationInterrupted:
            # After training, its last checkpoint exists, and the model may have the best weights.
            if self._saves and self.is_in_train and not self._is_finished:
                self._save_checkpoint(self.model_wrapped, None)
            self.leave()
            raise

    @property
    def _budget(self) -> Forecast | None:
        """Return the forecast if it ends training by a budget, whose state checkpoints keep."""
        return self.forecast if self.forecast is not None and self.forecast.has_budget else None

    def _run_due_evaluation(self) -> None:
        """Run the evaluation that was due when the checkpoint was saved, if there was one.

        Called before the first step: weights and state are loaded, and no random number of the step
        has been drawn. No step may follow if the job was finished, or if the evaluation ends it by
        early stopping, as in a run without interruption.
        """
        if self._is_finished:
            # The Trainer forgets a path that this host lacks.
            self.state.best_model_checkpoint = self.before.best_model_checkpoint
        # In the state of the checkpoint, whose number of steps a budget may have changed.
        if evaluation_is_due(self.args, self.before):
            # Schedules that follow the evaluations take their step in it.
            self._determine_best_metric(self._evaluate(None, None), None)
            if self.control.should_training_stop and not self._is_finished:
                self._save_checkpoint(self.model_wrapped, None)
                self._is_finished = True
        if self._is_finished:
            self._set_best_path()
            raise _NoSteps

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log. At the end of training, wait first: the Trainer then looks for checkpoints. Its
        rate is of all epochs, of which a budget may have left out some."""
        if "train_runtime" in logs:
            self._written.result()
            self._copied = None
            samples: Any = self.train_dataset
            epochs = (self.state.epoch or 0) - (self.before.epoch or 0)
            trained = epochs * len(samples)
            logs["train_samples_per_second"] = round(trained / logs["train_runtime"], 3)
        super().log(logs, *arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Compute loss and gradients; raise the error of a checkpoint that could not be written."""
        self.raise_write_error()
        return super().training_step(*arguments, **options)

    def raise_write_error(self) -> None:
        """Raise the error of the last checkpoint if it could not be written."""
        if self._written.done():
            self._written.result()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Take a snapshot, and write it while training continues.

        If training ends, or this host has less than twice the memory of a copy, training waits for
        the write. There is only one snapshot at a time, which bounds its memory. That memory is
        reused by the next one: allocating it takes several times as long as the copy.
        """
        self._written.result()
        self.store_flos()
        self._set_best_path()
        is_first = self.is_world_process_zero()
        in_background = is_first and not self.control.should_training_stop
        if in_background:
            optimizer: Any = self.optimizer
            live, _ = snapshot.weights_of(self._bare_model())
            copied = snapshot.bytes_of([live, optimizer.state_dict()])
            available, held = memory.available(), 0
            if self._copied is not None:
                held = snapshot.bytes_of([self._copied.weights, self._copied.optimizer])
            in_background = available is None or 2 * copied <= available + held
            if not in_background and not self._has_logged_waiting:
                say(
                    f"checkpoints are written while training waits: a copy takes "
                    f"{memory.size(copied)}, and {memory.size(available or 0)} of memory are free"
                )
                self._has_logged_waiting = True
        if not in_background:
            self._copied = None
        snapshot_taken = self._snapshot(copies=in_background)
        if not is_first:
            return
        if in_background:  # otherwise it refers to the weights that are trained
            self._copied = snapshot_taken
        step, best = self.state.global_step, self.state.best_model_checkpoint
        finished = self.control.should_training_stop and not self._interruptions.cut_short
        needed = snapshot.bytes_of([snapshot_taken.weights, snapshot_taken.optimizer])

        def write() -> None:
            started = time.monotonic()
            with checkpoints.writing(self._folder, step, needed) as folder:
                folder.mkdir(parents=True)
                snapshot_taken.write(folder)
                checkpoints.publish(self._folder, step, self.job, finished)
                if self.forecast is not None:
                    self.forecast.note_written(needed, time.monotonic() - started)
                checkpoints.forget(self._folder, self.args.save_total_limit, best)

        if in_background:
            self._written = self._writer.submit(write)
        else:
            write()

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _snapshot(self, copies: bool) -> Snapshot:
        """Return the current state; on all but the first process, the small files only. With
        `copies`, tensors are copied, so that training may change them."""
        if xla.is_used():
            xla.sync()
        keeps = self.is_world_process_zero()
        model = self._bare_model()
        live, weights_file = snapshot.weights_of(model)
        before = self._copied
        weights = sharded.copy_to_host(live, keeps, copies, before and before.weights)
        prepared: Any = self.optimizer
        optimizer = sharded.copy_to_host(
            prepared.state_dict(), keeps, copies, before and before.optimizer
        )
        tokenizer: Any = self.processing_class

        def write_settings(folder: Path) -> None:
            model.config.save_pretrained(folder)
            if weights_file == snapshot.ADAPTER:
                model.peft_config[model.active_adapter].save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")

        callbacks: list[Any] = [*self.callback_handler.callbacks, self.control]
        exported: list[Any] = [item for item in callbacks if isinstance(item, ExportableState)]
        state = dataclasses.replace(self.state, stateful_callbacks=exported)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            state.save_to_json(str(folder / _STATE))
            schedule: Any = self.lr_scheduler
            torch.save(schedule.state_dict(), folder / snapshot.SCHEDULER)
            scaler = getattr(self.accelerator, "scaler", None)
            if scaler is not None:
                torch.save(scaler.state_dict(), folder / "scaler.pt")
            self._save_rng_state(temporary)
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
        if self._budget is not None:
            files[_BUDGET] = self._budget.state()
        # The random states of all processes, since hosts need not share a file system.
        random_states = {name: files[name] for name in files if name.startswith("rng_state")}
        for states in gather_objects(random_states):
            files |= states
        return Snapshot(
            weights=weights,
            weights_file=weights_file,
            optimizer=optimizer,
            files=files,
            write_settings=write_settings,
        )

    def _set_best_path(self) -> None:
        """Set the path of the best checkpoint, if the first process has it on its disk."""
        step = self.state.best_global_step
        best = self._folder / f"checkpoint-{step}"
        is_there = bool(step) and (step == self.state.global_step or best.exists())
        if gather_objects(is_there)[0]:
            self.state.best_model_checkpoint = str(best)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights into the model; every process has the file."""
        folder = Path(resume_from_checkpoint)
        snapshot.load_weights(self._bare_model(), folder, reads=True, shares=False)

    def _load_best_if_kept(self) -> bool:
        """Load the best weights if the job keeps the best model and knows one."""
        keeps = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        if keeps:
            self._load_best_model()
        return keeps

    def _load_best_model(self) -> None:
        """Load the best weights into the model; maybe only the first process's host has them."""
        best = Path(str(self.state.best_model_checkpoint))
        shares = self.args.world_size > 1 and not xla.is_used()
        reads = self.is_world_process_zero() or not shares
        snapshot.load_weights(self._bare_model(), best, reads, shares)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this process's random state, or seed it if the number of processes changed."""
        saved = (self._resumed_job.get(checkpoints.CUT) or {}).get("processes")
        if checkpoint is None or saved in (None, self.args.world_size):
            super()._load_rng_state(checkpoint)
            return
        step, rank = self.state.global_step, self.args.process_index
        set_seed((self.args.seed + 1_000_003 * step + 7_919 * rank) % 2**32)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._is_finished:
            return
        if not (Path(checkpoint) / snapshot.OPTIMIZER).is_file():
            raise CheckpointError(
                f"Checkpoint {checkpoint} has no {snapshot.OPTIMIZER}: it was saved with "
                "save_only_model=True, and cannot be resumed from exactly.",
                "Set resume_from_checkpoint=False, and give its folder as model_name_or_path.",
            )
        snapshot.load_optimizer(self.optimizer, Path(checkpoint))
        schedule: Any = self.lr_scheduler
        schedule.load_state_dict(
            torch.load(Path(checkpoint) / snapshot.SCHEDULER, weights_only=True)
        )

    def _latest_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from, which the first process finds for all."""
        checkpoint: Checkpoint | None = None
        refused: CheckpointError | None = None
        requested = checkpoints.requested(self.args.resume_from_checkpoint)
        if self.is_world_process_zero():
            try:
                checkpoints.clean(self._folder)
                if isinstance(requested, Path):
                    checkpoint = checkpoints.read(requested)
                elif requested:
                    checkpoint = checkpoints.newest(self._folder)
                else:
                    checkpoints.set_aside(self._folder)
                if checkpoint is not None:
                    checkpoints.check_same(checkpoint, self.job)
            except CheckpointError as error:
                refused = error
        checkpoint, refused = gather_objects((checkpoint, refused))[0]
        if refused is not None:
            raise refused
        return checkpoint

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        if not xla.is_used():
            transformers_4: Any = super()
            return transformers_4._nested_gather(tensors, name)
        return torch.stack(gather_objects(tensors.cpu()))


class _NoSteps(Exception):
    """Raised before the first step if none is left."""


class _Syncs(TrainerCallback):
    """Calls `sync` after the same operations each time, so that the same graphs recur."""

    def _sync(self, *args: Any, **kwargs: Any) -> None:
        xla.sync()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seed by the step: each sync draws a new seed, and a resumed run had fewer of them."""
        xla.seed(args.seed + 1_000_003 * state.global_step)

    # Loading is not part of the first step's graph, and a log's reset not of the next step's.
    on_train_begin = on_substep_end = on_step_end = on_prediction_step = on_log = _sync


def _skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader of the batches of an epoch that a resumed training has not seen."""
    return DataLoader(
        loader.dataset,
        batch_sampler=SkipBatchSampler(loader.batch_sampler, skip_batches=num_batches),
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        num_workers=loader.num_workers,
    )


def hash_weights(model: Module) -> str:
    """Return a hash of the initial weights, from the beginning of each tensor."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        whole = weight.detach()
        if xla.is_used():  # slicing on the device would compile a graph for each shape
            whole = whole.cpu()
        first_values = whole.flatten()[:64].to("cpu", torch.float32)
        digest.update(first_values.numpy().tobytes())
    return digest.hexdigest()[:16]
