"""Conversions: bytes unchanged, facts by meaning, nothing lost in silence, nothing half written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3diag.checkpoint.model import DraftSpec
from eagle3diag.checkpoint.names import canonical_names
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.engines.contract import load_contract, releases
from eagle3diag.engines.serve import serve
from eagle3diag.engines.targets import target_support
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.weights import layouts
from eagle3diag.weights.convert import Conversion, convert
from eagle3diag.weights.diff import diff
from eagle3diag.weights.layouts import parse_goal
from tests.factory import dialect_draft, speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft

LAYOUTS = ("sglang", "vllm", "speculators")
#: what each dialect's draft loses in each layout: nothing where a pair is absent
LOST: dict[tuple[str, str], set[str]] = {
    ("modelopt", "sglang"): {"double_norm"},
    ("modelopt", "vllm"): {"double_norm"},
    ("modelopt", "speculators"): {"double_norm"},
    ("mla", "sglang"): {"double_norm"},
    ("mla", "vllm"): {"double_norm"},
    ("speculators-0.4", "sglang"): {"aux_ids", "norm_before_residual"},
    ("speculators-0.4", "vllm"): {"aux_ids"},
    ("speculators-0.6", "sglang"): {"norm_before_residual"},
    ("speculators-0.9", "sglang"): {"norm_before_residual", "sliding_window"},
    ("speculators-0.9-qwen3", "sglang"): {"norm_before_residual", "sliding_window", "qk_norm"},
    ("flat-export-nested", "vllm"): {"aux_ids"},
    ("flat-export-nested", "speculators"): {"aux_ids"},
}
DIALECTS = (
    *(
        "specforge",
        "specforge-sglang",
        "safeailab",
        "modelopt",
        "modelopt-megatron",
        "modelopt-megatron-deep",
        "angelslim",
        "speculators-0.4",
    ),
    *("speculators-0.6", "speculators-0.9", "speculators-0.9-qwen3", "flat-export", "flat-export-nested", "vllm", "mla", "engine-dump"),
)
PAIRS = [(d, to) for d in DIALECTS for to in LAYOUTS if (d, to) != ("mla", "speculators")]


def facts(spec: DraftSpec) -> dict[str, Any]:
    """What a conversion must keep: sizes, and the wiring with the ids as HF indices."""
    names = "hidden_size target_hidden_size vocab_size draft_vocab_size intermediate_size num_layers num_heads num_kv_heads head_dim n_aux"
    names += " rms_norm_eps max_position dtype verifier use_aux_hidden_state attention_bias mlp_bias"
    out = {n: getattr(spec, n).value for n in names.split()}
    return {**out, "aux": spec.aux.hf, "wiring": spec.wiring, "layers": spec.layers_in_file}


def contents(folder: Path) -> dict[str, bytes]:
    """Canonical name -> raw bytes, fused projections of the tiny shapes taken apart, the deeper norm under one name."""
    c = open_checkpoint(folder)
    out: dict[str, bytes] = {}
    for canonical, name in canonical_names(c.tensors).items():
        t = c.read(name)
        parts = {canonical: t}
        if "qkv_proj" in canonical:
            parts = dict(zip((canonical.replace("qkv", p) for p in "qkv"), t.split([64, 32, 32]), strict=True))
        elif "gate_up_proj" in canonical:
            parts = dict(zip((canonical.replace("gate_up", p) for p in ("gate", "up")), t.chunk(2), strict=True))
        for n, part in parts.items():
            n = n.replace("layers.1.hidden_norm", "layers.1.input_layernorm")
            raw = part.contiguous().view(torch.uint8) if part.ndim else part
            out[n] = f"{part.dtype} {tuple(part.shape)} ".encode() + raw.numpy().tobytes()
    return out


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


@pytest.mark.parametrize(("dialect", "to"), PAIRS)
def test_every_dialect_to_every_layout(tmp_path: Path, dialect: str, to: str) -> None:
    source = dialect_draft(tmp_path / "source", dialect)
    before = listing(source)
    lost = LOST.get((dialect, to), set())
    if lost:
        with pytest.raises(UsageError) as error:
            convert(source, tmp_path / "out", to)
        assert all(name in str(error.value) for name in lost)
        assert not (tmp_path / "out").exists()
    done = convert(source, tmp_path / "out", to, allow=lost)
    assert set(done.lost) == lost
    assert listing(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    was, now = contents(source), contents(tmp_path / "out")
    gone = {n for n in was if "q_norm" in n or "k_norm" in n} if "qk_norm" in lost else set()
    assert now == {k: v for k, v in was.items() if k not in gone}
    one, two = draft_spec(open_checkpoint(source)), draft_spec(open_checkpoint(tmp_path / "out"))
    assert two.dialect.confidence != "unknown"
    if not lost:
        assert facts(two) == facts(one)
    else:
        changed = set(one.wiring.differences(two.wiring))
        assert changed <= lost


@pytest.mark.parametrize(("dialect", "to"), [p for p in PAIRS if p not in LOST and p[0] != "speculators-0.4"])
def test_there_and_back(tmp_path: Path, dialect: str, to: str) -> None:
    source = dialect_draft(tmp_path / "source", dialect)
    convert(source, tmp_path / "there", to)
    back = "vllm" if to != "vllm" else "speculators"
    convert(tmp_path / "there", tmp_path / "back", back)
    assert contents(tmp_path / "back") == contents(source)
    assert facts(draft_spec(open_checkpoint(tmp_path / "back"))) == facts(draft_spec(open_checkpoint(source)))
    found = diff(source, tmp_path / "back", values=True)
    assert found.same_tensors


@pytest.mark.parametrize(
    ("to", "engine"),
    [
        ("sglang", "sglang==0.5.9"),
        ("sglang", "sglang==0.5.23"),
        ("vllm", "vllm==0.16.0"),
        ("vllm", "vllm==0.33.0"),
        ("speculators", "vllm==0.33.0"),
    ],
)
def test_the_engine_it_was_made_for_loads_all_of_it(tmp_path: Path, to: str, engine: str) -> None:
    target = open_target(tiny_target(tmp_path / "target"))
    for dialect in ("specforge", "safeailab", "angelslim", "flat-export", "vllm", "engine-dump"):
        source = dialect_draft(tmp_path / dialect, dialect)
        convert(source, tmp_path / f"{dialect}-out", to)
        served = serve(open_checkpoint(tmp_path / f"{dialect}-out"), engine, target=target)
        assert served.refused is None
        assert served.dropped() == ()
        assert set(served.never_filled) <= {"embed_tokens.weight"}
        assert served.aux.prefill_hf == (2, 6, 9)
        assert not served.aux.problem


def test_safetensors_of_others_read_the_file(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "specforge")
    done = convert(source, tmp_path / "out", "vllm")
    path = tmp_path / "out" / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert all(
        header[n]["data_offsets"][0] % {"I64": 8, "BF16": 2, "BOOL": 1}[header[n]["dtype"]] == 0 for n in header if n != "__metadata__"
    )
    original = load_file(source / "model.safetensors")
    with safe_open(path, "pt") as f:
        names = list(f.keys())
        assert len(names) == done.tensors == len(original)
        for name in names:
            assert torch.equal(f.get_tensor(name), original[name.replace("layers.0.", "midlayer.")])
    assert done.bytes == sum(t.numel() * t.element_size() for t in original.values())


def test_names_and_ids_by_layout(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "vllm")
    made = {to: convert(source, tmp_path / to, to) for to in ("sglang", "sglang==0.5.9", "sglang==0.5.23", "vllm", "speculators")}
    config = {to: json.loads((tmp_path / to / "config.json").read_text("utf-8")) for to in made}
    layer = {to: any(n.startswith("midlayer.") for n in open_checkpoint(tmp_path / to).tensors) for to in made}
    assert layer == {"sglang": True, "sglang==0.5.9": True, "sglang==0.5.23": False, "vllm": False, "speculators": False}
    assert config["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert config["vllm"]["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert config["speculators"]["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert "eagle_config" not in config["speculators"]
    for to in ("sglang", "vllm"):
        assert config[to]["rope_theta"] == config[to]["rope_parameters"]["rope_theta"] == 100000.0
    assert config["speculators"]["transformer_layer_config"]["hidden_size"] == 64
    assert isinstance(made["vllm"], Conversion)
    assert set(made["vllm"].to_dict()) >= {"schema", "written", "to", "renamed", "translated", "lost"}
    assert made["sglang"].renamed["layers.0.hidden_norm.weight"] == "midlayer.hidden_norm.weight"


def test_layer_output_ids_are_moved_by_meaning(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "specforge")
    convert(source, tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert draft_spec(open_checkpoint(tmp_path / "out")).aux.settled


def test_deeper_layers_norm_goes_by_the_engines_name(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "source", tiny_tensors(layers=2), tiny_config(num_hidden_layers=2))
    convert(source, tmp_path / "sglang", "sglang")
    names = set(open_checkpoint(tmp_path / "sglang").tensors)
    assert "layers.1.hidden_norm.weight" in names
    assert "layers.1.input_layernorm.weight" not in names
    assert not any(n.startswith("midlayer") for n in names)
    with pytest.raises(UsageError, match="2 decoder layers"):
        convert(source, tmp_path / "old", "sglang==0.5.11")


def test_specforge_flag_is_not_copied(tmp_path: Path) -> None:
    def make(flag: bool) -> Path:
        config = tiny_config(aux="nested", target_model_type="llama", norm_output=flag)
        return write_draft(tmp_path / f"source-{flag}", tiny_tensors(layer="midlayer"), config)

    done = convert(make(True), tmp_path / "out", "vllm")
    assert not json.loads((tmp_path / "out" / "config.json").read_text("utf-8")).get("norm_output")
    assert "norm_output" in done.translated
    with pytest.raises(UsageError, match="final_norm"):
        convert(make(False), tmp_path / "no", "vllm")


def test_post_norm_feedback_survives_sglang(tmp_path: Path) -> None:
    config = speculators_config(norm_output=True, norm_before_fc=True)
    source = write_draft(tmp_path / "source", tiny_tensors(embed=True, input_norm=True), config)
    convert(source, tmp_path / "out", "sglang")
    one, two = draft_spec(open_checkpoint(source)), draft_spec(open_checkpoint(tmp_path / "out"))
    assert two.wiring.norm_output
    assert two.wiring.norm_before_fc
    assert facts(one) == facts(two)


@pytest.mark.parametrize(
    ("name", "tensors", "config", "to"),
    [
        ("norm_before_residual", {}, {"norm_before_residual": True}, "sglang"),
        ("qk_norm", {"qk_norm": True}, {}, "sglang"),
        ("attention_bias", {"bias": True}, {"attention_bias": True}, "sglang"),
        ("fc_norm", {"fc_norm": True}, {"fc_norm": True}, "sglang==0.5.9"),
        ("norm_before_fc", {"input_norm": True}, {"norm_before_fc": True}, "sglang==0.5.16"),
        ("norm_before_fc", {"input_norm": True}, {"norm_before_fc": True}, "vllm==0.16.0"),
        ("n_aux", {"n_aux": 4}, {"ids": [2, 4, 6, 9]}, "sglang==0.5.11"),
        ("one_aux", {"n_aux": 1}, {"ids": [6]}, "sglang"),
        ("aux_layer_0", {}, {"ids": [0, 6, 9]}, "sglang"),
        ("sliding_window", {}, {"sliding_window": 128}, "sglang"),
        ("trained_embedding", {"embed": True}, {"embed_requires_grad": True}, "sglang"),
        ("use_aux_hidden_state", {}, {"aux": None, "eagle_config": {"use_aux_hidden_state": False}}, "speculators"),
    ],
)
def test_what_a_layout_cannot_hold_stops_it(tmp_path: Path, name: str, tensors: dict[str, Any], config: dict[str, Any], to: str) -> None:
    source = write_draft(tmp_path / "source", tiny_tensors(**tensors), tiny_config(**config))
    with pytest.raises(UsageError, match=name) as error:
        convert(source, tmp_path / "out", to)
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=name):
        convert(source, tmp_path / "out", to, allow=("something_else",))
    assert not (tmp_path / "out").exists()
    done = convert(source, tmp_path / "out", to, allow=(name,))
    assert done.lost == (name,)
    assert done.reasons[name]
    after = open_checkpoint(tmp_path / "out")
    assert not [n for n in after.tensors if "q_norm" in n or n.endswith("q_proj.bias")]


@pytest.mark.parametrize(("tensors", "config"), [({"n_aux": 4}, {"ids": [2, 4, 6, 9]}), ({"fc_norm": True}, {"fc_norm": True})])
def test_what_newer_engines_hold_is_kept(tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    source = write_draft(tmp_path / "source", tiny_tensors(**tensors), tiny_config(**config))
    for to in LAYOUTS:
        assert convert(source, tmp_path / to, to).lost == ()
        assert facts(draft_spec(open_checkpoint(tmp_path / to))) == facts(draft_spec(open_checkpoint(source)))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"adapter.lora_A": torch.ones(3)}
    source = write_draft(tmp_path / "source", tensors, tiny_config())
    with pytest.raises(UsageError, match=r"adapter\.lora_A"):
        convert(source, tmp_path / "out", "vllm")
    convert(source, tmp_path / "out", "vllm", allow=("adapter.lora_A",))
    assert "adapter.lora_A" not in open_checkpoint(tmp_path / "out").tensors


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "source", tiny_tensors(), tiny_config(tie_word_embeddings=True))
    done = convert(source, tmp_path / "out", "sglang")
    assert "tie_word_embeddings" in done.translated
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["tie_word_embeddings"] is False


def test_sharded_and_torch_sources(tmp_path: Path) -> None:
    assert open_checkpoint(dialect_draft(tmp_path / "bin", "safeailab")).form == "torch"
    convert(tmp_path / "bin", tmp_path / "from-bin", "sglang")
    assert contents(tmp_path / "from-bin") == contents(tmp_path / "bin")
    t = tiny_tensors()
    names = sorted(t)
    one, two = ({n: t[n] for n in half} for half in (names[:6], names[6:]))
    folder = write_draft(tmp_path / "shards", one, tiny_config())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_draft(folder, two, None)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    index = {n: f"model-0000{1 if n in one else 2}-of-00002.safetensors" for n in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
    done = convert(folder, tmp_path / "whole", "vllm")
    assert contents(tmp_path / "whole") == contents(folder)
    assert done.left == ()


def test_other_files_are_named_not_copied(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "flat-export")
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert convert(source, tmp_path / "out", "sglang").left == ("tokenizer.json",)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_where_nothing_may_be_written(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "flat-export")
    before = listing(source)
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x", encoding="utf-8")
    plain = tmp_path / "file"
    plain.write_text("x", encoding="utf-8")
    (tmp_path / "link").symlink_to(source)
    for out in (
        source,
        source / "inside",
        source / "a" / "b",
        tmp_path / "link" / "x",
        tmp_path / "other" / ".." / "source" / "y",
        full,
        plain,
    ):
        with pytest.raises(UsageError):
            convert(source, out, "vllm")
    with pytest.raises(UsageError):
        convert(source / "model.safetensors", source / "new", "vllm")
    assert listing(source) == before
    assert (full / "precious").read_text(encoding="utf-8") == "x"
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(source, empty, "vllm")
    assert len(list(empty.iterdir())) == 2


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    source = dialect_draft(tmp_path / "source", "flat-export")
    c = open_checkpoint(source)
    with (source / "model.safetensors").open("r+b") as f:
        f.truncate(60_000)
    with pytest.raises(CheckpointError):
        convert(c, tmp_path / "out", "sglang")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = dialect_draft(tmp_path / "source", "flat-export")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="no space left on device"):
        convert(source, tmp_path / "out", "sglang")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("dialect", ["eagle1", "hass", "peagle", "dflash", "mtp", "specforge-training"])
def test_other_algorithms_and_bare_weights_are_refused(tmp_path: Path, dialect: str) -> None:
    source = dialect_draft(tmp_path / "source", dialect)
    with pytest.raises(UsageError) as error:
        convert(source, tmp_path / "out", "vllm")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("to", ["", "trtllm", "sglang==", "vllm==new", "speculators 0.9", "sglang=0.5.9"])
def test_unknown_goals(tmp_path: Path, to: str) -> None:
    source = dialect_draft(tmp_path / "source", "flat-export")
    with pytest.raises(UsageError):
        convert(source, tmp_path / "out", to)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    t = tiny_tensors()
    t["midlayer.mlp.up_proj.weight"] = t["layers.0.mlp.up_proj.weight"] + 1
    source = write_draft(tmp_path / "source", t, tiny_config())
    with pytest.raises(UsageError, match="second time"):
        convert(source, tmp_path / "out", "vllm")


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "norm_before_residual": st.booleans(),
        "norm_output": st.booleans(),
        "sliding_window": st.sampled_from([None, 64]),
        "rope_theta": st.sampled_from([1e4, 5e5]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
        "max_position_embeddings": st.sampled_from([512, 4096]),
        "rope_scaling": st.sampled_from([None, {"rope_type": "linear", "factor": 4.0}]),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flags=FLAGS,
    nested=st.booleans(),
    midlayer=st.booleans(),
    parts=st.fixed_dictionaries({"embed": st.booleans(), "t2d": st.booleans(), "sort": st.booleans()}),
    to=st.sampled_from((*LAYOUTS, "sglang==0.5.23", "vllm==0.33.0")),
)  # fmt: skip
def test_any_flat_draft_keeps_its_facts_or_names_them(
    tmp_path: Path, flags: dict[str, Any], nested: bool, midlayer: bool, parts: dict[str, Any], to: str
) -> None:
    shutil.rmtree(tmp_path / "h", ignore_errors=True)
    t = tiny_tensors(layer="midlayer" if midlayer else "layers.0", **parts)
    source = write_draft(tmp_path / "h" / "source", t, tiny_config(aux="nested" if nested else "top", **flags))
    try:
        lost: set[str] = set()
        convert(source, tmp_path / "h" / "out", to)
    except UsageError as error:
        allowed = ("norm_before_residual", "norm_output", "sliding_window", "aux_ids", "final_norm")
        lost = {n for n in allowed if f"{n}:" in str(error)}
        assert lost
        assert set(convert(source, tmp_path / "h" / "out", to, allow=lost).lost) == lost
    one, two = draft_spec(open_checkpoint(source)), draft_spec(open_checkpoint(tmp_path / "h" / "out"))
    assert set(one.wiring.differences(two.wiring)) <= lost
    if not lost:
        assert facts(one) == facts(two)
    assert contents(source) == contents(tmp_path / "h" / "out")


def test_the_change_is_made_on_a_copy(tmp_path: Path) -> None:
    """A spec is compared, never patched: an opened checkpoint may be converted twice."""
    c = open_checkpoint(dialect_draft(tmp_path / "source", "engine-dump"))
    made: list[Callable[[], Conversion]] = [lambda i=i: convert(c, tmp_path / f"out{i}", "vllm") for i in range(2)]  # type: ignore[misc]
    one, two = (f() for f in made)
    assert replace(one, written="") == replace(two, written="")
    assert (tmp_path / "out0" / "model.safetensors").read_bytes() == (tmp_path / "out1" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("feature", "engine", "last_without", "first_with"),
    [  # transcribed from the facts on engines, not from the contracts
        ("layers", "sglang", "0.5.11", "0.5.12"),
        ("use_aux_hidden_state", "sglang", "0.5.7", "0.5.8"),
        ("norm_before_fc", "sglang", "0.5.16", "0.5.17"),
        ("mla_fc_norm", "sglang", "0.5.12", "0.5.13"),
        ("mla", "sglang", "0.5.11", "0.5.12"),
        ("norm_before_residual", "vllm", "0.10.0", "0.10.1"),
        ("aux_ids", "vllm", "0.11.0", "0.11.1"),
        ("sliding_window", "vllm", "0.10.1.1", "0.10.2"),
        ("trained_embedding", "vllm", "0.11.0", "0.11.1"),
        ("attention_bias", "vllm", "0.15.1", "0.16.0"),
        ("mla", "vllm", "0.17.1", "0.18.0"),
        ("qk_norm", "vllm", "0.23.0", "0.24.0"),
        ("mla_fc_norm", "vllm", "0.22.0", "0.23.0"),
        ("aux_layer_0", "vllm", "0.17.1", "0.18.0"),
    ],
)
def test_what_a_release_honours(feature: str, engine: str, last_without: str, first_with: str) -> None:
    assert not parse_goal(f"{engine}=={last_without}").honours(feature)
    assert parse_goal(f"{engine}=={first_with}").honours(feature)
    assert parse_goal(engine).honours(feature)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_feature_asks_a_behaviour_that_exists(engine: str) -> None:
    for feature, (behaviour, _) in layouts._BEHAVIOURS.items():
        assert behaviour in load_contract(engine).facts, feature


def test_the_embedding_among_the_layers_is_what_a_capture_says(tmp_path: Path) -> None:
    """``aux_layer_0`` stands in no contract: the rules of target classes tell it, and this holds the two together."""
    target = open_target(str(tiny_target(tmp_path)))
    for version in releases("vllm"):
        contract = load_contract("vllm", version)
        if contract["aux_ids_from"]:
            took = target_support(contract, target).behaviour
            assert took is not None
            assert (took.zero == "embedding") == parse_goal(f"vllm=={version}").honours("aux_layer_0"), version


@pytest.mark.parametrize("text", ["sglang==", "vllm==new", "sglang==0.5..9", "vllm==" + "9" * 99])
def test_a_goal_of_no_release_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no release"):
        parse_goal(text)


def test_a_goal_reads_versions_as_engines_do() -> None:
    assert parse_goal("sglang==v0.5.12.post1").honours("layers")
    assert parse_goal("vllm==0.18.0+cu128").honours("mla")
    assert not parse_goal("sglang==0.5.12rc1").honours("layers")  # a candidate comes before its release


def test_a_qwen3_class_has_no_mlp_bias(tmp_path: Path) -> None:
    assert parse_goal("vllm").honours("mlp_bias")
    assert not parse_goal("vllm").honours("mlp_bias", "qwen3")
