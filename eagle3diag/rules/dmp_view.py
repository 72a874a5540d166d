"""What the DMP rules share: one reading of the dump, the target's tables where they are at hand, and words for rows and samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.model import Slot
from eagle3diag.rules.model import Case

if TYPE_CHECKING:
    from eagle3diag.draft.tables import TargetTables
    from eagle3diag.hidden.misaligned import Alignment
    from eagle3diag.hidden.normchecks import Rotated
    from eagle3diag.hidden.scan import DumpScan, Spans
    from eagle3diag.hidden.slotchecks import DepthOrder, Misplaced, NormFact

__all__ = ["Evidence", "evidence", "names", "row_words", "share"]

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Aux slots (positions) in order of depth: as recorded or as the draft takes them, and as the states tell, where they do."""

    meant: tuple[int, ...]
    seen: DepthOrder | None = None
    misplaced: Misplaced | None = None

    @property
    def wrong(self) -> bool:
        """The states contradict the record."""
        return self.misplaced is not None or (
            self.seen is not None and self.seen.order != tuple(p for p in self.meant if p in self.seen.rms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the rules look at, computed once for a dump and a target.

    Attributes:
        tables: the target's embedding, head and final norm as far as they are at hand, else None.
        norm: where the final state stands against the final norm; None where that cannot be told.
        normed: whether to take it as after the norm: as found, else as the format means it.
        depth: the order of the aux slots; None where nobody knows what it should be (a draft that takes HF 0).
    """

    scan: DumpScan
    tables: TargetTables | None
    norm: NormFact | None
    normed: bool
    depth: Depth | None
    alignment: Alignment
    rotated: tuple[Rotated, ...]

    @property
    def damaged(self) -> frozenset[str]:
        """Samples some rows of which are not the states of their tokens, or not in the basis of the others."""
        rotten = {s.name for s in self.scan.samples if not s.whole or any(bool((~r.good).any()) for r in s.rows.values())}
        return self.alignment.samples | rotten | self.turned

    @property
    def turned(self) -> frozenset[str]:
        """Samples that are rotated although others are not."""
        return frozenset(n for r in self.rotated for n in r.samples)


def evidence(case: Case) -> Evidence:
    """Reads the dump, once for all rules of a case.

    Raises:
        CheckpointError: the target's rows contradict each other.
    """
    return case.workings.once("evidence of the dump", case.measured_on, lambda: _evidence(case))


def _evidence(case: Case) -> Evidence:
    from eagle3diag.hidden.misaligned import alignment
    from eagle3diag.hidden.normchecks import rotated
    from eagle3diag.hidden.scan import scan
    from eagle3diag.hidden.slotchecks import norm_fact

    assert case.dump is not None
    seen = scan(case.dump)
    tables = _tables(case)
    norm = None if tables is None else norm_fact(seen, tables)
    status = norm.status if norm is not None and norm.status != "unknown" else case.dump.final_norm
    placed, turned = alignment(seen, tables, normed=status == "post"), rotated(seen, tables)
    elsewhere = {n for r in turned for n in r.samples}  # in another basis nothing fits the tables: DMP609 speaks
    return Evidence(
        scan=seen,
        tables=tables,
        norm=norm,
        normed=status == "post",
        depth=_depth(case, seen, tables, status == "post"),
        alignment=replace(placed, found=tuple(m for m in placed.found if m.kind != "foreign" or m.sample not in elsewhere)),
        rotated=turned,
    )


def _depth(case: Case, scan: DumpScan, tables: TargetTables | None, normed: bool) -> Depth | None:
    from eagle3diag.hidden.slotchecks import depth_order, misplaced

    aux = [s for s in scan.dump.aux if s.hf != 0]
    odd: Misplaced | None = None
    wanted = case.spec.wiring.aux_layers
    if aux and all(s.hf is not None for s in aux):
        aux.sort(key=lambda s: s.hf or 0)
        aux = aux[: len(aux) - _last_is_normed(case, scan, aux)]
        judged, odd = _spread(aux), misplaced(scan, aux)
    elif wanted and len(wanted) == len(aux):
        if 0 in wanted:
            return None
        aux = [s for _, s in sorted(zip(wanted, aux, strict=True), key=lambda pair: pair[0])]
        judged = aux
    else:
        judged = aux
    return Depth(meant=tuple(s.position for s in aux), seen=depth_order(scan, judged, tables, normed=normed), misplaced=odd)


def _last_is_normed(case: Case, scan: DumpScan, aux: list[Slot]) -> bool:
    """Whether the deepest recorded slot may stand outside the stream: transformers gives HF index N after the final norm."""
    from eagle3diag.hidden.slotchecks import median_rms

    layers = case.target.num_layers.value if case.target is not None else None
    told = scan.dump.metadata.get("target_layers", "")
    layers = layers or (int(told) if told.isdecimal() else None)
    if layers is not None or len(aux) < 2:
        return aux[-1].hf == layers
    last, before = median_rms(scan, aux[-1]), median_rms(scan, aux[-2])
    return last is not None and before is not None and last < before / 2


def _spread(aux: list[Slot]) -> list[Slot]:
    """Recorded layers thinned out so that neighbours lie a good way apart: the order of close ones cannot be told."""
    out: list[Slot] = []
    gap = 3 if not aux else max(3, ((aux[-1].hf or 0) - (aux[0].hf or 0)) // 4)
    for s in aux:
        if not out or (s.hf or 0) - (out[-1].hf or 0) >= gap:
            out.append(s)
    return out


def _tables(case: Case) -> TargetTables | None:
    """The target's rows, or those a capture left beside its dump."""
    from eagle3diag.checkpoint.target import open_target
    from eagle3diag.draft.tables import load_tables

    assert case.dump is not None
    target = case.target
    if target is None or target.embed is None:
        at = Path(case.dump.path)
        folder = at if at.is_dir() else at.parent
        places = (f for f in (folder, folder / "target") if (f / "rows.safetensors").is_file() and (f / "config.json").is_file())
        beside = next(places, None)
        if beside is not None:
            try:
                target = open_target(str(beside))
            except CheckpointError:
                target = case.target
    tables = load_tables(target, case.draft, case.spec)
    return tables if tables.embedding is not None or tables.head is not None else None


def row_words(spans: Spans) -> str:
    """``row 17``, ``rows 152 to 191``, ``rows 3, 8 to 10 and 4 more runs``."""
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:_SHOWN]]
    many = len(spans) > 1 or (bool(spans) and spans[0][0] != spans[0][1])
    more = f" and {len(spans) - _SHOWN} more runs" if len(spans) > _SHOWN else ""
    return f"row{'s' if many else ''} {', '.join(shown)}{more}"


def names(samples: Iterable[str]) -> str:
    """Up to four sample names."""
    all_ = list(samples)
    more = f" and {len(all_) - _SHOWN} more" if len(all_) > _SHOWN else ""
    return ", ".join(escaped(n) for n in all_[:_SHOWN]) + more


def share(n: int, scan: DumpScan) -> str:
    """``2 of 8 samples``, saying so where not all were read."""
    read = len(scan.samples) + len(scan.unread)
    return f"{n} of {read} samples" + (f" read (the dump has {scan.of:,})" if read < scan.of else "")
