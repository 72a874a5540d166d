"""The recorded aux layer ids and what they can mean.

The same numbers mean other layers in other places: a top-level ``eagle_aux_hidden_state_layer_ids`` holds HF indices (``k`` is the input of
layer ``k``), the one inside ``eagle_config`` and AngelSlim's key hold layer outputs (HF ``k+1``); hand-made exports mix the two (dialects
section 4.1). Both readings are kept where nothing proves one. What was meant is told by, in this order: a second source (another config in
the folder, the recorded trainer), the reading that equals the default layers ``2, N//2, N-3`` where exactly one does, the place's habit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from eagle3diag.checkpoint.dialects import MODELOPT_KEYS, speculators_version
from eagle3diag.checkpoint.fields import ID_KEYS, as_mapping, as_number_ids
from eagle3diag.checkpoint.model import AuxIds, ConfigFile, Dialect, Reading

__all__ = ["collect", "default_layers", "recorded", "resolve"]

Convention = Literal["hf", "layer-output"]
_SHIFT: dict[Convention, int] = {"hf": 0, "layer-output": 1}
_OTHER: dict[Convention, Convention] = {"hf": "layer-output", "layer-output": "hf"}


def default_layers(n_layers: int) -> tuple[int, int, int]:
    """The layers every framework takes by default, as HF indices, for a target of ``n_layers``."""
    return 2, n_layers // 2, n_layers - 3


def recorded(config: ConfigFile) -> list[tuple[str, tuple[int, ...], Convention]]:
    """Every place of one config that records ids: ``(key, numbers, habit of the place)``, the most explicit first."""
    top = config.data
    nested = as_mapping(top.get("eagle_config")) or {}
    dflash = as_mapping(top.get("dflash_config")) or {}
    places: tuple[tuple[str, Any, Convention], ...] = (
        *((key, top.get(key), habit) for key, habit in ID_KEYS.items() if habit == "hf"),
        ("eagle_config.eagle_aux_hidden_state_layer_ids", nested.get("eagle_aux_hidden_state_layer_ids"), "layer-output"),
        *((key, top.get(key), habit) for key, habit in ID_KEYS.items() if habit == "layer-output"),
        ("eagle_config.layer_ids", nested.get("layer_ids"), "hf"),
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids"), "layer-output"),
    )
    return [(key, ids, habit) for key, value, habit in places if (ids := as_number_ids(value)) is not None]


def collect(configs: tuple[ConfigFile, ...], dialect: Dialect) -> AuxIds:
    """The ids of the first config that records any, with their readings in order of likelihood as far as known without a target."""
    found = [(c, key, ids, habit) for c in configs if c.schema != "target" for key, ids, habit in recorded(c)]
    formula = _formula(configs)
    if not found:
        return AuxIds(None, "not recorded", (), False, formula)
    config, key, raw, habit = found[0]
    where = f"{config.file}: {key}"
    proof = _proof(found, configs, dialect)
    if proof is not None:
        convention, why = proof
        return AuxIds(raw, where, (_reading(convention, raw, why),), True, formula)
    if key == "eagle_aux_hidden_state_layer_ids":
        why = "ids at the top level are HF indices by habit"
        against = "they would be layer outputs if moved there from eagle_config"
    else:
        why = f"ids in {key} are layer outputs by habit"
        against = "they would be HF indices if copied there from a top-level key"
    return AuxIds(raw, where, (_reading(habit, raw, why), _reading(_OTHER[habit], raw, against)), False, formula)


def resolve(aux: AuxIds, n_target_layers: int | None) -> AuxIds:
    """The same ids with the target's depth known: the reading that equals the default layers comes first where exactly one does.

    Where no ids are recorded, the layers the trainer takes by default become the only reading.
    """
    if n_target_layers is None or not 0 < n_target_layers < 1 << 20:
        return aux
    usual = default_layers(n_target_layers)
    if aux.raw is None:
        if aux.readings or n_target_layers < 4:
            return aux
        late = aux.formula == "default-one-late"
        layers = tuple(i + 1 for i in usual) if late else usual
        why = "speculators up to 0.4 captured after" if late else "no ids recorded; every trainer's default is"
        why += " layers 2, N//2, N-3"
        return replace(aux, readings=(Reading("hf", layers, why),))
    if aux.settled or len(aux.readings) < 2:
        return aux
    hits = [r for r in aux.readings if r.hf == usual]
    if len(hits) != 1:
        return aux
    why = f"equals the default layers {list(usual)} of a {n_target_layers}-layer target in this reading only"
    best = Reading(hits[0].convention, hits[0].hf, why)
    return replace(aux, readings=(best, *(r for r in aux.readings if r is not hits[0])))


def _reading(convention: Convention, raw: tuple[int, ...], why: str) -> Reading:
    return Reading(convention, tuple(i + _SHIFT[convention] for i in raw), why)


def _formula(configs: tuple[ConfigFile, ...]) -> str:
    """How the recorded trainer picks layers when told none."""
    for config in configs:
        version = speculators_version(config.data) if config.schema == "speculators" else None
        if version is not None and version < (0, 5):
            return "default-one-late"
    return "default"


def _proof(
    found: list[tuple[ConfigFile, str, tuple[int, ...], Convention]], configs: tuple[ConfigFile, ...], dialect: Dialect
) -> tuple[Convention, str] | None:
    """The convention a second source proves, and by what."""
    (config, key, raw, habit), rest = found[0], found[1:]
    if config.schema == "speculators":
        return "hf", "speculators records HF indices"
    for other, place, ids, theirs in rest:
        meant = tuple(i + _SHIFT[theirs] for i in ids)
        # a flat config beside it proves nothing by itself, but two places that agree by their own habits prove both
        open_to: tuple[Convention, ...] = ("hf", "layer-output") if other.schema == "speculators" else (habit,)
        for convention in open_to:
            if meant == tuple(i + _SHIFT[convention] for i in raw) and (place != key or other.schema == "speculators"):
                return convention, f"{'the same config' if other is config else other.file} names HF {list(meant)} ({place})"
    nested = as_mapping(config.data.get("eagle_config")) or {}
    if key.startswith("eagle_config.eagle") and any(k in nested for k in MODELOPT_KEYS):
        return "layer-output", "written by ModelOpt, which records layer outputs"
    if key == "aux_hidden_states_layer_ids":
        return "layer-output", "AngelSlim's key, which records layer outputs"
    if key == "dflash_config.target_layer_ids":
        return "layer-output", "DFlash records layer outputs"
    if key == "eagle_config.layer_ids" or (key in ID_KEYS and key != "eagle_aux_hidden_state_layer_ids"):
        return habit, f"{key} holds {'HF indices' if habit == 'hf' else 'layer outputs'} wherever it is written"
    if any(_is_speculators(c.data) for c in configs if c is not config) and not any(c.schema == "speculators" for c, *_ in rest):
        return "hf", "trained with speculators (a config beside it says so), which counts HF indices"
    if dialect.name == "specforge-training":
        return "layer-output", "written by SpecForge's trainer, which records layer outputs"
    return None


def _is_speculators(data: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in data or "speculators_config" in data
