"""AUX rules: severities, the order of evidence, the ids to write, and silence where the right layers are captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case, Finding
from eagle3diag.rules.registry import run
from tests.factory import speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_aux_eng import KIMI, OLD_SGLANG, OLD_VLLM, SGLANG, VLLM, one_aux, sglang, vllm


def found(case: Case, code: str) -> list[Finding]:
    report = run(case, ["AUX"])
    assert [o for o in report.outcomes if o.status == "crashed"] == []
    return [f for f in report.findings if f.code == code]


def one(case: Case, code: str) -> tuple[str, Finding]:
    (finding,) = found(case, code)
    return finding.severity.value, finding


def quiet(case: Case) -> list[str]:
    return [f"{f.code}: {f.title}" for f in run(case, ["AUX"]).findings if f.severity.value != "info"]


# ---- AUX401: what was meant, by which evidence ------------------------------------------------------------------------------------


def test_a_second_config_makes_it_an_error(tmp_path: Path) -> None:
    severity, finding = one(sglang(tmp_path, ids=(2, 6, 9), second=speculators_config()), "AUX401")
    assert severity == "error"
    assert finding.evidence["captured_hf"] == [3, 7, 10]
    assert finding.evidence["trained_hf"] == [2, 6, 9]
    assert finding.evidence["ids_to_write"] == [1, 5, 8]
    assert finding.evidence["went_by"] == "a second source"
    assert "[1, 5, 8]" in finding.remedy


def test_the_default_layers_make_it_a_warning(tmp_path: Path) -> None:
    severity, finding = one(sglang(tmp_path, ids=(2, 6, 9)), "AUX401")
    assert severity == "warning"
    assert finding.evidence["went_by"] == "the default layers"
    assert "2, 6, 9" in finding.title
    assert "3, 7, 10" in finding.title


def test_habit_makes_it_a_warning(tmp_path: Path) -> None:
    # layer-output ids in the nested place, read verbatim by the runner that reads that place
    line = "VLLM_USE_V2_MODEL_RUNNER=0 " + "vllm serve t --spec-method eagle3 --spec-model d --spec-tokens 3"
    severity, finding = one(vllm(tmp_path, aux="nested", ids=(2, 4, 10), launch=line), "AUX401")
    assert severity == "warning"
    assert finding.evidence["went_by"] == "habit"
    assert (finding.evidence["captured_hf"], finding.evidence["trained_hf"]) == ([2, 4, 10], [3, 5, 11])


def test_the_recorded_trainer_makes_it_an_error(tmp_path: Path) -> None:
    # speculators 0.4 wrote null and captured after layers 2, N//2, N-3
    config = speculators_config(ids=None, speculators_version="0.4.0")
    severity, finding = one(vllm(tmp_path, config=config), "AUX401")
    assert severity == "error"
    assert finding.evidence["trained_hf"] == [3, 7, 10]
    assert finding.evidence["ids_to_write"] == [3, 7, 10]


@pytest.mark.parametrize(
    ("engine", "captured", "write"),
    [("sglang==0.5.12", [3, 31, 59], [1, 29, 57]), ("sglang==0.5.10", [3, 31, 59], [1, 29, 57])],
)
def test_deepseek_rule_before_the_change(tmp_path: Path, engine: str, captured: list[int], write: list[int]) -> None:
    _, finding = one(sglang(tmp_path, engine, ids=(2, 30, 58), target=KIMI), "AUX401")
    assert finding.evidence["captured_hf"] == captured
    assert finding.evidence["trained_hf"] == [2, 30, 58]
    assert finding.evidence["ids_to_write"] == write


@pytest.mark.parametrize("ids", [(2, 30, 58), (1, 29, 57)])
@pytest.mark.parametrize("engine", ["sglang==0.5.13", SGLANG])
def test_deepseek_rule_after_the_change_takes_both(tmp_path: Path, engine: str, ids: tuple[int, ...]) -> None:
    assert quiet(sglang(tmp_path, engine, ids=ids, target=KIMI)) == []


def test_ids_to_write_follow_the_target_not_only_the_engine(tmp_path: Path) -> None:
    # from 0.5.13 a DeepSeek target takes ids verbatim unless the first is 1
    config = tiny_config(aux="nested", ids=(4, 30, 58))
    draft = write_draft(tmp_path / "draft", tiny_tensors(), config, config_speculators=speculators_config(ids=(5, 31, 59)))
    for engine, write in (("sglang==0.5.12", None), (SGLANG, [5, 31, 59])):
        findings = found(make_case(draft, engine=engine, target=tiny_target(tmp_path / "target", **KIMI)), "AUX401")
        assert [f.evidence["ids_to_write"] for f in findings] == ([] if write is None else [write])


@pytest.mark.parametrize(
    ("engine", "aux", "ids"),
    [
        (SGLANG, "nested", (1, 5, 8)),
        (SGLANG, "nested", (3, 4, 7)),
        ("sglang==0.5.11", "nested", (3, 4, 7)),
        (OLD_VLLM, "top", (2, 6, 9)),
        (VLLM, "top", (3, 4, 7)),
        (VLLM, "top", (2, 5, 10)),
        (VLLM, None, None),
        (SGLANG, None, None),
    ],
)
def test_silence_where_the_right_layers_are_captured(tmp_path: Path, engine: str, aux: str | None, ids: tuple[int, ...] | None) -> None:
    for target in (tiny_target(tmp_path / "target"), None):
        draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config(aux=aux, ids=ids))
        assert quiet(make_case(draft, engine=engine, target=target)) == []


# ---- AUX402 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "aux", "ids", "severity"),
    [
        (OLD_VLLM, "nested", (3, 4, 7), "warning"),
        (OLD_VLLM, "nested", (1, 5, 8), "info"),
        (VLLM, "nested", (3, 4, 7), "warning"),
        (SGLANG, "top", (4, 5, 7), "warning"),
        (SGLANG, "top", (2, 6, 9), "info"),
        ("sglang==0.4.8", "nested", (3, 4, 7), "warning"),
        ("vllm==0.10.2", "top", (3, 4, 7), "warning"),
    ],
)
def test_unread_ids(tmp_path: Path, engine: str, aux: str, ids: tuple[int, ...], severity: str) -> None:
    make = sglang if engine.startswith("sglang") else vllm
    case = make(tmp_path, engine, ids=ids, aux=aux)
    got, finding = one(case, "AUX402")
    assert got == severity
    assert finding.evidence["captured_hf"] == [2, 6, 9]
    assert found(case, "AUX401") == []


def test_unread_ids_say_what_to_write(tmp_path: Path) -> None:
    _, finding = one(sglang(tmp_path, ids=(4, 5, 7), aux="top"), "AUX402")
    assert '"eagle_aux_hidden_state_layer_ids": [3, 4, 6] inside "eagle_config"' in finding.remedy
    _, finding = one(sglang(tmp_path, "sglang==0.4.8", ids=(3, 4, 7)), "AUX402")
    assert "reads no ids" in finding.remedy


def test_unread_ids_without_a_target(tmp_path: Path) -> None:
    for ids, severity in (((2, 6, 9), "info"), ((3, 6, 9), "warning")):
        draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config(ids=ids))
        assert one(make_case(draft, engine=SGLANG), "AUX402")[0] == severity


def test_runner_decides_which_key_is_read(tmp_path: Path) -> None:
    line = "VLLM_USE_V2_MODEL_RUNNER={} vllm serve t --spec-method eagle3 --spec-model d --spec-tokens 3"
    assert found(vllm(tmp_path, aux="nested", ids=(3, 4, 7), launch=line.format(1)), "AUX402")
    assert found(vllm(tmp_path, aux="nested", ids=(3, 4, 7), launch=line.format(0)), "AUX402") == []


# ---- AUX403 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "engine", "ids", "severity", "says"),
    [
        (sglang, SGLANG, (1, 5, 57), "error", "57"),
        (vllm, VLLM, (2, 6, 40), "error", "40"),
        (vllm, OLD_VLLM, (2, 6, 12), "error", "12"),  # HF-N before 0.18
        (sglang, SGLANG, (8, 1, 5), "warning", "not ascending"),
        (vllm, VLLM, (-1, 6, 9), "error", "-1"),
        (vllm, VLLM, (6, 6, 9), "error", "6"),
    ],
)
def test_odd_ids(tmp_path: Path, make: Any, engine: str, ids: tuple[int, ...], severity: str, says: str) -> None:
    findings = found(make(tmp_path, engine, ids=ids), "AUX403")
    assert findings[0].severity.value == severity
    assert says in findings[0].title
    assert len(findings) <= 2


@pytest.mark.parametrize(
    ("ids", "codes"), [((9, 2, 6), 1), ((2, 2, 6), 1), ((2, 6, 9), 0), ((-1, 6, 9), 1), ((2, 6, 12), 0), ((2, 6, 13), 1)]
)
def test_odd_ids_without_an_engine(tmp_path: Path, ids: tuple[int, ...], codes: int) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config(ids=ids))
    assert len(found(make_case(draft, target=tiny_target(tmp_path / "target")), "AUX403")) == codes


# ---- AUX404 to AUX407 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "arch", "first"),
    [
        ("sglang==0.5.9", "KimiK25ForConditionalGeneration", "0.5.10"),
        ("sglang==0.5.3", "DeepseekV3ForCausalLM", "0.5.4.post2"),
        ("sglang==0.5.17", "Qwen3_5ForConditionalGeneration", None),  # has the hook, captures nothing
        ("vllm==0.16.0", "DeepseekV3ForCausalLM", "0.18.0"),
        ("vllm==0.33.0", "Glm4MoeForCausalLM", None),
    ],
)
def test_target_without_hook(tmp_path: Path, engine: str, arch: str, first: str | None) -> None:
    types = {"DeepseekV3ForCausalLM": "deepseek_v3", "Glm4MoeForCausalLM": "glm4_moe"}
    target = dict(KIMI) if arch.startswith("Kimi") else {"architectures": [arch], "model_type": types.get(arch, "qwen3_5")}
    make = sglang if engine.startswith("sglang") else vllm
    severity, finding = one(make(tmp_path, engine, target=target), "AUX404")
    assert severity == "error"
    assert arch in finding.title
    if first:
        assert first in finding.title
        assert first in finding.remedy


def test_the_bypass_names_both_widths(tmp_path: Path) -> None:
    for algorithm in ("EAGLE", "NEXTN"):
        severity, finding = one(sglang(tmp_path, algorithm=algorithm), "AUX405")
        assert severity == "error"
        assert (finding.evidence["state_width"], finding.evidence["embedding_width"], finding.evidence["fc"]) == (64, 64, [64, 192])
        assert "192" in finding.title
        assert "64" in finding.title
        assert quiet(sglang(tmp_path, algorithm=algorithm)) == [f"AUX405: {finding.title}"]


def test_a_single_aux_layer_is_bypassed_by_sglang_alone(tmp_path: Path) -> None:
    assert one(one_aux(tmp_path, SGLANG), "AUX405")[0] == "error"
    assert found(one_aux(tmp_path / "v", VLLM), "AUX405") == []


def test_a_draft_trained_without_aux_states_is_left_alone(tmp_path: Path) -> None:
    config = tiny_config(aux="nested")
    config["eagle_config"]["use_aux_hidden_state"] = False
    draft = write_draft(tmp_path / "draft", tiny_tensors(), config)
    assert quiet(make_case(draft, engine=SGLANG, target=tiny_target(tmp_path / "target"))) == []


def test_graph_override(tmp_path: Path) -> None:
    severity, finding = one(sglang(tmp_path, OLD_SGLANG, ids=(2, 4, 9)), "AUX406")
    assert severity == "warning"
    assert (finding.evidence["prefill_hf"], finding.evidence["verify_hf"]) == ([3, 5, 10], [2, 6, 9])
    # ids one late, meant as the default: the graph-replayed steps are the right ones
    assert one(sglang(tmp_path, OLD_SGLANG, ids=(2, 6, 9)), "AUX406")[0] == "info"
    for engine, ids, chain in (
        (OLD_SGLANG, (1, 5, 8), ""),
        (OLD_SGLANG, (2, 4, 9), "--disable-cuda-graph"),
        ("sglang==0.5.11", (2, 4, 9), ""),
    ):
        assert found(sglang(tmp_path, engine, ids=ids, algorithm="EAGLE3", chain=chain), "AUX406") == []


def test_graph_override_without_a_target(tmp_path: Path) -> None:
    for ids, hits in (((4, 12, 25), 1), ((1, 14, 26), 0)):
        draft = write_draft(tmp_path / "draft", tiny_tensors(layer="midlayer"), tiny_config(aux="nested", ids=ids))
        assert len(found(make_case(draft, engine=OLD_SGLANG), "AUX406")) == hits


@pytest.mark.parametrize(("depth", "aux", "hits"), [(5, None, 1), (6, None, 1), (7, None, 0), (6, "top", 0)])
def test_shallow_target(tmp_path: Path, depth: int, aux: str | None, hits: int) -> None:
    for engine in (VLLM, None):
        draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config(aux=aux, ids=(1, 3, 4)))
        case = make_case(draft, engine=engine, target=tiny_target(tmp_path / "target", num_hidden_layers=depth))
        assert len(found(case, "AUX407")) == hits
