"""Which wirings are tried, and what the ranking makes of them on the sample: faults found, nothing named on a sound draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.measure import Bench, base_wiring
from eagle3diag.draft.race import Run, better_than, difference, race
from eagle3diag.draft.ranking import ALPHA, FLOOR, WiringRanking, rank, rank_bench
from eagle3diag.draft.scope import scope_of, unusual
from eagle3diag.draft.served import served_acceptance
from eagle3diag.draft.wirings import Candidate, Scope, alternatives, described
from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.dumps import open_dump
from tests.fixtures_agr import LAYERS, MATRICES, SAMPLE, bench

BASE = Wiring(aux_layers=LAYERS, rope_theta=1e5)
WIDE = Scope(
    layers=(0, 1, 2, 3, 14, 15, 16, 26, 27, 28, 30),
    final=True,
    final_norm=True,
    target_layers=30,
    tensors=frozenset({"fc.weight", "lm_head.weight", "d2t", "t2d", "layers.0.mlp.up_proj.weight"}),
    thetas={1e5: "target"},
    reduced=True,
    embeddings=("target",),
    target_head=True,
    first_rows=True,
    longest=192,
)


# ---- what is tried ---------------------------------------------------------------------------------------------------------------


def wirings(base: Wiring = BASE, scope: Scope = WIDE, **kw: Any) -> dict[str, Candidate]:
    found = alternatives(base, scope, **kw)
    assert len({c.name for c in found}) == len(found)
    return {c.name: c for c in found}


@pytest.mark.parametrize(
    "change",
    [
        {"aux_layers": (3, 16, 28)},
        {"aux_layers": (1, 14, 26)},
        {"aux_layers": (0, 2, 15)},
        {"aux_layers": (27, 15, 2)},
        {"aux_layers": (2, 27, 15)},
        {"aux_layers": (2, 15, 30)},
        {"aux_layers": (1, 15, 27)},
        {"fc": "bypassed"},
        {"fc": "bypassed", "state": "final"},
        {"aux_norm": "final"},
        {"rope_theta": 1e4},
        {"rope_theta": 1e6},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"final_norm": False},
        {"norm_before_residual": True, "norm_output": True, "final_norm": False},
        {"double_norm": True},
        {"mapping": "missing"},
        {"mapping": "absolute"},
        {"head": "target-first-rows"},
        {"token_shift": -1},
        {"state_shift": -1},
        {"concat": "hidden-first"},
        {"position_gap": 1},
        {"aux_layers": (3, 16, 28), "norm_before_residual": True},
        {"state": "final", "fc": "bypassed", "head": "target-first-rows", "mapping": "missing"},
    ],
)
def test_the_issue_s_faults_are_tried_in_both_directions(change: dict[str, Any]) -> None:
    fault = replace(BASE, **change)
    assert any(c.wiring == fault for c in alternatives(BASE, WIDE))
    if len(change) == 1:
        assert any(c.wiring == BASE for c in alternatives(fault, WIDE))


def test_only_what_can_be_shown_is_tried() -> None:
    bare = Scope(layers=LAYERS, tensors=frozenset({"fc.weight", "lm_head.weight"}), width_fits=False)
    kinds = {k for c in alternatives(BASE, bare) for k in c.kind.split("+")}
    assert not kinds & {
        "layers",
        "fc bypassed",
        "final state",
        "states normed",
        "mapping",
        "embedding",
        "window",
        "deep norm",
        "norm_before_fc",
    }
    assert {"order", "theta", "norm_output", "token shift"} <= kinds
    gained = replace(bare, tensors=bare.tensors | {"input_norm.weight", "fc_norm.0.weight"}, longest=4000, depth=2)
    more = {c.kind for c in alternatives(replace(BASE, sliding_window=2048), gained)}
    assert {"norm_before_fc", "fc_norm", "norm_before_fc+fc_norm", "window", "deep norm"} <= more


def test_nothing_is_fed_ahead_of_the_text() -> None:
    for c in alternatives(BASE, WIDE):
        assert c.wiring.token_shift <= 0
        assert c.wiring.state_shift <= 0


def test_the_wrong_three_of_four_slots() -> None:
    four = Scope(layers=(2, 30, 58, 60), target_layers=61, tensors=frozenset({"fc.weight"}))
    tried = {c.wiring.aux_layers for c in alternatives(Wiring(aux_layers=(30, 58, 60), rope_theta=1e4), four)}
    assert (2, 30, 58) in tried
    assert (2, 58, 60) in tried


def test_damage_is_tried_for_a_number_only() -> None:
    assert not any(c.kind == "never loaded" for c in alternatives(BASE, WIDE))
    damaged = [c for c in alternatives(BASE, WIDE, damage=True) if c.kind == "never loaded"]
    assert {c.wiring.head for c in damaged} == {"draft", "uninitialised"}
    assert any("layers.0.mlp.up_proj.weight" in c.wiring.unfilled for c in damaged)


def test_words() -> None:
    assert described(BASE, replace(BASE, aux_layers=(3, 16, 28))) == "layers 3, 16, 28 in place of 2, 15, 27"
    assert described(BASE, replace(BASE, rope_theta=1e4)) == "rope_theta 10000 in place of 100000"
    assert described(BASE, replace(BASE, norm_output=True)) == "norm_output true in place of false"
    assert described(BASE, replace(BASE, unfilled={"a.b": "random"})) == "1 parameters left at their start values"
    assert described(BASE, replace(BASE, mapping="t2d")) == "mapping by t2d in place of by d2t"
    assert described(BASE, BASE) == "the same wiring"


def test_usual_wirings() -> None:
    assert unusual(BASE, WIDE) == 0
    assert unusual(replace(BASE, aux_layers=(3, 16, 28), rope_theta=1e4, norm_output=True), WIDE) == 3


# ---- the ranking on the sample ---------------------------------------------------------------------------------------------------


def ranked(change: dict[str, Any] | None = None, n: int = 3, **kw: Any) -> WiringRanking:
    b = bench(n)
    return rank_bench(replace(b, base=replace(b.base, **(change or {})), _models={}), open_target(SAMPLE / "target"), quick=True, **kw)


def test_a_sound_draft_has_no_better_wiring() -> None:
    r = ranked()
    assert r.found is None
    assert r.alike == ()
    assert not any(e.better for e in r.ranking)
    assert FLOOR < r.smallest < 0.3
    assert r.tried == len(r.ranking) > 40
    assert r.base_group == 1
    data = r.to_dict()
    assert data["schema"] == 1
    assert set(data["ranking"][0]) >= {"name", "change", "delta_nll", "z", "agreement", "expected_length", "group"}
    assert data["baseline"]["rows"] == r.rows


@pytest.mark.parametrize("theta", [1e6, 5e5])
def test_a_harmless_base_is_not_named(theta: float) -> None:
    assert ranked({"rope_theta": theta}, n=2 if theta == 1e6 else 3).found is None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"aux_layers": (0, 2, 15)}, "embedding first|layers"),
        ({"aux_layers": (2, 27, 15)}, "order|layers"),
        ({"fc": "bypassed"}, "fc bypassed"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"),
        ({"state_shift": -1}, "state shift"),
        ({"head": "uninitialised"}, "head"),
        ({"unfilled": {f"layers.0.mlp.{m}": "random" for m in MATRICES[4:]}}, "never loaded"),
    ],
)
def test_a_fault_is_found_and_comes_first(change: dict[str, Any], kind: str) -> None:
    r = ranked(change, n=1)
    assert r.found is not None
    assert r.found.kind in kind.split("|")
    assert r.ranking[0] == r.found
    assert r.found.group == 1 < r.base_group
    assert r.found.wiring == bench(1).base
    assert r.found.effect.mean < -FLOOR
    assert r.found.p < ALPHA


def test_two_faults_that_are_listed_nowhere_together() -> None:
    r = ranked({"norm_output": True, "state_shift": -1}, n=2)
    assert r.found is not None
    assert r.found.wiring == bench(2).base
    assert set(r.found.change) == {"norm_output", "state_shift"}


def test_every_wiring_in_full() -> None:
    """Without the quick screening the same wiring wins, and delta_nll is on all steps."""
    b = bench(1)
    few = [c for c in alternatives(replace(b.base, aux_layers=(2, 27, 15)), WIDE, pairs=False) if c.kind in ("order", "layers")][:5]
    told: list[str] = []
    r = rank_bench(replace(b, base=replace(b.base, aux_layers=(2, 27, 15)), _models={}), candidates=few, progress=told.append)
    assert r.ranking[0].wiring.aux_layers == LAYERS
    assert len(r.ranking[0].rates.joint) == 4
    assert told


def test_what_cannot_be_run_is_said_not_hidden() -> None:
    b = bench(1)
    wrong = replace(b.base, aux_layers=(2, 15, 99))
    c = Candidate(name="layer 99", kind="layers", wiring=wrong, change=b.base.differences(wrong))
    r = rank_bench(b, candidates=[c])
    assert r.ranking == ()
    assert any("not tried: layer 99" in n and "99" in n for n in r.notes)


def test_paired_differences_are_zero_for_the_same_wiring() -> None:
    b = bench(1)
    m = b.run(0, b.base)
    assert float(difference(m, m).nan_to_num(0).abs().max()) == 0
    nats, hits = better_than(m, m)
    assert (nats.mean, nats.z, hits.z) == (0, 0, 0)
    short = b.run(0, b.base, steps=1)
    assert torch.equal(short.nll[:, 0], m.nll[:, 0])
    base = Run(None, b.base, 4, parts=[m])
    same = Candidate(name="same", kind="x", wiring=b.base, change={"position_gap": (0, 1)})
    assert [r.out for r in race(b, base, [same], True, [], None)] == [True] * len(race(b, base, [same], True, [], None))


def test_scope_of_the_sample() -> None:
    s = scope_of(bench(1), open_target(SAMPLE / "target"))
    assert s.layers == WIDE.layers
    assert s.final
    assert s.final_norm
    assert not s.target_head  # the draft's head is the target's rows
    assert not s.first_rows
    assert "t2d" not in s.tensors  # it says what d2t says
    assert s.reduced


def test_rank_opens_and_reads() -> None:
    draft, dump, target = open_checkpoint(SAMPLE / "draft"), open_dump(SAMPLE / "dumps"), open_target(SAMPLE / "target")
    r = rank(draft, bench(1).spec, dump, target, base=replace(bench(1).base, norm_before_residual=True), max_rows=1, quick=True)
    assert r.found is not None
    assert r.samples == 1
    assert any("1 of 3 samples" in n for n in r.notes)


# ---- what an engine would get ----------------------------------------------------------------------------------------------------


def test_the_same_wiring_loses_nothing() -> None:
    b = bench(1)
    same = served_acceptance(b, b.base)
    assert same.loss == 0
    assert not same.significant
    assert same.change == ""
    assert same.trained.expected_length == same.served.expected_length


def test_an_engine_s_loss_has_its_size_and_cause() -> None:
    b = bench(2)
    names = [n for n in b.weights.tensors if n.startswith("layers.0.") and n.endswith("_proj.weight")]
    lost = served_acceptance(b, replace(b.base, unfilled=dict.fromkeys(names, "uninitialised")))
    assert lost.significant
    assert lost.loss == pytest.approx(lost.trained.expected_length[4] - lost.served.expected_length[4])
    assert lost.loss > 0.1
    assert "left at their start values" in lost.change
    assert set(lost.to_dict()) >= {"trained", "served", "loss", "change", "significant"}


def test_states_of_verify_steps_stand_in_after_the_prompt() -> None:
    b = bench(1)
    rows = b.rows(0, replace(b.base, aux_layers_verify=(3, 16, 28)))
    plain, other = b.rows(0, b.base), b.rows(0, replace(b.base, aux_layers=(3, 16, 28)))
    mask = b.samples[0][0].loss_mask
    assert mask is not None
    for t in (0, int(torch.nonzero(mask)[0]), len(rows) - 1):
        assert torch.equal(rows.states[t], (other if mask[t] else plain).states[t])


def test_layers_that_no_file_names_are_taken_from_the_dump() -> None:
    b, dump = bench(1), open_dump(SAMPLE / "dumps")
    spec = replace(b.spec, wiring=replace(b.spec.wiring, aux_layers=None))
    with pytest.raises(CheckpointError, match="records no layer ids"):
        base_wiring(spec, None, dump)
    three = replace(dump, slots=tuple(s for s in dump.slots if s.hf in LAYERS or s.role == "final"))
    w, notes = base_wiring(spec, None, three)
    assert w.aux_layers == LAYERS
    assert "stored order" in notes[0]


def test_bench_reads_samples_evenly() -> None:
    from eagle3diag.draft.measure import _spread

    assert sorted(_spread(11)) == list(range(11))
    assert list(_spread(8))[:4] == [0, 4, 2, 6]
    assert list(_spread(1)) == [0]
    assert isinstance(bench(2), Bench)
