"""Sound headers are read as the loader reads them, without touching data; odd but legal ones are left in peace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.dtypes import BITS, byte_count, torch_dtype
from eagle3diag.checkpoint.header import read_header
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from tests.bad_files import encoded, entry, folder_with
from tests.factory import tiny_config, tiny_tensors, write_draft


def written(tmp_path: Path, blob: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(blob)
    return path


def test_reads_what_the_loader_wrote(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    folder = write_draft(tmp_path / "draft", tensors, tiny_config())
    opened = open_checkpoint(folder)
    assert opened.issues == ()
    assert opened.form == "safetensors"
    assert opened.files == ("model.safetensors",)
    assert list(opened.tensors) == sorted(tensors)
    assert opened.bytes_total == sum(t.numel() * t.element_size() for t in tensors.values())
    assert opened.sizes == {"model.safetensors": (folder / "model.safetensors").stat().st_size}
    for name, tensor in tensors.items():
        info = opened.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert torch_dtype(info.dtype) is tensor.dtype
        read = opened.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_opening_reads_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = {"a": entry(0, 1 << 33), "b": entry(1 << 33, 1 << 34)}
    path = written(tmp_path, encoded(header))
    start = path.stat().st_size
    os.truncate(path, start + (1 << 34))
    reads: list[tuple[int, int]] = []
    real = os.preadv

    def watched(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        reads.append((offset, got))
        return got

    monkeypatch.setattr(os, "preadv", watched)
    found = read_header(path)
    assert found.issues == ()
    assert found.tensors["b"].offset == start + (1 << 33)
    assert sum(n for _, n in reads) <= start + 512  # the sniffed beginning, then the header


ODD = {
    "no-tensors": (encoded({}), 0),
    "metadata-only": (encoded({"__metadata__": {"format": "pt"}}), 0),
    "metadata-null": (encoded(b'{"__metadata__": null}'), 0),
    "zero-elements": (encoded({"a": entry(0, 0, [0, 1 << 62])}), 1),
    "scalar": (encoded({"a": entry(0, 4, [])}, b"\0" * 4), 1),
    "empty-between": (encoded({"a": entry(0, 4), "b": entry(4, 4, [0]), "c": entry(4, 8)}, b"\0" * 8), 3),
    "entries-not-in-order": (encoded({"b": entry(4, 8), "a": entry(0, 4)}, b"\0" * 8), 2),
    "padded-with-spaces": (encoded(b"{}      "), 0),
    "unknown-field": (encoded({"a": entry(0, 4) | {"stride": [1], "note": None}}, b"\0" * 4), 1),
    "letters": (encoded({"schicht.ü.gewicht": entry(0, 4), "层.0": entry(4, 8)}, b"\0" * 8), 2),
    "escaped-letters": (encoded(b'{"\\u00fc\\ud83d\\ude00": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4), 1),
    "sub-byte": (encoded({"a": entry(0, 3, [4], "F6_E3M2"), "b": entry(3, 4, [2], "F4")}, b"\0" * 4), 2),
}


@pytest.mark.parametrize("name", ODD)
def test_legal_oddities_pass(name: str, tmp_path: Path) -> None:
    blob, count = ODD[name]
    header = read_header(written(tmp_path, blob))
    assert header.issues == ()
    assert len(header.tensors) == count


@pytest.mark.parametrize("length", [640, 896, 0x0480])
def test_length_that_looks_like_a_pickle(length: int, tmp_path: Path) -> None:
    # a header of 640 bytes begins with 80 02, as pickles of protocol 2 do
    raw = json.dumps({"a": entry(0, 4)}).encode()
    blob = encoded(raw + b" " * (length - len(raw)), b"\1\0\0\0")
    assert blob[0] == 0x80
    folder_with(tmp_path, blob)
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    renamed = (tmp_path / "model.safetensors").rename(tmp_path / "weights")
    assert list(open_checkpoint(renamed).tensors) == ["a"]


def test_many_deviations_become_few_lines(tmp_path: Path) -> None:
    header = {f"t{i:05d}": entry(8 * i, 8 * i + 4) for i in range(3000)}
    issues = read_header(written(tmp_path, encoded(header, b"\0" * 24_000))).issues
    holes = [i for i in issues if i.kind == "offsets-hole"]
    assert len(holes) == 9
    assert "2,999 in all" in holes[-1].message


def test_truncation_counts_the_tensors_cut(tmp_path: Path) -> None:
    path = written(tmp_path, encoded({"a": entry(0, 8), "b": entry(8, 16), "c": entry(16, 24)}, b"\0" * 12))
    (issue,) = read_header(path).issues
    assert issue.kind == "data-truncated"
    assert "data section is 12 bytes, header describes 24: 2 of 3 tensors are cut" in issue.message
    assert issue.evidence == {"have": 12, "described": 24, "tensors": 2}


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_comes_back_as_stored(dtype: str, tmp_path: Path) -> None:
    count = 8
    data = bytes(range(1, count * BITS[dtype] // 8 + 1)) if dtype != "BOOL" else b"\0\1" * 4
    folder_with(tmp_path, encoded({"w": entry(0, len(data), [2, 4], dtype)}, data))
    opened = open_checkpoint(tmp_path)
    tensor = opened.read("w")
    assert b"".join(bytes(b) for b in opened.blocks("w")) == data
    assert bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) == data
    if BITS[dtype] >= 8:
        assert tuple(tensor.shape) == (2, 4)
    expected = torch_dtype(dtype)
    assert tensor.dtype == (torch.uint8 if expected is None else expected)


def test_dtypes_agree_with_the_loader(tmp_path: Path) -> None:
    tensors = {spelling: torch.zeros(2, dtype=dtype) for spelling in BITS if (dtype := torch_dtype(spelling)) is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, info in read_header(tmp_path / "model.safetensors").tensors.items():
        assert info.dtype == name


def test_byte_count_follows_the_loader() -> None:
    assert byte_count((3, 4), "BF16") == 24
    assert byte_count((), "F64") == 8
    assert byte_count((0, 1 << 62), "F32") == 0
    assert byte_count((1 << 62, 8, 0), "F32") is None  # overflows before the zero is met
    assert byte_count((1 << 61,), "F32") is None
    assert byte_count((3,), "F4") is None


def test_blocks_are_whole_elements_and_bounded(tmp_path: Path) -> None:
    data = bytes(i % 251 for i in range(10_000))
    folder_with(tmp_path, encoded({"w": entry(0, 10_000)}, data))
    opened = open_checkpoint(tmp_path)
    for block in (1, 64, 100, 4096, 1 << 20):
        parts = [bytes(b) for b in opened.blocks("w", block)]
        assert b"".join(parts) == data
        assert max(map(len, parts)) <= max(64, block)
        assert all(len(p) % 64 == 0 for p in parts[:-1])


def test_unknown_name_is_an_error(tmp_path: Path) -> None:
    folder_with(tmp_path, encoded({"w": entry(0, 4)}, b"\0" * 4))
    opened = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor v to read"):
        opened.read("v")
    with pytest.raises(CheckpointError, match="no tensor v to read"):
        opened.blocks("v")
