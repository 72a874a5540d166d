"""ENG rules: which algorithm runs, which flags matter to this draft, what is replaced, inherited, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case, Finding
from eagle3diag.rules.registry import run
from tests.factory import speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_aux_eng import (
    CHAIN,
    GOOD,
    OLD_SGLANG,
    OLD_VLLM,
    SGLANG,
    START_VLLM,
    VLLM,
    other_embedding,
    residual,
    sglang,
    vllm,
)


def found(case: Case, code: str) -> list[Finding]:
    report = run(case, ["ENG"])
    assert [o for o in report.outcomes if o.status == "crashed"] == []
    return [f for f in report.findings if f.code == code]


def one(case: Case, code: str) -> tuple[str, Finding]:
    (finding,) = found(case, code)
    return finding.severity.value, finding


# ---- ENG501 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "line", "runs"),
    [
        (SGLANG, "sglang serve --model-path t --speculative-algorithm EAGLE --speculative-draft-model-path d", "eagle"),
        (SGLANG, "sglang serve --model-path t --speculative-algorithm NEXTN --speculative-draft-model-path d", "eagle"),
        (SGLANG, "sglang serve --model-path t --speculative-algorithm STANDALONE --speculative-draft-model-path d", "draft_model"),
        (SGLANG, "sglang serve --model-path t --speculative-algorithm EAGEL3 --speculative-draft-model-path d", "eagel3"),
        (SGLANG, "sglang serve --model-path t --speculative-draft-model-path d", None),
        (SGLANG, "sglang serve --model-path t", None),
        (VLLM, START_VLLM.format('{"model": "/data/eagle-runs/draft", "num_speculative_tokens": 3}'), "eagle"),
        (VLLM, START_VLLM.format('{"model": "/data/eagle-runs/llama_eagle3", "num_speculative_tokens": 3}'), "eagle"),
        (VLLM, START_VLLM.format('{"model": "/models/draft", "num_speculative_tokens": 3}'), "draft_model"),
        (VLLM, START_VLLM.format('{"method": "eagle", "model": "/models/eagle3", "num_speculative_tokens": 3}'), "eagle"),
        ("vllm==0.10.1", START_VLLM.format('{"model": "/models/eagle3-llama", "num_speculative_tokens": 3}'), "eagle"),
        (VLLM, "vllm serve t --max-model-len 4096", None),
    ],
)
def test_wrong_algorithm(tmp_path: Path, engine: str, line: str, runs: str | None) -> None:
    make = sglang if engine.startswith("sglang") else vllm
    severity, finding = one(make(tmp_path, engine, launch=line), "ENG501")
    assert severity == "error"
    assert finding.evidence["runs"] == runs
    assert "eagle3" in finding.remedy.lower()


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (SGLANG, "sglang serve --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle-runs/d"),
        (VLLM, START_VLLM.format('{"method": "eagle3", "model": "/data/eagle-runs/draft", "num_speculative_tokens": 3}')),
        (VLLM, START_VLLM.format('{"model": "/models/llama_EAGLE3", "num_speculative_tokens": 3}')),
        (VLLM, 'vllm serve t --speculative-config "$SPEC"'),
    ],
)
def test_right_algorithm(tmp_path: Path, engine: str, line: str) -> None:
    make = sglang if engine.startswith("sglang") else vllm
    assert found(make(tmp_path, engine, launch=line), "ENG501") == []


def test_a_speculators_repository_served_as_the_model(tmp_path: Path) -> None:
    case = vllm(tmp_path, config=speculators_config(), launch="vllm serve ./checkpoint_best")
    assert found(case, "ENG501") == []


def test_an_eagle1_draft_is_no_eagle3(tmp_path: Path) -> None:
    t = tiny_tensors(drop=["layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"])
    t["fc.weight"] = t["fc.weight"][:, :128]
    for p in "qkv":
        t[f"layers.0.self_attn.{p}_proj.weight"] = t[f"layers.0.self_attn.{p}_proj.weight"][:, :64]
    config = tiny_config(aux=None, drop=["draft_vocab_size"], architectures=["LlamaForCausalLM"])
    for algorithm, hits in (("EAGLE3", 1), ("EAGLE", 0)):
        draft = write_draft(tmp_path / algorithm, t, config)
        line = f"sglang serve --model-path t --speculative-algorithm {algorithm} --speculative-draft-model-path d"
        findings = found(make_case(draft, engine=SGLANG, launch=line), "ENG501")
        assert len(findings) == hits


def test_the_engine_is_taken_from_the_line(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(layer="midlayer"), tiny_config(aux="nested"))
    line = "docker run lmsysorg/sglang:v0.5.9 python3 -m sglang.launch_server --model-path t --speculative-algorithm EAGLE"
    _, finding = one(make_case(draft, launch=line + " --speculative-draft-model-path d"), "ENG501")
    assert finding.engines == ("sglang 0.5.9",)


# ---- ENG502 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "change", "flags"),
    [
        (SGLANG, {"norm_before_residual": True}, ["norm_before_residual"]),
        (SGLANG, {"norm_before_residual": False}, []),
        (VLLM, {"norm_before_residual": True}, []),
        ("vllm==0.10.0", {"norm_before_residual": True, "architectures": ["Eagle3LlamaForCausalLM"]}, ["norm_before_residual"]),
        ("sglang==0.5.11", {"norm_output": True}, ["norm_output"]),
        (OLD_VLLM, {"norm_output": True}, ["norm_output"]),
        (VLLM, {"norm_output": True}, []),
        (SGLANG, {"norm_output": True}, []),
    ],
)
def test_flags(tmp_path: Path, engine: str, change: dict[str, Any], flags: list[str]) -> None:
    make = sglang if engine.startswith("sglang") else vllm
    findings = found(make(tmp_path, engine, **change), "ENG502")
    assert [f.where for f in findings] == flags
    assert all(f.severity.value == "warning" for f in findings)


def test_specforges_norm_output_means_something_else(tmp_path: Path) -> None:
    """There it is the final norm in front of the head; the state fed back is before it, whatever the flag says."""
    for engine, hits in ((OLD_SGLANG, 0), (SGLANG, 1)):
        config = tiny_config(aux="nested", norm_output=True, target_model_type="llama")
        draft = write_draft(tmp_path / engine[-4:], tiny_tensors(layer="midlayer"), config)
        findings = found(make_case(draft, engine=engine), "ENG502")
        assert [f.where for f in findings] == ["norm_output"] * hits
        assert all('"norm_output": false' in f.remedy for f in findings)


def test_a_norm_in_front_of_fc_that_is_not_read(tmp_path: Path) -> None:
    for engine, hits in (("sglang==0.5.12", 1), (SGLANG, 0)):
        draft = write_draft(tmp_path / engine[-3:], tiny_tensors(input_norm=True), tiny_config(aux="nested", norm_before_fc=True))
        findings = found(make_case(draft, engine=engine), "ENG502")
        assert [f.where for f in findings] == ["norm_before_fc"] * hits


def test_a_missing_flag_that_the_engine_fills_in(tmp_path: Path) -> None:
    severity, finding = one(residual(tmp_path / "a", stated=False), "ENG502")
    assert severity == "warning"
    assert '"norm_before_residual": false' in finding.remedy
    assert found(residual(tmp_path / "b", stated=True), "ENG502") == []


def test_no_aux_states_on_an_engine_that_ignores_it(tmp_path: Path) -> None:
    config = tiny_config(aux="nested")
    config["eagle_config"]["use_aux_hidden_state"] = False
    for engine, layer, hits in (("sglang==0.5.7", "midlayer", 1), (OLD_SGLANG, "midlayer", 0), ("vllm==0.11.2", "layers.0", 1)):
        draft = write_draft(tmp_path / engine[-3:], tiny_tensors(layer=layer, drop=["fc.weight"]), config)
        findings = found(make_case(draft, engine=engine), "ENG502")
        assert [f.where for f in findings] == ["use_aux_hidden_state"] * hits


# ---- ENG503, ENG504 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "severity"), [((4, 1, 24), "warning"), ((2, 2, 8), "error"), ((0, 1, 1), "error"), ((3, 1, 4), None), ((5, 4, 8), None)]
)
def test_chain(tmp_path: Path, numbers: tuple[int, int, int], severity: str | None) -> None:
    findings = found(sglang(tmp_path, algorithm="EAGLE3", chain=CHAIN.format(*numbers)), "ENG503")
    assert [f.severity.value for f in findings] == ([severity] if severity else [])


def test_launch_problems_keep_their_severity(tmp_path: Path) -> None:
    for i, (line, severity) in enumerate(
        (
            (START_VLLM.format('{"method": "eagle3", "model": "d"}'), "error"),
            (START_VLLM.format(GOOD).replace('"num', '"synthetic_acceptance_length": 3, "num'), "warning"),
            ("vllm serve t --speculative-config \"{'method': 'eagle3', 'model': 'd', 'num_speculative_tokens': 3}\"", "error"),
        )
    ):
        got, finding = one(vllm(tmp_path / str(i), launch=line), "ENG503")
        assert got == severity
        assert finding.remedy
    got, _ = one(
        vllm(tmp_path / "s", config=speculators_config(), launch=START_VLLM.format('{"method": "eagle3", "model": "d"}')), "ENG503"
    )
    assert got == "warning"  # its own config names a number


@pytest.mark.parametrize(
    ("engine", "config", "tensors", "stage"),
    [
        (SGLANG, speculators_config(), {}, "construct"),
        ("sglang==0.4.6", tiny_config(aux="nested"), {}, "load_weights"),
        (VLLM, tiny_config(), {"prefix": "module."}, "load_weights"),
        ("sglang==0.5.9", tiny_config(aux="nested", num_hidden_layers=2), {"layer": "midlayer"}, "construct"),
    ],
)
def test_refusals(tmp_path: Path, engine: str, config: dict[str, Any], tensors: dict[str, Any], stage: str) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(**tensors), config)
    findings = found(make_case(draft, engine=engine), "ENG504")
    assert findings[0].evidence["stage"] == stage
    assert findings[0].severity.value == "error"
    assert "refuses" in findings[0].title


# ---- ENG505 -----------------------------------------------------------------------------------------------------------------------


def test_a_replaced_embedding(tmp_path: Path) -> None:
    severity, finding = one(other_embedding(tmp_path / "own", trained_own=True), "ENG505")
    assert severity == "warning"
    assert finding.evidence["relative_distance"] > 0.5
    severity, finding = one(other_embedding(tmp_path / "shared", trained_own=False), "ENG505")
    assert severity == "info"
    assert finding.evidence["relative_distance"] == 0


@pytest.mark.parametrize(("flag", "severity"), [(True, "warning"), (False, "info"), (None, "info")])
def test_a_replaced_embedding_without_the_targets_values(tmp_path: Path, flag: bool | None, severity: str) -> None:
    change = {} if flag is None else {"embed_requires_grad": flag}
    draft = write_draft(tmp_path / "draft", tiny_tensors(embed=True), tiny_config(aux="nested", **change))
    case = make_case(draft, engine=SGLANG, target=tiny_target(tmp_path / "target"), headers_only=True)
    assert one(case, "ENG505")[0] == severity


def test_vllm_keeps_the_drafts_embedding(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(embed=True), tiny_config(embed_requires_grad=True))
    target = tiny_target(tmp_path / "target", weights=True)
    assert found(make_case(draft, engine=VLLM, target=target), "ENG505") == []
    assert one(make_case(draft, engine="vllm==0.10.2", target=target), "ENG505")[0] in ("info", "warning")


# ---- ENG506 to ENG508 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "extra", "own", "hits"),
    [
        (SGLANG, "--quantization fp8", False, 1),
        (SGLANG, "--quantization fp8 --speculative-draft-model-quantization unquant", False, 0),
        ("sglang==0.5.3", "--quantization fp8 --speculative-draft-model-quantization unquant", False, 1),
        (SGLANG, "--quantization fp8", True, 0),
        (SGLANG, "", False, 0),
    ],
)
def test_inherited_quantisation(tmp_path: Path, engine: str, extra: str, own: bool, hits: int) -> None:
    change: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}} if own else {}
    assert len(found(sglang(tmp_path, engine, algorithm="EAGLE3", chain=extra, **change), "ENG506")) == hits


def test_the_targets_quantisation_is_applied_by_one_version_of_vllm(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    assert found(vllm(tmp_path / "a", "vllm==0.11.0", target=quantised), "ENG506")
    assert found(vllm(tmp_path / "b", OLD_VLLM, target=quantised), "ENG506") == []


@pytest.mark.parametrize(
    ("section", "hits"),
    [
        ({"quant_method": "fp8"}, 0),
        ({"quant_method": "quarot"}, 1),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}, "R2": {}}}}, 1),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": {}}}}, 0),
        ({"quant_method": "awq", "algo": {"spinquant": True}}, 1),
        ({"quant_method": "awq", "algo": {"spinquant": False}}, 0),
        ({"quant_method": "fp_quant", "transform_init": "hadamard", "hadamard_group_size": 128}, 0),
    ],
)
def test_a_rotated_target(tmp_path: Path, section: dict[str, Any], hits: int) -> None:
    assert len(found(vllm(tmp_path, target={"quantization_config": section}), "ENG506")) == hits


def test_quirks_and_versions_are_only_worth_knowing(tmp_path: Path) -> None:
    assert one(sglang(tmp_path / "a", "sglang==0.5.11"), "ENG507")[0] == "info"
    assert found(sglang(tmp_path / "b", "sglang==0.5.12"), "ENG507") == []
    severity, finding = one(vllm(tmp_path / "c", "vllm==0.33.7"), "ENG508")
    assert severity == "info"
    assert "0.33.7" in finding.title
    assert "0.33.0" in finding.title


def test_rules_that_lack_their_evidence_say_so(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    skipped = {o.code: o.why for o in run(make_case(draft), ["AUX", "ENG"]).skipped}
    assert set(skipped) == {f"AUX{n}" for n in (401, 402, 404, 405, 406, 407)} | {f"ENG{n}" for n in range(501, 509)}
    assert all("pass --" in why for why in skipped.values())
