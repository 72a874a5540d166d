"""Every bad input of the battery ends in one printable line or in findings; quickly, in little memory, and never in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError
from tests.bad_files import BATTERY, Bad, encoded, entry, folder_with
from tests.factory import tiny_config

pytestmark = pytest.mark.skipif(os.name == "nt", reason="FIFOs, sockets and links as POSIX has them")


def by_name(bad: Bad) -> str:
    return f"{bad.row}-{bad.name}"


def one_line(text: str) -> None:
    assert text.strip()
    assert text.isprintable(), text
    assert len(text) < 1000
    for advice in ("weights_only=False", "Traceback"):
        assert advice not in text


@pytest.mark.parametrize("bad", BATTERY, ids=by_name)
def test_one_line_or_issue(bad: Bad, tmp_path: Path) -> None:
    path = bad.build(tmp_path)
    if not bad.kind:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        one_line(str(caught.value))
        assert bad.says in str(caught.value)
        return
    issues = [i for i in open_checkpoint(path).issues if i.kind == bad.kind]
    assert issues
    assert bad.says in " ".join(i.message for i in issues)
    for issue in issues:
        one_line(issue.message)
        one_line(issue.file)


def test_battery_is_whole() -> None:
    names = [b.name for b in BATTERY]
    assert len(set(names)) == len(names)
    elsewhere = {24, 25, 27, 29, 30}  # need more than a builder: the tests below
    assert {b.row for b in BATTERY} | elsewhere == set(range(1, 31))


# a small process in between, because the peak a child reports includes that of the process it was forked from
_LAUNCHER = """
import os, sys
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(pid, 0)
with open(sys.argv[1], "w") as f:
    f.write(f"{used.ru_utime + used.ru_stime} {used.ru_maxrss / (1024 if sys.platform != 'darwin' else 1 << 20)}")
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, str, float, float]:
    """Exit status, both streams, seconds of processor time and peak MB of one command; the measurement is left in a sibling of `folder`."""
    note = folder.with_name(folder.name + "-used")
    command = [sys.executable, "-S", "-c", _LAUNCHER, str(note), sys.executable, "-m", "eagle3diag", *arguments]
    child = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=30, check=False)
    seconds, peak = map(float, note.read_text().split())
    return child.returncode, child.stdout, child.stderr, seconds, peak


_HEAVY = (
    "nested-open",
    "name-megabyte",
    "fifo-in-folder",
    "shard-missing",
    "key-in-two",
    "pickle-expanded",
    "pickle-module",
    "pickle-huge-text",
    "zip-bomb",
)
_ONE_A_ROW = {b.row: b for b in reversed(BATTERY)}


@pytest.mark.parametrize("bad", [*_ONE_A_ROW.values(), *(b for b in BATTERY if b.name in _HEAVY)], ids=by_name)
def test_command_line(bad: Bad, tmp_path: Path) -> None:
    path = bad.build(tmp_path)
    code, out, err, seconds, peak = run(tmp_path, "check", str(path), "--headers-only", "--format", "json")
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    if bad.kind:
        assert code in (0, 1), err
        assert json.loads(out)["schema"] == 1
        codes = {f["code"] for f in json.loads(out)["findings"]}
        if bad.kind.startswith("shard"):
            assert "KEY208" in codes
        elif bad.kind.startswith(("data", "offsets")):
            assert "KEY210" in codes
    else:
        assert code == 2
        assert not out
        assert len(err.splitlines()) == 1
        assert bad.says in err
    assert seconds < 1.0
    assert peak < 200


def test_permission_denied_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    # row 24: not "no such file", which is what the loader says; root may read everything, so root steps down for this
    with tempfile.TemporaryDirectory() as name:
        folder = folder_with(Path(name), encoded({"a": entry(0, 4)}, b"\0" * 4))
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0)
        (folder / "closed").mkdir(mode=0)
        listed = folder_with(folder / "listed", encoded({"a": entry(0, 4)}, b"\0" * 4))
        listed.chmod(0o444)  # its names may be read, its files may not
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            for path in (folder, folder / "model.safetensors", folder / "closed", listed):
                with pytest.raises(CheckpointError, match="permission denied"):
                    open_checkpoint(path)
        finally:
            if root:
                os.seteuid(0)
        (folder / "closed").chmod(0o700)
        listed.chmod(0o700)


def changed(tmp_path: Path, how: str) -> None:
    path = folder_with(tmp_path, encoded({"a": entry(0, 4000)}, bytes(4000))) / "model.safetensors"
    blocks = open_checkpoint(tmp_path).blocks("a", 64)
    next(blocks)
    if how == "shrinks":
        os.truncate(path, 2000)
    elif how == "grows":
        path.write_bytes(path.read_bytes() + b"more")
    elif how == "replaced":
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
    elif how == "rewritten":
        before = path.stat()
        with path.open("r+b") as f:
            f.write(path.read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10_000_000))
    else:
        path.unlink()
    for _ in blocks:
        pass


