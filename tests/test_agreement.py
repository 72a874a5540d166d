"""Agreement on the sample: every number against one computed by hand from the draft's own outputs, and bounds that hold what is exact."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.draft.agreement import Agreement, agree_bench, agreement
from eagle3diag.draft.answers import answers
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.tables import TargetTables
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.report.opened import opened
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_agr import SAMPLE, bench


@pytest.fixture(scope="module")
def one() -> Bench:
    return bench(1)


@pytest.fixture(scope="module")
def found(one: Bench) -> Agreement:
    return agree_bench(one)


def test_rates_by_hand(one: Bench, found: Agreement) -> None:
    rows, out = one.outputs(0, one.base)
    ids, right = one.ids(one.base), []
    sample, _ = one.samples[0]
    assert sample.target_argmax is not None
    assert sample.loss_mask is not None
    for step, o in enumerate(out):
        hits = []
        for t in range(len(sample.token_ids) - 4):
            if sample.loss_mask[t + 1]:
                hits.append(int(ids[o.logits[t].argmax()]) == int(sample.target_argmax[t + 1 + step]))
        right.append(torch.tensor(hits))
    n = len(right[0])
    assert found.rows == n == int(rows.counted(4).sum())
    alive = torch.ones(n, dtype=torch.bool)
    for step, s in enumerate(found.steps):
        before = int(alive.sum())
        alive &= right[step]
        assert s.marginal == pytest.approx(float(right[step].float().mean()))
        assert s.joint == pytest.approx(float(alive.float().mean()))
        assert s.conditional == (pytest.approx(int(alive.sum()) / before) if before else None)
    assert found.expected_length[4] == pytest.approx(1 + sum(s.joint for s in found.steps))
    low, high = found.interval[4]
    assert low < found.expected_length[4] < high


def test_acceptance_and_divergence_by_hand(one: Bench, found: Agreement) -> None:
    sample, _ = one.samples[0]
    rows, out = one.outputs(0, one.base)
    ids = one.ids(one.base)
    assert sample.topk_ids is not None
    assert sample.topk_logprobs is not None
    assert one.tables.final_norm is not None
    final = next(s for s in one.slots if s.role == "final")
    h = sample.states[final.position].double()
    h = h / (h.square().mean(-1, keepdim=True) + one.tables.eps).sqrt() * one.tables.final_norm.double()
    logits = h @ one.tables.head_rows(ids).double().T
    first = sample.topk_ids[:, 0].long()
    scale = (h * one.tables.head_rows(first).double()).sum(-1) - sample.topk_logprobs[:, 0].double()
    p = (logits - scale[:, None]).exp()
    assert found.distribution == "exact"
    for step in (0, 2):
        overlap, inside, kl = [], [], []
        for t in torch.nonzero(rows.counted(4)).flatten().tolist():
            q, there = torch.softmax(out[step].logits[t].double(), -1), p[t + 1 + step]
            part = there / there.sum()
            overlap.append(torch.minimum(there, q).sum())
            inside.append(torch.minimum(part, q).sum())
            kl.append((part * (part / q).log()).sum())
        s = found.steps[step]
        assert s.expected_acceptance == pytest.approx(float(torch.stack(overlap).mean()), rel=1e-4)
        assert s.expected_acceptance_restricted == pytest.approx(float(torch.stack(inside).mean()), rel=1e-4)
        assert s.kl == pytest.approx(float(torch.stack(kl).mean()), rel=1e-4)
    assert found.coverage_mass is not None
    assert 0.5 < found.coverage_mass < 1


def test_stored_probabilities_are_those_of_the_final_state(one: Bench) -> None:
    """The scale is taken from the first of the stored top k; the others have to come out right."""
    sample, _ = one.samples[0]
    ids = one.ids(one.base)
    a = answers(sample, one.slots, one.status, one.tables, ids)
    assert a.logprobs is not None
    assert sample.topk_ids is not None
    assert sample.topk_logprobs is not None
    column = torch.full((int(max(ids.max(), sample.topk_ids.max())) + 1,), -1)
    column[ids] = torch.arange(len(ids))
    place = column[sample.topk_ids[:, 1].long()]
    there = place >= 0
    got = a.logprobs.gather(1, place.clamp(min=0)[:, None])[:, 0]
    assert int(there.sum()) > 50
    assert torch.allclose(got[there], sample.topk_logprobs[:, 1].float()[there], atol=0.05)


def test_top_k_alone_gives_bounds_that_hold_the_exact_value(one: Bench, found: Agreement) -> None:
    t = one.tables
    blind = replace(one, tables=TargetTables(path="rows", vocab=t.vocab, token_ids=t.token_ids, embedding=t.embedding), _models={})
    bounded = agree_bench(blind, on_policy=False)
    assert bounded.distribution == "top k"
    for exact, s in zip(found.steps, bounded.steps, strict=True):
        assert s.joint == exact.joint
        assert s.expected_acceptance is None
        assert s.bounds is not None
        assert exact.expected_acceptance is not None
        low, high = s.bounds
        assert low - 1e-3 <= exact.expected_acceptance <= high + 1e-3
        assert high - low < 0.3


def test_without_any_stored_answer_the_head_says_it(one: Bench, found: Agreement) -> None:
    """Formats that store states alone: greedy tokens from the final state over the rows at hand, probabilities bounded from above."""
    sample, _ = one.samples[0]
    bare = replace(sample, target_argmax=None, topk_ids=None, topk_logprobs=None)
    a = answers(bare, one.slots, one.status, one.tables, one.ids(one.base))
    assert sample.target_argmax is not None
    assert float((a.greedy == sample.target_argmax).float().mean()) > 0.97
    assert a.scale == "upper bound"
    assert "rows at hand" in a.source
    again = agree_bench(replace(one, samples=((bare, a.greedy),)), on_policy=False)
    assert again.steps[0].marginal == pytest.approx(found.steps[0].marginal, abs=0.02)
    assert again.steps[0].bounds is not None
    assert again.steps[0].bounds[1] >= (found.steps[0].expected_acceptance or 0) - 1e-3


def test_nothing_that_tells_the_target_is_one_line(one: Bench) -> None:
    sample, _ = one.samples[0]
    bare = replace(sample, target_argmax=None, topk_ids=None, topk_logprobs=None)
    with pytest.raises(CheckpointError, match="--target"):
        answers(bare, one.slots, one.status, TargetTables(path="x"))


def test_rows_that_are_not_finite_never_count_as_right(tmp_path: Path) -> None:
    """NaN on both sides has one argmax, the first token: a dump of NaN would be a perfect one."""
    draft, target = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config()), tiny_target(tmp_path / "target", weights=True)
    g = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        states = torch.randn(30, 4 * 64, generator=g)
        if name == "b":
            states[7, 70] = float("inf")
        parts = {"hidden_states": states[:, :64].contiguous(), "aux_hidden_states": states[:, 64:].contiguous()}
        save_file({"input_ids": torch.arange(30), **parts}, tmp_path / f"{name}.safetensors")
    whole = opened(str(draft), str(tmp_path / "b.safetensors"), str(target))
    with pytest.raises(CheckpointError, match="no row counts: 1 samples, 0 too short, 1 with NaN or Inf in a state, the rest masked out"):
        Bench.prepare(whole.checkpoint, whole.spec, whole.dump, whole.target)
    (tmp_path / "dumps").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").rename(tmp_path / "dumps" / f"{name}.safetensors")
    both = opened(str(draft), str(tmp_path / "dumps"), str(target))
    left = Bench.prepare(both.checkpoint, both.spec, both.dump, both.target)
    assert [s.name for s, _ in left.samples] == ["a"]
    assert "1 samples with NaN or Inf in a state left out" in left.notes


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"steps": 33}, {"max_rows": 0}])
def test_steps_and_rows_have_bounds(wrong: dict[str, int]) -> None:
    this = opened()
    with pytest.raises(UsageError, match=r"steps is -?\d+: a chain has 1 to 32|rows is 0: at least 1"):
        Bench.prepare(this.checkpoint, this.spec, this.dump, this.target, **wrong)


def test_a_dump_of_a_target_of_another_width_is_one_line(one: Bench) -> None:
    sample, _ = one.samples[0]
    wide = replace(
        sample, target_argmax=None, topk_ids=None, topk_logprobs=None, states={k: s.repeat(1, 2) for k, s in sample.states.items()}
    )
    with pytest.raises(CheckpointError, match=r"the final state is 1152 wide, the head of the target takes 576: the dump is of another"):
        answers(wide, one.slots, one.status, one.tables)


def test_on_policy_agrees_where_chains_live(found: Agreement) -> None:
    """The text is the target's own greedy text: as long as a chain is right, it is fed the text."""
    assert found.follows > 0.99
    for forced, policy in zip(found.steps, found.on_policy, strict=True):
        assert policy.joint == pytest.approx(forced.joint, abs=1e-9)
        assert policy.marginal <= forced.marginal + 0.02


