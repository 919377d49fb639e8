"""Where a model comes from: a folder, or the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from recipe.errors import UNLOADABLE, ModelError, why_unloadable

_TOKENIZER_REMEDY = (
    "Pack the files that tokenizer.save_pretrained wrote (tokenizer.json or a vocabulary, and "
    "tokenizer_config.json) beside config.json; or, if the model reads no text, name its task in "
    "HF_TASK."
)
_ABSENCES = ("gated_repo", "missing_entries", "connection_errors")


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, and how it is loaded."""

    place: str
    """A folder, or a name on the Hugging Face Hub."""
    options: Mapping[str, Any]
    """Arguments for every `from_pretrained`."""
    weights: Callable[[Any, Any], Any] | None = None
    """Gives the model, by its Auto class and type, where its weights are shared with others."""
    tokenizer_place: str = ""
    """Where the tokenizer lies, if not beside the model."""

    @classmethod
    def find(cls, model_dir: str, environ: Mapping[str, str]) -> Origin:
        """The model in `model_dir`, else the one that HF_MODEL_ID names (a folder will do).

        Raises:
            ModelError: Neither is there.
        """
        trust = environ.get("HF_TRUST_REMOTE_CODE", "").lower() in ("1", "true")
        options: dict[str, Any] = {"trust_remote_code": True} if trust else {}
        if any((Path(model_dir) / name).is_file() for name in ("config.json", "modules.json")):
            return cls(model_dir, options)
        name = environ.get("HF_MODEL_ID", "")
        if not name:
            files = ", ".join(sorted(path.name for path in Path(model_dir).glob("*"))[:10])
            # Not in the error, which may reach whoever asked for a folder to be loaded.
            print(f"{model_dir} holds {files or 'nothing'}", flush=True)
            raise ModelError(
                f"There is no config.json in {model_dir} (the log lists what it holds).",
                "Pack the files that save_pretrained wrote at the top of model.tar.gz, or set "
                "HF_MODEL_ID.",
            )
        if revision := environ.get("HF_MODEL_REVISION"):
            options["revision"] = revision
        if token := environ.get("HF_API_TOKEN") or environ.get("HF_TOKEN"):
            options["token"] = token
        return cls(name, options)

    @property
    def adapter(self) -> dict[str, Any]:
        """The settings of the LoRA adapter, if only that was saved; else empty."""
        path = Path(self.place) / "adapter_config.json"
        settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return settings

    @property
    def sentence_modules(self) -> list[dict[str, Any]]:
        """The modules that sentence-transformers puts one after another; empty if it has not saved
        the model."""
        modules: list[dict[str, Any]] = self._read_json("modules.json") or []
        return modules

    @property
    def sentence_settings(self) -> dict[str, Any]:
        """What sentence-transformers has saved beside the model; empty if it has not."""
        settings: dict[str, Any] = self._read_json("config_sentence_transformers.json") or {}
        return settings

    def _read_json(self, name: str) -> Any:
        """The content of a JSON file of the folder or of the Hub; None if there is none."""
        if Path(self.place).is_dir():
            path: str | None = str(Path(self.place) / name)
        else:
            silent = {f"_raise_exceptions_for_{absence}": False for absence in _ABSENCES}
            options = {k: v for k, v in self.options.items() if k != "trust_remote_code"}
            try:
                path = cached_file(self.place, name, **silent, **options)
            except OSError:
                # What loads the model says whether there is one at all.
                path = None
        return json.loads(Path(path).read_text()) if path and Path(path).is_file() else None

    def config(self) -> Any:
        """The model's configuration."""
        try:
            return AutoConfig.from_pretrained(self.place, **self.options)
        except OSError as error:
            raise ModelError(
                f"The model {self.place!r} cannot be read: {str(error).splitlines()[0]}",
                "Without a connection to the Hub, bring the model in model.tar.gz, or give "
                "HF_MODEL_ID the path of its folder.",
            ) from error

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            ModelError: There is none. transformers makes an empty one from the model's
                configuration then, to which all texts are the same.
        """
        try:
            place = self.tokenizer_place or self.place
            tokenizer = AutoTokenizer.from_pretrained(place, **self.options)
        except UNLOADABLE as error:
            raise ModelError(
                f"The tokenizer of {place} cannot be loaded: {why_unloadable(error)}",
                _TOKENIZER_REMEDY,
            ) from error
        refuse_empty(tokenizer, place)
        return cast("PreTrainedTokenizerBase", tokenizer)


def refuse_empty(tokenizer: Any, place: str) -> None:
    """Raises ModelError if a tokenizer was made of nothing: `place` holds no file of it."""
    files = set(tokenizer.vocab_files_names.values())
    lacks_files = Path(place).is_dir() and not any((Path(place) / file).is_file() for file in files)
    if (files and lacks_files) or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"{place} holds no tokenizer.", _TOKENIZER_REMEDY)
