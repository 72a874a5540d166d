"""From the raw bytes of a tensor to numbers: the dtype table and the block reader the other modules share.

Everything numeric in this room works on blocks of about one MiB, so memory stays flat whatever the file size. Floats of
every width become float64 through torch (exact for all of them), integers and bools too (exact below 2**53).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint, TensorInfo
from eagle3diag.errors import CheckpointError, escaped

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "FLOATS", "ITEM_BYTES", "blocks_of", "has_numbers", "to_float64", "torch_dtype"]

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

#: dtypes that round: the mantissa bits kept behind the leading one, and the smallest exponent of a normal number
FLOATS = {"F64": (52, -1022), "F32": (23, -126), "F16": (10, -14), "BF16": (7, -126), "F8_E4M3": (3, -6), "F8_E5M2": (2, -14)}


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


def to_float64(view: memoryview, dtype: str) -> torch.Tensor:
    """The elements of one block as a new float64 vector [n].

    Raises:
        CheckpointError: a dtype without numbers, or a block that ends inside an element.
    """
    import torch

    kind = torch_dtype(dtype)
    if len(view) % ITEM_BYTES[dtype]:
        raise CheckpointError(f"a block of {len(view)} bytes ends inside an element of {ITEM_BYTES[dtype]} bytes ({dtype})")
    if not len(view):
        return torch.empty(0, dtype=torch.float64)
    if dtype == "BOOL":  # any non-zero byte counts as true; a bool tensor over such bytes would be undefined
        return (torch.frombuffer(view, dtype=torch.uint8) != 0).to(torch.float64)
    elements = torch.frombuffer(view, dtype=kind)
    if ITEM_BYTES[dtype] == 1 and kind.is_floating_point:  # fp8 has no direct kernel to float64 in every release
        return elements.to(torch.float32).to(torch.float64)
    return elements.to(torch.float64, copy=True)
