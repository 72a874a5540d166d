"""The battery of bad inputs: one builder for every way a checkpoint has been seen, or can be made, to break a reader.

Each `Bad` builds its input in an empty folder and says what has to come out: a ``CheckpointError`` whose line holds `says`, or an `Issue`
of one `kind` whose message does. Where the weights are damaged, the config beside them is sound, so nothing else is to blame.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.factory import tiny_config

Build = Callable[[Path], Path]


@dataclass(frozen=True)
class Bad:
    """One bad input: its row in the battery, how to build it, and what has to be said."""

    row: int
    name: str
    build: Build
    says: str
    kind: str = ""  #: of the `Issue`; empty for a `CheckpointError`
    torch: bool = False  #: building it takes torch


BATTERY: list[Bad] = []


def encoded(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header (bytes are taken as they are) and any claimed length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    """One header entry; by default a vector of F32 that fits its offsets."""
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def folder_with(folder: Path, blob: bytes | None = None, **files: bytes) -> Path:
    """A draft folder with a sound config and the given weight file; ``a__b`` stands for ``a.b`` in other names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    if blob is not None:
        (folder / "model.safetensors").write_bytes(blob)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def weights(row: int, name: str, says: str, blob: bytes | Callable[[], bytes], kind: str = "") -> None:
    """A draft whose only fault is in ``model.safetensors``."""
    BATTERY.append(Bad(row, name, lambda d: folder_with(d, blob if isinstance(blob, bytes) else blob()), says, kind))


def built(row: int, name: str, says: str, kind: str = "", torch: bool = False) -> Callable[[Build], Build]:
    """Register a builder of anything else."""

    def register(build: Build) -> Build:
        BATTERY.append(Bad(row, name, build, says, kind, torch))
        return build

    return register


