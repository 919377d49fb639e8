"""Gives vLLM the token ids of a model's tokenizer.json: transformers 5, by which vLLM loads it,
builds some tokenizers by the name of their class."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from amphora.common.errors import ConfigError
from amphora.common.variables import image_code

LOG = logging.getLogger("amphora.vllm")
_UNCHANGED = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that are the file, except for types of models whose class transformers imposes."""
_IMPOSED = "qwen"
_OTHER_IDS = "token ids are not those of its"
"""Of the recipe's error."""


def match_tokenizer(
    command: Sequence[str], model: str, target: Path, environ: Mapping[str, str]
) -> list[str]:
    """Return the arguments by which vLLM has the ids of the model's tokenizer.json: none if it has
    them anyway. Raise ConfigError if no tokenizer has them.

    Args:
        command: vLLM's command.
        model: What it serves.
        target: A folder to create for the tokenizer.
    """
    words = list(command)
    folder = Path(words[words.index("--tokenizer") + 1] if "--tokenizer" in words else model)
    script = image_code(environ) / "match_tokenizer.py"
    if not (folder / "tokenizer.json").is_file() or not script.is_file():
        return []
    named = _read(folder / "tokenizer_config.json", "tokenizer_class")
    if named in _UNCHANGED and not _read(folder / "config.json", "model_type").startswith(_IMPOSED):
        return []
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(target)],
        capture_output=True, text=True, env=dict(environ), check=False,
    )  # fmt: skip
    if _OTHER_IDS in done.stderr:  # other errors are those that vLLM reports
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    for line in done.stdout.splitlines():
        LOG.info("%s", line)
    return ["--tokenizer", str(target)] if target.is_dir() else []


def _read(path: Path, key: str) -> str:
    """Return a text of a JSON file; empty if it has none."""
    try:
        return str(json.loads(path.read_text()).get(key) or "")
    except (OSError, ValueError, AttributeError):
        return ""
