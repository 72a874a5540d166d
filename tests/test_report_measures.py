"""How measurements show themselves: golden text from made-up numbers, pictures with words, and the real sample end to end."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.agreement import Agreement, StepAgreement
from eagle3diag.draft.bootstrap import Effect
from eagle3diag.draft.breakdown import Part
from eagle3diag.draft.decode import GreedyLoop
from eagle3diag.draft.lengths import Rates, expected_lengths
from eagle3diag.draft.observed import Explanation, Explanations
from eagle3diag.draft.ranking import Ranked, WiringRanking
from eagle3diag.draft.served import Acceptance, ServedAcceptance
from eagle3diag.errors import UsageError
from eagle3diag.hidden.capture import Capture, CapturedSample, LayerDifference
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.exact import ExactSum
from eagle3diag.hidden.identity import DumpComparison, SlotMatch
from eagle3diag.hidden.model import DumpIssue, HiddenDump, SampleRef, Slot
from eagle3diag.hidden.norms import NormProfile, SlotProfile, profile
from eagle3diag.hidden.tokens import TokenNorms, token_norms
from eagle3diag.report import figures, html, jsonout, markdown, text, views
from eagle3diag.report.acceptance import EngineAcceptance
from eagle3diag.report.opened import dump_verdict, opened
from eagle3diag.report.sample import late, sample
from eagle3diag.report.study import study
from tests.test_report import EVIL, Tags, golden

AUX = Slot(position=0, hf=2, role="aux", name="hidden_states.2")
DEEP = Slot(position=1, hf=None, role="aux", name="hidden_states[:, 1]")
FINAL = Slot(position=2, hf=None, role="final", name="final_prenorm")
JOINT, FALLEN = (0.5, 0.25, 0.0), (0.2, 0.0, 0.0)


def dump(**change: Any) -> HiddenDump:
    """A dump by its headers."""
    fields: dict[str, Any] = {
        "path": "dumps",
        "format": "portable",
        "evidence": ("2 arrays hidden_states.K",),
        "hidden": 64,
        "slots": (AUX, DEEP, FINAL),
        "final_norm": "pre",
        "samples": (SampleRef(name="sample_0", file="sample_0.safetensors", tokens=192, rows=192),),
    }
    return HiddenDump(**{**fields, **change})


def norms(**change: Any) -> NormProfile:
    """A profile with a sink at the first layer and a broken row at the second."""
    layers = (
        SlotProfile(
            slot=AUX,
            hidden=64,
            rows=2,
            l2=ExactSum.of([2.0, 4.0]),
            mean=ExactSum.of([0.5, -0.25]),
            bins=((32, 1), (64, 1)),
            max_abs=1.5,
            max_at=("sample_0", 1),
            first_rows=1,
            first_l2=ExactSum.of([300.0]),
            first_max_abs=290.0,
        ),
        SlotProfile(slot=DEEP, hidden=64, rows=1, nonfinite=1, l2=ExactSum.of([8.0]), bins=((96, 1),), max_abs=3.0, first_rows=0),
        SlotProfile(slot=FINAL, hidden=64),
    )
    return NormProfile(**{"path": "dumps", "layers": layers, "samples": 1, "tokens": 3, **change})


def tokens(**change: Any) -> TokenNorms:
    """One sample of four tokens, the first a sink, the last broken."""
    fields: dict[str, Any] = {
        "path": "dumps",
        "sample": "sample_0",
        "slots": (AUX, FINAL),
        "token_ids": (1, 7, 7, 9),
        "l2": ((300.0, 2.0, 4.0, math.nan), (20.0, 8.0, 9.0, 8.5)),
        "medians": (3.0, 8.5),
        "sinks": (0,),
        "broken": (3,),
    }
    return TokenNorms(**{**fields, **change})


def agreement(**change: Any) -> Agreement:
    """Three steps of a middling draft."""
    conditional = (0.5, 0.5, 0.0)
    steps = tuple(
        StepAgreement(
            step=s, joint=j, conditional=c, marginal=0.5 - 0.1 * s, marginal_restricted=0.6, expected_acceptance=0.4, kl=1.25, n=200
        )
        for s, (j, c) in enumerate(zip(JOINT, conditional, strict=True))
    )
    fields: dict[str, Any] = {
        "wiring": Wiring(aux_layers=(2, 15, 27)),
        "steps": steps,
        "on_policy": tuple(replace(s, marginal=s.joint) for s in steps),
        "expected_length": expected_lengths(JOINT),
        "interval": {1: (1.4, 1.6), 2: (1.6, 1.9), 3: (1.6, 1.9)},
        "walk_length": 1.7,
        "coverage": 0.8,
        "coverage_mass": 0.75,
        "misses_outside": 0.4,
        "follows": 1.0,
        "commonest": 0.1,
        "rows": 200,
        "samples": 2,
        "distribution": "exact",
        "choices": "stored",
        "parts": {"position": (Part(name="0 to 15", n=200, marginal=0.5, error=0.035, expected_length=1.75),)},
        "notes": ("no rope_theta recorded: 10000 taken",),
    }
    return Agreement(**{**fields, **change})


def ranked(name: str, mean: float, *, better: bool = False, group: int = 2, joint: tuple[float, ...] = JOINT) -> Ranked:
    """One wiring."""
    return Ranked(
        name=name,
        kind="layers",
        change={"aux_layers": ((3, 16, 28), (2, 15, 27))},
        wiring=Wiring(aux_layers=(2, 15, 27)),
        effect=Effect(mean=mean, se=0.02, z=mean / 0.02, rows=200, blocks=12),
        p=0.0001 if better else 1.0,
        rates=Rates(marginal=joint, joint=joint, conditional=(None,) * len(joint), rows=200),
        group=group,
        better=better,
    )


def ranking(*, found: bool = True, **change: Any) -> WiringRanking:
    """Two wirings, the first of them better where ``found``."""
    first = ranked("layers 2, 15, 27 in place of 3, 16, 28", -0.12, better=True, group=1) if found else ranked("rope_theta 1e6", 0.001)
    fields: dict[str, Any] = {
        "base": Wiring(aux_layers=(3, 16, 28)),
        "base_rates": Rates(marginal=FALLEN, joint=FALLEN, conditional=(None,) * 3, rows=200),
        "base_nll": 3.5,
        "base_group": 2,
        "rows": 200,
        "samples": 2,
        "steps": 3,
        "ranking": (first, ranked("order 27, 15, 2", 0.9, group=3, joint=(0.1,))),
        "found": first if found else None,
        "alike": ("theta",) if found else (),
        "smallest": 0.05,
        "tried": 63,
        "blocks": 12,
    }
    return WiringRanking(**{**fields, **change})


def explanations(seen: float = 1.1, *, fits: bool = True) -> Explanations:
    """A length seen, the wiring at hand, and one other that gives 1.10."""

    def one(name: str, faults: int, length: float) -> Explanation:
        off = (length - seen) / 0.05
        return Explanation(
            name=name, kind="layers", faults=faults, wiring=Wiring(), length=length, error=0.05, agreement=length - 1, off=off
        )

    others = (one("7 parameters left at their start values", 1, 1.1 if fits else 1.4),)
    return Explanations(observed=seen, steps=3, rows=200, here=one("the wiring at hand", 0, 1.75), others=others)


def acceptance(joint: tuple[float, ...]) -> Acceptance:
    """One side."""
    rates = Rates(marginal=joint, joint=joint, conditional=(None,) * 3, rows=200)
    return Acceptance(wiring=Wiring(), rates=rates, expected_length=expected_lengths(joint), interval={3: (1.1, 1.9)})


def served(joint: tuple[float, ...] = FALLEN, change: str = "position gap 1 in place of 0") -> ServedAcceptance:
    """What an engine makes of it."""
    lost = sum(joint) - sum(JOINT)
    return ServedAcceptance(
        trained=acceptance(JOINT),
        served=acceptance(joint),
        tokens=Effect(mean=lost, se=0.05, z=lost / 0.05, rows=200, blocks=12),
        nats=Effect(mean=-lost, se=0.05, z=-lost / 0.05, rows=200, blocks=12),
        change=change,
    )


def engine(**change: Any) -> EngineAcceptance:
    """The same with a name."""
    fields = {"engine": "sglang 0.5.9", "dump": "dumps", "trained": acceptance(JOINT), "result": served()}
    return EngineAcceptance(**{**fields, **change})


def match(hf: int, best: int, error: float, shift: int = 0) -> SlotMatch:
    """One state of a dump against another's."""
    return SlotMatch(
        slot=f"hidden_states.{hf}",
        hf=hf,
        expected=f"hidden_states.{hf}",
        cosine=0.9,
        error=0.4,
        best=f"hidden_states.{best}",
        best_hf=best,
        best_shift=shift,
        best_cosine=0.999,
        best_error=error,
        by_shift=(0.8, error, 0.8),
    )