# --------------------------------------------------------------------------- 1 to 4: not a safetensors file at all
weights(1, "empty", "0 bytes; a safetensors file needs at least 8", b"")
weights(1, "seven-bytes", "7 bytes; a safetensors file needs at least 8", b"\x01" * 7)
weights(
    2,
    "lfs-pointer",
    "Git LFS pointer, not weights: run `git lfs pull`",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 4723\n",
)
weights(3, "html", "an HTML page", b"<!DOCTYPE html>\n<html><head><title>404</title></head></html>")
weights(3, "html-after-blank", "an HTML page", b"\n\n  <html lang=en><body>sign in</body></html>")
weights(3, "json-message", "JSON text, not weights", b'{"error": "Repository not found", "code": 404}')
weights(3, "plain-message", "an error message", b"Access denied. Please ask for access to this repository.")
weights(4, "gzip", "a gzip archive", lambda: gzip.compress(b"weights" * 99))
weights(4, "gguf", "a GGUF file", b"GGUF\x03\0\0\0" + b"\0" * 64)
weights(4, "pickle", "a pickle, probably written by torch.save", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")


@built(4, "zip", "a zip archive, probably written by torch.save")
def _(d: Path) -> Path:
    with zipfile.ZipFile(folder_with(d) / "model.safetensors", "w") as z:
        z.writestr("archive/data.pkl", b"\x80\x02}.")
    return d


# --------------------------------------------------------------------------- 5 and 6: the length
weights(5, "length-2-63", "header length 9,223,372,036,854,775,808 exceeds 100,000,000", encoded(b"{}", length=1 << 63))
weights(5, "length-above-limit", "header length 100,000,001 exceeds 100,000,000", encoded(b"{}", length=100_000_001))
weights(5, "length-big-endian", "read big-endian it would be 2", struct.pack(">Q", 2) + b"{}")
weights(6, "length-past-end", "header claims 1,000 bytes, 2 follow", encoded(b"{}", length=1000))

# --------------------------------------------------------------------------- 7 to 11: the JSON
weights(7, "not-utf8", "header is not UTF-8 at byte 2", encoded(b'{"\xff\xfe": 1}'))
weights(8, "json-cut", "header is not JSON: ", encoded(b'{"w": {"dtype": "F32", "shape'))
weights(8, "json-nan", "contains NaN", encoded(b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"\0" * 4))
weights(
    8,
    "json-infinity",
    "contains -Infinity",
    encoded(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": -Infinity}}', b"\0" * 4),
)
weights(8, "json-1e999", "out of range", encoded(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1e999}}', b"\0" * 4))
weights(
    8,
    "json-half-surrogate",
    "half of a surrogate pair",
    encoded(b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4),
)
weights(8, "header-empty", "header is empty", encoded(b"    "))
weights(9, "json-list", "header is a JSON list, expected an object", encoded(b"[1, 2]"))
weights(9, "json-null", "header is a JSON null, expected an object", encoded(b"null"))
weights(9, "json-number", "header is a JSON number, expected an object", encoded(b"17"))
weights(10, "nested", "nested too deeply", encoded(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"))
weights(10, "nested-open", "nested too deeply", encoded(b'{"a":' * 200_000))
weights(
    10,
    "nested-300",
    "nested too deeply",
    encoded(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":' + b"[" * 300 + b"]" * 300 + b"}}", b"\0" * 4),
)
weights(
    11,
    "digits",
    "a 5000-digit integer",
    encoded(b'{"w": {"dtype": "F32", "shape": [' + b"1" * 5000 + b'], "data_offsets": [0, 4]}}', b"\0" * 4),
)

# --------------------------------------------------------------------------- 12 to 15: one entry
weights(12, "entry-list", "'w': malformed entry", encoded({"w": [1, 2]}))
weights(12, "entry-null", "'w': malformed entry", encoded({"w": None}))
weights(12, "entry-no-offsets", "data_offsets missing", encoded({"w": {"dtype": "F32", "shape": [1]}}))
weights(12, "entry-one-offset", "bad data_offsets [0]", encoded({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}))
weights(12, "entry-backwards", "end before they begin, [8, 4]", encoded({"w": entry(8, 4, [1])}, b"\0" * 8))
weights(13, "dtype-unknown", "'w': unknown dtype 'F7'", encoded({"w": entry(0, 4, dtype="F7")}, b"\0" * 4))
weights(13, "dtype-number", "'w': unknown dtype a JSON number", encoded({"w": entry(0, 4, dtype=32)}, b"\0" * 4))
weights(14, "shape-negative", "'w': bad shape [-2]", encoded({"w": entry(0, 8, [-2])}, b"\0" * 8))
weights(14, "shape-float", "'w': bad shape [2.0]", encoded({"w": entry(0, 8, [2.0])}, b"\0" * 8))
weights(14, "shape-boolean", "'w': bad shape [True]", encoded({"w": entry(0, 4, [True])}, b"\0" * 4))
weights(14, "shape-minus-zero", "'w': bad shape", encoded(b'{"w": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}'))
weights(14, "shape-text", "'w': bad shape", encoded({"w": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, b"\0" * 8))
weights(15, "shape-bytes", "shape [3] × F32 needs 12 bytes, offsets reserve 8", encoded({"w": entry(0, 8, [3])}, b"\0" * 8))
weights(15, "shape-2-66", "passes 2^64 bytes", encoded({"w": entry(0, 8, [1 << 33, 1 << 33])}, b"\0" * 8))
weights(15, "sub-byte", "ends inside a byte", encoded({"w": entry(0, 2, [3], "F4")}, b"\0" * 2))

# --------------------------------------------------------------------------- 16 to 20: readable, but wrong
weights(16, "overlap", "'b' overlaps 'a' by 4 bytes", encoded({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12), "offsets-overlap")
weights(16, "overlap-same", "overlaps", encoded({"a": entry(0, 8), "b": entry(0, 8)}, b"\0" * 8), "offsets-overlap")
weights(17, "hole", "4 unclaimed bytes before 'b'", encoded({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12), "offsets-hole")
weights(17, "hole-first", "4 unclaimed bytes before 'a'", encoded({"a": entry(4, 8)}, b"\0" * 8), "offsets-hole")
weights(17, "trailing", "6 unclaimed bytes after the last tensor", encoded({"a": entry(0, 4)}, b"\0" * 4 + b"PK\5\6zz"), "data-trailing")
weights(18, "truncated", "data section is 4 bytes, header describes 8", encoded({"a": entry(0, 8)}, b"\0" * 4), "data-truncated")
weights(18, "no-data", "data section is 0 bytes, header describes 8", encoded({"a": entry(0, 8)}), "data-truncated")
_E = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
weights(
    19,
    "name-twice",
    "key 'w' stands twice in the header: the loader keeps the last",
    encoded(f'{{"w":{_E},"w":{_E}}}'.encode(), b"\0" * 4),
    "duplicate-name",
)
weights(
    19,
    "metadata-twice",
    "'__metadata__' stands twice",
    encoded(f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{_E}}}'.encode(), b"\0" * 4),
    "metadata",
)
weights(19, "field-twice", "malformed entry, 'dtype' stands twice", encoded(f'{{"w":{{"dtype":"F16",{_E[1:]}}}'.encode(), b"\0" * 4))
weights(
    20,
    "metadata-number",
    "'n' is a JSON number, expected a string",
    encoded({"__metadata__": {"n": 1}, "a": entry(0, 4)}, b"\0" * 4),
    "metadata",
)
weights(20, "metadata-list", "__metadata__ is a JSON list", encoded({"__metadata__": [], "a": entry(0, 4)}, b"\0" * 4), "metadata")
weights(20, "nul-padding", "padded with 3 NUL bytes", encoded(f'{{"w":{_E}}}'.encode() + b"\0\0\0", b"\0" * 4), "header-padding")
weights(20, "leading-space", "starts with 2 blank bytes", encoded(f'  {{"w":{_E}}}'.encode(), b"\0" * 4), "header-padding")

# --------------------------------------------------------------------------- 21 and 22: odd, but a tensor all the same
weights(
    21,
    "name-html",
    "tensor name '<img src=x onerror=alert(1)>'",
    encoded({"<img src=x onerror=alert(1)>": entry(0, 4)}, b"\0" * 4),
    "odd-name",
)
weights(21, "name-ansi", "\\x1b[31mred", encoded({"\x1b[31mred\x07": entry(0, 4)}, b"\0" * 4), "odd-name")
weights(21, "name-rtl", "\\u202e", encoded({"a\u202egnp.exe": entry(0, 4)}, b"\0" * 4), "odd-name")
weights(21, "name-megabyte", "1,000,000 characters", lambda: encoded({"n" * 1_000_000: entry(0, 4)}, b"\0" * 4), "odd-name")
weights(21, "name-line-break", "a\\nb", encoded({"a\nb": entry(0, 4)}, b"\0" * 4), "odd-name")
weights(22, "zero-by-2-62-late", "passes 2^64", encoded({"a": entry(0, 0, [1 << 62, 8, 0])}))


# --------------------------------------------------------------------------- 23 and 24: no file to read
@built(23, "directory-as-weights", "a directory, not a regular file")
def _(d: Path) -> Path:
    (folder_with(d) / "model.safetensors").mkdir()
    return d


@built(23, "fifo", "a FIFO, not a regular file")
def _(d: Path) -> Path:
    os.mkfifo(folder_with(d) / "model.safetensors")
    return d / "model.safetensors"


@built(23, "fifo-in-folder", "a FIFO, not a regular file")
def _(d: Path) -> Path:
    os.mkfifo(folder_with(d) / "model.safetensors")
    return d


@built(23, "socket", "a socket, not a regular file")
def _(d: Path) -> Path:
    os.mknod(folder_with(d) / "model.safetensors", stat.S_IFSOCK | 0o600)
    return d


@built(23, "device", "a device, not a regular file")
def _(d: Path) -> Path:
    (folder_with(d) / "model.safetensors").symlink_to("/dev/zero")
    return d


@built(23, "link-to-nothing", "a link to a file that is not there")
def _(d: Path) -> Path:
    (folder_with(d) / "model.safetensors").symlink_to(d / "blobs" / "gone")
    return d


@built(23, "link-to-itself", "too many levels of symbolic links")
def _(d: Path) -> Path:
    (folder_with(d) / "model.safetensors").symlink_to("model.safetensors")
    return d


@built(23, "folder-missing", "no such file or folder")
def _(d: Path) -> Path:
    return d / "nowhere"


@built(23, "folder-empty", "no weights and no config in this folder")
def _(d: Path) -> Path:
    return d


@built(23, "folder-of-folders", "subfolders hold some: state_0/, state_1/; give one of them")
def _(d: Path) -> Path:
    for n in range(2):
        folder_with(d / f"state_{n}", encoded({"a": entry(0, 4)}, b"\0" * 4))
    return d


@built(23, "path-with-nul", "not a valid path")
def _(d: Path) -> Path:
    return Path(f"{d}/a\0b")


# --------------------------------------------------------------------------- 26: the shard index
def _index(d: Path, weight_map: Any, **shards: dict[str, Any]) -> Path:
    folder_with(d)
    (d / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, header in shards.items():
        (d / f"{name}.safetensors").write_bytes(encoded(header, b"\0" * max((e["data_offsets"][1] for e in header.values()), default=0)))
    return d


def index(name: str, says: str, weight_map: Any, kind: str = "", **shards: dict[str, Any]) -> None:
    """A draft whose only fault is in its shard index."""
    BATTERY.append(Bad(26, name, lambda d: _index(d, weight_map, **shards), says, kind))


index("shard-parent", "shard path '../outside.safetensors' leaves the folder", {"a": "../outside.safetensors"})
index("shard-absolute", "shard path '/etc/passwd' leaves the folder", {"a": "/etc/passwd"})
index("shard-parent-inside", "leaves the folder", {"a": "x/../../outside.safetensors"})
index("shard-backslash", "leaves the folder or is no file name", {"a": "..\\outside.safetensors"})
index("shard-url", "leaves the folder or is no file name", {"a": "https://host/file"})
index("shard-number", "index gives 'a' a JSON number, expected a file name", {"a": 7})
index("weight-map-list", "a weight_map that is a list", ["a"])
index(
    "shard-missing", "two.safetensors: not there", {"a": "one.safetensors", "b": "two.safetensors"}, "shard-missing", one={"a": entry(0, 4)}
)
_ONE = {"a": entry(0, 4)}
_BOTH = {"a": entry(0, 4), "b": entry(4, 8)}
_SAID = {"a": "one.safetensors", "b": "one.safetensors"}
index("key-not-in-shard", "'b' is listed in one.safetensors but not in that file", _SAID, "shard-unlisted", one=_ONE)
index("key-not-listed", "'b' is in one.safetensors but not listed", {"a": "one.safetensors"}, "shard-unlisted", one=_BOTH)
_SAID = {"a": "one.safetensors", "b": "two.safetensors"}
index("key-in-two", "'a' is in 2 files, one.safetensors and two.safetensors", _SAID, "shard-twice", one=_ONE, two=_BOTH)


@built(26, "shard-link-out", "leaves the folder by a link")
def _(d: Path) -> Path:
    outside = d / "outside.safetensors"
    outside.write_bytes(encoded({"a": entry(0, 4)}, b"\0" * 4))
    _index(d / "draft", {"a": "one.safetensors"})
    (d / "draft" / "one.safetensors").symlink_to(outside)
    return d / "draft"


@built(26, "index-not-json", "index is not JSON")
def _(d: Path) -> Path:
    return folder_with(d, model__safetensors__index__json=b'{"weight_map": {"a":')


@built(26, "index-without-map", "no 'weight_map'")
def _(d: Path) -> Path:
    return folder_with(d, model__safetensors__index__json=b'{"metadata": {}}')


@built(26, "index-key-twice", "stands twice in weight_map", "duplicate-name")
def _(d: Path) -> Path:
    _index(d, {}, one={"a": entry(0, 4)})
    (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}')
    return d


@built(26, "shard-is-lfs-pointer", "Git LFS pointer")
def _(d: Path) -> Path:
    _index(d, {"a": "one.safetensors"})
    (d / "one.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 4723\n")
    return d


# --------------------------------------------------------------------------- 28: torch files
def torch_file(name: str, says: str, make: Callable[[Any], Any], *, old: bool = False) -> None:
    """A ``pytorch_model.bin`` of whatever `make` returns from torch."""

    def build(d: Path) -> Path:
        import torch

        folder_with(d)
        torch.save(make(torch), d / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        return d

    BATTERY.append(Bad(28, name, build, says, torch=True))


def _namespace(torch: Any) -> Any:
    import argparse

    return {"args": argparse.Namespace(lr=1e-4), "draft_state_dict": {"w": torch.ones(2)}}


torch_file("pickle-foreign", "needs `argparse.Namespace`", _namespace)
torch_file("pickle-foreign-old", "needs `argparse.Namespace`", _namespace, old=True)
torch_file("pickle-module", "needs `torch.nn.modules.linear.Linear`", lambda torch: {"model": torch.nn.Linear(2, 2)})


def _expanded(torch: Any) -> Any:
    return {"w": torch.zeros(1).expand(2**40)}


torch_file("pickle-expanded", "an expanded view, 4,398,046,511,104 bytes over a storage of 4", _expanded)
torch_file("pickle-expanded-old", "an expanded view, 4,398,046,511,104 bytes over a storage of 4", _expanded, old=True)
torch_file("pickle-list", "holds a list, expected tensors by name", lambda torch: [torch.ones(2)])
torch_file("pickle-optimizer", "the state of an optimizer", lambda torch: {"state": {0: {"step": torch.ones(1)}}, "param_groups": []})


def pickled(name: str, says: str, raw: bytes, *, packed: bool = False, more: dict[str, bytes] | None = None) -> None:
    """A ``pytorch_model.bin`` archive around a pickle written by hand."""

    def build(d: Path) -> Path:
        with zipfile.ZipFile(folder_with(d) / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as z:
            z.writestr("archive/data.pkl", raw)
            for record, content in (more or {}).items():
                z.writestr(f"archive/{record}", content)
        return d

    BATTERY.append(Bad(28, name, build, says))


pickled("pickle-eval", "needs `builtins.eval`", b"cbuiltins\neval\n(S'1/0'\ntR.")
pickled("pickle-os-system", "needs `posix.system`", b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00true" + b"tR.")
pickled(
    "torchscript", "a TorchScript program, not weights", b"\x80\x02}.", more={"constants.pkl": b"\x80\x02).", "code/__torch__.py": b"pass"}
)
pickled("zip-bomb", "is compressed", b"\x80\x02}.", packed=True, more={"data/0": b"\0" * 30_000_000})
pickled("pickle-cut", "the pickle is cut or damaged", b"\x80\x02}q\x00(X\x01")
pickled("pickle-huge-text", "a text of 4,294,967,295 bytes", b"\x80\x02X\xff\xff\xff\xff" + b"a" * 9)
pickled("pickle-reduce-on-text", "the pickle is cut or damaged", b"\x80\x02X\x01\x00\x00\x00a)R.")
pickled("pickle-empty-stack", "the pickle is cut or damaged", b"\x80\x02.")


@built(28, "zip-without-pickle", "a zip archive without data.pkl")
def _(d: Path) -> Path:
    with zipfile.ZipFile(folder_with(d) / "pytorch_model.bin", "w") as z:
        z.writestr("weights.txt", b"none")
    return d


@built(28, "zip-cut", "the zip archive is cut or damaged", torch=True)
def _(d: Path) -> Path:
    import torch

    torch.save({"w": torch.ones(999)}, folder_with(d) / "pytorch_model.bin")
    raw = (d / "pytorch_model.bin").read_bytes()
    (d / "pytorch_model.bin").write_bytes(raw[: len(raw) // 2])
    return d


@built(28, "bin-empty", "empty (failed download?)")
def _(d: Path) -> Path:
    return folder_with(d, pytorch_model__bin=b"")


@built(28, "bin-html", "an HTML page")
def _(d: Path) -> Path:
    return folder_with(d, pytorch_model__bin=b"<html>sign in</html>")
