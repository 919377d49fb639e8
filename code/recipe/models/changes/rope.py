"""RoPE scaling: models that read longer texts than they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.errors import HyperparameterError

_KEYS = {
    *("rope_type", "factor", "rope_theta", "partial_rotary_factor", "attention_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
_KEPT = ("rope_theta", "partial_rotary_factor")
_TYPES = ("linear", "yarn", "llama3", "longrope")


def changes(config: Any, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of a configuration that the hyperparameter rope_scaling changes; none
    without it.

    Raises:
        HyperparameterError: The model has no RoPE, or transformers does not take the values.
    """
    if not scaling:
        return {}
    config = config.get_text_config()
    # transformers 4 has the base of RoPE beside its scaling.
    name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"
    known: dict[str, Any] = getattr(config, name, None) or {}
    what = f"Hyperparameter rope_scaling has value {dict(scaling)}, but"
    if not (known or hasattr(config, "rope_theta")):
        raise HyperparameterError(
            f"{what} a model of type {config.model_type} has no rotary positions (RoPE).",
            "Leave it out: its max_length is fixed.",
        )
    layers = [key for key, values in known.items() if isinstance(values, Mapping)]
    parts = scaling if layers else {"": scaling}
    longest = [config.max_position_embeddings]
    for layer, given in parts.items():
        values = dict(given) if isinstance(given, Mapping) else {}
        kind, factor = values.get("rope_type"), values.get("factor", 1)
        unknown = [*({*values} - _KEYS), *(key for key in [layer] if layers and key not in layers)]
        if unknown or kind not in _TYPES or not isinstance(factor, (int, float)) or factor < 1:
            raise HyperparameterError(
                f"{what} this is not possible: {unknown or (kind, factor)}.",
                f"Give rope_type ({', '.join(_TYPES)}; dynamic would depend on the longest text of "
                "a batch), a factor from 1, and what transformers takes with them"
                + f", for some of {', '.join(layers)}" * bool(layers)
                + ".",
            )
        before = known[layer] if layers else known
        kept = {key: before[key] for key in _KEPT if key in before}
        original = values.get("original_max_position_embeddings", config.max_position_embeddings)
        if kind != "linear":
            values["original_max_position_embeddings"] = original
        longest.append(int(factor * original))
        known = {**known, layer: {**kept, **values}} if layers else {**kept, **values}
    return {name: known, "max_position_embeddings": max(longest)}
