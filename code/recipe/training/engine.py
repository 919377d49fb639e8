"""Run HF Trainer on the recipe's batches: packed, balanced over processes, evaluated exactly.

HF Trainer keeps schedules, mixed precision, DDP, FSDP, callbacks and logging. The recipe replaces
the data loaders, the loss (the mean over all samples of an optimizer step, on all processes) and
the evaluation loop (every sample once).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput

from recipe.batching import batches
from recipe.batching.batches import Batch, Layout, Samples
from recipe.console import Progress
from recipe.errors import DivergedError, HyperparameterError, join_names
from recipe.models.bf16_weights import Bf16Weights
from recipe.plan import trainer_arguments
from recipe.plan.batch_layout import BatchPlan
from recipe.runtime import all_gather, ddp_hook, distribution, transfers
from recipe.runtime.compiled_layers import CompiledLayers
from recipe.runtime.graphs import CudaRecorder, Recorder
from recipe.runtime.step_graphs import StepGraphs
from recipe.tasks.base import LibraryTraining, Objective
from recipe.training import job_identity
from recipe.training.preparation import PreparedTraining
from recipe.training.resuming import Resumable

_WATCHED = 16


def build(prepared: PreparedTraining, class_weight: str | None = None, **others: Any) -> Any:
    """Build the engine of a prepared training or evaluation, or the trainer of a library that its
    task brings; `others` are the engine's."""
    loaded, samples, objective = prepared.loaded, prepared.samples, prepared.loaded.objective
    brought = objective.library_trainer(
        loaded.model, loaded.tokenizer, loaded.arguments, loaded.max_length
    )
    if brought is not None:
        return build_by_library(prepared, brought, **others)
    return Engine(
        model=loaded.model,
        args=loaded.arguments,
        decided=prepared.batches,
        objective=objective,
        class_weights=objective.class_weights(class_weight, samples["train"], loaded.model),
        eval_dataset=samples["evaluation"],
        processing_class=loaded.tokenizer,
        compute_metrics=objective.score,
        bf16_weights=loaded.bf16_weights,
        **others,
    )


