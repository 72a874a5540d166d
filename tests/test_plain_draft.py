"""The plain draft against a second, row-by-row implementation, its cache against its rows, and what it says where something is missing."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.model import DraftCache, PlainDraft
from eagle3diag.draft.rope import inverse_frequencies, softmax_gain
from eagle3diag.draft.rows import Rows, labelled, make_rows
from eagle3diag.draft.tables import TargetTables, load_tables
from eagle3diag.draft.weights import DraftWeights
from eagle3diag.errors import CheckpointError
from eagle3diag.hidden.model import Sample, Slot
from tests.dialects import WRITERS
from tests.factory import AUX_HF, HIDDEN, dialect_draft, tiny_config, tiny_target, tiny_tensors, trained, write_draft
from tests.plain_reference import Reference

TOKENS, STEPS = 14, 4
MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 32}


def dump(layers: tuple[int, ...] = (1, 2, 3, 5, 6, 7, 9), *, width: int = HIDDEN, tokens: int = TOKENS) -> tuple[Sample, tuple[Slot, ...]]:
    slots = (*(Slot(i, k, "aux", f"layer {k}") for i, k in enumerate(layers)), Slot(len(layers), None, "final", "final"))
    states = {s.position: 3 * trained(s.name, tokens, width) for s in slots}
    g = torch.Generator().manual_seed(1)
    ids, greedy = (torch.randint(0, 256, (tokens,), generator=g) for _ in range(2))
    mask = torch.arange(tokens) > 2
    return Sample(name="made up", token_ids=ids, states=states, loss_mask=mask, target_argmax=greedy), slots


def tiny(
    folder: Path, tensors: dict[str, Any] | None = None, **config: Any
) -> tuple[Any, DraftWeights, TargetTables, dict[str, torch.Tensor]]:
    """(spec, weights, tables, tensors) of a tiny draft and its target, float32 on disk."""
    t = tiny_tensors(dtype=torch.float32, **(tensors or {}))
    draft = open_checkpoint(write_draft(folder / "draft", t, tiny_config(**config)))
    spec = draft_spec(draft)
    tables = load_tables(open_target(tiny_target(folder / "target", weights=True)), draft, spec)
    return spec, DraftWeights.load(draft, spec), tables, t


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # tensors, config, wiring, what the reference has to be told beside the wiring
    "plain": ({}, {}, {}, {}),
    "biases": ({"bias": True}, {"attention_bias": True}, {}, {}),
    "qwen3": ({"qk_norm": True}, {}, {}, {}),
    "mla": ({"mla": True}, {"architectures": ["Eagle3DeepseekV2ForCausalLM"], **MLA}, {}, {"mla": (16, 8, 16, 16)}),
    "two layers": ({"layers": 2}, {"num_hidden_layers": 2}, {}, {"layers": 2}),
    "three layers": ({"layers": 3}, {"num_hidden_layers": 3}, {"norm_output": True}, {"layers": 3}),
    "four states": ({"n_aux": 4}, {}, {"aux_layers": (1, 3, 6, 9)}, {}),
    "one state": ({"n_aux": 1}, {}, {"aux_layers": (9,)}, {}),
    "partial rotary": ({}, {"partial_rotary_factor": 0.5}, {}, {"rotary": 8}),
    "norm_before_fc": ({"input_norm": True}, {"norm_before_fc": True}, {}, {}),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}, {}, {}),
    "fc_norm after norm_before_fc": ({"fc_norm": True, "input_norm": True}, {"fc_norm": True, "norm_before_fc": True}, {}, {}),
    "norm_before_residual": ({}, {}, {"norm_before_residual": True}, {}),
    "norm_output": ({}, {}, {"norm_output": True}, {}),
    "no final norm": ({}, {}, {"final_norm": False}, {}),
    "no final norm, normed state fed back": ({}, {}, {"final_norm": False, "norm_output": True}, {}),
    "double norm": ({}, {}, {"double_norm": True}, {}),
    "hidden first": ({}, {}, {"concat": "hidden-first"}, {}),
    "bypassed": ({}, {}, {"fc": "bypassed"}, {}),
    "sliding window": ({}, {}, {"sliding_window": 5}, {}),
    "position gap": ({}, {}, {"position_gap": 1}, {}),
    "theta": ({}, {}, {"rope_theta": 500.0}, {"theta": 500.0}),
    "all at once": (
        {"layers": 2, "bias": True, "qk_norm": True, "fc_norm": True, "n_aux": 4},
        {"num_hidden_layers": 2, "fc_norm": True},
        {"aux_layers": (2, 6, 7, 9), "norm_before_residual": True, "norm_output": True, "sliding_window": 6, "position_gap": 2},
        {"layers": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_switch_against_the_reference(case: str, tmp_path: Path) -> None:
    tensors, config, change, told = CASES[case]
    spec, weights, tables, raw = tiny(tmp_path, tensors, **config)
    wiring = replace(spec.wiring, **change)
    sample, slots = dump()
    rows = make_rows(sample, slots, wiring)
    ours = PlainDraft(weights, spec, wiring, tables).run(rows, STEPS)
    options = {f.name: getattr(wiring, f.name) for f in dataclasses.fields(Wiring)} | told
    assert tables.embedding is not None
    theirs = Reference(raw, tables.embedding, **options).run(
        rows.states.double().numpy(), [[int(t) for t in rows.tokens(s)] for s in range(STEPS)]
    )
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.logits.shape == b.shape
        error = (a.logits.double() - torch.from_numpy(b)).abs().max() / abs(b).max()
        assert error < 2e-5, f"step {step}: {error:.1e}"


@pytest.mark.parametrize("change", [{}, {"norm_output": True}, {"position_gap": 1}, {"sliding_window": 20}])
@pytest.mark.parametrize("layers", [1, 2])
def test_cached_decoding_gives_the_numbers_of_the_rows(change: dict[str, Any], layers: int, tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path, {"layers": layers}, num_hidden_layers=layers)
    wiring = replace(spec.wiring, **change)
    draft = PlainDraft(weights, spec, wiring, tables)
    sample, slots = dump()
    rows = make_rows(sample, slots, wiring)
    whole = draft.run(rows, STEPS)
    cache = DraftCache()
    for row in (0, 1, 5, 9):
        start = len(cache)
        new = slice(start, row + 1)
        out = draft.extend(rows.states[new], rows.tokens(0)[new], rows.positions[new], cache)
        torch.testing.assert_close(out.logits, whole[0].logits[new], rtol=1e-4, atol=1e-5)
        hidden, length = out.hidden[-1:], len(cache)
        for step in range(1, STEPS):
            at = slice(row, row + 1)
            one = draft.decode_step(rows.tokens(step)[at], hidden, rows.positions[at] + step + wiring.position_gap, cache)
            torch.testing.assert_close(one.logits, whole[step].logits[at], rtol=1e-4, atol=1e-5)
            hidden = one.hidden
        assert len(cache) == length + STEPS - 1
        cache.crop(length)


@pytest.mark.parametrize("tokens", ["forced", "on-policy"])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_nobody_asks_for_change_nothing(layers: int, tokens: Any, tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path, {"layers": layers}, num_hidden_layers=layers)
    draft = PlainDraft(weights, spec, spec.wiring, tables)
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)
    keep = rows.counted(STEPS)
    assert keep.tolist() == [t + 1 >= 3 and t < TOKENS - STEPS for t in range(TOKENS - 1)]
    for a, b in zip(draft.run(rows, STEPS, tokens=tokens), draft.run(rows, STEPS, tokens=tokens, where=keep), strict=True):
        torch.testing.assert_close(a.logits[keep], b.logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(a.tokens[keep], b.tokens)


def test_on_policy_feeds_what_the_draft_chose(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    draft = PlainDraft(weights, spec, spec.wiring, tables)
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)
    forced, free = draft.run(rows, 3), draft.run(rows, 3, tokens="on-policy")
    assert torch.equal(forced[0].logits, free[0].logits)
    for step in (1, 2):
        assert torch.equal(free[step].tokens, draft.to_target(free[step - 1].logits.argmax(-1)))
        assert torch.equal(forced[step].tokens, rows.tokens(step))
    same = forced[1].tokens == free[1].tokens
    assert not same.all()


def test_long_texts_are_attended_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    draft = PlainDraft(weights, spec, replace(spec.wiring, sliding_window=30), tables)
    sample, slots = dump(tokens=100)
    rows = make_rows(sample, slots, spec.wiring)
    at_once = draft.run(rows, 3)
    monkeypatch.setattr("eagle3diag.draft.layers._SCORES", 1)
    for a, b in zip(at_once, draft.run(rows, 3), strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    draft = open_checkpoint(tmp_path / "draft")
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)
    exact = PlainDraft(weights, spec, spec.wiring, tables).run(rows, 3)
    rounded = PlainDraft(DraftWeights.load(draft, spec, dtype=dtype), spec, spec.wiring, tables).run(rows, 3)
    for a, b in zip(exact, rounded, strict=True):
        assert b.logits.dtype == dtype
        assert (a.logits.double() - b.logits.double()).abs().max() / a.logits.abs().max() < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)
    here = PlainDraft(weights, spec, spec.wiring, tables).run(rows, 4)
    there = PlainDraft(DraftWeights.load(open_checkpoint(tmp_path / "draft"), spec, device="cuda"), spec, spec.wiring, tables)
    for a, b in zip(here, there.run(rows, 4, where=None), strict=True):
        assert b.logits.is_cuda
        assert (a.logits - b.logits.cpu()).abs().max() / a.logits.abs().max() < 1e-2  # TF32 matmuls
    for a, b in zip(here, there.run(rows.to("cuda"), 4, tokens="on-policy"), strict=True):
        assert a.logits.shape == b.logits.shape


def test_the_last_state_goes_through_the_target_s_final_norm(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    sample, slots = dump()
    assert tables.final_norm is not None
    last = sample.states[7].double()
    normed = (last / (last.square().mean(-1, keepdim=True) + tables.eps).sqrt() * tables.final_norm.double()).float()
    by_hand = replace(sample, states={**sample.states, 6: normed})
    as_state = replace(spec.wiring, fc="bypassed", aux_layers=(9,))
    as_final = replace(spec.wiring, fc="bypassed", aux_layers=None, state="final")
    want = PlainDraft(weights, spec, as_state, tables).run(make_rows(by_hand, slots, as_state), 2)
    found = PlainDraft(weights, spec, as_final, tables).run(make_rows(sample, slots, as_final, final_norm="pre"), 2)
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dialect", sorted({*WRITERS} - {"specforge-training", "peagle", "eagle1", "hass", "dflash", "mtp"}))
def test_a_draft_of_every_dialect_runs(dialect: str, tmp_path: Path) -> None:
    draft = open_checkpoint(dialect_draft(tmp_path / "draft", dialect))
    spec = draft_spec(draft)
    tables = load_tables(open_target(tiny_target(tmp_path / "target", weights=True)), draft, spec)
    wiring = spec.wiring if spec.wiring.aux_layers else replace(spec.wiring, aux_layers=AUX_HF)
    sample, slots = dump(tuple(range(12)))
    out = PlainDraft(DraftWeights.load(draft, spec), spec, wiring, tables).run(make_rows(sample, slots, wiring), 3)
    assert all(o.logits.isfinite().all() and o.logits.std() > 0.1 for o in out)


@pytest.mark.parametrize("dialect", ["peagle", "eagle1", "hass", "dflash", "mtp"])
def test_other_kinds_of_drafts_are_refused(dialect: str, tmp_path: Path) -> None:
    draft = open_checkpoint(dialect_draft(tmp_path / "draft", dialect))
    spec = draft_spec(draft)
    with pytest.raises(CheckpointError, match="cannot be run here"):
        PlainDraft(DraftWeights.load(draft, spec), spec, spec.wiring, load_tables(None, draft, spec))


# ---- rows ------------------------------------------------------------------------------------------------------------------------


def test_what_stands_beside_what() -> None:
    sample, slots = dump()
    rows = make_rows(sample, slots, Wiring(aux_layers=(9, 2, 6), rope_theta=1e4))
    assert rows.states.shape == (TOKENS - 1, 3, HIDDEN)
    assert torch.equal(rows.states[4, 1], sample.states[1][4])
    assert torch.equal(rows.tokens(0), sample.token_ids[1:])
    assert rows.positions.tolist() == list(range(1, TOKENS))
    assert sample.target_argmax is not None
    assert rows.expected(2)[3] == sample.target_argmax[6]
    assert rows.expected(2)[-2:].tolist() == [-1, -1]
    late = make_rows(sample, slots, Wiring(aux_layers=(2, 6, 9), token_shift=-1, state_shift=-1, rope_theta=1e4))
    assert torch.equal(late.tokens(1)[:-1], sample.token_ids[1:-1])
    assert torch.equal(late.states[1:, 0], sample.states[1][: TOKENS - 2])
    assert torch.equal(late.expected(0), rows.expected(0))


def test_final_states() -> None:
    sample, slots = dump()
    wiring = Wiring(aux_layers=(2, 6, 12), rope_theta=1e4)
    rows = make_rows(sample, slots, wiring, final_norm="pre", target_layers=12)
    assert torch.equal(rows.states[:, 2], sample.states[7][:-1])
    assert not rows.final_norm
    with pytest.raises(CheckpointError, match=r"layer 12 .* it has 1, 2, 3, 5, 6, 7, 9"):
        make_rows(sample, slots, wiring, final_norm="post", target_layers=12)
    final = Wiring(state="final", fc="absent", rope_theta=1e4)
    assert make_rows(sample, slots, final, final_norm="pre").final_norm
    assert not make_rows(sample, slots, final, final_norm="post").final_norm
    with pytest.raises(CheckpointError, match="the dump has none"):
        make_rows(sample, slots[:-1], final)


def test_unlabelled_slots_take_the_draft_s_layers() -> None:
    slots = tuple(Slot(i, None, "aux", f"plane {i}") for i in range(3))
    assert [s.hf for s in labelled(slots, (9, 6, 2))] == [9, 6, 2]
    with pytest.raises(CheckpointError, match="3 states without layer ids, and 4 are known"):
        labelled(slots, (1, 2, 3, 4))
    with pytest.raises(CheckpointError, match="none are known"):
        labelled(slots, None)


def test_a_short_state_is_told_from_its_tokens() -> None:
    sample, slots = dump()
    short = replace(sample, states={**sample.states, 1: sample.states[1][:-1]})
    with pytest.raises(CheckpointError, match=r"layer 2 has shape \[13, 64\] beside 14 tokens"):
        make_rows(short, slots, Wiring(aux_layers=AUX_HF, rope_theta=1e4))


# ---- tables, weights, sources ----------------------------------------------------------------------------------------------------


def test_tables_name_the_first_unknown_id(tmp_path: Path) -> None:
    _, _, whole, _ = tiny(tmp_path)
    assert whole.whole
    assert whole.embedding is not None
    few = replace(whole, token_ids=torch.tensor([2, 5, 9]), embedding=whole.embedding[[2, 5, 9]], head=None)
    ids = torch.tensor([[9, 2], [5, 5]])
    assert torch.equal(few.embed(ids), whole.embed(ids))
    assert few.known(torch.tensor([1, 2, 200, 5])).tolist() == [False, True, False, True]
    with pytest.raises(CheckpointError, match=r"no embedding row for token id 7; it has 3 selected rows"):
        few.embed(torch.tensor([9, 7, 8]))
    with pytest.raises(CheckpointError, match="no head of the target there"):
        few.head_rows(torch.tensor([2]))
    with pytest.raises(CheckpointError, match=r"token id 256; it has rows 0 to 255"):
        whole.embed(torch.tensor([256]))


def test_the_draft_s_own_embedding_stands_in(tmp_path: Path) -> None:
    draft = open_checkpoint(write_draft(tmp_path, tiny_tensors(embed=True), tiny_config()))
    spec = draft_spec(draft)
    tables = load_tables(None, draft, spec)
    assert tables.source == "draft"
    assert tables.embedding is not None
    assert tables.embedding.shape == (256, HIDDEN)


def test_fused_projections_are_split(tmp_path: Path) -> None:
    _, weights, _, raw = tiny(tmp_path / "apart", {"bias": True})
    at = "layers.0.self_attn."
    fused = {k: v for k, v in raw.items() if not any(f".{p}_proj." in k for p in ("q", "k", "v", "gate", "up"))}
    for end in ("weight", "bias"):
        fused[f"{at}qkv_proj.{end}"] = torch.cat([raw[f"{at}{p}_proj.{end}"] for p in "qkv"])
    fused["layers.0.mlp.gate_up_proj.weight"] = torch.cat([raw[f"layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    draft = open_checkpoint(write_draft(tmp_path / "fused", fused, tiny_config()))
    again = DraftWeights.load(draft, draft_spec(draft))
    assert set(again.tensors) == set(weights.tensors)
    assert all(torch.equal(again.tensors[k], v) for k, v in weights.tensors.items())


@pytest.mark.parametrize(
    ("change", "columns"),
    [
        ({"mapping": "offset"}, "own"),
        ({"mapping": "t2d"}, "own"),
        ({"mapping": "missing"}, "first"),
        ({"mapping": "absolute"}, "offsets"),
        ({"mapping": "none", "head": "target"}, "all"),
    ],
)
def test_mappings(change: dict[str, Any], columns: str, tmp_path: Path) -> None:
    spec, weights, tables, raw = tiny(tmp_path)
    draft = PlainDraft(weights, spec, replace(spec.wiring, **change), tables)
    own = raw["d2t"] + torch.arange(64)
    want = {"own": own, "first": torch.arange(64), "offsets": raw["d2t"], "all": torch.arange(256)}[columns]
    assert torch.equal(draft.target_ids, want)


def test_heads(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)

    def logits(tables: TargetTables = tables, **change: Any) -> torch.Tensor:
        return PlainDraft(weights, spec, replace(spec.wiring, **change), tables).run(rows, 1)[0].logits

    own = logits()
    torch.testing.assert_close(logits(head="target-rows"), own, rtol=2e-2, atol=2e-2)  # the target's rows, rounded to bfloat16
    whole = logits(head="target", mapping="none")
    torch.testing.assert_close(logits(head="target-first-rows"), whole[:, :64])
    torch.testing.assert_close(whole[:, weights.tensors["d2t"] + torch.arange(64)], logits(head="target-rows"))
    assert logits(head="embedding", mapping="none").shape == (TOKENS - 1, 256)
    assert tables.head is not None
    part = replace(tables, token_ids=torch.arange(10, 256), embedding=None, head=tables.head[10:])
    with pytest.raises(CheckpointError, match="246 rows of it is at hand"):
        PlainDraft(weights, spec, replace(spec.wiring, head="target"), part)
    cut = PlainDraft(weights, spec, replace(spec.wiring, head="target-first-rows"), part)
    assert cut.head_rows_missing == 10


def test_start_values_follow_the_seed_alone(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    sample, slots = dump()
    rows = make_rows(sample, slots, spec.wiring)

    def logits(seed: int, **unfilled: str) -> torch.Tensor:
        names = {k.replace("_dot_", "."): v for k, v in unfilled.items()}
        return PlainDraft(weights, spec, replace(spec.wiring, unfilled=names), tables, seed=seed).run(rows, 1)[0].logits

    assert torch.equal(logits(1, fc_dot_weight="uninitialised"), logits(1, fc_dot_weight="random"))
    assert not torch.equal(logits(1, fc_dot_weight="random"), logits(2, fc_dot_weight="random"))
    assert not torch.equal(logits(1, norm_dot_weight="ones"), logits(1))
    assert logits(1, norm_dot_weight="zeros").abs().max() == 0
    absent = PlainDraft(weights.without(["fc.weight"]), spec, replace(spec.wiring, unfilled={"fc.weight": "random"}), tables, seed=1)
    assert torch.equal(absent.run(rows, 1)[0].logits, logits(1, fc_dot_weight="random"))


def test_what_cannot_be_run_is_said_in_one_line(tmp_path: Path) -> None:
    spec, weights, tables, _ = tiny(tmp_path)
    sample, slots = dump()

    def run(message: str, tables: TargetTables = tables, **change: Any) -> None:
        wiring = replace(spec.wiring, **change)
        with pytest.raises(CheckpointError, match=message):
            PlainDraft(weights, spec, wiring, tables).run(make_rows(sample, slots, wiring, final_norm="pre", target_layers=12), 1)

    run("fc takes width 192, the states are 2 times 64 wide", aux_layers=(2, 6))
    run(r"layer 4 \(HF index\) is not in the dump", aux_layers=(2, 4, 6))
    run("rope base", rope_theta=None)
    run(r"needs input_norm\.weight", norm_before_fc=True)
    run(r"needs embed_tokens\.weight", embedding="draft")
    run("rope type wobbly is not known", rope_scaling={"rope_type": "wobbly"})
    run(r"type llama3: factor is None", rope_scaling={"rope_type": "llama3"})
    run("need the target's final norm, and none is at hand", replace(tables, final_norm=None), aux_norm="final")
    run("has shape", replace(tables, embedding=torch.zeros(256, 32)))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.self_attn.q_proj.weight", (64, 64), r"has shape \[64, 64\], this draft needs \[64, 128\]"),
        ("layers.0.self_attn.k_proj.weight", (24, 128), "24 rows, no multiple of the head size 16"),
        ("layers.0.self_attn.k_proj.weight", (48, 128), "4 heads cannot share 3 key-value heads"),
        ("layers.0.self_attn.o_proj.weight", (64, 32), r"needs \[64, 64\]"),
        ("layers.0.mlp.up_proj.weight", (96, 64), r"needs \[128, 64\]"),
        ("layers.0.hidden_norm.weight", (63,), r"needs \[64\]"),
        ("fc.weight", (32, 192), r"has shape \[32, 192\], this draft needs \[64, 192\]"),
        ("lm_head.weight", (64, 32), r"the head has shape \[64, 32\], the draft width 64"),
        ("d2t", (63,), "d2t names 63 target ids, the head has 64 rows"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    t = tiny_tensors()
    t[name] = torch.zeros(shape, dtype=t[name].dtype)
    draft = open_checkpoint(write_draft(tmp_path / "draft", t, tiny_config()))
    spec = draft_spec(draft)
    tables = load_tables(open_target(tiny_target(tmp_path / "target", weights=True)), draft, spec)
    with pytest.raises(CheckpointError, match=message):
        PlainDraft(DraftWeights.load(draft, spec), spec, spec.wiring, tables)


# ---- rope ------------------------------------------------------------------------------------------------------------------------

#: scaling -> (inverse frequencies, gain) by transformers 5.19.0: 16 rotated dimensions, base 10000, 256 positions configured, 512 in use
ROPES: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "linear": ({"factor": 4.0}, [0.25, 0.0790569, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05], 1.0),
    "dynamic": ({"factor": 4.0}, [1.0, 0.251274, 0.0631385, 0.015865, 0.00398647, 0.0010017, 0.0002517, 6.32455e-05], 1.0),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.244385, 0.0130423, 0.00395285, 0.00125, 0.000395285, 0.000125, 3.95285e-05],
        1.0,
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        [1.0, 0.237171, 0.05, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.138629436111989,
    ),
    "yarn, all told": (
        {
            **{"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False},
            "original_max_position_embeddings": 128,
        },
        [1.0, 0.181341, 0.00336372, 0.000790569, 0.00025, 7.90569e-05, 2.5e-05, 7.90569e-06],
        1.0879546075066122,
    ),
    "longrope": (
        {
            **{"factor": 4.0, "original_max_position_embeddings": 64},
            **{"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
        },
        [0.5, 0.105409, 0.025, 0.00632456, 0.00166667, 0.000451754, 0.000125, 3.51364e-05],
        1.1547005383792517,
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_types(name: str) -> None:
    scaling, want, gain = ROPES[name]
    found, factor = inverse_frequencies(16, 10000.0, {"rope_type": name.split(",")[0], **scaling}, max_position=256, length=512)
    torch.testing.assert_close(found, torch.tensor(want), rtol=1e-5, atol=0)
    assert factor == pytest.approx(gain)


def test_mrope_with_text_alone_is_the_ordinary_rotation() -> None:
    plain = inverse_frequencies(16, 1e4)
    mrope = inverse_frequencies(16, 1e4, {"type": "mrope", "mrope_section": [2, 3, 3]})
    assert torch.equal(plain[0], mrope[0])
    assert plain[1] == mrope[1] == 1.0


def test_dynamic_changes_nothing_within_its_positions() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    torch.testing.assert_close(inverse_frequencies(16, 1e4, scaling, max_position=256, length=200)[0], inverse_frequencies(16, 1e4)[0])


def test_mla_scales_its_softmax_under_yarn() -> None:
    assert softmax_gain({"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}) == pytest.approx(1.8738542070926265)
    assert softmax_gain({"rope_type": "linear", "factor": 40.0}) == softmax_gain(None) == 1.0


def test_rows_move_to_a_device() -> None:
    sample, slots = dump()
    moved = make_rows(sample, slots, Wiring(aux_layers=AUX_HF, rope_theta=1e4)).to("cpu")
    assert isinstance(moved, Rows)
    assert moved.states.device.type == "cpu"
