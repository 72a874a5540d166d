"""What several families read off a case: keys as spelled in the config, shapes under canonical names, which tensors a reader needs.

The config numbers come in two guises. ``stated`` is the key as written (null and wrong types included), which is what an engine trips
over; ``numbers`` are the normalised facts an engine would build its layers from, each only where a config states it. A rule that compares
a shape with "the config" uses the second, so that a fact derived from a shape is never compared with that shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.provenance import Valued
from eagle3diag.rules.model import Case

__all__ = [
    "Stated",
    "config_file",
    "config_int",
    "expected_tensors",
    "file_name",
    "is_eagle3",
    "label",
    "layer_names",
    "named",
    "numbers",
    "reduced_vocabulary",
    "refused_tensor",
    "shape_of",
    "spelled_layer",
    "stated",
    "wrapped",
]


@dataclass(frozen=True, slots=True)
class Stated:
    """A config key as written: whether it is there, its value, and its place (``config.json: draft_vocab_size``)."""

    there: bool
    value: Any
    place: str


def config_file(case: Case) -> str:
    """The file the draft's facts were read from, ``config.json`` where there is none."""
    return case.draft.configs[0].file if case.draft.configs else "config.json"


def stated(case: Case, key: str) -> Stated:
    """A key of the draft's config: top level first, then ``transformer_layer_config``, then ``eagle_config``."""
    file = config_file(case)
    top = case.draft.config
    for part in ("", "transformer_layer_config", "eagle_config"):
        data = top.get(part) if part else top
        if isinstance(data, Mapping) and key in data:
            return Stated(True, data[key], f"{file}: {part}.{key}" if part else f"{file}: {key}")
    return Stated(False, None, f"{file}: {key}")


def is_eagle3(case: Case) -> bool:
    """True unless the draft is recognised as another generation or algorithm; CFG113 speaks for those."""
    return case.spec.algorithm in ("eagle3", "unknown")


def refused_tensor(case: Case, name: str) -> bool:
    """True where the engine stops at this tensor of the file (unknown name or another shape) rather than pass over it in silence."""
    return case.served is not None and "refused" in case.served.tensors[name].why


def label(case: Case) -> tuple[str, ...]:
    """The engine concerned, for ``Finding.engines``; empty without one."""
    return (case.served.contract.label,) if case.served is not None else ()


def config_int(fact: Valued[int | None]) -> int | None:
    """The number where a config states it, else None."""
    return fact.value if fact.kind == "config" else None


