"""Compares the answers of vLLM's server with the proof.json of its model.

`code/recipe/backend/proofs` describes the file and makes it. The prompts are sent twice: as token
ids with those that the model generated after training, whose log-probabilities are compared, and as
text, whose token ids and greedy continuation are compared.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amphora.common.errors import ConfigError
from amphora.serving.pool.spawner import ModelLoadError
from amphora.serving.protocol import routes

LOG = logging.getLogger("amphora.vllm")
NAME, VARIABLE = "proof.json", "AMPHORA_PROOF"
_GENERATED = "log-probabilities"
_QUANTIZED = ("SM_VLLM_QUANTIZATION", "SM_VLLM_KV_CACHE_DTYPE")
"""Variables by which values are others on purpose: only tokens of prompts are compared."""
Answer = Callable[[str, Mapping[str, Any], float], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, kw_only=True)
class PromptProof:
    """The probes of a model that generates text, with the answers after training."""

    probes: list[dict[str, Any]]
    tolerance: float
    """How far log-probabilities may differ."""
    versions: Mapping[str, str]
    is_quantized: bool

    @classmethod
    def read(cls, folder: Path, environ: Mapping[str, str]) -> PromptProof | None:
        """Read the proof in a model's folder; None if there is none, or AMPHORA_PROOF is off.
        Raises ConfigError for another value."""
        setting = environ.get(VARIABLE) or "on"
        if setting not in ("on", "off"):
            remedy = f"Set on (compare with {NAME}) or off (serve anyway)."
            raise ConfigError(f"{VARIABLE} is {setting!r}.", remedy)
        try:
            proof = json.loads((folder / NAME).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(proof, dict) or proof.get("reading") != _GENERATED:
            return None
        if setting == "off":
            LOG.warning("%s=off: answers are not compared with %s.", VARIABLE, NAME)
            return None
        # vLLM's kernels add up in other orders, and approximate exponentials.
        is_exact = environ.get("AMPHORA_DTYPE") == "float32"
        return cls(
            probes=[probe for probe in proof["probes"] if probe["rows"] and probe.get("prompt")],
            tolerance=float(proof["tolerances"]["float16" if is_exact else "bfloat16"]),
            versions=proof["versions"],
            is_quantized=any(environ.get(name) for name in _QUANTIZED),
        )

    async def verify(self, model: str, answer: Answer, seconds: float) -> None:
        """Compare the answers to each prompt.

        Args:
            model: Its name in bodies.
            answer: Sends a body to a route, and returns the status and the answer.
            seconds: The time that an answer may take.

        Raises ModelLoadError if tokens, log-probabilities or the continuation differ.
        """
        for probe in self.probes:
            (row,) = probe["rows"]
            ids, tokens, prompt = row["ids"], row["tokens"], probe["prompt"]
            body = {"model": model, "temperature": 0, "max_tokens": len(tokens)}
            route, key = routes.COMPLETIONS, "prompt"
            if isinstance(prompt, list):
                route, key = routes.CHAT, "messages"
            greedy = {**body, key: prompt, "return_token_ids": True}
            document = await _send(answer, route, greedy, seconds)
            (choice,) = document["choices"]
            read = choice.get("prompt_token_ids") or document.get("prompt_token_ids") or ids
            if read != ids:
                raise _error(probe, f"has the tokens {read[:8]}, not {ids[:8]}", "tokenizer")
            if self.is_quantized:
                continue
            body |= {"prompt": [*ids, *tokens], "max_tokens": 1, "echo": True, "logprobs": 1}
            document = await _send(answer, routes.COMPLETIONS, body, seconds)
            self._compare_values(probe, document["choices"][0]["logprobs"]["token_logprobs"])
            self._compare_tokens(probe, choice.get("token_ids") or tokens)
        LOG.info("proof: the answers to %d probes are those of the training.", len(self.probes))

    def _compare_values(self, probe: Mapping[str, Any], scores: list[float | None]) -> None:
        (stored,) = probe["values"]
        # The first token has none.
        ours, theirs = scores[1 : 1 + len(stored["numbers"])], stored["numbers"]
        pairs = zip(ours, theirs, strict=False)
        sizes = [float("inf") if one is None else abs(one - two) for one, two in pairs]
        largest = max(sizes) if len(ours) == len(theirs) else float("inf")
        if not largest <= self.tolerance:
            made = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            raise _error(
                probe,
                f"has log-probabilities that differ by {largest:.3g}, and {self.tolerance:.3g} is "
                "allowed",
                f"weights, precision or library (the proof was made by {made})",
            )

    def _compare_tokens(self, probe: Mapping[str, Any], written: list[int]) -> None:
        """Compare the continuation up to the first token whose second best was as good."""
        tokens = probe["rows"][0]["tokens"]
        for index, margin in enumerate(probe["margins"]):
            if margin <= 2 * self.tolerance:
                return
            if written[index : index + 1] != tokens[index : index + 1]:
                what = f"is continued by the tokens {written}, not {tokens}"
                raise _error(probe, what, "settings of generation or library")


async def _send(
    answer: Answer, route: str, body: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    status, content = await answer(route, body, seconds)
    if status != 200:
        message = content[:300].decode(errors="replace")
        raise ModelLoadError(
            f"vLLM answers {status} to a probe of {NAME}: {message}",
            f"{VARIABLE}=off serves the model anyway.",
        )
    document: dict[str, Any] = json.loads(content)
    return document


def _error(probe: Mapping[str, Any], difference: str, cause: str) -> ModelLoadError:
    return ModelLoadError(
        f"The model does not answer as its {NAME} says: {probe['name']} {difference}. Cause: "
        f"{cause}.",
        f"{VARIABLE}=off serves it anyway.",
    )
