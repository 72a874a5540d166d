"""A target (verifier) from its config, and its embedding, head and final norm where its weights are there.

Multimodal models nest the language model's config under one of a few keys; what engines dispatch on is the outer ``architectures``, what a
draft must fit is the inner width, depth and vocabulary. Weights are optional and may be incomplete (one downloaded shard): the three
tensors are found by name in whatever shard holds them. The portable sample's ``rows.safetensors`` stands in for whole tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from eagle3diag.checkpoint.configs import read_configs, read_json, schema_of
from eagle3diag.checkpoint.field_types import count
from eagle3diag.checkpoint.fields import as_bool, as_int, as_mapping, as_text, first_text, rope_facts
from eagle3diag.checkpoint.model import Checkpoint, ConfigFile, TargetSpec
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.provenance import Valued, absent

__all__ = ["open_target", "target_spec"]

_NESTED = ("text_config", "language_config", "llm_config", "thinker_config", "language_model_config", "text_model", "llm")
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim"),
    "num_hidden_layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "multi_query_group_num", "num_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "max_position_embeddings": ("max_position_embeddings", "seq_length", "n_positions", "max_seq_len", "max_sequence_length"),
}
# what transformers fills in where a family's files leave it out
_CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}
_GEMMA3_THETA = 1000000.0
_TIED_FAMILIES = ("gemma", "cohere")
_EMBED = (
    "model.embed_tokens.weight", "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "transformer.embedding.word_embeddings.weight",
    "model.tok_embeddings.weight", "tok_embeddings.weight", "backbone.embeddings.weight", "backbone.embedding.weight",
)  # fmt: skip
_HEAD = (
    "lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight",
    "thinker.lm_head.weight", "transformer.output_layer.weight", "output.weight",
)  # fmt: skip
_NORM = (
    "model.norm.weight", "language_model.model.norm.weight", "model.language_model.norm.weight", "thinker.model.norm.weight", "norm.weight",
    "transformer.ln_f.weight", "transformer.encoder.final_layernorm.weight", "model.final_layernorm.weight", "backbone.norm_f.weight",
    "model.final_norm.weight",
)  # fmt: skip
_ELSEWHERE = (".layers.", "vision", "visual", "audio", "talker", "mtp", "image", ".blocks.", "draft", "per_layer")


def open_target(path: str | os.PathLike[str]) -> TargetSpec:
    """Open a target from a folder, a config file, or a URL.

    Args:
        path: a folder with ``config.json`` (weights optional), the config file itself, or a URL as `open_checkpoint` takes it.

    Raises:
        CheckpointError: one line: no readable config there, or the config is a draft's.

    Example:
        >>> open_target("data_samples/smollm2-eagle3/target").num_layers.value
        30
    """
    text = os.fspath(path)
    given = Path(text)
    if "://" not in text and given.suffix == ".json" and given.is_file() and not given.name.endswith(".index.json"):
        data, issue = read_json(given, infinity=True)
        if data is None:
            raise CheckpointError(f"{_shown(text)}: no target can be read from it: {issue.message if issue else 'not a JSON object'}")
        return target_spec(ConfigFile(given.name, schema_of(data), data), text)
    checkpoint, problem = _weights(text)
    if checkpoint is not None:
        configs, issues = checkpoint.configs, checkpoint.issues
    else:
        configs, issues = read_configs(given if given.is_dir() else given.parent)
    main = [c for c in configs if c.file == "config.json"] or [c for c in configs if c.schema == "target"]
    if not main:
        why = next((i.message for i in issues if i.kind == "config-unreadable" and not i.evidence.get("absent")), "") or problem
        raise CheckpointError(f"{_shown(text)}: {why or 'no config.json there; give the target folder or its config.json'}")
    return target_spec(main[0], text, checkpoint if checkpoint is not None and checkpoint.tensors else None)


def target_spec(config: ConfigFile, path: str, checkpoint: Checkpoint | None = None) -> TargetSpec:
    """The facts of a target from its config as read; ``checkpoint`` holds its weights where they are there.

    Raises:
        CheckpointError: the config is a draft's.
    """
    outer = config.data
    drafty = next((k for k in ("speculators_model_type", "speculators_config", "draft_vocab_size", "eagle_config") if outer.get(k)), None)
    if drafty is not None:
        raise CheckpointError(f"{_shown(path)}: {config.file} is a draft's config (it has {drafty}); give the target's folder or config")
    prefix, inner = _text_part(outer)
    levels = [(prefix, inner), ("", outer)] if prefix else [("", outer)]
    kind = as_text(inner.get("model_type")) or as_text(outer.get("model_type")) or ""
    if kind == "" and prefix and as_text(outer.get("model_type")) == "gemma3":
        kind = "gemma3_text"
    defaults = _CLASS_DEFAULTS.get(kind, {})

    def stated(keys: tuple[str, ...], cast: Callable[[Any], Any]) -> Valued[Any] | None:
        for at, part in levels:
            for key in keys:
                value = cast(part.get(key))
                if value is not None:
                    return Valued(value, "config", f"{config.file}: {at}{key}")
        return None

    v: dict[str, Valued[Any]] = {}
    for key, names in _ALIASES.items():
        fallback = Valued(defaults[key], "dialect", f"default of {kind}") if key in defaults else absent()
        v[key] = stated(names, partial(count, key=key)) or fallback
    v["head_dim"] = _head_dim(v, stated)
    if v["num_key_value_heads"].value is None and v["num_attention_heads"].value is not None:
        v["num_key_value_heads"] = Valued(v["num_attention_heads"].value, "dialect", "as many as attention heads by default")
    tied_family = kind.startswith(_TIED_FAMILIES)
    tied = stated(("tie_word_embeddings",), as_bool) or Valued(tied_family, "dialect", f"default of {kind or 'transformers'}")
    theta, scaling = _rope(levels, config.file, kind)
    width, rows = v["hidden_size"].value, False
    embed = head = final_norm = None
    if checkpoint is not None and {"token_ids", "embed_tokens"} <= checkpoint.tensors.keys():
        rows, embed = True, "embed_tokens"
        head = "lm_head" if "lm_head" in checkpoint.tensors else ("embed_tokens" if tied.value else None)
        final_norm = "final_norm" if "final_norm" in checkpoint.tensors else None
    elif checkpoint is not None:
        embed = _find(checkpoint, _EMBED, ("embed_tokens.weight",), 2, width)
        head = embed if tied.value and embed is not None else _find(checkpoint, _HEAD, ("lm_head.weight",), 2, width)
        final_norm = _find(checkpoint, _NORM, ("norm.weight",), 1, width)
    return TargetSpec(
        path=path,
        architecture=_text_value(outer, "architectures", config.file, ""),
        text_architecture=_text_value(inner if prefix else {}, "architectures", config.file, prefix),
        model_type=_text_value(outer, "model_type", config.file, ""),
        hidden_size=v["hidden_size"],
        num_layers=v["num_hidden_layers"],
        vocab_size=v["vocab_size"],
        num_heads=v["num_attention_heads"],
        num_kv_heads=v["num_key_value_heads"],
        head_dim=v["head_dim"],
        max_position=v["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
        dtype=stated(("dtype", "torch_dtype"), as_text) or _unstated(),
        quantization=_quantization(levels, config.file, checkpoint, path),
        checkpoint=checkpoint,
        embed=embed,
        head=head,
        final_norm=final_norm,
        rows=rows,
        quantization_config=next((q for _, part in levels if (q := as_mapping(part.get("quantization_config")))), {}),
    )


def _shown(path: str) -> str:
    return escaped(path, 200)


def _weights(text: str) -> tuple[Checkpoint | None, str]:
    """The target opened as a checkpoint; weights that cannot be read leave the config usable."""
    from eagle3diag.checkpoint.open import open_checkpoint

    try:
        return open_checkpoint(text), ""
    except CheckpointError as error:
        if "://" in text or not Path(text).exists():
            raise
        return None, str(error)


def _text_part(outer: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where the language model's facts stand: ``("text_config.", mapping)``, two levels deep at most, or the outer level itself."""
    prefix, part = "", outer
    for _ in range(2):
        for key in _NESTED:
            nested = as_mapping(part.get(key))
            if nested is not None and any(k in nested for k in (*_ALIASES["hidden_size"], "num_hidden_layers", *_NESTED)):
                prefix, part = f"{prefix}{key}.", nested
                break
        else:
            break
    return prefix, part


