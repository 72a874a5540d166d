"""The forward pass an engine version would run with what it loaded: the effective ``Wiring``, and what it does not honour.

Formulas: docs/facts/engines.md section 5, dialects.md section 3. RoPE is read as behaviour ``rope_keys`` says; what the draft was trained
with is ``DraftSpec.wiring``, and the difference of the two is what rules judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.engines.model import AuxCapture, Contract, FcState
from eagle3diag.engines.parameters import uses_aux, wants_fc_norm, wants_norm_before_fc
from eagle3diag.engines.view import EngineView, Sizes

__all__ = ["flags_defaulted", "flags_ignored", "quirks", "rope", "wiring"]


def _scaling(value: Any) -> dict[str, Any] | None:
    """A scaling dict without its theta, or None where it scales nothing."""
    if not isinstance(value, dict):
        return None
    kind = value.get("rope_type", value.get("type"))
    rest = {k: v for k, v in value.items() if k != "rope_theta"}
    if kind in (None, "default") and "factor" not in rest and "mrope_section" not in rest:
        return None
    return rest


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def rope(view: EngineView, contract: Contract) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None) as this version reads the draft config."""
    c, rule = view.config, contract["rope_keys"]
    default = contract["rope_default_theta"]
    params = c.get("rope_parameters")
    legacy_theta, legacy_scaling = _number(c.get("rope_theta")), _scaling(c.get("rope_scaling"))
    if rule == "legacy" or not isinstance(params, dict):
        theta = legacy_theta if legacy_theta is not None else default
        if rule == "mla-rebuilt" and legacy_scaling is None:
            theta = default
        nested = c.get("rope_scaling")
        if rule != "legacy" and legacy_theta is None and isinstance(nested, dict) and _number(nested.get("rope_theta")) is not None:
            theta = float(nested["rope_theta"])
        return theta, legacy_scaling
    theta_in = _number(params.get("rope_theta"))
    if rule == "parameters-transformers4" and not view.speculators:
        # the config class fills rope_theta with its default, which then overwrites the dict
        theta = legacy_theta if legacy_theta is not None else default
    else:
        theta = next((t for t in (theta_in, legacy_theta) if t is not None), default)
    if rule == "mla-rebuilt" and legacy_scaling is None:
        theta = default
    return theta, _scaling(params)


def _window(view: EngineView, contract: Contract) -> int | None:
    if contract["sliding_window"] == "ignored":
        return None
    kinds = view.config.get("layer_types")
    window = view.config.get("sliding_window")
    if isinstance(kinds, list) and "sliding_attention" in kinds and isinstance(window, int) and not isinstance(window, bool):
        return window
    return None


def _head(
    s: Sizes, never: Mapping[str, str], filled: Mapping[str, str], view: EngineView, contract: Contract, algorithm: str
) -> Literal["draft", "target", "target-first-rows", "embedding", "uninitialised"]:
    if contract["tie"] == "embedding" and view.flag("tie_word_embeddings"):
        return "embedding"
    reduced = s.draft_vocab is not None and s.vocab is not None and s.draft_vocab < s.vocab
    if algorithm == "eagle":
        return "target-first-rows" if reduced and contract["eagle_path"] == "bypass-cut" else "target"
    start = never.get("lm_head.weight")
    if start == "target":
        return "target-first-rows" if reduced else "target"
    return "draft" if start is None else "uninitialised"


def wiring(
    view: EngineView,
    s: Sizes,
    contract: Contract,
    spec: DraftSpec,
    aux: AuxCapture,
    fc: FcState,
    filled: Mapping[str, str],
    never: Mapping[str, str],
    algorithm: str,
) -> Wiring:
    """The effective wiring of the served draft."""
    theta, scaling = rope(view, contract)
    final = algorithm != "eagle3" or not uses_aux(view, contract)
    reduced = not (s.draft_vocab is not None and s.draft_vocab == s.vocab)
    mapped = "d2t" in filled and contract["d2t_applied"] and algorithm == "eagle3"
    has_fc = "fc.weight" in filled or "fc.weight" in never
    embed = never.get("embed_tokens.weight")
    policy_target = contract["embedding"] in ("target-always", "refuse-own", "target-if-same-shape")
    own_embed = "embed_tokens.weight" in filled and not (policy_target and embed is None and s.target_hidden == s.hidden)
    return Wiring(
        aux_layers=None if final else aux.prefill_hf,
        aux_layers_verify=aux.verify_hf if not final and aux.verify_hf != aux.prefill_hf else None,
        state="final" if final else "aux",
        fc="applied" if fc.runs else "bypassed" if has_fc else "absent",
        norm_before_fc=wants_norm_before_fc(view, contract) and fc.runs,
        fc_norm=contract["fc_norm"] == "config" and wants_fc_norm(view, contract) and fc.runs,
        norm_before_residual=contract["norm_before_residual"] == "config" and view.flag("norm_before_residual"),
        norm_output=contract["norm_output"] == "config" and view.flag("norm_output"),
        deep_layer_norm=contract["deep_layer_norm"],
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_window(view, contract),
        position_gap=contract["position_gap"],
        mapping="offset" if mapped else "missing" if reduced else "none",
        embedding="draft" if own_embed else "target" if embed in (None, "target") else "uninitialised",
        head=_head(s, never, filled, view, contract, algorithm),
        unfilled={k: v for k, v in never.items() if v != "target" and k != "d2t"},
    )


