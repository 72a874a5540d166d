"""Dialects: table (a) with evidence and confidence; names: table (b)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.dialects import recognise, speculators_version
from eagle3diag.checkpoint.model import Checkpoint, ConfigFile, Dialect, TensorInfo
from eagle3diag.checkpoint.names import canonical_name, canonical_names, is_fused, layer_numbers, spelling, split_wrapper
from eagle3diag.checkpoint.open import open_checkpoint
from tests.dialects import WRITERS, specforge
from tests.factory import Tensors, speculators_config, tiny_config, tiny_tensors, write_draft

EXPECTED = {  # dialect, confidence, algorithm
    "specforge": ("specforge", "high", "eagle3"),
    "specforge-sglang": ("specforge", "high", "eagle3"),
    "specforge-training": ("specforge-training", "high", "eagle3"),
    "safeailab": ("safeailab", "high", "eagle3"),
    "modelopt": ("modelopt", "high", "eagle3"),
    "modelopt-megatron": ("modelopt-megatron", "high", "eagle3"),
    "modelopt-megatron-deep": ("modelopt-megatron-deep", "high", "eagle3"),
    "angelslim": ("angelslim", "high", "eagle3"),
    "speculators-0.4": ("speculators", "high", "eagle3"),
    "speculators-0.6": ("speculators", "high", "eagle3"),
    "speculators-0.9": ("speculators", "high", "eagle3"),
    "speculators-0.9-qwen3": ("speculators", "high", "eagle3"),
    "flat-export": ("flat-export", "medium", "eagle3"),
    "flat-export-nested": ("flat-export", "medium", "eagle3"),
    "vllm": ("flat-export", "medium", "eagle3"),
    "mla": ("mla-eagle3", "high", "eagle3"),
    "peagle": ("speculators", "high", "peagle"),
    "eagle1": ("eagle1", "high", "eagle1"),
    "hass": ("hass", "high", "hass"),
    "dflash": ("dflash", "high", "dflash"),
    "mtp": ("speculators", "high", "mtp"),
    "engine-dump": ("engine-dump", "high", "eagle3"),
}


def opened(tensors: Tensors | None, config: dict[str, Any] | None, form: str = "safetensors", **others: dict[str, Any]) -> Checkpoint:
    """A checkpoint of headers only, without files."""
    infos = {k: TensorInfo(k, "BF16", tuple(v.shape), 2 * v.numel(), "f", 0) for k, v in (tensors or {}).items()}
    configs = () if config is None else (ConfigFile("config.json", "flat", config),)
    return Checkpoint(
        path="x", files=("f",), tensors=infos, configs=configs + tuple(ConfigFile(n, "flat", c) for n, c in others.items()), form=form
    )


def test_every_writer_has_an_expectation() -> None:
    assert EXPECTED.keys() == WRITERS.keys()


@pytest.mark.parametrize("name", WRITERS)
def test_each_framework_is_recognised(tmp_path: Path, name: str) -> None:
    dialect, algorithm = recognise(open_checkpoint(WRITERS[name](tmp_path / "draft")))
    assert (dialect.name, dialect.confidence, algorithm) == EXPECTED[name]
    assert dialect.evidence
    assert all(e and e.isprintable() for e in dialect.evidence)


@pytest.mark.parametrize(
    ("tensors", "form", "name"),
    [
        (tiny_tensors(layer="midlayer"), "safetensors", "specforge"),
        (tiny_tensors(layer="midlayer"), "torch", "safeailab"),
        (tiny_tensors(), "safetensors", "flat-export"),
        (tiny_tensors(t2d=False), "safetensors", "modelopt"),
        ({}, "safetensors", "unknown"),
    ],
)
def test_without_a_config_the_guess_says_that_it_is_one(tensors: Tensors, form: str, name: str) -> None:
    dialect, _ = recognise(opened(tensors, None, form))
    assert (dialect.name, dialect.confidence) == (name, "low")
    assert any("no config" in e for e in dialect.evidence)


def test_tensor_identical_frameworks_are_named_not_guessed_silently() -> None:
    dialect, _ = recognise(opened(tiny_tensors(layer="midlayer"), None))
    assert any("AngelSlim" in e and "SafeAILab" in e for e in dialect.evidence)
    plain, _ = recognise(opened(tiny_tensors(layer="midlayer"), tiny_config(aux="nested")))
    assert (plain.name, plain.confidence) == ("specforge", "medium")


def test_a_speculators_config_beside_a_flat_one_raises_confidence() -> None:
    dialect, _ = recognise(opened(tiny_tensors(), tiny_config(), config_speculators=speculators_config()))
    assert (dialect.name, dialect.confidence) == ("flat-export", "high")


def test_tensors_overrule_the_config_on_the_algorithm() -> None:
    gone = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
    t = tiny_tensors(n_aux=2, mapping=False, drop=gone)
    for p in "qkv":
        t[f"layers.0.self_attn.{p}_proj.weight"] = t[f"layers.0.self_attn.{p}_proj.weight"][:, :64]
    dialect, algorithm = recognise(opened(t, tiny_config()))
    assert algorithm == "eagle1"
    assert any("config" in e or "says eagle3" in e for e in dialect.evidence)


def test_two_aux_states_are_not_eagle1() -> None:
    t = tiny_tensors(n_aux=2, drop=("layers.0.hidden_norm.weight",))
    assert recognise(opened(t, tiny_config()))[1] == "eagle3"


def test_a_missing_layer_or_fc_is_still_eagle3() -> None:
    assert recognise(opened(tiny_tensors(drop=("fc.weight",)), tiny_config()))[1] == "eagle3"
    only = {k: v for k, v in tiny_tensors(mapping=False).items() if not k.startswith("layers.")}
    assert recognise(opened(only, {"architectures": ["X"]}))[1] == "eagle3"


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({"architectures": ["PEagleDraftModel"]}, "peagle"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle1"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "mtp"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"speculators_model_type": "eagle"}, "eagle1"),
        ({"speculators_config": {"algorithm": "peagle"}}, "peagle"),
        ({"speculators_model_type": 3}, "unknown"),
        ({"architectures": ["LlamaForCausalLM"]}, "unknown"),
    ],
)
def test_algorithm_from_the_config_alone(config: dict[str, Any], algorithm: str) -> None:
    assert recognise(opened(None, config))[1] == algorithm


@pytest.mark.parametrize(
    ("prefix", "extra", "algorithm"),
    [
        ("", {"mask_hidden": (1, 1, 192)}, "peagle"),
        ("", {"mtp.layers.0.self_attn.q_proj.weight": (64, 64), "mtp.fc.weight": (64, 128)}, "mtp"),
        ("", {"eh_proj.weight": (64, 128), "enorm.weight": (64,)}, "mtp"),
        ("model.", {"mask_hidden": (1, 1, 192)}, "peagle"),
    ],
)
def test_algorithm_from_tensors_alone(prefix: str, extra: dict[str, tuple[int, ...]], algorithm: str) -> None:
    infos = {prefix + k: TensorInfo(prefix + k, "BF16", s, 2, "f", 0) for k, s in extra.items()}
    if algorithm == "peagle":
        infos |= {prefix + k: TensorInfo(prefix + k, "BF16", tuple(v.shape), 2, "f", 0) for k, v in tiny_tensors().items()}
    assert recognise(Checkpoint(path="x", files=(), tensors=infos, configs=()))[1] == algorithm


def test_old_speculators_are_told_by_leaked_class_variables() -> None:
    assert speculators_version({"speculators_version": "0.6.0"}) == (0, 6)
    assert speculators_version({"has_no_defaults_at_init": False}) == (0, 4)
    assert speculators_version({"speculators_version": ["0.6"]}) is None
    assert speculators_version({"speculators_version": "0.5.0.dev12+g1"}) == (0, 5)


def test_evidence_is_escaped() -> None:
    dialect, _ = recognise(opened(tiny_tensors(), {"architectures": ["\x1b[31mEvil\u202e"]}))
    assert all(e.isprintable() for e in dialect.evidence)
    assert isinstance(dialect, Dialect)


def test_midlayer_after_training_state_is_specforge(tmp_path: Path) -> None:
    folder = specforge(tmp_path / "d")
    (folder / "training_state.pt").write_bytes(b"")
    assert "training_state.pt" in open_checkpoint(folder).extras
    assert recognise(open_checkpoint(folder))[0].confidence == "high"


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("midlayer.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("midlayer.1.hidden_norm.weight", "layers.1.input_layernorm.weight"),
        ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.qkv_proj.weight"),
        ("draft_model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("module.eagle_module.fc.weight", "fc.weight"),
        ("aux_norm_mid.weight", "fc_norm.1.weight"),
        ("model.draft_id_to_target_id", "d2t"),
        ("draft_id_to_target_id", "d2t"),
        ("fusion_fc.weight", "fc.weight"),
        ("transformer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp_layers.0.mlp.up_proj.weight"),
        ("mtp.pre_fc_norm_hidden.weight", "mtp_layers.0.hidden_layernorm.weight"),
        ("model", "model"),
        ("", ""),
        ("midlayer.", "layers.0."),
    ],
)
def test_canonical_names(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical


def test_an_unknown_wrapper_shared_by_all_is_stripped() -> None:
    names = [f"my_net.inner.{n}" for n in tiny_tensors(layer="midlayer")]
    assert set(canonical_names(names)) == set(tiny_tensors())
    assert set(canonical_names(["encoder.block.weight", "fc.weight"])) == {"encoder.block.weight", "fc.weight"}


def test_the_bare_name_wins_over_a_wrapped_twin() -> None:
    assert canonical_names(["model.fc.weight", "fc.weight"]) == {"fc.weight": "fc.weight"}
    assert canonical_names(["fc.weight", "model.fc.weight"]) == {"fc.weight": "fc.weight"}


def test_spelling_of_the_first_layer() -> None:
    assert spelling(tiny_tensors()) == "layers.0"
    assert spelling(tiny_tensors(layer="midlayer")) == "midlayer"
    assert spelling(tiny_tensors(layer="midlayer", layers=2)) == "midlayer"
    assert spelling(tiny_tensors(layer="midlayer.0", layers=2)) == "midlayer.0"
    assert spelling([*tiny_tensors(), "midlayer.hidden_norm.weight"]) == "mixed"
    assert spelling(["layers.1.mlp.up_proj.weight"]) == ""
    assert spelling([]) == ""


def test_small_readers() -> None:
    assert split_wrapper("module.model.fc.weight") == ("module.model.", "fc.weight")
    assert layer_numbers(["layers.10.a", "layers.2.a", "layers.x.a", "layers.9999999.a", "fc"]) == (2, 10)
    assert is_fused("layers.0.self_attn.qkv_proj.weight")
    assert not is_fused("layers.0.self_attn.q_proj.weight")


def test_a_config_only_folder_is_recognised(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "d", None, speculators_config())
    assert recognise(open_checkpoint(folder))[0].name == "speculators"
