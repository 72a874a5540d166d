"""The DMP rules: every fault in every format gives its code and no other; clean dumps and small ones give none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden import scan as scan_module
from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case, Report
from eagle3diag.rules.registry import run
from tests import fixtures_dmp as f
from tests.factory import target_tables, tiny_config, tiny_target, tiny_tensors, write_draft


def found(case: Case) -> dict[str, str]:
    """Severity by code of errors and warnings."""
    report = run(case, ["DMP"])
    assert not [o for o in report.outcomes if o.status == "crashed"], [o.why for o in report.outcomes if o.status == "crashed"]
    return {x.code: x.severity.value for x in report.findings if x.severity.value != "info"}


def why(report: Report, code: str) -> str:
    return next(o.why for o in report.outcomes if o.code == code)


FAULTS: dict[str, tuple[f.Change, str]] = {
    "short": (f.short, "DMP602"),
    "late": (f.late, "DMP605"),
    "early": (f.early, "DMP605"),
    "swapped": (f.swapped, "DMP605"),
    "hole": (f.hole, "DMP603"),
    "zeros": (f.zeros, "DMP604"),
    "bits": (f.bits, "DMP604"),
    "noise": (f.noise, "DMP604"),
    "reordered": (f.reordered, "DMP606"),
    "fewer": (f.fewer, "DMP606"),
    "other side": (f.other_side, "DMP607"),
    "mask zero": (f.mask_zero, "DMP608"),
    "mask one": (f.mask_one, "DMP608"),
    "rotated": (f.rotated, "DMP609"),
    "exploded": (f.exploded, "DMP609"),
    "leaked": (f.leaked, "DMP610"),
}


def _told(form: str, fault: str) -> bool:
    """Whether a format can show a fault: no mask no mask fault, and nobody knows which side of the norm 0.3 and 0.4 stored."""
    return not (fault.startswith("mask") and not f.FORMATS[form][2]) and not (fault == "other side" and form == "speculators-legacy")


@pytest.mark.parametrize("form", f.FORMATS)
def test_clean_dumps_are_quiet(form: str, tmp_path: Path) -> None:
    assert found(f.case_of(tmp_path / "a", form)) == {}
    assert found(f.case_of(tmp_path / "b", form, target=False)) == {}


@pytest.mark.parametrize(("form", "fault"), [(a, b) for a in f.FORMATS for b in FAULTS if _told(a, b)])
def test_one_fault_one_code(form: str, fault: str, tmp_path: Path) -> None:
    change, code = FAULTS[fault]
    assert set(found(f.case_of(tmp_path, form, change, n=2))) == {code}


# ------------------------------------------------------------------ the cases of each rule


def test_a_path_that_is_no_dump_is_a_finding_and_the_draft_is_judged(tmp_path: Path) -> None:
    (tmp_path / "dump.pt").write_bytes(b"nothing")
    report = run(make_case(f.SAMPLE / "draft", dump=tmp_path / "dump.pt"), ["DMP", "KEY", "AGR"])
    assert {x.code for x in report.findings if x.severity.value == "error"} == {"DMP601"}
    assert why(report, "DMP603") == "no sample of the dump can be read"
    assert "KEY201" in {o.code for o in report.outcomes if o.status == "ran"}


def test_nothing_there_is_no_finding(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        make_case(f.SAMPLE / "draft", dump=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="headers-only"):
        make_case(f.SAMPLE / "draft", dump=tmp_path, headers_only=True)


def test_without_a_dump_every_rule_is_skipped() -> None:
    report = run(make_case(f.SAMPLE / "draft"), ["DMP"])
    assert {o.status for o in report.outcomes} == {"skipped"}
    assert "--dump" in why(report, "DMP605")


def test_one_cut_file_is_named_and_the_others_are_judged(tmp_path: Path) -> None:
    (found_,) = run(f.half_file(tmp_path), ["DMP"]).findings
    assert found_.code == "DMP601"
    assert "hs_1" in found_.title
    assert found_.evidence["in_all"] == 1


def test_the_missing_end_is_told(tmp_path: Path) -> None:
    def cut(s: f.States, i: int) -> f.States:
        return f.both(s, lambda x: x[31:]) if i == 1 else s

    (one,) = run(f.case_of(tmp_path / "a", "speculators", f.short), ["DMP602"]).findings
    assert "161 rows of states for 192 tokens" in one.title
    assert one.evidence["missing"] == "hs_1: the states of the last 31 tokens are missing"
    (two,) = run(f.case_of(tmp_path / "b", "speculators", cut), ["DMP602"]).findings
    assert two.evidence["missing"] == "hs_1: the states of the first 31 tokens are missing"


def test_inf_in_the_first_row_alone_is_float16(tmp_path: Path) -> None:
    def overflow(s: f.States, i: int) -> f.States:
        aux = s.aux.clone()
        aux[0, 1, 5] = float("inf")
        return replace(s, aux=aux)

    (one,) = run(f.case_of(tmp_path, change=overflow), ["DMP603"]).findings
    assert "Inf in row 0" in one.title
    assert "bfloat16" in one.remedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_random_bits_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]

    def bits(s: f.States, i: int) -> f.States:
        g = torch.Generator().manual_seed(i)

        def tail(x: torch.Tensor) -> torch.Tensor:
            out, n = x.to(dtype, copy=True), 30
            info = torch.iinfo(whole)
            out[-n:] = torch.randint(info.min, info.max, out[-n:].shape, generator=g, dtype=whole).view(dtype)
            return out

        return f.both(s, tail)

    report = run(f.case_of(tmp_path, change=bits), ["DMP"])
    assert {x.code for x in report.findings} == {"DMP604"}
    assert "rows 162 to 191 at the end" in report.findings[0].title


def test_a_shift_is_named_with_its_size_and_direction(tmp_path: Path) -> None:
    (one,) = run(f.case_of(tmp_path / "a", change=f.late), ["DMP605"]).findings
    assert one.title == "states are 1 row late against the tokens in 3 of 3 samples"
    assert one.evidence["shift"] == -1
    (two,) = run(f.case_of(tmp_path / "b", change=f.early), ["DMP605"]).findings
    assert two.title.startswith("states are 3 rows early")
    assert "in row t to row t - 1," in one.remedy
    assert "in row t to row t + 3," in two.remedy


@pytest.mark.parametrize("moved", [f.late, f.early])
def test_the_remedy_of_a_shift_mends_it(tmp_path: Path, moved: f.Change) -> None:
    (one,) = run(f.case_of(tmp_path / "a", change=moved), ["DMP605"]).findings
    sign, by = re.findall(r"to row t ([+-]) (\d+),", one.remedy)[0]

    def mended(s: f.States, i: int) -> f.States:
        return f.both(moved(s, i), lambda x: x.roll(int(sign + by), 0))

    assert run(f.case_of(tmp_path / "b", change=mended), ["DMP605"]).findings == ()


def test_rows_a_shift_left_empty_are_the_shifts(tmp_path: Path) -> None:
    def padded(s: f.States, i: int) -> f.States:
        return f.both(s, lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]))

    assert set(found(f.case_of(tmp_path, change=padded))) == {"DMP605"}


def test_swapped_samples_are_named(tmp_path: Path) -> None:
    (one,) = run(f.case_of(tmp_path, change=f.swapped, target=False), ["DMP605"]).findings
    assert one.evidence["kind"] == "swapped"
    assert {(s["sample"], s["fits"]) for s in one.evidence["samples"]} == {("hs_0", "hs_1"), ("hs_1", "hs_0")}


def test_half_a_sample_and_a_far_shift(tmp_path: Path) -> None:
    def half(s: f.States, i: int) -> f.States:
        return f.both(s, lambda x: torch.cat([x[:96], torch.roll(x[96:], 1, 0)])) if i == 2 else s

    (one,) = run(f.case_of(tmp_path / "a", change=half), ["DMP605"]).findings
    assert "rows 96 to 191 only" in one.title
    (two,) = run(f.case_of(tmp_path / "b", change=lambda s, i: f.both(s, lambda x: torch.roll(x, 20, 0))), ["DMP605"]).findings
    assert two.title.startswith("states are 20 rows late")


def test_the_order_is_the_drafts_own(tmp_path: Path) -> None:
    config = json.loads((f.SAMPLE / "draft" / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [27, 2, 15]
    draft = write_draft(tmp_path / "draft", load_file(f.SAMPLE / "draft" / "model.safetensors"), config)
    asked = f.write(tmp_path / "a", "speculators", f.reordered)
    assert not run(make_case(draft, dump=asked, target=f.SAMPLE / "target"), ["DMP606", "DMP609"]).findings
    (one,) = run(make_case(draft, dump=f.write(tmp_path / "b"), target=f.SAMPLE / "target"), ["DMP606"]).findings
    assert "another order of depth" in one.title


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((3, 16, 28), "2, 15, 27 missing"),
        ((2, 15), "27 missing"),
        ((0, 1, 2, 3, 14, 15, 16, 26, 27, 28), None),
    ],
)
def test_recorded_layers_must_hold_the_drafts(layers: tuple[int, ...], says: str | None, tmp_path: Path) -> None:
    findings = run(f.case_of(tmp_path, "portable", layers=layers), ["DMP606"]).findings
    assert [says in x.title for x in findings] == ([True] if says else [])


def test_layers_under_other_numbers(tmp_path: Path) -> None:
    every = (0, 1, 2, 3, 14, 15, 16, 26, 27, 28)

    def exchanged(s: f.States, i: int) -> f.States:
        return replace(s, hf=tuple({2: 27, 27: 2}.get(k, k) for k in s.hf))

    (one,) = run(f.case_of(tmp_path / "a", "portable", exchanged, layers=every), ["DMP606", "DMP609"]).findings
    assert "hold each other's layer" in one.title
    assert one.evidence["exchanged"] == ["hidden_states.2", "hidden_states.27"]
    late = f.case_of(tmp_path / "b", "portable", lambda s, i: replace(s, hf=tuple(k - 1 for k in s.hf)), layers=every[1:])
    (two,) = run(late, ["DMP606"]).findings
    assert "does not hold the embedding rows" in two.title
    early = f.case_of(tmp_path / "c", "portable", lambda s, i: replace(s, hf=tuple(k + 1 for k in s.hf)), layers=every)
    (three,) = run(early, ["DMP606"]).findings
    assert "hidden_states.1 stands for HF 1 but holds the embedding rows" in three.title


def test_an_embedding_among_unnamed_slots_and_twice_the_same(tmp_path: Path) -> None:
    (one,) = run(f.case_of(tmp_path / "a", layers=(0, 2, 15)), ["DMP606"]).findings
    assert "holds the embedding rows" in one.title
    (two,) = run(f.case_of(tmp_path / "b", change=lambda s, i: replace(s, aux=s.aux[:, [0, 2, 2]])), ["DMP606"]).findings
    assert "hold the same bits" in two.title


def test_the_width_must_be_the_drafts(tmp_path: Path) -> None:
    def narrow(s: f.States, i: int) -> f.States:
        return f.both(s, lambda x: x[..., :512].contiguous())

    (one,) = run(f.case_of(tmp_path, "portable", narrow), ["DMP606"]).findings
    assert one.title == "states are 512 wide, the draft takes 576"


def test_the_side_of_the_norm_needs_its_weight_and_a_format_that_says(tmp_path: Path) -> None:
    assert run(f.case_of(tmp_path / "a", target=False), ["DMP607"]).outcomes[0].status == "skipped"
    config_only = tiny_target(tmp_path / "target", hidden_size=576, num_hidden_layers=30, vocab_size=49152)
    report = run(make_case(f.SAMPLE / "draft", dump=f.write(tmp_path / "b"), target=config_only), ["DMP607"])
    assert "final norm" in why(report, "DMP607")
    report = run(f.case_of(tmp_path / "c", "speculators-legacy"), ["DMP607"])
    assert "does not say" in why(report, "DMP607")
    (one,) = run(f.case_of(tmp_path / "d", "speculators", f.other_side), ["DMP607"]).findings
    assert "after the target's norm, speculators means it before: RMS(h / w) 1" in one.title


def test_one_empty_mask_of_many_is_only_worth_knowing(tmp_path: Path) -> None:
    def one(s: f.States, i: int) -> f.States:
        return f.mask_zero(s, i) if i == 1 else s

    (only,) = run(f.case_of(tmp_path, "portable", one), ["DMP608"]).findings
    assert only.severity.value == "info"


def test_thinking_left_out_of_the_mask(tmp_path: Path) -> None:
    target = f.thinking_target(tmp_path)
    bad, good = (f.write(tmp_path / n, "specforge", f.thought(m)) for n, m in (("bad", False), ("good", True)))
    (one,) = run(make_case(f.SAMPLE / "draft", dump=bad, target=target), ["DMP608"]).findings
    assert "the thinking is left out of the loss mask" in one.title
    assert one.evidence["tags"] == [3, 4]
    assert not run(make_case(f.SAMPLE / "draft", dump=good, target=target), ["DMP608"]).findings
    assert not run(make_case(f.SAMPLE / "draft", dump=bad, target=f.SAMPLE / "target"), ["DMP608"]).findings  # nobody names the tags


def test_a_mask_of_another_shape(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    for i in range(2):
        s = f.sample(i)
        state = f.final_norm(s.final)[None]
        square = s.mask[None, :, None].long().expand(1, -1, 2).contiguous()
        torch.save(
            {"input_ids": s.ids, "loss_mask": square, "hidden_state": state, "aux_hidden_state": s.aux.flatten(1)[None]}, dump / f"{i}.ckpt"
        )
    (one,) = run(make_case(f.SAMPLE / "draft", dump=dump), ["DMP608"]).findings
    assert "loss_mask" in one.title


def test_plain_text_is_all_trained_on(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    s = f.sample(0)
    t = {f"hidden_states.{k}": s.aux[:, n].contiguous() for n, k in enumerate(s.hf)}
    t |= {"input_ids": s.ids, "final_prenorm": s.final, "loss_mask": torch.ones(192, dtype=torch.bool)}
    save_file(t, dump / "a.safetensors", metadata={"text": "given"})
    assert not run(make_case(f.SAMPLE / "draft", dump=dump), ["DMP608"]).findings
    save_file(t, dump / "a.safetensors", metadata={"text": "greedy continuation by the target"})
    assert run(make_case(f.SAMPLE / "draft", dump=dump), ["DMP608"]).findings


def test_one_rotated_sample_and_one_of_another_size(tmp_path: Path) -> None:
    def one(s: f.States, i: int) -> f.States:
        return f.rotated(s, i) if i == 1 else s

    report = run(f.case_of(tmp_path / "a", change=one), ["DMP"])
    assert {x.code for x in report.findings} == {"DMP609"}
    assert "rotated in 1 of 3 samples" in report.findings[0].title
    dump = tmp_path / "b" / "dump"
    dump.mkdir(parents=True)
    for i in range(5):  # five pieces of the three samples
        s = f.sample(i % 3)
        piece = slice(96, 192) if i > 2 else slice(0, 96)
        f.stacked(dump, f.both(replace(s, ids=s.ids[piece]), lambda x, p=piece, k=i: x[p].float() * (5 if k == 4 else 1)), i)
    (jump,) = run(make_case(f.SAMPLE / "draft", dump=dump), ["DMP609", "DMP610"]).findings
    assert "hs_4" in jump.title
    assert jump.severity.value == "warning"


def test_image_placeholders_end_a_prefix(tmp_path: Path) -> None:
    def pictures(s: f.States, i: int) -> f.States:
        ids = s.ids.clone()
        ids[2:20] = 7
        return f.leaked(replace(s, ids=ids), i)

    report = run(f.case_of(tmp_path, change=pictures), ["DMP610"])
    assert "no two samples share" in why(report, "DMP610")


# ------------------------------------------------------------------ small, odd and large dumps


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 40, 64])
def test_short_clean_samples_are_quiet(rows: int, tmp_path: Path) -> None:
    def first(s: f.States, i: int) -> f.States:
        return f.both(replace(s, ids=s.ids[:rows]), lambda x: x[:rows].contiguous())

    assert found(f.case_of(tmp_path, change=first, n=1)) == {}


def _tiny(folder: Path, states: Callable[[torch.Generator, torch.Tensor], torch.Tensor], rows: int = 64, n: int = 4) -> Case:
    """A tiny draft and target, and a dump of states made from token ids and the target's embedding."""
    draft = write_draft(folder / "draft", tiny_tensors(), tiny_config())
    target = tiny_target(folder / "target", weights=True)
    (folder / "dump").mkdir()
    for i in range(n):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, 256, (rows,), generator=g)
        save_file({"hidden_states": states(g, ids), "token_ids": ids}, folder / "dump" / f"{i}.safetensors")
    return make_case(draft, dump=folder / "dump", target=target)


