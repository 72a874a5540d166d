"""The JSON shapes of the command line, schema 1.

Shapes only grow. Keys keep the order of the design page, text stays ASCII (``\\u`` escapes), so that nothing from a file can drive a
terminal, and NaN or infinities are written as strings, because JSON has no such numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import AuxIds, Checkpoint, Dialect, DraftSpec
    from eagle3diag.draft.agreement import Agreement
    from eagle3diag.draft.observed import Explanations
    from eagle3diag.draft.ranking import WiringRanking
    from eagle3diag.engines.model import AuxCapture, ServedDraft
    from eagle3diag.hidden.capture import Capture
    from eagle3diag.hidden.model import HiddenDump
    from eagle3diag.hidden.norms import NormProfile
    from eagle3diag.report.acceptance import EngineAcceptance
    from eagle3diag.rules.explain import Explanation
    from eagle3diag.rules.model import Report
    from eagle3diag.weights.convert import Conversion
    from eagle3diag.weights.diff import WeightDiff

__all__ = [
    "SCHEMA",
    "agreed",
    "captured",
    "checked",
    "converted",
    "diffed",
    "dumps",
    "inspected",
    "plain",
    "profiled",
    "ranked",
    "served",
]

SCHEMA = 1  #: of every shape here


def plain(value: Any) -> Any:
    """``value`` as JSON-able data: mappings, sequences, enums and odd numbers unfolded, anything else by its ``str``."""
    if value is None or (isinstance(value, (bool, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return [plain(v) for v in sorted(value, key=str)]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return plain(value.item())
    return str(value)


def dumps(value: Any) -> str:
    """One JSON document, two spaces of indent, no line break at the end."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def dialect(found: Dialect) -> dict[str, Any]:
    """Name, confidence and what was seen."""
    return {"name": found.name, "confidence": found.confidence, "evidence": list(found.evidence)}


def aux_ids(ids: AuxIds) -> dict[str, Any]:
    """Recorded ids with every reading of them."""
    readings = [{"convention": r.convention, "hf": list(r.hf), "why": r.why} for r in ids.readings]
    return {"raw": None if ids.raw is None else list(ids.raw), "where": ids.where, "settled": ids.settled, "readings": readings}


def draft(checkpoint: Checkpoint, spec: DraftSpec) -> dict[str, Any]:
    """The draft in a few facts, as ``check`` shows it."""
    return {
        "path": checkpoint.path,
        "form": checkpoint.form,
        "files": list(checkpoint.files),
        "configs": [c.file for c in checkpoint.configs],
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.bytes_total,
        "dialect": dialect(spec.dialect),
        "algorithm": spec.algorithm,
        "aux": aux_ids(spec.aux),
    }


def inspected(checkpoint: Checkpoint, spec: DraftSpec) -> dict[str, Any]:
    """The JSON shape of ``inspect``."""
    return {
        "schema": SCHEMA,
        "path": checkpoint.path,
        "form": checkpoint.form,
        "dialect": dialect(spec.dialect),
        "algorithm": spec.algorithm,
        "configs": [{"file": c.file, "schema": c.schema} for c in checkpoint.configs],
        "spec": {name: value.to_dict() for name, value in spec.values().items()},
        "aux": aux_ids(spec.aux),
        "wiring": spec.wiring.to_dict(),
        "tensors": [t.to_dict() for t in checkpoint.tensors.values()],
        "canonical": dict(spec.canonical),
        "issues": [{"kind": i.kind, "file": i.file, "message": i.message} for i in checkpoint.issues],
        "extras": list(checkpoint.extras),
    }


def checked(report: Report, explanation: Explanation | None = None) -> dict[str, Any]:
    """The JSON shape of ``check``: verdict, draft, engine, findings, skipped, passed, and what was assumed; with a log also that.

    Args:
        report: of a draft, or of a log alone, which has no ``draft``, ``engine`` and ``target`` then.
        explanation: of the log's number.
    """
    body = report.to_dict()
    case = report.case
    engine = None
    if case.served is not None:
        contract = case.served.contract
        engine = {
            "label": contract.label,
            "engine": contract.engine,
            "version": contract.asked,
            "contract": contract.version,
            "runner": contract.runner,
            "origin": contract.origin,
        }
    alone = not case.has("draft")
    about: dict[str, Any] = {} if alone else {
        "draft": draft(case.draft, case.spec),
        "engine": engine,
        "target": None if case.target is None else {"path": case.target.path, "architecture": case.target.architecture.value},
        "headers_only": case.headers_only,
    }
    return {
        "schema": SCHEMA,
        "verdict": body["verdict"],
        **about,
        **_logged(report, explanation),
        "findings": body["findings"],
        "skipped": [{"code": o.code, "why": o.why, "status": o.status} for o in report.skipped],
        "passed": body["passed"],
        "notes": body["notes"],
    }


