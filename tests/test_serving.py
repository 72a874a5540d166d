"""Acceptance arithmetic, whether speculation pays, patterns, training metrics, the joined check and its explanation, the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.cli import main
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.report.logstudy import log_study
from eagle3diag.rules.case import check, make_case
from eagle3diag.rules.explain import explain
from eagle3diag.rules.explain_words import CAUSES, WIRING_KINDS
from eagle3diag.rules.logcase import check_log, engine_of_log, launch_of
from eagle3diag.rules.model import Report
from eagle3diag.serving import metrics
from eagle3diag.serving.logs import open_log, read_bytes
from eagle3diag.serving.payoff import best_chain, payoff, speedup
from eagle3diag.serving.training import read_training, training_text
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_srv import request, sglang_line, vllm_line, written

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
LOGS = ROOT / "data_samples" / "logs"

# ------------------------------------------------------------------ arithmetic


def test_any_definition_becomes_any_other() -> None:
    names = ("length", "length without bonus", "drafted rate", "rate with bonus")
    same = {"length": 2.85, "length without bonus": 1.85, "drafted rate": 1.85 / 3, "rate with bonus": 2.85 / 4}
    for a in names:
        for b in names:
            assert metrics.convert(same[a], a, b, 3) == pytest.approx(same[b]), (a, b)
    with pytest.raises(UsageError, match="needs k"):
        metrics.convert(0.5, "drafted rate", "length")
    with pytest.raises(UsageError, match="no acceptance number 'rate'"):
        metrics.convert(0.5, "rate", "length", 3)


def test_joint_conditional_and_histogram() -> None:
    joint = metrics.joint_of_histogram([39, 1, 0, 3])
    assert joint == pytest.approx((4 / 43, 3 / 43, 3 / 43))
    assert metrics.histogram_of(joint, 43) == pytest.approx((39, 1, 0, 3))
    assert metrics.conditional(joint) == pytest.approx((4 / 43, 3 / 4, 1.0))
    assert metrics.conditional((0.0, 0.0)) == (0.0, None)
    assert metrics.joint_of([0.7, 0.5], "conditional") == pytest.approx((0.7, 0.35))
    assert metrics.joint_of([0.7, 0.35], "joint") == (0.7, 0.35)
    counts = [39, 1, 0, 3]
    mean = sum(i * n for i, n in enumerate(counts)) / 43
    assert metrics.spread(joint) == pytest.approx(sum(n * (i - mean) ** 2 for i, n in enumerate(counts)) / 43)


def test_an_even_rate_and_back() -> None:
    assert metrics.geometric(0.5, 3) == 1.875
    assert metrics.alpha_of(1.875, 3) == pytest.approx(0.5)
    assert metrics.extended((0.6, 0.3), 4) == pytest.approx((0.6, 0.3, 0.15, 0.075))
    assert metrics.extended((0.6,), 3) == pytest.approx((0.6, 0.24, 0.096))


def test_the_error_of_counts_is_what_drawing_shows() -> None:
    import random

    r, joint = random.Random(3), (0.6, 0.3, 0.1)
    weights = metrics.histogram_of(joint, 1.0)
    means = [sum(r.choices(range(4), weights, k=200)) / 200 for _ in range(400)]
    mean = sum(means) / 400
    drawn = (sum((m - mean) ** 2 for m in means) / 399) ** 0.5
    assert metrics.error_of(joint, 200) == pytest.approx(drawn, rel=0.15)


# ------------------------------------------------------------------ does it pay


def test_the_break_even_length_of_two_throughputs(tmp_path: Path) -> None:
    # k = 5: the rate of 0.30 with the bonus token at length 1.80 needs six draft tokens
    log = open_log(written(tmp_path, [sglang_line(i, 1.80, 0.30, tps=54.8) for i in range(40)]))
    one = payoff(log, 90.0)
    assert one is not None
    assert (one.k, one.pays) == (5, False)
    assert one.speedup == pytest.approx(54.8 / 90)
    assert one.cost == pytest.approx(1.8 * 90 / 54.8)
    assert one.draft_cost == pytest.approx((one.cost - 1) / 5)
    assert one.best_k in (0, 1, 2)
    assert speedup(one.cost, one.draft_cost or 0, 5) == pytest.approx(1.0)


def test_the_best_chain_by_positions() -> None:
    joint, cost = (0.8, 0.6, 0.4, 0.2, 0.05), 0.1
    by_hand = max(range(1, 6), key=lambda k: (1 + sum(joint[:k])) / (1 + cost * k))
    assert best_chain(joint, 3.05, 5, cost)[0] == by_hand
    assert best_chain((0.05, 0.0), 1.05, 2, 0.2) == (0, 1.0)


# ------------------------------------------------------------------ training metrics


@pytest.mark.parametrize(
    ("text", "kind", "rates", "length"),
    [
        (json.dumps({"val/full_acc_0": 0.6, "val/full_acc_1": 0.3, "val/cond_acc_0": 0.6}), "joint", (0.6, 0.3), None),
        (json.dumps({"cond_acc_0_epoch": 0.6, "cond_acc_1_epoch": 0.5}), "conditional", (0.6, 0.5), None),
        (
            "step 10\n{'test/0_acc': 0.7011, 'test/1_acc': 0.3695, 'test/2_acc': 0.2059, 'test/3_acc': 0.1255, 'test/4_acc': 0.0812}\n",
            "marginal",
            (0.7011, 0.3695, 0.2059, 0.1255, 0.0812),
            None,
        ),
        (json.dumps({"eval/acc_0": 0.5, "eval/acc_1": 0.4, "eval/simulated_acc_len": 0.7}), "marginal", (0.5, 0.4), 1.7),
        ("epoch=0 step=38 train_loss=8.284101 train_acc=0.010703 train_tau_sim=1.0328 lr=4.466e-05", "marginal", (0.010703,), 1.0328),
        (json.dumps({"acc": 0.747}), "marginal", (0.747,), None),
        (json.dumps([{"acc": 0.1}, {"acc": 0.747}]), "marginal", (0.747,), None),
    ],
)
def test_what_training_runs_say(text: str, kind: str, rates: tuple[float, ...], length: float | None) -> None:
    found = training_text(text, "x")
    assert found is not None
    assert (found.kind, found.rates, found.length) == (kind, pytest.approx(rates), length)
    assert found.caveats


def test_training_metrics_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_training(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="no training metrics known"):
        read_training(written(tmp_path, '{"loss": 1.0}', "val_metrics.json"))
    log = read_bytes(b'{"val/full_acc_0": 0.6, "val/full_acc_1": 0.3}')
    assert log.training is not None
    assert not log.readable


# ------------------------------------------------------------------ severities and false alarms


def _codes(report: Report, *severities: str) -> set[str]:
    return {f.code for f in report.findings if not severities or f.severity.value in severities}


def _judged(folder: Path, lines: list[str] | str, **kw: Any) -> Report:
    return check_log(written(folder, lines), **kw)


@pytest.mark.parametrize(
    "positions",
    [
        (0.73, 0.52, 0.36), (0.65, 0.40, 0.24), (0.751, 0.567, 0.453), (0.586, 0.299, 0.149, 0.079, 0.042), (0.704, 0.482, 0.335),
        (0.701, 0.370, 0.206, 0.126, 0.081), (0.350, 0.121, 0.024), (0.4, 0.1, 0.01), (0.3695, 0.1108, 0.0468, 0.0099),
        (0.95, 0.91, 0.88, 0.85, 0.83), (0.60, 0.385, 0.215, 0.108, 0.062, 0.03, 0.012, 0.004),
    ],
)  # fmt: skip
def test_healthy_drafts_of_the_reports_raise_no_alarm(positions: tuple[float, ...], tmp_path: Path) -> None:
    lines = [vllm_line(i, 1000, round(1000 * sum(positions)), positions) for i in range(10)]
    report = _judged(tmp_path, lines)
    assert _codes(report, "error", "warning") == set()
    assert explain(report) is None


@pytest.mark.parametrize("name", ["sglang-0.5.23.log", "vllm-0.33.0.log"])
def test_the_sample_logs_are_healthy(name: str) -> None:
    assert check_log(str(LOGS / name)).verdict == "healthy"


@pytest.mark.parametrize(
    ("positions", "code"),
    [
        ((0.700, 0.035, 0.005), "SRV802"), ((0.65, 0.06, 0.002), "SRV802"), ((0.7, 0.5, 0.01), "SRV802"), ((0.384, 0.0045, 0.0), "SRV802"),
        ((0.042, 0.001, 0.000), "SRV802"), ((0.10, 0.009, 0.001), "SRV802"), ((0.0, 0.0, 0.0), "SRV801"),
        ((0.850, 0.850, 0.850), "SRV805"), ((0.92, 0.91, 0.90), "SRV805"), ((0.400, 0.400, 0.400), "SRV808"),
    ],
)  # fmt: skip
def test_patterns_of_the_reports(positions: tuple[float, ...], code: str, tmp_path: Path) -> None:
    report = _judged(tmp_path, [vllm_line(i, 1000, round(1000 * sum(positions)), positions) for i in range(6)])
    assert code in _codes(report, "error", "warning")


def test_a_pooled_length_does_not_hide_a_collapse(tmp_path: Path) -> None:
    both = [
        line
        for i in range(6)
        for line in (
            vllm_line(i, 380, 608, (0.8, 0.5, 0.3), engine="Engine 000: "),
            vllm_line(i, 60, 0, (0.0, 0.0, 0.0), engine="Engine 001: "),
        )
    ]
    report = _judged(tmp_path, both)
    assert "SRV801" in _codes(report, "error")
    assert "Engine 001" in next(f.title for f in report.findings if f.code == "SRV801")
    restarted = [sglang_line(i, 2.6) for i in range(60)] + [sglang_line(60 + i, 1.0) for i in range(60)]
    report = _judged(tmp_path, restarted)
    assert "the last 60 of 120 lines" in next(f.title for f in report.findings if f.code == "SRV801")
    for healthy in (restarted[::-1], restarted[:70], [sglang_line(i, 1.0 if i % 3 else 2.6) for i in range(120)]):
        assert "SRV801" not in _codes(_judged(tmp_path, healthy))


def test_every_switch_of_a_wiring_is_a_cause_of_some_kind() -> None:
    assert set(WIRING_KINDS) == {f.name for f in dataclasses.fields(Wiring)}
    assert set(WIRING_KINDS.values()) <= set(CAUSES)


def test_causes_that_tie_are_not_ranked(tmp_path: Path) -> None:
    log = written(tmp_path, [sglang_line(i, 1.0) for i in range(40)])
    explanation = explain(check_log(log))
    assert explanation is not None
    text = repr(explanation)
    assert "fit equally well" in text
    assert "likeliest" not in text


def test_windows_at_one_and_at_the_end_of_the_chain(tmp_path: Path) -> None:
    start = "server_args=ServerArgs(speculative_algorithm='EAGLE3', speculative_num_steps=3, speculative_eagle_topk=1, version='0.5.23')"
    lines = [start, *(sglang_line(i, 4.0 if i % 3 else 1.0, 1.0 if i % 3 else 0.0) for i in range(30))]
    assert "SRV808" in _codes(_judged(tmp_path, lines), "error")
    lines[5] = sglang_line(5, 2.7, 0.57)
    assert "SRV808" not in _codes(_judged(tmp_path, lines))


def test_a_few_verifications_are_no_pattern(tmp_path: Path) -> None:
    report = _judged(tmp_path, request([20, 0, 0, 3]))
    assert _codes(report, "error", "warning") == set()
    assert {o.code for o in report.skipped} >= {"SRV801", "SRV802"}


def test_contexts_that_vary_are_no_decay(tmp_path: Path) -> None:
    import random

    r = random.Random(5)
    for _ in range(5):
        lines = [sglang_line(i, max(1.0, r.gauss(1.8, 0.25)), None, tokens=r.randint(300, 30000)) for i in range(300)]
        assert "SRV806" not in _codes(_judged(tmp_path, lines))


# ------------------------------------------------------------------ joined with a draft


def test_engine_and_launch_come_from_the_log(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    target = tiny_target(tmp_path / "target")
    case = make_case(draft, target=target, log=str(LOGS / "sglang-0.5.23.log"), headers_only=True)
    assert case.served is not None
    assert case.served.contract.label == "sglang 0.5.23"
    assert case.launch is not None
    assert (case.launch.method, case.launch.steps) == ("EAGLE3", 3)
    assert any("taken from the log" in n for n in case.notes)
    other = make_case(draft, target=target, log=str(LOGS / "sglang-0.5.23.log"), engine="sglang==0.5.9", headers_only=True)
    assert any("the log says sglang 0.5.23" in n for n in other.notes)
    two = open_log(str(LOGS / "vllm-0.33.0.log"))
    assert engine_of_log(two) == "vllm==0.33.0"
    launch = launch_of(two)
    assert launch is not None
    assert launch.draft_tokens == 3


def test_a_wrong_algorithm_in_the_log_is_found(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    start = "server_args=ServerArgs(model_path='t', speculative_algorithm='EAGLE', speculative_draft_model_path='d', version='0.5.9')"
    log = written(tmp_path, [start, *(sglang_line(i, 1.0, 0.20) for i in range(40))])
    report = check(draft, target=tiny_target(tmp_path / "target"), log=log, headers_only=True)
    assert {"ENG501", "SRV801"} <= _codes(report, "error")
    found = explain(report)
    assert found is not None
    assert found.causes[0].kind == "method"
    assert any("EAGLE" in t for t in found.causes[0].for_)


def test_inputs_that_need_a_log(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    for given in ({"baseline": 90.0}, {"control": str(LOGS / "vllm-0.33.0.log")}):
        with pytest.raises(UsageError, match="give --log too"):
            make_case(draft, **given)  # type: ignore[arg-type]


def test_training_metrics_beside_the_draft_are_found(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    (draft / "val_metrics.json").write_text(json.dumps({"full_acc_0": 0.75, "full_acc_1": 0.55, "full_acc_2": 0.4}))
    log = written(tmp_path, [vllm_line(i, 1000, 740, (0.45, 0.2, 0.09)) for i in range(6)])
    report = check(draft, log=log, headers_only=True)
    (found,) = [f for f in report.findings if f.code == "SRV803"]
    assert found.severity.value == "error"
    assert found.evidence["lost_tokens"] == pytest.approx(0.96, abs=0.01)
    assert any("val_metrics.json" in n for n in report.case.notes)


def test_training_accuracy_against_service(tmp_path: Path) -> None:
    """74.7 % in training, 1.8 of 6 served."""
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    metrics_file = written(tmp_path, '{"acc": 0.747}', "metrics.json")
    log = written(tmp_path, [sglang_line(i, 1.80, 0.30) for i in range(40)])
    report = check(draft, log=log, metrics=metrics_file, headers_only=True)
    assert "SRV803" in _codes(report, "error")
    found = explain(report)
    assert found is not None
    weak = next(c for c in found.causes if c.kind == "weak")
    assert any("74.7 %" in t for t in weak.against)


# ------------------------------------------------------------------ explained


def test_a_reference_draft_that_fails_too_makes_the_engine_guilty(tmp_path: Path) -> None:
    log = written(tmp_path, [sglang_line(i, 1.02, 0.01) for i in range(60)])
    bad = written(tmp_path, [vllm_line(i, 1000, 450, (0.2, 0.15, 0.1)) for i in range(6)], "control.log")
    good = written(tmp_path, [sglang_line(i, 2.9, 0.63) for i in range(60)], "good.log")
    first = explain(check_log(log, control=bad))
    assert first is not None
    assert first.causes[0].kind == "engine"
    assert any("drafted rate 15 %" in t for t in first.causes[0].for_)
    second = explain(check_log(log, control=good))
    assert second is not None
    assert second.causes[0].kind != "engine"
    assert next(c for c in second.causes if c.kind == "engine").excluded


@pytest.fixture(scope="module")
def sample() -> dict[str, str]:
    return {"draft": str(SAMPLE / "draft"), "target": str(SAMPLE / "target"), "dump": str(SAMPLE / "dumps" / "sample_0.safetensors")}


def test_a_log_as_good_as_the_dump_speaks_for_the_wiring(sample: dict[str, str]) -> None:
    report = check(**sample, log=str(LOGS / "vllm-0.33.0.log"), select=("SRV", "AGR707"))
    assert _codes(report, "error", "warning") == set()
    found = explain(report)
    assert found is not None
    assert found.causes[0].kind == "weak"
    assert found.compared is not None
    assert found.compared.own.compatible


def test_a_log_that_does_not_tell_its_chain_is_not_easier_than_the_dump(sample: dict[str, str], tmp_path: Path) -> None:
    lines = [sglang_line(i, 1.47 + 0.02 * (i % 3), None) for i in range(60)]
    found = explain(check(**sample, log=written(tmp_path, lines), select=("SRV", "AGR707")))
    assert found is not None
    assert found.causes[0].kind == "weak"
    assert any("does not tell its own" in words for words in found.causes[0].for_)


def test_a_log_far_below_the_dump_is_explained_by_wirings(sample: dict[str, str], tmp_path: Path) -> None:
    lines = [vllm_line(i, 400, 40, (0.08, 0.016, 0.004)) for i in range(6)]
    report = check(**sample, log=written(tmp_path, lines), select=("SRV",))
    (found,) = [f for f in report.findings if f.code == "SRV803"]
    assert found.severity.value == "error"
    one = explain(report)
    assert one is not None
    assert one.compared is not None
    assert not one.compared.own.compatible
    allowed = one.compared.compatible
    assert allowed
    assert all(c.group > 0 for c in allowed)
    assert all(c.group == 0 for c in one.compared.compared if not c.compatible)
    order = [c.compatible for c in one.compared.compared]
    assert order == sorted(order, reverse=True)
    assert one.causes[0].group > 0
    assert len(one.causes[0].members) > 1
    assert "verifications" in one.experiment or "states" in one.experiment
    json.dumps(one.to_dict(), allow_nan=False)


# ------------------------------------------------------------------ the command


def test_the_command_prints_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [vllm_line(i, 151, 282, (0.821, 0.609, 0.437)) for i in range(10)])
    assert main(["log", path, "--format", "json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["schema"] == 1
    assert out["verdict"] == "healthy"
    assert (out["log"]["accepted"], out["log"]["drafted"], out["log"]["k"]) == (2820, 4530, 3)
    assert "draft" not in out
    assert out["findings"] == []


@pytest.mark.parametrize("form", ["text", "html", "markdown", "sarif"])
def test_every_format(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [sglang_line(i, 1.80, 0.30, tps=54.8) for i in range(40)])
    control = written(tmp_path, [sglang_line(i, 2.6, 0.43) for i in range(40)], "control.log")
    assert main(["log", path, "--baseline", "90", "--control-log", control, "--format", form, "--fail-on", "warning"]) == 1
    out = capsys.readouterr().out
    assert "SRV807" in out
    assert "54.8" in out


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [sglang_line(0, 2.0, None)])
    for argv in (["log"], ["log", str(tmp_path / "absent")], ["log", path, "--baseline", "-3"], ["log", path, "--baseline", "fast"],
                 ["log", path, "--metrics", str(tmp_path / "absent")], ["log", path, "--control-log", str(tmp_path / "absent")],
                 ["log", "http://127.0.0.1:9/metrics"]):  # fmt: skip
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert len(err.strip().splitlines()) == 1, err


def test_an_empty_log_is_an_error_and_training_metrics_are_not(tmp_path: Path) -> None:
    assert main(["log", written(tmp_path, "INFO started\n"), "--format", "json"]) == 1
    assert main(["log", written(tmp_path, '{"full_acc_0": 0.6}', "val_metrics.json"), "--format", "json"]) == 0


def test_the_picture_has_words(tmp_path: Path) -> None:
    from eagle3diag.report import figures

    log = open_log(str(LOGS / "sglang-0.5.23.log"))
    assert figures.png(log.plot()) == figures.png(log.plot())
    assert "1.51" in figures.caption(log)
    assert "tokens of context" in figures.alt(log)
    with pytest.raises(UsageError, match="nothing to draw"):
        read_bytes(request([10, 5, 5]).encode()).plot()


# ------------------------------------------------------------------ found by varying the cases
def test_a_fall_in_one_step_is_a_decay(tmp_path: Path) -> None:
    import random

    for step, most in ((2048, 8000), (8192, 11000)):
        r = random.Random(step)
        contexts = [300 + (most - 300) * i // 299 for i in range(300)]
        lines = [sglang_line(i, max(1.0, r.gauss(2.5 if c < step else 1.15, 0.05)), None, tokens=c) for i, c in enumerate(contexts)]
        assert "SRV806" in _codes(_judged(tmp_path, lines), "warning")
    two = [sglang_line(i, 2.6 if i % 2 else 1.8, None, tokens=800, running=8 if i % 2 else 2) for i in range(60)]
    assert "SRV806" not in _codes(_judged(tmp_path, two))


def test_none_or_all_with_a_few_in_between(tmp_path: Path) -> None:
    assert "SRV808" in _codes(_judged(tmp_path, request([60, 1, 0, 40])), "error")
    assert "SRV808" not in _codes(_judged(tmp_path, request([6, 1, 1, 93])))
    every = _judged(tmp_path, [vllm_line(i, 500, 1500, (1.0, 1.0, 1.0)) for i in range(6)])
    assert {"SRV805", "SRV808"} <= _codes(every, "error", "warning")


@pytest.mark.parametrize(("speed", "warned"), [(90.0, False), (89.7, False), (88.0, True), (95.0, False)])
def test_as_fast_as_plain_decoding_is_not_slower(speed: float, warned: bool, tmp_path: Path) -> None:
    report = _judged(tmp_path, [sglang_line(i, 2.0, None, tps=speed) for i in range(40)], baseline=90.0)
    assert ("SRV807" in _codes(report)) is warned


def test_among_wirings_the_counts_cannot_separate_the_one_the_engine_runs_is_named_first() -> None:
    from eagle3diag.report.sample import sample

    here = sample()
    told = explain(check(here.draft, target=here.target, dump=here.dumps, log=here.lost, select=("KEY", "SRV")))
    assert told is not None
    first = told.causes[0]
    assert len(first.members) > 1
    assert first.members[0].endswith("(as sglang 0.5.9 would run it)")
    assert "10 parameters left at their start values" in first.members[0]


def test_what_is_known_is_mended_before_anything_is_tried(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", {k.replace("midlayer", "layers.0"): v for k, v in tiny_tensors().items()}, tiny_config())
    log = written(tmp_path, [sglang_line(i, 1.0) for i in range(40)])
    report = check(draft, target=tiny_target(tmp_path / "target"), engine="sglang==0.5.9", log=log)
    assert "KEY203" in _codes(report, "error")
    explanation = explain(report)
    assert explanation is not None
    assert explanation.experiment.startswith("KEY203")


def test_a_baseline_is_more_than_nothing() -> None:
    with pytest.raises(UsageError, match="baseline is 0"):
        log_study(str(ROOT / "README.md"), baseline=0.0)
