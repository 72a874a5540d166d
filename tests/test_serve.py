"""Serving virtually where no recorded run exists: other classes, versions, flags, RoPE, launch lines."""

from __future__ import annotations

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.target import open_target
from eagle3diag.engines.launch import parse_launch
from eagle3diag.engines.serve import serve
from tests.factory import AUX_HF, dialect_draft, tiny_config, tiny_target, tiny_tensors, write_draft


def midlayer(tensors):
    return {k.replace("layers.0.", "midlayer."): v for k, v in tensors.items()}


def draft(tmp_path, tensors=None, config=None):
    return open_checkpoint(write_draft(tmp_path / "d", tensors or tiny_tensors(), config or tiny_config()))


def target(tmp_path, **change):
    return open_target(tiny_target(tmp_path / "t", **change))


def nested(**change):
    config = tiny_config(**change)
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in AUX_HF], "use_aux_hidden_state": True}
    return config


def test_a_healthy_draft_loads_whole_in_both_engines(tmp_path):
    ours = open_checkpoint(write_draft(tmp_path / "d", midlayer(tiny_tensors()), nested()))
    for engine in ("sglang==0.5.9", "sglang==0.5.23", "vllm==0.16.0", "vllm==0.33.0"):
        served = serve(ours, engine, target=target(tmp_path / engine))
        assert served.refused is None
        assert not served.dropped()
        assert served.wiring.unfilled == {}
        assert served.wiring.aux_layers == AUX_HF, engine
    assert served.fails_later == ()


def test_vllm_090_wants_every_tensor_and_no_embedding(tmp_path):
    plain = tiny_config(architectures=["LlamaForCausalLM"])  # this version puts Eagle3 before any name
    whole = tiny_tensors()
    own = {**whole, "embed_tokens.weight": whole["lm_head.weight"]}
    assert "KeyError: 'embed_tokens.weight'" in serve(draft(tmp_path / "a", own, plain), "vllm==0.9.0").refused.message
    whole.pop("embed_tokens.weight", None)
    whole.pop("norm.weight")
    assert "['norm.weight']" in serve(draft(tmp_path / "b", whole, plain), "vllm==0.9.0").refused.message
    assert "Eagle3LlamaForCausalLMEagle3" in serve(draft(tmp_path / "c"), "vllm==0.9.0").refused.message


def test_vllm_090_forgets_the_mapping(tmp_path):
    whole = tiny_tensors()
    whole.pop("embed_tokens.weight", None)
    served = serve(draft(tmp_path, whole, tiny_config(architectures=["LlamaForCausalLM"])), "vllm==0.9.0.1")
    assert served.refused is None
    assert served.wiring.mapping == "missing"


def test_embedding_policies(tmp_path):
    own = tiny_tensors(embed=True)
    same = draft(tmp_path, own)
    assert serve(same, "sglang==0.5.23").tensors["embed_tokens.weight"].fate == "replaced"
    assert serve(same, "vllm==0.10.2").tensors["embed_tokens.weight"].fate == "replaced"
    assert serve(same, "vllm==0.33.0").tensors["embed_tokens.weight"].fate == "loaded"
    assert serve(same, "vllm==0.33.0").wiring.embedding == "draft"


@pytest.mark.parametrize(
    ("engine", "change", "theta"),
    [
        ("sglang==0.5.9", {"rope_theta": 500000.0}, 500000.0),
        ("sglang==0.5.9", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 10000.0),
        ("sglang==0.5.10", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0),
        ("vllm==0.11.2", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 10000.0),
        ("vllm==0.16.0", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 10000.0),
        ("vllm==0.16.0", {"rope_theta": 500000.0}, 500000.0),
        ("vllm==0.33.0", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0),
    ],
)
def test_theta_as_each_version_reads_it(tmp_path, engine, change, theta):
    config = {k: v for k, v in (tiny_config() | change).items() if not (k == "rope_theta" and v is None)}
    assert serve(draft(tmp_path, None, config), engine).wiring.rope_theta == theta


@pytest.mark.parametrize(
    ("engine", "norm_output", "norm_before_fc", "residual"),
    [
        ("sglang==0.5.11", False, False, False),
        ("sglang==0.5.16", True, False, False),
        ("sglang==0.5.17", True, True, False),
        ("vllm==0.33.0", True, True, True),
    ],
)
def test_norm_flags_by_version(tmp_path, engine, norm_output, norm_before_fc, residual):
    config = nested(norm_output=True, norm_before_fc=True, norm_before_residual=True)
    tensors = midlayer(tiny_tensors())
    tensors["input_norm.weight"] = tensors["norm.weight"].repeat(3)
    served = serve(draft(tmp_path, tensors, config), engine)
    assert served.refused is None
    got = served.wiring
    assert (got.norm_output, got.norm_before_fc, got.norm_before_residual) == (norm_output, norm_before_fc, residual)
    # midlayer names mark SpecForge, whose norm_output means a final norm: an engine that reads it feeds the normalised state back
    assert ("norm_output" in served.defaulted) == norm_output
    asked = {"norm_before_fc": norm_before_fc, "norm_before_residual": residual}
    assert set(served.ignored) == {k for k, honoured in asked.items() if not honoured}


