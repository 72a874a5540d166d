"""Torch files are listed and read like torch does it, without running their pickle; torch itself is the judge."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from tests.factory import tiny_config, tiny_tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
          "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip


def save(value: Any, path: Path, old: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not old)
    return path


def same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """The checkpoint at `path` holds exactly `expected`, by whole tensors and by blocks."""
    opened = open_checkpoint(path)
    assert sorted(opened.tensors) == sorted(expected)
    assert [i for i in opened.issues if not i.evidence.get("absent")] == []
    for name, tensor in expected.items():
        info = opened.tensors[name]
        read = opened.read(name)
        assert read.dtype == tensor.dtype
        assert info.shape == tuple(tensor.shape) == tuple(read.shape)
        assert info.nbytes == tensor.numel() * tensor.element_size()
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        got = read.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        assert torch.equal(got, raw)
        assert b"".join(bytes(b) for b in opened.blocks(name, 64)) == bytes(raw.tolist())


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
class TestAgainstTorch:
    def test_every_dtype(self, old: bool, tmp_path: Path) -> None:
        tensors = {d: torch.arange(8).to(getattr(torch, d)).reshape(2, 4) for d in DTYPES}
        same(save(tensors, tmp_path / "model.pt", old), tensors)

    def test_views(self, old: bool, tmp_path: Path) -> None:
        base = torch.arange(60.0).reshape(5, 12)
        tensors = {
            "whole": base, "tied": base, "rows": base[1:4], "columns": base[:, 2:5], "steps": base[::2, ::3], "turned": base.t(),
            "one": base[2, 3], "none": torch.empty(0, 7), "scalar": torch.tensor(3.5), "column": base[:, :1], "half": base.half()[3:],
        }  # fmt: skip
        same(save(tensors, tmp_path / "model.pt", old), tensors)

    def test_real_draft(self, old: bool, tmp_path: Path) -> None:
        tensors = tiny_tensors()
        same(save(tensors, tmp_path / "pytorch_model.bin", old), tensors)
        (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
        opened = open_checkpoint(tmp_path)
        assert opened.form == "torch"
        assert opened.config["hidden_size"] == 64

    def test_module_state(self, old: bool, tmp_path: Path) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
        same(save(module.state_dict(), tmp_path / "model.pt", old), dict(module.state_dict()))
        parameters = dict(module.named_parameters())
        same(save(parameters, tmp_path / "model.pt", old), parameters)

    @pytest.mark.parametrize("keys", ["state_dict", "model", "model_state_dict", "module", "model.state_dict"])
    def test_wrapped(self, keys: str, old: bool, tmp_path: Path) -> None:
        tensors = {"fc.weight": torch.ones(2, 3)}
        value: dict[str, Any] = dict(tensors)
        for key in reversed(keys.split(".")):
            value = {key: value, "epoch": 3, "lr": 1e-4, "note": "x", "rng": torch.zeros(4, dtype=torch.uint8)}
        same(save(value, tmp_path / "x.pt", old), tensors)
        assert open_checkpoint(tmp_path / "x.pt").form == "torch"

    def test_training_state(self, old: bool, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {
            "strategy": "eagle3",
            "global_step": 7,
            "optimizer": optimizer.state_dict(),
            "draft_state_dict": collections.OrderedDict(model.state_dict()),
            "rng": torch.get_rng_state(),
            "seen": {1, 2},
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "shape": torch.Size([3]),
        }
        same(save(state, tmp_path / "training_state.pt", old), dict(model.state_dict()))
        assert open_checkpoint(tmp_path / "training_state.pt").form == "training_state"
        assert open_checkpoint(tmp_path).form == "training_state"


RARE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "sparse_coo"),
    "module": (lambda: torch.nn.Linear(2, 2), "holds one `torch.nn.modules.linear.Linear`"),
    "foreign": (lambda: {"w": torch.ones(1), "n": argparse.Namespace()}, "needs `argparse.Namespace`"),
    "tensor": (lambda: torch.ones(3), "holds a tensor"),
    "numbers": (lambda: {"a": 1, "b": [2.5]}, "holds keys a, b"),
    "empty": (dict, "holds a dict without keys"),
    "nothing": (lambda: None, "holds a value"),
    "complex128": (lambda: {"w": torch.ones(2, dtype=torch.complex128)}, "dtype"),
    "expanded": (lambda: {"w": torch.ones(1, 4).expand(99, 4)}, "an expanded view, 1,584 bytes over a storage of 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
@pytest.mark.parametrize("name", RARE)
def test_refused_in_one_line(name: str, old: bool, tmp_path: Path) -> None:
    make, says = RARE[name]
    path = save(make(), tmp_path / "x.pt", old)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert "weights_only" not in str(caught.value)


def test_rare_tensor_beside_the_weights_is_no_matter(tmp_path: Path) -> None:
    same(save({"model": {"w": torch.ones(3)}, "mask": torch.eye(3).to_sparse()}, tmp_path / "x.pt", False), {"w": torch.ones(3)})


class Rebuilt:
    """Pickles as a tensor of another device does: by a helper of torch that this reader leaves to torch."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (self.tensor, self.tensor.dtype, "cpu", False)


