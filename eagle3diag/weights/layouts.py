"""The layouts a draft can be rewritten in: what each calls the tensors, where it keeps each fact, and what it cannot hold.

What an engine honours is asked of its contract, so a goal with a version (``sglang==0.5.9``) is judged for that version and one without
for the newest. Two facts that no contract tells stand here with their release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eagle3diag.checkpoint.configs import layer_part
from eagle3diag.checkpoint.fields import ID_KEYS, as_mapping
from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.engines import versions
from eagle3diag.engines.contract import load_contract
from eagle3diag.engines.model import Contract
from eagle3diag.errors import UsageError, escaped
from eagle3diag.weights.pieces import ROLES, role

__all__ = ["LAYOUTS", "Goal", "aux_places", "config_for", "goal_name", "lacking", "parse_goal"]

LAYOUTS = ("sglang", "vllm", "speculators")

#: feature -> the behaviour of an engine's contract that decides it, and when its value honours the feature. ``mla_`` in front asks the
#: contract of that draft class; a feature that stands nowhere here is never honoured.
_BEHAVIOURS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "layers": ("draft_layers", lambda value: value == "any"),
    "sliding_window": ("sliding_window", lambda value: value == "config"),
    "trained_embedding": ("embedding", lambda value: value in ("own-if-present", "own-unless-equal")),
    "one_aux": ("fc_condition", lambda value: value == "always"),
    "n_aux": ("n_aux", lambda value: value != ["3"]),
    "aux_ids": ("aux_ids_from", bool),
    "use_aux_hidden_state": ("use_aux_flag", lambda value: value is True),
    "norm_before_residual": ("norm_before_residual", lambda value: value == "config"),
    "norm_before_fc": ("norm_before_fc", bool),
    "fc_norm": ("fc_norm", lambda value: value == "config"),
    "norm_output": ("norm_output", lambda value: value == "config"),
    "fc_bias": ("fc_bias", lambda value: value != "never"),
    "attention_bias": ("qkv_bias", lambda value: value == "config"),
    "mlp_bias": ("mlp_bias", lambda value: value == "config"),
    "mla": ("architectures", lambda value: "mla" in value.values()),
    "qk_norm": ("architectures", lambda value: "qwen3" in value.values()),
    "mla_fc_norm": ("fc_norm", lambda value: value == "config"),
    "mla_norm_output": ("norm_output", lambda value: value == "config"),
    "mla_norm_before_fc": ("norm_before_fc", bool),
}
#: what no behaviour of a contract tells: (engine, feature) -> first release that honours it
_SINCE = {("vllm", "aux_layer_0"): "0.18.0", ("vllm", "logit_scale"): "0"}
#: what the speculators format has a key or a tensor for, of whatever version
_FORMAT = frozenset(
    (
        *("layers", "sliding_window", "trained_embedding", "one_aux", "n_aux", "aux_ids", "aux_layer_0", "norm_before_residual"),
        *("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "qk_norm", "logit_scale"),
    )
)

_OWN_KEYS = frozenset(
    (
        *("architectures", "auto_map", "eagle_config", "transformer_layer_config", "speculators_config", "speculators_model_type"),
        *("speculators_version", "has_no_defaults_at_init", "target_model_type"),
        *ID_KEYS,
        *("num_aux_hidden_states", "rope_theta", "rope_scaling", "rope_parameters"),
        *("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "use_aux_hidden_state"),
        *("dtype", "torch_dtype", "draft_vocab_size", "target_hidden_size", "verifier_name_or_path", "transformers_version"),
    )
)

#: keys that stay at the top level of a speculators config
_TOP_KEYS = ("quantization_config", "embed_requires_grad", "tie_word_embeddings")

_COUNTS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
_NEEDED = ("hidden_size", "intermediate_size", "num_heads", "vocab_size", "draft_vocab_size")


@lru_cache(maxsize=16)
def _contract(engine: str, version: str | None, draft_class: str) -> Contract:
    return load_contract(engine, version, draft_class=draft_class)


@dataclass(frozen=True, slots=True)
class Goal:
    """A layout, and the release it is for: None stands for the newest."""

    layout: str
    version: str | None = None
    text: str = ""

    def honours(self, feature: str, draft_class: str = "llama") -> bool:
        """Whether this reader acts on a feature of a draft of that class."""
        if self.layout == "speculators":
            return feature in _FORMAT
        since = _SINCE.get((self.layout, feature))
        if since is not None:
            return self.version is None or versions.at_least(self.version, since)
        behaviour, honoured = _BEHAVIOURS.get(feature, ("", bool))
        if not behaviour:
            return False
        kind = "mla" if feature.startswith("mla_") else draft_class
        return honoured(_contract(self.layout, self.version, kind)[behaviour])


def parse_goal(text: str) -> Goal:
    """``sglang``, ``vllm``, ``speculators``, or one of the engines with a release: ``sglang==0.5.9``.

    Raises:
        UsageError: another layout, or a version that is none.
    """
    layout, named, version = text.strip().lower().partition("==")
    known = ", ".join(LAYOUTS)
    if layout not in LAYOUTS:
        raise UsageError(f"{escaped(text)} is no layout to convert to: known are {known}; an engine may name its release: sglang==0.5.9")
    if not named:
        return Goal(layout, None, text.strip())
    try:
        versions.parse(version)
    except UsageError:
        raise UsageError(f"{escaped(text)}: {escaped(version)} is no release; write for example {layout}==0.5.9") from None
    return Goal(layout, version.strip(), text.strip())


def features(checkpoint: Checkpoint, spec: DraftSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """What this draft asks of its reader beyond the plain case: ``(feature, in words, canonical names of its tensors)``."""
    w, names = spec.wiring, tuple(spec.canonical)
    mla = spec.draft_class == "mla"

    def having(*ends: str) -> tuple[str, ...]:
        return tuple(n for n in names if n.endswith(ends))

    if mla:
        yield "mla", "latent attention (q_a_proj, kv_a_proj_with_mqa)", ()
    if spec.layers_in_file > 1:
        yield "mla_layers" if mla else "layers", f"{spec.layers_in_file} decoder layers", ()
    hidden, wide, n_aux = spec.hidden_size.value, spec.target_hidden_size.value, spec.n_aux.value
    if n_aux is not None and n_aux != 3:
        yield "n_aux", f"{n_aux} aux states instead of 3", ()
        if n_aux == 1 and hidden == wide:
            yield "one_aux", f"one aux state of the draft's own width {hidden}: fc would be bypassed", ()
    if w.norm_before_residual:
        yield "norm_before_residual", "norm_before_residual true: the residual is the normed state", ()
    if w.norm_before_fc:
        yield "mla_norm_before_fc" if mla else "norm_before_fc", "input_norm in front of fc", having("input_norm.weight")
    if w.fc_norm:
        yield (
            "mla_fc_norm" if mla else "fc_norm",
            "one norm per aux state in front of fc",
            tuple(n for n in names if n.startswith("fc_norm.")),
        )
    if w.norm_output:
        yield "mla_norm_output" if mla else "norm_output", "the state fed back is post-norm", ()
    if not w.final_norm:
        yield "final_norm", "trained without a final norm, which every reader applies", ()
    if w.double_norm:
        yield "double_norm", "ModelOpt trained with input_layernorm in front of hidden_norm, which no reader does", ()
    if w.state == "final":
        yield "use_aux_hidden_state", "use_aux_hidden_state false: fed with the last state", ()
    if w.sliding_window is not None:
        yield "sliding_window", f"attention window of {w.sliding_window} tokens", ()
    if w.embedding == "draft" and (hidden == wide or wide is None):
        yield "trained_embedding", "embeddings trained with the draft would be replaced by the target's", ()
    if found := having(".q_norm.weight", ".k_norm.weight"):
        yield "qk_norm", "q_norm and k_norm", found
    if found := having(".q_proj.bias", ".k_proj.bias", ".v_proj.bias", ".qkv_proj.bias"):
        yield "attention_bias", "biases of q, k and v", found
    if found := tuple(n for n in names if ".mlp." in n and n.endswith(".bias")):
        yield "mlp_bias", "biases in the MLP", found
    if "fc.bias" in names:
        yield "fc_bias", "fc.bias", ("fc.bias",)
    if layer_part(checkpoint.configs[0])[1].get("logit_scale", 1) not in (None, 1):
        yield "logit_scale", "logit_scale other than 1", ()
    if spec.aux.hf is not None:
        yield "aux_ids", f"aux layers {list(spec.aux.hf)} (HF)", ()
        if 0 in spec.aux.hf:
            yield "aux_layer_0", "the embedding output (HF 0) among the aux layers", ()
    for name in names:
        if not any(part in ROLES or part == "fc_norm" for part in name.split(".")) and role(name) not in ROLES:
            yield name, "a tensor the format does not know", (name,)


def lacking(checkpoint: Checkpoint, spec: DraftSpec, goal: Goal) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Features the goal cannot hold: name -> (in words, canonical names of the tensors that go with it)."""
    return {
        feature.removeprefix("mla_") if feature.startswith("mla_") else feature: (why, tensors)
        for feature, why, tensors in features(checkpoint, spec)
        if not goal.honours(feature, "qwen3" if spec.draft_class == "qwen3" else "llama")
    }


