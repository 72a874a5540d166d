"""The draft config as one engine version sees it.

An engine reads ``config.json`` only, in its own way: a flat file as it is, a speculators file through a converter that copies
``transformer_layer_config`` and a short list of top-level keys (behaviour ``speculators_copies``) and loses the rest. Everything the
loader and the forward pass are simulated from is asked of this view, never of the normalised spec, because the two differing is what
goes wrong. Where the checkpoint has no readable config the spec's facts from tensor shapes stand in (``stand_in``), so that names and
shapes are still judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.engines.model import Contract, Refusal

__all__ = ["EngineView", "Sizes", "engine_view", "is_speculators"]


def is_speculators(config: Mapping[str, Any]) -> bool:
    """True for the nested schema (any of its three marks)."""
    return any(config.get(k) is not None for k in ("speculators_config", "transformer_layer_config", "speculators_model_type"))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes the engine builds its parameters with; None where the config does not say."""

    hidden: int | None  #: H, draft hidden size
    target_hidden: int | None  #: TH, width of one captured state
    n_aux: int
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    intermediate: int | None
    vocab: int | None  #: rows of the embedding
    draft_vocab: int | None  #: rows of lm_head
    layers: int  #: decoder layers that are built
    q_lora: int | None = None
    kv_lora: int | None = None
    nope: int | None = None
    rope: int | None = None
    v_dim: int | None = None


@dataclass(frozen=True, slots=True)
class EngineView:
    """A flat config, where it came from, and what stopped the engine from making it.

    Attributes:
        config: the flat config the draft class is built from.
        architecture: the string that is looked up, after renames.
        draft_class: ``llama``, ``qwen3``, ``mla``, or None where the architecture is not an EAGLE-3 class of this version.
        stand_in: True where no config could be read and tensor shapes stand in.
        lost: top-level keys of a speculators config that the converter does not copy.
    """

    config: Mapping[str, Any]
    architecture: str | None
    draft_class: str | None
    refusal: Refusal | None = None
    stand_in: bool = False
    lost: tuple[str, ...] = ()
    speculators: bool = False
    eagle_config: Mapping[str, Any] = field(default_factory=dict)

    def flag(self, key: str) -> bool:
        """A boolean key as the engine's ``getattr(config, key, False)`` reads it."""
        return bool(self.config.get(key))


def _renamed(arch: str, how: str) -> str:
    if how == "prefix" and not arch.startswith("Eagle3"):
        return "Eagle3" + arch
    if how == "keep" and not (arch.startswith("Eagle3") or arch.endswith("Eagle3")):
        return "Eagle3" + arch
    return arch


def _from_speculators(raw: Mapping[str, Any], contract: Contract) -> EngineView:
    layer = raw.get("transformer_layer_config")
    if not contract["reads_speculators"]:
        arch = _first_arch(raw)
        why = f"{contract.label} reads no speculators config (transformer_layer_config, speculators_config)"
        return EngineView(
            dict(layer) if isinstance(layer, dict) else {},
            arch,
            None,
            Refusal(
                "construct",
                f"ValueError: model architectures [{arch!r}] are not supported; the config has no model_type",
                why,
                "reads_speculators",
            ),
            speculators=True,
        )
    if not isinstance(layer, dict):
        return EngineView(
            {},
            None,
            None,
            Refusal(
                "construct",
                "TypeError: 'transformer_layer_config' must be a dictionary",
                "no layer config in the speculators config",
                "reads_speculators",
            ),
            speculators=True,
        )
    flat: dict[str, Any] = dict(layer)
    kind = raw.get("speculators_model_type", "eagle3")
    for key in contract["speculators_copies"]:
        if raw.get(key) is not None:
            flat[key] = raw[key]
    flat.setdefault("draft_vocab_size", None)
    if "norm_before_residual" not in raw:
        flat["norm_before_residual"] = contract["speculators_residual_default"] and kind == "eagle3"
    lost = tuple(
        k
        for k in ("norm_before_fc", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
        if raw.get(k) and k not in contract["speculators_copies"]
    )
    draft_class, arch, refusal = "llama", "Eagle3LlamaForCausalLM", None
    if contract["speculators_architecture"] == "by-model-type":
        model_type = layer.get("model_type", "llama")
        if model_type == "qwen3":
            draft_class, arch = "qwen3", "Eagle3Qwen3ForCausalLM"
        elif model_type != "llama":
            refusal = Refusal(
                "construct",
                f"ValueError: Unsupported model_type {model_type} for Eagle3 speculator",
                "only llama and qwen3 layers",
                "speculators_architecture",
            )
    if kind not in contract["speculators_types"]:
        text = f"ValueError: Expected one of: {contract['speculators_types']}, got speculators_model_type {kind!r}"
        refusal = Refusal("construct", text, "another algorithm", "speculators_types")
    return EngineView(flat, arch, draft_class, refusal, lost=lost, speculators=True)


def _first_arch(raw: Mapping[str, Any]) -> str | None:
    archs = raw.get("architectures")
    return archs[0] if isinstance(archs, list) and archs and isinstance(archs[0], str) else None


def _stand_in(spec: DraftSpec) -> dict[str, Any]:
    """Config keys guessed from tensor shapes, for a checkpoint without a readable config."""
    pairs = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_aux_hidden_states": spec.n_aux,
    }
    return {k: v.value for k, v in pairs.items() if v.value is not None} | {"num_hidden_layers": max(spec.layers_in_file, 1)}


