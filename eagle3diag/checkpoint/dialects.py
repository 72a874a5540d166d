"""Which training framework wrote this draft, and is it EAGLE-3 at all: table (a) of the dialects, first match wins.

Two questions are kept apart. The *algorithm* is told by the tensors where they decide (a top-level ``hidden_norm``, a ``mask_hidden``, a
q projection over ``2H``) and by the config otherwise. The *dialect* is the framework, told mostly by the config, since SpecForge,
AngelSlim and SafeAILab write identical tensors. What was seen is kept as evidence; without a config the best guess says that it is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3diag.checkpoint.fields import ID_KEYS, as_mapping, as_text, first_text
from eagle3diag.checkpoint.model import Algorithm, Checkpoint, Dialect
from eagle3diag.checkpoint.names import canonical_names, is_fused, spelling
from eagle3diag.errors import escaped

__all__ = ["MODELOPT_KEYS", "recognise", "speculators_version"]

MODELOPT_KEYS = (
    "next_layer_regular",
    "use_mtp_layernorm",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
)
_READERS_OF_STATE = ("q_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj")
_ALGORITHMS: dict[str, Algorithm] = {
    "eagle3": "eagle3",
    "eagle": "eagle1",
    "hass": "hass",
    "peagle": "peagle",
    "p-eagle": "peagle",
    "dflash": "dflash",
    "mtp": "mtp",
}
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the table's tests look at."""

    config: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...]
    arch: str
    eagle: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]  # canonical name -> shape
    spelled: str
    fused: bool
    form: str
    extras: tuple[str, ...]

    def width(self, name: str) -> int | None:
        """Input width of a two-dimensional tensor."""
        shape = self.tensors.get(name)
        return shape[1] if shape is not None and len(shape) == 2 else None

    @property
    def own_width(self) -> int | None:
        """The draft's hidden size as the tensors tell it."""
        for name in ("norm.weight", "layers.0.post_attention_layernorm.weight", "layers.0.input_layernorm.weight"):
            if len(self.tensors.get(name, ())) == 1:
                return self.tensors[name][0]
        shape = self.tensors.get("fc.weight", ())
        return shape[0] if len(shape) == 2 else None


def recognise(checkpoint: Checkpoint, canonical: Mapping[str, str] | None = None) -> tuple[Dialect, Algorithm]:
    """The dialect with its evidence, and the algorithm.

    Args:
        checkpoint: opened; only its configs, headers and form are looked at.
        canonical: ``canonical_names(checkpoint.tensors)`` where the caller has it already.
    """
    names = canonical_names(checkpoint.tensors) if canonical is None else canonical
    config = checkpoint.config
    seen = _Seen(
        config=config,
        others=tuple(c.data for c in checkpoint.configs[1:]),
        arch=first_text(config.get("architectures")) or "",
        eagle=as_mapping(config.get("eagle_config")) or {},
        tensors={c: checkpoint.tensors[f].shape for c, f in names.items()},
        spelled=spelling(checkpoint.tensors),
        fused=any(is_fused(n) for n in names if n.startswith("layers.")),
        form=checkpoint.form,
        extras=checkpoint.extras,
    )
    by_tensors, saw_tensors = _algorithm_of_tensors(seen)
    by_config, saw_config = _algorithm_of_config(seen)
    algorithm = by_tensors or by_config or "unknown"
    if by_config in ("peagle", "hass") and by_tensors in ("eagle3", "eagle1"):
        algorithm = by_config  # tensors alone cannot deny these
    name, confidence, evidence = _dialect(seen, algorithm)
    if saw_tensors:
        evidence.append(saw_tensors)
    if by_tensors and by_config and by_tensors != by_config and algorithm != by_config:
        evidence.append(f"{saw_config} says {by_config}, the tensors say {by_tensors}")
        confidence = "medium" if confidence == "high" else confidence
    return Dialect(name, confidence, tuple(evidence)), algorithm