@pytest.mark.parametrize("how", ["shrinks", "grows", "replaced", "rewritten", "removed"])
def test_change_while_read(tmp_path: Path, how: str) -> None:
    # row 25: no SIGBUS, no half-old tensor
    with pytest.raises(CheckpointError, match="while being read") as caught:
        changed(tmp_path, how)
    one_line(str(caught.value))


def test_change_after_open(tmp_path: Path) -> None:
    path = folder_with(tmp_path, encoded({"a": entry(0, 4000)}, bytes(4000))) / "model.safetensors"
    opened = open_checkpoint(tmp_path)
    path.write_bytes(encoded({"b": entry(0, 8000)}, bytes(8000)))
    with pytest.raises(CheckpointError, match=r"4,0.. bytes before, 8,0.. after"):
        opened.read("a")


def test_values_of_truncated_file(tmp_path: Path) -> None:
    folder_with(tmp_path, encoded({"a": entry(0, 8), "b": entry(8, 1 << 40, [((1 << 40) - 8) // 4])}, bytes(12)))
    opened = open_checkpoint(tmp_path)
    assert opened.read("a").tolist() == [0.0, 0.0]  # what is there is still readable
    with pytest.raises(CheckpointError, match="the file has"):
        opened.read("b")
    with pytest.raises(CheckpointError, match="ends at byte"):
        list(opened.blocks("b"))


CONFIGS = {
    "absent": None,
    "cut": b'{"architectures": [',
    "list": b"[]",
    "utf16": json.dumps(tiny_config()).encode("utf-16"),
    "50MB": b'{"x": "' + b"a" * 50_000_000 + b'"}',
    "nested": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"hidden_size": ' + b"1" * 5000 + b"}",
    "text-for-number": json.dumps(tiny_config(hidden_size="64")).encode(),
    "boolean-for-number": json.dumps(tiny_config(hidden_size=True)).encode(),
    "a-billion-layers": json.dumps(tiny_config(num_hidden_layers=10**9)).encode(),
    "negative-heads": json.dumps(tiny_config(num_attention_heads=-4)).encode(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, tmp_path: Path) -> None:
    # row 27: a bad config is a finding, or one line; the weights beside it stay readable
    folder_with(tmp_path, encoded({"fc.weight": entry(0, 4 * 64 * 192, [64, 192])}, bytes(4 * 64 * 192)))
    content = CONFIGS[name]
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert open_checkpoint(tmp_path).tensors["fc.weight"].shape == (64, 192)
    code, out, err, seconds, peak = run(tmp_path, "check", str(tmp_path), "--headers-only", "--format", "json")
    assert code == 1, err
    assert {f["code"][:3] for f in json.loads(out)["findings"]} & {"CFG", "KEY"}
    assert seconds < 1.0
    assert peak < 200


PAYLOADS = {
    "BF16": b"\xc0\x7f" * 8,  # NaN
    "F16": b"\x00\x7c" * 8,  # infinity
    "F32": b"\x01\x00\x00\x00" * 4,  # the smallest subnormal
    "F64": b"\xff" * 16,
    "F8_E4M3": b"\x7f" * 16,
    "F8_E5M2": b"\x7c" * 16,
    "F8_E8M0": b"\xff" * 16,
    "F4": b"\x77" * 16,
    "F6_E2M3": b"\xff" * 15,
    "BOOL": b"\x02" * 16,
    "U64": b"\xff" * 16,
    "C64": b"\xff" * 16,
}


@pytest.mark.parametrize("dtype", PAYLOADS)
def test_payloads(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # row 29: read as stored, judged, never a crash
    from eagle3diag.checkpoint.dtypes import BITS
    from eagle3diag.cli import main

    data = PAYLOADS[dtype]
    count = len(data) * 8 // BITS[dtype]
    folder_with(tmp_path, encoded({"norm.weight": entry(0, len(data), [count], dtype)}, data))
    opened = open_checkpoint(tmp_path)
    tensor = opened.read("norm.weight")
    assert b"".join(bytes(b) for b in opened.blocks("norm.weight")) == data
    assert tensor.numel() == (count if BITS[dtype] >= 8 else len(data))
    if dtype != "BOOL":
        assert bytes(tensor.contiguous().view(-1).view(__import__("torch").uint8).tolist()) == data
    else:
        assert tensor.tolist() == [True] * 16
    assert main(["check", str(tmp_path), "--format", "json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["verdict"] in ("broken", "suspect", "healthy")


@pytest.mark.parametrize("fault", ["range", "dtype", "length"])
def test_bad_mapping(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # row 30: a mapping that points nowhere is a finding, with a number
    import torch

    from eagle3diag.cli import main
    from tests.factory import tiny_tensors, write_draft

    tensors = tiny_tensors()
    if fault == "range":
        tensors["d2t"][7] = 40_000
    elif fault == "dtype":
        tensors["d2t"] = tensors["d2t"].to(torch.float32)
    else:
        tensors["d2t"] = tensors["d2t"][:-3].clone()
    folder = write_draft(tmp_path / "draft", tensors, tiny_config())
    assert main(["check", str(folder), "--format", "json"]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any("d2t" in json.dumps(f) for f in findings if f["severity"] in ("error", "warning"))
