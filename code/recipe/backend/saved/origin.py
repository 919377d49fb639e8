"""The origin of a model: a folder, or the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PreTrainedTokenizerBase

from recipe.console import log
from recipe.errors import UNLOADABLE, ModelError, why_unloadable
from recipe.models import tokenizers

_TOKENIZER_REMEDY = (
    "Pack the files that tokenizer.save_pretrained wrote (tokenizer.json or a vocabulary, and "
    "tokenizer_config.json) next to config.json. If the model reads no text, set HF_TASK to its "
    "task."
)
_MARKS = ("config.json", "modules.json")
ADAPTER = "adapter_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_POINTER, _MOST_POINTER = b"version https://git-lfs", 1024


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, and how it is loaded."""

    location: str
    """A folder, or a name on the Hugging Face Hub."""
    options: Mapping[str, Any]
    """Arguments for every `from_pretrained`."""
    base: str = ""
    """The base model of an adapter without a config.json, a folder or a name on the Hub."""

    @classmethod
    def find(cls, model_dir: str, environ: Mapping[str, str]) -> Origin:
        """Return the model in `model_dir`, else the one that HF_MODEL_ID names (a folder will do).
        Raise ModelError if neither is there, or both are."""
        pointers = []
        for path in sorted([*Path(model_dir).glob("*"), *Path(model_dir).glob("*/*")]):
            if path.is_file() and path.stat().st_size < _MOST_POINTER:
                with path.open("rb") as file:
                    if file.read(len(_POINTER)) == _POINTER:
                        pointers.append(path.name)
        if pointers:
            raise ModelError(
                f"{model_dir} has pointers of Git LFS instead of files: {', '.join(pointers[:5])}.",
                "Run `git lfs pull` in the clone before packing it.",
            )
        trust = environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true")
        options: dict[str, Any] = {"trust_remote_code": True} if trust else {}
        name = environ.get("HF_MODEL_ID", "")
        if mark := next((mark for mark in _MARKS if (Path(model_dir) / mark).is_file()), None):
            # Of an adapter with a config.json, HF_MODEL_ID may name the base.
            is_other = name and Path(name).absolute() != Path(model_dir).absolute()
            if is_other and not (Path(model_dir) / ADAPTER).is_file():
                raise ModelError(
                    f"HF_MODEL_ID is {name!r}, but {model_dir} holds a model, too ({mark}).",
                    "Leave HF_MODEL_ID out to serve the model of model.tar.gz"
                    " (AMPHORA_MODEL_NAME names it in answers), or leave out the archive.",
                )
            return cls(model_dir, options)
        if token := environ.get("HF_API_TOKEN") or environ.get("HF_TOKEN"):
            options["token"] = token
        if (Path(model_dir) / ADAPTER).is_file():
            return cls(model_dir, options, base=_base_of(Path(model_dir), name, options))
        if (Path(name) / ADAPTER).is_file() and not (Path(name) / "config.json").is_file():
            return cls(name, options, base=_base_of(Path(name), "", options))
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

    @property
    def adapter(self) -> dict[str, Any]:
        """Return the settings of a LoRA adapter; empty for other models."""
        path = Path(self.location) / ADAPTER
        settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return settings

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
        if self._find_file("handler.py"):
            raise ModelError(
                f"The model {self.location!r} has a handler.py, which is not run from there.",
                "Pack its files into model.tar.gz to run it, or set HF_TASK to use the image's own"
                " handlers.",
            )

    def _find_file(self, name: str) -> Path | None:
        """Return a file of the folder or the Hub; None if there is none."""
        return tokenizers.find_file(self.location, name, self.options)

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file of the folder or the Hub; None if there is none."""
        path = self._find_file(name)
        return json.loads(path.read_text()) if path else None

    def config(self) -> Any:
        """Return the model's configuration."""
        try:
            return AutoConfig.from_pretrained(self.base or self.location, **self.options)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ModelError(
                f"The model {self.location!r} has Python code, which loading would run.",
                "Set HF_TRUST_REMOTE_CODE=true if you trust it.",
            ) from error
        except OSError as error:
            raise ModelError(
                f"The model {self.location!r} cannot be read: {str(error).splitlines()[0]}",
                "Without a connection to the Hub, pack the model into model.tar.gz, or set "
                "HF_MODEL_ID to the path of its folder.",
            ) from error

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer. Raise ModelError if there is none: transformers would
        create an empty tokenizer, which reads all texts alike."""
        try:
            location = self.location
            if self.base and not any((Path(location) / name).is_file() for name in _TOKENIZERS):
                location = self.base
            tokenizer = tokenizers.load_tokenizer(location, **self.options)
        except UNLOADABLE as error:
            raise ModelError(
                f"The tokenizer of {location} cannot be loaded: {why_unloadable(error)}",
                _TOKENIZER_REMEDY,
            ) from error
        refuse_empty(tokenizer, location)
        tokenizers.log_replacement(tokenizer)
        return cast("PreTrainedTokenizerBase", tokenizer)


def _base_of(adapter: Path, named: str, options: Mapping[str, Any]) -> str:
    """Return the base model of an adapter, a folder or a name on the Hub: HF_MODEL_ID, else its
    base_model_name_or_path. Raise ModelError if it is not there."""
    base = str(json.loads((adapter / ADAPTER).read_text()).get("base_model_name_or_path") or "")
    name = named or base
    path = Path(named) if named else adapter / base
    if name and (path / "config.json").is_file():
        name = str(path)
    elif not _HUB_NAME.fullmatch(name) or not tokenizers.find_file(name, "config.json", options):
        raise ModelError(
            f"{adapter} contains an adapter of peft, whose {ADAPTER} names the base model {base!r}."
            f" There is no model in {path}.",
            "Set HF_MODEL_ID to the base's folder, for example one in model.tar.gz, or merge both "
            "first (merge_and_unload).",
        )
    log(f"adapter: {adapter} is merged into its base {name}")
    return name


def _advice(folder: Path) -> str:
    """Return the remedy for a folder without a model, by its files."""
    below = sorted(path for path in folder.glob("*/*") if path.is_file())
    files = [path for path in sorted(folder.glob("*")) if path.is_file()] + below
    nested = sorted({str(path.parent) for path in below if path.name in (*_MARKS, ADAPTER)})
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
