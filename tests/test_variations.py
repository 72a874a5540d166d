"""Variations of the acceptance cases that once came out wrong: each stands for a kind, judged in process on tiny drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.rules.case import check
from eagle3diag.rules.model import Report
from tests.factory import Tensors, speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft

SGLANG, OLD_SGLANG, VLLM = "sglang==0.5.23", "sglang==0.5.9", "vllm==0.33.0"


def judged(
    path: Path,
    engine: str | None,
    *,
    tensors: Tensors | None = None,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Any]], object] | None = None,
    **files: Any,
) -> Report:
    """Every rule over a tiny draft in the layout the engine wants, with the tiny target's config."""
    sglang = engine is not None and engine.startswith("sglang")
    config = config or tiny_config(aux="nested" if sglang else "top")
    if change:
        change(config)
    tensors = tensors or tiny_tensors(layer="midlayer" if engine == OLD_SGLANG else "layers.0")
    report = check(write_draft(path / "draft", tensors, config, **files), engine=engine, target=tiny_target(path / "target"))
    assert not [o.why for o in report.outcomes if o.status == "crashed"]
    return report


def found(report: Report, code: str) -> list[tuple[str, str]]:
    """``(severity, where)`` of the findings of a rule."""
    return [(f.severity.value, f.where) for f in report.findings if f.code == code]


@pytest.mark.parametrize("engine", [None, SGLANG, VLLM])
@pytest.mark.parametrize("value", ["64", 64.0, [64], True, 1.5])
def test_a_draft_vocabulary_that_is_no_whole_number_stops_every_engine(tmp_path: Path, engine: str | None, value: Any) -> None:
    report = judged(tmp_path, engine, change=lambda c: c.update(draft_vocab_size=value))
    assert found(report, "CFG111") == [("error", "config.json: draft_vocab_size")]


def test_sizes_written_as_fractions(tmp_path: Path) -> None:
    report = judged(tmp_path, VLLM, change=lambda c: c.update(hidden_size=64.0, max_position_embeddings=4096.0))
    assert found(report, "CFG111") == [("error", "config.json: hidden_size"), ("warning", "config.json: max_position_embeddings")]


@pytest.mark.parametrize(("engine", "severity"), [(None, "warning"), (VLLM, "info"), ("sglang==0.5.12", "warning"), (SGLANG, "info")])
def test_a_null_eagle_config_counts_where_it_is_read(tmp_path: Path, engine: str | None, severity: str) -> None:
    report = judged(tmp_path, engine, config=tiny_config(eagle_config=None))
    assert found(report, "CFG111") == [(severity, "config.json: eagle_config")]


@pytest.mark.parametrize("engine", ["sglang==0.5.12", SGLANG])
def test_a_deeper_layer_renamed_for_sglang_is_read_as_trained(tmp_path: Path, engine: str) -> None:
    tensors = tiny_tensors(layers=2)
    as_trained = judged(tmp_path / "a", engine, tensors=tensors, change=lambda c: c.update(num_hidden_layers=2))
    assert found(as_trained, "ENG502") == [("warning", "next_layer_regular")]
    tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")
    assert judged(tmp_path / "b", engine, tensors=tensors, change=lambda c: c.update(num_hidden_layers=2)).verdict == "healthy"


def test_layers_that_are_not_built_have_no_norm_to_be_wrong(tmp_path: Path) -> None:
    report = judged(tmp_path, SGLANG, tensors=tiny_tensors(layers=2))
    assert found(report, "ENG502") == []
    assert found(report, "KEY207")


@pytest.mark.parametrize("engine", [OLD_SGLANG, SGLANG, VLLM])
def test_rotary_tables_are_no_loss(tmp_path: Path, engine: str) -> None:
    layer = "midlayer" if engine == OLD_SGLANG else "layers.0"
    tensors = tiny_tensors(layer=layer)
    tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    assert judged(tmp_path, engine, tensors=tensors).verdict == "healthy"


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flag_only_the_second_config_sets_is_a_disagreement(tmp_path: Path, flag: str) -> None:
    on: dict[str, Any] = {flag: True}
    report = judged(tmp_path / "a", None, config_speculators=speculators_config(**on))
    assert [s for s, _ in found(report, "CFG103")] == ["warning"]
    assert flag in next(f.title for f in report.findings if f.code == "CFG103")
    same = judged(tmp_path / "b", None, config=tiny_config(**on), config_speculators=speculators_config(**on))
    assert [s for s, _ in found(same, "CFG103")] == ["info"]  # agreed; it only says who reads which
    off: dict[str, Any] = {flag: False}
    unset = judged(tmp_path / "c", None, config_speculators=speculators_config(**off))
    assert [s for s, _ in found(unset, "CFG103")] == ["info"]


def test_other_facts_only_the_second_config_states(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"target_hidden_size": 128}, {"model_type": "qwen3"}]
    for i, change in enumerate(changes):
        report = judged(tmp_path / str(i), None, config_speculators=speculators_config(**change))
        assert ("warning", "config_speculators.json") in found(report, "CFG103")
    assert judged(tmp_path / "same", None, config_speculators=speculators_config(target_hidden_size=64)).verdict == "healthy"


@pytest.mark.parametrize("engine", ["sglang==0.5.8", "vllm==0.17.0"])
def test_norm_output_of_two_meanings_is_not_passed_over_where_names_do_not_tell_the_trainer(tmp_path: Path, engine: str) -> None:
    """`midlayer.*` with t2d may be SpecForge's; without its other marks the flag may as well mean the state fed back."""
    aux = "nested" if engine.startswith("sglang") else "top"
    variants: list[tuple[str, dict[str, Any], int]] = [("doubt", {}, 1), ("sure", {"target_model_type": "llama"}, 0)]
    for name, extra, expected in variants:
        config = tiny_config(aux=aux, norm_output=True, **extra)
        report = judged(tmp_path / name, engine, tensors=tiny_tensors(layer="midlayer"), config=config)
        assert found(report, "ENG502") == [("warning", "norm_output")] * expected


def test_many_tensors_of_zeros_are_summed_up(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {f"layers.{i}.mlp.up_proj.weight": torch.zeros(128, 64) for i in range(1, 60)}
    findings = [f for f in judged(tmp_path, VLLM, tensors=tensors).findings if f.code == "VAL302"]
    assert len(findings) == 13
    assert "47 more tensors" in findings[-1].title or "47 more tensors" in findings[0].title
