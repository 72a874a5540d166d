"""Prometheus text of both engines, read by ``prometheus_client``'s own parser.

vLLM exposes counters (``vllm:spec_decode_num_drafts_total`` and so on, one series per engine; ``_created`` is a timestamp and no count),
SGLang gauges of the last window. Several scrapes in one file: counters only grow, so the last value of each series is the sum since the
start, and a counter that fell was restarted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from eagle3diag.serving.tally import Tally

__all__ = ["Scrape", "looks_like", "read_scrape"]

_VLLM = "vllm:spec_decode_num_"
_NAMES = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted", "accepted_tokens_per_pos": "position"}
_GAUGES = {
    "spec_accept_length": "length",
    "spec_num_steps": "steps",
    "spec_num_draft_tokens": "draft_tokens",
    "gen_throughput": "speed",
}


@dataclass(slots=True)
class Scrape:
    """Gauges that were read, and what was odd."""

    lengths: list[float] = field(default_factory=list)
    steps: int | None = None
    draft_tokens: int | None = None
    speed: float | None = None
    wrong: list[str] = field(default_factory=list)
    checked: int = 0
    restarts: int = 0
    unread: int = 0


def looks_like(head: bytes) -> bool:
    """Whether a text is an exposition of metrics."""
    return (b"# TYPE " in head or b"# HELP " in head or head.lstrip()[:6] in (b"vllm:s", b"sglang")) and (
        b"vllm:" in head or b"sglang:" in head or b"sglang_" in head or b"vllm_" in head or b"# TYPE " in head
    )


def _samples(text: str, scrape: Scrape) -> Iterator[tuple[str, dict[str, str], float]]:
    """Samples of the families that matter; a line that cannot be read (a cut scrape) is counted and left out."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UsageError("reading metrics needs prometheus_client: python -m pip install prometheus-client") from None
    for line in text.splitlines():
        if not line.startswith(("vllm:spec", "sglang:spec", "sglang:gen_t", "vllm_spec", "sglang_spec", "sglang_gen_t")):
            continue
        try:
            for family in text_string_to_metric_families(line + "\n"):
                for sample in family.samples:
                    yield sample.name, dict(sample.labels), float(sample.value)
        except (ValueError, IndexError, KeyError):
            scrape.unread += 1


def read_scrape(text: str, tally: Tally) -> Scrape:
    """Everything on speculation in an exposition, or several one after another.

    Raises:
        UsageError: ``prometheus_client`` is not installed.
    """
    scrape = Scrape()
    series: dict[tuple[str, str, int], list[float]] = {}
    gauges: dict[tuple[str, str], float] = {}
    for name, labels, value in _samples(text, scrape):
        bare = name.replace("_spec_decode_num_", ":spec_decode_num_", 1) if name.startswith("vllm_") else name
        if bare.startswith(_VLLM):
            kind = _NAMES.get(bare[len(_VLLM) :].removesuffix("_total"))
            if kind is None or not 0 <= value < 1e18:
                continue
            position = int(labels["position"]) if labels.get("position", "").isdigit() else -1
            label = f"{labels.get('model_name', '')}|{labels.get('engine', '')}|{labels.get('instance', labels.get('pod', ''))}"
            series.setdefault((label, kind, position), []).append(value)
        else:
            kind = _GAUGES.get(bare[7:]) if bare.startswith(("sglang:", "sglang_")) else None
            if kind is not None:
                gauges[kind, "|".join(f"{k}={v}" for k, v in sorted(labels.items()))] = value
    _counters(series, tally, scrape)
    for (kind, _), value in gauges.items():
        if value != value or value <= 0:
            continue
        if kind == "length" and value >= 1:
            scrape.lengths.append(value)
            tally.formats["SGLang metrics"] += 1
        elif kind == "speed":
            scrape.speed = (scrape.speed or 0.0) + value
        elif kind in ("steps", "draft_tokens"):
            setattr(scrape, kind, int(value))
    return scrape


def _sum(values: list[float], scrape: Scrape) -> float:
    """The counter's total over restarts: each fall begins a new one."""
    total, before = 0.0, 0.0
    for value in values:
        if value < before:
            total += before
            scrape.restarts += 1
        before = value
    return total + before


def _counters(series: dict[tuple[str, str, int], list[float]], tally: Tally, scrape: Scrape) -> None:
    for label in dict.fromkeys(key[0] for key in series):
        mine = {(kind, position): _sum(v, scrape) for (at, kind, position), v in series.items() if at == label}
        drafts, drafted, accepted = (mine.get((n, -1)) for n in ("drafts", "drafted", "accepted"))
        at = {position: value for (kind, position), value in mine.items() if kind == "position" and position >= 0}
        if accepted is None and at:
            accepted = sum(at.values())
        if not drafts or accepted is None:
            continue
        k = round(drafted / drafts) if drafted and abs(drafted / drafts - round(drafted / drafts)) < 0.005 else None
        tally.add_one("vLLM metrics", accepted=accepted, drafts=drafts, drafted=drafted, k=k, label=f"engine {label.split('|')[1]}")
        positions = [at[i] for i in range(len(at)) if i in at]
        if positions:
            tally.add_positions(positions[:k] if k else positions, drafts)
            scrape.checked += 1
            if abs(sum(positions) - accepted) > 0.5:
                scrape.wrong.append(f"positions sum to {sum(positions):,.0f} accepted tokens, the counter says {accepted:,.0f}")
