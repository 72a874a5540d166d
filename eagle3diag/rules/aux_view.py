"""What the AUX rules compare: the layers the draft was trained on, the ones this engine captures, and the ids that would put it right.

What was meant is the first reading of the recorded ids once the target's depth is known (``checkpoint.aux_ids.resolve``: second source,
default layers, habit, in this order). All layers are HF indices; ids as recorded and ids to write are in the engine's numbering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.aux_ids import default_layers, resolve
from eagle3diag.checkpoint.model import AuxIds
from eagle3diag.rules.model import Case
from eagle3diag.rules.reading import is_eagle3

if TYPE_CHECKING:
    from eagle3diag.engines.model import ServedDraft

__all__ = [
    "KEYS",
    "View",
    "could_be_default",
    "ids_to_write",
    "matches_default",
    "serving_aux",
    "shown",
    "target_fails",
    "view_of",
    "write_advice",
]


@dataclass(frozen=True, slots=True)
class View:
    """What the rules of this family compare."""

    ids: AuxIds
    meant: tuple[int, ...] | None  #: HF indices the draft was trained on, in the order recorded
    why: str  #: what that goes by
    settled: bool  #: a second source says so
    depth: int | None  #: decoder layers of the target


def view_of(case: Case) -> View:
    """The recorded ids, read with the target's depth where a target is given."""
    depth = case.target.num_layers.value if case.target is not None else None
    ids = resolve(case.spec.aux, depth)
    settled = ids.settled or (ids.raw is None and ids.formula != "default")
    return View(ids, ids.hf, ids.readings[0].why if ids.readings else "", settled, depth)


def serving_aux(case: Case) -> ServedDraft | None:
    """The served draft where the engine understands it and feeds it auxiliary states."""
    served = case.served
    if served is None or not is_eagle3(case) or served.algorithm != "eagle3" or case.spec.use_aux_hidden_state.value is False:
        return None
    return None if served.refused is not None and served.refused.stage == "construct" else served


def target_fails(case: Case) -> bool:
    """Whether the target class itself cannot hand out the states asked for in this version: AUX404 speaks for all that follows."""
    from eagle3diag.engines.capture import target_support

    if case.served is None or case.target is None:
        return False
    support = target_support(case.served.contract, case.target, case.launch)
    works = support.behaviour is None or support.behaviour.captures == "stream"
    return support.hook is False or support.refusal is not None or not works


def could_be_default(layers: tuple[int, ...]) -> bool:
    """Whether some target depth has these HF indices as its default layers."""
    return len(layers) == 3 and layers == default_layers(layers[2] + 3)


def matches_default(view: View) -> bool | None:
    """Whether the trained layers are the engine's default ones; None where the target's depth would have to tell."""
    if view.meant is None:
        return None
    meant = tuple(sorted(view.meant))
    if view.depth is not None:
        return meant == default_layers(view.depth)
    return None if could_be_default(meant) else False


def shown(layers: tuple[int, ...] | None) -> str:
    """``2, 15, 27``, or ``none``."""
    return "none" if not layers else ", ".join(map(str, layers))


#: where a contract says that ids are read from -> the key of config.json
KEYS = {
    "top": "eagle_aux_hidden_state_layer_ids",
    "nested": "eagle_config.eagle_aux_hidden_state_layer_ids",
    "nested-layer-ids": "eagle_config.layer_ids",
}


def ids_to_write(case: Case, served: ServedDraft, meant: tuple[int, ...]) -> list[int] | None:
    """The ids this engine version has to be given to capture ``meant``; None where none would do.

    With a target the answer is served again, because some targets have a rule of their own.
    """
    places = served.contract["aux_ids_from"]
    if not places or not meant:
        return None
    goal = sorted(set(meant))
    usual = 1 if served.contract["id_meaning"] == "output" else 0
    first = usual if served.aux.shift is None else served.aux.shift
    for shift in dict.fromkeys((first, usual, 1 - usual)):
        ids = [k - shift for k in goal]
        if ids[0] < 0:
            continue
        if case.target is None:
            return ids
        if _captured_with(case, served, KEYS.get(places[0], places[0]), ids) == tuple(goal):
            return ids
    return None


def _captured_with(case: Case, served: ServedDraft, key: str, ids: list[int]) -> tuple[int, ...] | None:
    from eagle3diag.engines.capture import capture

    outer, _, inner = key.rpartition(".")
    config = {outer: {inner: ids}} if outer else {inner: ids}
    again = capture(served.contract, config, case.target, case.launch, case.spec.target_hidden_size.value)
    return None if again.problem else again.prefill_hf


def write_advice(case: Case, served: ServedDraft, meant: tuple[int, ...]) -> str:
    """What to write, and where, so that this engine captures ``meant``."""
    places, ids = served.contract["aux_ids_from"], ids_to_write(case, served, meant)
    name = served.contract.label
    if not places:
        return f"{name} reads no ids at all: use a newer version, or a draft trained on its default layers."
    if ids is None:
        return f"No ids make {name} capture HF {shown(meant)} from this target: serve the draft with the other engine."
    outer, _, inner = KEYS.get(places[0], places[0]).rpartition(".")
    where = f' inside "{outer}"' if outer else ""
    return f'Write "{inner}": {ids}{where} in the draft\'s config.json for {name}: it then captures HF {shown(tuple(sorted(meant)))}.'