class Engine(Resumable):
    """HF Trainer on `Samples`, which are its `train_dataset` and `eval_dataset`.

    Args:
        decided: The training samples, how steps are drawn and split, and the layouts of batches.
        objective: Losses and metrics.
        class_weights: Factor of the training loss for samples of each class.
        decisive: Further values that must equal those of a checkpoint (`job_identity`).
        locate: Returns the location of a training sample.
        bf16_weights: Whether training computes with bfloat16 copies of the weights.
    """

    make_recorder: Callable[[], Recorder] = CudaRecorder
    # compute_loss divides by the samples of the whole step.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        args: TrainingArguments,
        decided: BatchPlan,
        objective: Objective,
        class_weights: Sequence[float] | None = None,
        decisive: Mapping[str, Any] | None = None,
        locate: Callable[[int], str] = "the training sample {} (from 0)".format,
        bf16_weights: bool = False,
        **others: Any,
    ) -> None:
        training = decided.training
        super().__init__(args=args, train_dataset=training.samples, **others)
        # If channels are sharded, or samples of a batch are negatives of each other, the split of a
        # step affects the result.
        is_fixed = training.samples.shards is not None or objective.couples_samples
        model: Any = self.model
        self.job = job_identity.record(model, args, decided, decisive, is_fixed)
        # Otherwise the Trainer counts labels over all processes in every step.
        self.model_accepts_loss_kwargs = False
        self._training, self._train_layout = training, decided.train_layout
        self._eval_layout, self._objective = decided.eval_layout, objective
        self._locate = locate
        self._class_weights = class_weights and torch.tensor(class_weights, device=args.device)
        self._watched: list[tuple[int, Tensor, Tensor]] = []
        self._is_synchronous = args.device.type == "cpu"
        self._arranged: Any = None
        self._copies = Bf16Weights(model) if bf16_weights else None
        self._layers = CompiledLayers(model, args) if decided.compiles_layers else None
        if self._layers:  # otherwise accelerate compiles the model
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
        self._has_graphs = decided.has_graphs
        self._graphs: StepGraphs | None = None
        self._padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        # A multiplication and an addition for each parameter, forward once and backward twice.
        self.flops_per_token = 6 * model.num_parameters(exclude_embeddings=True)

    def create_optimizer(self, *arguments: Any, **options: Any) -> Any:
        """Create the optimizer. Raise HyperparameterError if it needs a package that is not
        installed, or does not take the given values."""
        try:
            return super().create_optimizer(*arguments, **options)
        except (ImportError, TypeError, ValueError) as error:
            name = trainer_arguments.name_of(self.args.optim)
            values = f" and optim_args {self.args.optim_args!r}" * bool(self.args.optim_args)
            raise HyperparameterError(
                f"Hyperparameter optim has value {name!r}{values}, which cannot be used here: "
                f"{error}",
                "Leave it out, or give another one, such as adafactor.",
            ) from error

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of this process's batches."""
        if self._padding is not None:  # the Trainer has put the tokenizer's there
            model: Any = self.model
            model.config.pad_token_id = self._padding
        return batches.training_loader(
            self._training,
            self._train_layout,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            workers=self.args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the samples themselves, which `evaluation_loop` takes."""
        return self.eval_dataset if eval_dataset is None else eval_dataset

    def training_lengths(self) -> Any:
        """Return the number of tokens of each training text."""
        return self._training.samples.text_lengths

    def tokens_computed(self) -> int:
        """Return the tokens of the first epoch over all processes, padding included."""
        drawn = self._training.rows(1, self._train_layout.balanced)
        count_tokens = self._train_layout.computed_tokens
        return sum(count_tokens(self._training.samples, rows) for rows in drawn if len(rows))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of a step, with which the Trainer counts trained samples."""
        return self._training.samples_per_step

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return the operations of a forward and a backward pass, without counting parameters."""
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else len(inputs["labels"])
        return int(self.flops_per_token * tokens)

    def _wrap_model(self, *arguments: Any, **options: Any) -> Any:
        """Wrap the model; DDP keeps no second copy of its gradients."""
        model = super()._wrap_model(*arguments, **options)
        if (ddp := self.accelerator.ddp_handler) is not None:
            ddp.gradient_as_bucket_view = True
            if self.args.ddp_broadcast_buffers is None:
                # DDP broadcasts buffers before each forward pass, also if they never change.
                ddp.broadcast_buffers = distribution.has_changing_buffers(model)
        return model

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Move the batch to the device, asynchronously on a GPU from the loader's pinned memory.

        The device executes the copy before anything that uses the tensor.
        """
        if self.args.device.type != "cuda":
            prepared: Batch = super()._prepare_inputs(inputs)
            return prepared
        target: dict[str, Any] = {"device": self.args.device, "non_blocking": True}
        return {k: v.to(**target) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> Tensor:
        """Compute loss and gradients; on CPUs, DDP sums only the touched embedding rows."""
        if self.args.device.type == "cpu" and model is not self._arranged:
            ddp_hook.sum_touched_rows(model)
            self._arranged = model
        if self._has_graphs:
            self.raise_write_error()
            return self._step_by_graph(model, *arguments)
        with ExitStack() as changes:
            if self._copies:
                changes.enter_context(self._copies.used(self.state.global_step))
            if self._layers:
                changes.enter_context(self._layers.used())
            return super().training_step(model, *arguments, **options)

    def _step_by_graph(self, model: Any, inputs: Batch, *_: Any) -> Tensor:
        """Do what the Trainer's step does for one process and one device."""
        model.train()
        optimizer: Any = self.optimizer
        optimizer.train()

        def compute(batch: Mapping[str, Any]) -> list[Tensor]:
            with ExitStack() as changes:
                if self._copies:
                    changes.enter_context(self._copies.used(None))
                if self._layers:
                    changes.enter_context(self._layers.used())
                with self.compute_loss_context_manager():
                    _, losses, real = self._losses(model, dict(batch))
                    loss = self._share(losses, real, batch)
                torch.autograd.backward(loss)
            return [loss.detach(), losses.detach().sum()]

        if self._graphs is None:
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            self._graphs = StepGraphs(trained, compute, self.make_recorder())
        prepared = self._prepare_inputs(inputs)
        loss, total = self._graphs.run(prepared)
        self._watch(total, prepared["rows"])
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return this batch's share of the step's mean loss over all samples, with class weights.

        DDP averages the gradients over processes, and the Trainer the logged losses: hence the
        factor. A process with fewer samples contributes less.

        The batch's loss is also checked for NaN: at once on a CPU, else every `_WATCHED` batches.
        """
        outputs, losses, real = self._losses(model, inputs)
        self._watch(losses.detach().sum(), inputs["rows"])
        loss = self._share(losses, real, inputs)
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):  # transformers 4: it always divides
            loss = loss * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _share(self, losses: Tensor, real: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the share of a batch, whose samples have these losses."""
        if self._class_weights is not None:
            losses = losses * self._class_weights[inputs["labels"]]
        share: Tensor = self._training.world.processes / inputs["total"][0]
        return (losses * real).sum() * share

    def _watch(self, total: Tensor, rows: Tensor) -> None:
        """Check, now or later, that the sum of a batch's losses is finite."""
        # Before adding this step's loss, which a lazy device has not computed yet.
        if len(self._watched) >= _WATCHED:
            self._check_losses()
        self._watched.append((self.state.global_step + 1, total, rows))
        if self._is_synchronous:
            self._check_losses()

    def _check_losses(self) -> None:
        """Check that the losses since the last check are finite."""
        sums = [loss for _, loss, _ in self._watched]
        if self.args.device.type == "cuda" and sums:
            sums = list(torch.stack(sums).cpu())  # a single synchronous copy
        totals = [loss.item() for loss in sums]
        for (step, _, rows), total in zip(self._watched, totals, strict=True):
            if not math.isfinite(total):
                samples = map(self._locate, (row for row in rows.tolist() if row >= 0))
                raise DivergedError(
                    f"The loss of step {step} is NaN or infinite. Its batch has "
                    f"{join_names(list(samples))}.",
                    "Lower learning_rate, or look at these rows. The checkpoints in "
                    f"{self.args.output_dir} are older and not affected.",
                )
        self._watched.clear()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_losses()
        super()._save_checkpoint(model, trial)

    def _losses(self, model: Any, inputs: Batch) -> tuple[Any, Tensor, Tensor]:
        """Return the model's outputs, the loss of each slot, and whether it holds a sample."""
        extra = ("labels", "rows", "total")
        outputs = model(**{name: value for name, value in inputs.items() if name not in extra})
        # Layouts of images may fill no slots, or give an image twice.
        if unused := len(inputs["labels"]) - len(outputs.logits):
            outputs.logits = functional.pad(outputs.logits, (0, 0, 0, unused))
        smoothing = self.args.label_smoothing_factor if model.training else 0.0
        losses = self._objective.losses(outputs.logits, inputs["labels"], smoothing)
        return outputs, losses, inputs["rows"] >= 0

    @torch.no_grad()
    def _answers(self, samples: Samples, layout: Layout, size: int) -> tuple[Any, Any]:
        """Return logits and losses of all samples, in the order of the data."""
        prepared: Any = self.model_wrapped
        if not self.accelerator._models:  # without training, this moves it to its device
            prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        bare: Any = self.model
        bare.eval()
        # Use the compiled model if there is one: uncompiled, TorchNeuron would compile a program
        # for each operation.
        model = prepared if self.args.torch_compile and not self._layers else bare
        results = all_gather.SampleOutputs(len(samples))
        pending: deque[transfers.HostCopy] = deque()
        world = self._training.world
        # The part of the first process.
        with Progress("evaluation", -(-len(samples) // world.processes)) as progress:
            for batch in batches.evaluation_batches(samples, layout, size, world):
                inputs = self._prepare_inputs(batch)
                with self.compute_loss_context_manager():
                    outputs, losses, _ = self._losses(model, inputs)
                outcome = [batch["rows"], outputs.logits.float(), losses]
                self.control = self.callback_handler.on_prediction_step(
                    self.args, self.state, self.control
                )
                # All logits could fill a device. It computes a batch while the last is copied.
                pending.append(transfers.start_copy(outcome))
                if len(pending) > 1:
                    results.add(*pending.popleft().wait())
                progress.done += int((batch["rows"] >= 0).sum())
        for outcome_copy in pending:
            results.add(*outcome_copy.wait())
        return results.gather()

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return logits, labels and metrics in the order of the data."""
        samples: Samples = dataloader
        logits, losses = self._answers(samples, self._eval_layout, self.args.eval_batch_size)
        weight = samples.weight(np.arange(len(samples)))
        labels = samples.labels
        scores = {"loss": float(losses.sum(dtype=np.float64) / weight)}
        if self.compute_metrics is not None:
            scores |= self.compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
        scores |= self._objective.generated_scores(self, samples)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        return EvalLoopOutput(
            predictions=logits, label_ids=labels, metrics=metrics, num_samples=len(logits)
        )


_EVALUATION, _TEST = "evaluation", "test"


def build_by_library(
    prepared: PreparedTraining, training: LibraryTraining, **others: Any
) -> LibraryTrainer:
    """Build the trainer of a prepared training. Raise HyperparameterError if the library refuses
    the arguments."""
    name = training.kind.__name__
    kind = type(name, (LibraryTrainer, training.kind, _Logged), {})
    others.pop("locate", None)  # a sample's number is not known to the library
    try:
        made: LibraryTrainer = kind(
            args=training.arguments, decided=prepared.batches, **training.options, **others
        )
    except _REFUSALS as error:
        raise _refusal(name, error) from error
    return made


_REFUSALS = (NotImplementedError, ValueError)


def _refusal(name: str, error: Exception) -> HyperparameterError:
    return HyperparameterError(
        f"The hyperparameters and data do not fit together, {name} says: {error}"
    )


class LibraryTrainer(Resumable):
    """Comes before a library's subclass of Trainer in the order of inheritance.

    Args:
        decided: The samples, of which lengths and digests are used.
        decisive: Further values that must equal those of a checkpoint (`job_identity`).
    """

    metric_prefix = "eval"
    logged: Mapping[str, float] = {}
    """The metrics of the last evaluation."""

    def __init__(
        self, *, args: Any, decided: BatchPlan, decisive: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        self._decided = decided
        super().__init__(args=args, **others)
        self.job = job_identity.record(self.model, args, decided, decisive, True)

    def _send_telemetry(self) -> None:
        """Send nothing: TRL reports model and hardware to the hub."""

    def evaluate(
        self, eval_dataset: Any = None, *args: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> dict[str, float]:
        """Evaluate a split; return all metrics that are logged."""
        self.metric_prefix = metric_key_prefix
        name = _EVALUATION if eval_dataset is None else _TEST
        super().evaluate(name, *args, metric_key_prefix=metric_key_prefix, **options)
        self.metric_prefix = "eval"
        return dict(self.logged)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Compute the library's loss; what it refuses at the first step is the user's mistake."""
        try:
            return super().compute_loss(*args, **options)
        except _REFUSALS as error:
            if self.state.global_step:
                raise
            raise _refusal(type(self).__name__, error) from error

    def training_lengths(self) -> Any:
        """Return the tokens of each training row, with its longer answer."""
        return self._decided.training.samples.text_lengths

    def steps_of_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return self._decided.training.steps()

    def tokens_computed(self) -> int:
        """Return about how many tokens an epoch computes, padding included."""
        training, layout = self._decided.training, self._decided.train_layout
        return sum(
            layout.computed_tokens(training.samples, rows)
            for rows in training.rows(1, False)
            if len(rows)
        )


class _Logged(Trainer):
    """Comes after the library's class: names the metrics of test data, and keeps them."""

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log. TRL's own metrics begin with eval_ whatever the split is."""
        owner: Any = self
        if any(name.startswith(f"{owner.metric_prefix}_") for name in logs):
            logs = {
                f"{owner.metric_prefix}_{name.removeprefix('eval_')}"
                if name.startswith("eval_") else name: value
                for name, value in logs.items()
            }  # fmt: skip
            owner.logged = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
        super().log(logs, *args, **options)
