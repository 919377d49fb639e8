"""The Trainer, with our batches: packed, balanced over processes, evaluated exactly.

What is HF Trainer's stays its own (schedules, mixed precision, DDP, FSDP, callbacks, logging).
Ours are the data loaders, the loss (a mean over all samples of an optimizer step, on whichever
process they are) and the evaluation loop (every sample once).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput

from recipe.batching import batches
from recipe.batching import packing as plan
from recipe.batching.batches import Batch, Layout, Samples, World
from recipe.console import say
from recipe.errors import DistributedError, DivergedError, HyperparameterError
from recipe.hyperparameters import Hyperparameters
from recipe.runtime import ddp_hook, distribution, gathering
from recipe.storage import checkpoints
from recipe.tasks import base
from recipe.tasks.base import Objective
from recipe.training import job_identity, worlds
from recipe.training.interruptions import Interrupted
from recipe.training.resuming import Resumable, fingerprint
from recipe.training.worlds import Cut
from recipe.value_ranges import REFUSED

_WATCHED = 16
_REFERENCES = "references.safetensors"


def check(args: TrainingArguments) -> None:
    """See that nothing is asked for that would be passed over.

    Raises:
        HyperparameterError: something is.
    """
    for field in dataclasses.fields(TrainingArguments):
        value = getattr(args, field.name, None)
        usual = field.default
        if field.default_factory is not dataclasses.MISSING:
            usual = field.default_factory()
        if field.name in REFUSED and value != usual:
            raise HyperparameterError(
                f"Hyperparameter {field.name} has value {value!r}, which this recipe does not "
                f"take: {REFUSED[field.name]}.",
                "Leave it out.",
            )
    if args.n_gpu > 1:
        raise DistributedError(
            f"One process sees {args.n_gpu} GPUs.",
            "Start the script through torchrun with a process for each, or show it one by "
            "CUDA_VISIBLE_DEVICES.",
        )


def build(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: TrainingArguments,
    hyperparameters: Hyperparameters,
    ready: Mapping[str, Samples],
    objective: Objective,
) -> Engine:
    """Build the engine for the samples `train` and `evaluation`, and maybe others.

    Raises:
        HyperparameterError: packing was asked for, but the model cannot be packed; or something
            that the engine does not do.
        DistributedError: one process would have to use several GPUs.
    """
    check(args)
    cut = worlds.settle(args)
    samples = dict(ready)
    training = batches.Training(
        samples=samples.pop("train"),
        size=cut.size,
        accumulation=cut.accumulation,
        at_once=cut.samples,
        seed=args.seed if args.data_seed is None else args.data_seed,
        world=World(processes=args.world_size, rank=args.process_index),
    )
    training, cut = worlds.by_length(
        training, cut, args, model, tokenizer, hyperparameters.packing, objective
    )
    worlds.tell(args, cut)
    train_layout, eval_layout = base.lay_out(
        model, tokenizer, args, hyperparameters, training, samples, objective
    )
    return Engine(
        model=model,
        args=args,
        training=training,
        cut=cut,
        train_layout=train_layout,
        eval_layout=eval_layout,
        objective=objective,
        class_weights=objective.class_weights(hyperparameters, training.samples, model),
        decisive=job_identity.decisive(hyperparameters, args),
        save_minutes=hyperparameters.save_minutes,
        eval_dataset=samples["evaluation"],
        processing_class=tokenizer,
        compute_metrics=objective.metrics(),
    )


class Engine(Resumable):
    """HF Trainer on `Samples`: `train_dataset` and `eval_dataset` are those.

    Args:
        training: What is trained on.
        cut: How its steps are cut into batches.
        train_layout: How its batches are laid out.
        eval_layout: How those of an evaluation are laid out.
        objective: What their losses are.
        class_weights: What the loss of a sample of each class is multiplied by in training.
        decisive: What else must be the same for a checkpoint to be of this job (`job_identity`).
    """

    # compute_loss divides by the samples of the whole step.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        args: TrainingArguments,
        training: batches.Training,
        cut: Cut,
        train_layout: Layout,
        eval_layout: Layout,
        objective: Objective,
        class_weights: Sequence[float] | None = None,
        decisive: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(args=args, train_dataset=training.samples, **others)
        self.job = {
            **(decisive or {}),
            **_job(args, training, cut, train_layout, self.model, objective.couples_samples),
        }
        # Else the Trainer would count labels on every step, over all processes, for the model.
        self.model_accepts_loss_kwargs = False
        self._training, self._train_layout = training, train_layout
        self._eval_layout, self._objective = eval_layout, objective
        self._class_weights = class_weights and torch.tensor(class_weights, device=args.device)
        self._watched: list[tuple[int, Tensor, Tensor]] = []
        self._looks_at_once = args.device.type == "cpu"
        self._arranged: Any = None
        self._has_references = False
        model: Any = self.model
        # Two for each product and sum, in the forward pass once and in the backward pass twice.
        self.flops_per_token = 6 * model.num_parameters(exclude_embeddings=True)

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """This process's batches."""
        return batches.training_loader(
            self._training,
            self._train_layout,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            workers=self.args.dataloader_num_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """What `evaluation_loop` takes: the samples themselves."""
        return self.eval_dataset if eval_dataset is None else eval_dataset

    def training_lengths(self) -> Any:
        """Tokens of each training text of an epoch."""
        return self._training.samples.text_lengths

    def tokens_computed(self) -> int:
        """In the first epoch, by all processes, padding included."""
        drawn = self._training.rows(1, self._train_layout.balanced)
        places = self._train_layout.places
        return sum(places(self._training.samples, rows) for rows in drawn if len(rows))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples in a step, by which the Trainer counts how many were trained on."""
        return self._training.samples_of_a_step

    def floating_point_ops(self, inputs: Batch) -> int:
        """Of a forward and a backward pass; the Trainer would count the parameters each time."""
        tokens = inputs["input_ids"].numel() if "input_ids" in inputs else len(inputs["labels"])
        return int(self.flops_per_token * tokens)

    def _wrap_model(self, *arguments: Any, **options: Any) -> Any:
        """The model as DDP is to take it, without a second copy of its gradients."""
        model = super()._wrap_model(*arguments, **options)
        if (ddp := self.accelerator.ddp_handler) is not None:
            ddp.gradient_as_bucket_view = True
            if self.args.ddp_broadcast_buffers is None:
                # Sent before each forward pass, to no end where no buffer ever changes.
                ddp.broadcast_buffers = distribution.has_changing_buffers(model)
        return model

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The batch on the device; on a GPU no copy is waited for, the loader's memory is pinned.

        That is safe to the device: what uses a tensor comes after its copy there.
        """
        if self.args.device.type != "cuda":
            prepared: Batch = super()._prepare_inputs(inputs)
            return prepared
        brought: dict[str, Any] = {"device": self.args.device, "non_blocking": True}
        return {k: v.to(**brought) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> Tensor:
        """A forward and a backward pass, as the Trainer makes them; sums are arranged before."""
        if self.args.device.type == "cpu" and model is not self._arranged:
            ddp_hook.sum_touched_rows(model)
            self._arranged = model
        return super().training_step(model, *arguments, **options)

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """This batch's part of the mean over the step: over its samples, each with its weight.

        The batch's losses are noted, and looked at: at once, or on an accelerator not on each step.

        DDP takes the mean of the processes' gradients, and the Trainer that of their losses for
        its log: hence the factor. A process with fewer samples weighs less.
        """
        outputs, each, real = self._losses(model, inputs)
        # Before this step's own, which a lazy device has not computed yet.
        if len(self._watched) >= _WATCHED:
            self._see_to_numbers()
        self._watched.append((self.state.global_step + 1, each.detach().sum(), inputs["rows"]))
        if self._looks_at_once:
            self._see_to_numbers()
        if self._class_weights is not None:
            each = each * self._class_weights[inputs["labels"]]
        loss = (each * real).sum() * (self._training.world.processes / inputs["total"][0])
        if not hasattr(Trainer, "loss_is_scaled_for_ga"):  # transformers 4: it always divides
            loss = loss * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _see_to_numbers(self) -> None:
        """Stop where a loss is no number.

        Raises:
            DivergedError: names the step and the rows of its batch.
        """
        sums = [each for _, each, _ in self._watched]
        if self.args.device.type == "cuda" and sums:
            sums = list(torch.stack(sums).cpu())  # one copy that is waited for
        totals = [each.item() for each in sums]
        for (step, _, rows), total in zip(self._watched, totals, strict=True):
            if not math.isfinite(total):
                real = ", ".join(str(row) for row in rows.tolist() if row >= 0)
                raise DivergedError(
                    f"The loss of step {step} is no number. Its batch has the rows {real} of the "
                    "training data, counted from 0.",
                    "Lower learning_rate, or look at these rows. The checkpoints in "
                    f"{self.args.output_dir} are from before.",
                )
        self._watched.clear()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._see_to_numbers()
        super()._save_checkpoint(model, trial)

    def _losses(self, model: Any, inputs: Batch) -> tuple[Any, Tensor, Tensor]:
        """The model's outputs; and for each place its loss, and whether it holds a sample."""
        beside = ("labels", "rows", "total")
        outputs = model(**{name: value for name, value in inputs.items() if name not in beside})
        smoothing = self.args.label_smoothing_factor if model.training else 0.0
        each = self._objective.losses(outputs.logits, inputs["labels"], smoothing)
        return outputs, each, inputs["rows"] >= 0

    def before_steps(self) -> None:
        """Ask the untrained model what the objective looks at, if it does; see `Resumable`."""
        if self._objective.has_references and not self._has_references:
            started = time.monotonic()

            def ask(samples: Samples) -> Any:
                trains = samples is self._training.samples
                layout = self._train_layout if trains else self._eval_layout
                size = self._training.size if trains else self.args.eval_batch_size
                return self._answers(samples, layout, size)[0]

            try:
                self._objective.refer(ask)
            except Interrupted:
                self.leave()
            self._has_references = True
            seconds = time.monotonic() - started
            say(f"references: what the model says before training, computed in {seconds:.0f} s")
        super().before_steps()

    def files_beside(self) -> dict[str, bytes]:
        """Return what a checkpoint keeps beside the weights: the untrained model's answers."""
        if self._objective.has_references:
            return {_REFERENCES: self._objective.references()}
        return {}

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take back what `files_beside` gave."""
        if self._objective.has_references:
            self._objective.restore(files[_REFERENCES])
            self._has_references = True

    @torch.no_grad()
    def _answers(self, samples: Samples, layout: Layout, size: int) -> tuple[Any, Any]:
        """Logits and losses of all samples, each once and in the order of the data."""
        prepared: Any = self.model_wrapped
        if not self.accelerator._models:  # it was never trained: this puts it on its device
            prepared = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        bare: Any = self.model
        bare.eval()
        # As it is trained where it is compiled: computed one by one, each operation would be a
        # program of its own to TorchNeuron.
        model = prepared if self.args.torch_compile else bare
        answered = []
        for batch in batches.evaluation_batches(samples, layout, size, self._training.world):
            inputs = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                outputs, each, _ = self._losses(model, inputs)
            answered.append((batch["rows"], outputs.logits.float(), each))
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        return gathering.in_order(answered, len(samples))

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Logits, labels and metrics of all samples, each once and in the order of the data; of
        texts in windows those of the texts."""
        samples: Samples = dataloader
        logits, each = self._answers(samples, self._eval_layout, self.args.eval_batch_size)
        weight = samples.weight(np.arange(len(samples)))
        labels = samples.labels
        if samples.text_of is not None:
            logits, labels = samples.pooled(logits)
            said, wanted = torch.from_numpy(logits), torch.from_numpy(labels)
            each, weight = self._objective.losses(said, wanted, 0.0).numpy(), len(labels)
        scores = {"loss": float(each.sum(dtype=np.float64) / weight)}
        if self.compute_metrics is not None:
            scores |= self.compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
        scores |= self._objective.generated_scores(self, samples)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        return EvalLoopOutput(
            predictions=logits, label_ids=labels, metrics=metrics, num_samples=len(logits)
        )


def _job(
    args: TrainingArguments,
    training: batches.Training,
    cut: Cut,
    layout: Layout,
    model: Any,
    couples: bool,
) -> dict[str, Any]:
    """What every job is told by: the Trainer's main settings, data, model and batches."""
    same = ("learning_rate", "warmup_steps", "weight_decay", "num_train_epochs", "max_steps")
    also = ("max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "seed")
    # Where each host has rows of its own, or a batch's samples are each other's negatives, how a
    # step is cut decides on what is learned.
    is_fixed = training.samples.shards is not None or couples
    fixed = {"steps cut into": worlds.shown(cut.as_job())} if is_fixed else {}
    return {
        **fixed,
        checkpoints.SAMPLES: cut.samples,
        checkpoints.CUT: {**cut.as_job(), "batches": layout.describe()},
        "data": training.samples.fingerprint(),
        "model": fingerprint(model),
        "batches": "packed" if layout.balanced else "padded",
        "version of the plan of batches": plan.VERSION,
        "version of checkpoints": checkpoints.VERSION,
        "optim": str(args.optim),
        "lr_scheduler_type": str(args.lr_scheduler_type),
        **{name: getattr(args, name) for name in (*same, *also)},
    }
