"""Reads environment variables, and reports all wrong ones in one error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from amphora.common.errors import ConfigError, did_you_mean

T = TypeVar("T", int, float)

PREFIX = "AMPHORA_"
SETTINGS: Mapping[str, str] = {
    PREFIX + name: text
    for name, text in (
        # Training
        ("NPROC_PER_NODE", "processes on each host (default: one for each accelerator)"),
        ("STOP_SECONDS", "seconds that a stopped script may take before it is killed (100)"),
        ("HOST_WAIT_SECONDS", "seconds that another host may take to appear (300)"),
        # Serving: the server
        ("BIND", "IPv4 address to listen on (127.0.0.1; 0.0.0.0 in the images)"),
        ("QUEUE_LIMIT", "waiting requests; one more is answered 503 (512)"),
        ("MAX_CONNECTIONS", "open connections; one more closes the longest silent one (4096)"),
        ("CLIENT_TIMEOUT", "seconds that a client may take to send a request or read (75)"),
        ("BATCH_TOKENS", "tokens in one prediction, padding included (16384)"),
        ("ADAPTERS", "LoRA adapters loaded at a time (0; 64 if the model has a folder adapters)"),
        ("MODEL_NAME", "name of the model in answers and on the page (HF_MODEL_ID, else model)"),
        ("UI", "1 shows the page at /, 0 hides it (shown on a laptop, hidden on an endpoint)"),
        ("CODE_DIR", "folder of the recipe and the default handlers (/opt/amphora/code)"),
        # Serving: the model
        ("DTYPE", "float32, bfloat16 or float16 (bfloat16 where the device computes in it)"),
        ("GENERATION", "vllm or transformers: what generates text (vllm if it can)"),
        ("PROOF", "off serves a model that does not answer as its proof.json says (on)"),
        ("PACKING", "0 pads the texts of a call instead of joining them in one row (1)"),
        ("CUDA_GRAPHS", "1 computes rows of up to 8,192 tokens by CUDA graphs; not measured (0)"),
        ("BLOCKED_WEIGHTS", "0 keeps PyTorch's layout of the weights on a CPU (1)"),
        ("BUCKETS", "Trainium: shapes to compile for, texts x tokens, such as 1x128,16x128"),
        ("ANSWERS", "huggingface (a vector for each token) or vectors (one for each text)"),
        ("HANDLER_DEFAULTS", "huggingface or pytorch: the functions that a file leaves out"),
        # Serving: bounds of one request
        ("MAX_TEXT_BYTES", "bytes that are tokenized at once (500000)"),
        ("MAX_ROWS", "texts, pairs and windows (131072)"),
        ("MAX_TOKENS_READ", "tokens of all texts (4194304)"),
        ("MAX_TOKENS_WRITTEN", "prompts x answers or beams x new tokens (262144)"),
        ("MAX_SCORES", "scores that the model computes, such as texts x labels (67108864)"),
        ("MAX_ANSWER_VALUES", "numbers and names in the answer (4194304)"),
        ("MAX_PIXELS", "pixels of all images (64000000)"),
        ("MAX_AUDIO_SECONDS", "seconds of audio, read or generated (600)"),
    )
}
"""What users set, each with its meaning and default, for docs/REFERENCE.md."""
_INTERNAL = {
    PREFIX + name for name in ("ERROR_DIR", "LAUNCHER", "NEURON_STACK", "SCRIPT_DIR", "TERMINAL")
}
"""Variables that an image or another process sets."""


def image_code(environ: Mapping[str, str]) -> Path:
    """Return the folder of the recipe and handlers: /opt/amphora/code, or code/ of a checkout."""
    if named := environ.get("AMPHORA_CODE_DIR"):
        return Path(named).absolute()
    checkout = Path(__file__).resolve().parents[3] / "code"
    return checkout if (checkout / "inference.py").is_file() else Path("/opt/amphora/code")


class Variables:
    """Reads variables. Wrong ones count as absent until `check` reports them all."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[str] = []

    def text(self, name: str) -> str:
        """Return the value without surrounding spaces, or '' if it is not set."""
        return self._environ.get(name, "").strip()

    def flag(self, name: str) -> bool:
        """Return whether a switch is on (true, 1) or off (false, 0, not set)."""
        value = self.text(name).lower()
        if value not in ("", "0", "1", "true", "false"):
            self.refuse(f"{name} is {value!r}. Give true or false, or leave it out.")
        return value in ("1", "true")

    def number(self, name: str, default: T, *, least: float, most: float = math.inf) -> T:
        """Return a finite number of the default's type, or `default` if it is not set."""
        value = self.text(name)
        if not value:
            return default
        try:
            number = type(default)(value)
        except ValueError:
            number = None
        # nan compares as false, so that it is refused too.
        if number is None or not least <= number <= most or number == math.inf:
            kind = "a whole number" if isinstance(default, int) else "a number"
            span = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
            self.refuse(f"{name} is {value!r}. Give {kind} {span}, or leave it out.")
            return default
        return number

    def refuse(self, problem: str) -> None:
        """Add a problem for `check` to report."""
        self._problems.append(problem)

    def check(self) -> None:
        """Raise ConfigError with all problems, including unknown variables."""
        for name in sorted(self._environ):
            if name.startswith(PREFIX) and name not in SETTINGS.keys() | _INTERNAL:
                self.refuse(
                    f"{name} is not a variable of this image.{did_you_mean(name, SETTINGS, 0.8)}"
                )
        if self._problems:
            raise ConfigError(" ".join(self._problems))