@pytest.mark.skipif(not hasattr(torch._utils, "_rebuild_device_tensor_from_cpu_tensor"), reason="torch 2.7 or newer has this helper")
def test_torch_is_asked_for_what_only_it_can_rebuild(tmp_path: Path) -> None:
    w, v = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    path = save({"model": {"w": Rebuilt(w), "v": v}}, tmp_path / "x.pt", False)
    same(path, {"w": w, "v": v})
    opened = open_checkpoint(path)
    save({"model": {"w": Rebuilt(w + 1), "v": v, "u": v}}, path, False)
    with pytest.raises(CheckpointError, match="changed while being read"):
        opened.read("w")
    huge = save({"w": Rebuilt(torch.zeros(1).expand(1 << 40))}, tmp_path / "y.pt", False)
    with pytest.raises(CheckpointError, match="an expanded view"):
        open_checkpoint(huge)


def test_saved_without_data(tmp_path: Path) -> None:
    path = save({"w": torch.empty(2, device="meta")}, tmp_path / "x.pt", False)
    with pytest.raises(CheckpointError, match="saved from the meta device"):
        open_checkpoint(path)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trap"),)

    torch.save({"w": torch.ones(1), "x": Trap()}, tmp_path / "x.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Trap(), protocol=2))
    for name in ("x.pt", "bare.pt"):
        with pytest.raises(CheckpointError, match=r"needs `(posix|nt)\.mkdir`"):
            open_checkpoint(tmp_path / name)
    assert not (tmp_path / "trap").exists()


def test_bare_pickle_is_not_torch(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": [1, 2]}, protocol=2))
    with pytest.raises(CheckpointError, match="not one that torch"):
        open_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_cut_files(old: bool, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(50), "b": torch.ones(5000)}
    path = save(tensors, tmp_path / "x.pt", old)
    whole = path.read_bytes()
    for part in (0, 1, 2, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:part])
        try:
            opened = open_checkpoint(path)
        except CheckpointError as error:
            assert str(error).isprintable()  # noqa: PT017  (some cuts leave the description whole)
            continue
        assert old  # an archive has its directory at the end, so every cut is fatal
        (issue,) = [i for i in opened.issues if i.kind == "data-truncated"]
        lost = 0
        for name, tensor in tensors.items():
            try:
                assert torch.equal(opened.read(name), tensor)
            except CheckpointError as error:
                assert "fetch it again" in str(error)  # noqa: PT017
                lost += 1
        assert f"({lost} of 2 tensors)" in issue.message


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_mutations_end_in_one_line(old: bool, tmp_path: Path) -> None:
    # 600 damaged descriptions: an error of ours or a listing whose every tensor lies inside the file
    base = tmp_path / "base.pt"
    save({"draft_state_dict": {"a": torch.ones(3), "b": torch.ones(2, 2).half()}, "n": {"x": [1, 2.5]}}, base, old)
    raw = base.read_bytes() if old else zipfile.ZipFile(base).read("base/data.pkl")
    rng, path, refused = random.Random(5), tmp_path / "x.pt", 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(damaged), 900))
            damaged[at : at + rng.randint(0, 2)] = bytes(
                [rng.randrange(256)] if rng.random() < 0.5 else rng.choices(b"(.0123NRtcbQq\x85}]u", k=1)
            )
        if old:
            path.write_bytes(damaged)
        else:
            with zipfile.ZipFile(path, "w") as out:
                out.writestr("base/data.pkl", bytes(damaged))
                out.writestr("base/data/0", b"\0" * 12)
                out.writestr("base/data/1", b"\0" * 8)
        try:
            opened = open_checkpoint(path)
            for name in opened.tensors:
                opened.read(name)
        except CheckpointError as error:
            refused += 1
            assert str(error).isprintable()  # noqa: PT017
    assert refused > 100


def test_change_between_opening_and_reading(tmp_path: Path) -> None:
    path = save({"a": torch.ones(50)}, tmp_path / "x.pt", False)
    opened = open_checkpoint(path)
    save({"a": torch.ones(60)}, path, False)
    with pytest.raises(CheckpointError, match="changed while being read"):
        opened.read("a")


def test_large_file_is_streamed(tmp_path: Path) -> None:
    # 300 MB through a reader whose memory may grow by far less
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": torch.empty(75_000_000).fill_(1.0)}, path)
    code = (
        "import sys, resource; from eagle3diag.checkpoint.open import open_checkpoint\n"
        "opened = open_checkpoint(sys.argv[1])\n"
        "assert sum(len(b) for b in opened.blocks('w')) == 300_000_000\n"
        "for line in open('/proc/self/status'):\n    if line.startswith('VmHWM'): print(int(line.split()[1]) // 1024)"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    peak = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True).stdout
    assert int(peak) < 80
