"""The parameters an engine version builds for a draft, before any file is read.

Each ``Parameter`` has the engine's own name, its shape, what it holds if nothing fills it, and how a tensor of another shape is met:
``exact`` and ``vocab`` refuse, ``column`` (q/k/v, gate/up and other column-parallel weights) silently cuts surplus rows, ``row`` (o_proj,
down_proj) surplus columns (docs/facts/loader_runs.md, shapes). A fused parameter has ``slots``, one per checkpoint tensor that fills a
part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eagle3diag.engines.model import Contract
from eagle3diag.engines.view import EngineView, Sizes

__all__ = ["Parameter", "Slot", "build_parameters"]

How = Literal["exact", "vocab", "column", "row"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of a parameter that one tensor fills: canonical tensor name and its rows."""

    canonical: str
    rows: int | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the engine's draft class.

    Attributes:
        name: the engine's name, ``model.midlayer.self_attn.qkv_proj.weight``.
        shape: as built; None in a place the config does not tell.
        start: ``uninitialised``, ``ones``, ``random`` or ``zeros``.
        slots: by the projection name in the checkpoint (``q_proj`` …) for a fused parameter; one slot ``""`` otherwise.
    """

    name: str
    how: How
    shape: tuple[int | None, ...]
    start: str
    slots: dict[str, Slot]


def _plain(name: str, canonical: str, how: How, shape: tuple[int | None, ...], start: str) -> Parameter:
    return Parameter(name, how, shape, start, {"": Slot(canonical, shape[0])})


def _mul(*values: int | None) -> int | None:
    out = 1
    for v in values:
        if v is None:
            return None
        out *= v
    return out


def _add(*values: int | None) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _attention(at: str, canon: str, s: Sizes, wide: int | None, view: EngineView, contract: Contract) -> list[Parameter]:
    q, kv = _mul(s.heads, s.head_dim), _mul(s.kv_heads, s.head_dim)
    linear = contract["linear_start"]
    slots = {p: Slot(f"{canon}.self_attn.{p}.weight", rows) for p, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))}
    out = [
        Parameter(f"{at}.self_attn.qkv_proj.weight", "column", (_add(q, kv, kv), wide), linear, slots),
        _plain(f"{at}.self_attn.o_proj.weight", f"{canon}.self_attn.o_proj.weight", "row", (s.hidden, q), linear),
    ]
    if contract["qkv_bias"] == "config" and view.flag("attention_bias"):
        biases = {p: Slot(f"{canon}.self_attn.{p}.bias", slot.rows) for p, slot in slots.items()}
        out.append(Parameter(f"{at}.self_attn.qkv_proj.bias", "column", (_add(q, kv, kv),), linear, biases))
    if any(view.flag(k) for k in contract["o_bias"]):
        out.append(_plain(f"{at}.self_attn.o_proj.bias", f"{canon}.self_attn.o_proj.bias", "exact", (s.hidden,), linear))
    if contract["qk_norm"] == "always":
        out += [
            _plain(f"{at}.self_attn.{n}.weight", f"{canon}.self_attn.{n}.weight", "exact", (s.head_dim,), contract["norm_start"])
            for n in ("q_norm", "k_norm")
        ]
    return out


def _mla(at: str, canon: str, s: Sizes, wide: int | None, contract: Contract) -> list[Parameter]:
    linear, norm = contract["linear_start"], contract["norm_start"]
    fused = {
        "q_a_proj": Slot(f"{canon}.self_attn.q_a_proj.weight", s.q_lora),
        "kv_a_proj_with_mqa": Slot(f"{canon}.self_attn.kv_a_proj_with_mqa.weight", _add(s.kv_lora, s.rope)),
    }
    name = "fused_qkv_a_proj_with_mqa" if contract.engine == "sglang" else "fused_qkv_a_proj"
    q_rows = _mul(s.heads, _add(s.nope, s.rope))
    kv_rows = _mul(s.heads, _add(s.nope, s.v_dim))
    a = f"{at}.self_attn"
    c = f"{canon}.self_attn"
    return [
        Parameter(f"{a}.{name}.weight", "exact", (_add(s.q_lora, s.kv_lora, s.rope), wide), linear, fused),
        _plain(f"{a}.q_a_layernorm.weight", f"{c}.q_a_layernorm.weight", "exact", (s.q_lora,), norm),
        _plain(f"{a}.kv_a_layernorm.weight", f"{c}.kv_a_layernorm.weight", "exact", (s.kv_lora,), norm),
        _plain(f"{a}.q_b_proj.weight", f"{c}.q_b_proj.weight", "column", (q_rows, s.q_lora), linear),
        _plain(f"{a}.kv_b_proj.weight", f"{c}.kv_b_proj.weight", "column", (kv_rows, s.kv_lora), linear),
        _plain(f"{a}.o_proj.weight", f"{c}.o_proj.weight", "row", (s.hidden, _mul(s.heads, s.v_dim)), linear),
    ]


def _layer(i: int, s: Sizes, view: EngineView, contract: Contract) -> list[Parameter]:
    at = {"midlayer": "model.midlayer", "midlayer.N": f"model.midlayer.{i}"}.get(contract["layer_parameter"], f"model.layers.{i}")
    if contract["layer_parameter"] == "midlayer.N" and s.layers == 1:
        at = "model.midlayer"
    canon = f"layers.{i}"
    wide = _mul(2, s.hidden) if i == 0 else s.hidden
    linear, norm = contract["linear_start"], contract["norm_start"]
    out = _mla(at, canon, s, wide, contract) if contract.draft_class == "mla" else _attention(at, canon, s, wide, view, contract)
    gate_up = {p: Slot(f"{canon}.mlp.{p}.weight", s.intermediate) for p in ("gate_proj", "up_proj")}
    out += [
        Parameter(f"{at}.mlp.gate_up_proj.weight", "column", (_mul(2, s.intermediate), s.hidden), linear, gate_up),
        _plain(f"{at}.mlp.down_proj.weight", f"{canon}.mlp.down_proj.weight", "row", (s.hidden, s.intermediate), linear),
    ]
    if contract["mlp_bias"] == "config" and view.flag("mlp_bias"):
        biases = {p: Slot(f"{canon}.mlp.{p}.bias", s.intermediate) for p in ("gate_proj", "up_proj")}
        out.append(Parameter(f"{at}.mlp.gate_up_proj.bias", "column", (_mul(2, s.intermediate),), linear, biases))
        out.append(_plain(f"{at}.mlp.down_proj.bias", f"{canon}.mlp.down_proj.bias", "exact", (s.hidden,), linear))
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for n in norms[1:] if i and contract["layer_parameter"] == "midlayer.N" else norms:  # such a class builds one input norm a layer
        out.append(_plain(f"{at}.{n}.weight", f"{canon}.{n}.weight", "exact", (s.hidden,), norm))
    return out


def wants_norm_before_fc(view: EngineView, contract: Contract) -> bool:
    """The flag as this version reads it: the first place that holds the key wins."""
    for place in contract["norm_before_fc"]:
        where = view.eagle_config if place == "nested" else view.config
        if "norm_before_fc" in where:
            return bool(where["norm_before_fc"])
    return False


def wants_fc_norm(view: EngineView, contract: Contract) -> bool:
    """Whether per-state norms are built (they may still not be applied, behaviour ``fc_norm``)."""
    return contract["fc_norm"] != "ignored" and any(view.flag(k) for k in contract["fc_norm_keys"])


def uses_aux(view: EngineView, contract: Contract) -> bool:
    """False where ``eagle_config.use_aux_hidden_state: false`` is honoured."""
    return not contract["use_aux_flag"] or view.eagle_config.get("use_aux_hidden_state", True) is not False


def build_parameters(view: EngineView, s: Sizes, contract: Contract, target_vocab: int | None) -> dict[str, Parameter]:
    """Every parameter of the draft class, by the engine's name.

    Args:
        target_vocab: vocabulary of the target; None takes the draft config's (newer vLLM builds the mapping only where the two differ).
    """
    norm = contract["norm_start"]
    width = _mul(s.n_aux, s.target_hidden)
    out = [_plain("model.embed_tokens.weight", "embed_tokens.weight", "vocab", (s.vocab, s.hidden), contract["linear_start"])]
    if contract["embedding"] == "refuse-own":
        out = []
    for i in range(s.layers):
        out += _layer(i, s, view, contract)
    no_fc = contract.engine == "vllm" and not uses_aux(view, contract)
    if not no_fc:
        out.append(_plain("model.fc.weight", "fc.weight", "exact", (s.hidden, width), contract["fc_start"]))
        if contract["fc_bias"] == "always" or (contract["fc_bias"] == "config" and view.flag("bias")):
            out.append(_plain("model.fc.bias", "fc.bias", "exact", (s.hidden,), contract["fc_start"]))
        if wants_norm_before_fc(view, contract):
            out.append(_plain("model.input_norm.weight", "input_norm.weight", "exact", (width,), norm))
        if wants_fc_norm(view, contract):
            out += [_plain(f"model.fc_norm.{i}.weight", f"fc_norm.{i}.weight", "exact", (s.target_hidden,), norm) for i in range(s.n_aux)]
    out.append(_plain("model.norm.weight", "norm.weight", "exact", (s.hidden,), norm))
    if not (contract["tie"] == "embedding" and view.flag("tie_word_embeddings")):
        out.append(_plain("lm_head.weight", "lm_head.weight", "vocab", (s.draft_vocab, s.hidden), contract["linear_start"]))
    if contract["d2t_names"] == "replace" and (contract["d2t_full_vocab"] == "accepted" or s.draft_vocab != (target_vocab or s.vocab)):
        out.append(_plain("draft_id_to_target_id", "d2t", "exact", (s.draft_vocab,), "zeros"))
    if contract["d2t_missing"] == "refuse-if-reduced" and s.draft_vocab is not None and s.draft_vocab != s.vocab:
        out.append(_plain("model.d2t", "d2t", "exact", (s.draft_vocab,), "uninitialised"))
    return {p.name: p for p in out}
