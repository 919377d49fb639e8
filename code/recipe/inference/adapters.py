"""LoRA adapters of one base model, which come and go while it serves.

The server's front keeps the list of them in a file, AMPHORA_ADAPTERS_FILE, which it replaces before
it answers whoever adds or removes one: every worker reads it again before its next request. Each
adapter is a served task of its own over the base's weights; its layers hold the weights of all.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from recipe.errors import ModelError, listed, why_unloadable
from recipe.inference.apis.openai_forms import served_name
from recipe.inference.payloads import BadRequest, Document, Request
from recipe.inference.saved import adapter_files, weights
from recipe.inference.saved.origin import ADAPTER, Origin

ROUTE = "/adapters"
"""Where the front asks a worker to load one."""
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
"""What names the adapter of a request; in OpenAI's API `model` does, too."""
# What generate looks for beside the forward pass is the base's own, and shared.
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class UnknownAdapter(BadRequest):
    """No adapter of that name is loaded."""

    status_code = 404
    code = "model_not_found"


class UnfitAdapter(BadRequest):
    """The adapter cannot be served on this base."""

    code = "adapter_not_loaded"


@dataclass(frozen=True)
class Adapter:
    """One line of the list."""

    name: str
    path: str
    number: int
    """Another one for each time that it was added, whatever its name."""


def load_request(body: bytes) -> Request:
    """The front's request to load an adapter that stands in the list."""
    name = str(json.loads(body)["name"])
    return Request(texts=[], route=ROUTE, adapter=name, form=lambda answer, _: Document(answer))


def refuse(request: Request) -> None:
    """Raises BadRequest if the request names an adapter, for a model that takes none: the base
    alone would answer something else."""
    if request.adapter:
        raise UnknownAdapter(
            f"{HEADER} is {request.adapter!r}, and this model takes no adapters. Set "
            "AMPHORA_ADAPTERS to the number of adapters that it may take."
        )


