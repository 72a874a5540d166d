"""Two checkpoints against each other: names, shapes, dtypes, config facts, and on request every value.

Names are matched by meaning first (``renames``), so that two exporters of one draft compare equal tensor by tensor; what is
matched only by content or by shape says so. Config facts are compared after normalisation, whatever schema each stands in;
keys the normal form does not know are compared as written where both files are in the same schema.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.display import Piece, Shown, data
from eagle3diag.errors import Eagle3DiagError
from eagle3diag.weights.compare import ValueChange, compare
from eagle3diag.weights.renames import By, Match, match
from eagle3diag.weights.values import blocks_of

__all__ = ["Changed", "Renamed", "ValueChange", "WeightDiff", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Renamed(Piece):
    """One tensor under two names.

    Attributes:
        before, after: spelling in the first and in the second checkpoint.
        by: ``dialect`` (a rename rule), ``content`` (same bytes) or ``shape and position`` (the only candidate; a likely guess).
        rows: where one side holds it fused with others: first row and one past the last row in the fused tensor, else None.
    """

    before: str
    after: str
    by: By
    rows: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, object]:
        """``{"from", "to", "by"}``, and ``rows`` in a fused tensor."""
        out: dict[str, object] = {"from": self.before, "to": self.after, "by": self.by}
        return out | ({"rows": list(self.rows)} if self.rows else {})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Changed(Piece):
    """A shape, dtype or config fact that is ``a`` in the first checkpoint and ``b`` in the second (None: not stated)."""

    name: str
    a: Any
    b: Any

    def to_dict(self) -> dict[str, object]:
        """``{"name", "a", "b"}``."""
        return data({"name": self.name, "a": _plain(self.a), "b": _plain(self.b)})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WeightDiff(Shown):
    """What differs between two checkpoints.

    Attributes:
        a, b: the two paths.
        added, removed: names only in the second, only in the first.
        renamed: the same tensor under another name.
        unsettled: removed and added names that fit each other equally well; not guessed.
        shape, dtype: matched tensors whose shape or dtype differs.
        values: every matched tensor of equal shape, compared by value; empty unless asked for.
        config: facts that differ.
        matched: number of pairs (rows of a fused tensor count as one each).
        with_values: whether values were compared.
    """

    a: str
    b: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    renamed: tuple[Renamed, ...]
    unsettled: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    shape: tuple[Changed, ...]
    dtype: tuple[Changed, ...]
    values: tuple[ValueChange, ...]
    config: tuple[Changed, ...]
    matched: int
    with_values: bool

    @property
    def changed(self) -> tuple[ValueChange, ...]:
        """Tensors whose values differ, the largest relative difference first."""
        found = [v for v in self.values if not v.equal]
        return tuple(sorted(found, key=lambda v: -(v.relative if v.relative is not None else float("inf"))))

    @property
    def same_tensors(self) -> bool:
        """Nothing differs but names, as far as was looked."""
        return not (self.added or self.removed or self.shape or self.dtype or self.changed)

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of ``diff``."""
        return data(
            {
                "schema": 1,
                "a": self.a,
                "b": self.b,
                "added": list(self.added),
                "removed": list(self.removed),
                "renamed": [r.to_dict() for r in self.renamed],
                "unsettled": [{"from": list(x), "to": list(y)} for x, y in self.unsettled],
                "shape": [c.to_dict() for c in self.shape],
                "dtype": [c.to_dict() for c in self.dtype],
                "values": [v.to_dict() for v in self.values],
                "config": [c.to_dict() for c in self.config],
                "matched": self.matched,
                "with_values": self.with_values,
            }
        )


