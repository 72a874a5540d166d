"""What results are made of, one sentence each: what stands in a list is read on one line, and in a notebook with its fields below.

A sentence says the finding in plain words; the table holds every field as it is. A new `Piece` without a sentence fails
``tests/test_shown.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from eagle3diag.display import Piece, Shown
from eagle3diag.errors import escaped
from eagle3diag.report.layout import View, count, figure_text, mark, percent, size, table, value_text
from eagle3diag.report.views.hidden import slot_name
from eagle3diag.report.views.report import block_of

__all__ = ["SENTENCES", "line", "piece_view"]

LONGEST = 160  #: characters of a sentence in a ``repr``
_FIELD = 300  #: of a field


def _spoken(*parts: Any) -> str:
    return ", ".join(str(p) for p in parts if p not in (None, "", ()))


def _layers(ids: Any) -> str:
    return "unknown" if ids is None else f"HF {value_text(list(ids))}"


def _wiring(w: Any) -> str:
    """The layers, and whatever is not as usual."""
    usual = type(w)()
    odd = [f"{k} {value_text(v[0], 60)}" for k, v in w.differences(usual).items() if k != "aux_layers"]
    taps = f"layers {_layers(w.aux_layers)}"
    return f"{taps}, all else as usual" if not odd else f"{taps}; {', '.join(odd)}"


def _aux(a: Any) -> str:
    if a.raw is None:
        return f"no layers recorded; taken: {_layers(a.hf)}" if a.readings else "no layers recorded"
    told = "in no doubt" if a.settled else "the likelier reading"
    return f"{value_text(list(a.raw))} at {a.where}, read as {_layers(a.hf)} ({told})"


def _captured(a: Any) -> str:
    if a.problem:
        return str(a.problem)
    ids = "the engine's default" if a.ids is None else f"ids {value_text(list(a.ids))}"
    later = f", {_layers(a.verify_hf)} in graph-replayed verify" if a.verify_hf not in (None, a.prefill_hf) else ""
    return f"{ids}: the draft gets {_layers(a.prefill_hf)}{later}"


def _support(t: Any) -> str:
    return str(t.message or {True: "hands out auxiliary states", False: "has no hook", None: "not on record"}[t.hook])


def _fc(f: Any) -> str:
    wide = f", its input {f.width_in:,} wide" if f.width_in else ""
    skip = f"; a state {f.bypassed_at_width:,} wide skips it in silence" if f.bypassed_at_width is not None else ""
    return ("runs" if f.runs else "does not run") + wide + skip


def _matched(m: Any) -> str:
    late = f", {abs(m.best_shift)} {'late' if m.best_shift > 0 else 'early'}" if m.best_shift else ""
    here = f"{m.slot} is {m.best}{late}" if m.same else f"{m.slot} is none of them, the nearest {m.best}"
    return f"{here} (relative error {figure_text(m.best_error, 2)})" + (f"; it should be {m.expected}" if m.expected else "")


def _profiled(p: Any) -> str:
    bad = f", {count(p.nonfinite, 'row')} with NaN or Inf" if p.nonfinite else ""
    return f"{slot_name(p.slot)}: mean L2 {figure_text(p.l2_mean)} over {count(p.rows, 'row')}{bad}"


def _finding(f: Any) -> str:
    return f"{mark(f.severity.value)} {f.code}: {f.title}"


def _outcome(o: Any) -> str:
    if o.status != "ran":
        return f"{o.code} {o.status}: {o.why}"
    return f"{o.code} ran, found {len(o.findings)}" if o.findings else f"{o.code} ran, found nothing"


def _case(c: Any) -> str:
    given = [
        n for n in ("target", "served", "launch", "other", "dump", "log", "control", "baseline", "training") if getattr(c, n) is not None
    ]
    return f"{c.draft.path or 'no draft'}, with {', '.join(given) or 'nothing else'}" + ("; headers only" if c.headers_only else "")


def _ranked(r: Any) -> str:
    word = (
        "better" if r.better else "not told apart from it" if abs(r.effect.z) < 2 else "worse" if r.effect.mean > 0 else "not surely better"
    )
    return f"{r.name}: {r.effect.mean:+.4f} nats a token against the wiring at hand (z {r.effect.z:.1f}), {word}"


def _compared(c: Any) -> str:
    return f"{c.name}: length {c.length:.2f}, {c.z:.1f} standard errors away, {'compatible' if c.compatible else 'excluded'}"


def _cause(c: Any) -> str:
    why = f"; for it: {c.for_[0]}" if c.for_ else ""
    return f"{c.name}, ruled out{': ' + c.against[0] if c.against else ''}" if c.excluded else c.name + why


def _step(s: Any) -> str:
    return f"step {s.step}: right in {percent(s.marginal)}, all up to it in {percent(s.joint)} of {count(s.n, 'row')}"


def _lengths(a: Any) -> str:
    k = max(a.expected_length, default=0)
    return f"{figure_text(a.expected_length.get(k))} tokens per verification in chains of {k}, on {count(a.rates.rows, 'row')}"


def _training(t: Any) -> str:
    stated = [f"length {t.length:.2f}"] if t.length is not None else []
    return f"{t.source}: " + _spoken(*stated, *([f"{t.kind} {', '.join(percent(r) for r in t.rates[:8])}"] if t.rates else []))


def _launched(x: Any) -> str:
    engine = _spoken(x.engine, x.version) or "engine not told"
    chain = [f"{n.replace('_', ' ')} {getattr(x, n)}" for n in ("method", "steps", "topk", "draft_tokens") if getattr(x, n) is not None]
    return _spoken(engine, *chain, f"layers {value_text(x.aux_layers)}" if x.aux_layers is not None else "")


def _sample(s: Any) -> str:
    return f"{s.name}: {count(len(s.token_ids), 'token')}, {count(len(s.states), 'state')} each"


def _scanned(t: Any) -> str:
    if not t.found:
        return f"{t.arch}: no such class in this source"
    return f"{t.arch} {'hands out' if t.hook else 'does not hand out'} auxiliary states ({t.status})"


#: room and class -> what it says, in one sentence
SENTENCES: dict[str, Callable[[Any], str]] = {
    "provenance.Valued": lambda v: f"{value_text(v.value)} ({v.where if v.known else f'{v.kind} default: {v.where}'})",
    "checkpoint.TensorInfo": lambda t: f"{t.name}: {t.dtype} {value_text(list(t.shape))}, {size(t.nbytes)} in {t.file}",
    "checkpoint.Issue": lambda i: f"{i.file}: {i.message}",
    "checkpoint.ConfigFile": lambda c: f"{c.file}: {c.schema} schema, {count(len(c.data), 'key')}",
    "checkpoint.Dialect": lambda d: f"{d.name}, {d.confidence} confidence: {'; '.join(d.evidence)}",
    "checkpoint.Reading": lambda r: f"{_layers(r.hf)}, {r.convention} ids: {r.why}",
    "checkpoint.AuxIds": _aux,
    "checkpoint.Wiring": _wiring,
    "weights.Renamed": lambda r: f"{r.before} is {r.after} (by {r.by})",
    "weights.Changed": lambda c: f"{c.name}: {value_text(c.a, 60)} in a, {value_text(c.b, 60)} in b",
    "engines.Fact": lambda f: f"{value_text(f.value)} ({f.status}: {f.source})",
    "engines.ScannedField": lambda f: f"{value_text(f.value)} ({f.status}: {f.source})",
    "engines.ScannedTarget": _scanned,
    "engines.Behaviour": lambda b: f"ids {b.ids}, hands out {b.captures} ({b.status}: {b.source})",
    "engines.TargetSupport": _support,
    "engines.Refusal": lambda r: f"stops at {r.stage}: {r.why or r.message}",
    "engines.TensorFate": lambda f: f.fate + (f" as {f.as_}" if f.as_ else "") + (f": {f.why}" if f.why else ""),
    "engines.FcState": _fc,
    "engines.AuxCapture": _captured,
    "engines.LaunchProblem": lambda p: f"{mark(p.severity)} {p.message}",
    "hidden.Slot": lambda s: f"{slot_name(s)}, stored as {s.name}",
    "hidden.DumpIssue": lambda i: f"{i.file}: {i.message}",
    "hidden.SampleRef": lambda r: f"{r.name} in {r.file}, {'length not stated' if r.tokens is None else count(r.tokens, 'token')}",
    "hidden.Sample": _sample,
    "hidden.SlotMatch": _matched,
    "hidden.SlotProfile": _profiled,
    "hidden.ExactSum": lambda s: figure_text(s.over(1), 17),
    "hidden.ExactVector": lambda v: f"sums of {count(len(v.high), 'channel')}",
    "hidden.LayerDifference": lambda d: f"{'final' if d.hf is None else f'HF {d.hf}'}: mean relative error {figure_text(d.mean, 2)}",
    "hidden.CapturedSample": lambda s: f"{s.file}: {count(s.tokens, 'token')}{', written by an earlier run' if s.resumed else ''}",
    "draft.StepAgreement": _step,
    "draft.Part": lambda p: f"{p.name}: right in {percent(p.marginal)} of {count(p.n, 'row')}, length {p.expected_length:.2f}",
    "draft.Effect": lambda e: f"{e.mean:+.4g} (standard error {e.se:.2g}, z {e.z:.1f}, {count(e.rows, 'row')})",
    "draft.Rates": lambda r: f"joint {', '.join(percent(j) for j in r.joint[:8])} of {count(r.rows, 'row')}",
    "draft.Acceptance": _lengths,
    "draft.Ranked": _ranked,
    "draft.Explanation": lambda e: f"{e.name}: length {e.length:.2f}, {'explains' if e.explains else 'does not explain'} the number seen",
    "serving.Point": lambda p: f"length {p.length:.2f} over {count(p.windows, 'line')}",
    "serving.ContextBin": lambda b: (
        f"length {b.length:.2f} at {b.low:,.0f} to {b.high:,.0f} tokens of context ({count(b.windows, 'line')})"
    ),
    "serving.EngineShare": lambda e: f"{e.label}: length {e.length:.2f} over {count(e.windows, 'line')}",
    "serving.Seen": lambda s: f"{s.means} (line: {s.text}{f', {s.count:,} times' if s.count > 1 else ''})",
    "serving.Trap": lambda t: t.text,
    "serving.Launched": _launched,
    "serving.Training": _training,
    "serving.Observed": lambda o: f"length {o.length:.2f} in chains of {o.k}, {o.drafts:,.0f} verifications",
    "serving.Compared": _compared,
    "rules.Finding": _finding,
    "rules.Outcome": _outcome,
    "rules.Case": _case,
    "rules.Cause": _cause,
    "rules.Rule": lambda r: f"{r.code}: {r.summary} ({r.severity.value} by default)",
    "report.Sample": lambda s: f"draft {s.draft}, with target, dumps and log beside it",
    "report.Served": lambda s: f"{s.draft} with {s.engine or 'an engine nobody named'}" + (", with its log" if s.logs else ""),
    "report.Mended": lambda m: f"{count(len(m.conversions), 'conversion')}" + (f": {m.why}" if m.why else ""),
    "report.Story": lambda s: f"{s.title}: {s.report.verdict}, {'as' if s.found else 'not as'} it should come out",
    "report.Rendered": lambda r: f"{r.name} as {r.html} ({size(r.bytes)}), the executed notebook beside it",
}


def _key(piece: Piece) -> str:
    """``hidden.Slot``: the room and the class; ``provenance`` is below all rooms."""
    return f"{type(piece).__module__.split('.')[1]}.{type(piece).__name__}"


def _sentence(piece: Piece) -> str:
    return str(SENTENCES[_key(piece)](piece))


def line(piece: Piece) -> str:
    """``Finding(✖ ERROR KEY203: 10 tensors are dropped)``: class and sentence on one line, safe for a terminal."""
    return f"{type(piece).__name__}({escaped(_sentence(piece), LONGEST)})"


def _text(value: Any) -> str:
    """A field: results inside it by name, pieces by their sentence."""
    if value is None:
        return "–"
    if isinstance(value, Piece):
        return _sentence(value)
    if isinstance(value, Shown):
        return f"{type(value).__name__} (its own result)"
    if isinstance(value, Mapping):
        shown = "; ".join(f"{str(k)[:_FIELD]}: {_text(v)}" for k, v in [*value.items()][:20])
        return (shown or "none") + (f" and {len(value) - 20:,} more" if len(value) > 20 else "")
    if isinstance(value, (tuple, list)) and any(isinstance(v, (Piece, Shown)) for v in value[:20]):
        return "; ".join(_text(v) for v in value[:20]) + (f" and {len(value) - 20:,} more" if len(value) > 20 else "")
    return value_text(value, _FIELD)


def piece_view(piece: Piece) -> View:
    """The sentence, then every field; of a finding its evidence and remedy as in a report."""
    if _key(piece) == "rules.Finding":
        return _finding_view(piece)
    rows = [(f.name.rstrip("_"), _text(v)) for f in fields(piece) if f.repr and not callable(v := getattr(piece, f.name))]  # type: ignore[arg-type]
    named = "".join(f" {c.lower()}" if c.isupper() else c for c in type(piece).__name__).strip()
    return View(title=named[0].upper() + named[1:], summary=_sentence(piece), tables=(table("Fields", ("field", "value"), rows),))


def _finding_view(f: Any) -> View:
    return View(title="Finding", summary=f"{f.code}, {f.severity.value}" + (f", about {f.where}" if f.where else ""), blocks=(block_of(f),))
