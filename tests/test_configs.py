"""Configs: read strictly, named by schema, compared by meaning."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3diag.checkpoint.configs import compare_configs, default_reader, order_configs, parse_json, read_configs, read_json, schema_of
from eagle3diag.checkpoint.fields import as_float, as_int, as_number_ids, rope_facts
from eagle3diag.checkpoint.model import ConfigFile
from tests.factory import AUX_HF, speculators_config, target_config, tiny_config, write_draft


def flat(**change: Any) -> ConfigFile:
    data = tiny_config(**change)
    return ConfigFile("config.json", schema_of(data), data)


def nested(**change: Any) -> ConfigFile:
    data = speculators_config(**change)
    return ConfigFile("config_speculators.json", schema_of(data), data)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b'{"architectures": [', "ends early"),
        (b"[1, 2]", "array"),
        (b"null", "null"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-le"), "UTF-16"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "deep"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"{'a': 1}", "line 1 column 2"),
    ],
)
def test_what_is_no_config_is_one_line(raw: bytes, says: str) -> None:
    data, issue = parse_json(raw, "config.json")
    assert data is None
    assert issue is not None
    assert issue.kind == "config-unreadable"
    assert says in issue.message
    assert issue.message.startswith("config.json: ")
    assert "\n" not in issue.message
    assert len(issue.message) < 250


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_one_printable_line(raw: bytes) -> None:
    data, issue = parse_json(raw, "config.json")
    assert (data is None) != (issue is None)
    assert issue is None or issue.message.isprintable()


def test_infinity_is_read_only_where_asked_for() -> None:
    assert parse_json(b'{"time_step_limit": [0.0, Infinity]}', "c", infinity=True)[0] is not None
    assert parse_json(b'{"a": NaN}', "c", infinity=True)[0] is None


def test_special_files_are_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "regular" in str(read_json(tmp_path / "config.json")[1])
    big = tmp_path / "big.json"
    with big.open("wb") as f:
        f.truncate(50 << 20)
    assert "52,428,800 bytes" in str(read_json(big)[1])
    assert "not there" in str(read_json(tmp_path / "none.json")[1])


def test_a_folder_lists_its_configs_with_their_schema(tmp_path: Path) -> None:
    write_draft(
        tmp_path, None, tiny_config(), config_speculators=speculators_config(), tokenizer_config={"a": 1}, old=tiny_config(ids=[1, 2, 3])
    )
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (tmp_path / "notes.json").write_text("[1]")
    configs, issues = read_configs(tmp_path)
    assert [(c.file, c.schema) for c in configs] == [
        ("config.json", "flat"),
        ("config_speculators.json", "speculators"),
        ("old.json", "flat"),
    ]
    assert issues == ()


def test_an_absent_or_broken_config_is_an_issue(tmp_path: Path) -> None:
    configs, issues = read_configs(tmp_path)
    assert configs == ()
    assert [i.evidence.get("absent") for i in issues] == [True]
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "config_speculators.json").write_text(json.dumps(speculators_config()))
    configs, issues = read_configs(tmp_path)
    assert [c.file for c in configs] == ["config_speculators.json"]
    assert [i.file for i in issues] == ["config.json"]
    assert "ends early" in issues[0].message


def test_config_json_comes_first() -> None:
    names = ["a_config.json", "config_speculators.json", "config.json", "model.safetensors.index.json", "val_metrics.json"]
    assert order_configs(names) == ["config.json", "config_speculators.json", "a_config.json"]


@pytest.mark.parametrize(
    ("data", "schema"),
    [
        (tiny_config(), "flat"),
        (tiny_config(drop=("draft_vocab_size",), aux=None), "flat"),
        (tiny_config(aux=None, architectures=["LlamaForCausalLM"], drop=("draft_vocab_size",)), "flat"),
        (speculators_config(), "speculators"),
        (target_config(), "target"),
        ({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"hidden_size": 7168}}, "target"),
        ({"a": 1}, "unknown"),
        ({}, "unknown"),
        ({"architectures": "LlamaForCausalLMEagle3", "num_hidden_layers": []}, "unknown"),
    ],
)
def test_schema(data: dict[str, Any], schema: str) -> None:
    assert schema_of(data) == schema


def test_who_reads_which() -> None:
    assert default_reader(flat())["sglang"] == "reads"
    assert default_reader(flat())["vllm"] == "reads"
    main = ConfigFile("config.json", "speculators", speculators_config())
    assert default_reader(main) == {"sglang": "opens but cannot read the schema", "vllm": "reads", "speculators": "reads"}
    assert set(default_reader(nested()).values()) == {"never opens"}


def test_equal_facts_in_two_schemas_agree() -> None:
    assert compare_configs(flat(), nested()) == []
    assert compare_configs(flat(aux="nested"), nested()) == []  # layer outputs against HF indices of the same states
    assert compare_configs(flat(drop=("rope_theta",), rope_parameters={"rope_theta": 100000.0, "rope_type": "default"}), nested()) == []


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"hidden_size": 128}, "hidden_size"),
        ({"rope_theta": 5e5}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"ids": [3, 7, 10]}, "aux_layers_hf"),
        ({"aux": "nested", "ids": AUX_HF}, "aux_layers_hf"),
        ({"draft_vocab_size": 32}, "draft_vocab_size"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    ],
)
def test_a_disagreement_is_named(change: dict[str, Any], fact: str) -> None:
    assert [f for f, _, _ in compare_configs(flat(**change), nested())] == [fact]


def test_only_shared_usable_facts_are_compared() -> None:
    assert compare_configs(flat(drop=("rope_theta", "head_dim"), hidden_size="64", norm_before_fc=None), nested()) == []


def test_rope_schemas() -> None:
    assert rope_facts({"rope_theta": 5e5}) == ((5e5, "rope_theta"), (None, "rope_theta"))
    assert rope_facts({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}})[0] == (2.0, "rope_parameters.rope_theta")
    per_kind = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}}
    theta, scaling = rope_facts({"rope_parameters": per_kind})
    assert theta == (1e6, "rope_parameters.full_attention.rope_theta")
    assert scaling == ({"rope_type": "linear", "factor": 8.0}, "rope_parameters.full_attention")
    assert rope_facts({"rope_scaling": {"type": "yarn", "factor": 4.0}}) == (None, ({"rope_type": "yarn", "factor": 4.0}, "rope_scaling"))
    assert rope_facts({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}})[1] is not None
    assert rope_facts({"rope_theta": "1e6", "rope_scaling": [1]}) == (None, None)


def test_numbers_are_numbers() -> None:
    assert [as_int(v) for v in (3, 3.0, True, "3", 3.5, 10**20, float("inf"), None)] == [3, 3, None, None, None, None, None, None]
    assert [as_float(v) for v in (1, 1e-5, False, 10**4000, float("inf"), "1")] == [1.0, 1e-5, None, None, None, None]
    assert [as_number_ids(v) for v in ([1, 2.0], [], [1, "2"], "12", [True], None)] == [(1, 2), None, None, None, None, None]
