"""The element types of the safetensors format, their widths, and what torch calls them.

The table is the ``Dtype`` enum of ``safetensors/src/tensor.rs`` (0.8.0). Types that fill less than a byte have no element
view in torch, so their tensors are read as the raw bytes; nothing here imports torch until a tensor is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["BITS", "FROM_TORCH", "byte_count", "torch_dtype"]

#: bits per element, by safetensors spelling
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

#: safetensors spelling by torch dtype name (``bfloat16`` -> ``BF16``)
FROM_TORCH: dict[str, str] = {name: spelling for spelling, name in _TORCH.items()} | {"float8_e8m0fnu": "F8_E8M0"}

_LIMIT = 1 << 64  # the loader counts in 64-bit words and refuses what does not fit


def byte_count(shape: tuple[int, ...], dtype: str) -> int | None:
    """Bytes that ``shape`` elements of ``dtype`` take.

    Returns:
        The count, or None where an intermediate product passes 2**64 or the elements end inside a byte: both
        are refused by the loader (``tensor.rs:642-661``), so the order of multiplication matters.
    """
    n = 1
    for size in shape:
        n *= size
        if n >= _LIMIT:
            return None
    bits = n * BITS[dtype]
    return None if bits >= _LIMIT or bits % 8 else bits // 8


def torch_dtype(dtype: str) -> torch.dtype | None:
    """The torch dtype of a safetensors spelling; None where only raw bytes make sense (F4, F6, E8M0)."""
    import torch

    name = _TORCH.get(dtype)
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None
