"""DraftSpec: provenance, aux conventions, wiring as trained, and no config that could break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3diag.checkpoint.aux_ids import collect, default_layers, resolve
from eagle3diag.checkpoint.configs import compare_configs, schema_of, shared_facts
from eagle3diag.checkpoint.model import AuxIds, Checkpoint, ConfigFile, Dialect, DraftSpec, TensorInfo
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec, resolved, shape_facts, type_problems
from tests.dialects import WRITERS
from tests.factory import (
    AUX_HF,
    AUX_LAYER_OUTPUT,
    TARGET_LAYERS,
    Tensors,
    speculators_config,
    tiny_config,
    tiny_tensors,
    write_draft,
)

PLAIN = tiny_tensors()


def headers(
    tensors: Tensors | None, *configs: dict[str, Any] | None, names: tuple[str, ...] = ("config.json", "config_speculators.json")
) -> Checkpoint:
    """A checkpoint of headers only, without files."""
    kinds = {"t2d": "BOOL", "d2t": "I64"}
    infos = {k: TensorInfo(k, kinds.get(k, "BF16"), tuple(v.shape), 2, "f", 0) for k, v in (tensors or {}).items()}
    listed = tuple(ConfigFile(n, schema_of(c), c) for n, c in zip(names, configs, strict=False) if c is not None)
    return Checkpoint(path="x", files=("f",), tensors=infos, configs=listed)


def spec_of(config: dict[str, Any], tensors: Tensors | None = None, *more: dict[str, Any]) -> DraftSpec:
    return draft_spec(headers(PLAIN if tensors is None else tensors, config, *more))


# ------------------------------------------------------------------ values and where they come from
def test_every_value_says_where_it_was_read() -> None:
    spec = spec_of(tiny_config())
    assert str(spec.hidden_size) == "64 (config.json: hidden_size)"
    assert spec.head_dim.where == "config.json: head_dim"
    assert spec.target_hidden_size.kind == "dialect"
    assert all(v.where for v in spec.values().values())


def test_a_nested_config_is_read_with_its_path() -> None:
    spec = spec_of(speculators_config())
    assert spec.hidden_size.where == "config.json: transformer_layer_config.hidden_size"
    assert spec.draft_vocab_size.where == "config.json: draft_vocab_size"
    assert str(spec.verifier.value) == "tiny/target"


def test_shapes_stand_in_for_a_config() -> None:
    spec = draft_spec(headers(tiny_tensors(embed=True, qk_norm=True)))
    found = {k: v.value for k, v in spec.values().items()}
    wanted = {"hidden_size": 64, "vocab_size": 256, "draft_vocab_size": 64, "intermediate_size": 128, "num_layers": 1, "head_dim": 16}
    assert wanted.items() <= found.items()
    assert (found["num_heads"], found["num_kv_heads"], found["n_aux"]) == (4, 2, 3)
    assert spec.hidden_size.where == "shape of norm.weight"
    assert spec.draft_class == "qwen3"


def test_config_and_shape_are_both_visible_where_they_disagree() -> None:
    checkpoint = headers(tiny_tensors(), tiny_config(draft_vocab_size=32, ids=[2, 6, 8, 9], num_hidden_layers=2))
    spec = draft_spec(checkpoint)
    shapes = shape_facts(checkpoint, spec.canonical)
    assert (spec.draft_vocab_size.value, shapes["draft_vocab_size"].value) == (32, 64)
    assert (spec.n_aux.value, shapes["n_aux"].value) == (4, 3)
    assert (spec.num_layers.value, spec.layers_in_file) == (2, 1)


def test_head_dim_from_the_weights_before_the_division() -> None:
    spec = spec_of(tiny_config(drop=("head_dim",)), tiny_tensors(head_dim=24))
    assert (spec.head_dim.value, spec.head_dim.kind) == (24, "shape")
    bare = draft_spec(headers(None, tiny_config(drop=("head_dim",))))
    assert (bare.head_dim.value, bare.head_dim.kind) == (16, "dialect")


def test_another_target_width() -> None:
    spec = spec_of(tiny_config(target_hidden_size=96), tiny_tensors(target_hidden=96))
    assert (spec.target_hidden_size.value, spec.n_aux.value) == (96, 3)
    chunks = draft_spec(headers(tiny_tensors(target_hidden=96, fc_norm=True)))
    assert (chunks.target_hidden_size.value, chunks.n_aux.value) == (96, 3)


def test_fused_projections_still_tell_the_heads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(WRITERS["engine-dump"](tmp_path / "d"))
    spec = draft_spec(checkpoint)
    shapes = shape_facts(checkpoint, spec.canonical)
    assert (shapes["num_heads"].value, shapes["num_kv_heads"].value, shapes["intermediate_size"].value) == (4, 2, 128)
    assert spec.canonical["d2t"] == "draft_id_to_target_id"


def test_a_second_config_fills_what_the_first_leaves_open() -> None:
    spec = spec_of(tiny_config(), None, speculators_config(norm_before_residual=True))
    assert spec.norm_before_residual.where == "config_speculators.json: norm_before_residual"
    assert spec.wiring.norm_before_residual
    assert spec.hidden_size.where.startswith("config.json")


def test_flags_are_found_in_eagle_config_or_told_by_tensors() -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_OUTPUT), "use_aux_hidden_state": False, "norm_before_fc": True}
    spec = spec_of(tiny_config(aux=None, eagle_config=nested))
    assert spec.norm_before_fc.where == "config.json: eagle_config.norm_before_fc"
    assert (spec.wiring.state, spec.wiring.fc) == ("final", "bypassed")
    told = spec_of(tiny_config(), tiny_tensors(input_norm=True, fc_norm=True))
    assert (told.norm_before_fc.kind, told.wiring.norm_before_fc, told.wiring.fc_norm) == ("shape", True, True)


@pytest.mark.parametrize(
    ("layer", "window"),
    [
        ({"sliding_window": 2048}, 2048),
        ({"sliding_window": 2048, "layer_types": ["sliding_attention"]}, 2048),
        ({"sliding_window": 2048, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": None}, None),
        ({}, None),
    ],
)
def test_a_window_counts_only_where_it_is_on(layer: dict[str, Any], window: int | None) -> None:
    config = speculators_config()
    config["transformer_layer_config"] |= layer
    assert spec_of(config).wiring.sliding_window == window


def test_rope_defaults_and_stated_absence() -> None:
    bare = spec_of(tiny_config(drop=("rope_theta",)))
    assert (bare.rope_theta.value, bare.rope_theta.kind, bare.rope_scaling.kind) == (10000.0, "dialect", "absent")
    stated = spec_of(tiny_config())
    assert (stated.rope_scaling.value, stated.rope_scaling.kind) == (None, "config")


# ------------------------------------------------------------------ wiring as trained
def test_wiring_follows_the_framework(tmp_path: Path) -> None:
    wiring = {n: resolved(draft_spec(open_checkpoint(w(tmp_path / n))), TARGET_LAYERS).wiring for n, w in WRITERS.items()}
    assert all(wiring[n].aux_layers == AUX_HF for n in WRITERS if n not in ("speculators-0.4", "eagle1", "hass"))
    assert wiring["speculators-0.4"].aux_layers == (3, 7, 10)
    assert wiring["speculators-0.4"].norm_before_residual
    assert wiring["speculators-0.4"].rope_theta == 10000.0
    assert wiring["eagle1"].aux_layers is None
    assert (wiring["eagle1"].state, wiring["hass"].state) == ("final", "final")
    assert [n for n, w in wiring.items() if w.double_norm] == ["modelopt", "mla"]
    assert wiring["speculators-0.9"].norm_output
    assert wiring["speculators-0.9"].norm_before_fc
    assert wiring["speculators-0.9"].sliding_window == 2048
    assert wiring["angelslim"].rope_theta == wiring["safeailab"].rope_theta == 10000.0
    assert wiring["modelopt-megatron"].mapping == "none"
    assert wiring["peagle"].embedding == "draft"
    assert all(w.unfilled == {} and w.position_gap == 0 for w in wiring.values())


def test_specforge_norm_output_is_the_final_norm() -> None:
    midlayer = tiny_tensors(layer="midlayer")
    on = spec_of(tiny_config(aux="nested", norm_output=True), midlayer)
    assert (on.norm_output.value, on.wiring.norm_output, on.wiring.final_norm) == (True, False, True)
    off = spec_of(tiny_config(aux="nested", norm_output=False), midlayer)
    assert (off.wiring.norm_output, off.wiring.final_norm) == (False, False)
    assert spec_of(tiny_config(aux="nested"), midlayer).wiring.final_norm
    assert spec_of(tiny_config(norm_output=True)).wiring.norm_output  # elsewhere it is what is fed back


def test_modelopt_may_have_no_final_norm() -> None:
    config = tiny_config(aux=None, eagle_config={"next_layer_regular": True, "use_last_layernorm": False})
    assert not spec_of(config, tiny_tensors(t2d=False, drop=("norm.weight",))).wiring.final_norm
    trimmed = tiny_config(aux=None, eagle_config={"next_layer_regular": True})
    assert spec_of(trimmed, tiny_tensors(t2d=False)).wiring.final_norm


@pytest.mark.parametrize(
    ("version", "stated", "trained"),
    [
        ("0.3.0", False, True),
        ("0.4.0", None, True),
        ("0.4.0", False, False),
        ("0.6.0", None, False),
        ("0.6.0", True, True),
        (None, None, False),
    ],
)
def test_residual_by_version(version: str | None, stated: bool | None, trained: bool) -> None:
    config = speculators_config(speculators_version=version, norm_before_residual=stated)
    if stated is None:
        del config["norm_before_residual"]
    assert spec_of(config).wiring.norm_before_residual is trained


def test_mapping_and_head() -> None:
    assert spec_of(tiny_config()).wiring.mapping == "offset"
    assert spec_of(tiny_config(), tiny_tensors(mapping=False)).wiring.mapping == "missing"
    assert spec_of(tiny_config(draft_vocab_size=256), tiny_tensors(draft_vocab=256)).wiring.mapping == "none"
    full = spec_of(tiny_config(draft_vocab_size=256), tiny_tensors(draft_vocab=256, lm_head=False))
    assert full.wiring.head == "target"
    assert spec_of(tiny_config(), tiny_tensors(lm_head=False)).wiring.head == "draft"


# ------------------------------------------------------------------ aux ids
def aux_of(*configs: dict[str, Any], dialect: str = "flat-export") -> AuxIds:
    names = ("config.json", "config_speculators.json")
    listed = tuple(ConfigFile(n, schema_of(c), c) for n, c in zip(names, configs, strict=False))
    return collect(listed, Dialect(dialect, "medium", ()))


def test_both_readings_are_kept_where_nothing_proves_one() -> None:
    aux = aux_of(tiny_config(aux="nested", ids=[4, 12, 25]))
    assert [(r.convention, r.hf) for r in aux.readings] == [("layer-output", (5, 13, 26)), ("hf", (4, 12, 25))]
    assert not aux.settled
    assert aux.where == "config.json: eagle_config.eagle_aux_hidden_state_layer_ids"
    top = aux_of(tiny_config(ids=[4, 12, 25]))
    assert (top.hf, top.settled) == ((4, 12, 25), False)


@pytest.mark.parametrize(
    ("place", "ids", "n", "hf"),
    [
        ("nested", [2, 30, 58], 61, (2, 30, 58)),
        ("nested", [1, 29, 57], 61, (2, 30, 58)),
        ("nested", [1, 14, 26], 30, (2, 15, 27)),
        ("nested", [2, 15, 27], 30, (2, 15, 27)),
        ("nested", [4, 12, 25], 30, (5, 13, 26)),
        ("top", [2, 15, 27], 30, (2, 15, 27)),
        ("top", [1, 14, 26], 30, (2, 15, 27)),
        ("top", [4, 12, 25], 30, (4, 12, 25)),
        ("top", [27, 2, 15], 30, (27, 2, 15)),
        ("nested", [2], 4, (3,)),
    ],
)
def test_the_reading_that_equals_the_default_layers_comes_first(place: str, ids: list[int], n: int, hf: tuple[int, ...]) -> None:
    aux = resolve(aux_of(tiny_config(aux=place, ids=ids)), n)
    assert aux.hf == hf
    assert len(aux.readings) == 2
    assert not aux.settled


@pytest.mark.parametrize(
    ("ids", "other", "convention"),
    [
        ([2, 15, 27], {"ids": [2, 15, 27]}, "hf"),
        ([1, 14, 26], {"ids": [2, 15, 27]}, "layer-output"),
        ([4, 12, 25], {"ids": [4, 12, 25]}, "hf"),
        ([4, 12, 25], {"ids": [5, 13, 26]}, "layer-output"),
        ([4, 12, 25], {"ids": None}, "hf"),
    ],
)
def test_a_second_config_settles_it(ids: list[int], other: dict[str, Any], convention: str) -> None:
    aux = resolve(aux_of(tiny_config(aux="nested", ids=ids), speculators_config(**other)), 30)
    assert aux.settled
    assert [r.convention for r in aux.readings] == [convention]


def test_a_second_config_that_names_other_layers_settles_nothing() -> None:
    aux = aux_of(tiny_config(aux="nested", ids=[2, 15, 27]), speculators_config(ids=[0, 2, 15]))
    assert not aux.settled
    assert resolve(aux, 30).hf == (2, 15, 27)


def test_ids_in_two_places_of_one_config() -> None:
    agree = tiny_config(aux="nested", ids=[4, 12, 25], eagle_aux_hidden_state_layer_ids=[5, 13, 26])
    assert (aux_of(agree).hf, aux_of(agree).settled) == ((5, 13, 26), True)
    same_numbers = tiny_config(aux="nested", ids=[4, 12, 25], eagle_aux_hidden_state_layer_ids=[4, 12, 25])
    assert (aux_of(same_numbers).hf, aux_of(same_numbers).settled) == ((4, 12, 25), False)


def test_a_recorded_trainer_settles_it() -> None:
    by_modelopt = {"eagle_aux_hidden_state_layer_ids": [2, 15, 27], "next_layer_regular": True}
    assert resolve(aux_of(tiny_config(aux=None, eagle_config=by_modelopt)), 30).hf == (3, 16, 28)
    assert aux_of(speculators_config(ids=[1, 14, 26])).hf == (1, 14, 26)
    assert aux_of(speculators_config(ids=[1, 14, 26])).settled
    assert aux_of(tiny_config(aux=None, aux_hidden_states_layer_ids=[1, 5, 8])).hf == (2, 6, 9)


def test_no_ids_mean_the_trainers_default() -> None:
    aux = aux_of(tiny_config(aux=None))
    assert (aux.raw, aux.hf) == (None, None)
    assert resolve(aux, 30).hf == default_layers(30) == (2, 15, 27)
    assert resolve(aux, None).hf is None
    assert resolve(aux, 2).hf is None
    old = aux_of(speculators_config(ids=None, speculators_version="0.3.0"))
    assert resolve(old, 30).hf == (3, 16, 28)
    four = resolved(spec_of(tiny_config(aux=None), tiny_tensors(n_aux=4)), 30)
    assert four.aux.hf is None  # the default names three


def test_resolving_twice_changes_nothing() -> None:
    spec = resolved(spec_of(tiny_config(aux="nested")), TARGET_LAYERS)
    assert spec.wiring.aux_layers == AUX_HF
    assert resolved(spec, TARGET_LAYERS).aux == spec.aux


@given(st.lists(st.integers(-3, 200), min_size=1, max_size=6), st.integers(1, 120), st.sampled_from(["top", "nested"]))
def test_resolve_only_reorders_readings(ids: list[int], n: int, place: str) -> None:
    before = aux_of(tiny_config(aux=place, ids=ids))
    after = resolve(before, n)
    assert {r.hf for r in after.readings} == {r.hf for r in before.readings}
    hits = [r.hf for r in before.readings if r.hf == default_layers(n)]
    assert len(hits) != 1 or after.hf == hits[0]


# ------------------------------------------------------------------ wrong types
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"target_hidden_size": None}, "target_hidden_size"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"vocab_size": [256]}, "vocab_size"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_parameters.rope_theta"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"norm_before_residual": 1}, "norm_before_residual"),
        ({"eagle_config": None}, "eagle_config"),
        ({"eagle_config": {"use_aux_hidden_state": "yes"}}, "eagle_config.use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [2, "15", 27]}, "eagle_aux_hidden_state_layer_ids"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
    ],
)
def test_a_wrong_type_is_listed_and_counts_as_absent(change: dict[str, Any], key: str) -> None:
    checkpoint = headers(tiny_tensors(), tiny_config(**change))
    assert [k for k, _, _ in type_problems(checkpoint.configs[0])] == [key]
    spec = draft_spec(checkpoint)
    assert not [v for v in spec.values().values() if v.kind == "config" and v.where.endswith(f": {key}")]


@pytest.mark.parametrize("name", WRITERS)
def test_what_frameworks_write_has_no_wrong_type(tmp_path: Path, name: str) -> None:
    assert [p for c in open_checkpoint(WRITERS[name](tmp_path / "d")).configs for p in type_problems(c)] == []


def test_nulls_that_readers_take_are_no_problem() -> None:
    config = tiny_config(
        head_dim=None, rope_scaling=None, sliding_window=None, num_key_value_heads=None, eagle_aux_hidden_state_layer_ids=None
    )
    assert type_problems(ConfigFile("config.json", "flat", config)) == []
    assert type_problems(ConfigFile("config.json", "speculators", speculators_config(target_hidden_size=None))) == []


def test_a_nonsense_vocabulary_stays_visible() -> None:
    spec = spec_of(tiny_config(draft_vocab_size=-1))
    assert spec.draft_vocab_size.value == -1


_MORE_KEYS = (
    *("eagle_config", "rope_scaling", "rope_parameters", "norm_output", "fc_norm", "layer_types", "sliding_window", "target_hidden_size"),
    *("dflash_config", "aux_hidden_states_layer_ids", "num_aux_hidden_states"),
)
_KEYS = st.sampled_from([*tiny_config(), *speculators_config(), *_MORE_KEYS])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**400, -(10**20), 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(_KEYS | st.text(max_size=4), _VALUES, max_size=8)


@settings(max_examples=250, deadline=None)
@given(_OBJECTS, _OBJECTS, st.booleans())
def test_no_config_raises(first: dict[str, Any], second: dict[str, Any], over: bool) -> None:
    start = tiny_config() | first if over else first
    checkpoint = headers(PLAIN if over else None, start, second)
    spec = resolved(draft_spec(checkpoint), 30)
    assert spec.values()
    for config in checkpoint.configs:
        shared_facts(config)
        type_problems(config)
    compare_configs(checkpoint.configs[0], checkpoint.configs[-1])


_NAMES = st.sampled_from([*tiny_tensors(embed=True, fc_norm=True, qk_norm=True), "midlayer.0.a", "layers.0.self_attn.qkv_proj.weight"])
_SHAPES = st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_NAMES, _SHAPES))
def test_no_shape_raises(shapes: dict[str, tuple[int, ...]]) -> None:
    infos = {k: TensorInfo(k, "BF16", s, 0, "f", 0) for k, s in shapes.items()}
    checkpoint = Checkpoint(
        path="x", files=(), tensors=infos, configs=(ConfigFile("config.json", "flat", tiny_config(drop=("head_dim",))),)
    )
    assert shape_facts(checkpoint, draft_spec(checkpoint).canonical) is not None


def test_an_empty_checkpoint_has_a_spec(tmp_path: Path) -> None:
    spec = draft_spec(open_checkpoint(write_draft(tmp_path / "d", None, {})))
    assert (spec.dialect.name, spec.algorithm) == ("unknown", "unknown")
