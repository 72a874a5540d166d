"""The config rules beyond one firing and one quiet case: neighbours, thresholds, and who speaks about a fault."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.rules.model import Case, Finding
from eagle3diag.rules.registry import load_all, run
from tests.factory import AUX_HF, dialect_draft, speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_cfg_key import NEW, OLD, VLLM, case, sglang

load_all()


def found(of: Case, select: Iterable[str] = ("CFG", "KEY")) -> list[Finding]:
    report = run(of, select)
    assert [o for o in report.outcomes if o.status == "crashed"] == []
    return list(report.findings)


def serious(of: Case, select: Iterable[str] = ("CFG", "KEY")) -> set[str]:
    return {f.code for f in found(of, select) if f.severity.value != "info"}


def one(of: Case, code: str) -> Finding:
    (finding,) = found(of, [code])
    return finding


SUITING = {
    "specforge": "sglang==0.5.9",
    "specforge-sglang": "sglang==0.5.9",
    "modelopt": "sglang==0.5.23",
    "modelopt-megatron": "sglang==0.5.9",
    "flat-export": "vllm==0.33.0",
    "flat-export-nested": "sglang==0.5.23",
    "speculators-0.6": "vllm==0.33.0",
    "speculators-0.9": "vllm==0.33.0",
    "speculators-0.9-qwen3": "vllm==0.33.0",
    "angelslim": "vllm==0.33.0",
    "safeailab": "vllm==0.16.0",
    "vllm": "vllm==0.16.0",
    "mla": "sglang==0.5.23",
}


@pytest.mark.parametrize("dialect", SUITING)
@pytest.mark.parametrize("engine", [True, False])
def test_a_healthy_draft_of_each_dialect_is_clean(dialect: str, engine: bool, tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    draft = dialect_draft(tmp_path / "draft", dialect)
    of = make_case(draft, engine=SUITING[dialect] if engine else None, target=tiny_target(tmp_path / "target"), headers_only=True)
    assert [(f.code, f.title) for f in found(of) if f.severity.value != "info"] == []


# ------------------------------------------------------------------ CFG101
@pytest.mark.parametrize("text", ["", "[]", "null", '{"a": 1', "\ufeff{}", '{"a": NaN}'])
def test_unreadable_config_is_an_error(text: str, tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    folder = write_draft(tmp_path / "draft", tiny_tensors(), None)
    (folder / "config.json").write_text(text, encoding="utf-8")
    got = one(make_case(folder), "CFG101")
    assert got.severity.value == "error"
    assert "config.json" in got.title
    assert serious(make_case(folder)) == {"CFG101"}  # what follows from it is not repeated


def test_absent_config_is_an_error(tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    assert one(make_case(write_draft(tmp_path / "draft", tiny_tensors(), None)), "CFG101").severity.value == "error"


def test_unreadable_second_config_is_a_warning(tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    folder = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    (folder / "config_speculators.json").write_text("{", encoding="utf-8")
    got = one(make_case(folder), "CFG101")
    assert (got.severity.value, got.where) == ("warning", "config_speculators.json")


# ------------------------------------------------------------------ CFG103
def test_configs_are_compared_by_meaning(tmp_path: Path) -> None:
    agree = case(tmp_path / "a", config=sglang(), config_speculators=speculators_config(), engine=NEW, target={})
    assert serious(agree) == set()
    same_numbers = case(tmp_path / "b", config=sglang(ids=AUX_HF), config_speculators=speculators_config(), engine=NEW, target={})
    assert "CFG103" in serious(same_numbers)


def test_configs_disagree_on_another_fact(tmp_path: Path) -> None:
    got = one(case(tmp_path, config=tiny_config(rope_theta=5e5), config_speculators=speculators_config()), "CFG103")
    assert "rope_theta" in got.title
    assert got.evidence["rope_theta"] == {"config.json": 5e5, "config_speculators.json": 1e5}
    assert got.evidence["config.json is"]["vllm"] == "reads"


def test_config_in_a_schema_the_engine_cannot_read(tmp_path: Path) -> None:
    both = {"config": speculators_config(), "config_flat": sglang()}
    assert one(case(tmp_path / "a", engine=NEW, **both), "CFG103").severity.value == "warning"
    assert serious(case(tmp_path / "b", engine=VLLM, **both), ["CFG103"]) == set()


# ------------------------------------------------------------------ CFG104
@pytest.mark.parametrize(
    ("architectures", "engine", "fires"),
    [
        (["Qwen3ForCausalLM"], NEW, True),
        (["Eagle3LlamaForCausalLM"], NEW, True),
        (["Eagle3LlamaForCausalLM"], VLLM, False),
        (["LlamaForCausalLM"], NEW, True),
        (["LlamaForCausalLM"], VLLM, False),  # renamed
        (["LlamaForCausalLMEagle3"], "vllm==0.9.0", True),  # prefixed once too often there
        (["LlamaForCausalLMEagle3"], "vllm==0.10.2", False),
        ([], NEW, True),
        (None, VLLM, True),
    ],
)
def test_architectures(architectures: Any, engine: str, fires: bool, tmp_path: Path) -> None:
    of = case(tmp_path, config=sglang(architectures=architectures), engine=engine)
    assert ("CFG104" in serious(of)) == fires


def test_nested_config_for_sglang_says_convert(tmp_path: Path) -> None:
    got = one(case(tmp_path, config=speculators_config(), engine=NEW), "CFG104")
    assert "speculators config" in got.title
    assert "convert" in got.remedy


# ------------------------------------------------------------------ CFG105, CFG106
@pytest.mark.parametrize("value", [-1, 0, 32, 300, None])
@pytest.mark.parametrize("engine", [NEW, VLLM, None])
def test_draft_vocab_size_wrong(value: Any, engine: str | None, tmp_path: Path) -> None:
    got = one(case(tmp_path, config=sglang(draft_vocab_size=value), engine=engine), "CFG105")
    assert got.severity.value == "error"
    assert "64" in got.title + got.remedy


def test_draft_vocab_size_may_be_absent_over_the_whole_vocabulary(tmp_path: Path) -> None:
    t, c = tiny_tensors(draft_vocab=256), tiny_config(drop=["draft_vocab_size"])
    assert serious(case(tmp_path / "v", t, c, engine=VLLM), ["CFG105"]) == set()
    assert one(case(tmp_path / "s", t, c, engine=NEW), "CFG105").severity.value == "error"  # SGLang stops on it
    assert one(case(tmp_path / "n", t, c), "CFG105").severity.value == "warning"


def test_tied_head_is_an_error_only_where_the_flag_is_read(tmp_path: Path) -> None:
    c = sglang(tie_word_embeddings=True)
    assert one(case(tmp_path / "s", config=c, engine=NEW), "CFG106").severity.value == "error"
    assert one(case(tmp_path / "v", config=c, engine=VLLM), "CFG106").severity.value == "warning"
    assert one(case(tmp_path / "n", config=c), "CFG106").severity.value == "error"
    # the dropped head is this one fault, not a tensor nobody reads as well
    assert serious(case(tmp_path / "k", config=c, engine=NEW)) == {"CFG106"}


# ------------------------------------------------------------------ CFG107
@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 8}, {"num_key_value_heads": 4}, {"head_dim": 32}, {"num_attention_heads": 2, "head_dim": None}]
)
def test_head_counts(change: dict[str, Any], tmp_path: Path) -> None:
    of = case(tmp_path, config=tiny_config(**change))
    assert serious(of) == {"CFG107"}
    assert "heads" in one(of, "CFG107").title


def test_mla_heads(tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    draft = dialect_draft(tmp_path / "draft", "mla")
    assert serious(make_case(draft), ["CFG107", "KEY"]) == set()
    import json

    config = json.loads((draft / "config.json").read_text())
    config["num_attention_heads"] *= 2
    (draft / "config.json").write_text(json.dumps(config))
    assert serious(make_case(draft), ["CFG107", "KEY"]) == {"CFG107"}


# ------------------------------------------------------------------ CFG108
LINE = "sglang serve --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d --context-length {}"


def test_short_context(tmp_path: Path) -> None:
    c = sglang(max_position_embeddings=2048)
    got = one(case(tmp_path / "t", config=c, target={}), "CFG108")
    assert (got.severity.value, "2,048" in got.title, "4,096" in got.title) == ("warning", True, True)
    assert "served context" in one(case(tmp_path / "l", config=c, launch=LINE.format(8192)), "CFG108").title
    # the served context decides, even where the target could do more
    assert found(case(tmp_path / "s", config=c, target={}, launch=LINE.format(2048)), ["CFG108"]) == []


# ------------------------------------------------------------------ CFG109
NESTED_ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "drop": ["rope_theta"]}


@pytest.mark.parametrize(
    ("engine", "fires"), [(OLD, True), ("sglang==0.5.10", False), ("vllm==0.11.2", True), (VLLM, False), (None, False)]
)
def test_rope_schema(engine: str | None, fires: bool, tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(layer="midlayer"), sglang(**NESTED_ROPE), engine=engine)
    assert ("CFG109" in serious(of)) == fires
    if fires:
        assert "10000" in one(of, "CFG109").title


def test_rope_difference_from_the_target_is_information(tmp_path: Path) -> None:
    got = one(case(tmp_path / "d", config=tiny_config(rope_theta=1e4), target={}), "CFG109")
    assert (got.severity.value, "100000" in got.title) == ("info", True)
    got = one(case(tmp_path / "m", config=tiny_config(drop=["rope_theta"]), target={}), "CFG109")
    assert (got.severity.value, "10000" in got.title) == ("info", True)


def test_scaling_the_engine_does_not_read(tmp_path: Path) -> None:
    params = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e5}
    of = case(tmp_path, tiny_tensors(layer="midlayer"), sglang(rope_parameters=params), engine=OLD)
    assert "rope_scaling" in one(of, "CFG109").title


# ------------------------------------------------------------------ CFG110
@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm", "use_aux_norm"])
def test_norm_flag_without_tensors(flag: str, tmp_path: Path) -> None:
    of = case(tmp_path, config=tiny_config(**{flag: True}), engine=NEW)
    assert {"CFG110", "KEY201"} <= serious(of)  # the flag is contradicted, and the tensor is missing
    assert one(of, "CFG110").severity.value == "warning"


@pytest.mark.parametrize(("tensor", "flag"), [("input_norm", "norm_before_fc"), ("fc_norm", "fc_norm")])
@pytest.mark.parametrize("engine", [NEW, None])
def test_norm_tensors_without_flag(tensor: str, flag: str, engine: str | None, tmp_path: Path) -> None:
    of = case(tmp_path / "a", tiny_tensors(**{tensor: True}), sglang(), engine=engine)
    assert serious(of, ["CFG", "KEY", "ENG"]) == {"CFG110"}  # and not a tensor nobody reads, or a flag ignored, as well
    with_flag = case(tmp_path / "b", tiny_tensors(**{tensor: True}), sglang(**{flag: True}), engine=engine)
    assert serious(with_flag) == set()


def test_norm_flag_under_eagle_config(tmp_path: Path) -> None:
    c = sglang()
    c["eagle_config"]["norm_before_fc"] = True
    assert serious(case(tmp_path, tiny_tensors(input_norm=True), c, engine=NEW)) == set()


def test_both_norm_flags(tmp_path: Path) -> None:
    of = case(tmp_path, tiny_tensors(input_norm=True, fc_norm=True), tiny_config(norm_before_fc=True, fc_norm=True))
    assert "both set" in one(of, "CFG110").title


# ------------------------------------------------------------------ CFG111
@pytest.mark.parametrize(
    ("key", "value", "severity"),
    [
        ("target_hidden_size", None, "warning"),
        ("eagle_config", None, "warning"),
        ("use_cache", None, "warning"),
        ("rms_norm_eps", "1e-5", "warning"),
        ("draft_vocab_size", "64", "error"),
        ("tie_word_embeddings", "no", "warning"),
        ("num_attention_heads", "4", "error"),
        ("hidden_size", None, "error"),
        ("vocab_size", [256], "error"),
    ],
)
def test_wrong_types(key: str, value: Any, severity: str, tmp_path: Path) -> None:
    got = one(case(tmp_path, config=tiny_config(**{key: value})), "CFG111")
    assert (got.severity.value, key in got.title) == (severity, True)


@pytest.mark.parametrize("key", ["bos_token_id", "rope_scaling", "sliding_window", "head_dim", "quantization_config"])
def test_null_where_readers_have_a_default(key: str, tmp_path: Path) -> None:
    assert found(case(tmp_path, config=tiny_config(**{key: None})), ["CFG111"]) == []


# ------------------------------------------------------------------ CFG112
@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 20}, "error"),
        ({"vocab_size": 512}, "error"),
        ({"num_hidden_layers": 20}, "warning"),
    ],
)
def test_another_target(change: dict[str, Any], severity: str, tmp_path: Path) -> None:
    assert one(case(tmp_path, target=change), "CFG112").severity.value == severity


def test_ids_that_are_no_formula_say_nothing_about_the_depth(tmp_path: Path) -> None:
    assert found(case(tmp_path, config=tiny_config(ids=[2, 4, 9]), target={"num_hidden_layers": 20}), ["CFG112"]) == []


def test_wider_target_states_are_no_other_target(tmp_path: Path) -> None:
    t, c = tiny_tensors(target_hidden=96), tiny_config(target_hidden_size=96)
    assert found(case(tmp_path, t, c, target={"hidden_size": 96, "num_attention_heads": 6}), ["CFG112", "KEY205"]) == []


def test_recorded_verifier(tmp_path: Path) -> None:
    other = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert "architecture" in one(case(tmp_path / "a", config=speculators_config(), target=other), "CFG112").title
    c = speculators_config()
    c["speculators_config"]["verifier"]["architectures"] = ["Eagle3DraftModel"]  # early versions wrote the draft's own
    assert found(case(tmp_path / "b", config=c, target=other), ["CFG112"]) == []


# ------------------------------------------------------------------ CFG113
@pytest.mark.parametrize("dialect", ["eagle1", "hass", "peagle", "dflash", "mtp"])
def test_other_algorithms(dialect: str, tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    draft = dialect_draft(tmp_path / "draft", dialect)
    assert one(make_case(draft, engine=NEW), "CFG113").severity.value == "error"
    alone = make_case(draft)
    assert one(alone, "CFG113").severity.value == "info"
    assert serious(alone) == set()  # nothing is held against it that only an EAGLE-3 draft needs


# ------------------------------------------------------------------ CFG114
def test_mrope_belongs_to_a_multimodal_target(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    assert one(case(tmp_path / "a", config=tiny_config(rope_scaling=rope)), "CFG114").severity.value == "warning"
    assert found(case(tmp_path / "b", config=tiny_config(rope_scaling=rope, target_model_type="qwen2_5_vl")), ["CFG114"]) == []


@pytest.mark.parametrize(("engine", "fires"), [(NEW, True), (VLLM, False), (None, False)])
def test_sliding_window(engine: str | None, fires: bool, tmp_path: Path) -> None:
    c = sglang(sliding_window=16, layer_types=["sliding_attention"])
    assert ("CFG114" in serious(case(tmp_path, config=c, engine=engine))) == fires


# ------------------------------------------------------------------ CFG115
def test_no_ids_is_information_unless_the_trainer_took_others(tmp_path: Path) -> None:
    from eagle3diag.rules.case import make_case

    of = case(tmp_path / "a", config=tiny_config(aux=None), engine=VLLM, target={})
    got = one(of, "CFG115")
    assert (got.severity.value, "[2, 6, 9]" in got.title) == ("info", True)
    early = dialect_draft(tmp_path / "early", "speculators-0.4")
    got = one(make_case(early, engine=VLLM, target=tiny_target(tmp_path / "t")), "CFG115")
    assert (got.severity.value, "[3, 7, 10]" in got.title) == ("warning", True)


def test_a_draft_without_aux_states_needs_no_ids(tmp_path: Path) -> None:
    c = tiny_config(aux=None, eagle_config={"use_aux_hidden_state": False})
    t = tiny_tensors(drop=["fc.weight", "layers.0.hidden_norm.weight"])
    assert serious(case(tmp_path, t, c)) == set()