def diff(
    a: Checkpoint | str | os.PathLike[str],
    b: Checkpoint | str | os.PathLike[str],
    *,
    values: bool = False,
) -> WeightDiff:
    """Compare two checkpoints.

    Args:
        a, b: opened, or paths to open.
        values: also compare every value; streams both once, memory flat. Without it only headers and configs are read.

    Raises:
        CheckpointError: one cannot be opened, or changed or ended while being read.

    Example:
        >>> same = diff("data_samples/smollm2-eagle3/draft", "data_samples/smollm2-eagle3/draft", values=True)
        >>> same.matched, all(one.equal for one in same.values)
        (15, True)
    """
    left, right = _opened(a), _opened(b)
    found = match(left, right, _digest if values else None)
    same_shape = [m for m in found.matches if m.a.shape == m.b.shape]
    return WeightDiff(
        a=left.path,
        b=right.path,
        added=found.added,
        removed=found.removed,
        renamed=tuple(_renamed(m) for m in found.matches if m.by != "name"),
        unsettled=found.unsettled,
        shape=tuple(Changed(name=m.name, a=m.a.shape, b=m.b.shape) for m in found.matches if m.a.shape != m.b.shape),
        dtype=tuple(Changed(name=m.name, a=m.a.info.dtype, b=m.b.info.dtype) for m in found.matches if m.a.info.dtype != m.b.info.dtype),
        values=tuple(compare(left, right, m) for m in same_shape) if values else (),
        config=_config(left, right),
        matched=len(found.matches),
        with_values=values,
    )


def _opened(given: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    if isinstance(given, Checkpoint):
        return given
    from eagle3diag.checkpoint.open import open_checkpoint

    return open_checkpoint(given)


def _renamed(m: Match) -> Renamed:
    piece = m.a if m.a.start is not None else m.b
    rows = None if piece.start is None or piece.stop is None else (piece.start, piece.stop)
    return Renamed(before=m.a.info.name, after=m.b.info.name, by=m.by, rows=rows)


def _digest(checkpoint: Checkpoint, name: str) -> bytes | None:
    """sha256 of the raw bytes; None where all elements are equal (all ones, all zero), which identifies nothing."""
    import hashlib

    total = hashlib.sha256()
    info = checkpoint.tensors[name]
    size = info.nbytes // info.numel if info.numel and info.nbytes % info.numel == 0 else 1
    first: bytes | None = None
    constant = True
    for view in blocks_of(checkpoint, name):
        total.update(view)
        if constant:
            raw = bytes(view)
            first = raw[:size] if first is None else first
            constant = raw == first * (len(raw) // size)
    return None if constant else total.digest()


def _plain(value: Any) -> object:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _config(a: Checkpoint, b: Checkpoint) -> tuple[Changed, ...]:
    """Facts that differ: normalised ones by their name, others by their key as written."""
    if not a.configs or not b.configs:
        if bool(a.configs) == bool(b.configs):
            return ()
        return (Changed(name="config.json", a=a.configs[0].file if a.configs else None, b=b.configs[0].file if b.configs else None),)
    known: set[str] = set()
    facts: list[Changed] = []
    try:
        from eagle3diag.checkpoint.spec import draft_spec

        specs = draft_spec(a), draft_spec(b)
    except Eagle3DiagError:
        pass
    else:
        sides = [_facts(s) for s in specs]
        facts = [Changed(name=k, a=sides[0][k], b=sides[1][k]) for k in sides[0] if sides[0][k] != sides[1][k]]
        known = {key for s in specs for key in _keys_read(s)}
    if a.configs[0].schema == b.configs[0].schema:
        flat = [dict(_leaves(c.configs[0].data)) for c in (a, b)]
        for key in dict.fromkeys([*flat[0], *flat[1]]):
            if key.rsplit(".", 1)[-1] not in known and flat[0].get(key) != flat[1].get(key):
                facts.append(Changed(name=f"{a.configs[0].file}: {key}", a=flat[0].get(key), b=flat[1].get(key)))
    return tuple(facts)


def _facts(spec: DraftSpec) -> dict[str, Any]:
    out: dict[str, Any] = {"dialect": spec.dialect.name, "algorithm": spec.algorithm}
    out |= {name: v.value for name, v in spec.values().items()}
    return out | {"aux layers (HF)": spec.aux.hf}


def _keys_read(spec: DraftSpec) -> Iterable[str]:
    """Config keys behind the normalised facts; what differs in them is listed under the fact's name."""
    places = [v.where for v in spec.values().values() if v.kind == "config"] + [spec.aux.where]
    for place in places:
        for word in place.replace(",", " ").split():
            yield word.rsplit(".", 1)[-1]
    yield from ("rope_theta", "rope_scaling", "rope_parameters", "rope_type", "factor")


def _leaves(data: Mapping[str, Any], at: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value and key not in ("rope_scaling", "rope_parameters"):
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value
