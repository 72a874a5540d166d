"""From the raw bytes of a tensor to numbers: the dtype table and the block reader the other modules share.

Everything numeric in this room works on blocks of about one MiB, so memory stays flat whatever the file size. Floats of
every width become float64 through torch (exact for all of them), integers and bools too (exact below 2**53).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.errors import CheckpointError, escaped

if TYPE_CHECKING:
    import torch

__all__ = [
    "BLOCK",
    "FLOATS",
    "ITEM_BYTES",
    "blocks_of",
    "has_numbers",
    "not_finite",
    "ordered",
    "surely_finite",
    "to_float32",
    "to_float64",
    "torch_dtype",
]

BLOCK = 1 << 20  #: bytes read at a time

_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}

#: bytes of one element; sub-byte and complex dtypes are absent: their values are not looked at
ITEM_BYTES = {
    name: 8 if name[1:] == "64" else 4 if name[1:] == "32" else 2 if name in ("F16", "BF16", "I16", "U16") else 1 for name in _TORCH
}

#: float dtypes and the mantissa bits they keep behind the leading one
FLOATS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7, "F8_E4M3": 3, "F8_E5M2": 2}

#: bits of +infinity, magnitude mask and integer view of the wider floats: larger magnitudes are NaN
_INF = {
    "F64": (0x7FF << 52, (1 << 63) - 1, "int64"),
    "F32": (0xFF << 23, 0x7FFFFFFF, "int32"),
    "F16": (0x7C00, 0x7FFF, "int16"),
    "BF16": (0x7F80, 0x7FFF, "int16"),
}


def has_numbers(info: TensorInfo) -> bool:
    """Whether values of this dtype can be looked at (sub-byte and complex ones cannot)."""
    return info.dtype in ITEM_BYTES


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype name.

    Raises:
        CheckpointError: a dtype whose values cannot be looked at here.
    """
    import torch

    found = getattr(torch, _TORCH.get(name, ""), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"values of dtype {escaped(name)} cannot be read here: known are {', '.join(_TORCH)}")
    return found


def blocks_of(checkpoint: Checkpoint, name: str, block: int = BLOCK) -> Iterator[memoryview]:
    """``Checkpoint.blocks`` with the total checked: a file that ends early or grew is never taken for a whole tensor.

    Raises:
        CheckpointError: unknown name, or fewer or more bytes than the header promised.
    """
    want = checkpoint.tensors[name].nbytes if name in checkpoint.tensors else 0
    got = 0
    for view in checkpoint.blocks(name, block):
        got += len(view)
        yield view
    if got != want:
        raise CheckpointError(f"{checkpoint.path}: {escaped(name)} gave {got} of {want} bytes: the file changed; read it again")


@cache
def _table(dtype: str) -> torch.Tensor:
    """The 256 values of a one-byte float dtype, float32: looking one up is six times faster than torch's conversion."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch_dtype(dtype)).to(torch.float32)


def _one_byte_float(dtype: str) -> bool:
    return dtype.startswith("F8")


def to_float64(view: memoryview, dtype: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The elements of one block as a float64 vector [n], in ``out`` (float64 [n]) where it is given, else a new one.

    Raises:
        CheckpointError: a dtype without numbers, or a block that ends inside an element.
    """
    import torch

    kind = torch_dtype(dtype)
    if len(view) % ITEM_BYTES[dtype]:
        raise CheckpointError(f"a block of {len(view)} bytes ends inside an element of {ITEM_BYTES[dtype]} bytes ({dtype})")
    target = torch.empty(len(view) // ITEM_BYTES[dtype], dtype=torch.float64) if out is None else out
    if not len(view):
        return target
    if dtype == "BOOL":  # any non-zero byte counts as true; a bool tensor over such bytes would be undefined
        return target.copy_(torch.frombuffer(view, dtype=torch.uint8) != 0)
    if _one_byte_float(dtype):
        return target.copy_(_table(dtype).index_select(0, torch.frombuffer(view, dtype=torch.uint8).int()))
    return target.copy_(torch.frombuffer(view, dtype=kind))


def to_float32(view: memoryview, dtype: str, out: torch.Tensor) -> torch.Tensor:
    """The elements of one block of one- or two-byte floats in ``out`` (float32 [n]): exact."""
    import torch

    if _one_byte_float(dtype):
        return torch.index_select(_table(dtype), 0, torch.frombuffer(view, dtype=torch.uint8).int(), out=out)
    return out.copy_(torch.frombuffer(view, dtype=torch_dtype(dtype)))


def surely_finite(view: memoryview, dtype: str) -> bool:
    """A quick look: True only where a block holds no NaN and no infinity; False where it may (a sum may also overflow)."""
    import torch

    if dtype in _INF:
        return math.isfinite(float(torch.frombuffer(view, dtype=torch_dtype(dtype)).sum()))
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return int((torch.frombuffer(view, dtype=torch.uint8) & 0x7F).max()) < (0x7F if dtype == "F8_E4M3" else 0x7C)
    return not _one_byte_float(dtype)


def not_finite(view: memoryview, dtype: str) -> tuple[int, int]:
    """How many elements of a block are NaN, and how many infinite, from their bits."""
    import torch

    if dtype in _INF:
        inf, mask, integer = _INF[dtype]
        magnitude = torch.frombuffer(view, dtype=getattr(torch, integer)) & mask
        return int((magnitude > inf).sum()), int((magnitude == inf).sum())
    if _one_byte_float(dtype):
        counts = torch.bincount(torch.frombuffer(view, dtype=torch.uint8).int(), minlength=256)
        table = _table(dtype)
        return int(counts[torch.isnan(table)].sum()), int(counts[torch.isinf(table)].sum())
    return 0, 0


def ordered(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Floats as int64 such that neighbours differ by one: the distance of two is their distance in ulps. Both zeros are 0."""
    import torch

    width = ITEM_BYTES[dtype]
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[width]
    mask = (1 << (8 * width - 1)) - 1
    bits = values.view(integer)
    magnitude = (bits & mask).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)
