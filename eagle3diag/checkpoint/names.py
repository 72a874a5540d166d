"""One name per tensor, whatever framework spelled it: table (b) of the dialects.

Canonical names are those of a bare speculators-style draft: ``layers.0.self_attn.q_proj.weight``, ``fc.weight``, ``d2t``. This is *our*
understanding of what a tensor is; which spellings an engine version maps is its contract's business. Fused ``qkv_proj`` and
``gate_up_proj`` keep their fused name, since splitting them needs the config.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["canonical_name", "canonical_names", "is_fused", "layer_numbers", "spelling", "split_wrapper"]

# wrappers that trainers, parallel runtimes and engines put around a draft
_WRAPPERS = frozenset(
    {
        "model", "draft_model", "module", "eagle_module", "draft", "drafter", "ea_layer", "eagle_model", "base_model",
        "_orig_mod", "_fsdp_wrapped_module", "_forward_module",
    }
)  # fmt: skip
_ROOTS = frozenset(
    {
        "fc", "layers", "midlayer", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "input_norm", "fc_norm", "hidden_norm", "mask_hidden",
        "mtp", "mtp_layers", "fusion_fc", "transformer", "aux_norm_low", "aux_norm_mid", "aux_norm_high", "draft_id_to_target_id",
        "embedding_layernorm", "embed_layernorm", "hidden_layernorm", "lm_head_layernorm", "pre_lm_head_layernorm", "verifier_lm_head",
        "verifier_norm", "prefix_gru", "embed_proj", "markov_w1", "markov_w2", "enorm", "hnorm", "eh_proj", "shared_head",
    }
)  # fmt: skip
_ALIASES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "fusion_fc.": "fc.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "embed_layernorm.": "embedding_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
    "transformer.self_attn.": "layers.0.self_attn.",
    "transformer.mlp.": "layers.0.mlp.",
    "transformer.input_layernorm.": "layers.0.input_layernorm.",
    "transformer.post_attention_layernorm.": "layers.0.post_attention_layernorm.",
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.": "mtp_layers.",
}
_FUSED = ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa")


def split_wrapper(name: str) -> tuple[str, str]:
    """``("model.", "fc.weight")`` for ``model.fc.weight``: the known wrappers in front, and the rest."""
    rest = name
    while True:
        head, dot, tail = rest.partition(".")
        if not dot or head not in _WRAPPERS or not tail:
            return name[: len(name) - len(rest)], rest
        rest = tail


def canonical_name(name: str) -> str:
    """The canonical name of one tensor; a name that fits no rule comes back without its wrapper."""
    rest = split_wrapper(name)[1]
    if rest == "draft_id_to_target_id":
        return "d2t"
    if rest.startswith("midlayer."):
        number, dot, tail = rest[9:].partition(".")
        if not (dot and _is_number(number)):
            return "layers.0." + rest[9:]
        # Megatron's deep export calls the input norm of every deeper layer hidden_norm
        if int(number) >= 1 and tail.startswith("hidden_norm."):
            tail = "input_layernorm." + tail[12:]
        return f"layers.{int(number)}.{tail}"
    for old, new in _ALIASES.items():
        if rest.startswith(old):
            return new + rest[len(old) :]
    return rest


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """``{canonical name: name in the file}``, in the order of the file names.

    A wrapper nobody has heard of is stripped too, if every name carries it and what follows are names of a draft. Where two names
    in the file mean the same tensor, the one without a wrapper stands for it.
    """
    listed = list(names)
    shared = _shared_wrapper(listed)
    out: dict[str, str] = {}
    for name in listed:
        canonical = canonical_name(name[len(shared) :])
        known = out.get(canonical)
        if known is None or len(split_wrapper(name)[0]) < len(split_wrapper(known)[0]):
            out[canonical] = name
    return out


def _shared_wrapper(names: list[str]) -> str:
    """The unknown wrapper all names share, or an empty string."""
    if not names:
        return ""
    rest, cut = names[0], ""
    while True:
        head, dot, tail = rest.partition(".")
        if head in _ROOTS or head in _WRAPPERS or not dot or not tail:
            break
        cut, rest = f"{cut}{head}.", tail
    if not cut or not all(n.startswith(cut) for n in names):
        return ""
    return cut if any(split_wrapper(n[len(cut) :])[1].partition(".")[0] in _ROOTS for n in names) else ""


def spelling(names: Iterable[str]) -> str:
    """How the file names its first decoder layer: ``midlayer``, ``midlayer.0``, ``layers.0``, ``mixed`` or an empty string.

    ``midlayer`` followed by plain ``layers.1`` is still ``midlayer``; ``mixed`` means the first layer stands there under two names.
    """
    listed = list(names)
    shared = _shared_wrapper(listed)
    found: set[str] = set()
    for name in listed:
        rest = split_wrapper(name[len(shared) :])[1]
        root, _, tail = rest.partition(".")
        number = tail.partition(".")[0]
        if root == "midlayer":
            found.add("midlayer.0" if _is_number(number) else "midlayer")
        elif root == "layers" and _is_number(number):
            found.add("layers.0" if int(number) == 0 else "deeper")
    found -= {"deeper"} if len(found) > 1 else set()
    return ("" if "deeper" in found else found.pop()) if len(found) == 1 else ("mixed" if found else "")


def layer_numbers(canonical: Iterable[str]) -> tuple[int, ...]:
    """The decoder layers among canonical names, ascending."""
    numbers = {int(part) for name in canonical if name.startswith("layers.") and _is_number(part := name[7:].partition(".")[0])}
    return tuple(sorted(numbers))


def is_fused(name: str) -> bool:
    """True for a fused projection (``qkv_proj``, ``gate_up_proj``)."""
    return any(f".{part}." in name for part in _FUSED)


def _is_number(text: str) -> bool:
    return len(text) <= 6 and text.isascii() and text.isdigit()