def _head_dim(v: Mapping[str, Valued[Any]], stated: Callable[[tuple[str, ...], Callable[[Any], Any]], Valued[Any] | None]) -> Valued[Any]:
    if v["head_dim"].value is not None:
        return v["head_dim"]
    nope, rope = stated(("qk_nope_head_dim",), as_int), stated(("qk_rope_head_dim",), as_int)
    if nope is not None and rope is not None:
        return Valued(nope.value + rope.value, "config", "qk_nope_head_dim + qk_rope_head_dim")
    hidden, heads = v["hidden_size"].value, v["num_attention_heads"].value
    if hidden and heads:
        return Valued(hidden // heads, "dialect", f"hidden_size / heads = {hidden} / {heads}")
    return absent()


def _rope(levels: list[tuple[str, Mapping[str, Any]]], file: str, kind: str) -> tuple[Valued[Any], Valued[Any]]:
    for at, part in levels:
        theta, scaling = rope_facts(part)
        if theta is not None or scaling is not None:
            base = _theta_default(kind) if theta is None else Valued(theta[0], "config", f"{file}: {at}{theta[1]}")
            return base, absent() if scaling is None else Valued(scaling[0], "config", f"{file}: {at}{scaling[1]}")
    return _theta_default(kind), absent()


def _theta_default(kind: str) -> Valued[Any]:
    theta = _GEMMA3_THETA if kind == "gemma3_text" else 10000.0
    return Valued(theta, "dialect", f"default of {kind or 'transformers'}")


def _unstated() -> Valued[Any]:
    return absent()


def _text_value(part: Mapping[str, Any], key: str, file: str, at: str) -> Valued[Any]:
    value = first_text(part.get(key)) if key == "architectures" else as_text(part.get(key))
    return absent() if value is None else Valued(value, "config", f"{file}: {at}{key}")


def _quantization(levels: list[tuple[str, Mapping[str, Any]]], file: str, checkpoint: Checkpoint | None, path: str) -> Valued[Any]:
    """``fp8``, ``compressed-tensors``, ``modelopt NVFP4`` …; ``with transforms`` where the file says that states are rotated."""
    for at, part in levels:
        for key in ("quantization_config", "compression_config"):
            q = as_mapping(part.get(key))
            if q:
                words = [as_text(q.get("quant_method")) or "unnamed", as_text(q.get("quant_algo")) or ""]
                rotated = "with transforms" if q.get("transform_config") else ""
                return Valued(" ".join(w for w in (*words, rotated) if w), "config", f"{file}: {at}{key}")
    if checkpoint is not None and "hf_quant_config.json" in checkpoint.extras and "://" not in path:
        data, _ = read_json((Path(path) if Path(path).is_dir() else Path(path).parent) / "hf_quant_config.json")
        algo = as_text((as_mapping((data or {}).get("quantization")) or {}).get("quant_algo"))
        if algo is not None:
            return Valued(f"modelopt {algo}", "config", "hf_quant_config.json: quantization.quant_algo")
    return absent("no quantization_config")


def _find(checkpoint: Checkpoint, names: tuple[str, ...], ends: tuple[str, ...], rank: int, width: int | None) -> str | None:
    """A tensor by its usual names, else the only one of that ending outside layers, towers and side heads; shape must fit."""

    def fits(name: str) -> bool:
        info = checkpoint.tensors.get(name)
        return info is not None and len(info.shape) == rank and (width is None or info.shape[-1] == width)

    for name in names:
        if fits(name):
            return name
    found = [n for n in checkpoint.tensors if n.endswith(ends) and not any(w in n for w in _ELSEWHERE) and fits(n)]
    return found[0] if len(found) == 1 else None
