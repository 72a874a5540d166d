"""Which wirings could be meant: every single fault a dump can show, and the pairs that occur together.

A fault in front of us is a difference from the wiring at hand, in either direction: ``layers 2, 15, 27 in place of 3, 16, 28`` is the
same list read forwards as a correction and backwards as a fault. Only what the dump and the draft's tensors can decide is listed: a state
that was not dumped, a norm without its tensor, a window longer than the texts cannot be tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from typing import Any

from eagle3diag.checkpoint.wiring import Wiring

__all__ = ["Candidate", "Scope", "alternatives", "described", "field_words", "value_words"]

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)
_FEW_SLOTS = 5  # up to this many states every choice among them is tried
_MAX_REPLACED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What can be tried.

    Attributes:
        layers: HF indices whose states the dump holds, ascending; the final state before the norm counts as N.
        final: the dump holds the target's last state after its final norm, or both it and that norm are at hand.
        final_norm: the target's final norm is at hand.
        target_layers: N, or None.
        tensors: canonical names the draft stores.
        thetas: further bases worth trying, with whose they are: ``{100000.0: "target"}``.
        scalings: rope scalings worth trying, by whose they are.
        reduced: the draft vocabulary is a part of the target's.
        embeddings: sources an embedding can be taken from.
        target_head: the target's head rows of the draft vocabulary are at hand, and differ from the draft's own.
        first_rows: the target's first head rows, as many as the draft has, are at hand.
        longest: tokens of the longest sample.
        width_fits: one state is as wide as the draft, so fc can be skipped.
        depth: decoder layers of the draft.
    """

    layers: tuple[int, ...] = ()
    final: bool = False
    final_norm: bool = False
    target_layers: int | None = None
    tensors: frozenset[str] = frozenset()
    thetas: Mapping[float, str] = field(default_factory=dict)
    scalings: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    reduced: bool = False
    embeddings: tuple[str, ...] = ()
    target_head: bool = False
    first_rows: bool = False
    longest: int = 0
    width_fits: bool = True
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One wiring to try in place of the one at hand.

    Attributes:
        name: the difference in words.
        kind: what sort of fault it is, ``+`` between two.
        wiring: to run.
        change: ``{field: (at hand, tried)}``.
        faults: how many single faults it takes.
    """

    name: str
    kind: str
    wiring: Wiring
    change: Mapping[str, tuple[Any, Any]]
    faults: int = 1


def alternatives(base: Wiring, scope: Scope, *, pairs: bool = True, damage: bool = False) -> tuple[Candidate, ...]:
    """Every wiring worth trying in place of ``base``, each once, single faults first.

    Args:
        base: the wiring at hand.
        scope: what the dump and the draft can show.
        pairs: also the pairs that occur together.
        damage: also parts that never were loaded; they explain a number and can never be a correction.
    """
    singles = list(_singles(base, scope))
    if damage:
        singles += list(_damaged(base, scope))
    out: dict[str, Candidate] = {}
    for kind, wiring in singles:
        _add(out, base, kind, wiring, 1)
    if pairs:
        for kind, wiring, faults in _together(base, singles):
            _add(out, base, kind, wiring, faults)
    return tuple(out.values())


def _add(out: dict[str, Candidate], base: Wiring, kind: str, wiring: Wiring, faults: int) -> None:
    change = base.differences(wiring)
    if change:
        out.setdefault(
            repr(sorted(change.items(), key=lambda c: c[0])),
            Candidate(name=described(base, wiring), kind=kind, wiring=wiring, change=change, faults=faults),
        )


def _changed(base: Wiring, **fields: Any) -> Wiring:
    return replace(base, **fields)


def _singles(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    for kind, layers in _layer_sets(base, scope):
        yield kind, _changed(base, aux_layers=layers, aux_layers_verify=None)
    yield from _states(base, scope)
    yield from _norms(base, scope)
    yield from _rope(base, scope)
    yield from _vocabulary(base, scope)
    for by in (-1, 1):  # never ahead of the text: a draft fed the token or state it should predict would look good for the wrong reason
        if base.token_shift + by <= 0:
            yield "token shift", _changed(base, token_shift=base.token_shift + by)
        if base.state_shift + by <= 0:
            yield "state shift", _changed(base, state_shift=base.state_shift + by)
    yield "concat", _changed(base, concat="hidden-first" if base.concat == "embedding-first" else "embedding-first")
    yield "position gap", _changed(base, position_gap=0 if base.position_gap else 1)
    if base.sliding_window is not None and base.sliding_window < scope.longest:
        yield "window", _changed(base, sliding_window=None)
    if base.unfilled:
        yield "never loaded", _changed(base, unfilled={})
    if scope.depth > 1:
        other = "hidden_norm" if base.deep_layer_norm == "input_layernorm" else "input_layernorm"
        yield "deep norm", _changed(base, deep_layer_norm=other)


def _damaged(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    """Parts left at their start values."""
    matrices = {t: "random" for t in sorted(scope.tensors) if t.startswith("layers.") and t.endswith("_proj.weight")}
    if matrices:
        yield "never loaded", _changed(base, unfilled={**base.unfilled, **matrices})
    if "fc.weight" in scope.tensors and base.fc == "applied":
        yield "never loaded", _changed(base, unfilled={**base.unfilled, "fc.weight": "random"})
    if base.head != "uninitialised":
        yield "never loaded", _changed(base, head="uninitialised")
    if base.embedding != "uninitialised":
        yield "never loaded", _changed(base, embedding="uninitialised")


def _layer_sets(base: Wiring, scope: Scope) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Other layers than those at hand, as many, all in the dump."""
    at, there = base.aux_layers, set(scope.layers)
    if base.state != "aux" or at is None:
        return
    tried: list[tuple[str, tuple[int, ...]]] = []
    tried += [("layers", tuple(k + by for k in at)) for by in (1, -1)]
    n = scope.target_layers
    if n is not None and n >= 4 and len(at) == 3:
        usual = (2, n // 2, n - 3)
        tried += [("layers", tuple(k + by for k in usual)) for by in (0, 1, -1)]
    tried += [("embedding first" if d == 0 else "layers", (d, *at[:-1])) for d in sorted(there) if d < min(at)]
    tried += [("embedding first" if at[0] == 0 else "layers", (*at[1:], d)) for d in sorted(there) if d > max(at)]
    if 1 < len(at) <= 3:
        tried += [("order", p) for p in permutations(at)]
    elif len(at) > 3:
        tried += [("order", at[::-1]), ("order", (*at[1:], at[0])), ("order", (at[-1], *at[:-1]))]
        tried += [("order", (*at[:i], at[i + 1], at[i], *at[i + 2 :])) for i in range(len(at) - 1)]
    replaced = []
    for i, k in enumerate(at):
        for d in sorted(there.difference(at)):
            layers = (*at[:i], d, *at[i + 1 :])
            distance = abs(k - d)
            replaced.append((distance, _replaced_kind(k, d, n), tuple(sorted(layers)) if list(at) == sorted(at) else layers))
    tried += [(kind, layers) for _, kind, layers in sorted(replaced, key=lambda r: r[0])[:_MAX_REPLACED]]
    if len(at) <= len(there) <= _FEW_SLOTS:
        tried += [("other slots", c) for c in combinations(sorted(there), len(at))]
    seen = {at}
    for kind, layers in tried:
        if layers not in seen and set(layers) <= there:
            seen.add(layers)
            yield kind, layers


def _replaced_kind(at: int, by: int, n: int | None) -> str:
    if n is not None and n in (at, by):
        return "final state among the layers"
    if 0 in (at, by):
        return "embedding first"
    return "one layer" if abs(at - by) == 1 else "another layer"


def _states(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    """Fusion skipped or not, the final state in place of the captured ones, states normed."""
    fused = "fc.weight" in scope.tensors
    if base.fc == "applied" and scope.width_fits and fused:
        yield "fc bypassed", _changed(base, fc="bypassed")
        if scope.final and base.state == "aux":
            yield "final state", _changed(base, state="final", fc="bypassed")
    if base.fc == "bypassed" and fused and base.aux_layers is not None and set(base.aux_layers) <= set(scope.layers):
        yield "fc bypassed", _changed(base, fc="applied", state="aux")
    if scope.final_norm and base.state == "aux":
        yield "states normed", _changed(base, aux_norm="none" if base.aux_norm == "final" else "final")


def _norms(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    """Norm flags one by one, in pairs and all together."""
    flags = ["norm_before_residual", "norm_output", "final_norm"]
    if "input_norm.weight" in scope.tensors:
        flags.append("norm_before_fc")
    if any(t.startswith("fc_norm.") for t in scope.tensors):
        flags.append("fc_norm")
    for flag in flags:
        yield flag, _changed(base, **{flag: not getattr(base, flag)})
    yield "double norm", _changed(base, double_norm=not base.double_norm)
    for size in sorted({2, len(flags)}):
        for chosen in combinations(flags, size):
            yield "+".join(chosen), _changed(base, **{f: not getattr(base, f) for f in chosen})


def _rope(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    thetas = dict.fromkeys((*scope.thetas, *_THETAS))
    for theta in thetas:
        if theta != base.rope_theta:
            yield "theta", _changed(base, rope_theta=float(theta))
    for scaling in (None, *scope.scalings.values()):
        if scaling != base.rope_scaling:
            yield "rope scaling", _changed(base, rope_scaling=scaling)


def _vocabulary(base: Wiring, scope: Scope) -> Iterator[tuple[str, Wiring]]:
    """Mapping, head and embedding."""
    if scope.reduced:
        for mapping in ("offset", "missing", "absolute", "t2d"):
            stored = {"offset": "d2t", "absolute": "d2t", "t2d": "t2d"}.get(mapping)
            if mapping != base.mapping and (stored is None or stored in scope.tensors):
                yield "mapping", _changed(base, mapping=mapping)
    if "lm_head.weight" in scope.tensors and base.head != "draft":
        yield "head", _changed(base, head="draft")
    if scope.target_head and base.head != "target-rows":
        yield "head", _changed(base, head="target-rows")
    if scope.first_rows and scope.reduced and base.head != "target-first-rows":
        yield "head cut to the first rows", _changed(base, head="target-first-rows")
    for source in scope.embeddings:
        if source != base.embedding:
            yield "embedding", _changed(base, embedding=source)


#: kinds that one cause brings together, beside the norm flags
_PAIRS = (
    ("layers", "norm_before_residual"),
    ("layers", "theta"),
    ("layers", "state shift"),
    ("layers", "norm_output"),
    ("norm_before_residual", "theta"),
    ("norm_output", "position gap"),
    ("final state", "head cut to the first rows"),
    ("fc bypassed", "head cut to the first rows"),
    ("head cut to the first rows", "mapping"),
    ("token shift", "position gap"),
)


def _together(base: Wiring, singles: Iterable[tuple[str, Wiring]]) -> Iterator[tuple[str, Wiring, int]]:
    """Pairs of faults that one cause brings together."""
    by_kind: dict[str, list[Wiring]] = {}
    for kind, wiring in singles:
        by_kind.setdefault(kind, []).append(wiring)
    for first, second in _PAIRS:
        # a whole-list shift and the first other base stand for their kind: the rest is found by trying again on top of the best
        for a in by_kind.get(first, [])[:2]:
            for b in by_kind.get(second, [])[:1]:
                yield f"{first}+{second}", _merged(base, a, b), 2
    for last in ("final state", "fc bypassed"):
        for a in by_kind.get(last, [])[:1]:
            for b in by_kind.get("head cut to the first rows", [])[:1]:
                for c in (w for w in by_kind.get("mapping", []) if w.mapping == "missing"):
                    yield f"{last}+head cut to the first rows+mapping", _merged(base, a, b, c), 3


def _merged(base: Wiring, *changed: Wiring) -> Wiring:
    return _changed(base, **{k: new for w in changed for k, (_, new) in base.differences(w).items()})


_WORDS = {
    "aux_layers": "layers",
    "aux_layers_verify": "layers in verify steps",
    "token_shift": "token shift",
    "state_shift": "state shift",
    "aux_norm": "norm on the states",
    "concat": "order in front of the layer",
    "position_gap": "position gap",
    "state": "state in front of the draft",
}


def described(base: Wiring, other: Wiring) -> str:
    """The difference in words: ``layers 2, 15, 27 in place of 3, 16, 28``."""
    parts = []
    for name, (old, new) in base.differences(other).items():
        if name == "aux_layers_verify" and other.aux_layers_verify is None:
            continue
        if name == "unfilled":
            parts.append(f"{len(new)} parameters left at their start values" if new else "every parameter loaded")
            continue
        parts.append(f"{field_words(name)} {value_words(name, new)} in place of {value_words(name, old)}")
    return "; ".join(parts) or "the same wiring"


def field_words(name: str) -> str:
    """A field of the wiring in words: ``layers`` for ``aux_layers``."""
    return _WORDS.get(name, name)


def value_words(name: str, value: Any) -> str:
    """A value of a field of the wiring in words: ``2, 15, 27``."""
    return _MAPS[value] if name == "mapping" else _shown(value)


_MAPS = {"offset": "by d2t", "absolute": "by d2t as absolute ids", "missing": "left out", "none": "none", "t2d": "by t2d"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value)
    if isinstance(value, float):
        return f"{value:.0f}" if value == int(value) else f"{value:g}"
    if isinstance(value, Mapping):
        return f"{len(value)} tensors" if any("." in str(k) for k in value) else str(dict(value) or "none")
    return "none" if value is None else str(value)