def test_a_speculators_config_loses_what_the_converter_does_not_copy(tmp_path):
    where = dialect_draft(tmp_path, "speculators-0.9")
    ours = open_checkpoint(where)
    old = serve(ours, "vllm==0.11.0")
    assert old.aux.ids is None
    new = serve(ours, "vllm==0.33.0", target=target(tmp_path))
    assert new.refused is None
    assert new.wiring.aux_layers == AUX_HF
    assert serve(ours, "sglang==0.5.23").refused.stage == "construct"


def test_launched_as_eagle(tmp_path):
    line = "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE --speculative-draft-model-path d"
    served = serve(draft(tmp_path, None, nested()), "sglang==0.5.23", launch=parse_launch(line), target=target(tmp_path))
    assert served.algorithm == "eagle"
    assert (served.wiring.fc, served.wiring.head, served.wiring.mapping) == ("bypassed", "target-first-rows", "missing")
    assert served.tensors["lm_head.weight"].fate == "replaced"
    line = 'vllm serve t --speculative-config \'{"method": "eagle", "model": "d", "num_speculative_tokens": 3}\''
    assert "EagleLlamaForCausalLMEagle3" in serve(draft(tmp_path / "v"), "vllm==0.33.0", launch=parse_launch(line)).refused.message


def test_one_state_of_the_drafts_own_width_never_meets_fc_in_sglang(tmp_path):
    tensors = midlayer(tiny_tensors(n_aux=1))
    config = nested() | {"num_aux_hidden_states": 1}
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [5]
    one = draft(tmp_path, tensors, config)
    assert not serve(one, "sglang==0.5.23", target=target(tmp_path)).fc.runs
    assert serve(one, "vllm==0.33.0", target=target(tmp_path)).fc.runs


def test_too_many_ids_fail_at_the_first_forward(tmp_path):
    served = serve(
        draft(tmp_path, None, tiny_config(eagle_aux_hidden_state_layer_ids=[2, 6, 9, 11])), "vllm==0.33.0", target=target(tmp_path)
    )
    assert served.refused is None
    assert any("mat1 and mat2" in text for text in served.fails_later)


def test_context_longer_than_the_draft(tmp_path):
    short = draft(tmp_path, midlayer(tiny_tensors()), nested(max_position_embeddings=64))
    to = target(tmp_path, max_position_embeddings=4096)
    refused = serve(short, "sglang==0.5.1", target=to).refused
    assert refused.stage == "start"
    assert "4096" in refused.message
    assert "64" in refused.message
    assert serve(short, "sglang==0.5.0rc2", target=to).refused is None
    assert serve(short, "vllm==0.33.0", target=to).refused is None
    line = (
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model-path t "
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path d"
    )
    assert serve(short, "sglang==0.5.1", target=to, launch=parse_launch(line)).refused is None


def test_dtype_only_under_its_new_name(tmp_path):
    config = nested(dtype="bfloat16")
    config.pop("torch_dtype", None)
    ours = draft(tmp_path, midlayer(tiny_tensors()), config)
    to = target(tmp_path, dtype="bfloat16")
    assert any("float16" in text for text in serve(ours, "sglang==0.4.9", target=to).fails_later)
    assert serve(ours, "sglang==0.5.9", target=to).fails_later == ()


def test_the_runner_decides_where_ids_are_read(tmp_path):
    ours = draft(tmp_path, None, nested())
    to = target(tmp_path)
    assert serve(ours, "vllm==0.33.0", target=to).aux.ids is None  # V2 is the default and reads the top level only
    line = (
        'VLLM_USE_V2_MODEL_RUNNER=0 vllm serve t --speculative-config \'{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}\''
    )
    v1 = serve(ours, "vllm==0.33.0", target=to, launch=parse_launch(line))
    assert v1.contract.runner == "v1"
    assert v1.wiring.aux_layers == tuple(k - 1 for k in AUX_HF)  # layer outputs read as HF indices: one early


@pytest.mark.parametrize(("engine", "class_"), [("sglang==0.5.23", "mla"), ("vllm==0.33.0", "mla")])
def test_mla_drafts(tmp_path, engine, class_):
    served = serve(open_checkpoint(dialect_draft(tmp_path, "mla")), engine)
    assert served.contract.draft_class == class_
    assert served.refused is None, served.refused
    assert served.wiring.unfilled == {}
    assert not served.dropped()


def test_sglang_before_0512_knows_no_mla_draft(tmp_path):
    assert serve(open_checkpoint(dialect_draft(tmp_path, "mla")), "sglang==0.5.11").refused.stage == "construct"


def test_without_a_config_shapes_stand_in(tmp_path):
    where = write_draft(tmp_path / "d", midlayer(tiny_tensors()), tiny_config())
    alone = open_checkpoint(where / "model.safetensors")
    (where / "config.json").unlink()
    alone = open_checkpoint(where / "model.safetensors")
    served = serve(alone, "sglang==0.5.9")
    assert served.refused is None
    assert not served.dropped()