def comparison(*layers: SlotMatch) -> DumpComparison:
    """Two states one layer late, where nothing else is given."""
    return DumpComparison(
        a="served",
        b="trained",
        samples=2,
        rows=384,
        shifts=(-1, 0, 1),
        layers=layers or (match(2, 3, 0.001), match(3, 14, 0.002)),
        errors=((0.4, 0.001, 1.2), (1.3, None, 0.002)),
        columns=("hidden_states.2", "hidden_states.3", "hidden_states.14"),
    )


def captured(mean: float = 1e-6) -> Capture:
    """Two texts, one of them captured before."""
    samples = tuple(CapturedSample(file=f"sample_{i}.safetensors", tokens=40, prompt_tokens=10, resumed=bool(i)) for i in range(2))
    decode = tuple(LayerDifference(hf=k, rows=60, mean=mean, worst=2 * mean, cosine=1 - mean) for k in (2, None))
    return Capture(path="out", target="Tiny", layers=(2, 15), samples=samples, decode=decode, rows="out/target")


def loop(**change: Any) -> GreedyLoop:
    """Ten rounds."""
    return GreedyLoop(**{"k": 2, "counts": (5, 3, 2), "texts": ((1, 2),), "identical": True, **change})


EVERY = {
    "dump": dump,
    "norms": norms,
    "tokens": tokens,
    "agreement": agreement,
    "wirings": ranking,
    "wirings_sound": lambda: ranking(found=False),
    "comparison": comparison,
    "explanations": explanations,
    "acceptance": served,
    "engine": engine,
    "capture": captured,
    "loop": loop,
}
DRAWN = ("norms", "tokens", "comparison", "agreement", "wirings", "wirings_sound", "acceptance", "engine")


