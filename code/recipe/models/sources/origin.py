"""The origin of a model, a folder or a name on the Hugging Face hub, and how training and serving
load it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from recipe.compat import dtype_argument
from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.models.sources import tokenizers
from recipe.models.sources.hub_files import find_file, why_unreachable
from recipe.settings import ModelSettings

_REMEDY = (
    "It needs config.json, complete weights (best in model.safetensors) and the tokenizer's files."
)
_TOKENIZER_REMEDY = (
    "Pack the files that tokenizer.save_pretrained wrote (tokenizer.json or a vocabulary, and "
    "tokenizer_config.json) next to config.json. If the model reads no text, set HF_TASK to its "
    "task."
)
_BASE_REMEDY = (
    "Set HF_MODEL_ID to the base's folder, for example one in model.tar.gz, or merge both first "
    "(merge_and_unload)."
)
MARKS = ("config.json", "modules.json")
"""Files that a model's folder has one of: older folders of sentence-transformers have the encoder's
config.json in a subfolder."""
ADAPTER = "adapter_config.json"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_POINTER, _MOST_POINTER = b"version https://git-lfs", 1024
_UNFIT = re.compile(r"Unrecognized configuration class .*?\.models\.(\w+)\.")
_FITTING = {
    "AutoModelForCausalLM": "a decoder, such as a Llama, Qwen or GPT-2",
    "AutoModelForSeq2SeqLM": "an encoder with a decoder, such as T5 or BART",
    "AutoModelForMaskedLM": "an encoder, such as BERT or ModernBERT",
}
"""The kind of model to give instead."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, and how it is loaded."""

    location: str
    """A folder, or a name on the Hugging Face Hub."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for every `from_pretrained`."""
    base: str = ""
    """The base model of an adapter, a folder or a name on the Hub."""
    texts: Sequence[str] = ()
    """Some texts of the data, on which its tokenizer is compared with its file."""

    @classmethod
    def find(cls, model_dir: str, environ: Mapping[str, str]) -> Origin:
        """Return the model in `model_dir`, else the one that HF_MODEL_ID names (a folder will do).
        Raise ModelError if neither is there, or both are."""
        refuse_pointers(Path(model_dir))
        trust = environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true")
        options: dict[str, Any] = {"trust_remote_code": True} if trust else {}
        name = environ.get("HF_MODEL_ID", "")
        is_adapter = (Path(model_dir) / ADAPTER).is_file()
        mark = next((mark for mark in MARKS if (Path(model_dir) / mark).is_file()), None)
        if mark and not is_adapter:
            if name and Path(name).absolute() != Path(model_dir).absolute():
                raise ModelError(
                    f"HF_MODEL_ID is {name!r}, but {model_dir} holds a model, too ({mark}).",
                    "Leave HF_MODEL_ID out to serve the model of model.tar.gz"
                    " (AMPHORA_MODEL_NAME names it in answers), or leave out the archive.",
                )
            return cls(model_dir, options)
        if token := environ.get("HF_API_TOKEN") or environ.get("HF_TOKEN"):
            options["token"] = token
        if is_adapter:  # HF_MODEL_ID may name its base
            return cls(model_dir, options, base=base_of(Path(model_dir), name, options))
        if (Path(name) / ADAPTER).is_file():
            return cls(name, options, base=base_of(Path(name), "", options))
        if not name:
            files = ", ".join(sorted(path.name for path in Path(model_dir).glob("*"))[:10])
            # Clients may see the error, so only the log lists the files.
            log(f"{model_dir} contains {files or 'nothing'}")
            raise ModelError(
                f"There is no config.json in {model_dir} (the log lists its files).",
                _advice(Path(model_dir)),
            )
        if revision := environ.get("HF_MODEL_REVISION"):
            options["revision"] = revision
        return cls(name, options)

    def with_access(self, settings: ModelSettings) -> Origin:
        """Return this origin with a job's trust in its code. Sets the token for the hub, since
        transformers passes an argument on to some of its requests only."""
        if settings.hf_token:
            os.environ["HF_TOKEN"] = settings.hf_token
        trusted = {"trust_remote_code": settings.trust_remote_code}
        return replace(self, options={**self.options, **trusted})

    @property
    def is_local(self) -> bool:
        """Return whether the location is a folder."""
        return Path(self.location).is_dir()

    @property
    def adapter(self) -> dict[str, Any]:
        """Return the settings of an adapter; empty for other models."""
        settings: dict[str, Any] = (self.base and self.read_json(ADAPTER)) or {}
        return settings

    def holder(self, *names: str) -> str:
        """Return the location with one of these files: an adapter's own, else its base."""
        has = not self.base or any(find_file(self.location, name, self.options) for name in names)
        return self.location if has else self.base

    @property
    def sentence_modules(self) -> list[dict[str, Any]]:
        """Return the modules of a model of sentence-transformers; empty for other models."""
        modules: list[dict[str, Any]] = self.read_json("modules.json") or []
        return modules

    @property
    def sentence_settings(self) -> dict[str, Any]:
        """Return the settings of a model of sentence-transformers; empty for other models."""
        settings: dict[str, Any] = self.read_json("config_sentence_transformers.json") or {}
        return settings

    def refuse_handler(self) -> None:
        """Raise ModelError if the model has code that answers its requests: the server runs it from
        the folder of model.tar.gz only."""
        if find_file(self.location, "handler.py", self.options):
            raise ModelError(
                f"The model {self.location!r} has a handler.py, which is not run from there.",
                "Pack its files into model.tar.gz to run it, or set HF_TASK to use the image's own"
                " handlers.",
            )

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file of the folder or the Hub; None if there is none."""
        path = find_file(self.location, name, self.options)
        return json.loads(path.read_text()) if path else None

    def read_settings(self) -> Mapping[str, Any]:
        """Return the content of config.json; empty if it cannot be read, which `read` reports."""
        with contextlib.suppress(ModelError), self.explained():
            settings: Mapping[str, Any] = PretrainedConfig.get_config_dict(
                self.holder("config.json"), **self.options
            )[0]
            return settings
        return {}

    def config(self, **changed: Any) -> Any:
        """Return the model's configuration, with some values changed. Raise ModelError if it cannot
        be read."""
        with self.explained():
            return AutoConfig.from_pretrained(self.holder("config.json"), **changed, **self.options)

    def tokenizer(self) -> Any:
        """Return the model's tokenizer, with the ids of its tokenizer.json. Raise ModelError if
        there is none: transformers would create an empty tokenizer, which reads all texts alike."""
        location = self.holder(*_TOKENIZERS)
        with self.explained("tokenizer", _TOKENIZER_REMEDY):
            tokenizer = tokenizers.load_tokenizer(location, self.texts, **self.options)
        refuse_empty(tokenizer, location)
        return tokenizer

    def read(self, architecture: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
        """Return a model and transformers' report on its weights. Raise ModelError if it cannot be
        reached or loaded.

        Args:
            architecture: An Auto class of transformers.
            options: More arguments for its `from_pretrained`.
        """
        options = {**dtype_argument(dtype), "output_loading_info": True, **options}
        with self.explained(architecture=architecture.__name__):
            model, report = architecture.from_pretrained(self.location, **options, **self.options)
        if model.config.model_type == "deberta-v2":
            from recipe.models.sources.near_positions import attend_near_positions

            attend_near_positions(model)
        return model, report

    @contextlib.contextmanager
    def explained(
        self,
        what: str = "model",
        remedy: str = _REMEDY,
        architecture: str = "",
        more: tuple[type[Exception], ...] = (),
    ) -> Iterator[None]:
        """Raise errors of loading as ModelError.

        Args:
            what: What is loaded.
            remedy: What the folder needs.
            architecture: The Auto class that loads it.
            more: Types of further errors.
        """
        unreachable = "" if self.is_local else why_unreachable()
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            # The error of the hub's HTTP client, which transformers replaces by its own OSError; by
            # name, since the client (httpx, httpx2) differs between releases.
            broken: BaseException | None = error
            while broken and "TransportError" not in {base.__name__ for base in type(broken).mro()}:
                broken = broken.__cause__ or broken.__context__
            reason = unreachable or str(broken or "")
            if not isinstance(error, (*UNLOADABLE, *more)) and not reason:
                raise
            if match := _UNFIT.search(str(error)):
                raise ModelError(
                    f"The model {self.location} is of type {match[1]!r}, of which transformers has "
                    f"no {architecture}: it does not fit this task.",
                    f"Give {_FITTING.get(architecture, 'a model of another type')}.",
                ) from error
            if "trust_remote_code" in str(error):
                raise ModelError(
                    f"The model {self.location!r} has Python code, which loading would run.",
                    "If you trust it, set trust_remote_code=True for a job, or "
                    "HF_TRUST_REMOTE_CODE=true for a server.",
                ) from error
            if self.is_local:
                raise ModelError(
                    f"The {what} in {self.location} cannot be loaded: {why_unloadable(error)}",
                    remedy,
                ) from error
            check = "Check the name, and of a private model the token (hf_token, HF_TOKEN)"
            raise ModelError(
                f"The {what} {self.location!r} cannot be loaded from the Hugging Face hub: "
                f"{reason or why_unloadable(error)}",
                f"{'Start it again' if reason else check}. Without network, a job takes its model "
                "from a channel: put its files in S3, give that prefix as the channel called "
                "model, and leave model_name_or_path out. For a server, pack the model into "
                "model.tar.gz, or set HF_MODEL_ID to the path of its folder.",
            ) from error


def refuse_pointers(folder: Path) -> None:
    """Raise ModelError if a folder has pointers of Git LFS instead of files."""
    pointers = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_file() and path.stat().st_size < _MOST_POINTER:
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    pointers.append(path.name)
    if pointers:
        raise ModelError(
            f"{folder} has pointers of Git LFS instead of files: {', '.join(pointers[:5])}.",
            "Run `git lfs pull` in the clone before packing it.",
        )


def base_of(
    adapter: Path, named: str, options: Mapping[str, Any], remedy: str = _BASE_REMEDY
) -> str:
    """Return the base model of an adapter, a folder or a name on the Hub.

    Args:
        named: Names it; empty for the adapter's own base_model_name_or_path.
        options: Arguments for `from_pretrained`.

    Raises:
        ModelError: The base is not there.
    """
    base = str(json.loads((adapter / ADAPTER).read_text()).get("base_model_name_or_path") or "")
    name = named or base
    paths = [Path(named)] if named else [adapter / base, Path(base)]
    folders = [
        path for path in paths if (path / MARKS[0]).is_file() and not (path / ADAPTER).is_file()
    ]
    if name and folders:
        name = str(folders[0])
    elif not HUB_NAME.fullmatch(name) or not find_file(name, "config.json", options):
        raise ModelError(
            f"{adapter} contains an adapter of peft, whose {ADAPTER} names the base model {base!r}."
            f" There is no model in {paths[0]}.",
            remedy,
        )
    log(f"adapter: {adapter}, of the base {name}")
    return name


def _advice(folder: Path) -> str:
    """Return the remedy for a folder without a model, by its files."""
    below = sorted(path for path in folder.glob("*/*") if path.is_file())
    files = [path for path in sorted(folder.glob("*")) if path.is_file()] + below
    nested = sorted({str(path.parent) for path in below if path.name in (*MARKS, ADAPTER)})
    if nested:
        return (
            f"A model lies in {' and '.join(nested)}: pack that folder's content at the top of "
            f"model.tar.gz (tar -C {Path(nested[0]).name} -czf model.tar.gz .), or set "
            f"HF_MODEL_ID={' or '.join(nested)}."
        )
    if matches := [path for path in files if path.suffix in (".pt", ".pth")]:
        return (
            f"If {matches[0]} is TorchScript, write a code/inference.py with `def "
            f"model_fn(model_dir): return torch.jit.load(model_dir + '/{matches[0].name}')`."
        )
    return (
        "Pack the files that save_pretrained wrote at the top of model.tar.gz, or set HF_MODEL_ID."
    )


def refuse_empty(tokenizer: Any, location: str) -> None:
    """Raise ModelError for an empty tokenizer, or one without files in the folder `location`."""
    files = set(tokenizer.vocab_files_names.values())
    # transformers 5 saves tokenizer.json alone, which some classes (GPT-2's, Funnel's) do not list.
    paths = [Path(location) / file for file in (*files, "tokenizer.json")]
    lacks_files = Path(location).is_dir() and not any(path.is_file() for path in paths)
    if (files and lacks_files) or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"{location} has no tokenizer.", _TOKENIZER_REMEDY)