def _algorithm_of_tensors(s: _Seen) -> tuple[Algorithm | None, str]:
    """What the tensors alone prove, and by what."""
    t, h = s.tensors, s.own_width
    if any(n.startswith(("mtp_layers.", "mtp.")) or "eh_proj." in n or n.startswith(("enorm.", "hnorm.")) for n in t):
        return "mtp", "multi-token-prediction tensors (mtp., eh_proj)"
    widths = [s.width(f"layers.0.self_attn.{p}.weight") for p in _READERS_OF_STATE]
    wide = next((w for w in widths if w), None)
    if "hidden_norm.weight" in t and "fc.weight" in t and (wide is None or wide == t["hidden_norm.weight"][0]):
        return "dflash", "hidden_norm.weight at the top level, attention over H"
    if any(n.startswith(("markov_w1", "markov_w2", "prefix_gru", "embed_proj.")) for n in t):
        return "dflash", "block-draft tensors (prefix_gru, markov_w)"
    if "mask_hidden" in t:
        return "peagle", "mask_hidden"
    if "layers.0.hidden_norm.weight" in t:
        return "eagle3", "layers.0.hidden_norm.weight"
    if wide is not None and h is not None and wide == 2 * h:
        return "eagle3", f"the first layer's attention reads {wide} = 2 x {h}"
    fc = s.width("fc.weight")
    if any(n.startswith(("embedding_layernorm.", "pre_lm_head_layernorm.")) for n in t):
        return "hass", "layernorms around the embedding and the head"
    if fc is not None and t["fc.weight"][0] * 2 == fc and (wide is None or wide == t["fc.weight"][0]):
        return "eagle1", f"fc.weight [{t['fc.weight'][0]}, {fc}] = [H, 2H], no hidden_norm"
    if "d2t" in t or (fc is not None and fc >= 3 * t["fc.weight"][0]):
        return "eagle3", "d2t" if "d2t" in t else f"fc.weight reads {fc}, more than two states"
    return None, ""


def _algorithm_of_config(s: _Seen) -> tuple[Algorithm | None, str]:
    kind = as_text(s.config.get("speculators_model_type"))
    if kind is None and (nested := as_mapping(s.config.get("speculators_config"))):
        kind = as_text(nested.get("algorithm"))
    if kind is not None:
        return _ALGORITHMS.get(kind.lower()), f"speculators_model_type {escaped(kind)}"
    arch = s.arch.lower()
    if "dflash_config" in s.config or "dflash" in arch:
        return "dflash", "dflash_config" if "dflash_config" in s.config else f"architectures {escaped(s.arch)}"
    words: tuple[tuple[str, Algorithm], ...] = (
        ("peagle", "peagle"),
        ("eagle3", "eagle3"),
        ("eagle", "eagle1"),
        ("mtp", "mtp"),
        ("nextn", "mtp"),
    )
    for word, algorithm in words:
        if word in arch:
            return algorithm, f"architectures {escaped(s.arch)}"
    if any(k in s.config for k in ("draft_vocab_size", "eagle_config", *ID_KEYS)):
        return "eagle3", "draft_vocab_size or aux layer ids"
    return None, ""


def _dialect(s: _Seen, algorithm: Algorithm) -> tuple[str, Confidence, list[str]]:
    """Table (a); algorithms that are dialects of their own come with it."""
    c, arch = s.config, escaped(s.arch)
    if "speculators_model_type" in c:
        return "speculators", "high", [f"speculators_model_type {escaped(c['speculators_model_type'])}", _version_seen(c)]
    if "speculators_config" in c or "transformer_layer_config" in c:
        return "speculators", "medium", ["speculators_config or transformer_layer_config, but no speculators_model_type"]
    if algorithm in ("dflash", "mtp", "peagle"):
        told = "dflash_config" in c or algorithm in s.arch.lower() or bool(s.tensors)
        return algorithm, "high" if told else "medium", [f"architectures {arch}" if arch else "no architecture stated"]
    if s.form == "training_state":
        return "specforge-training", "high", ["training_state.pt with draft_state_dict"]
    if algorithm in ("eagle1", "hass"):
        converted = [f"architectures {arch}" if arch else "no architecture stated"]
        return algorithm, "high" if s.tensors else "medium", converted
    if algorithm == "eagle3" and any(s.tensors.get(f"layers.0.self_attn.{p}.weight") for p in ("q_a_proj", "kv_a_proj_with_mqa")):
        by = "ModelOpt's eagle_config" if any(k in s.eagle for k in MODELOPT_KEYS) else "trainer not recorded"
        return "mla-eagle3", "high", ["latent attention (q_a_proj or kv_a_proj_with_mqa) over 2H", by]
    if "Eagle3Deepseek" in s.arch and not s.tensors:
        return "mla-eagle3", "medium", [f"architectures {arch}"]
    keys = [k for k in MODELOPT_KEYS if k in s.eagle]
    if s.spelled == "midlayer.0" or s.arch.endswith("Eagle3Deep"):
        saw = "decoder layers named midlayer.{i}" if s.spelled == "midlayer.0" else f"architectures {arch}"
        return "modelopt-megatron-deep", "high", [saw]
    if keys:
        shown = [f"eagle_config.{k}" for k in keys[:2]] + ([f"{s.spelled}.*"] if s.spelled else [])
        if s.spelled == "midlayer":
            return "modelopt-megatron", "high", shown
        return "modelopt", "high" if s.spelled == "layers.0" else "medium", shown
    if s.fused:
        return "engine-dump", "high", ["fused qkv_proj or gate_up_proj: names of a running engine"]
    return _by_spelling(s)