class AdaptedTask:
    """A base model's task, and the same for each of its adapters."""

    def __init__(self, origin: Origin, load: Callable[[Origin], Any], file: Path) -> None:
        """
        Args:
            origin: The base.
            load: Loads a served task (`recipe.inference.registry.ServedTask`).
            file: The list of adapters.

        Raises:
            ModelError: The base cannot be loaded, or an adapter that is in the list already.
        """
        self._load = load
        self._file = file
        self._read: tuple[int, int] | None = None
        self._listed: dict[str, Adapter] = {}
        self._origin = replace(origin, weights=self._weights)
        self._shared = _Shared()
        self._tasks: dict[int, Any] = {}
        self._asked: Adapter | None = None
        self.base = load(self._origin)
        if self._shared.model is None:
            raise ModelError(
                f"AMPHORA_ADAPTERS is set, and the model {origin.place} was saved by "
                "sentence-transformers, whose models take no adapters here.",
                "Leave it out, or serve the adapter merged into its base.",
            )
        for adapter in self._current().values():
            try:
                self._task(adapter)
            except UnfitAdapter as error:
                raise ModelError(str(error)) from error

    def example(self, text: str) -> Request | None:
        """A request that the base answers."""
        example: Request | None = self.base.example(text)
        return example

    def measure(self, request: Request) -> list[int]:
        """Tokens of each input. Raises BadRequest if the request is not one for this task, or names
        an adapter that is not loaded."""
        if request.route == ROUTE:
            return [1]
        tokens: list[int] = self._task(self._chosen(request)).measure(request)
        return tokens

    def predict(self, requests: Sequence[Request]) -> list[Any]:
        """The prediction for each request; those of one adapter go through the model together."""
        answers: list[Any] = [None] * len(requests)
        groups: dict[Adapter | None, list[int]] = {}
        for place, request in enumerate(requests):
            try:
                groups.setdefault(self._chosen(request), []).append(place)
            except BadRequest as error:
                answers[place] = error
        for adapter, places in groups.items():
            try:
                task = self._task(adapter)
            except BadRequest as error:
                for place in places:
                    answers[place] = error
                continue
            asking = [place for place in places if requests[place].route != ROUTE]
            for place in places:
                if requests[place].route == ROUTE and adapter is not None:
                    answers[place] = _tried(task, adapter)
            own = task.predict([requests[place] for place in asking]) if asking else []
            for place, answer in zip(asking, own, strict=True):
                answers[place] = answer
        return answers

    def _chosen(self, request: Request) -> Adapter | None:
        """The adapter that a request names; None means the base.

        Raises:
            UnknownAdapter: It names neither.
        """
        current = self._current()
        name = request.adapter or request.model
        if name in current:
            request.served_by = name
            return current[name]
        if not request.adapter and name in ("", served_name()):
            return None
        raise UnknownAdapter(
            f"There is no model {name!r}, but {served_name()!r}"
            + (f" and its adapters {listed(list(current))}." if current else " without adapters.")
        )

    def _current(self) -> dict[str, Adapter]:
        """The adapters in the list; what is no longer there is forgotten."""
        stat = self._file.stat()
        if (version := (stat.st_mtime_ns, stat.st_ino)) != self._read:
            entries = json.loads(self._file.read_text())
            self._listed = {name: Adapter(name=name, **entry) for name, entry in entries.items()}
            self._read = version
            kept = {adapter.number for adapter in self._listed.values()}
            for number in [number for number in self._tasks if number not in kept]:
                del self._tasks[number]
                self._shared.remove(number)
        return self._listed

    def _task(self, adapter: Adapter | None) -> Any:
        """The task of an adapter, loaded if it is not.

        Raises:
            UnfitAdapter: It cannot be served on this base.
        """
        if adapter is None:
            return self.base
        if adapter.number not in self._tasks:
            folder = Path(adapter.path)
            has_config = (folder / "config.json").is_file()
            has_tokenizer = (folder / "tokenizer_config.json").is_file()
            place = self._origin.place
            self._asked = adapter
            try:
                self._shared.add(adapter)
                self._tell_of_another_base(adapter)
                self._tasks[adapter.number] = self._load(
                    replace(
                        self._origin,
                        place=str(folder) if has_config and has_tokenizer else place,
                        tokenizer_place=str(folder) if has_tokenizer else place,
                    )
                )
            except Exception as error:  # peft raises what it comes upon
                self._shared.remove(adapter.number)
                reason = str(error) if isinstance(error, ModelError) else why_unloadable(error)
                raise UnfitAdapter(
                    f"The adapter {adapter.name!r} ({adapter.path}) cannot be served on "
                    f"{self._origin.place}: {reason}"
                ) from error
            finally:
                self._asked = None
        return self._tasks[adapter.number]

    def _tell_of_another_base(self, adapter: Adapter) -> None:
        """Print that an adapter names another base on the Hub, or another revision: the shapes of
        weights do not tell."""
        settings = json.loads((Path(adapter.path) / ADAPTER).read_text())
        own = settings.get("base_model_name_or_path") or "", settings.get("revision") or ""
        place, options = self._origin.place, self._origin.options
        if not own[0] or any(
            Path(name).is_absolute() or Path(name).is_dir() for name in (own[0], place)
        ):
            return
        served = place, options.get("revision") or own[1]
        if own[0].lower() != place.lower() or (own[1] or served[1]) != served[1]:
            trained_on, served_on = (" ".join(filter(None, each)) for each in (own, served))
            print(
                f"adapter {adapter.name}: trained on {trained_on}, served on {served_on}",
                flush=True,
            )

    def _weights(self, architecture: Any, dtype: torch.dtype) -> Any:
        """The model for a task: the base, or the base with the adapter that is being loaded."""
        if self._shared.model is None:
            own = replace(self._origin, weights=None)
            self._shared.model = weights.read(own, architecture, dtype)
        return self._shared.view(self._asked)


def _tried(task: Any, adapter: Adapter) -> Any:
    """What the front is told of an adapter that has been loaded: it answers, or why not."""
    if (example := task.example("A sentence to warm up with.")) is not None:
        (answer,) = task.predict([example])
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            return UnfitAdapter(f"The adapter {adapter.name!r} does not answer: {answer}")
    return {"name": adapter.name}