def test_random_states_and_random_targets_raise_nothing(tmp_path: Path) -> None:
    table = target_tables()["model.embed_tokens.weight"]

    def noise(g: torch.Generator, ids: torch.Tensor) -> torch.Tensor:
        return torch.randn(len(ids), 4, 64, generator=g).half()

    def stream(g: torch.Generator, ids: torch.Tensor) -> torch.Tensor:
        steps = torch.randn(len(ids), 4, 64, generator=g) * torch.tensor([0.5, 1.0, 1.5, 1.0])[:, None]
        return (table[ids][:, None] + steps.cumsum(1)).half()

    assert found(_tiny(tmp_path / "a", noise)) == {}
    assert found(_tiny(tmp_path / "b", stream)) == {}
    assert found(_tiny(tmp_path / "c", stream, rows=3, n=1)) == {}


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 9)), fill=st.sampled_from(["zero", "one", "nan", "huge", "normal"])
)
def test_no_shape_crashes_a_rule(shape: tuple[int, int, int], fill: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("odd")
    values = {"zero": 0.0, "one": 1.0, "nan": float("nan"), "huge": 3e38}
    x = torch.randn(shape) if fill == "normal" else torch.full(shape, values[fill])
    for i in range(2):
        save_file({"hidden_states": x, "token_ids": torch.arange(shape[0])}, folder / f"{i}.safetensors")
    report = run(make_case(f.SAMPLE / "draft", dump=folder, target=f.SAMPLE / "target"), ["DMP"])
    assert not [o.why for o in report.outcomes if o.status == "crashed"]


def test_a_large_dump_is_judged_in_part_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "_READ_AT_MOST", 2 * 192 * 4 * 576 * 2)
    case = f.case_of(tmp_path)
    assert any("2 of 3 samples of the dump are judged" in note for note in case.notes)
    assert found(case) == {}


def test_the_last_layer_after_the_norm_is_no_fault(tmp_path: Path) -> None:
    """transformers' ``output_hidden_states[N]`` has been through the final norm."""

    def last(s: f.States, i: int) -> f.States:
        return replace(s, aux=torch.cat([s.aux, f.final_norm(s.final)[:, None]], 1), hf=(*s.hf, 30))

    for target in (True, False):
        assert found(f.case_of(tmp_path / str(target), "portable", last, target, layers=(1, 2, 15, 27, 28))) == {}
