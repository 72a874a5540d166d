"""View of a source scan: what this copy of an engine hands out, which draft class it has, every behaviour with how it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, View, count, table

if TYPE_CHECKING:
    from eagle3diag.engines.scan import EngineScan

__all__ = ["scan_records", "scan_view"]

_WORST = ("error", "warning", "ok", "none")
_ORDER = ("read", "inferred", "recorded")
_CAPTURES = {
    "stream": ("ok", "hands out hidden + residual"),
    "mlp-branch": ("warning", "hands out the MLP branch of the previous layer, without the residual stream"),
    "nothing": ("error", "takes layer ids and never keeps a state: the first forward fails"),
    "error": ("error", "raises when the layer ids are set"),
}


def scan_records(scan: EngineScan) -> list[dict[str, Any]]:
    """One row a behaviour: behaviour, value, status, source."""
    rows = [{"behaviour": n, "value": f.value, "status": f.status, "source": f.source} for n, f in scan.fields.items()]
    return sorted(rows, key=lambda r: (_ORDER.index(r["status"]), r["behaviour"]))


def _target(scan: EngineScan) -> list[Block]:
    target = scan.target
    if target is None:
        return []
    if not target.found:
        return [Block(status="error", code="target", title=f"{target.arch}: no such target class in this source")]
    rules = target.behaviour
    where = (("where", ", ".join(target.where)), ("known", target.status))
    if not target.hook or rules is None:
        return [Block(status="error", code="target", title=f"{target.arch} has no hook for auxiliary states", evidence=where)]
    status, words = _CAPTURES[rules.captures]
    evidence = (
        ("default, as HF indices", ", ".join(target.default) or "not read"),
        ("a configured id k is HF", "k " + (target.shift if target.shift != "0" else "itself")),
        *((("model types allowed", ", ".join(target.allowed)),) if target.allowed else ()),
        *((("raises", rules.error),) if rules.error else ()),
        *where,
    )
    return [Block(status=status, code="target", title=f"{target.arch} {words}", evidence=evidence)]


def _draft(scan: EngineScan) -> list[Block]:
    about = scan.draft
    if about.get("class") is None:
        return [Block(status="error", code="draft", title=f"this source has no EAGLE-3 draft class of kind {scan.draft_class}")]
    named = ", ".join(about["architectures"])
    blocks = [
        Block(
            status="none",
            code="draft",
            title=f"drafts of kind {scan.draft_class} are read by {about['class']}",
            evidence=(("where", str(about["where"])), ("architectures", named)),
        )
    ]
    served = scan.served
    if served is not None:
        lost = served.dropped()
        told = "refused: " + served.refused.message if served.refused is not None else f"{count(len(lost), 'tensor')} dropped"
        evidence = tuple((n, "dropped") for n in lost[:6])
        status = "error" if served.refused or lost else "ok"
        blocks.append(Block(status=status, code="served", title=f"the draft given: {told}", evidence=evidence))
    return blocks


def scan_view(scan: EngineScan) -> View:
    """What one copy of an engine does."""
    counts = scan.counts()
    version = scan.version or "no version stated"
    stands = f"{scan.nearest} stands in for what is not read"
    blocks = tuple(sorted((*_target(scan), *_draft(scan)), key=lambda b: _WORST.index(b.status)))
    worst = next((s for s in ("error", "warning") if any(b.status == s for b in blocks)), "ok")
    rows = ((r["behaviour"], r["value"], r["status"], r["source"]) for r in scan_records(scan))
    return View(
        title=f"Scan of {scan.engine} ({version}) at {scan.source}" + (f", {scan.runner} runner" if scan.runner else ""),
        summary=f"{counts['read']} behaviours read, {counts['inferred']} inferred, {counts['recorded']} from the record; {stands}",
        status=worst,
        blocks=blocks,
        tables=(table("Behaviours", ("behaviour", "value", "known by", "source"), rows, limit=200),),
        notes=scan.notes,
    )
