"""Checkpoint -> DraftSpec: every fact of a draft under one name, with where it was read.

Sources in order: ``config.json``, another draft config in the folder, a tensor's shape, the framework's default. Where config and shape
disagree the config's value stands, because that is what an engine builds from; `shape_facts` gives the other side to the rules. Nothing in
a config can raise here: a field of the wrong type counts as absent and is listed by `type_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from eagle3diag.checkpoint.aux_ids import collect, resolve
from eagle3diag.checkpoint.configs import layer_part
from eagle3diag.checkpoint.dialects import recognise
from eagle3diag.checkpoint.field_types import count, type_problems
from eagle3diag.checkpoint.fields import as_bool, as_float, as_mapping, as_text, first_text, rope_facts
from eagle3diag.checkpoint.model import AuxIds, Checkpoint, ConfigFile, DraftSpec, TargetSpec
from eagle3diag.checkpoint.names import canonical_names, layer_numbers
from eagle3diag.checkpoint.shapes import shape_facts
from eagle3diag.checkpoint.trained import residual_default, trained_wiring
from eagle3diag.provenance import Valued, absent

__all__ = ["draft_spec", "resolved", "shape_facts", "state_width", "type_problems"]

_COUNT_FIELDS = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position": "max_position_embeddings",
}
_VERIFIER_KEYS = ("verifier_name_or_path", "target_model_name_or_path", "target_model_path", "base_model_name_or_path", "target_model")
_THETA: Valued[Any] = Valued(10000.0, "dialect", "default of transformers")
_MLA = ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa")


def draft_spec(checkpoint: Checkpoint) -> DraftSpec:
    """The normalised facts of a draft; never raises for what a config holds, and reads no tensor data.

    Example:
        >>> from eagle3diag import open_checkpoint
        >>> spec = draft_spec(open_checkpoint("data_samples/smollm2-eagle3/draft"))
        >>> spec.hidden_size.value, spec.hidden_size.where, spec.aux.hf
        (576, 'config.json: hidden_size', (2, 15, 27))
    """
    canonical = canonical_names(checkpoint.tensors)
    dialect, algorithm = recognise(checkpoint, canonical)
    shapes = shape_facts(checkpoint, canonical)
    configs = tuple(c for i, c in enumerate(checkpoint.configs) if i == 0 or c.schema in ("flat", "speculators"))
    aux = collect(configs, dialect)
    v: dict[str, Valued[Any]] = {}

    for name, key in _COUNT_FIELDS.items():
        v[name] = _stated(configs, key, partial(count, key=key), "layer") or shapes.get(name) or absent()
    for name in ("draft_vocab_size", "target_hidden_size"):
        v[name] = _stated(configs, name, partial(count, key=name), "top") or shapes.get(name) or absent()
    _derived_counts(v)
    v["n_aux"] = _n_aux(configs, aux, shapes, algorithm)
    v["rms_norm_eps"] = _stated(configs, "rms_norm_eps", as_float, "layer") or Valued(1e-6, "dialect", "default of transformers")
    v["rope_theta"], v["rope_scaling"] = _rope(configs)
    v["sliding_window"] = _window(configs)
    for name in ("attention_bias", "mlp_bias"):
        part = "self_attn.q_proj.bias" if name == "attention_bias" else "mlp.gate_proj.bias"
        v[name] = _stated(configs, name, as_bool, "layer") or _present(canonical, f"layers.0.{part}")
    v["tie_word_embeddings"] = _stated(configs, "tie_word_embeddings", as_bool, "top") or _off("default of transformers")
    v["norm_before_residual"] = _stated(configs, "norm_before_residual", as_bool, "flag") or _residual(configs)
    v["norm_before_fc"] = _stated(configs, "norm_before_fc", as_bool, "flag") or _present(canonical, "input_norm.weight")
    v["fc_norm"] = (
        _stated(configs, "fc_norm", as_bool, "flag")
        or _stated(configs, "use_aux_norm", as_bool, "flag")
        or _present(canonical, "fc_norm.0.weight")
    )
    v["norm_output"] = _stated(configs, "norm_output", as_bool, "flag") or _off("off by default")
    v["use_aux_hidden_state"] = _stated(configs, "use_aux_hidden_state", as_bool, "flag") or Valued(True, "dialect", "on by default")
    v["architecture"] = _stated(configs, "architectures", first_text, "top") or absent()
    v["dtype"] = (
        _stated(configs, "dtype", as_text, "top")
        or _stated(configs, "torch_dtype", as_text, "top")
        or _stated(configs, "torch_dtype", as_text, "layer")
        or shapes.get("dtype")
        or absent()
    )
    v["verifier"] = _verifier(configs)
    return DraftSpec(
        dialect=dialect,
        algorithm=algorithm,
        draft_class=_draft_class(configs, canonical, v["architecture"].value),
        layers_in_file=len(layer_numbers(canonical)),
        aux=aux,
        canonical=canonical,
        wiring=trained_wiring(dialect, algorithm, v, aux, canonical, configs),
        **v,
    )


def resolved(spec: DraftSpec, n_target_layers: int | None) -> DraftSpec:
    """The same spec with the target's depth known: ambiguous ids settled towards the default layers, absent ids filled with them.

    Absent ids stay absent where the default cannot be meant: another algorithm, or an ``fc`` built for another number of states.
    """
    if spec.aux.raw is None and (spec.algorithm not in ("eagle3", "peagle", "unknown") or spec.n_aux.value != 3):
        return spec
    aux = resolve(spec.aux, n_target_layers)
    return spec if aux is spec.aux else replace(spec, aux=aux, wiring=replace(spec.wiring, aux_layers=aux.hf))


def state_width(spec: DraftSpec, target: TargetSpec | None = None) -> int | None:
    """Channels of one of the target's states, which tells fused ones in a dump apart: the target's word, else the draft's."""
    stated = target.hidden_size.value if target is not None else None
    return stated or spec.target_hidden_size.value or spec.hidden_size.value


