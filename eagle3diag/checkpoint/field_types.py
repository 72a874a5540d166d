"""Which type each config field must have, and which fields of a config do not have it (rule CFG111).

One table serves both readers of it: the spec takes a field only if it fits here, and `type_problems` lists those that do not, so nothing
is dropped in silence. Null counts as a fault only where a reader multiplies, indexes or compares the value (engines section 1.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3diag.checkpoint.configs import layer_part
from eagle3diag.checkpoint.fields import ID_KEYS, as_bool, as_float, as_int, as_number_ids, as_text
from eagle3diag.checkpoint.model import ConfigFile

__all__ = ["COUNTS", "FLAGS", "count", "type_problems"]

#: counts -> (largest sane value, null is fine)
COUNTS: Mapping[str, tuple[int, bool]] = {
    "hidden_size": (1 << 20, False),
    "num_hidden_layers": (1 << 12, False),
    "num_attention_heads": (1 << 16, False),
    "num_key_value_heads": (1 << 16, True),
    "head_dim": (1 << 16, True),
    "intermediate_size": (1 << 24, False),
    "vocab_size": (1 << 26, False),
    "max_position_embeddings": (1 << 40, False),
    "sliding_window": (1 << 40, True),
    "num_aux_hidden_states": (1 << 10, True),
    "target_hidden_size": (1 << 20, False),
    "draft_vocab_size": (1 << 26, False),
}
FLAGS = (
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
)
_TOP_COUNTS = ("num_aux_hidden_states", "target_hidden_size", "draft_vocab_size")


def count(value: Any, key: str) -> int | None:
    """A count that fits its field, else None; a ``draft_vocab_size`` of zero or less is kept, being wrong but what the config says."""
    number = as_int(value)
    if number is None or number > COUNTS[key][0] or (number < 1 and key != "draft_vocab_size"):
        return None
    return number


def type_problems(config: ConfigFile) -> list[tuple[str, Any, str]]:
    """Fields of a draft config that are null or of the wrong type: ``(key, value as read, what readers expect)``, in a fixed order.

    A ``draft_vocab_size`` that is a number but no vocabulary (zero, negative) belongs to rule CFG105, ``target_hidden_size: null`` in a
    speculators config to no rule: its reader drops it.
    """
    top, (prefix, layer) = config.data, layer_part(config)
    out: list[tuple[str, Any, str]] = []
    for key, (most, null_ok) in COUNTS.items():
        part, at = (top, "") if key in _TOP_COUNTS else (layer, prefix)
        nested_null = config.schema == "speculators" and key == "target_hidden_size"
        if key not in part or (part[key] is None and (null_ok or nested_null)):
            continue
        if count(part[key], key) is not None and not isinstance(part[key], float):
            continue  # 64.0 is understood here, but engines build tensors of that size and torch refuses it
        out.append((at + key, part[key], f"a whole number from 1 to {most:,}"))
    for key in ("rms_norm_eps", "rope_theta"):
        number = as_float(layer.get(key))
        if key in layer and (number is None or number <= 0):
            out.append((prefix + key, layer[key], "a positive number"))
    for key in ("rope_scaling", "rope_parameters"):
        if key in layer and layer[key] is not None and not isinstance(layer[key], Mapping):
            out.append((prefix + key, layer[key], "an object or null"))
    params = layer.get("rope_parameters")
    if isinstance(params, Mapping) and "rope_theta" in params and as_float(params["rope_theta"]) is None:
        out.append((f"{prefix}rope_parameters.rope_theta", params["rope_theta"], "a positive number"))
    nested = top.get("eagle_config")
    if "eagle_config" in top and not isinstance(nested, Mapping):
        out.append(("eagle_config", nested, "an object"))
    parts = [("", top), (prefix, layer)] if prefix else [("", top)]
    for at, part in [*parts, *([("eagle_config.", nested)] if isinstance(nested, Mapping) else [])]:
        for key in (*FLAGS, *(("use_aux_hidden_state",) if at == "eagle_config." else ())):
            if key in part and part[key] is not None and as_bool(part[key]) is None:
                out.append((at + key, part[key], "true or false"))
        for key in ID_KEYS:
            if key in part and part[key] is not None and part[key] != [] and as_number_ids(part[key]) is None:
                out.append((at + key, part[key], "a list of whole numbers"))
    if "architectures" in top:
        names = top["architectures"]
        if not (isinstance(names, list) and names and all(as_text(n) for n in names)):
            out.append(("architectures", names, "a list of class names"))
    for key in ("speculators_config", "transformer_layer_config"):
        if config.schema == "speculators" and key in top and not isinstance(top[key], Mapping):
            out.append((key, top[key], "an object"))
    return out
