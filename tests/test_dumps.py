"""Every dump format written tiny, read back equal; what is broken, foreign or mixed is told in one line."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.errors import CheckpointError
from eagle3diag.hidden import formats_files, formats_json
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.model import HiddenDump

SAMPLES = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3" / "dumps"
H, A, T = 8, 3, 12
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def states(seed: int = 0, dtype: torch.dtype = torch.float16, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [T], aux [T, A, H], final [T, H])."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (tokens,), generator=made)
    return ids, torch.randn(tokens, A, H, generator=made).to(dtype), torch.randn(tokens, H, generator=made).to(dtype)


Writer = Callable[[Path, torch.Tensor, torch.Tensor, torch.Tensor], Path]


def _torch(name: str, build: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Writer:
    def write(folder: Path, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(build(ids, aux, final), path)
        return path

    return write


def _mask(ids: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(ids)) >= 3).long()


def stacked(folder: Path, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> Path:
    path = folder / "hs_0.safetensors"
    save_file({"hidden_states": torch.cat([aux, final[:, None]], 1), "token_ids": ids}, path)
    return path


def slots_first(folder: Path, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> Path:
    path = folder / "hs_0.safetensors"
    save_file({"hidden_states": torch.cat([aux, final[:, None]], 1).transpose(0, 1).contiguous(), "token_ids": ids}, path)
    return path


def gz(folder: Path, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> Path:
    raw = io.BytesIO()
    torch.save({"input_ids": ids, "loss_mask": _mask(ids), "hidden_state": final[None], "aux_hidden_state": aux.flatten(1)[None]}, raw)
    path = folder / "rows_0-5000" / "data_0.ckpt.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(raw.getvalue()))
    return path


FORMATS: dict[str, tuple[Writer, str, str, str]] = {
    "speculators": (stacked, "speculators", "pre", "tokens, slots, hidden"),
    "slots first": (slots_first, "speculators", "pre", "slots, tokens, hidden"),
    "speculators 0.3": (
        _torch("data_0.pt", lambda i, a, f: {"input_ids": i, "hidden_states": [*a.unbind(1), f], "loss_mask": _mask(i)}),
        "speculators-legacy",
        "unknown",
        "tokens, hidden",
    ),
    "speculators v0": (
        _torch("data_0.pt", lambda i, a, f: {"input_ids": i, "hidden_state": a.flatten(1), "target": f, "loss_mask": _mask(i)}),
        "speculators-v0",
        "post",
        "tokens, slots * hidden",
    ),
    "specforge": (
        _torch(
            "rows_0-5000/data_0.ckpt",
            lambda i, a, f: {"input_ids": i, "loss_mask": _mask(i), "hidden_state": f[None], "aux_hidden_state": a.flatten(1)[None]},
        ),
        "specforge",
        "post",
        "tokens, slots * hidden",
    ),
    "specforge gz": (gz, "specforge", "post", "tokens, slots * hidden"),
    "modelopt": (
        _torch(
            "c0.pt",
            lambda i, a, f: {
                "input_ids": i,
                "hidden_states": f,
                "aux_hidden_states": a.flatten(1),
                "loss_mask": _mask(i),
                "conversation_id": "c0",
            },
        ),
        "modelopt",
        "post",
        "tokens, slots * hidden",
    ),
    "modelopt pre-norm": (
        _torch(
            "c0.pt",
            lambda i, a, f: {"input_ids": i, "hidden_states": f, "aux_hidden_states": a.flatten(1), "hidden_states_prenorm": True},
        ),
        "modelopt",
        "pre",
        "tokens, slots * hidden",
    ),
    "angelslim": (
        _torch(
            "d0.ckpt",
            lambda i, a, f: {
                "input_ids": i[None],
                "target_hiddens": f[None],
                "hidden_states": a.flatten(1)[None],
                "loss_mask": _mask(i)[None],
                "position_ids": torch.arange(len(i))[None],
            },
        ),
        "angelslim",
        "post",
        "tokens, slots * hidden",
    ),
    "baldeagle": (
        _torch("0.pt", lambda i, a, f: {"input_ids": i, "loss_mask": _mask(i), "hidden_state": a.flatten(1), "target_hidden_states": f}),
        "baldeagle",
        "unknown",
        "tokens, slots * hidden",
    ),
    "torchspec": (
        _torch("samples/0.pt", lambda i, a, f: {"input_ids": i[None], "hidden_states": a.flatten(1)[None], "last_hidden_states": f[None]}),
        "torchspec",
        "unknown",
        "tokens, slots * hidden",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_back_equal(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write, format, norm, axis = FORMATS[name]
    ids, aux, final = states(dtype=dtype)
    path = write(tmp_path, ids, aux, final)
    for given in (path, tmp_path):  # a file, and the folder it lies in
        dump = open_dump(given)
        assert (dump.format, dump.final_norm, dump.axis, dump.hidden) == (format, norm, axis, H)
        assert [s.role for s in dump.slots] == ["aux"] * A + ["final"]
        assert not dump.issues
        assert dump.evidence
        assert (dump.samples[0].tokens, dump.samples[0].rows) == (T, T)
        sample = dump.read(dump.samples[0])
        assert sample.token_ids.dtype == torch.int64
        assert torch.equal(sample.token_ids, ids)
        for i in range(A):
            assert sample.states[i].dtype == dtype
            assert torch.equal(sample.states[i], aux[:, i])
        assert torch.equal(sample.states[A], final)
        if sample.loss_mask is not None:
            assert torch.equal(sample.loss_mask, _mask(ids).bool())


def test_the_old_bare_pickle_and_views_are_read(tmp_path: Path) -> None:
    ids, aux, final = states()
    wide = torch.cat([aux.flatten(1), final], 1)  # both are strided views of one storage, as slicing before saving leaves them
    held = {"input_ids": ids, "aux_hidden_states": wide[:, : A * H], "hidden_states": wide[:, A * H :]}
    torch.save(held, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    torch.save(held, tmp_path / "b.pt")
    for sample in open_dump(tmp_path):
        assert torch.equal(sample.states[1], aux[:, 1])
        assert torch.equal(sample.states[A], final)


def test_a_batch_axis_is_so_many_samples(tmp_path: Path) -> None:
    (ids, aux, final), (ids2, aux2, final2) = states(), states(1)
    batch = {
        "input_ids": torch.stack([ids, ids2]),
        "target_hiddens": torch.stack([final, final2]),
        "hidden_states": torch.stack([aux.flatten(1), aux2.flatten(1)]),
    }
    torch.save(batch, tmp_path / "d0.ckpt")
    dump = open_dump(tmp_path)
    assert [s.name for s in dump.samples] == ["d0#0", "d0#1"]
    second = dump.read(dump.samples[1])
    assert torch.equal(second.token_ids, ids2)
    assert torch.equal(second.states[2], aux2[:, 2])


def test_eagle1_holds_the_final_state_alone(tmp_path: Path) -> None:
    ids, _, final = states()
    torch.save({"input_ids": ids, "hidden_state": final, "loss_mask": _mask(ids)}, tmp_path / "data_0.ckpt")
    dump = open_dump(tmp_path)
    assert (dump.format, dump.final_norm, dump.aux) == ("eagle1", "post", ())
    assert torch.equal(dump.read(dump.samples[0]).states[0], final)


def test_the_width_of_a_state_decides_one_array(tmp_path: Path) -> None:
    ids, aux, _ = states()
    torch.save({"input_ids": ids, "hidden_states": aux.flatten(1)[None], "loss_mask": _mask(ids)}, tmp_path / "data_0.ckpt")
    dump = open_dump(tmp_path, hidden=H)
    assert (dump.format, dump.hidden, len(dump.aux), dump.final) == ("specforge", H, A, None)
    assert torch.equal(dump.read(dump.samples[0]).states[2], aux[:, 2])
    with pytest.raises(CheckpointError, match=r"24 wide, no multiple of the target's 7"):
        open_dump(tmp_path, hidden=7)


def test_the_wider_array_is_the_aux_whatever_the_keys_say(tmp_path: Path) -> None:
    ids, aux, final = states()
    torch.save({"input_ids": ids, "hidden_states": aux.flatten(1), "aux_hidden_states": final}, tmp_path / "c0.pt")
    dump = open_dump(tmp_path)
    sample = dump.read(dump.samples[0])
    assert torch.equal(sample.states[A], final)
    assert torch.equal(sample.states[0], aux[:, 0])
    assert [i.kind for i in dump.issues] == ["shape"]


def test_the_samples_are_portable_dumps() -> None:
    dump = open_dump(SAMPLES)
    assert (dump.format, dump.hidden, dump.final_norm) == ("portable", 576, "pre")
    assert [s.hf for s in dump.aux] == [0, 1, 2, 3, 14, 15, 16, 26, 27, 28]
    assert [s.name for s in dump.samples] == sorted(s.name for s in dump.samples)
    assert not dump.issues
    sample = dump.read(dump.samples[0])
    assert sample.topk_ids is not None
    assert sample.topk_ids.dtype == torch.int64
    assert sample.topk_ids.shape == (192, 20)
    assert sample.target_argmax is not None
    assert torch.equal(sample.topk_ids[:, 0], sample.target_argmax)


@pytest.mark.parametrize(
    ("convention", "first"), [("HF output_hidden_states index", 2), ("layer output", 3), ("SGLang layers_to_capture, after layer", 3)]
)
def test_portable_indices_follow_the_convention(tmp_path: Path, convention: str, first: int) -> None:
    ids, aux, final = states()
    tensors = {f"hidden_states.{k}": aux[:, i].contiguous() for i, k in enumerate((2, 5, 7))}
    save_file({**tensors, "final_postnorm": final, "input_ids": ids}, tmp_path / "s.safetensors", {"index_convention": convention})
    dump = open_dump(tmp_path)
    assert dump.slots[0].hf == first
    assert dump.final_norm == "post"


def test_layer_ids_of_a_data_config_name_outputs(tmp_path: Path) -> None:
    write = FORMATS["speculators 0.3"][0]
    write(tmp_path / "d", *states())
    config = {"version": "2.0", "model": {"hidden_size": H}, "hidden_states": {"layer_ids": [2, 15, 27, 29]}}
    (tmp_path / "d" / "data_config.json").write_text(json.dumps(config))
    dump = open_dump(tmp_path / "d")
    assert [s.hf for s in dump.slots] == [3, 16, 28, None]
    assert any("data_config.json" in e for e in dump.evidence)


def test_layer_ids_in_the_metadata_of_a_stack(tmp_path: Path) -> None:
    ids, aux, final = states()
    held = {"hidden_states": torch.cat([aux, final[:, None]], 1), "token_ids": ids}
    save_file(held, tmp_path / "hs_0.safetensors", {"trained_on": "[2, 15, 27]"})
    assert [s.hf for s in open_dump(tmp_path).slots] == [2, 15, 27, None]


def test_locks_without_a_data_set_are_the_connector(tmp_path: Path) -> None:
    stacked(tmp_path, *states())
    (tmp_path / "hs_0.safetensors.lock").touch()
    dump = open_dump(tmp_path)
    assert dump.format == "vllm-connector"
    assert "passed over: 1 .lock" in dump.evidence
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    assert open_dump(tmp_path).format == "speculators"


# --- SGLang's JSON


def answer(ids: torch.Tensor, final: torch.Tensor, prompt: int, **more: Any) -> dict[str, Any]:
    rows = final.float().tolist()
    meta = {"id": "r", "prompt_tokens": prompt, "completion_tokens": len(ids) - prompt}
    held = {"hidden_states": [rows[:prompt], *rows[prompt : len(ids) - 1]]}
    return {"text": "…", "output_ids": ids[prompt:].tolist(), "meta_info": {**meta, **held}, **more}


def sglang(shape: str, answers: list[dict[str, Any]]) -> str:
    if shape == "jsonl":
        return "\n".join(map(json.dumps, answers)) + "\n"
    return json.dumps(answers[0] if shape == "object" else answers, indent=1 if shape == "indented list" else None)


@pytest.mark.parametrize("shape", ["object", "list", "indented list", "jsonl"])
def test_sglang_answers(tmp_path: Path, shape: str) -> None:
    made = [states(i, torch.float32) for i in range(1 if shape == "object" else 3)]
    path = tmp_path / "answers.json"
    path.write_text(sglang(shape, [answer(ids, final, 5, input_ids=ids[:5].tolist()) for ids, _, final in made]))
    dump = open_dump(path)
    assert (dump.format, dump.hidden, dump.final_norm) == ("sglang-json", H, "post")
    assert len(dump) == len(made)
    assert not dump.issues
    for ref, (ids, _, final) in reversed(list(zip(dump.samples, made, strict=True))):
        sample = dump.read(ref)
        assert torch.equal(sample.token_ids, ids[:-1])  # the last token was never fed back
        assert torch.equal(sample.states[0], final[:-1])


def test_sglang_ids_from_log_probabilities_or_without_the_prompt(tmp_path: Path) -> None:
    ids, _, final = states(dtype=torch.float32)
    whole = answer(ids, final, 5)
    whole["meta_info"]["input_token_logprobs"] = [[None, i, None] for i in ids[:5].tolist()]
    (tmp_path / "a.json").write_text(json.dumps(whole))
    assert torch.equal(next(iter(open_dump(tmp_path / "a.json"))).token_ids, ids[:-1])
    (tmp_path / "b.json").write_text(json.dumps(answer(ids, final, 5)))
    dump = open_dump(tmp_path / "b.json")
    sample = dump.read(dump.samples[0])
    assert torch.equal(sample.token_ids, ids[5:-1])
    assert torch.equal(sample.states[0], final[5:-1])
    assert any("5 rows are left out" in e for e in dump.evidence)


def test_sglang_aux_states_need_a_width(tmp_path: Path) -> None:
    ids, aux, _ = states(dtype=torch.float32)
    (tmp_path / "a.json").write_text(json.dumps(answer(ids, aux.flatten(1), 5, input_ids=ids[:5].tolist())))
    assert open_dump(tmp_path).hidden == A * H
    dump = open_dump(tmp_path, hidden=H)
    assert (len(dump.aux), dump.final) == (A, None)
    assert torch.equal(dump.read(dump.samples[0]).states[1], aux[:-1, 1])


def test_sglang_null_is_nan_and_short_rows_stay(tmp_path: Path) -> None:
    ids, _, final = states(dtype=torch.float32)
    whole = answer(ids, final, 5, input_ids=ids[:5].tolist())
    whole["meta_info"]["hidden_states"][0][2][3] = None
    del whole["meta_info"]["hidden_states"][-2:]
    (tmp_path / "a.json").write_text(json.dumps(whole))
    dump = open_dump(tmp_path)
    assert (dump.samples[0].tokens, dump.samples[0].rows) == (T, T - 3)
    assert bool(dump.read(dump.samples[0]).states[0][2, 3].isnan())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "no meta_info.hidden_states"),
        ('{"meta_info": {"hidden_states": []}}', "no meta_info.hidden_states"),
        ('{"meta_info": {"hidden_states": [[[1, 2]], [1]]}}', "2 different widths"),
        ('{"meta_info": {"hidden_states": [["a"]]}}', "other things than numbers"),
        ('{"meta_info": {"hidden_states": [[[1, 2]]]}}', "1 rows of states and no token ids"),
        ('{"meta_info": ', "not readable as JSON"),
        ("[1, 2]", "no meta_info.hidden_states"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_is_no_answer(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=says):
        list(open_dump(path))


def test_a_document_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _, final = states(dtype=torch.float32)
    (tmp_path / "a.json").write_text(json.dumps([answer(ids, final, 5)]))
    monkeypatch.setattr(formats_json, "_LIMIT", 100)
    with pytest.raises(CheckpointError, match="more than 100 bytes"):
        open_dump(tmp_path)


# --- folders


def folder_of(tmp_path: Path, n: int = 12) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    made = [states(i) for i in range(n)]
    for i, (ids, aux, final) in enumerate(made):
        save_file({"hidden_states": torch.cat([aux, final[:, None]], 1), "token_ids": ids}, tmp_path / f"hs_{i}.safetensors")
    return made


def test_samples_come_in_natural_order_one_at_a_time(tmp_path: Path) -> None:
    made = folder_of(tmp_path)
    dump = open_dump(tmp_path)
    assert [s.name for s in dump.samples] == [f"hs_{i}" for i in range(12)]
    assert all(torch.equal(s.token_ids, ids) for s, (ids, _, _) in zip(dump, made, strict=True))


def test_a_dump_travels_to_a_worker(tmp_path: Path) -> None:
    made = folder_of(tmp_path, 2)
    there: HiddenDump = pickle.loads(pickle.dumps(open_dump(tmp_path)))
    assert torch.equal(there.read(there.samples[1]).token_ids, made[1][0])


def test_foreign_files_are_passed_over(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    for name in ("config.json", "sample_lengths.json", "dataset_info.json"):
        (tmp_path / name).write_text('{"hidden_states": {"layer_ids": [1, 2]}}')
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"\0" * 64)
    (tmp_path / "hs_0.safetensors.lock").touch()
    torch.save(torch.arange(10), tmp_path / "token_freq.pt")
    torch.save({"d2t": torch.arange(10)}, tmp_path / "cache.pt")
    save_file({"token_ids": torch.arange(5), "embed_tokens": torch.zeros(5, H)}, tmp_path / "rows.safetensors")
    dump = open_dump(tmp_path)
    assert len(dump) == 2
    assert not dump.issues
    assert any("passed over" in e and ".json" in e for e in dump.evidence)


def test_one_broken_file_is_an_issue(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    path = tmp_path / "hs_1.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    dump = open_dump(tmp_path)
    assert [s.name for s in dump.samples] == ["hs_0", "hs_2"]
    assert [(i.kind, i.file) for i in dump.issues] == [("unreadable", "hs_1.safetensors")]
    assert "cut" in dump.issues[0].message
    assert "\n" not in dump.issues[0].message


def test_mixed_formats_keep_the_majority(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    FORMATS["modelopt"][0](tmp_path, *states())
    dump = open_dump(tmp_path)
    assert (dump.format, len(dump)) == ("speculators", 3)
    assert [i.kind for i in dump.issues] == ["other"]
    assert "modelopt" in dump.issues[0].message


def test_a_sample_without_a_layer_is_told(tmp_path: Path) -> None:
    folder_of(tmp_path, 3)
    ids, aux, final = states(9)
    save_file({"hidden_states": torch.cat([aux[:, :2], final[:, None]], 1), "token_ids": ids}, tmp_path / "hs_3.safetensors")
    dump = open_dump(tmp_path)
    assert [i.kind for i in dump.issues] == ["shape"]
    assert "3 states" in dump.issues[0].message


@pytest.mark.parametrize("tokens", [T + 3, 100])
def test_lengths_that_disagree_are_kept(tmp_path: Path, tokens: int) -> None:
    ids = torch.arange(tokens)
    _, aux, final = states()
    stack = torch.cat([aux, final[:, None]], 1)
    save_file({"hidden_states": stack, "token_ids": ids}, tmp_path / "a.safetensors")
    save_file({"hidden_states": stack.transpose(0, 1).contiguous(), "token_ids": ids}, tmp_path / "b.safetensors")
    for name, axis in (("a", "tokens, slots, hidden"), ("b", "slots, tokens, hidden")):
        dump = open_dump(tmp_path / f"{name}.safetensors")
        assert (dump.axis, dump.samples[0].tokens, dump.samples[0].rows) == (axis, tokens, T)
        sample = dump.read(dump.samples[0])
        assert (len(sample.token_ids), len(sample.states[0])) == (tokens, T)
        assert any("neither axis" in e for e in dump.evidence)


def test_lengths_inside_a_sample_are_issues(tmp_path: Path) -> None:
    ids, aux, final = states()
    torch.save({"input_ids": ids, "hidden_states": final[:-2], "aux_hidden_states": aux.flatten(1)}, tmp_path / "a.pt")
    dump = open_dump(tmp_path)
    assert [i.kind for i in dump.issues] == ["length"]
    assert "12" in dump.issues[0].message
    assert "10" in dump.issues[0].message
    assert dump.samples[0].rows == T - 2


@pytest.mark.parametrize(
    ("shape", "there", "issues"), [((T,), True, []), ((1, T), True, []), ((T, 1), True, ["mask"]), ((T + 1,), False, ["mask"])]
)
def test_the_shape_of_the_mask(tmp_path: Path, shape: tuple[int, ...], there: bool, issues: list[str]) -> None:
    ids, aux, final = states()
    torch.save(
        {"input_ids": ids, "hidden_states": final, "aux_hidden_states": aux.flatten(1), "loss_mask": torch.ones(shape)}, tmp_path / "a.pt"
    )
    dump = open_dump(tmp_path)
    sample = dump.read(dump.samples[0])
    assert (sample.loss_mask is not None) == there
    assert sample.loss_mask is None or sample.loss_mask.shape == (T,)
    assert [i.kind for i in dump.issues] == issues


def test_packed_files_are_unpacked_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3diag.hidden import dumps

    gz(tmp_path, *states())
    second = tmp_path / "rows_0-5000" / "data_1.ckpt.gz"
    second.write_bytes((tmp_path / "rows_0-5000" / "data_0.ckpt.gz").read_bytes())
    third = tmp_path / "rows_0-5000" / "data_2.ckpt.gz"
    third.write_bytes(second.read_bytes()[:-300])
    monkeypatch.setattr(dumps, "_UNPACKED_AT_ONCE", 0)
    dump = open_dump(tmp_path)
    assert [(s.tokens, s.rows) for s in dump.samples] == [(T, T), (None, None), (None, None)]
    assert torch.equal(dump.read(dump.samples[1]).token_ids, states()[0])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        dump.read(dump.samples[2])


# --- what is broken


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


def _bomb(path: Path) -> None:
    with gzip.open(path, "wb") as f:
        f.write(b"PK\x03\x04" + b"\0" * 5_000_000)


def _squeezed_zip(path: Path) -> None:
    torch.save({"input_ids": torch.arange(4), "hidden_state": torch.zeros(4, H)}, path)
    with zipfile.ZipFile(path) as z:
        held = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for n, data in held.items():
            z.writestr(n, data)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "0 bytes"),
    "noise": (lambda p: p.write_bytes(bytes(range(1, 200))), "header length"),
    "page": (lambda p: p.write_bytes(b"<!DOCTYPE html><p>404"), "HTML"),
    "lfs": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "Git LFS"),
    "code": (lambda p: torch.save({"input_ids": torch.arange(3), "x": _Code()}, p), ".print`, which is code"),
    "squeezed": (_squeezed_zip, "compressed"),
    "one tensor": (lambda p: torch.save(torch.zeros(3), p), "no hidden states"),
    "no ids": (lambda p: torch.save({"hidden_state": torch.zeros(3, H)}, p), "no token ids"),
    "float ids": (lambda p: torch.save({"input_ids": torch.zeros(3), "hidden_state": torch.zeros(3, H)}, p), "F32"),
    "odd width": (
        lambda p: torch.save(
            {"input_ids": torch.arange(3), "hidden_states": torch.zeros(3, H), "aux_hidden_states": torch.zeros(3, 3 * H + 1)}, p
        ),
        "25 wide, no multiple of the state's width 8",
    ),
    "expanded": (
        lambda p: torch.save({"input_ids": torch.arange(3), "hidden_state": torch.zeros(1, 1).expand(10**9, 10**6)}, p),
        "expanded view",
    ),
    "sparse": (
        lambda p: torch.save({"input_ids": torch.arange(3), "hidden_state": torch.zeros(3, H).to_sparse()}, p),
        "_rebuild_sparse_tensor",
    ),
    "cut gzip": (lambda p: p.write_bytes(gzip.compress(b"PK\x03\x04" + bytes(range(256)) * 40)[:-20]), "gzip data is cut"),
    "gzip of text": (lambda p: p.write_bytes(gzip.compress(b"hello")), "torch"),
    "integer states": (
        lambda p: torch.save({"input_ids": torch.arange(3), "hidden_state": torch.zeros(3, H).int()}, p),
        "no hidden states",
    ),
    "one axis": (lambda p: torch.save({"input_ids": torch.arange(3), "hidden_state": torch.zeros(3)}, p), "no known dump format"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    make, says = BROKEN[name]
    path = tmp_path / "a.pt"
    make(path)
    with pytest.raises(CheckpointError) as told:
        open_dump(path)
    assert says in str(told.value)
    assert "a.pt" in str(told.value)
    with pytest.raises(CheckpointError, match=r"no readable sample among 1 files"):
        open_dump(tmp_path)


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _bomb(tmp_path / "a.ckpt.gz")
    monkeypatch.setattr(formats_files, "GZ_LIMIT", 3_000_000)
    with pytest.raises(CheckpointError, match=r"unpack to more than 3,000,000"):
        open_dump(tmp_path / "a.ckpt.gz")


def test_shared_lists_do_not_multiply(tmp_path: Path) -> None:
    many: list[Any] = [0] * 1000
    for _ in range(2):
        many = [many] * 1000
    torch.save({"input_ids": torch.arange(3), "x": many}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="entries"):
        open_dump(tmp_path / "a.pt")


def test_nothing_there(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "no", "no such file"), (tmp_path, "it is empty"), (Path("a\0b"), "a")):
        with pytest.raises(CheckpointError, match=says):
            open_dump(path)
    (tmp_path / "x.txt").touch()
    with pytest.raises(CheckpointError, match=r"no dump file in this folder \(1 \.txt\)"):
        open_dump(tmp_path)


def test_a_file_that_changed_is_told(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    dump = open_dump(tmp_path)
    stacked(tmp_path, *states(7, tokens=T - 1))
    with pytest.raises(CheckpointError, match="changed since"):
        dump.read(dump.samples[0])
    (tmp_path / "hs_1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        dump.read(dump.samples[1])


def test_names_from_files_are_escaped(tmp_path: Path) -> None:
    ids, aux, _ = states()
    save_file({"input_ids": ids, "hidden_states.\x1b[31m": aux[:, 0].contiguous()}, tmp_path / "a\x1b.safetensors")
    with pytest.raises(CheckpointError) as told:
        open_dump(tmp_path / "a\x1b.safetensors")
    assert "\x1b" not in str(told.value)


def test_blank_lines_before_an_answer(tmp_path: Path) -> None:
    ids, _, final = states(dtype=torch.float32)
    one = json.dumps(answer(ids, final, 5, input_ids=ids[:5].tolist()))
    for text, count in ((f"\n\n{one}\n\n{one}\n", 2), (f"\n{json.dumps(json.loads(one), indent=1)}\n", 1), (f"\ufeff{one}", 1)):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        dump = open_dump(tmp_path)
        assert [torch.equal(s.token_ids, ids[:-1]) for s in dump] == [True] * count


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_an_error_in_one_line_or_none(tmp_path: Path, name: str) -> None:
    path = FORMATS[name][0](tmp_path, *states())
    whole, chance = path.read_bytes(), random.Random(name)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3))):
            data[chance.randrange(min(len(data), chance.choice((40, 400, 100_000))))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(bytes(data))
        said = ""
        try:
            for sample in open_dump(tmp_path):
                assert len(sample.states) > 0
        except CheckpointError as error:
            said = str(error)
        assert not said or said.isprintable()
