"""Reading one value out of somebody else's JSON: the right type, or nothing.

A config is untrusted: any field may be null, a string, a list, 1e400 or an integer of a thousand digits. Every reader here returns ``None``
instead of raising, so the spec is built from what is usable and ``spec.type_problems`` names the rest. RoPE is normalised here too, because
four schemas state the same two facts (``rope_theta``/``rope_scaling``, ``rope_parameters``, either of them inside a nested layer config).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["ID_KEYS", "as_bool", "as_float", "as_int", "as_mapping", "as_number_ids", "as_text", "first_text", "rope_facts"]

#: top-level keys that record aux layer ids, and what a number means there: an HF index, or the output of that layer (one later)
ID_KEYS: dict[str, Literal["hf", "layer-output"]] = {
    "eagle_aux_hidden_state_layer_ids": "hf",
    "aux_hidden_state_layer_ids": "hf",
    "aux_hidden_states_layer_ids": "layer-output",
}
_LIMIT = 1 << 53  # a count above this is no count, and floats stop being exact


def as_int(value: Any) -> int | None:
    """A whole number (``3`` or ``3.0``), else None; booleans and absurd magnitudes are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if -_LIMIT < value < _LIMIT else None
    if isinstance(value, float) and value == value and abs(value) < _LIMIT and value.is_integer():
        return int(value)
    return None


def as_float(value: Any) -> float | None:
    """A finite real number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and not -(10**300) < value < 10**300:
        return None
    number = float(value)
    return number if number - number == 0 else None


def as_bool(value: Any) -> bool | None:
    """``true`` or ``false``, else None."""
    return value if isinstance(value, bool) else None


def as_text(value: Any) -> str | None:
    """A non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def first_text(value: Any) -> str | None:
    """The first entry of a list of strings (``architectures``), else None."""
    return as_text(value[0]) if isinstance(value, list) and value else None


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """A JSON object, else None."""
    return value if isinstance(value, Mapping) else None


def as_number_ids(value: Any) -> tuple[int, ...] | None:
    """A non-empty list of at most 512 whole numbers, else None."""
    if not isinstance(value, list) or not value or len(value) > 512:
        return None
    ids = tuple(as_int(v) for v in value)
    return None if any(i is None for i in ids) else tuple(i for i in ids if i is not None)


def _scaling(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """One spelling for every scaling dict: ``rope_type`` (older: ``type``), theta taken out; None where nothing is scaled."""
    out = {k: v for k, v in raw.items() if k not in ("rope_theta", "type", "rope_type")}
    kind = as_text(raw.get("rope_type")) or as_text(raw.get("type"))
    if kind in (None, "default") and not out:
        return None
    return {"rope_type": kind or "default", **out}


def rope_facts(data: Mapping[str, Any]) -> tuple[tuple[float, str] | None, tuple[dict[str, Any] | None, str] | None]:
    """Theta and scaling as one config level states them, each with the key it was read from.

    ``rope_parameters`` (transformers 5) wins over the legacy keys, as in every reader that knows it. Where it holds one dict per attention
    type (Gemma 3, sliding-window models), the full-attention entry speaks. A plain theta with no scaling is a stated "no scaling".

    Returns:
        ``((theta, key) | None, (scaling | None, key) | None)``; the second is None where nothing at all is said about scaling.
    """
    theta: tuple[float, str] | None = None
    scaling: tuple[dict[str, Any] | None, str] | None = None
    params = as_mapping(data.get("rope_parameters"))
    key = "rope_parameters"
    if params and all(isinstance(v, Mapping) for v in params.values()):
        chosen = "full_attention" if "full_attention" in params else next(iter(params))
        key, params = f"rope_parameters.{chosen}", as_mapping(params[chosen])
    if params is not None:
        value = as_float(params.get("rope_theta"))
        theta = None if value is None else (value, f"{key}.rope_theta")
        scaling = (_scaling(params), key)
    if theta is None and (value := as_float(data.get("rope_theta"))) is not None:
        theta = (value, "rope_theta")
    if scaling is None and "rope_scaling" in data:
        legacy = data["rope_scaling"]
        if legacy is None or isinstance(legacy, Mapping):
            scaling = (None if legacy is None else _scaling(legacy), "rope_scaling")
    if scaling is None and theta is not None:
        scaling = (None, theta[1])
    return theta, scaling
