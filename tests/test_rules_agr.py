"""AGR rules on the sample's draft: one fault, one code, with numbers; nothing said where nothing can be."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3diag.rules.model import Finding, Report
from eagle3diag.rules.registry import RULES, load_all, run
from tests.factory import write_draft
from tests.fixtures_agr import FIRING, QUIET, SAMPLE, case_of, config, fresh_layer, good_engine, tensors

load_all()
CODES = tuple(f"AGR70{n}" for n in range(1, 8))


@cache
def report(name: str) -> Report:
    """A case judged once by the families of this file."""
    build = {**FIRING, "sound": case_of, "good engine": good_engine, "fresh layer": lambda p: case_of(p, fresh_layer())}[name]
    with TemporaryDirectory() as folder:
        return run(build(Path(folder)), ["DMP", "AGR"])


def serious(r: Report) -> list[str]:
    return [f.code for f in r.findings if f.severity.value != "info"]


def one(name: str, code: str) -> Finding:
    (found,) = (f for f in report(name).findings if f.code == code)
    return found


def test_the_family_is_whole() -> None:
    assert tuple(c for c in RULES if c.startswith("AGR")) == CODES
    assert {c: RULES[c].severity.value for c in CODES} == dict(
        zip(CODES, ("error", "warning", "warning", "warning", "error", "warning", "info"), strict=True)
    )
    assert set(FIRING) == set(QUIET) == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_one_fault_one_code(code: str) -> None:
    r = report(code)
    assert not [o for o in r.outcomes if o.status == "crashed"]
    assert serious(r) == ([] if code == "AGR707" else [code])
    assert code in {f.code for f in r.findings}


def test_a_sound_draft_is_called_weak_and_nothing_else() -> None:
    r = report("sound")
    assert serious(r) == []
    weak = one("sound", "AGR707")
    assert weak.evidence["wirings_tried"] > 40
    assert 0.01 < weak.evidence["smallest_effect_nats"] < 0.5
    assert "1.39" in weak.title


def test_near_chance_names_what_explains_it() -> None:
    f = one("AGR701", "AGR701")
    assert f.severity.value == "error"
    assert "norm_before_residual false in place of true" in f.title
    assert f.evidence["change"] == {"norm_before_residual": [True, False]}
    assert f.evidence["agreement_with_it"] > 0.2 > f.evidence["agreement"]
    assert "norm_before_residual" in f.remedy
    assert f.where == "norm_before_residual"


def test_near_chance_without_an_explanation_points_at_the_weights() -> None:
    f = one("fresh layer", "AGR701")
    assert "no other wiring explains it" in f.title
    assert "VAL301 to VAL307" in f.remedy
    assert serious(report("fresh layer")) == ["AGR701"]


def test_a_fall_from_step_to_step() -> None:
    f = one("AGR702", "AGR702")
    assert f.severity.value == "error"
    assert f.evidence["lost_tokens"] > 0.1
    assert f.evidence["marginal"][0] > 0.9 > 0.2 > f.evidence["marginal"][1]


def test_a_better_wiring_is_an_error_from_a_tenth_of_a_token() -> None:
    f = one("AGR703", "AGR703")
    assert f.severity.value == "error"
    assert f.evidence["gain_tokens"] >= 0.1
    assert f.evidence["kind"] == "norm_output"
    assert f.evidence["delta_nll"] < -1
    assert f.evidence["p"] < 0.05
    assert "norm_output" in f.remedy
    assert f.evidence["rows"] > 300


def test_a_vocabulary_that_misses_the_text() -> None:
    f = one("AGR704", "AGR704")
    assert f.severity.value == "warning"
    assert f.evidence["misses_outside"] > 0.5
    assert f.evidence["draft_vocab"] == 40
    assert serious(report("sound")) == []


def test_no_numbers_and_nothing_further() -> None:
    r = report("AGR705")
    assert "not finite" in one("AGR705", "AGR705").title
    skipped = {o.code: o.why for o in r.skipped if o.code.startswith("AGR")}
    assert set(skipped) == set(CODES) - {"AGR705"}
    assert "AGR705" in skipped["AGR703"]
    assert "engine" in skipped["AGR706"]


def test_constant_logits(tmp_path: Path) -> None:
    case = case_of(tmp_path, {"lm_head.weight": torch.zeros_like(tensors()["lm_head.weight"])})
    (f,) = run(case, ["AGR705"]).findings
    assert f.evidence["constant"]


def test_an_engine_gets_both_numbers() -> None:
    f = one("AGR706", "AGR706")
    assert f.severity.value == "error"
    assert "sglang 0.5.9" in f.engines[0]
    trained, served = f.evidence["trained"]["expected_length"]["4"], f.evidence["served"]["expected_length"]["4"]
    assert trained - served == pytest.approx(f.evidence["lost_tokens"], abs=2e-3)
    assert f"{trained:.2f}" in f.title
    assert f"{served:.2f}" in f.title
    assert "left at their start values" in f.title


def test_an_engine_that_runs_it_as_trained_loses_nothing() -> None:
    r = report("good engine")
    assert serious(r) == []
    assert "AGR706" not in {o.code for o in r.skipped}


def test_a_faulty_dump_judges_no_draft(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    for p in sorted((SAMPLE / "dumps").glob("*.safetensors")):
        t = load_file(p)
        late = {k: torch.roll(v, 1, 0) if k.startswith(("hidden_states", "final")) else v for k, v in t.items()}
        save_file(late, dump / p.name, metadata={"index_convention": "HF output_hidden_states index"})
    r = run(case_of(tmp_path, dump=dump), ["DMP", "AGR"])
    assert not [f.code for f in r.findings if f.code.startswith("AGR")]
    why = {o.code: o.why for o in r.skipped}
    assert "the dump itself is at fault (DMP605)" in why["AGR701"]


def test_too_few_rows_are_said(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    t = load_file(SAMPLE / "dumps" / "sample_0.safetensors")
    t["loss_mask"] = torch.arange(len(t["loss_mask"])) > len(t["loss_mask"]) - 20
    save_file(t, dump / "sample_0.safetensors", metadata={"index_convention": "HF output_hidden_states index"})
    r = run(case_of(tmp_path, dump=dump), ["AGR703"])
    assert "rows of the dump count" in r.skipped[0].why


def test_ids_that_can_be_read_in_two_ways_are_settled_by_the_dump(tmp_path: Path) -> None:
    """Nested ids are layer outputs by habit; copied there unchanged they are HF indices, and the dump shows it."""
    from eagle3diag.rules.agr_look import look
    from eagle3diag.rules.case import make_case
    from eagle3diag.rules.model import Case

    keys = config(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 15, 27]})
    del keys["eagle_aux_hidden_state_layer_ids"]
    draft = write_draft(tmp_path / "draft", tensors(), keys)
    case = make_case(draft, dump=SAMPLE / "dumps", target=SAMPLE / "target")
    aux = case.spec.aux
    assert len(aux.readings) == 2
    # put the wrong reading first, as an unknown target depth would
    from dataclasses import replace

    wrong = next(r for r in aux.readings if r.hf == (3, 16, 28))
    turned = replace(aux, readings=(wrong, *(r for r in aux.readings if r is not wrong)), settled=False)
    spec = replace(case.spec, aux=turned, wiring=replace(case.spec.wiring, aux_layers=(3, 16, 28)))
    at = look(Case(draft=case.draft, spec=spec, target=case.target, dump=case.dump))
    assert at.bench.base.aux_layers == (2, 15, 27)
    assert any("fits that reading better" in n for n in at.agreement.notes)