_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "vocab_size",
    "draft_vocab_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def numbers(spec: DraftSpec) -> dict[str, int]:
    """The sizes a reader builds the draft from, each only where a config states it.

    ``head_dim`` falls back to ``hidden_size // num_attention_heads`` and ``num_kv_heads`` to ``num_heads``, as every reader does
    (vLLM 0.33.0 and SGLang 0.5.23 `llama_eagle3.py`).
    """
    out: dict[str, int] = {}
    for name in _SIZES:
        value = config_int(getattr(spec, name))
        if value is not None and value > 0:
            out[name] = value
    if "num_heads" in out:
        out.setdefault("num_kv_heads", out["num_heads"])
        if "hidden_size" in out:
            out.setdefault("head_dim", out["hidden_size"] // out["num_heads"])
    return out


def file_name(spec: DraftSpec, canonical: str) -> str:
    """The name in the file of a canonical tensor; the canonical name itself where it is not in the file."""
    return spec.canonical.get(canonical, canonical)


def shape_of(case: Case, canonical: str) -> tuple[int, ...] | None:
    """Shape of a canonical tensor, None where the file has none."""
    name = case.spec.canonical.get(canonical)
    info = case.draft.tensors.get(name) if name is not None else None
    return None if info is None else info.shape


def reduced_vocabulary(case: Case) -> bool | None:
    """Whether the draft scores fewer tokens than the vocabulary has; None where one of the two sizes is unknown."""
    spec = case.spec
    draft = spec.draft_vocab_size.value
    head = shape_of(case, "lm_head.weight")
    if (draft is None or draft < 1) and head:
        draft = head[0]
    whole = spec.vocab_size.value or (case.target.vocab_size.value if case.target is not None else None)
    return None if draft is None or whole is None else draft < whole


def spelled_layer(name: str) -> str:
    """The decoder-layer prefix a tensor name is spelled with (``layers.0.``, ``model.midlayer.``), or nothing."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part == "midlayer":
            deep = parts[i + 1].isdigit() and i + 2 < len(parts)
            return ".".join(parts[: i + 2 if deep else i + 1]) + "."
        if part == "layers" and parts[i + 1].isdigit():
            return ".".join(parts[: i + 2]) + "."
    return ""


#: first words of the names a reader knows
_HEADS = ("model", "layers", "midlayer", "fc", "norm", "lm_head", "embed_tokens", "d2t", "t2d", "input_norm", "fc_norm")


def wrapped(case: Case) -> dict[str, list[str]]:
    """Tensor names by a wrapper's prefix (``module.``, ``draft_model.``) where a whole draft, ``fc`` and layer, stands behind one.

    No engine on record strips such a prefix; ``model.`` is none of them.
    """
    out: dict[str, list[str]] = {}
    for name in case.draft.tensors:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part in _HEADS), 0)
        if at:
            out.setdefault(".".join(parts[:at]) + ".", []).append(name)
    return {p: names for p, names in out.items() if f"{p}fc.weight" in names and any(spelled_layer(n) for n in names)}


def layer_names(case: Case) -> dict[str, list[str]]:
    """Tensor names in the file by the layer prefix they are spelled with."""
    out: dict[str, list[str]] = {}
    for name in case.draft.tensors:
        prefix = spelled_layer(name)
        if prefix:
            out.setdefault(prefix, []).append(name)
    return out


def named(names: Iterable[str], most: int = 4) -> str:
    """Names for a title: the first few, and how many more."""
    from eagle3diag.errors import escaped

    every = [escaped(n, 90) for n in names]
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most:,} more"


def expected_tensors(spec: DraftSpec) -> tuple[str, ...]:
    """Canonical names of the tensors every EAGLE-3 reader needs for this draft (both engines' `llama_eagle3.py`).

    ``embed_tokens`` (taken from the target), ``t2d`` (read by no engine) and ``d2t`` (VAL307) are not among them; the head is expected
    only where the vocabulary is reduced, because a whole one may be borrowed.
    """
    have = spec.canonical
    uses_aux = spec.use_aux_hidden_state.value is not False
    out: list[str] = ["fc.weight"] if uses_aux else []
    layers = max(1, min(spec.num_layers.value or 1, spec.layers_in_file or 1))
    for i in range(layers):
        at = f"layers.{i}."
        if i == 0:
            out.append(at + "input_layernorm.weight")
            if uses_aux:
                out.append(at + "hidden_norm.weight")
        elif at + "hidden_norm.weight" not in have:
            out.append(at + "input_layernorm.weight")
        out.append(at + "post_attention_layernorm.weight")
        out.extend(at + part for part in _attention(spec, at))
        out.extend(at + part for part in _mlp(spec, at))
    if spec.wiring.final_norm:
        out.append("norm.weight")
    if spec.norm_before_fc.kind == "config" and spec.norm_before_fc.value:
        out.append("input_norm.weight")
    if spec.fc_norm.kind == "config" and spec.fc_norm.value:
        out.extend(f"fc_norm.{k}.weight" for k in range(spec.n_aux.value or 3))
    draft, whole = spec.draft_vocab_size.value, spec.vocab_size.value
    if draft is not None and whole is not None and 0 < draft < whole:
        out.append("lm_head.weight")
    return tuple(out)


def _attention(spec: DraftSpec, at: str) -> list[str]:
    have = spec.canonical
    if spec.draft_class == "mla":
        query = ["q_proj"] if at + "self_attn.q_proj.weight" in have else ["q_a_proj", "q_a_layernorm", "q_b_proj"]
        parts = [*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    elif at + "self_attn.qkv_proj.weight" in have:
        parts = ["o_proj"]
    else:
        parts = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return [f"self_attn.{p}.weight" for p in parts]


def _mlp(spec: DraftSpec, at: str) -> list[str]:
    if at + "mlp.gate_up_proj.weight" in spec.canonical:
        return ["mlp.down_proj.weight"]
    return ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
