"""JSON: per-request metrics of both engines, SGLang's ``/server_info`` and benchmark results, wherever they stand in a document.

Per request, vLLM gives counts and a histogram (0.29.0 on); SGLang gives ``spec_verify_ct`` and, by version, counts, a histogram, a length
and a rate that is defined otherwise than the log's. Sources: engines.md 6 (HTTP), field_reports.md 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3diag.serving.tally import Tally

__all__ = ["Documents", "literal", "read_document"]

_DEEPEST = 12
_MOST = 2_000_000  # nodes of one document
_SLACK = 0.0051


def _number(value: Any) -> float | None:
    return (
        float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 and value == value else None
    )


def _whole(value: Any) -> int | None:
    n = _number(value)
    return int(n) if n is not None and n >= 0 and n == int(n) else None


def _counts(value: Any) -> list[int]:
    if not isinstance(value, list) or not 2 <= len(value) <= 512:
        return []
    some = [_whole(v) for v in value]
    return [] if None in some else [v for v in some if v is not None]


def literal(text: str) -> Any:
    """A Python literal that an engine or trainer printed, None where it is none."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class Documents:
    """What documents said beside the counts."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.engine: str | None = None
        self.version: str | None = None
        self.lifetime: list[float] = []  #: means the engine keeps
        self.bench: list[tuple[float, float, float | None]] = []  #: (length, weight, output tokens per second)
        self.wrong: list[str] = []
        self.checked = 0
        self.first_token = 0  #: requests whose first token came from the prefill and is counted in the length

    def check(self, what: str, printed: float | None, follows: float, slack: float = _SLACK) -> None:
        """A stated number against the counts."""
        if printed is None:
            return
        self.checked += 1
        if abs(printed - follows) > slack:
            self.wrong.append(f"{what}: {printed:.6g} is stated, {follows:.6g} follows from the counts")


def read_document(data: Any, tally: Tally, documents: Documents) -> int:
    """Everything known in one JSON document; returns how many records were found."""
    found = 0
    for node in _nodes(data):
        if "num_spec_steps" in node and "num_accepted_draft_tokens" in node:  # by itself, or below "speculative_decoding"
            found += _vllm(node, tally, documents)
        if "spec_verify_ct" in node:
            found += _sglang(node, tally, documents)
        if "avg_spec_accept_length" in node:
            length = _number(node["avg_spec_accept_length"])
            if length is not None and length >= 1:
                documents.lifetime.append(length)
                tally.formats["SGLang server_info"] += 1
                documents.engine = "sglang"
                found += 1
        if "speculative_algorithm" in node:
            documents.options.update({k: v for k, v in node.items() if isinstance(k, str) and not isinstance(v, (dict, list))})
            documents.engine = documents.engine or "sglang"
            documents.version = documents.version or (node["version"] if isinstance(node.get("version"), str) else None)
        length = _number(node.get("accept_length"))
        if length is not None and length >= 1 and "spec_verify_ct" not in node:
            weight = _number(node.get("num_questions") or node.get("completed")) or 1.0
            documents.bench.append((length, max(1.0, weight), _number(node.get("output_throughput"))))
            tally.formats["SGLang bench"] += 1
            found += 1
    return found


def _nodes(data: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in a document, the outer ones first, within bounds."""
    layer, seen = [data], 0
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in layer:
            seen += 1
            if seen > _MOST:
                return
            if isinstance(one, Mapping):
                yield one
                below += [v for v in one.values() if isinstance(v, (dict, list))]
            elif isinstance(one, list):
                below += [v for v in one if isinstance(v, (dict, list))]
        layer = below


def _vllm(m: Mapping[str, Any], tally: Tally, documents: Documents) -> int:
    drafts, accepted = _whole(m.get("num_spec_steps")), _whole(m.get("num_accepted_draft_tokens"))
    if drafts is None or accepted is None or drafts == 0:
        return 0
    documents.engine = documents.engine or "vllm"
    drafted, k, histogram = _whole(m.get("num_draft_tokens")), _whole(m.get("num_spec_tokens")), _counts(m.get("acceptance_histogram"))
    tally.add_one("vLLM request", accepted=accepted, drafts=drafts, drafted=drafted, k=k)
    tally.add_request(1 + accepted / drafts)
    documents.check("mean_acceptance_length", _number(m.get("mean_acceptance_length")), 1 + accepted / drafts, 1e-4)
    if drafted:
        documents.check("draft_acceptance_rate", _number(m.get("draft_acceptance_rate")), accepted / drafted, 1e-4)
    steps = _counts(m.get("per_step_accepted"))
    if not histogram and steps and len(steps) == drafts:
        histogram = [steps.count(i) for i in range(max([*steps, k or 0]) + 1)]
    _histogram("acceptance_histogram", histogram, drafts, accepted, tally, documents)
    return 1


def _histogram(name: str, histogram: Sequence[int], drafts: int, accepted: int, tally: Tally, documents: Documents) -> None:
    if not histogram:
        return
    documents.check(f"steps in {name}", float(sum(histogram)), drafts, 0.5)
    documents.check(f"accepted tokens in {name}", float(sum(i * n for i, n in enumerate(histogram))), accepted, 0.5)
    if sum(histogram) == drafts:
        tally.add_histogram(list(histogram))


def _sglang(m: Mapping[str, Any], tally: Tally, documents: Documents) -> int:
    drafts, tokens = _whole(m.get("spec_verify_ct")), _whole(m.get("completion_tokens"))
    if not drafts:
        return 0
    documents.engine = documents.engine or "sglang"

    def first(*names: str) -> int | None:
        return next((n for n in (_whole(m.get(x)) for x in names) if n is not None), None)

    accepted = first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    drafted = first("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
    histogram = _counts(m.get("spec_correct_drafts_histogram") or m.get("spec_accept_histogram"))
    length = _number(m.get("spec_accept_length"))
    if accepted is None and histogram and sum(histogram) == drafts:
        accepted = sum(i * n for i, n in enumerate(histogram))
    if tokens is not None and tokens >= drafts:
        documents.check("spec_accept_length", length, tokens / drafts)
    if accepted is None:
        if tokens is None and length is None:
            return 0
        # completion_tokens / verify_ct, as the server itself defines the length: the prefill's token is counted in
        accepted = round(drafts * ((tokens / drafts if tokens is not None else length or 1.0) - 1))
        documents.first_token += 1
    k = round(drafted / drafts) if drafted and drafted % drafts == 0 else None
    tally.add_one("SGLang request", accepted=max(0, accepted), drafts=drafts, drafted=drafted, k=k)
    tally.add_request(length if length is not None else 1 + accepted / drafts)
    _histogram("accept histogram", histogram, drafts, accepted, tally, documents)
    return 1
