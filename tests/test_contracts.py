"""Every release on record has exactly one value for every behaviour, with a source and a status."""

from __future__ import annotations

import pytest

from eagle3diag.engines import contract as contracts
from eagle3diag.errors import UsageError

ENGINES = contracts.ENGINES

# releases named in the facts pages (engines.md header and matrix, vllm_transitions.md, loader_runs.md, capture_runs.md)
NAMED = {
    "sglang": [
        "0.4.5", "0.4.5.post3", "0.4.6", "0.4.7", "0.4.8", "0.4.9", "0.4.9.post6", "0.4.10", "0.5.0rc2", "0.5.1", "0.5.2", "0.5.3",
        "0.5.4", "0.5.4.post3", "0.5.5", "0.5.6", "0.5.7", "0.5.8", "0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.14",
        "0.5.15", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.22", "0.5.23",
    ],
    "vllm": [
        "0.8.5", "0.9.0", "0.9.0.1", "0.9.1", "0.10.0", "0.10.1", "0.10.1.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0",
        "0.13.0", "0.15.0", "0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.19.0", "0.19.1", "0.20.0", "0.21.0", "0.22.0", "0.22.1",
        "0.23.0", "0.24.0", "0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.32.0", "0.33.0",
    ],
    "tensorrt-llm": ["undated"],
    "llama.cpp": ["undated"],
}  # fmt: skip

# behaviours the matrix and sections 1 to 5 of the engine facts name
COVERED = {
    "dispatch": [
        "architectures",
        "architecture_rename",
        "other_architecture",
        "method_rule",
        "reads_speculators",
        "speculators_copies",
        "speculators_architecture",
        "speculators_types",
    ],
    "key mapping": ["layer_names", "rename", "name_prefix", "layer_parameter"],
    "unknown": ["unknown", "unknown_stacked", "unknown_bias"],
    "missing": ["missing", "linear_start", "norm_start", "fc_start"],
    "mismatch": ["mismatch", "draft_layers", "n_aux", "n_aux_buffers"],
    "skipped on purpose": ["skip", "skip_without_flag"],
    "embedding and head": [
        "embedding",
        "embedding_exempt",
        "lm_head_missing",
        "lm_head_replaced",
        "tie",
        "draft_vocab_absent",
        "draft_vocab_null",
    ],
    "d2t": ["d2t_names", "d2t_missing", "d2t_applied", "d2t_full_vocab", "d2t_length", "d2t_float", "d2t_out_of_range"],
    "ids": [
        "aux_ids_from",
        "id_meaning",
        "id_order",
        "default_aux",
        "cuda_graph_uses_ids",
        "use_aux_flag",
        "runner_default",
        "runner_captures",
    ],
    "fc": ["fc_condition", "fc_bias", "eagle_path", "two_batch_overlap", "replay_buffer"],
    "norm flags": [
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "fc_norm_keys",
        "norm_output",
        "deep_layer_norm",
        "speculators_residual_default",
    ],
    "biases": ["qkv_bias", "qk_norm", "o_bias", "mlp_bias"],
    "rope and lengths": ["rope_keys", "rope_default_theta", "mrope", "max_position", "sliding_window", "position_gap"],
    "server": ["dtype", "dtype_keys", "quantization", "auto_chain", "target_hidden_null", "eagle_config_null"],
    "metrics": ["accept_rate", "accept_length"],
}


def cells(engine: str):
    for version in contracts.releases(engine):
        for runner in contracts.runners(engine) or (None,):
            for draft_class in contracts.draft_classes(engine):
                yield version, runner, draft_class