@pytest.mark.parametrize("name", EVERY)
def test_text(name: str) -> None:
    golden(f"{name}.txt", text.render(EVERY[name]()))


@pytest.mark.parametrize("name", EVERY)
def test_every_measurement_shows_itself(name: str) -> None:
    result = EVERY[name]()
    assert 1 < len(repr(result).splitlines()) <= views.MAX_LINES
    assert not repr(result).startswith("<")
    page = result._repr_html_()
    assert page is not None
    assert '<th scope="col">' in page
    assert len(result.to_frame()) > 0
    assert json.loads(jsonout.dumps(result.to_dict()))
    assert markdown.of(views.view(result))


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_deterministic_and_have_words(name: str) -> None:
    result = EVERY[name]()
    assert figures.png(figures.plot(result)) == figures.png(result.plot())
    assert len(figures.alt(result)) > 40
    assert figures.caption(result).endswith(".")


# ------------------------------------------------------------------ what the views say


def test_a_sink_is_told_from_a_fault() -> None:
    assert "the first token is a sink: 100 times" in views.view(norms()).summary
    assert views.view(norms()).status == "error"  # the row that is not finite
    sound = norms(layers=norms().layers[:1])
    assert views.view(sound).status == "none"
    level = norms(layers=(replace(norms().layers[0], first_l2=ExactSum.of([5.0])),))
    assert "like the others" in views.view(level).summary
    assert "cannot be read" in views.view(norms(problems=(("sample_1", "cut short"),))).summary


