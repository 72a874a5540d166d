"""The JSON shapes of the command line, schema 1.

Shapes only grow. Keys keep the order of the design page, text stays ASCII (``\\u`` escapes), so that nothing from a file can drive a
terminal, and NaN or infinities are written as strings, because JSON has no such numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eagle3diag.display import plain

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
    from eagle3diag.draft.agreement import Agreement
    from eagle3diag.draft.observed import Explanations
    from eagle3diag.draft.ranking import WiringRanking
    from eagle3diag.engines.model import ServedDraft
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


def dumps(value: Any) -> str:
    """One JSON document, two spaces of indent, no line break at the end."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def inspected(checkpoint: Checkpoint, spec: DraftSpec) -> dict[str, Any]:
    """The JSON shape of ``inspect``: the draft, then its files."""
    return {"schema": SCHEMA, **spec.to_dict(), **checkpoint.to_dict()}


def checked(report: Report, explanation: Explanation | None = None) -> dict[str, Any]:
    """The JSON shape of ``check``: the report, and with a log what explains its number."""
    body = report.to_dict()
    if report.case.log is None:
        return body
    told = {"explanation": None if explanation is None else explanation.to_dict()}
    first = list(body).index("findings")
    return {**dict(list(body.items())[:first]), **told, **dict(list(body.items())[first:])}


def served(one: ServedDraft, acceptance: EngineAcceptance | None = None) -> dict[str, Any]:
    """One element of the JSON list of ``serve``; ``acceptance`` where a dump was given."""
    body = one.to_dict()
    return body if acceptance is None else {**body, "acceptance": acceptance.to_dict()}


def diffed(diff: WeightDiff) -> dict[str, Any]:
    """The JSON shape of ``diff``."""
    return {"schema": SCHEMA, **diff.to_dict()}


def converted(conversion: Conversion) -> dict[str, Any]:
    """The JSON shape of ``convert``."""
    return {"schema": SCHEMA, **conversion.to_dict()}


def profiled(dump: HiddenDump, profile: NormProfile, comparison: Any = None) -> dict[str, Any]:
    """The JSON shape of ``norms``: the profile, what was profiled, and the comparison with a second dump where there is one."""
    body = {"schema": SCHEMA, **profile.to_dict(), "dump": dump.to_dict()}
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
    return {"schema": SCHEMA, **capture.to_dict()}
