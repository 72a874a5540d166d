"""Drafts as TensorRT-LLM and llama.cpp would run them: contracts without a version, used like any other."""

from __future__ import annotations

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.target import open_target
from eagle3diag.engines.serve import serve
from eagle3diag.rules.case import check
from tests.factory import dialect_draft, tiny_config, tiny_target, tiny_tensors, write_draft

ENGINES = ("tensorrt-llm", "llama.cpp")


def run(tmp_path, engine, tensors=None, **config):
    draft = write_draft(tmp_path / "draft", tensors or tiny_tensors(), {**tiny_config(), **config})
    return serve(open_checkpoint(draft), engine, target=open_target(tiny_target(tmp_path / "target")))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dialect", ["specforge", "safeailab", "modelopt", "modelopt-megatron", "flat-export"])
def test_a_healthy_draft_stays_free_of_errors(tmp_path, engine, dialect):
    draft = dialect_draft(tmp_path / "draft", dialect)
    report = check(draft, target=tiny_target(tmp_path / "target"), engine=engine)
    assert [f.title for f in report.findings if f.severity.name == "ERROR"] == []
    told = next(f for f in report.findings if f.code == "ENG508")
    assert "no release" in told.title


def renamed(prefix: str):
    return {(prefix + n.removeprefix("midlayer.") if n.startswith("midlayer.") else n): t for n, t in tiny_tensors().items()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_both_spellings_of_the_layer_load(tmp_path, engine, prefix):
    served = run(tmp_path, engine, renamed(prefix))
    assert served.refused is None
    assert served.dropped() == ()


def test_ids_in_the_checkpoint_reach_neither(tmp_path):
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    for engine in ENGINES:
        aux = run(tmp_path / engine, engine, **config).aux
        assert aux.ids is None
        assert len(aux.unread) == 2


def test_unknown_names_are_passed_over_by_one_and_refused_by_the_other(tmp_path):
    tensors = {**tiny_tensors(), "extra.weight": tiny_tensors()["norm.weight"]}
    quiet = run(tmp_path / "a", "tensorrt-llm", tensors)
    assert quiet.refused is None
    assert quiet.dropped() == ("extra.weight",)
    loud = run(tmp_path / "b", "llama.cpp", tensors)
    assert loud.refused is not None
    assert "Can not map tensor 'extra.weight'" in loud.refused.message


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lost", ["fc.weight", "norm.weight", "d2t"])
def test_a_missing_tensor_is_refused(tmp_path, engine, lost):
    served = run(tmp_path, engine, {n: t for n, t in tiny_tensors().items() if n != lost})
    assert served.refused is not None
    assert served.refused.stage == "load_weights"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_head_is_the_targets(tmp_path, engine):
    served = run(tmp_path, engine, {n: t for n, t in tiny_tensors().items() if n != "lm_head.weight"})
    assert served.refused is None
    assert served.never_filled["lm_head.weight"] == "target"


def test_norm_before_residual_is_honoured_by_one(tmp_path):
    for engine, honoured in (("tensorrt-llm", False), ("llama.cpp", True)):
        assert run(tmp_path / engine, engine, norm_before_residual=True).wiring.norm_before_residual is honoured


def test_several_layers_are_refused_by_llama_cpp_alone(tmp_path):
    assert run(tmp_path / "a", "llama.cpp", num_hidden_layers=2).refused is not None
    served = run(tmp_path / "b", "tensorrt-llm", num_hidden_layers=2)
    assert served.refused is not None
    assert "layers." in served.refused.message  # it builds two and finds one, which has no number