def _logged(report: Report, explanation: Explanation | None) -> dict[str, Any]:
    """What a log adds; nothing without one."""
    case = report.case
    if case.log is None:
        return {}
    from eagle3diag.serving.payoff import payoff

    pay = payoff(case.log, case.baseline) if case.baseline is not None else None
    return {
        "log": case.log.to_dict(),
        "control": None if case.control is None else case.control.to_dict(),
        "training": None if case.training is None else case.training.to_dict(),
        "payoff": None if pay is None else pay.to_dict(),
        "explanation": None if explanation is None else explanation.to_dict(),
    }


def _listed(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)


def capture(aux: AuxCapture) -> dict[str, Any]:
    """Which target states reach the draft."""
    return {
        "ids": _listed(aux.ids),
        "source": aux.source,
        "prefill_hf": _listed(aux.prefill_hf),
        "verify_hf": _listed(aux.verify_hf),
        "unread": {where: list(ids) for where, ids in aux.unread.items()},
        "problem": aux.problem,
        "loud": aux.loud,
        "hook": aux.hook,
        "shift": aux.shift,
    }


def served(one: ServedDraft, acceptance: EngineAcceptance | None = None) -> dict[str, Any]:
    """One element of the JSON list of ``serve``; ``acceptance`` where a dump was given."""
    refusal = one.refused
    body = {
        "schema": SCHEMA,
        "engine": one.contract.engine,
        "version": one.contract.asked,
        "contract": one.contract.version,
        "on_record": one.contract.on_record,
        "origin": one.contract.origin,
        "runner": one.contract.runner,
        "refused": None if refusal is None else {"stage": refusal.stage, "message": refusal.message, "why": refusal.why},
        "fails_later": list(one.fails_later),
        "algorithm": one.algorithm,
        "tensors": {name: fate.to_dict() for name, fate in one.tensors.items()},
        "never_filled": dict(one.never_filled),
        "fc": {"runs": one.fc.runs, "width_in": one.fc.width_in, "bypassed_at_width": one.fc.bypassed_at_width},
        "aux": capture(one.aux),
        "wiring": one.wiring.to_dict(),
        "ignored": dict(one.ignored),
        "defaulted": dict(one.defaulted),
        "quirks": dict(one.quirks),
    }
    return body if acceptance is None else {**body, "acceptance": acceptance.to_dict()}


def diffed(diff: WeightDiff) -> dict[str, Any]:
    """The JSON shape of ``diff``."""
    return {"schema": SCHEMA, **diff.to_dict()}


def converted(conversion: Conversion) -> dict[str, Any]:
    """The JSON shape of ``convert``."""
    return {"schema": SCHEMA, **conversion.to_dict()}


def dump_facts(dump: HiddenDump) -> dict[str, Any]:
    """What a dump is, by its headers."""
    return {
        "path": dump.path,
        "format": dump.format,
        "evidence": list(dump.evidence),
        "hidden": dump.hidden,
        "axis": dump.axis,
        "final_norm": dump.final_norm,
        "slots": [{"slot": s.position, "hf": s.hf, "role": s.role, "name": s.name} for s in dump.slots],
        "samples": len(dump.samples),
        "issues": [{"kind": i.kind, "file": i.file, "message": i.message} for i in dump.issues],
    }


def profiled(dump: HiddenDump, profile: NormProfile, comparison: Any = None) -> dict[str, Any]:
    """The JSON shape of ``norms``: the profile, what was profiled, and the comparison with a second dump where there is one."""
    body = {"schema": SCHEMA, **profile.to_dict(), "dump": dump_facts(dump)}
    return body if comparison is None else {**body, "comparison": comparison.to_dict()}


def agreed(agreement: Agreement, tokens: str = "forced") -> dict[str, Any]:
    """The JSON shape of ``agree``; ``steps`` and the lengths are those of the way of feeding asked for."""
    body = {"schema": SCHEMA, "tokens": tokens, **agreement.to_dict()}
    if tokens == "forced":
        return body
    from eagle3diag.draft.lengths import expected_lengths

    lengths = expected_lengths([s.joint for s in agreement.on_policy])
    return {
        **body,
        "steps": body["on_policy"],
        "forced": body["steps"],
        "expected_length": {str(k): round(v, 6) for k, v in lengths.items()},
    }


def ranked(ranking: WiringRanking, explained: Explanations | None = None) -> dict[str, Any]:
    """The JSON shape of ``wirings``; ``observed`` where a length to explain was given."""
    body = {"schema": SCHEMA, **ranking.to_dict()}
    return body if explained is None else {**body, "observed": explained.to_dict()}


def captured(capture: Capture) -> dict[str, Any]:
    """The JSON shape of ``capture``."""
    from dataclasses import asdict

    return {"schema": SCHEMA, **asdict(capture)}