@pytest.mark.parametrize("engine", ENGINES)
def test_every_named_release_is_on_record(engine):
    assert set(NAMED[engine]) <= set(contracts.releases(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_behaviour_of_the_facts_is_recorded(engine):
    wanted = {name for group in COVERED.values() for name in group}
    assert wanted == set(contracts.behaviours(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_no_cell_is_empty_or_double(engine):
    tables = contracts._data(engine)["behaviour"]
    for version, runner, draft_class in cells(engine):
        for name, table in tables.items():
            fitting = [e for e in table["is"] if contracts._fits(e, version, runner, draft_class)]
            assert len(fitting) == 1, f"{engine} {version} {runner} {draft_class} {name}: {len(fitting)} entries"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_entry_has_a_source_and_says_how_it_is_known(engine):
    for name, table in contracts._data(engine)["behaviour"].items():
        assert table["doc"], name
        for entry in table["is"]:
            assert set(entry) <= {"since", "until", "runner", "draft", "value", "status", "source"}, (name, entry)
            assert len(entry["source"]) > 8, (name, entry)
            assert entry["status"] in ("run", "read", "inferred"), (name, entry)
            for bound in ("since", "until"):
                assert entry.get(bound, contracts.releases(engine)[0]) in contracts.releases(engine), (name, entry)


def test_inferred_cells_say_so():
    assert contracts.load_contract("vllm", "0.20.0", runner="v2").facts["use_aux_flag"].status == "inferred"
    assert contracts.load_contract("sglang", "0.5.9").facts["layer_names"].status == "run"


def test_a_version_not_on_record_takes_the_nearest_older_one():
    contract = contracts.load_contract("sglang", "0.5.99")
    assert (contract.asked, contract.version, contract.on_record) == ("0.5.99", contracts.releases("sglang")[-1], False)
    assert contracts.load_contract("vllm", "0.8.0").version == "0.8.5"
    assert contracts.load_contract("vllm").version == "0.33.0"


def test_undated_engines_have_one_record_whatever_is_asked():
    for engine in ("tensorrt-llm", "llama.cpp"):
        assert contracts.undated(engine)
        assert not contracts.undated("vllm")
        plain, asked = contracts.load_contract(engine), contracts.load_contract(engine, "1.2.0")
        assert plain.facts == asked.facts
        assert (plain.version, asked.asked) == ("undated", "1.2.0")
        assert "undated" in plain.label
        assert contracts.parse_engine(engine) == (engine, None)
        with pytest.raises(UsageError):  # nothing of it is scanned
            contracts.parse_engine(f"{engine}@/tmp")


@pytest.mark.parametrize(
    ("engine", "behaviour", "value"),
    [  # facts/vllm_transitions.md, sections 6 and 7
        ("tensorrt-llm", "id_meaning", "output"),
        ("tensorrt-llm", "aux_ids_from", []),
        ("tensorrt-llm", "default_aux", "[2, N//2, N-3]"),
        ("tensorrt-llm", "norm_before_fc", ["nested"]),
        ("tensorrt-llm", "norm_before_residual", "ignored"),
        ("tensorrt-llm", "fc_condition", "width-differs"),
        ("tensorrt-llm", "deep_layer_norm", "hidden_norm"),
        ("tensorrt-llm", "lm_head_missing", "target"),
        ("llama.cpp", "id_meaning", "input"),
        ("llama.cpp", "aux_ids_from", []),
        ("llama.cpp", "norm_before_residual", "config"),
        ("llama.cpp", "speculators_residual_default", False),
        ("llama.cpp", "draft_layers", "one"),
        ("llama.cpp", "embedding", "own-if-present"),
        ("llama.cpp", "d2t_out_of_range", "refuse"),
    ],
)
def test_what_the_facts_say_of_undated_engines(engine, behaviour, value):
    assert contracts.load_contract(engine)[behaviour] == value


@pytest.mark.parametrize("text", ["tensorrt==1.0", "sglang==", "", "vllm=0.33", "sglang@/tmp/x"])
def test_engine_text_that_is_none(text):
    with pytest.raises(UsageError):
        contracts.parse_engine(text)


@pytest.mark.parametrize(
    ("version", "arch", "runner"),
    [
        ("0.16.0", "LlamaForCausalLM", "v1"),
        ("0.22.0", "Qwen3ForCausalLM", "v2"),
        ("0.22.0", "LlamaForCausalLM", "v1"),
        ("0.23.0", "LlamaForCausalLM", "v2"),
        ("0.29.0", "GptOssForCausalLM", "v2"),
        ("0.28.0", None, "v1"),
    ],
)
def test_runner_by_version_and_target(version, arch, runner):
    assert contracts.runner_for("vllm", version, arch)[0] == runner


def test_runner_of_quantised_and_moe_targets():
    assert contracts.runner_for("vllm", "0.23.0", "LlamaForCausalLM", quantised=True)[0] == "v1"
    assert contracts.runner_for("vllm", "0.26.0", "Qwen3MoeForCausalLM", moe=True)[0] == "v1"
    assert contracts.runner_for("vllm", "0.26.0", "Qwen3ForCausalLM")[0] == "v2"
