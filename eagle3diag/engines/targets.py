"""Target classes: whether one hands out auxiliary states in an engine version, and by which rules.

The facts are data (``contracts/*_targets.toml``): families of classes, each with a cumulative list of changes. This module picks the row
for one class and one version; what the row means for given ids is ``capture``'s business. A class on no list is unknown, which is
neither yes nor no.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.display import Piece
from eagle3diag.engines import versions
from eagle3diag.engines.model import Contract, Launch
from eagle3diag.errors import escaped

if TYPE_CHECKING:
    from eagle3diag.engines.scan.target import ScannedTarget

__all__ = ["GENERIC", "Behaviour", "TargetSupport", "built_class", "not_dense", "target_support"]

_DATA = Path(__file__).parent / "contracts"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Behaviour(Piece):
    """How one family of target classes captures in one version; the words are explained at the head of ``sglang_targets.toml``."""

    ids: str
    default: str = "hf"
    store: str = "list"
    zero: str = "embedding"
    last: bool = False
    short: str = "silent"
    captures: str = "stream"
    error: str = ""
    source: str = ""
    status: str = "inferred"
    #: of a scanned class whose rule has no name (``ids`` is ``own``): (ids or None, layer count) -> HF indices wanted
    rule: Callable[[tuple[int, ...] | None, int], tuple[int, ...] | None] | None = field(default=None, compare=False)


_LISTED = ("sglang", "vllm")  # engines whose target classes are on record
#: What most classes of an engine do; used where the target is not given or not on record.
GENERIC = {
    "sglang": Behaviour(ids="plus-one", source="engine report 3.1, generic target"),
    "vllm": Behaviour(ids="verbatim", source="engine report 3.1, all classes"),
    "tensorrt-llm": Behaviour(ids="plus-one", source="transitions 6"),
    "llama.cpp": Behaviour(ids="verbatim", source="transitions 7"),
}


@dataclass(frozen=True, slots=True, repr=False)
class TargetSupport(Piece):
    """Whether a target class hands out auxiliary states.

    Attributes:
        hook: True, False, or None where the class is not on record (or no target is given).
        since: the first release in which the class is usable, where on record.
        message: one line for people; empty where it works.
        refusal: the engine's predicted error text where it stops at start, else None.
        behaviour: by which rules it captures; None without a hook.
        always: the refusal holds even for a draft that takes no auxiliary states (an allow-list of model types).
    """

    hook: bool | None
    since: str | None
    message: str
    refusal: str | None
    behaviour: Behaviour | None = field(default=None, compare=False)
    always: bool = False


@lru_cache(maxsize=4)
def _data(engine: str) -> dict[str, Any]:
    if engine not in _LISTED:
        return {"family": {}, "absent": {"classes": []}, "missing": {"steps": []}}
    with (_DATA / f"{engine}_targets.toml").open("rb") as file:
        return tomllib.load(file)


def _at(steps: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """The cumulative state of a list of steps at one version."""
    state: dict[str, Any] = {}
    for step in steps:
        if versions.at_least(version, step["since"]):
            state |= step
    state.pop("since", None)
    return state


def _row(engine: str, arch: str, version: str) -> tuple[bool | None, Behaviour | None]:
    """``(hook, behaviour)`` of a class at a version; ``(None, None)`` where the class is on no list."""
    data = _data(engine)
    families = [f for f in data["family"].values() if arch in f["classes"]]
    if not families:
        return (False, None) if arch in data["absent"]["classes"] else (None, None)
    begun = [f for f in families if versions.at_least(version, f["classes"][arch])]
    if not begun:
        return False, None
    family = max(begun, key=lambda f: versions.parse(f["classes"][arch]))
    if not family.get("hook", True):
        return False, None
    return True, Behaviour(**_at(family["steps"], version), source=family["source"], status=family["status"])


def _model_types(engine: str, target: TargetSpec) -> list[str]:
    """Model types a substring test may see: the text model's own where it names its class, else as configured and by architecture."""
    table = _data(engine).get("model_types", {})
    text = table.get(target.text_architecture.value)
    return [str(t) for t in ([text] if text else [target.model_type.value, table.get(target.architecture.value)]) if t]


def _refused_type(engine: str, version: str, types: list[str]) -> str | None:
    """The error text where the engine's allow-list of model types leaves the target out."""
    allow = _data(engine).get("allow")
    if allow is None or not types:
        return None
    state = _at(allow["steps"], version)
    allowed = state.get("types", [])
    if not _outside(allowed, types):
        return None
    return str(state["text"]).format(types=allowed, type=escaped(types[0]))


def _candidates(engine: str, arch: str) -> Iterator[str]:
    data = _data(engine)
    for family in data["family"].values():
        if arch in family["classes"]:
            yield family["classes"][arch]
            yield from (s["since"] for s in family.get("steps", ()))
    yield from (s["since"] for s in data.get("allow", {}).get("steps", ()))


def _first(engine: str, arch: str, types: list[str], newer_than: str) -> str | None:
    """The first release in which the class is usable; where it works on and off, the first one newer than the one asked for, if any."""
    usable = []
    for version in sorted(set(_candidates(engine, arch)), key=versions.parse):
        hook, row = _row(engine, arch, version)
        if hook and row is not None and row.captures in ("stream", "mlp-branch") and _refused_type(engine, version, types) is None:
            usable.append(version)
    newer = [v for v in usable if not versions.at_least(newer_than, v)]
    hook, row = _row(engine, arch, newer_than)
    works = bool(hook and row is not None and row.captures in ("stream", "mlp-branch"))
    ranked = usable if works else newer + usable
    return ranked[0] if ranked else None


