"""Push the saved model to the Hugging Face hub (`push_to_hub`).

A failed push does not fail the job, since the model is already saved.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from recipe.console import say
from recipe.errors import HyperparameterError

# Files of an earlier model that would be loaded with or instead of this one: the commit removes
# those that this model does not have.
_REPLACED = [
    *("*.safetensors", "*.bin", "*.index.json", "adapter_config.json", "config.json"),
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
]
MOST_SECONDS = 3600.0
"""Time-out of a push, during which the instance is paid."""


@dataclass(frozen=True)
class Repository:
    """A repository with write access."""

    name: str
    """owner/name."""
    _api: Any

    def push(self, folder: Path) -> None:
        """Push the folder in one commit, and log the result or the failure."""
        failures: list[Exception] = []

        def upload() -> None:
            try:
                self._api.upload_folder(
                    repo_id=self.name,
                    folder_path=folder,
                    commit_message="Model trained on Amazon SageMaker",
                    delete_patterns=_REPLACED,
                )
            except Exception as error:  # the model is saved; do not fail the job
                failures.append(error)

        uploading = threading.Thread(target=upload, name="push to hub", daemon=True)
        uploading.start()
        uploading.join(MOST_SECONDS)
        why = _first_line(failures[0]) if failures else f"not within {MOST_SECONDS:g} s."
        if failures or uploading.is_alive():
            say(
                f"warning: the model was not pushed to the hub ({self.name}): {why} It is saved in "
                f"{folder}, and the job succeeds. To push it later, unpack model.tar.gz and run "
                f"`hf upload {self.name} FOLDER`."
            )
            return
        say(f"model pushed to {self._api.endpoint}/{self.name}")


def prepare(name: str, token: str | None, private: bool) -> Repository:
    """Return the repository to push to, created if needed.

    Called before training, so that a wrong token or name fails early.

    Raises:
        HyperparameterError: There is no token, or the hub refuses to create the repository.
    """
    if not token:
        raise HyperparameterError(
            f"push_to_hub=True, hub_model_id={name}, but there is no token.",
            "Set hub_token, or the variable HF_TOKEN, to a token with write access.",
        )
    api: Any = huggingface_hub.HfApi(token=token)
    try:
        made = api.create_repo(name, private=private, exist_ok=True)
    except Exception as error:  # huggingface_hub, its HTTP client, or the network
        raise HyperparameterError(
            f"Hyperparameter hub_model_id has value {name!r}, which cannot be pushed to: "
            f"{_first_line(error)}",
            "Check the name, the write access of the token, and that the job reaches the hub "
            "(HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE); or leave push_to_hub out.",
        ) from error
    return Repository(made.repo_id, api)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".rstrip(".") + "."
