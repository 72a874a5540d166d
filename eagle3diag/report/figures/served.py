"""One page on what an engine runs: the target's layers and taps, fc, the draft's layers, norm, head and mapping, and the proposed token.

What is lost is hatched, what the target lends is dotted, what does not run is crossed; states the draft was not trained on, and states it
was trained on that nobody takes, are marked on the target. Underneath, in words: tensors of the file that reach nothing, and switches that
stand otherwise than in training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.layout import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from eagle3diag.engines.model import ServedDraft

__all__ = ["MEANING", "STYLES", "Part", "Tap", "asides", "components", "served_alt", "served_caption", "served_plot", "taps"]

#: state -> fill, hatch, line style; the edge is black throughout
STYLES = {
    "ok": ("#ffffff", "", "solid"),
    "target": ("#bfe3f7", "..", "dashed"),
    "lost": ("#f2a97a", "////", "solid"),
    "skipped": ("#dddddd", "xx", "dotted"),
}
MEANING = {
    "ok": "the draft's own",
    "target": "the target's takes its place",
    "lost": "lost: not what was trained",
    "skipped": "does not run",
}
_SIDE = 1.75  #: inches: width of the target
_LAYERS = 10  #: with more layers the deep ones share a box
_STATES = 32  #: with more states, as many are drawn
_FOOT = 0.26  #: inches: height of a line under the picture


def _served_of(result: Any) -> ServedDraft:
    """The served draft of a report, or the result itself."""
    served: ServedDraft | None = result.case.served if type(result).__name__ == "Report" else result
    if served is None:
        raise UsageError("the picture of a report shows the served draft: check again with an engine")
    return served


@dataclass(frozen=True, slots=True)
class Tap:
    """One state of the target: HF index, note, and ``ok``, ``lost`` (taken and not trained on) or ``missing`` (the other way round)."""

    hf: int
    state: str
    note: str


def taps(served: ServedDraft) -> list[Tap]:
    """The states that are taken, and those that should be, ascending."""
    prefill = served.aux.prefill_hf
    if prefill is None:
        return []
    verify = served.aux.verify_hf if served.aux.verify_hf not in (None, prefill) else prefill
    trained = None if served.trained is None or served.trained.state != "aux" else served.trained.aux_layers
    found = []
    for k in sorted({*prefill, *(verify or ()), *(trained or ())}):
        when = [w for w, ids in (("prefill", prefill), ("verify", verify or ())) if k in ids]
        notes = when if len(when) == 1 else []
        if not when:
            notes = ["not taken"]
        elif trained is not None and k not in trained:
            notes = [*notes, "untrained"]
        found.append(Tap(k, "missing" if not when else "lost" if "untrained" in notes else "ok", ", ".join(notes)))
    return found


#: fields that the diagram shows itself
_DRAWN = ("aux_layers", "aux_layers_verify", "state", "fc", "embedding", "head", "mapping", "unfilled")


def asides(served: ServedDraft) -> list[str]:
    """What the boxes cannot show, one line each: dropped tensors, switches, why states are not taken."""
    lines = []
    dropped = served.dropped()
    if dropped:
        more = f" and {len(dropped) - 3:,} more" if len(dropped) > 3 else ""
        lines.append(f"dropped, {count(len(dropped), 'tensor')} of the file: {', '.join(escaped(n, 40) for n in dropped[:3])}{more}")
    if served.trained is not None:
        from eagle3diag.draft.wirings import described

        run, trained = served.wiring, served.trained
        kept = {n: getattr(trained, n) for n in _DRAWN}
        if run.aux_layers and trained.aux_layers and sorted(run.aux_layers) == sorted(trained.aux_layers):
            kept["aux_layers"] = run.aux_layers
        if run.rope_theta is None or trained.rope_theta is None:
            kept["rope_theta"] = trained.rope_theta
        if run.fc != "applied":
            kept |= {n: getattr(trained, n) for n in ("norm_before_fc", "fc_norm")}
        if not any(".1." in n for n in (*served.tensors, *served.never_filled)):  # one layer: nothing it could decide
            kept["deep_layer_norm"] = trained.deep_layer_norm
        other = replace(run, **kept)
        if trained.differences(other):
            lines.append(f"unlike training: {escaped(described(trained, other), 200)}")
    if served.aux.problem:
        lines.append(f"states: {escaped(served.aux.problem, 200)}")
    return lines


def served_caption(result: object) -> str:
    """What an engine makes of the draft, and what of it is not what was trained."""
    served = _served_of(result)
    bad = [f"{p.name} ({p.note})" for p in components(served) if p.state in ("lost", "skipped")]
    wrong = [t for t in taps(served) if t.state == "lost"]
    left = [t for t in taps(served) if t.state == "missing"]
    if wrong or left:
        taken, wanted = (", ".join(str(t.hf) for t in some) or "none" for some in (wrong, left))
        bad.insert(0, f"target states (HF {taken} in place of {wanted})")
    lines = asides(served)
    told = "Every tensor of the draft is in its place." if not bad and not lines else ""
    if bad:
        told = f"Not what was trained: {', '.join(bad)}."
    if served.refused is not None:
        told, lines = f"This version refuses the draft ({served.refused.stage}), so nothing of this would run.", []
    words = [told, *(f"{line[0].upper()}{line[1:]}." for line in lines)]
    return f"{served.contract.label} with this draft, from the target's layers to the proposed token. {' '.join(w for w in words if w)}"


def served_alt(result: object) -> str:
    """Every box in words, in the order data flows."""
    served = _served_of(result)
    found = [f"HF {t.hf}{f' ({t.note})' if t.note else ''}" for t in taps(served)]
    where = f"target states {', '.join(found)}" if found else "target states unknown"
    parts = "; ".join(f"{p.name}: {p.note or MEANING[p.state]}" for p in components(served))
    return f"Diagram: {where}; {parts}{''.join(f'; {line}' for line in asides(served))}"


@dataclass(frozen=True, slots=True)
class Part:
    """One box of the diagram: name, state (a key of ``STYLES``) and a note of a few words."""

    name: str
    state: str
    note: str = ""


_HEADS = {
    "draft": ("ok", ""),
    "target": ("target", "the target's"),
    "target-first-rows": ("lost", "the target's first rows"),
    "target-rows": ("target", "the target's rows"),
    "embedding": ("target", "tied to the embedding"),
    "uninitialised": ("lost", "uninitialised"),
}
_MAPS = {
    "offset": ("ok", "draft id + d2t"),
    "absolute": ("lost", "absolute ids read as offsets"),
    "missing": ("lost", "missing: ids go out unmapped"),
    "none": ("ok", "full vocabulary"),
    "t2d": ("ok", "the ids t2d marks"),
}


def components(served: ServedDraft) -> list[Part]:
    """The parts of the served draft in the order data flows through them: embedding, fc, layers, norm, head, mapping."""
    wiring = served.wiring
    embedding = {"target": ("target", "the target's"), "draft": ("ok", "own"), "uninitialised": ("lost", "uninitialised")}[wiring.embedding]
    fc = {"applied": ("ok", ""), "bypassed": ("skipped", "bypassed"), "absent": ("skipped", "absent")}[wiring.fc]
    if wiring.fc == "applied":
        fc = _filled(served, "fc.") or fc
    parts = [Part("embed_tokens", *embedding), Part("fc", *fc)]
    named = " ".join([*served.never_filled, *(f.as_ for f in served.tensors.values())])
    layers = sorted({int(i) for i in re.findall(r"\blayers\.(\d{1,3})\.", named)}) or [0]
    drawn = layers if len(layers) <= _LAYERS else layers[: _LAYERS - 2]
    for k in drawn:
        for stem, label in (("", "norms"), ("self_attn.", "attention"), ("mlp.", "mlp")):
            parts.append(Part(f"layer {k} {label}", *(_filled(served, f"layers.{k}.{stem}", norms=not stem) or ("ok", ""))))
    if rest := layers[len(drawn) :]:
        lost = sum(_filled(served, f"layers.{k}.") is not None for k in rest)
        told = ("lost", f"{lost} of {len(rest)} not what was trained") if lost else ("ok", "")
        parts.append(Part(f"layers {rest[0]} to {rest[-1]}", *told))
    parts.append(Part("norm", *(_filled(served, "norm.") or ("ok", ""))))
    parts += [Part("lm_head", *_HEADS[wiring.head]), Part("d2t", *_MAPS[wiring.mapping])]
    return parts


def _filled(served: ServedDraft, prefix: str, *, norms: bool = False) -> tuple[str, str] | None:
    """State and note of the parameters under ``prefix`` where one of them is not what the file holds."""
    starts = {s for n, s in served.never_filled.items() if n.startswith(prefix) and (not norms or "norm" in n) and s != "target"}
    if starts:
        return "lost", ", ".join("starts as ones" if s == "ones" else s for s in sorted(starts))
    cut = [n for n, f in served.tensors.items() if f.fate == "truncated" and f.as_.removeprefix("model.").startswith(prefix)]
    return ("lost", "truncated") if cut else None


def _box(ax: Axes, at: tuple[float, float], part: Part, wide: float = 1.9, tall: float = 0.62) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, hatch, line = STYLES[part.state]
    x, y = at
    ax.add_patch(
        FancyBboxPatch(
            (x, y), wide, tall, boxstyle="round,pad=0.03", facecolor=fill, edgecolor="black", hatch=hatch, linestyle=line, linewidth=1.1
        )
    )
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.92} if hatch else None
    text = escaped(part.name, 24) + (f"\n{escaped(part.note, 30)}" if part.note else "")
    ax.text(x + wide / 2, y + tall / 2, text, ha="center", va="center", fontsize=8.5, bbox=ground, parse_math=False)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "solid") -> None:
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "linestyle": style, "linewidth": 1.0, "color": "black"})


def _target(ax: Axes, served: ServedDraft, found: list[Tap], top: float) -> dict[int, float]:
    """The target as a ladder of states; the heights of those that are taken."""
    from matplotlib.patches import Rectangle

    layers = served.target_layers
    last = max([*(t.hf for t in found), layers or 1, 1])
    ax.add_patch(Rectangle((0.2, 0.4), _SIDE, top - 0.4, facecolor="#f4f4f4", edgecolor="black", linewidth=1.1))
    name = "target" if layers is None else f"target, {layers} layers"
    middle, right = 0.2 + _SIDE / 2, 0.2 + _SIDE
    ax.text(middle, top + 0.12, name, ha="center", va="bottom", fontsize=9, fontweight="bold")
    heights: dict[int, float] = {}
    low, step = 0.4, 0.34
    for t in found:  # to scale, but never so close that the labels touch
        low = heights[t.hf] = max(low + step if heights else 0.6, 0.6 + (top - 1.1) * t.hf / last)
    at = top - 0.25
    for t in reversed(found):
        heights[t.hf] = at = min(heights[t.hf], at)
        at -= step
    for t in found:
        y = heights[t.hf]
        if t.state == "lost":
            fill, hatch, _ = STYLES["lost"]
            ax.add_patch(Rectangle((0.2, y - 0.045), _SIDE, 0.09, facecolor=fill, hatch=hatch * 2, edgecolor="black", linewidth=0.9))
        else:
            line = "dotted" if t.state == "missing" else "solid" if "verify" not in t.note else "dashed"
            ax.plot([0.2, right], [y, y], color="black", linewidth=1.1 if t.state == "missing" else 2.2, linestyle=line)
        weight = "bold" if t.state == "lost" else "normal"
        ax.text(middle, y + 0.07, f"HF {t.hf}{f', {t.note}' if t.note else ''}", ha="center", va="bottom", fontsize=8, fontweight=weight)
    if not found:
        weight = "bold" if served.aux.hook is False else "normal"
        unknown = {False: "cannot hand\nout states", None: "layers unknown\n(no target)", True: "no layers"}[served.aux.hook]
        ax.text(middle, top / 2, unknown, ha="center", va="center", fontsize=8.5, fontweight=weight)
    return {t.hf: heights[t.hf] for t in found if t.state != "missing"}


def served_plot(result: object) -> Figure:
    """One page from the target's layers to the proposed token.

    Raises:
        UsageError: a report without an engine.
    """
    import matplotlib
    from matplotlib.patches import Rectangle

    from eagle3diag.report.figures import RC, picture

    served = _served_of(result)
    parts, found, lines = components(served), taps(served), asides(served)
    if len(found) > _STATES:
        lines.insert(0, f"{len(found)} states of the target are named, the first {_STATES} are drawn")
        found = found[:_STATES]
    layers = [p for p in parts if p.name.startswith("layer")]
    rows = max(3, len(layers))
    top = max(4.0, 0.9 * rows + 0.9, 0.36 * len(found) + 0.9)
    foot = 0.75 + _FOOT * len(lines)
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure: Figure
        figure, ax = picture(11.4, top + 0.95 + foot)
        ax.set_xlim(0, 11.4)
        ax.set_ylim(-foot, top + 0.95)
        heights = _target(ax, served, found, top)
        middle = top / 2
        embedding, fc = parts[0], parts[1]
        _box(ax, (2.6, middle - 0.31), fc)
        _box(ax, (2.6, 0.35), embedding)
        for y in heights.values():
            _arrow(ax, (0.2 + _SIDE, y), (2.57, middle), "dotted" if fc.state == "skipped" else "solid")
        base = middle - 0.45 * len(layers)
        for k, part in enumerate(layers):
            _box(ax, (5.0, base + 0.9 * k + 0.14), part)
        ax.add_patch(Rectangle((4.85, base), 2.2, 0.9 * len(layers), facecolor="none", edgecolor="black", linewidth=0.8))
        label = "draft layers" if len(layers) > 3 else "draft layer"
        ax.text(5.95, base + 0.9 * len(layers) + 0.12, label, ha="center", va="bottom", fontweight="bold")
        _arrow(ax, (4.53, middle), (4.85, middle))
        _arrow(ax, (4.53, 0.66), (4.85, max(base + 0.3, 0.66)))
        tail = parts[2 + len(layers) :]
        for k, part in enumerate(tail):
            y = middle - 0.31 + (1 - k) * 1.15
            _box(ax, (7.4, y), part, wide=2.2)
            if k:
                _arrow(ax, (8.5, y + 1.12), (8.5, y + 0.68))
        _arrow(ax, (7.05, middle + 0.6), (7.37, middle + 1.15))
        _arrow(ax, (9.63, middle - 1.15), (10.1, middle - 1.15))
        ax.text(10.15, middle - 1.15, "proposed\ntoken", va="center", fontsize=9)
        title = f"What {escaped(served.contract.label, 60)} runs"
        if served.refused is not None:
            title += f": nothing, it refuses ({escaped(served.refused.stage, 30)})"
        ax.text(0.2, top + 0.6, title, fontsize=11.5, fontweight="bold", parse_math=False)
        _legend(ax, {p.state for p in parts} | {t.state for t in found})
        for k, line in enumerate(lines):
            text = line if len(line) <= 150 else f"{line[:149]}…"
            ax.text(0.2, -0.75 - _FOOT * (k + 0.2), f"{text[0].upper()}{text[1:]}", va="center", fontsize=8.5, parse_math=False)
    return figure


def _legend(ax: Axes, states: set[str]) -> None:
    from matplotlib.patches import Rectangle

    x = 0.2
    for state in STYLES:
        if state in states:
            fill, hatch, line = STYLES[state]
            ax.add_patch(Rectangle((x, -0.6), 0.45, 0.3, facecolor=fill, hatch=hatch, edgecolor="black", linestyle=line))
            ax.text(x + 0.55, -0.45, MEANING[state], va="center", fontsize=8.5)
            x += 0.95 + 0.075 * len(MEANING[state])