def built_class(engine: str, target: TargetSpec, launch: Launch | None) -> str | None:
    """The class this engine builds for the target."""
    return ((engine == "vllm" and _backend(launch)) or target.architecture.value) if target.architecture.value else None


def _scanned(contract: Contract, seen: ScannedTarget, types: list[str]) -> TargetSupport:
    """Support as a source scan of the engine read it."""
    shown, where = escaped(seen.arch), f"this copy of {contract.engine} ({escaped(contract.origin, 80)})"
    refused = _outside(seen.allowed, types)
    if refused and seen.found:
        text = f"ValueError: eagle3 is only supported for {list(seen.allowed)} models. Got model_type='{escaped(types[0])}'"
        message = f"{shown}: {where} refuses EAGLE-3 for model type '{escaped(types[0])}'"
        return TargetSupport(seen.hook, None, message, text, seen.behaviour, always=True)
    if not seen.found:
        text = f"ValueError: Model architectures ['{shown}'] are not supported for now"
        return TargetSupport(False, None, f"{where} has no target class {shown}", text, always=True)
    if not seen.hook:
        text = str(_at(_data(contract.engine)["missing"]["steps"], contract.version).get("text", "")).format(arch=shown)
        return TargetSupport(False, None, f"{shown} has no capture hook in {where}: {', '.join(seen.where)}", text)
    rules = seen.behaviour
    assert rules is not None
    message, refusal = "", None
    if rules.captures == "nothing":
        message = f"{shown} takes the layer ids in {where} but never captures a state: the first forward fails"
    elif rules.captures == "error":
        message, refusal = f"{shown} raises when the layer ids are set in {where}", rules.error
    elif rules.captures == "mlp-branch":
        message = f"{shown} in {where} hands out the MLP branch of the previous layer without the residual stream, not the HF state"
    return TargetSupport(True, None, message, refusal, rules)


def _outside(allowed: tuple[str, ...] | list[str], types: list[str]) -> bool:
    return bool(allowed and types) and not any(a in t for a in allowed for t in types)


def _backend(launch: Launch | None) -> str | None:
    """The class vLLM builds where the launch line asks for the Transformers backend."""
    options: Mapping[str, Any] = launch.options if launch is not None else {}
    return "TransformersForCausalLM" if str(options.get("model-impl", "")).lower() == "transformers" else None


def target_support(contract: Contract, target: TargetSpec | None, launch: Launch | None = None) -> TargetSupport:
    """Whether this engine version can take auxiliary states from this target.

    Sources: the engine report 3.4, the capture runs and the table of version changes, through ``contracts/*_targets.toml``.
    """
    engine, version = contract.engine, contract.version
    if target is None or not target.architecture.value:
        return TargetSupport(None, None, "", None)
    arch = str(built_class(engine, target, launch))
    shown = escaped(arch)
    types = _model_types(engine, target)
    if contract.scanned is not None and contract.scanned.arch == arch:
        return _scanned(contract, contract.scanned, types)
    hook, row = _row(engine, arch, version)
    since = _first(engine, arch, types, version)
    later = f"; first in {since}" if since and not versions.at_least(version, since) else ""
    refused = _refused_type(engine, version, types)
    if refused is not None:
        message = f"{shown}: {engine} {version} refuses EAGLE-3 for model type '{escaped(types[0])}'{later}"
        return TargetSupport(hook, since, message, refused, row, always=True)
    if hook is None:
        return TargetSupport(None, None, f"target class {shown} is not on record for {engine}: assumed to capture as most classes do", None)
    if not hook:
        text = str(_at(_data(engine)["missing"]["steps"], version).get("text", "")).format(arch=shown)
        ever = later or (" (it had one in older releases)" if since else " (nor in any other release on record)")
        return TargetSupport(False, since, f"{shown} has no capture hook in {engine} {version}{ever}", text)
    assert row is not None
    if row.captures == "nothing":
        message = f"{shown} takes the layer ids in {engine} {version} but never captures a state: the first forward fails{later}"
        return TargetSupport(True, since, message, None, row)
    if row.captures == "error":
        return TargetSupport(True, since, f"{shown} raises when the layer ids are set in {engine} {version}{later}", row.error, row)
    if row.captures == "mlp-branch":
        message = (
            f"{shown} in {engine} {version} hands out the MLP branch of the previous layer without the residual stream, not the HF state"
        )
        return TargetSupport(True, since, message, None, row)
    return TargetSupport(True, since, "", None, row)


def not_dense(target: TargetSpec) -> bool:
    """True for a mixture of experts or a hybrid (linear attention, state space) target, by its config's keys."""
    marks = (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "linear_num_value_heads",
        "mamba_num_heads",
        "mamba_d_state",
        "ssm_state_size",
    )
    pending: list[Any] = [target.checkpoint.config] if target.checkpoint is not None else []
    for _ in range(64):  # a config nests a few levels, not more
        if not pending:
            return False
        at = pending.pop()
        if isinstance(at, dict):
            if any(isinstance(at.get(m), int) and at[m] > 0 for m in marks):
                return True
            pending += [v for v in at.values() if isinstance(v, dict)]
    return False
