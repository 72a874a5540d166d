"""Which target states reach the draft: the ids the engine reads, through the target class's own rules, as HF indices.

Three steps: read the ids where this version looks for them (contract), map them by the target class's rules (``targets``), and say what
the graph-replayed verify steps use instead. Nothing is guessed silently: without a target, or with a class on no list, the engine's
general rule is used and ``source`` says so. Facts: engine report section 3, the capture runs, and the table of version changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3diag.checkpoint.fields import ID_KEYS
from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.engines.model import AuxCapture, Contract, Launch
from eagle3diag.engines.targets import GENERIC, Behaviour, TargetSupport, target_support
from eagle3diag.errors import escaped

__all__ = ["TargetSupport", "capture", "target_support"]

_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT = "default [2, N//2, N-3]"


@dataclass(frozen=True, slots=True)
class _Read:
    """Ids as one engine reads them; ``problem`` where the value itself makes it raise."""

    ids: tuple[int, ...] | None
    source: str
    unread: Mapping[str, tuple[int, ...]]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Captured:
    """HF indices captured for one list of ids; None where it raises or cannot be known."""

    hf: tuple[int, ...] | None
    problem: str = ""
    loud: bool = False
    shift: int | None = None


def capture(
    contract: Contract, config: Mapping[str, Any], target: TargetSpec | None, launch: Launch | None = None, hidden: int | None = None
) -> AuxCapture:
    """Which target states this engine version feeds the draft.

    Args:
        contract: what the version does.
        config: the draft config the engine loads, in its own schema (flat or speculators).
        target: facts of the target; without it only ids that need no layer count can be mapped.
        launch: a launch line, where it decides (graphs off, model implementation).
        hidden: draft hidden size; tells a silent bypass from a shape error where a single state is left.

    Returns:
        HF indices ascending, as the engines concatenate them. ``prefill_hf`` is None where capture raises or cannot be known, empty where
        nothing is captured.
    """
    support = target_support(contract, target, launch)
    read = _read(contract, config)
    if _flag_off(contract, config):
        source = "eagle_config.use_aux_hidden_state is false: the target's last hidden state, no auxiliary ones"
        return AuxCapture(None, source, (), (), read.unread, hook=support.hook)
    if support.hook is False or support.refusal is not None:
        return AuxCapture(read.ids, read.source, None, None, read.unread, support.message, True, support.hook)
    if read.problem:
        return AuxCapture(read.ids, read.source, None, None, read.unread, read.problem, True, support.hook)
    rules = support.behaviour or GENERIC[contract.engine]
    n = (target.num_layers.value or None) if target is not None else None
    # With one auxiliary state of the draft's own width, such an engine takes it for a recycled state and skips fc without a word.
    skips = _fact(contract, "fc_condition", "always") == "width-differs"
    bypass = skips and (hidden is None or target is None or target.hidden_size.value in (None, hidden))
    got = _apply(rules, read.ids, n, bypass)
    default = got if read.ids is None else _apply(rules, None, n, bypass)
    graphs = launch is None or launch.cuda_graph
    override = read.ids is not None and graphs and not _fact(contract, "cuda_graph_uses_ids", True)
    verify = default.hf if override and got.hf is not None else got.hf
    problem, loud = _problem(got, support)
    if override and rules.store == "flags" and got.hf is not None and default.hf is not None:
        union = tuple(sorted({*got.hf, *default.hf}))
        if len(union) != len(got.hf):
            flags = "layer flags set for the default before graph capture are never cleared"
            problem = f"{flags}: an eager forward captures {list(union)}, fc is built for {len(got.hf)} states"
            loud = True
    source = read.source if read.ids is not None else _default_source(rules, n)
    if support.hook is None:
        source += (
            " (target class not on record: general rule)"
            if target is not None and target.architecture.value
            else " (no target given: general rule)"
        )
    return AuxCapture(read.ids, source, got.hf, verify, read.unread, problem, loud, support.hook, got.shift)


def _fact(contract: Contract, name: str, default: Any) -> Any:
    fact = contract.facts.get(name)
    return default if fact is None else fact.value


def _problem(got: _Captured, support: TargetSupport) -> tuple[str, bool]:
    """What the ids and what the class cause, in one line."""
    return "; ".join(text for text in (got.problem, support.message if support.hook is True else "") if text), got.loud


# ---------------------------------------------------------------- where ids stand


def _places(config: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[str, Any]]:
    """``{kind: (place, value)}`` of everything in a flat config that records ids an engine may read."""
    eagle = config.get("eagle_config")
    nested: Mapping[str, Any] = eagle if isinstance(eagle, Mapping) else {}
    return {
        "top": (f"{prefix}{_IDS}", config.get(_IDS)),
        "nested": (f"{prefix}eagle_config.{_IDS}", nested.get(_IDS)),
        "nested-layer-ids": (f"{prefix}eagle_config.layer_ids", nested.get("layer_ids")),
    }


def _as_read(contract: Contract, config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The places as this version's own (possibly converted) config has them."""
    if config.get("speculators_config") is None or not _fact(contract, "reads_speculators", False):
        return _places(config)
    layer = config.get("transformer_layer_config")
    flat = _places(layer if isinstance(layer, Mapping) else {}, "transformer_layer_config.")
    # The converter starts from the layer config and overwrites by a top-level value only where that is truthy.
    if _IDS in _fact(contract, "speculators_copies", ()) and config.get(_IDS):
        flat["top"] = (_IDS, config[_IDS])
    return flat


