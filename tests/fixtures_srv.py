"""One case that makes each serving rule speak, and one that must not; and engine lines for the other tests of this room."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3diag.rules.case import make_case
from eagle3diag.rules.logcase import log_case
from eagle3diag.rules.model import Case
from tests.factory import tiny_config, tiny_tensors, write_draft


def sglang_line(i: int, length: float, rate: float | None = None, *, tokens: int = 812, tps: float = 215.33, running: int = 1) -> str:
    """A decode line of SGLang 0.5.4 or later; without a rate, of 0.4.7 to 0.5.3."""
    told = f" accept rate: {rate:.2f}," if rate is not None else ""
    return (
        f"[2026-02-11 10:{i // 60:02d}:{i % 60:02d} TP0] Decode batch, #running-req: {running}, #token: {tokens}, token usage: 0.01, "
        f"accept len: {length:.2f},{told} cuda graph: True, gen throughput (token/s): {tps:.2f}, #queue-req: 0"
    )


def vllm_line(i: int, drafts: int, accepted: int, rates: Sequence[float], *, engine: str = "", k: int | None = None) -> str:
    """A metrics line of vLLM 0.10.2 or later."""
    k = k or len(rates)
    shown = ", ".join(f"{r:.3f}" for r in rates)
    return (
        f"(APIServer pid=4117) INFO 07-20 18:{i // 60:02d}:{i % 60:02d} [metrics.py:101] {engine}SpecDecoding metrics: Mean acceptance "
        "length: "
        f"{1 + accepted / drafts:.2f}, Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput: {drafts * k / 10:.2f} "
        "tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafts * k} tokens, Per-position acceptance rate: {shown}, Avg Draft acceptance rate: "
        f"{100 * accepted / (drafts * k):.1f}%"
    )


def written(folder: Path, lines: Sequence[str] | str, name: str = "server.log") -> str:
    """A log file."""
    path = folder / name
    path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _sglang(length: float, rate: float | None, n: int = 40, **kw: Any) -> Callable[[Path], Case]:
    return lambda folder: log_case(written(folder, [sglang_line(i, length, rate, **kw) for i in range(n)]))


def _vllm(drafts: int, accepted: int, rates: Sequence[float], **kw: Any) -> Callable[[Path], Case]:
    return lambda folder: log_case(written(folder, [vllm_line(i, drafts, accepted, rates, **kw) for i in range(6)]))


def _context(falls: bool) -> Callable[[Path], Case]:
    def build(folder: Path) -> Case:
        lines = [sglang_line(i, 2.4 - (i * 100 / 20000 if falls else 0.02 * (i % 3)), None, tokens=500 + 65 * i) for i in range(200)]
        return log_case(written(folder, lines))

    return build


def _pays(tps: float) -> Callable[[Path], Case]:
    return lambda folder: log_case(written(folder, [sglang_line(i, 1.80, 0.16, tps=tps) for i in range(40)]), baseline=90.0)


def _metrics(joint: Sequence[float]) -> Callable[[Path], Case]:
    def build(folder: Path) -> Case:
        draft = write_draft(folder / "draft", tiny_tensors(), tiny_config())
        metrics = written(folder, json.dumps({f"full_acc_{i}": r for i, r in enumerate(joint)}), "val_metrics.json")
        log = written(folder, [vllm_line(i, 1000, 740, (0.45, 0.2, 0.09)) for i in range(6)])
        return make_case(draft, log=log, metrics=metrics, headers_only=True)

    return build


def _document(text: str) -> Callable[[Path], Case]:
    return lambda folder: log_case(written(folder, text))


def request(histogram: Sequence[int]) -> str:
    """A response of vLLM with per-request metrics."""
    drafts, accepted, k = sum(histogram), sum(i * n for i, n in enumerate(histogram)), len(histogram) - 1
    spec = {
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / (drafts * k),
        "acceptance_histogram": list(histogram),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts * k,
        "num_spec_tokens": k,
    }
    return json.dumps({"metrics": {"speculative_decoding": spec}})


FIRING: dict[str, Callable[[Path], Case]] = {
    "SRV801": _sglang(1.00, 0.00),
    "SRV802": _vllm(1000, 740, (0.700, 0.035, 0.005)),
    "SRV803": _metrics((0.75, 0.55, 0.40)),
    "SRV804": _sglang(2.85, 0.71),
    "SRV805": _vllm(1000, 2550, (0.850, 0.850, 0.850)),
    "SRV806": _context(True),
    "SRV807": _pays(54.8),
    "SRV808": _document(request([60, 0, 0, 40])),
    "SRV809": _document("INFO server started\nINFO request finished\n"),
}

QUIET: dict[str, Callable[[Path], Case]] = {
    "SRV801": _sglang(1.48, 0.16),
    "SRV802": _vllm(1000, 494, (0.350, 0.121, 0.023)),
    "SRV803": _metrics((0.47, 0.21, 0.10)),
    "SRV804": _sglang(2.85, 0.62),
    "SRV805": _vllm(151, 282, (0.821, 0.609, 0.437)),
    "SRV806": _context(False),
    "SRV807": _pays(154.8),
    "SRV808": _document(request([60, 20, 12, 40])),
    "SRV809": _vllm(151, 282, (0.821, 0.609, 0.437)),
}
