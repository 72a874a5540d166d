"""Pictures: each states its finding in words, marks what is wrong, is the same twice, and survives odd sizes, names and gaps."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.draft.observed import Explanation, Explanations
from eagle3diag.engines.model import ServedDraft
from eagle3diag.engines.serve import serve
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.identity import compare
from eagle3diag.hidden.model import Slot
from eagle3diag.hidden.norms import profile
from eagle3diag.hidden.tokens import token_norms
from eagle3diag.report import figures
from eagle3diag.report.figures.served import asides, components, taps
from eagle3diag.report.figures.weights import group_of
from eagle3diag.report.sample import late, variant
from eagle3diag.serving.compatible import Compared, Compatibility, Observed
from eagle3diag.weights.diff import diff

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"
MANY = tuple(Slot(k, k, "aux", f"hidden_states.{k}") for k in range(61))


def drawn(result: Any) -> Any:
    """The picture as an array, its words checked on the way."""
    matplotlib = pytest.importorskip("matplotlib")
    import numpy as np

    data = figures.png(figures.plot(result))
    assert data == figures.png(figures.plot(result))
    assert len(figures.alt(result)) > 40
    assert figures.caption(result).endswith((".", "more"))
    assert matplotlib.rcParams["font.size"] == matplotlib.rcParamsDefault["font.size"]  # nothing global was touched
    pixels = matplotlib.image.imread(io.BytesIO(data))
    assert pixels.shape[1] <= 2000
    rim = np.concatenate(
        [pixels[:2].reshape(-1, 4), pixels[-2:].reshape(-1, 4), pixels[:, :2].reshape(-1, 4), pixels[:, -2:].reshape(-1, 4)]
    )
    assert (rim == 1).all(), "something is drawn over the rim of the picture"  # opaque white all round: nothing is cut off
    return pixels


@pytest.fixture(scope="module")
def run() -> ServedDraft:
    draft, target = open_checkpoint(SAMPLE / "draft"), open_target(SAMPLE / "target")
    return serve(draft, engine="vllm==0.33.0", target=target, spec=draft_spec(draft))


# ------------------------------------------------------------------ the served draft


def test_a_draft_in_its_place(run: ServedDraft) -> None:
    drawn(run)
    assert [(t.hf, t.state, t.note) for t in taps(run)] == [(2, "ok", ""), (15, "ok", ""), (27, "ok", "")]
    assert asides(run) == []
    assert figures.caption(run).endswith("Every tensor of the draft is in its place.")
    assert run.target_layers == 30


def test_states_one_late_are_marked_on_the_target(run: ServedDraft) -> None:
    wrong = replace(run, aux=replace(run.aux, prefill_hf=(3, 16, 28), verify_hf=None), wiring=replace(run.wiring, aux_layers=(3, 16, 28)))
    drawn(wrong)
    assert {(t.hf, t.state) for t in taps(wrong)} == {*((k, "missing") for k in (2, 15, 27)), *((k, "lost") for k in (3, 16, 28))}
    assert "target states (HF 3, 16, 28 in place of 2, 15, 27)" in figures.caption(wrong)
    assert "HF 3 (untrained)" in figures.alt(wrong)


def test_states_of_verification_are_told_apart(run: ServedDraft) -> None:
    some = replace(run, aux=replace(run.aux, verify_hf=(2, 15, 26)))
    drawn(some)
    assert {(t.hf, t.note) for t in taps(some)} == {(2, ""), (15, ""), (26, "verify, untrained"), (27, "prefill")}


def test_what_boxes_cannot_show_stands_in_words(run: ServedDraft) -> None:
    wiring = replace(run.wiring, norm_output=not run.wiring.norm_output, aux_layers=(15, 2, 27))
    told = asides(replace(run, wiring=wiring, aux=replace(run.aux, problem="no hook")))
    assert told[0].startswith("unlike training: layers 15, 2, 27 in place of 2, 15, 27; norm_output")
    assert told[1] == "states: no hook"
    old = serve(open_checkpoint(SAMPLE / "draft"), engine="sglang==0.5.9", target=open_target(SAMPLE / "target"))
    assert asides(old)[0].startswith("dropped, 10 tensors of the file: layers.0.")
    assert [p.state for p in components(old) if p.name.startswith("layer 0")] == ["lost"] * 3
    drawn(old)


def test_many_taps_and_no_taps_fit(run: ServedDraft) -> None:
    drawn(replace(run, target_layers=61, aux=replace(run.aux, prefill_hf=tuple(range(1, 15)), verify_hf=None, problem="x" * 900)))
    for hook in (None, False, True):
        nothing = replace(run, aux=replace(run.aux, prefill_hf=None, verify_hf=None, hook=hook))
        drawn(nothing)
        assert taps(nothing) == []


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embed_tokens.weight", "embedding"),
        ("fc.weight", "fc"),
        ("layers.3.mlp.up_proj.weight", "layer 3"),
        ("midlayer.hidden_norm.weight", "layer 0"),
        ("norm.weight", "norm"),
        ("lm_head.weight", "head"),
        ("d2t", "other"),
    ],
)
def test_tensors_are_grouped_by_layer(name: str, group: str) -> None:
    assert group_of(name) == group


def test_maps_of_many_odd_tensors() -> None:
    first = open_checkpoint(SAMPLE / "draft")
    change = diff(first, variant(first), values=True)
    one = change.changed[0]
    many = tuple(replace(one, name=f"layers.{k}.mlp.up_proj.weight", relative=10.0 ** -(k % 9)) for k in range(61))
    odd = (replace(one, name="x" * 400, relative=math.nan), replace(one, name="$\\frac{1}{0", relative=None, nan=(5, 10**9)))
    drawn(replace(change, values=(*many, *odd), removed=("a" * 300,)))
    assert "The 40 largest changes of 64 tensors are drawn." in figures.caption(replace(change, values=(*many, *odd), removed=("a",)))
    drawn(replace(change, values=odd[:1]))
    assert "nan" not in figures.caption(replace(change, values=odd[:1])).lower()


# ------------------------------------------------------------------ states


def test_norms_of_deep_targets_and_of_one_state() -> None:
    norms = profile(open_dump(SAMPLE / "dumps"))
    assert "169 times" in figures.caption(norms)
    drawn(norms)
    drawn(
        replace(
            norms, layers=tuple(replace(norms.layers[k % 11], slot=s, nonfinite=10**6 if k % 9 == 0 else 0) for k, s in enumerate(MANY))
        )
    )
    drawn(replace(norms, layers=norms.layers[4:5]))


def test_tokens_of_deep_targets_of_one_token_and_with_gaps() -> None:
    norms = token_norms(open_dump(SAMPLE / "dumps"), 0)
    drawn(norms)
    deep = replace(
        norms, slots=MANY, l2=tuple(norms.l2[k % 11] * 4 for k in range(61)), medians=tuple(norms.medians[k % 11] for k in range(61))
    )
    drawn(replace(deep, sample="a name that is far too long " * 9, sinks=tuple(range(0, 500, 7))))
    drawn(replace(norms, l2=tuple(row[:1] for row in norms.l2), sinks=(0,)))
    drawn(replace(norms, l2=tuple((*row[:20], *[math.nan] * 40) for row in norms.l2), broken=tuple(range(20, 60))))


def test_one_token_in_its_sample() -> None:
    from eagle3diag.report.figures.hidden import token_plot

    norms = token_norms(open_dump(SAMPLE / "dumps"), 0)
    gaps = replace(norms, l2=tuple((*row[:20], *[math.nan] * 172) for row in norms.l2))
    alone = replace(norms, l2=tuple((math.nan,) for _ in norms.l2), medians=(math.nan,) * 11, sinks=())
    for one, token in ((norms, 59), (gaps, 30), (alone, 0), (replace(norms, l2=tuple(row * 20 for row in norms.l2)), 3000)):
        assert figures.png(token_plot(one, 3, token)).startswith(b"\x89PNG")


def test_matrices_of_deep_targets_say_how_much_is_drawn() -> None:
    dump = open_dump(SAMPLE / "dumps")
    one = compare(late(dump), dump)
    drawn(one)
    assert "layers 1 late" in figures.caption(one)
    names = tuple(f"hidden_states.{k}" for k in range(61))
    layers = tuple(replace(one.layers[0], slot=n, expected=n, best=names[max(0, k - 1)]) for k, n in enumerate(names))
    errors = tuple(tuple(None if j % 7 == 0 else 0.1 * abs(k - j) for j in range(61)) for k in range(61))
    deep = replace(one, layers=layers, columns=names, errors=errors, b="/a/very/long/path" * 20)
    drawn(deep)
    assert len(figures.caption(deep)) < 400
    drawn(replace(one, layers=one.layers[:1], columns=one.columns[:1], errors=((0.4,),)))


# ------------------------------------------------------------------ predicted against observed


def compatibility(own_z: float, joint: tuple[float, ...] = (0.5, 0.3, 0.1), near: bool = True) -> Compatibility:
    seen = Observed(length=1.9, k=3, joint=joint, drafts=1000.0, error=0.02)
    own = Compared(name="as trained", kind="", joint=(0.6, 0.4, 0.2), length=2.2, z=own_z, counts_z=own_z)
    other = Compared(
        name="norm_output true in place of false; " * 9, kind="norm_output", joint=(0.5, 0.28, 0.11), length=1.89, z=1.0, counts_z=1.0
    )
    return Compatibility(seen=seen, compared=(other, own) if near else (own,), steps=3, rows=300)


def test_predicted_against_observed_states_the_finding() -> None:
    excluded = compatibility(7.0)
    drawn(excluded)
    assert figures.caption(excluded).startswith(
        "Seen 1.90 tokens per verification in chains of 3; the draft as trained would give 2.20: the log excludes"
    )
    assert "Nearest is: norm_output true" in figures.caption(excluded)
    assert "seen: 50.0 30.0 10.0 %" in figures.alt(excluded)
    fits = compatibility(1.0)
    drawn(fits)
    assert "does not contradict it (1.0 standard errors)" in figures.caption(fits)
    assert "norm_output" not in figures.caption(fits)
    drawn(compatibility(7.0, near=False))
    assert "No wiring that was tried" in figures.caption(compatibility(7.0, near=False))


def test_a_log_without_positions_shows_lengths() -> None:
    drawn(compatibility(7.0, joint=()))
    assert figures.alt(compatibility(7.0, joint=())).startswith("Dot chart")


def explanations(off: float, others: int) -> Explanations:
    from eagle3diag.checkpoint.wiring import Wiring

    def one(name: str, length: float, away: float) -> Explanation:
        return Explanation(name=name, kind="", faults=1, wiring=Wiring(), length=length, error=0.05, agreement=0.3, off=away)

    some = tuple(one(f"layers {k} in place of others " * 4, 1.2 + 0.02 * k, 0.5 * k) for k in range(others))
    return Explanations(observed=1.2, steps=4, rows=300, here=one("the wiring at hand", 1.4, off), others=some)


def test_a_number_seen_in_service() -> None:
    drawn(explanations(5.0, 30))
    assert "does not explain it; these would: layers 0" in figures.caption(explanations(5.0, 30))
    drawn(explanations(0.1, 1))
    assert "explains it, so no fault" in figures.caption(explanations(0.1, 1))
    assert "nor does any other" in figures.caption(explanations(5.0, 0))
    drawn(explanations(5.0, 0))