def flags_ignored(view: EngineView, contract: Contract, spec: DraftSpec, draft: Checkpoint) -> dict[str, str]:
    """Flags the draft's config sets, and relies on, that this version does not honour: ``{flag: why}``."""
    return dict(_ignored(view, contract, spec, draft))


def _ignored(view: EngineView, contract: Contract, spec: DraftSpec, draft: Checkpoint) -> Iterator[tuple[str, str]]:
    w, label = spec.wiring, contract.label
    asks_fc = w.norm_before_fc or bool(spec.norm_before_fc.value)
    if w.norm_before_residual and contract["norm_before_residual"] == "ignored":
        yield "norm_before_residual", f"{label} never reads it: the residual of layer 0 stays un-normalised"
    if asks_fc and not wants_norm_before_fc(view, contract):
        yield "norm_before_fc", f"{label} does not read it where it stands: the states reach fc un-normalised"
    if (w.fc_norm or spec.fc_norm.value) and not (contract["fc_norm"] == "config" and wants_fc_norm(view, contract)):
        how = "loads the norms and never applies them" if contract["fc_norm"] == "loaded-not-applied" else "does not read it"
        yield "fc_norm", f"{label} {how}: the states reach fc un-normalised"
    if w.norm_output and not (contract["norm_output"] == "config" and view.flag("norm_output")):
        yield "norm_output", f"{label} does not read it: the state before the final norm is fed back"
    if spec.use_aux_hidden_state.value is False and not contract["use_aux_flag"]:
        yield "use_aux_hidden_state", f"{label} ignores false: it hands over auxiliary states and runs fc"
    canonical = spec.canonical
    if (
        spec.attention_bias.value
        and contract["qkv_bias"] == "never"
        and any(f"layers.0.self_attn.{p}_proj.bias" in canonical for p in "qkv")
    ):
        yield "attention_bias", f"{label} builds q/k/v without biases: the trained biases are dropped"
    if spec.mlp_bias.value and contract["mlp_bias"] == "ignored" and "layers.0.mlp.down_proj.bias" in canonical:
        yield "mlp_bias", f"{label} builds the MLP without biases: the trained biases are dropped"
    if w.sliding_window is not None and contract["sliding_window"] == "ignored":
        yield "sliding_window", f"{label} ignores it in the draft config: attention is full, training had a window of {w.sliding_window}"
    scale = draft.config.get("logit_scale")
    if contract.engine == "sglang" and isinstance(scale, int | float) and scale != 1:
        yield "logit_scale", f"{label} ignores it: logits are not scaled by {scale}"


def flags_defaulted(view: EngineView, contract: Contract, spec: DraftSpec) -> dict[str, str]:
    """Flags this version fills or understands otherwise than the trainer did: ``{flag: why}``."""
    out: dict[str, str] = {}
    if view.speculators and "norm_before_residual" in view.config and not spec.norm_before_residual.known and contract["reads_speculators"]:
        value = bool(view.config["norm_before_residual"])
        out["norm_before_residual"] = (
            f"absent from the speculators config: {contract.label} assumes {str(value).lower()}, the trainer's default is false"
        )
    if contract["norm_output"] == "config" and view.flag("norm_output") and not spec.wiring.norm_output:
        out["norm_output"] = (
            f"in this dialect it means a final norm before lm_head; {contract.label} reads it as feeding back the normalised state"
        )
    return out


def quirks(contract: Contract) -> dict[str, str]:
    """Position and feedback quirks of this version that cost acceptance by themselves."""
    out = {}
    if contract["position_gap"]:
        fact = contract.facts["position_gap"]
        out["position_gap"] = f"{contract.label} skips {fact.value} position before the second draft step"
    return out
