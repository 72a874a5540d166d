"""What lies beside a dump's files and says something about them: layer ids, an arrow data set, lock files.

``data_config.json`` (speculators 0.3 and 0.4) names layers by their output, one less than the HF index; ``dataset.json`` (TorchSpec)
says whether the last state is before the norm. Everything here is a hint: a file that is not what it seems is no error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3diag.checkpoint.rawfile import whole_text
from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.formats_files import Contents

__all__ = ["Hints", "layer_ids", "look_beside"]

_CONFIG_LIMIT = 1 << 24  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What is known of a dump from elsewhere.

    Attributes:
        hidden: width of the target's states, where known.
        layers: ids as ``data_config.json`` writes them.
        layers_file: the file they stand in.
        dataset: an arrow data set lies beside the files, as speculators writes one.
        locks: ``NAME.safetensors.lock`` files lie beside them, as vLLM's connector writes them.
        prenorm: whether the last state is before the final norm, where a file says so.
    """

    hidden: int | None = None
    layers: tuple[int, ...] = ()
    layers_file: str = ""
    dataset: bool = False
    locks: bool = False
    prenorm: bool | None = None


def look_beside(folders: list[Path], hidden: int | None) -> Hints:
    """Hints from the files in some folders."""
    names = {f: _names(f) for f in folders}
    layers: tuple[int, ...] = ()
    layers_file, prenorm = "", None
    for folder, found in names.items():
        if "data_config.json" in found and not layers:
            config = _json(folder / "data_config.json")
            inner = config.get("hidden_states")
            layers = _numbers(config.get("layer_ids", inner.get("layer_ids") if isinstance(inner, dict) else None))
            layers_file = "data_config.json" if layers else ""
            model = config.get("model")
            width = model.get("hidden_size") if isinstance(model, dict) else None
            if hidden is None and type(width) is int and 0 < width < 1 << 24:
                hidden = width
        if "dataset.json" in found and prenorm is None:
            said = _json(folder / "dataset.json").get("last_hidden_states_prenorm")
            prenorm = said if isinstance(said, bool) else None
    every = {n for found in names.values() for n in found}
    return Hints(
        hidden=hidden,
        layers=layers,
        layers_file=layers_file,
        dataset="dataset_info.json" in every or any(n.endswith(".arrow") for n in every),
        locks=any(n.endswith(".safetensors.lock") for n in every),
        prenorm=prenorm,
    )


def layer_ids(contents: Contents, hints: Hints, count: int, *, after_layer: bool = False) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """HF indices of ``count`` aux slots as far as a file states them, and where it does.

    Args:
        contents: a sample, whose metadata may name them.
        hints: what lies beside it.
        count: aux slots; a list with one more names the final state too.
        after_layer: ids in a config beside the file name a layer's output, HF index less one.
    """
    for key in ("hf_indices", "trained_on", "layer_ids", "aux_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        text = contents.metadata.get(key)
        if text is None or (key not in ("hf_indices", "trained_on") and "index_convention" not in contents.metadata):
            continue
        try:
            ids = _numbers(json.loads(text))
        except (ValueError, RecursionError):
            continue
        if len(ids) in (count, count + 1):
            return ids[:count], (f"layers {list(ids[:count])} from the metadata's {key}",)
    if hints.layers and len(hints.layers) in (count, count + 1):
        ids = tuple(i + after_layer for i in hints.layers[:count])
        note = f"layers {list(hints.layers)} in {hints.layers_file}" + (f" name outputs: HF {list(ids)}" if after_layer else "")
        return ids, (note,)
    if hints.layers:
        return (), (f"{hints.layers_file} names {len(hints.layers)} layers for {count} aux states: not used",)
    return (), ()


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(p.name for p in folder.iterdir())
    except OSError:
        return frozenset()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(whole_text(path, _CONFIG_LIMIT, "a config"))
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(x) is int and 0 <= x < 1 << 20 for x in value):
        return tuple(value)
    return ()