def test_a_dump_with_problems_says_so_first() -> None:
    bad = dump(issues=(DumpIssue("length", "sample_0.safetensors", "161 rows where there are 192 tokens"),))
    assert views.view(bad).status == "error"
    assert "161 rows" in text.render(bad).splitlines()[2]


def test_logits_that_are_no_numbers_are_an_error() -> None:
    assert views.view(agreement(nonfinite=7)).status == "error"
    assert "7 rows of logits with NaN" in views.view(agreement(nonfinite=7)).summary
    assert "the same in every row" in views.view(agreement(constant=True)).summary


def test_what_is_known_between_two_bounds_is_shown_so() -> None:
    steps = tuple(replace(s, expected_acceptance=None, bounds=(0.25, 0.5)) for s in agreement().steps)
    assert "25.0 % to 50.0 %" in text.render(agreement(steps=steps))


def test_a_ranking_names_the_wiring_and_the_numbers() -> None:
    said = views.view(ranking()).summary
    assert "layers 2, 15, 27 in place of 3, 16, 28" in said
    assert "0.12 nats likelier (z 6.0)" in said
    assert "1.75 in place of 1.20" in said
    assert views.view(ranking()).status == "warning"


def test_a_sound_ranking_says_what_it_could_not_have_seen() -> None:
    view = views.view(ranking(found=False))
    assert view.status == "ok"
    assert "0.05 nats" in view.summary
    none = views.view(ranking(found=False, smallest=math.inf))
    assert none.status == "skipped"
    assert "too few" in none.summary
    assert "inf" not in none.summary


def test_an_acceptance_is_judged_by_what_is_lost() -> None:
    assert views.view(engine()).status == "error"
    assert "it loses 0.55 tokens" in views.view(engine()).summary
    assert views.view(engine(result=served((0.5, 0.2, 0.0)))).status == "ok"  # z 1: within the noise
    assert "as it was trained" in views.view(engine(result=served(JOINT, ""))).summary
    refused = views.view(engine(result=None, why="the engine refuses this draft (load_weights)"))
    assert refused.status == "error"
    assert "refuses" in refused.summary
    assert views.view(engine(result=None, why="the dump holds no HF 3")).status == "skipped"


def test_a_token_late_is_shown_beside_the_state() -> None:
    moved = comparison(match(2, 2, 0.001, 1), match(3, 3, 0.5))
    assert "HF 2 is HF 2, 1 late" in figures.alt(moved)
    assert "HF 3 no match" in figures.alt(moved)
    assert list(views.view(moved).tables[0].status) == ["error", "error"]


def test_a_number_is_explained_or_not() -> None:
    assert views.view(explanations()).status == "warning"
    assert "the simplest: 7 parameters" in views.view(explanations()).summary
    assert views.view(explanations(1.75)).status == "ok"
    assert "needs no fault" in views.view(explanations(1.75)).summary
    assert "look elsewhere" in views.view(explanations(fits=False)).summary
    assert views.view(explanations(2.5)).status == "info"


def test_a_cache_that_differs_is_a_warning() -> None:
    assert views.view(captured()).status == "ok"
    assert views.view(captured(0.2)).status == "warning"


def test_a_text_that_differs_is_told_with_the_gap() -> None:
    assert views.view(loop()).status == "ok"
    assert views.view(loop(identical=False, differs=(0, 12, 3.0))).status == "warning"
    tie = views.view(loop(identical=False, differs=(0, 12, 1e-6)))
    assert tie.status == "none"
    assert "a tie" in tie.notes[0]


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        figures.plot(norms(layers=()))
    with pytest.raises(UsageError, match="nothing to draw"):
        figures.plot(tokens(l2=((math.nan,), ()), medians=(math.nan, math.nan)))
    with pytest.raises(UsageError, match="nothing to draw"):
        figures.plot(ranking(ranking=(), found=None))
    with pytest.raises(UsageError, match="has no picture"):
        figures.plot(captured())