def test_restricted_and_coverage(found: Agreement) -> None:
    first = found.steps[0]
    assert first.marginal_restricted is not None
    assert first.marginal_restricted >= first.marginal
    assert first.marginal <= found.coverage < 1
    assert found.misses_outside is not None
    assert found.misses_outside == pytest.approx((1 - found.coverage) / (1 - first.marginal))


def test_parts_add_up(found: Agreement) -> None:
    position = found.parts["position"]
    assert sum(p.n for p in position) == found.rows
    assert sum(p.n * p.marginal for p in position) / found.rows == pytest.approx(found.steps[0].marginal)
    classes = {p.name: p for p in found.parts["class"]}
    assert classes["outside the draft's vocabulary"].marginal == 0
    assert classes["target sure (p of at least 0.9)"].marginal > classes["target in doubt (p below 0.5)"].marginal
    new, seen = classes["new to the text"], classes["in the 128 tokens before"]
    assert new.n + seen.n == found.rows


def test_json_names_every_definition(found: Agreement) -> None:
    data = found.to_dict()
    assert data["schema"] == 1
    assert [s["step"] for s in data["steps"]] == [0, 1, 2, 3]
    for key in ("joint", "conditional", "marginal", "expected_acceptance", "kl", "expected_length", "coverage"):
        assert key in data["definition"]
    assert set(data["expected_length"]) == {"1", "2", "3", "4"}