def _read(contract: Contract, config: Mapping[str, Any]) -> _Read:
    seen = _as_read(contract, config)
    recorded = dict(_places(config).values())
    if isinstance(layer := config.get("transformer_layer_config"), Mapping):
        recorded |= dict(_places(layer, "transformer_layer_config.").values())
    recorded |= {key: config.get(key) for key in ID_KEYS if key != _IDS}
    taken, value = "", None
    for kind in _fact(contract, "aux_ids_from", ()):
        place, value = seen.get(kind, ("", None))
        # vLLM falls through on an empty list, SGLang on null alone: [] there means "capture nothing".
        if value or (contract.engine == "sglang" and value is not None):
            taken = place
            break
    ids, problem = _integers(value, contract.engine) if taken else (None, "")
    if taken and ids is None and not problem:
        taken = ""
    source = f"config.json: {taken}" if taken else _DEFAULT
    unread = {}
    for place, other in recorded.items():
        found, _ = _integers(other, "sglang")
        if found and place != taken and (not taken or found != ids):
            unread[place] = found
    return _Read(ids, source, unread, problem)


def _integers(value: Any, engine: str) -> tuple[tuple[int, ...] | None, str]:
    """A recorded list as integers; None where it is no list of them, with the reason where the engine would raise over it."""
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) and v == v // 1 for v in value):
        return tuple(int(v) for v in value), ""
    if value is None or (engine == "vllm" and not isinstance(value, list | tuple)):
        return None, ""  # vLLM takes anything that is no list for absent
    return None, f"the recorded layer ids are no list of integers: {escaped(value)}"


def _flag_off(contract: Contract, config: Mapping[str, Any]) -> bool:
    if _fact(contract, "use_aux_flag", False) is not True:  # a version may also refuse: it still asks for the states
        return False
    eagle = config.get("eagle_config")
    if config.get("speculators_config") is not None and _fact(contract, "reads_speculators", False):
        layer = config.get("transformer_layer_config")
        eagle = layer.get("eagle_config") if isinstance(layer, Mapping) else None
    return isinstance(eagle, Mapping) and eagle.get("use_aux_hidden_state", True) is False


# ---------------------------------------------------------------- what a list of ids captures


def _default_source(rules: Behaviour, n: int | None) -> str:
    plus = ", each one later" if rules.default == "plus-one" else ""
    return _DEFAULT + plus + (f" at N={n}" if n is not None else "")


def _shift(rules: Behaviour, ids: tuple[int, ...], n: int | None) -> int | None:
    """What is added to a configured id; None where that takes the unknown layer count."""
    if rules.ids == "verbatim":
        return 0
    if rules.ids == "deepseek":
        return 1 if ids and ids[0] == 1 else 0
    if rules.ids == "gpt-oss" and ids:
        return None if n is None else int(max(ids) != n)
    return 1


def _apply(rules: Behaviour, ids: tuple[int, ...] | None, n: int | None, bypass: bool) -> _Captured:
    """The HF indices a list of ids (None: the default list) captures in a target of ``n`` layers (None: unknown)."""
    own = rules.rule is not None and (rules.default if ids is None else rules.ids) == "own"
    if own and rules.rule is not None:
        found = rules.rule(ids, n) if n is not None else None
        if found is None:
            return _Captured(None)
        apart = {w - k for w, k in zip(found, ids or found, strict=False)}
        shift, wanted = (apart.pop() if ids is not None and len(apart) == 1 else None), found
    elif ids is None:
        if n is None:
            return _Captured(None)
        shift, plus = None, int(rules.default == "plus-one")
        wanted = tuple(k + plus for k in (2, n // 2, n - 3))
    else:
        shift = _shift(rules, ids, n)
        if shift is None:
            return _Captured(None)
        wanted = tuple(k + shift for k in ids)
    if rules.captures == "nothing":
        return _Captured((), "", True, shift)  # the class's own message says it
    if not wanted:
        return _Captured((), "the list of layer ids is empty: nothing is captured and the forward fails", True, shift)
    if n is None:
        return _Captured(tuple(sorted({k for k in wanted if k >= 0})), "", False, shift)
    raised, hf = _stored(rules, wanted, n)
    if not raised and 0 in hf and rules.zero != "embedding":
        raised = f"the state before layer 0 (HF 0) is asked for, which this target class cannot add up: {rules.zero}"
    if raised:
        return _Captured(None, raised, True, shift)
    if len(hf) == len(wanted):
        return _Captured(hf, "", False, shift)
    asked = ("the default layers" if ids is None else f"ids {list(ids)}") + f" in a target of {n} layers"
    if rules.short != "silent":
        return _Captured(None, f"{asked}: {rules.short}: captured {len(hf)} of {len(wanted)} aux hidden states", True, shift)
    quiet = len(hf) == 1 and bypass
    lost = sorted({k for k in wanted if k not in hf})
    why = f"HF {lost} can never be captured" if lost else "some of them are the same state"
    then = "fc is skipped without a word" if quiet else "fc gets too few columns and fails" if hf else "the forward fails"
    return _Captured(hf, f"{asked} give {len(hf)} of {len(wanted)} states ({why}): {then}", not quiet, shift)


def _stored(rules: Behaviour, wanted: tuple[int, ...], n: int) -> tuple[str, tuple[int, ...]]:
    """``(error, HF indices)`` once the class has taken the list."""
    if rules.store == "keyed":
        lost = [k for k in wanted if not 1 <= k <= n]
        return (f"KeyError: no layer before HF {lost[0]} among {n}" if lost else ""), tuple(sorted(set(wanted)))
    if rules.store in ("flags", "checked"):
        lost = [k for k in wanted if not -n <= k < n]
        if lost:
            return f"IndexError: layer {lost[0]} of {n} when the ids are set", ()
    if rules.store == "flags":  # a negative layer counts from the end, as Python does
        return "", tuple(sorted({k % n for k in wanted}))
    return "", tuple(sorted({k for k in wanted if 0 <= k < n or (k == n and rules.last)}))