class _Shared:
    """The base model, and the layers of peft in it, one of whose adapters counts at a time."""

    def __init__(self) -> None:
        self.model: PreTrainedModel | None = None
        self._peft: Any = None
        self._active: int | None = None

    def add(self, adapter: Adapter) -> None:
        """Load an adapter's weights beside the base's.

        Raises:
            ModelError: It is none of LoRA, has other layers or sizes than the base, lacks weights,
                or would change weights of the base itself.
        """
        assert self.model is not None
        folder, key = Path(adapter.path), _key(adapter.number)
        config = adapter_files.read_config(folder)
        import peft
        from peft.utils import get_peft_model_state_dict, load_peft_weights

        config.inference_mode = True
        tensors = load_peft_weights(str(folder), device="cpu")
        in_full = tuple(f".{name}." for name in config.modules_to_save or ())
        strange = [
            name
            for name in tensors
            if "lora_" not in name and not any(part in f".{name}" for part in in_full)
        ]
        if strange:
            raise ModelError(
                f"it changes weights of the base, which others share: {listed(strange, 3)}.",
                "Train it without bias and without embeddings of its own, or merge it.",
            )
        self._active = -1  # peft may make it the active one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
            if self._peft is None:
                self._peft = peft.PeftModel(
                    self.model, config, adapter_name=key, autocast_adapter_dtype=False
                )
            else:
                self._peft.add_adapter(key, config, autocast_adapter_dtype=False)
        self._peft.load_adapter(str(folder), key, torch_device="cpu", autocast_adapter_dtype=False)
        loaded = get_peft_model_state_dict(
            self._peft, adapter_name=key, save_embedding_layers=False
        )
        adapter_files.refuse_partial(tensors, loaded, {})
        self._peft.to(self.model.device)

    def remove(self, number: int) -> None:
        """Forget an adapter, if it was loaded, or in part."""
        if self.model is None or "peft" not in sys.modules:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        key = _key(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of which one peft makes active then
            if self._peft is not None and key in self._peft.peft_config:
                self._peft.delete_adapter(key)
            # What failed half-way has layers of which peft's own model does not know.
            for module in self.model.modules():
                if isinstance(module, BaseTunerLayer):
                    module.delete_adapter(key)
                elif isinstance(module, AuxiliaryTrainingWrapper):
                    module.delete_adapter(key, None)
                else:
                    continue
                if self._peft is None:
                    module.enable_adapters(False)
        self._active = -1

    def view(self, adapter: Adapter | None) -> PreTrainedModel:
        """The base model as it is with an adapter, or without one: the same modules, and a forward
        pass that first makes the adapter the active one."""
        assert self.model is not None
        number = None if adapter is None else adapter.number
        view: PreTrainedModel = self._with_adapter(self.model, number)
        if view.config.is_encoder_decoder:
            # generate calls the encoder by itself, before the model.
            encoder = self._with_adapter(self.model.get_encoder(), number)
            vars(view)["get_encoder"] = lambda *_, **__: encoder
        if adapter is not None:
            folder = Path(adapter.path)
            if (folder / "config.json").is_file():
                view.config = type(view.config).from_pretrained(str(folder))
                view.config._attn_implementation = self.model.config._attn_implementation
            if (folder / "generation_config.json").is_file():
                view.generation_config = GenerationConfig.from_pretrained(str(folder))
        return view

    def _with_adapter(self, module: Any, number: int | None) -> Any:
        """A copy of a module that has the same modules below it, and another forward pass."""
        view = copy.copy(module)
        for hooks in _HOOKS:
            setattr(view, hooks, OrderedDict())
        forward = type(view).forward

        # Not a hook before the forward pass: one of those may let others have their turn.
        @functools.wraps(forward.__get__(view))
        def adapted(*args: Any, **kwargs: Any) -> Any:
            self._activate(number)
            return forward(view, *args, **kwargs)

        view.forward = adapted
        return view

    def _activate(self, number: int | None) -> None:
        if self._peft is None or number == self._active:
            return
        # peft would compute by the base alone.
        if number is not None and _key(number) not in self._peft.peft_config:
            raise UnknownAdapter("The adapter was unloaded before its answer was whole.")
        if number is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            self._peft.base_model.enable_adapter_layers()
            self._peft.base_model.set_adapter(_key(number), inference_mode=True)
        self._active = number


def _key(number: int) -> str:
    """What peft calls an adapter: without dots, since names of modules hold it, and no beginning of
    another's, by which older versions would find both."""
    return f"adapter{number}x"


def file_of(environ: Mapping[str, str]) -> Path | None:
    """Where the front keeps the list of adapters.

    Raises:
        ValueError: The model is to be served in a way that takes no adapters.
    """
    if not (name := environ.get("AMPHORA_ADAPTERS_FILE")):
        return None
    wrong = [
        f"{key} is {environ[key]!r}"
        for key, value in (("AMPHORA_DTYPE", "int8"), ("AMPHORA_COMPILE", "1"))
        if environ.get(key) == value
    ]
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)}, with which a model takes no adapters. Leave it out, or set "
            "AMPHORA_ADAPTERS to 0."
        )
    return Path(name)
