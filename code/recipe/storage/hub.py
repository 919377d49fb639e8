"""`push_to_hub`: the saved model goes to the Hugging Face hub, and whatever happens there costs it
nothing: it lies in the model's folder already.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from recipe.console import say
from recipe.errors import HyperparameterError
from recipe.hyperparameters import Hyperparameters

# What an earlier model in the repository could have that would be loaded instead of this one, or
# with it: removed in the same commit, if this model does not have it.
_REPLACED = [
    *("*.safetensors", "*.bin", "*.index.json", "adapter_config.json", "config.json"),
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
]
MOST_SECONDS = 3600.0
"""After which the job ends without the push, which pays for a machine meanwhile."""


@dataclass(frozen=True)
class Repository:
    """A repository that may be written to."""

    name: str
    """owner/name."""
    _api: Any

    def push(self, folder: Path) -> None:
        """Push what is in the folder, in one commit; say where it is, or why it is not."""
        failures: list[Exception] = []

        def upload() -> None:
            try:
                self._api.upload_folder(
                    repo_id=self.name,
                    folder_path=folder,
                    commit_message="Model trained on Amazon SageMaker",
                    delete_patterns=_REPLACED,
                )
            except Exception as error:  # the model is saved: the hub cannot undo that
                failures.append(error)

        uploading = threading.Thread(target=upload, name="push to hub", daemon=True)
        uploading.start()
        uploading.join(MOST_SECONDS)
        why = _first_line(failures[0]) if failures else f"not within {MOST_SECONDS:g} s."
        if failures or uploading.is_alive():
            say(
                f"warning: the model is not on the hub ({self.name}): {why} It is saved in "
                f"{folder}, and the job ends well: unpack its model.tar.gz into a folder and call "
                f"`hf upload {self.name} FOLDER`."
            )
            return
        say(f"model pushed to {self._api.endpoint}/{self.name}")


def prepare(hyperparameters: Hyperparameters, environ: Mapping[str, str]) -> Repository | None:
    """The repository to push to, made if it is not there; None if nothing is to be pushed.

    So what would fail after training fails before it.

    Raises:
        HyperparameterError: there is no token, or the hub does not let it make the repository.
    """
    if not hyperparameters.push_to_hub:
        return None
    name = str(hyperparameters.hub_model_id)
    token = hyperparameters.hub_token or hyperparameters.hf_token or environ.get("HF_TOKEN")
    if not token:
        raise HyperparameterError(
            f"push_to_hub=True, hub_model_id={name}, but there is no token.",
            "Give hub_token, or the variable HF_TOKEN: a token that may write.",
        )
    api: Any = huggingface_hub.HfApi(token=token)
    try:
        made = api.create_repo(
            name, private=hyperparameters.hub_private_repo is not False, exist_ok=True
        )
    except Exception as error:  # of the hub's library, its HTTP client, or the network
        raise HyperparameterError(
            f"Hyperparameter hub_model_id has value {name!r}, which cannot be pushed to: "
            f"{_first_line(error)}",
            "Check the name, that the token may write there, and that the job reaches the hub "
            "(HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE); or leave push_to_hub out.",
        ) from error
    return Repository(made.repo_id, api)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".") + "."
