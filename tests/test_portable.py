"""The portable format: written whole or not at all, read back equal, and enough to stand in for a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eagle3diag.checkpoint.target import open_target
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden import portable
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.portable import read_metadata, write_rows, write_sample

T, H, K = 9, 8, 4
SAMPLES = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"


def parts(dtype: torch.dtype = torch.float16, seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    stack = torch.randn(T, 4, H, generator=made).to(dtype)
    logits = torch.randn(T, 50, generator=made)
    top = logits.log_softmax(-1).topk(K)
    return {
        "token_ids": torch.randint(0, 50, (T,), generator=made),
        "states": {15: stack[:, 1], 2: stack[:, 0], 27: stack[:, 2]},
        "final": stack[:, 3],
        "loss_mask": torch.arange(T) > 3,
        "argmax": top.indices[:, 0],
        "topk_ids": top.indices,
        "topk_logprobs": top.values,
        "logsumexp": logits.logsumexp(-1),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_sample_is_read_back_equal(tmp_path: Path, dtype: torch.dtype, norm: str) -> None:
    given = parts(dtype)
    path = write_sample(tmp_path / "d" / "s_0.safetensors", **given, final_norm=norm, target="T", metadata={"prompt_tokens": "4"})
    dump = open_dump(tmp_path / "d")
    assert (dump.format, dump.final_norm, dump.hidden) == ("portable", norm, H)
    assert [(s.hf, s.role) for s in dump.slots] == [(2, "aux"), (15, "aux"), (27, "aux"), (None, "final")]
    assert not dump.issues
    sample = dump.read(dump.samples[0])
    assert torch.equal(sample.token_ids, given["token_ids"])
    for i, k in enumerate((2, 15, 27)):
        assert torch.equal(sample.states[i], given["states"][k])
    assert torch.equal(sample.states[3], given["final"])
    for field, name in (("loss_mask", "loss_mask"), ("target_argmax", "argmax"), ("topk_ids", "topk_ids")):
        assert torch.equal(getattr(sample, field), given[name])
    assert torch.equal(sample.topk_logprobs, given["topk_logprobs"])  # type: ignore[arg-type]
    assert torch.equal(sample.logsumexp, given["logsumexp"])  # type: ignore[arg-type]
    said = read_metadata(path)
    assert said["schema_version"] == "1"
    assert (said["final_norm"], said["target"], said["prompt_tokens"]) == (norm, "T", "4")
    assert "output_hidden_states" in said["index_convention"]
    with safe_open(path, "pt") as f:  # the library agrees that it is one of its files
        assert f.get_tensor("hidden_states.15").dtype == dtype


def test_the_samples_are_version_zero() -> None:
    path = SAMPLES / "dumps" / "sample_0.safetensors"
    assert "schema_version" not in read_metadata(path)
    old = open_dump(path)
    sample = old.read(old.samples[0])
    assert sample.topk_ids is not None
    assert sample.topk_logprobs is not None
    assert float(sample.topk_logprobs.exp().sum(-1).max()) <= 1.0001


def test_a_sample_can_be_rewritten_from_what_was_read(tmp_path: Path) -> None:
    old = open_dump(SAMPLES / "dumps" / "sample_0.safetensors")
    sample = old.read(old.samples[0])
    states = {slot.hf: sample.states[slot.position] for slot in old.aux if slot.hf is not None}
    assert old.final is not None
    write_sample(
        tmp_path / "sample_0.safetensors",
        token_ids=sample.token_ids,
        states=states,
        final=sample.states[old.final.position],
        loss_mask=sample.loss_mask,
        argmax=sample.target_argmax,
        topk_ids=sample.topk_ids,
        topk_logprobs=sample.topk_logprobs,
    )
    new = open_dump(tmp_path)
    assert [s.hf for s in new.slots] == [s.hf for s in old.slots]
    again = new.read(new.samples[0])
    assert all(torch.equal(again.states[i], sample.states[i]) for i in sample.states)
    assert torch.equal(again.topk_ids, sample.topk_ids)  # type: ignore[arg-type]


def test_a_state_given_twice_is_stored_twice(tmp_path: Path) -> None:
    state = torch.randn(T, H)
    write_sample(tmp_path / "s.safetensors", token_ids=torch.arange(T), states={3: state, 4: state}, final=state)
    sample = next(iter(open_dump(tmp_path)))
    assert all(torch.equal(sample.states[i], state) for i in range(3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"final_norm": "none"}, "'none'"),
        ({"token_ids": torch.zeros(T)}, "token_ids"),
        ({"token_ids": torch.arange(0)}, "token_ids"),
        ({"states": {}, "final": None}, "at least one state"),
        ({"states": {2: torch.zeros(T - 1, H)}}, r"hidden_states\.2 has shape \[8, 8\], expected \[9, 8\]"),
        ({"states": {2: torch.zeros(T, H), 3: torch.zeros(T, H + 1)}}, r"hidden_states\.3"),
        ({"states": {2: torch.zeros(T, H, dtype=torch.float64)}}, "float64"),
        ({"states": {-1: torch.zeros(T, H)}}, r"hidden_states\.-1"),
        ({"loss_mask": torch.ones(T, 1)}, "loss_mask"),
        ({"argmax": torch.arange(T + 1)}, "target_argmax"),
        ({"topk_logprobs": torch.zeros(T, K + 1)}, "belong together"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        write_sample(tmp_path / "s.safetensors", **{**parts(), **change})
    assert not list(tmp_path.iterdir())


def test_writing_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sample(tmp_path / "s.safetensors", **parts())
    before = path.read_bytes()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(portable.os, "fsync", stop)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        write_sample(path, **parts(seed=1))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_sample(tmp_path / "file" / "s.safetensors", **parts())


@pytest.mark.parametrize("tied", [True, False])
def test_rows_stand_in_for_a_target(tmp_path: Path, tied: bool) -> None:
    config = json.loads((SAMPLES / "target" / "config.json").read_text()) | {"hidden_size": H, "tie_word_embeddings": tied}
    ids = torch.tensor([30, 4, 17])
    table, head, norm = torch.randn(3, H), torch.randn(3, H), torch.rand(H)
    write_rows(tmp_path, token_ids=ids, embedding=table, head=None if tied else head, final_norm=norm, config=config)
    target = open_target(tmp_path)
    assert target.rows
    assert (target.embed, target.head, target.final_norm) == ("embed_tokens", "embed_tokens" if tied else "lm_head", "final_norm")
    assert target.checkpoint is not None
    assert target.checkpoint.read("token_ids").tolist() == [4, 17, 30]
    assert torch.equal(target.checkpoint.read("embed_tokens"), table[[1, 2, 0]])
    assert torch.equal(target.checkpoint.read("final_norm"), norm)
    if not tied:
        assert torch.equal(target.checkpoint.read("lm_head"), head[[1, 2, 0]])


@pytest.mark.parametrize(("ids", "says"), [([1, 1, 2], "twice"), ([-1, 1, 2], "outside"), ([1, 2], "belong together")])
def test_rows_that_do_not_fit(tmp_path: Path, ids: list[int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        write_rows(tmp_path, token_ids=torch.tensor(ids), embedding=torch.zeros(3, H), config={})
    assert not list(tmp_path.iterdir())


def test_metadata_of_a_broken_sample_is_empty(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.safetensors", **parts())
    path.write_bytes(path.read_bytes()[:-10])
    assert read_metadata(path) == {}
    assert read_metadata(tmp_path / "none") == {}