def goal_name(canonical: str, goal: Goal, spec: DraftSpec) -> str:
    """What the goal calls a tensor.

    SGLang: every release knows ``midlayer.``, only newer ones ``layers.N.``; deeper layers' input norm is its ``hidden_norm``.
    """
    if goal.layout != "sglang":
        return canonical
    parts = canonical.split(".")
    if parts[0] == "layers" and len(parts) > 3 and parts[1] != "0" and parts[2] == "input_layernorm":
        other = ".".join([*parts[:2], "hidden_norm", *parts[3:]])
        return canonical if other in spec.canonical else other
    return f"midlayer.{canonical[9:]}" if canonical.startswith("layers.0.") and not plain_names(goal, spec) else canonical


def plain_names(goal: Goal, spec: DraftSpec) -> bool:
    """Whether an SGLang goal is written with ``layers.0.*``.

    A draft with a feature that needs a release which knows these names anyway gets them; that also keeps ``norm_output`` from
    being read in SpecForge's own meaning, which goes with ``midlayer.*``.
    """
    if goal.version is not None:
        return "layers.N." in _contract(goal.layout, goal.version, "llama")["layer_names"]
    w = spec.wiring
    return spec.layers_in_file > 1 or spec.n_aux.value not in (None, 3) or w.fc_norm or w.norm_output or w.norm_before_fc