def test_nothing_from_a_file_is_markup() -> None:
    slot = replace(AUX, name=EVIL)
    evil = dump(path=EVIL, evidence=(EVIL,), slots=(slot,), issues=(DumpIssue("other", EVIL, EVIL),))
    for result in (evil, norms(path=EVIL, problems=((EVIL, EVIL),)), tokens(path=EVIL, sample=EVIL), engine(engine=EVIL, dump=EVIL)):
        seen = Tags()
        seen.feed(html.render(result))
        assert "img" not in seen.tags
        assert "\x1b" not in text.render(result)
        assert "\u202e" not in text.render(result)
    assert figures.png(figures.plot(tokens(sample="$\\frac{1}{0$ \x1b[1m"))).startswith(b"\x89PNG")


# ------------------------------------------------------------------ JSON


def test_json_shapes() -> None:
    body = json.loads(jsonout.dumps(jsonout.profiled(dump(), norms())))
    assert (body["schema"], body["tokens"], body["dump"]["format"]) == (1, 3, "portable")
    assert {"hf", "slot", "l2_mean", "rms_mean", "max_abs"} <= set(body["layers"][0])
    body = json.loads(jsonout.dumps(jsonout.agreed(agreement())))
    assert [s["joint"] for s in body["steps"]] == list(JOINT)
    assert body["expected_length"]["3"] == 1.75
    assert {"definition", "coverage", "tokens"} <= set(body)
    body = json.loads(jsonout.dumps(jsonout.ranked(ranking())))
    assert {"name", "change", "delta_nll", "z", "agreement", "expected_length", "group"} <= set(body["ranking"][0])
    assert body["baseline"]["agreement"] == 0.2
    assert "observed" not in body
    body = json.loads(jsonout.dumps(jsonout.ranked(ranking(), explanations())))
    assert body["observed"]["explanations"][0]["explains"] is True
    assert body["observed"]["here"]["explains"] is False
    body = json.loads(jsonout.dumps(jsonout.captured(captured())))
    assert (body["schema"], body["samples"][1]["resumed"], body["decode"][0]["hf"]) == (1, True, 2)


def test_steps_are_those_of_the_feeding_asked_for() -> None:
    body = jsonout.agreed(agreement(on_policy=tuple(replace(s, joint=0.1) for s in agreement().steps)), "on-policy")
    assert [s["joint"] for s in body["steps"]] == [0.1] * 3
    assert [s["joint"] for s in body["forced"]] == list(JOINT)
    assert body["expected_length"]["3"] == pytest.approx(1.3)


# ------------------------------------------------------------------ the sample


def test_the_sample_has_its_sink_at_the_first_token() -> None:
    found = token_norms(open_dump(sample().dumps))
    assert found.sinks[0] == 0
    assert found.times_median(0) > 100
    assert found.broken == ()
    assert [len(row) for row in found.l2] == [192] * 11
    assert token_norms(open_dump(sample().dumps), "sample_2").sample == "sample_2"
    with pytest.raises(UsageError, match="no sample 3"):
        token_norms(open_dump(sample().dumps), 3)


def test_a_layer_late_is_what_it_says() -> None:
    import torch

    first = open_dump(sample().dumps)
    second = late(first)
    assert [s.hf for s in second.aux] == [0, 1, 2, 14, 15, 26, 27]
    mine, other = first.read(first.samples[0]), second.read(second.samples[0])
    at = {s.hf: s.position for s in first.aux}
    assert torch.equal(other.states[at[15]], mine.states[at[16]])
    assert [x.l2_mean for x in profile(second).layers[:2]] == [x.l2_mean for x in profile(first).layers[1:3]]


def test_a_dump_is_judged_where_its_draft_is_known() -> None:
    known = open_dump(sample().dumps)
    (verdict,) = dump_verdict(known)
    assert verdict.verdict == "healthy"
    assert dump_verdict(replace(known, path="elsewhere")) == ()