def engine_view(draft: Checkpoint, spec: DraftSpec, contract: Contract) -> EngineView:
    """The flat config this engine version builds the draft from, and the class that reads it."""
    raw = draft.config
    if not raw:
        return EngineView(_stand_in(spec), None, spec.draft_class, stand_in=True)
    if is_speculators(raw):
        return _from_speculators(raw, contract)
    eagle_config = raw.get("eagle_config")
    nested = eagle_config if isinstance(eagle_config, dict) else {}
    arch = _first_arch(raw)
    looked_up = _renamed(arch, contract["architecture_rename"]) if arch else None
    known: Mapping[str, str] = contract["architectures"]
    draft_class = known.get(looked_up or "")
    refusal = None
    if contract["architecture_rename"] == "ignored":
        draft_class = "llama"
    elif contract["architecture_rename"] == "by-kv-lora-rank":
        draft_class = "mla" if raw.get("kv_lora_rank") else "llama"
    elif draft_class is None:
        refusal = Refusal(
            "construct",
            f"ValueError: Model architectures [{looked_up!r}] are not supported for now"
            if arch
            else "ValueError: the config names no architectures",
            f"{contract.label} knows {', '.join(sorted(known))} as EAGLE-3 drafts, the config says {arch or 'nothing'}",
            "architectures",
        )
    if "eagle_config" in raw and eagle_config is None and contract["eagle_config_null"] == "refuse":
        refusal = refusal or Refusal(
            "start", "AttributeError: 'NoneType' object has no attribute 'get'", "eagle_config is null", "eagle_config_null"
        )
    return EngineView(raw, looked_up, draft_class, refusal, eagle_config=nested)


def read_n_aux(view: EngineView, contract: Contract) -> int:
    """Number of concatenated states the engine builds ``fc`` for (behaviour ``n_aux``)."""
    for place in contract["n_aux"]:
        if place == "3":
            break
        value = {
            "nested-ids": view.eagle_config.get("eagle_aux_hidden_state_layer_ids"),
            "top-ids": view.config.get("eagle_aux_hidden_state_layer_ids"),
        }.get(place, view.config.get(place))
        if isinstance(value, list) and value:
            return len(value)
        if (count := _count(value)) is not None:
            return count
    return 3


def sizes(view: EngineView, contract: Contract, spec: DraftSpec) -> Sizes:
    """Sizes as the draft class derives them; a key of the wrong type falls back to the tensors' shapes."""
    c = view.config
    hidden = _count(c.get("hidden_size")) or spec.hidden_size.value
    heads = _count(c.get("num_attention_heads")) or spec.num_heads.value
    head_dim = _count(c.get("head_dim")) or (hidden // heads if hidden and heads else spec.head_dim.value)
    vocab = _count(c.get("vocab_size")) or spec.vocab_size.value
    draft_vocab = _count(c.get("draft_vocab_size"))
    if draft_vocab is None:
        rule = contract["draft_vocab_null" if "draft_vocab_size" in c else "draft_vocab_absent"]
        draft_vocab = vocab if rule in ("vocab_size", "target-head") else spec.draft_vocab_size.value
    built = _count(c.get("num_hidden_layers")) or max(spec.layers_in_file, 1)
    if contract["draft_layers"] != "any":
        built = 1
    return Sizes(
        hidden=hidden,
        target_hidden=_count(c.get("target_hidden_size")) or hidden,
        n_aux=read_n_aux(view, contract),
        heads=heads,
        kv_heads=_count(c.get("num_key_value_heads")) or heads,
        head_dim=head_dim,
        intermediate=_count(c.get("intermediate_size_mlp" if c.get("model_type") == "llama4_text" else "intermediate_size"))
        or spec.intermediate_size.value,
        vocab=vocab,
        draft_vocab=draft_vocab,
        layers=min(built, 256),
        q_lora=_count(c.get("q_lora_rank")),
        kv_lora=_count(c.get("kv_lora_rank")),
        nope=_count(c.get("qk_nope_head_dim")),
        rope=_count(c.get("qk_rope_head_dim")),
        v_dim=_count(c.get("v_head_dim")),
    )
