"""Which files of a folder count, in which order, and what several of them make together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from tests.bad_files import encoded, entry, folder_with
from tests.factory import tiny_config, tiny_tensors, write_draft

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def shard(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path)


def indexed(folder: Path) -> Path:
    folder_with(folder)
    shard(folder / "model-00001-of-00002.safetensors", a=A)
    shard(folder / "model-00002-of-00002.safetensors", b=B)
    where = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("way", ["folder", "index"])
def test_index(way: str, tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    opened = open_checkpoint(folder if way == "folder" else folder / "model.safetensors.index.json")
    assert opened.issues == ()
    assert opened.form == "sharded"
    assert len(opened.files) == 2
    assert torch.equal(opened.read("a"), A)
    assert torch.equal(opened.read("b"), B)
    assert opened.tensors["b"].file == "model-00002-of-00002.safetensors"


def test_index_comes_before_everything(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    shard(folder / "model.safetensors", a=A + 1, c=B)
    assert sorted(open_checkpoint(folder).tensors) == ["a", "b"]


def test_model_comes_before_others(tmp_path: Path) -> None:
    folder_with(tmp_path)
    shard(tmp_path / "model.safetensors", a=A)
    shard(tmp_path / "other.safetensors", b=B)
    torch.save({"c": B}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).files == ("model.safetensors",)


def test_safetensors_come_before_torch(tmp_path: Path) -> None:
    folder_with(tmp_path)
    shard(tmp_path / "rows.safetensors", a=A)
    torch.save({"c": B}, tmp_path / "pytorch_model.bin")
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


def test_unindexed_shards_are_read_together(tmp_path: Path) -> None:
    folder_with(tmp_path)
    shard(tmp_path / "one.safetensors", a=A)
    shard(tmp_path / "two.safetensors", b=B)
    shard(tmp_path / "adapter_model.safetensors", a=A + 1)
    opened = open_checkpoint(tmp_path)
    assert opened.issues == ()
    assert opened.files == ("one.safetensors", "two.safetensors")
    assert torch.equal(opened.read("a"), A)
    assert opened.extras == ("adapter_model.safetensors",)


def test_unindexed_shards_with_a_tensor_twice(tmp_path: Path) -> None:
    folder_with(tmp_path)
    shard(tmp_path / "one.safetensors", a=A)
    shard(tmp_path / "two.safetensors", a=A + 1)
    (issue,) = open_checkpoint(tmp_path).issues
    assert issue.kind == "shard-twice"


def test_listed_file_wins_where_a_tensor_is_twice(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    shard(folder / "model-00001-of-00002.safetensors", a=A, b=B + 1)
    opened = open_checkpoint(folder)
    assert [i.kind for i in opened.issues] == ["shard-twice"]
    assert torch.equal(opened.read("b"), B)


def test_tensor_in_another_shard_than_listed_is_read_there(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    shard(folder / "model-00001-of-00002.safetensors", a=A, b=B)
    shard(folder / "model-00002-of-00002.safetensors", z=B)
    opened = open_checkpoint(folder)
    assert torch.equal(opened.read("b"), B)
    assert any("it is in model-00001-of-00002.safetensors" in i.message for i in opened.issues)


def test_missing_shard_counts(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (issue,) = open_checkpoint(folder).issues
    assert issue.kind == "shard-missing"
    assert "1 of 2 files missing" in issue.message
    assert issue.evidence["tensors"] == 1


def test_shards_in_a_subfolder_are_inside(tmp_path: Path) -> None:
    folder_with(tmp_path / "draft")
    (tmp_path / "draft" / "parts").mkdir()
    shard(tmp_path / "draft" / "parts" / "one.safetensors", a=A)
    (tmp_path / "draft" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    assert open_checkpoint(tmp_path / "draft").issues == ()


def test_hub_cache_links_are_inside(tmp_path: Path) -> None:
    # the cache keeps content in blobs/ and links to it from snapshots/REVISION/
    repo = tmp_path / "models--org--draft"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc123"
    indexed(snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(repo / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert sorted(open_checkpoint(snapshot).tensors) == ["a", "b"]
    (tmp_path / "elsewhere").write_bytes((repo / "blobs" / "model-00001-of-00002.safetensors").read_bytes())
    (snapshot / "model-00001-of-00002.safetensors").unlink()
    (snapshot / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leaves the folder by a link"):
        open_checkpoint(snapshot)


def test_model_may_be_a_link_of_the_users(tmp_path: Path) -> None:
    shard(tmp_path / "real.safetensors", a=A)
    (folder_with(tmp_path / "draft") / "model.safetensors").symlink_to(tmp_path / "real.safetensors")
    assert list(open_checkpoint(tmp_path / "draft").tensors) == ["a"]


def test_torch_index(tmp_path: Path) -> None:
    folder_with(tmp_path)
    torch.save({"a": A}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": B}, tmp_path / "pytorch_model-00002-of-00002.bin")
    where = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    opened = open_checkpoint(tmp_path)
    assert opened.issues == ()
    assert opened.form == "torch"
    assert torch.equal(opened.read("b"), B)


def test_training_leftovers_are_no_weights(tmp_path: Path) -> None:
    folder_with(tmp_path)
    for name in ("optimizer_state_dict.pt", "scheduler_state_dict.pt", "training_args.bin", "rng_state_0.pth"):
        torch.save({"state": {}}, tmp_path / name)
    opened = open_checkpoint(tmp_path)
    assert opened.form == "none"
    assert opened.extras == ("optimizer_state_dict.pt", "scheduler_state_dict.pt")


def test_several_torch_files_have_to_be_chosen_from(tmp_path: Path) -> None:
    folder_with(tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({"a": A}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 torch files \(a.pt, b.pt\); give the one that is meant"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("way", ["folder", "config.json"])
def test_config_alone(way: str, tmp_path: Path) -> None:
    folder_with(tmp_path)
    opened = open_checkpoint(tmp_path if way == "folder" else tmp_path / way)
    assert opened.form == "none"
    assert opened.tensors == {}
    assert opened.config["hidden_size"] == 64


def test_single_file_brings_its_config(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    for path in (folder / "model.safetensors", str(folder / "model.safetensors")):
        opened = open_checkpoint(path)
        assert opened.path == str(path)
        assert opened.configs
        assert opened.issues == ()


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    monkeypatch.chdir(tmp_path / "draft")
    for path in (".", "model.safetensors"):
        assert open_checkpoint(path).tensors


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "draft.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(CheckpointError, match="GGUF"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="GGUF"):
        open_checkpoint(tmp_path / "draft.gguf")


def test_nothing_is_written_and_torch_not_imported(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "draft", encoded({"a": entry(0, 4)}, b"\0" * 4))
    torch.save({"state_dict": {"a": A}}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"draft_state_dict": {"a": A}}, tmp_path / "training_state.pt")
    before = {p: p.stat().st_mtime_ns for p in (folder, *folder.iterdir())}
    code = (
        "import sys; from eagle3diag.checkpoint.open import open_checkpoint\n"
        "for path in sys.argv[1:]:\n    assert list(open_checkpoint(path).tensors) == ['a']\n"
        "assert not {'torch', 'numpy', 'safetensors', 'urllib.request'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "old.pt"), str(tmp_path / "training_state.pt")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert before == {p: p.stat().st_mtime_ns for p in (folder, *folder.iterdir())}