def _by_spelling(s: _Seen) -> tuple[str, Confidence, list[str]]:
    """Rows 8 to 11 and what is left: frameworks that differ by names, architecture and t2d only."""
    c, arch = s.config, escaped(s.arch)
    t2d, mid, plain = "t2d" in s.tensors, s.spelled == "midlayer", s.spelled == "layers.0"
    vllm_class = s.arch.startswith("Eagle3") and s.arch.endswith("ForCausalLM")
    if "aux_hidden_states_layer_ids" in c:
        return "angelslim", "high", ["aux_hidden_states_layer_ids"]
    if s.arch == "Eagle3LlamaForCausalLM" and mid:
        return "angelslim", "medium", [f"architectures {arch}", "midlayer.*"]
    if s.arch == "LlamaForCausalLMEagle3" and mid:
        saw = [f"architectures {arch}", "midlayer.*"]
        if not t2d:
            return "specforge", "low", [*saw, "no t2d: SpecForge's exporter demands one, so a conversion for SGLang is as likely"]
        trainer = "training_state.pt" in s.extras or "target_model_type" in c
        export = "embed_tokens: hf export" if "embed_tokens.weight" in s.tensors else "no embed_tokens: sglang export"
        return "specforge", "high" if trainer else "medium", [*saw, "t2d", export]
    if (s.arch == "LlamaForCausalLMEagle3" or vllm_class) and plain:
        if not t2d and not vllm_class:
            trimmed = "layers.0.* without t2d: ModelOpt's HF export with its eagle_config trimmed"
            return "modelopt", "medium", [f"architectures {arch}", trimmed]
        saw = [f"architectures {arch}", "layers.0.*", "t2d" if t2d else "no t2d"]
        if any("speculators_model_type" in o or "speculators_config" in o for o in s.others):
            return "flat-export", "high", [*saw, "a speculators config beside it"]
        return "flat-export", "medium", [*saw, "a flat export of a speculators-trained draft"]
    if s.arch == "LlamaForCausalLM" and mid and (s.form == "torch" or "draft_vocab_size" in c):
        last = "pytorch_model.bin" if s.form == "torch" else "draft_vocab_size"
        return "safeailab", "high" if s.form == "torch" else "medium", [f"architectures {arch}", "midlayer.*", last]
    said = f"architectures {arch} is no name a trainer writes" if arch else "no config to tell the framework by"
    if mid:
        name = "safeailab" if s.form == "torch" else "specforge"
        return name, "low", [said, "midlayer.*: SpecForge, AngelSlim and SafeAILab write identical tensors"]
    if plain:
        habit = "layers.0.* with t2d: speculators or a flat export of it" if t2d else "layers.0.* without t2d: ModelOpt's habit"
        return ("flat-export" if t2d else "modelopt"), "low", [said, habit]
    if s.spelled == "mixed":
        return "unknown", "low", [said, "the first decoder layer stands there under two names"]
    return "unknown", "low", [said, *([] if s.tensors else ["no tensors"])]


def speculators_version(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """``(0, 4)`` from ``speculators_version``; by leaked class variables a version up to 0.4 is told as ``(0, 4)``; None if unknown."""
    text = as_text(config.get("speculators_version"))
    if text is not None:
        parts = text.split(".")
        if len(parts) >= 2 and all(p.isascii() and p.isdigit() and len(p) < 5 for p in parts[:2]):
            return int(parts[0]), int(parts[1])
    if "has_no_defaults_at_init" in config:
        return 0, 4
    return None


def _version_seen(config: Mapping[str, Any]) -> str:
    text = as_text(config.get("speculators_version"))
    if text is not None:
        return f"speculators_version {escaped(text)}"
    if "has_no_defaults_at_init" in config:
        return "has_no_defaults_at_init: probably speculators 0.4 or older"
    if "norm_output" in config or "fc_norm" in config:
        return "norm_output or fc_norm: speculators 0.7 or newer"
    return "no speculators_version"