def test_a_dump_and_nothing_else() -> None:
    """The dump's own choices are enough where the draft brings an embedding; here it does not, and that is said in one line."""
    draft = open_checkpoint(SAMPLE / "draft")
    with pytest.raises(CheckpointError, match="target"):
        agreement(draft, draft_spec(draft), open_dump(SAMPLE / "dumps"), None, max_rows=1)


def test_rows_that_a_capture_left_beside_its_dump(tmp_path: Path, found: Agreement) -> None:
    dump = tmp_path / "dump"
    shutil.copytree(SAMPLE / "target", dump / "target")
    shutil.copy(SAMPLE / "dumps" / "sample_0.safetensors", dump)
    draft = open_checkpoint(SAMPLE / "draft")
    again = agreement(draft, draft_spec(draft), open_dump(dump / "sample_0.safetensors"), on_policy=False)
    assert again.steps == found.steps


def test_short_samples_and_masks_are_named(one: Bench) -> None:
    dump = open_dump(SAMPLE / "dumps")
    masked = replace(dump, loader=lambda ref: replace(s := dump.read(ref), loss_mask=torch.zeros(len(s.token_ids), dtype=torch.bool)))
    draft = open_checkpoint(SAMPLE / "draft")
    with pytest.raises(CheckpointError, match="no row counts"):
        Bench.prepare(draft, one.spec, masked, weights=one.weights, tables=one.tables)


def test_samples_are_cut_behind_the_first_that_counts(one: Bench) -> None:
    dump = open_dump(SAMPLE / "dumps")
    draft = open_checkpoint(SAMPLE / "draft")
    cut = Bench.prepare(draft, one.spec, dump, max_rows=1, max_answer=40, weights=one.weights, tables=one.tables)
    a, b = cut.run(0, cut.base), one.run(0, one.base)
    assert 30 < len(a) <= 40
    assert torch.equal(a.right, b.right[: len(a)])
    assert torch.allclose(one.glance(one.base, steps=2).nll, b.nll[:65, :2], atol=1e-4)
