"""Views of the checkpoint room: what a draft or target is, every fact with the place it came from."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, Table, View, count, size, table, value_text

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import AuxIds, Checkpoint, DraftSpec, TargetSpec

__all__ = ["checkpoint_records", "checkpoint_view", "spec_records", "spec_view", "target_records", "target_view"]


def checkpoint_records(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """One row a tensor: name, dtype, shape, bytes, file."""
    return [t.to_dict() for t in checkpoint.tensors.values()]


def _dtypes(checkpoint: Checkpoint) -> str:
    counts: dict[str, int] = {}
    for t in checkpoint.tensors.values():
        counts[t.dtype] = counts.get(t.dtype, 0) + 1
    return ", ".join(f"{n} {dtype}" for dtype, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def checkpoint_view(checkpoint: Checkpoint) -> View:
    """Files, configs, deviations, tensors largest first."""
    tensors = sorted(checkpoint.tensors.values(), key=lambda t: (-t.nbytes, t.name))
    rows = ((t.name, t.dtype, t.shape, size(t.nbytes), t.file) for t in tensors)
    configs = ", ".join(f"{c.file} ({c.schema} schema)" for c in checkpoint.configs) or "no config"
    made_of = f"{count(len(tensors), 'tensor')} ({_dtypes(checkpoint)})" if tensors else "no tensors"
    blocks = [
        Block(
            status="warning",
            code=i.kind,
            title=f"{i.file}: {i.message}",
            evidence=tuple((str(k), value_text(v)) for k, v in i.evidence.items()),
        )
        for i in checkpoint.issues
    ]
    return View(
        title=f"Checkpoint {checkpoint.path}",
        summary=f"{made_of}, {size(checkpoint.bytes_total)}, {checkpoint.form}; {configs}",
        status="warning" if blocks else "none",
        blocks=tuple(blocks),
        tables=(
            table("Tensors, largest first", ("tensor", "dtype", "shape", "size", "file"), rows, kinds=repeat("smaller", len(tensors))),
        ),
    )


def spec_records(spec: DraftSpec | TargetSpec) -> list[dict[str, Any]]:
    """One row a fact: fact, value, known (a file said so), kind, where."""
    return [{"fact": n, "value": v.value, "known": v.known, "kind": v.kind, "where": v.where} for n, v in spec.values().items()]


target_records = spec_records


def _facts(spec: DraftSpec | TargetSpec) -> Table:
    records = [r for r in spec_records(spec) if r["value"] is not None]
    unstated = [r["fact"] for r in spec_records(spec) if r["value"] is None]
    one = table(
        "Facts and where each comes from",
        ("fact", "value", "source"),
        ((r["fact"], r["value"], r["where"] if r["known"] else f"{r['kind']} default: {r['where']}") for r in records),
        limit=60,
    )
    if not unstated:
        return one
    return Table(caption=one.caption, head=one.head, rows=one.rows, more=f"not stated anywhere: {', '.join(unstated)}")


def _aux(aux: AuxIds) -> Table:
    recorded = "none" if aux.raw is None else list(aux.raw)
    rows = [(f"recorded {recorded}", "as written", aux.where)]
    likely = "settled" if aux.settled else "likelier"
    for k, r in enumerate(aux.readings):
        rows.append((f"HF {list(r.hf)}", f"{r.convention} ({likely if k == 0 else 'also possible'})", r.why))
    about = "Target layers recorded for the draft (HF k = output_hidden_states[k], the input of layer k)"
    return table(about, ("layers", "reading", "why"), rows)


def target_view(target: TargetSpec) -> View:
    """Architecture and sizes, then facts with provenance."""
    layers, hidden, vocab = (value_text(v.value) for v in (target.num_layers, target.hidden_size, target.vocab_size))
    what = f"{target.architecture.value or 'architecture not stated'}, layers {layers}, hidden size {hidden}, vocabulary {vocab}"
    return View(title=f"Target {target.path}", summary=what, tables=(_facts(target),))


def spec_view(spec: DraftSpec) -> View:
    """Dialect, layers in every reading, facts with provenance."""
    d = spec.dialect
    seen = "; ".join(d.evidence)
    return View(
        title="Draft",
        summary=f"{spec.algorithm} draft, {d.name} dialect ({d.confidence} confidence: {seen})",
        tables=(_aux(spec.aux), _facts(spec)),
    )