def test_the_comparison_reads_the_shift_off_the_sample() -> None:
    from eagle3diag.hidden.identity import compare

    first = open_dump(sample().dumps)
    found = compare(late(first), first)
    assert found.layer_shift == 1
    view = views.view(found)
    assert view.status == "error"
    assert "layers 1 late" in view.summary
    row = next(r for r in view.tables[0].rows if r[0] == "HF 15")
    assert (row[1], row[4]) == ("HF 15", "HF 16")
    assert "HF 15 is HF 16" in figures.alt(found)
    same = views.view(compare(first, first))
    assert same.status == "ok"
    assert same.summary.startswith("the same states in both")


def test_a_draft_without_a_dump_is_refused() -> None:
    with pytest.raises(UsageError, match="no dump given"):
        opened(sample().draft)


def test_a_study_measures_on_a_dump() -> None:
    paths = sample()
    done = study(paths.draft, paths.target, "sglang==0.5.9", dump=str(Path(paths.dumps, "sample_0.safetensors")))
    assert done.dump is not None
    assert done.reports[0].case.dump is done.dump
    assert done.agreement is not None
    assert 1.2 < done.agreement.expected_length[4] < 1.8
    (one,) = done.acceptances
    assert one.result is not None
    assert one.result.significant
    assert one.result.loss > 0.2
    assert [type(m).__name__ for m in done.pictures] == ["Agreement", "EngineAcceptance", "NormProfile"]
    assert len(done.measures) == 3


def test_a_study_says_why_nothing_was_measured() -> None:
    paths = sample()
    done = study(paths.draft, None, "", dump=paths.dumps)  # the draft's embedding is the target's, which is not given
    assert done.agreement is None
    assert "could not be run on the dump" in done.unmeasured
    assert [type(m).__name__ for m in done.measures] == ["NormProfile"]
    assert study(paths.draft, paths.target, "").unmeasured.startswith("No dump")


def test_a_draft_tells_fused_states_apart(tmp_path: Path) -> None:
    import torch

    from tests.factory import HIDDEN, tiny_config, tiny_tensors, write_draft

    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    torch.save({"input_ids": torch.arange(8), "aux_hidden_state": torch.randn(8, 3 * HIDDEN)}, tmp_path / "data_0.pt")
    assert open_dump(tmp_path / "data_0.pt").hidden == 3 * HIDDEN  # nothing here says that three stand side by side
    found = opened(str(draft), str(tmp_path / "data_0.pt")).dump
    assert found.hidden == HIDDEN
    assert len(found.aux) == 3


def test_what_is_measured_is_opened_as_a_check_opens_it(tmp_path: Path) -> None:
    from eagle3diag.errors import CheckpointError
    from eagle3diag.rules.case import make_case

    paths = sample()
    one, case = opened(), make_case(paths.draft, target=paths.target, dump=paths.dumps)
    assert (one.spec, one.dump.slots, one.dump.hidden) == (case.spec, case.dump.slots, case.dump.hidden)  # type: ignore[union-attr]
    (tmp_path / "data_0.pt").write_bytes(b"not a dump")
    assert make_case(paths.draft, dump=str(tmp_path)).dump.issues  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="data_0"):
        opened(paths.draft, str(tmp_path))


def test_a_study_of_several_engines_opens_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3diag.checkpoint import open as opening

    read, real = [], opening.open_checkpoint
    monkeypatch.setattr(opening, "open_checkpoint", lambda path: (read.append(path), real(path))[1])
    paths = sample()
    done = study(paths.draft, None, "sglang==0.5.9, sglang, vllm", headers_only=True)
    assert read == [paths.draft]
    assert all(r.case.draft is done.checkpoint for r in done.reports)


def test_what_the_dump_could_have_shown_is_told_even_where_something_is_found() -> None:
    assert "better by 0.05 nats a token (tried: 63)" in " ".join(text.render(ranking()).split())
    assert "could have shown" not in text.render(ranking(smallest=math.inf))


def test_minus_zero_is_zero() -> None:
    level = replace(served(JOINT, ""), tokens=Effect(mean=0.0, se=0.0, z=0.0, rows=9, blocks=1))
    assert str(level.to_dict()["loss"]) == "0.0"
    assert "-0.0" not in jsonout.dumps({"loss": -0.0})
