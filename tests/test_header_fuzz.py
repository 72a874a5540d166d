"""Two thousand seeded mutations of a header, and the loader itself as judge: whatever ``safe_open`` refuses is refused or flagged here."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from eagle3diag.checkpoint.header import Header, read_header
from eagle3diag.errors import CheckpointError

MUTATIONS, SEEDS = 260, 8

# spellings a careless or hostile writer might put where a value belongs
TOKENS = (
    b"-1 -0 0 1 1.0 1e2 1E400 -2.5 NaN Infinity null true false 00 01 0x10 +1 18446744073709551615 18446744073709551616 "
    b"[] {} [[[[]]]] [0] [0,4] [4,0] [0,4,8] /**/ ' , : [ ] { } "
    rb'"" "F32" "BF16" "F4" "F8_E4M3" "f32" "\ud800" "\udc00\ud800" "\u0000" "__metadata__" "dtype" "shape" "a" "b" {"dtype":"F32"}'
).split(b" ")


def base(rng: random.Random) -> tuple[bytes, bytes]:
    """A sound header of a few tensors and its data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    at = 0
    for name in rng.sample(["a", "b", "layers.0.mlp.up_proj.weight", "fc.weight", "d2t", "ü"], rng.randint(1, 5)):
        dtype, width = rng.choice([("F32", 4), ("BF16", 2), ("I64", 8), ("BOOL", 1), ("U8", 1)])
        shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        size = width
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", ": ")])).encode()
    return raw + b" " * rng.choice([0, 0, -len(raw) % 8]), bytes(rng.randrange(256) for _ in range(at))


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """One to three small damages to the JSON text, or one to its numbers and words, after which it is JSON still."""
    if rng.random() < 0.4:
        return reworded(rng, raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(raw) + 1)
        how = rng.randrange(8)
        if how == 0 and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        elif how == 1:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at:]
        elif how == 2:
            raw = raw[:at] + raw[at + rng.randint(1, 9) :]
        elif how == 3:
            raw = raw[:at] + rng.choice(TOKENS) + raw[at:]
        elif how == 4:
            other = rng.randrange(len(raw) + 1)
            raw = raw[:at] + raw[min(at, other) : max(at, other)] + raw[at:]
        else:  # a whole token for another: the damage that still parses
            spans = [s for s in _tokens(raw) if s[1] > s[0]]
            if spans:
                begin, end = rng.choice(spans)
                raw = raw[:begin] + rng.choice(TOKENS) + raw[end:]
    return raw


def reworded(rng: random.Random, raw: bytes) -> bytes:
    """A number a little off, two entries swapped, a name renamed, a field left out or added."""
    header = json.loads(raw)
    entries = [e for k, e in header.items() if k != "__metadata__"]
    one = rng.choice(entries)
    how = rng.randrange(7)
    if how == 0:
        one["data_offsets"][rng.randrange(2)] += rng.choice([-8, -4, -1, 1, 4, 8, 1 << 40])
    elif how == 1:
        other = rng.choice(entries)
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    elif how == 2:
        one["shape"].insert(rng.randint(0, len(one["shape"])), rng.choice([0, 1, 2, 1 << 31, 1 << 63]))
    elif how == 3:
        one["dtype"] = rng.choice(["F32", "F16", "I8", "F8_E5M2", "F4", "F6_E2M3", "F8_E8M0", "U64", "C64", "F7", "bf16"])
    elif how == 4:
        del one[rng.choice(list(one))]
    elif how == 5:
        one[rng.choice(["extra", "Dtype", ""])] = rng.choice([None, [[]], {"a": {}}, 1.5, "x" * 99])
    else:
        shift = rng.choice([1, 4, 16])
        for e in entries[rng.randrange(len(entries)) :]:
            e["data_offsets"] = [n + shift for n in e["data_offsets"]]
    return json.dumps(header).encode()


def _tokens(raw: bytes) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(rb'"[^"]*"|-?[0-9]+|\[[0-9, ]*\]', raw)]


def framed(rng: random.Random, raw: bytes, data: bytes) -> bytes:
    """The file around it; now and then with a wrong length, or with data cut, longer or swapped for nothing."""
    length = len(raw)
    if rng.random() < 0.08:
        length = rng.choice([0, 1, length - 1, length + 1, length + 7, 1 << 31, 1 << 63, (1 << 64) - 1, 100_000_001])
    if rng.random() < 0.1:
        data = rng.choice([data[:-1], data + b"\0", data + b"tail", b""])
    return struct.pack("<Q", length % (1 << 64)) + raw + data


def loads(path: Path) -> str:
    """What the loader says: nothing if it opens the file and lists it."""
    try:
        with safe_open(path, "np") as f:
            list(f.keys())
            f.metadata()
    except SafetensorError as error:
        return str(error) or "refused"
    except Exception as error:  # it turns some failures into others
        return repr(error)
    return ""


def outcome(path: Path) -> tuple[Header | None, str]:
    """The header, or the line that refuses it; any other exception is a failure."""
    try:
        return read_header(path), ""
    except CheckpointError as error:
        return None, str(error)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_mutations(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "model.safetensors"
    refused = flagged = sound = stricter = 0
    for _ in range(MUTATIONS):
        raw, data = base(rng)
        blob = framed(rng, mutated(rng, raw), data)
        path.write_bytes(blob)
        said = loads(path)
        header, line = outcome(path)
        if header is None:
            assert line.isprintable()
            assert len(line) < 1500
            refused += 1
            stricter += not said
            continue
        flagged += bool(header.issues)
        sound += not header.issues
        assert not said or header.issues, (said, blob)
        for issue in header.issues:
            assert issue.message.isprintable()
            assert len(issue.message) < 1500
        if not said:
            with safe_open(path, "np") as f:
                assert set(f.keys()) == set(header.tensors)
                assert (f.metadata() or {}) == header.metadata
                for name in f.keys():  # noqa: SIM118  (a handle, not a mapping)
                    assert list(header.tensors[name].shape) == f.get_slice(name).get_shape()
                    assert header.tensors[name].dtype == f.get_slice(name).get_dtype()
    # the mutations reach all three outcomes, and strictness beyond the loader's stays rare
    assert refused > 20
    assert flagged > 5
    assert sound > 5
    assert stricter <= 0.02 * MUTATIONS


def test_number_of_mutations() -> None:
    assert MUTATIONS * SEEDS >= 2000