def aux_places(spec: DraftSpec, goal: Goal) -> tuple[dict[str, list[int]], str]:
    """Where the ids go and as what: ``{"top": HF indices, "nested": layer outputs}``, and a doubt in words or an empty text.

    Ids that stay in the place they stand in keep their numbers, doubt and all. Moving them means choosing a reading; where two places
    say the same by their own habits, both engines and every later reader agree, so both are written.
    """
    aux = spec.aux
    if aux.raw is None or aux.hf is None:
        return {}, ""
    native = "nested" if goal.layout == "sglang" else "top"
    nested = "eagle_config." in aux.where or "aux_hidden_states_layer_ids" in aux.where
    doubtful = not aux.settled and len(aux.readings) > 1
    if (
        doubtful
        and native == ("nested" if nested else "top")
        and "eagle_aux_hidden_state_layer_ids" in aux.where
        and goal.layout != "speculators"
    ):
        return {native: list(aux.raw)}, ""
    places = {"top": list(aux.hf), "nested": [k - 1 for k in aux.hf]}
    if goal.layout == "speculators" or 0 in aux.hf:
        del places["nested"]
    # nested ids of a trainer that writes them so are layer outputs; in a hand-made export they may be either
    if doubtful and nested and spec.dialect.name in ("flat-export", "engine-dump", "unknown", "mla-eagle3"):
        said = " or ".join(f"HF {list(r.hf)}" for r in aux.readings)
        return places, f"{aux.where} {list(aux.raw)} may mean {said}"
    return places, ""


