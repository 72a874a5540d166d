"""Which tensor of one checkpoint is which tensor of the other.

Four steps, the surest first: the same spelling; the same canonical name (the dialects' rename rules, fused projections taken
apart, the two names of the input norm of deeper layers); the same content; the only candidate of its shape in the same place. Nothing is
guessed among equals: where two tensors fit equally well they stay removed and added, and are listed as unsettled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from eagle3diag.checkpoint.model import Checkpoint
from eagle3diag.weights.pieces import ROLES, Piece, fused_parts, role

__all__ = ["By", "Match", "Matching", "match"]

By = Literal["name", "dialect", "content", "shape and position"]

_Unsettled = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Match:
    """One tensor (or rows of a fused one) found in both checkpoints."""

    name: str  #: how results are named: the spelling in the first checkpoint, for a fused pair the spelling of the part
    a: Piece
    b: Piece
    by: By


@dataclass(frozen=True, slots=True)
class Matching:
    """Everything paired, and what stays over."""

    matches: tuple[Match, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    unsettled: tuple[_Unsettled, ...]  #: names in a, names in b that fit each other equally well


def canonical_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Spelling in the file -> canonical name; a name the rules do not reach stands for itself."""
    from eagle3diag.checkpoint.names import canonical_names

    by_file = {file: canonical for canonical, file in canonical_names(checkpoint.tensors).items()}
    return {name: by_file.get(name, name) for name in checkpoint.tensors}


def match(a: Checkpoint, b: Checkpoint, digest: Callable[[Checkpoint, str], Hashable | None] | None = None) -> Matching:
    """Pair the tensors of two checkpoints.

    Args:
        digest: a hash of a tensor's content, or None for a tensor whose content says nothing about its identity (all elements
            equal). Without it no content is read and that step is left out.

    Raises:
        CheckpointError: from ``digest``, where a file changed or ended.
    """
    left, right = canonical_of(a), canonical_of(b)
    found: list[Match] = []

    def take(x: str, y: str, by: By) -> None:
        found.append(Match(x, Piece(a.tensors[x]), Piece(b.tensors[y]), by))
        del left[x], right[y]

    for name in [n for n in left if n in right]:
        take(name, name, "name")
    spelled = {c: n for n, c in right.items()}
    for name, canonical in list(left.items()):
        if canonical in spelled and spelled[canonical] in right:
            take(name, spelled[canonical], "dialect")
    spelled = {c: n for n, c in right.items()}
    for name, canonical in list(left.items()):
        other = _deep_norm(canonical)
        # both norms in one file are two tensors: only a file that has a single one calls it by the other engine's name
        if other in spelled and spelled[other] in right:
            take(name, spelled[other], "dialect")
    found += _fused(a, left, b, right, swap=False) + _fused(b, right, a, left, swap=True)

    unsettled: list[_Unsettled] = []
    if digest is not None:
        shapes = {(a.tensors[n].dtype, a.tensors[n].shape) for n in left} & {(b.tensors[n].dtype, b.tensors[n].shape) for n in right}

        def content(c: Checkpoint, names: Iterable[str]) -> dict[str, Hashable]:
            out: dict[str, Hashable] = {}
            for n in names:
                kind = (c.tensors[n].dtype, c.tensors[n].shape)
                value = digest(c, n) if kind in shapes else None
                if value is not None:
                    out[n] = (kind, value)
            return out

        for x, y in _unique(content(a, left), content(b, right), unsettled):
            take(x, y, "content")

    def place(c: Checkpoint, names: Mapping[str, str]) -> dict[str, Hashable]:
        return {n: (*_place(canonical), c.tensors[n].shape) for n, canonical in names.items()}

    known_l, known_r = ({n for n, c in side.items() if role(c) in ROLES} for side in (left, right))
    for x, y in _unique(place(a, left), place(b, right), unsettled):
        # two roles the format knows are two tensors, however alike their shapes
        if not (x in known_l and y in known_r):
            take(x, y, "shape and position")
    open_ = tuple(
        (xs, ys)
        for xs, ys in dict.fromkeys(unsettled)
        if all(x in left for x in xs) and all(y in right for y in ys) and not (set(xs) <= known_l and set(ys) <= known_r)
    )
    return Matching(tuple(sorted(found, key=lambda m: m.name)), tuple(sorted(left)), tuple(sorted(right)), open_)


def _unique(a: Mapping[str, Hashable], b: Mapping[str, Hashable], unsettled: list[_Unsettled]) -> list[tuple[str, str]]:
    """Pairs that share a key nobody else has; the others with a shared key go to ``unsettled``."""
    sides: tuple[dict[Hashable, list[str]], dict[Hashable, list[str]]] = (defaultdict(list), defaultdict(list))
    for side, names in zip(sides, (a, b), strict=True):
        for name, key in names.items():
            side[key].append(name)
    pairs = []
    for key, xs in sides[0].items():
        ys = sides[1].get(key, [])
        if len(xs) == len(ys) == 1:
            pairs.append((xs[0], ys[0]))
        elif ys:
            unsettled.append((tuple(sorted(xs)), tuple(sorted(ys))))
    return pairs


def _place(canonical: str) -> tuple[str, str]:
    """Where a tensor sits without its own name: the module that holds it, and ``weight``, ``bias`` or nothing."""
    parts = canonical.split(".")
    kind = parts.pop() if parts[-1] in ("weight", "bias") else ""
    return ".".join(parts[:-1]), kind


def _deep_norm(canonical: str) -> str:
    """The other engine's name of the input norm of draft layers >= 1, or an empty text."""
    parts = canonical.split(".")
    if len(parts) == 4 and parts[0] == "layers" and parts[1] != "0" and parts[2] in ("hidden_norm", "input_layernorm"):
        parts[2] = "input_layernorm" if parts[2] == "hidden_norm" else "hidden_norm"
        return ".".join(parts)
    return ""


def _fused(one: Checkpoint, left: dict[str, str], two: Checkpoint, right: dict[str, str], *, swap: bool) -> list[Match]:
    """Fused tensors of ``one`` whose parts stand apart in ``two``; takes them out of both sides."""
    found: list[Match] = []
    spelled = {c: n for n, c in right.items()}
    for name, canonical in list(left.items()):
        names = [spelled.get(part, "") for part in fused_parts(canonical)]
        if not names or not all(n in right for n in names):
            continue
        whole = one.tensors[name]
        infos = [two.tensors[n] for n in names]
        if (
            not whole.shape
            or any(i.shape[1:] != whole.shape[1:] or not i.shape for i in infos)
            or sum(i.shape[0] for i in infos) != whole.shape[0]
        ):
            continue
        row = 0
        for info in infos:
            piece = Piece(whole, row, row + info.shape[0])
            row += info.shape[0]
            pair = (Piece(info), piece) if swap else (piece, Piece(info))
            found.append(Match(info.name, *pair, "dialect"))
            del right[info.name]
        del left[name]
    return found
