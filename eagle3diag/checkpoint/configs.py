"""The JSON files beside the weights: read strictly, named by schema, compared by meaning.

A draft folder may hold a flat ``config.json`` and a nested ``config_speculators.json``. Which one a tool loads, and whether they say the
same, decides which target layers reach the draft, so both are kept. Nothing here raises for bad input: an unreadable file is an ``Issue``
of one printable line, because the weights beside it can still be judged.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3diag.checkpoint.fields import ID_KEYS, as_bool, as_float, as_int, as_mapping, as_number_ids, as_text, first_text, rope_facts
from eagle3diag.checkpoint.model import ConfigFile, Issue
from eagle3diag.errors import escaped

__all__ = [
    "compare_configs",
    "default_reader",
    "layer_part",
    "order_configs",
    "parse_json",
    "read_configs",
    "read_json",
    "schema_of",
    "shared_facts",
]

Schema = Literal["flat", "speculators", "target", "unknown"]

SIZE_LIMIT = 16 << 20
DEPTH_LIMIT = 100
_NO_CONFIG = (  # JSON beside a model that is never a model config
    "tokenizer", "generation_config", "special_tokens_map", "added_tokens", "vocab", "preprocessor_config", "processor_config",
    "video_preprocessor_config", "chat_template", "hf_quant_config", "val_metrics", "trainer_state", "training_args", "adapter_config",
    "quantize_config", "all_results", "train_results", "eval_results", "merges", "modules",
)  # fmt: skip
_DRAFT_KEYS = ("draft_vocab_size", "eagle_config", "dflash_config", *ID_KEYS)
_LAYER_COUNTS = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "sliding_window",
)
_FLAGS_OFF = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # what an absent flag means in a flat config
_TEXT_KEYS = ("text_config", "language_config", "llm_config", "thinker_config", "text_model", "language_model_config")


def parse_json(raw: bytes, file: str, *, infinity: bool = False) -> tuple[dict[str, Any] | None, Issue | None]:
    """One JSON object from bytes, or the reason why not.

    Args:
        raw: the file's bytes.
        file: its name, for the message.
        infinity: accept ``Infinity`` (transformers writes it into the configs of state-space targets); ``NaN`` never is.

    Returns:
        ``(data, None)`` or ``(None, Issue)``.
    """

    def bad(why: str, **evidence: Any) -> tuple[None, Issue]:
        return None, _unreadable(file, why, **evidence)

    def constant(text: str) -> float:
        if infinity and text != "NaN":
            return float(text)
        raise ValueError(f"holds {text}, which is not JSON")

    if len(raw) > SIZE_LIMIT:
        return bad(f"{len(raw):,} bytes, a config has at most {SIZE_LIMIT:,}", bytes=len(raw))
    if not raw.strip():
        return bad("empty file; copy the config from the training run", bytes=len(raw))
    if raw[:3] == b"\xef\xbb\xbf":
        return bad("starts with a UTF-8 byte order mark, which JSON readers refuse; save it without BOM", encoding="utf-8-sig")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or raw[:4:2] == b"\0\0" or raw[1:4:2] == b"\0\0":
        return bad("encoded as UTF-16 or UTF-32; JSON readers expect UTF-8", encoding="utf-16")
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=constant)
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 (byte {error.start})", position=error.start)
    except json.JSONDecodeError as error:
        why = "the file ends early" if error.pos >= len(error.doc.rstrip()) else escaped(error.msg)
        return bad(f"no valid JSON: line {error.lineno} column {error.colno}, {why}", line=error.lineno)
    except RecursionError:
        return bad("nested too deep to read", depth_limit=DEPTH_LIMIT)
    except ValueError as error:  # an integer of thousands of digits, NaN
        text = str(error)
        return bad("holds an integer of more than 4300 digits" if "integer string" in text else escaped(text, 90))
    if not isinstance(data, dict):
        return bad(f"holds a JSON {_json_type(data)} where an object is needed", found=_json_type(data))
    if _depth_exceeds(data, DEPTH_LIMIT):
        return bad(f"nested more than {DEPTH_LIMIT} deep", depth_limit=DEPTH_LIMIT)
    return data, None


def _unreadable(file: str, why: str, **evidence: Any) -> Issue:
    return Issue("config-unreadable", file, f"{escaped(file)}: {why}", evidence)


def read_json(path: Path, *, infinity: bool = False) -> tuple[dict[str, Any] | None, Issue | None]:
    """One JSON object from a regular file; see `parse_json`. Never raises for what the file holds."""

    def bad(why: str, **evidence: Any) -> tuple[None, Issue]:
        return None, _unreadable(path.name, why, **evidence)

    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        return bad("not there", absent=True)
    except (OSError, ValueError) as error:
        return bad(f"cannot be opened ({escaped(getattr(error, 'strerror', None) or error)})")
    with os.fdopen(handle, "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):  # a FIFO would wait for ever
            return bad("not a regular file")
        if found.st_size > SIZE_LIMIT:
            return bad(f"{found.st_size:,} bytes, a config has at most {SIZE_LIMIT:,}", bytes=found.st_size)
        try:
            raw = stream.read(SIZE_LIMIT + 1)
        except OSError as error:
            return bad(f"cannot be read ({escaped(error.strerror or error)})")
    return parse_json(raw, path.name, infinity=infinity)


def read_configs(folder: Path) -> tuple[tuple[ConfigFile, ...], tuple[Issue, ...]]:
    """Every model config in a folder, ``config.json`` first, and what could not be read.

    ``config.json`` and ``config_speculators.json`` are always judged: unreadable or (the first) absent is an issue. Any other ``*.json`` of
    at most 1 MB counts only if it reads as a model config; tokenizer, generation, index and metric files never do.
    """
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.name.endswith(".json"))
    except (OSError, ValueError) as error:
        why = escaped(getattr(error, "strerror", None) or error)
        return (), (_unreadable("config.json", f"folder cannot be listed ({why})", absent=True),)
    configs: list[ConfigFile] = []
    issues: list[Issue] = []
    for name in order_configs(names):
        main = name in ("config.json", "config_speculators.json")
        try:
            if not main and (folder / name).stat().st_size > 1 << 20:
                continue
        except OSError:
            continue
        data, issue = read_json(folder / name, infinity=True)
        if issue is not None and main:
            issues.append(issue)
        elif data is not None and (main or schema_of(data) != "unknown"):
            configs.append(ConfigFile(name, schema_of(data), data))
    if "config.json" not in names:
        issues.insert(0, _unreadable("config.json", "absent; every engine needs it beside the weights", absent=True))
    return tuple(configs), tuple(issues)


def order_configs(names: list[str]) -> list[str]:
    """Of the file names in a folder, those that may be model configs, the one tools load by default first (at most 64)."""
    chosen = [n for n in names if n.endswith(".json") and not n.endswith(".index.json") and not n.startswith(_NO_CONFIG)]
    return sorted(chosen, key=lambda n: (n != "config.json", n != "config_speculators.json", n))[:64]


def schema_of(data: Mapping[str, Any]) -> Schema:
    """Which schema a config is in: ``flat`` draft, nested ``speculators``, ``target``, or ``unknown``."""
    if any(k in data for k in ("speculators_model_type", "speculators_config", "transformer_layer_config")):
        return "speculators"
    arch = first_text(data.get("architectures")) or ""
    if any(k in data for k in _DRAFT_KEYS) or any(w in arch for w in ("Eagle", "eagle", "EAGLE", "DFlash", "Peagle", "NextN", "MTP")):
        return "flat"
    if any(as_mapping(data.get(k)) for k in _TEXT_KEYS):
        return "target"
    layers = as_int(data.get("num_hidden_layers"))
    if "hidden_size" in data or arch:
        return "target" if layers is not None and layers > 4 else "flat"
    return "unknown"


def default_reader(config: ConfigFile) -> dict[str, str]:
    """What each tool does with this file: ``reads``, ``opens but cannot read the schema`` or ``never opens``.

    All tools open ``config.json`` and nothing else. SGLang knows only the flat schema, vLLM both (nested: where ``speculators_config`` is
    set), the speculators library only its own (engines section 1.3).
    """
    tools = ("sglang", "vllm", "speculators")
    if config.file != "config.json":
        return dict.fromkeys(tools, "never opens")
    knows = {"flat": ("sglang", "vllm"), "speculators": ("vllm", "speculators"), "target": (), "unknown": ()}[config.schema]
    return {t: "reads" if t in knows else "opens but cannot read the schema" for t in tools}


def layer_part(config: ConfigFile) -> tuple[str, Mapping[str, Any]]:
    """Where a config keeps the facts of the decoder layer: ``(prefix, mapping)``; the prefix ends in a dot or is empty."""
    nested = as_mapping(config.data.get("transformer_layer_config")) if config.schema == "speculators" else None
    return ("", config.data) if nested is None else ("transformer_layer_config.", nested)


def shared_facts(config: ConfigFile) -> dict[str, Any]:
    """The facts a draft config states, under one name in every schema; only what is stated and usable.

    Aux layers come as HF indices under the convention of the place they stand in: top level as they are, ``eagle_config`` and AngelSlim's
    key one later (dialects section 4.1).
    """
    top, (_, layer) = config.data, layer_part(config)
    nested = as_mapping(top.get("eagle_config")) or {}
    facts: dict[str, Any] = {}
    for name in _LAYER_COUNTS:
        facts[name] = as_int(layer.get(name))
    for name in ("draft_vocab_size", "target_hidden_size"):
        facts[name] = as_int(top.get(name))
    facts["rms_norm_eps"] = as_float(layer.get("rms_norm_eps"))
    facts["hidden_act"] = as_text(layer.get("hidden_act"))
    facts["model_type"] = layer.get("model_type") if layer.get("model_type") in ("llama", "qwen3") else None  # which class vLLM builds
    for name in ("attention_bias", "mlp_bias"):
        facts[name] = as_bool(layer.get(name))
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        value = as_bool(top.get(name))
        facts[name] = as_bool(nested.get(name)) if value is None else value
    facts["tie_word_embeddings"] = as_bool(top.get("tie_word_embeddings"))
    facts["dtype"] = as_text(top.get("dtype")) or as_text(top.get("torch_dtype"))
    theta, scaling = rope_facts(layer)
    facts["rope_theta"] = theta[0] if theta else None
    facts["aux_layers_hf"] = _aux_hf(top, nested)
    out = {k: v for k, v in facts.items() if v is not None}
    if scaling is not None:
        out["rope_scaling"] = scaling[0]
    return out


def _aux_hf(top: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    others = ((top.get(k), int(habit == "layer-output")) for k, habit in ID_KEYS.items() if k != key)
    for value, shift in ((top.get(key), 0), (nested.get(key), 1), *others):
        ids = as_number_ids(value)
        if ids is not None:
            return tuple(i + shift for i in ids)
    return None


def compare_configs(a: ConfigFile, b: ConfigFile) -> list[tuple[str, Any, Any]]:
    """The facts both configs state and disagree on: ``(fact, value in a, value in b)``, in a fixed order.

    A flag that a flat config leaves out is false there, and an unstated ``target_hidden_size`` is the draft's own width: every reader of
    such a config fills them so.
    """
    left, right = shared_facts(a), shared_facts(b)
    for config, facts, other in ((a, left, right), (b, right, left)):
        if config.schema == "flat":
            facts.update({k: False for k in _FLAGS_OFF if other.get(k) is True and k not in facts})
        if "hidden_size" in facts and "target_hidden_size" in other:
            facts.setdefault("target_hidden_size", facts["hidden_size"])
    return [(k, left[k], right[k]) for k in left if k in right and left[k] != right[k]]


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number")


def _depth_exceeds(data: object, limit: int) -> bool:
    """Breadth first, so that a deep document costs no stack."""
    level: list[object] = [data]
    for _ in range(limit):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [c for children in inner for c in children if isinstance(c, dict | list)]
        if not level:
            return False
    return True