def _stated(configs: Iterable[ConfigFile], key: str, cast: Callable[[Any], Any], level: str) -> Valued[Any] | None:
    """The first usable statement of ``key``: ``layer`` part, ``top`` level, or ``flag`` (top level, then ``eagle_config``)."""
    for config in configs:
        prefix, layer = layer_part(config)
        places: list[tuple[str, Mapping[str, Any]]] = [(prefix, layer)] if level == "layer" else [("", config.data)]
        if level == "flag" and (nested := as_mapping(config.data.get("eagle_config"))) is not None:
            places.append(("eagle_config.", nested))
        for at, part in places:
            value = cast(part.get(key))
            if value is not None:
                return Valued(value, "config", f"{config.file}: {at}{key}")
    return None


def _off(why: str) -> Valued[bool]:
    return Valued(False, "dialect", why)


def _present(canonical: Mapping[str, str], name: str) -> Valued[bool]:
    """A flag told by the presence of its tensor."""
    return Valued(True, "shape", f"{canonical[name]} in the file") if name in canonical else _off("off by default")


def _derived_counts(v: dict[str, Valued[Any]]) -> None:
    """Defaults every reader derives: head width, kv heads, vocabulary, the target's width."""
    hidden, heads = v["hidden_size"].value, v["num_heads"].value
    if v["head_dim"].value is None and hidden and heads:
        v["head_dim"] = Valued(hidden // heads, "dialect", f"hidden_size / heads = {hidden} / {heads}")
    if v["num_kv_heads"].value is None and heads:
        v["num_kv_heads"] = Valued(heads, "dialect", "as many as attention heads by default")
    if v["target_hidden_size"].value is None and hidden:
        v["target_hidden_size"] = Valued(hidden, "dialect", "the draft's own hidden_size by default")
    if v["draft_vocab_size"].value is None and v["vocab_size"].value:
        v["draft_vocab_size"] = Valued(v["vocab_size"].value, "dialect", "vocab_size by default")


def _n_aux(configs: tuple[ConfigFile, ...], aux: AuxIds, shapes: Mapping[str, Valued[Any]], algorithm: str) -> Valued[Any]:
    if algorithm in ("eagle1", "hass"):
        return absent("EAGLE-1 takes the last state only")
    stated = _stated(configs, "num_aux_hidden_states", partial(count, key="num_aux_hidden_states"), "flag")
    if stated is not None:
        return stated
    if aux.raw is not None:
        return Valued(len(aux.raw), "config", aux.where)
    return shapes.get("n_aux") or Valued(3, "dialect", "three states by default")


def _rope(configs: tuple[ConfigFile, ...]) -> tuple[Valued[Any], Valued[Any]]:
    """Theta and scaling, from one config: mixing two would invent a third."""
    for config in configs:
        prefix, layer = layer_part(config)
        theta, scaling = rope_facts(layer)
        if theta is None and scaling is None:
            continue
        base: Valued[Any] = _THETA if theta is None else Valued(theta[0], "config", f"{config.file}: {prefix}{theta[1]}")
        how: Valued[Any] = absent() if scaling is None else Valued(scaling[0], "config", f"{config.file}: {prefix}{scaling[1]}")
        return base, how
    return _THETA, absent()


def _window(configs: tuple[ConfigFile, ...]) -> Valued[Any]:
    """The attention window in force: stated, and not switched off by its own flag or by ``layer_types``."""
    found = _stated(configs, "sliding_window", partial(count, key="sliding_window"), "layer")
    if found is None:
        return absent("full attention")
    config = next(c for c in configs if found.where.startswith(f"{c.file}: "))
    layer = layer_part(config)[1]
    if layer.get("use_sliding_window") is False:
        return Valued(None, "config", f"{config.file}: use_sliding_window false")
    kinds = layer.get("layer_types")
    if isinstance(kinds, list) and kinds and "sliding_attention" not in kinds:
        return Valued(None, "config", f"{config.file}: layer_types without sliding_attention")
    return found


def _residual(configs: tuple[ConfigFile, ...]) -> Valued[bool]:
    value, why = residual_default(configs)
    return Valued(value, "dialect", why)


def _verifier(configs: tuple[ConfigFile, ...]) -> Valued[Any]:
    for config in configs:
        outer = as_mapping(config.data.get("speculators_config")) or {}
        nested = as_mapping(outer.get("verifier")) or {}
        name = as_text(nested.get("name_or_path"))
        if name is not None:
            return Valued(name, "config", f"{config.file}: speculators_config.verifier.name_or_path")
    return next((found for key in _VERIFIER_KEYS if (found := _stated(configs, key, as_text, "top"))), absent())


def _draft_class(
    configs: tuple[ConfigFile, ...], canonical: Mapping[str, str], architecture: str | None
) -> Literal["llama", "qwen3", "mla"]:
    at, arch = "layers.0.self_attn.", architecture or ""
    if any(f"{at}{p}.weight" in canonical for p in _MLA) or "Eagle3Deepseek" in arch:
        return "mla"
    layer = layer_part(configs[0])[1] if configs and configs[0].schema == "speculators" else {}
    named = layer.get("model_type") == "qwen3" or "Eagle3Qwen3For" in arch
    return "qwen3" if named or f"{at}q_norm.weight" in canonical or f"{at}k_norm.weight" in canonical else "llama"