def config_for(checkpoint: Checkpoint, spec: DraftSpec, goal: Goal, places: Mapping[str, list[int]]) -> dict[str, Any]:
    """The goal's ``config.json``.

    Raises:
        UsageError: a size every reader needs is stated nowhere.
    """
    missing = [n for n in _NEEDED if getattr(spec, n).value is None]
    if missing:
        gone = f"{', '.join(missing)} stated nowhere"
        raise UsageError(f"{escaped(checkpoint.path, 300)}: cannot write a config, {gone}; put the draft's config.json beside it")
    source = checkpoint.configs[0]
    top, (_, layer) = source.data, layer_part(source)
    base = {k: v for k, v in layer.items() if k not in _OWN_KEYS and k not in _TOP_KEYS}
    for key, name in _COUNTS.items():
        value = getattr(spec, name).value
        if value is not None:
            base[key] = value
    if not goal.honours("attention_bias") and "attention_bias" in base:
        # there the flag only makes an o_proj.bias, uninitialised where the file has none
        base["attention_bias"] = "layers.0.self_attn.o_proj.bias" in spec.canonical
    if not goal.honours("mlp_bias", "qwen3" if spec.draft_class == "qwen3" else "llama") and "mlp_bias" in base:
        base["mlp_bias"] = False
    if goal.layout == "sglang" and "fc.bias" in spec.canonical:
        base["bias"] = True
    base.setdefault("hidden_act", "silu")
    base.setdefault("model_type", "qwen3" if spec.draft_class == "qwen3" else "llama")
    base |= _rope(spec)
    keep = {k: top[k] for k in _TOP_KEYS if k in top}
    # a draft with its own head is not tied, whatever the config says: SGLang would drop the head
    keep["tie_word_embeddings"] = bool(spec.tie_word_embeddings.value) and "lm_head.weight" not in spec.canonical
    dtype = spec.dtype.value
    flags = _flags(spec, goal)
    wide = (
        {"target_hidden_size": spec.target_hidden_size.value} if spec.target_hidden_size.value not in (None, spec.hidden_size.value) else {}
    )
    if goal.layout == "speculators":
        out = _speculators(spec, top, base, keep | flags | wide, places.get("top"))
        return out | ({"dtype": dtype, "torch_dtype": dtype} if dtype else {})
    out = {"architectures": [_architecture(spec, goal)], **base, **keep, "draft_vocab_size": spec.draft_vocab_size.value, **flags, **wide}
    if dtype:
        out |= {"dtype": dtype, "torch_dtype": dtype}
    if spec.verifier.value is not None:
        out["verifier_name_or_path"] = spec.verifier.value
    if spec.n_aux.value not in (None, 3):
        out["num_aux_hidden_states"] = spec.n_aux.value
    if "top" in places:
        out["eagle_aux_hidden_state_layer_ids"] = places["top"]
    eagle: dict[str, Any] = {}
    if "nested" in places:
        eagle["eagle_aux_hidden_state_layer_ids"] = places["nested"]
    if spec.wiring.state == "final" or "nested" in places:
        eagle["use_aux_hidden_state"] = spec.wiring.state == "aux"
    if eagle:
        out["eagle_config"] = eagle
    return out


def _architecture(spec: DraftSpec, goal: Goal) -> str:
    if spec.draft_class == "mla":
        return "Eagle3DeepseekV2ForCausalLM"
    if goal.layout == "sglang":
        return "LlamaForCausalLMEagle3"
    if spec.draft_class == "qwen3":
        return "Eagle3Qwen3ForCausalLM"
    # vLLM takes both; without a t2d the other name would read as ModelOpt's export
    return "LlamaForCausalLMEagle3" if "t2d" in spec.canonical else "Eagle3LlamaForCausalLM"


def _rope(spec: DraftSpec) -> dict[str, Any]:
    """Both schemas: transformers 5 readers look at ``rope_parameters``, older ones at ``rope_theta`` and ``rope_scaling``."""
    theta, scaling = spec.wiring.rope_theta, spec.wiring.rope_scaling
    out: dict[str, Any] = {"rope_scaling": None if scaling is None else dict(scaling)}
    parameters = {"rope_type": "default"} | dict(scaling or {})
    if theta is not None:
        out["rope_theta"] = theta
        parameters["rope_theta"] = theta
    return out | {"rope_parameters": parameters}


def _flags(spec: DraftSpec, goal: Goal) -> dict[str, bool]:
    """The norm flags as the goal's reader means them."""
    w = spec.wiring
    mla = spec.draft_class == "mla"

    def held(flag: str) -> bool:
        return goal.honours(f"mla_{flag}" if mla and flag != "norm_before_residual" else flag)

    flags = {"norm_before_residual": w.norm_before_residual, "norm_before_fc": w.norm_before_fc, "fc_norm": w.fc_norm}
    out = {k: v and held(k) for k, v in flags.items()}
    if goal.layout == "sglang":
        out = {k: v for k, v in out.items() if v}
    # never written as false: beside midlayer.* SpecForge would read that as "no final norm"
    return out | ({"norm_output": True} if w.norm_output and held("norm_output") else {})


def _speculators(
    spec: DraftSpec, top: Mapping[str, Any], base: dict[str, Any], rest: dict[str, Any], ids: list[int] | None
) -> dict[str, Any]:
    old = as_mapping(top.get("speculators_config")) or {}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {**(as_mapping(old.get("verifier")) or {"architectures": []}), "name_or_path": spec.verifier.value}
    nested = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method], **old, "verifier": verifier}
    if spec.draft_class == "qwen3":
        base["model_type"] = "qwen3"
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": top.get("speculators_version") or "0.9.0",
        **rest,
        "draft_vocab_size": spec.draft_vocab_size.value,
        "eagle_aux_hidden_state_layer_ids": ids,
        "transformer_layer_config": base,
        "speculators_config": nested,
    }
