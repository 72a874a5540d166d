"""Remote checkpoints, from a server on this machine: headers alone, in few bytes, and one line for whatever a server can do wrong."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.errors import CheckpointError, UsageError
from tests.bad_files import encoded, entry
from tests.factory import tiny_config, tiny_tensors, write_draft


class Host:
    """A server of a folder that keeps what it was asked and how much it sent; `special` answers a path in another way."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        self.ranges = True
        self.special: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        host = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                host.asked.append((self.path, dict(self.headers)))
                if path in host.special:
                    host.special[path](self)
                    return
                file = host.root / path.lstrip("/")
                if not file.is_file():
                    self.answer(404, b"not found")
                    return
                content = file.read_bytes()
                found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if found and host.ranges:
                    begin, end = int(found[1]), min(int(found[2]), len(content) - 1)
                    if begin >= len(content):
                        self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                    else:
                        self.answer(206, content[begin : end + 1], {"Content-Range": f"bytes {begin}-{end}/{len(content)}"})
                else:
                    self.answer(200, content)

            def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                try:
                    self.wfile.write(body)
                    host.sent += len(body)
                except OSError:  # the reader has what it wanted
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "served"
    root.mkdir()
    served = Host(root)
    yield served
    served.server.shutdown()
    served.server.server_close()


def same_as_local(url: str, folder: Path) -> None:
    local, remote = open_checkpoint(folder), open_checkpoint(url)
    assert remote.remote
    assert remote.issues == local.issues
    assert remote.configs == local.configs
    assert remote.files == local.files
    assert remote.form == local.form
    assert remote.sizes == local.sizes
    assert dict(remote.tensors) == dict(local.tensors)


def big_draft(folder: Path) -> Path:
    """A draft with 4 MB of data, so that a download would show."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    (folder / "model.safetensors").write_bytes(encoded({"fc.weight": entry(0, 4_000_000)}, bytes(4_000_000)))
    return folder


@pytest.mark.parametrize("slash", ["", "/"])
def test_folder(host: Host, slash: str) -> None:
    same_as_local(f"{host.url}/a/draft{slash}", big_draft(host.root / "a" / "draft"))
    assert host.sent < 100_000


def test_single_file(host: Host) -> None:
    folder = big_draft(host.root / "draft")
    same_as_local(f"{host.url}/draft/model.safetensors", folder)


def test_query_is_used_and_never_shown(host: Host) -> None:
    big_draft(host.root / "draft")
    opened = open_checkpoint(f"{host.url}/draft/model.safetensors?signature=secret")
    assert "fc.weight" in opened.tensors
    assert "secret" not in opened.path
    assert any("signature=secret" in path for path, _ in host.asked)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{host.url}/draft/none.safetensors?signature=secret")
    assert "secret" not in str(caught.value)


def test_shards(host: Host) -> None:
    folder = host.root / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    (folder / "one.safetensors").write_bytes(encoded({"a": entry(0, 400)}, bytes(400)))
    (folder / "two.safetensors").write_bytes(encoded({"b": entry(0, 400)}, bytes(396)))
    where = {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    same_as_local(f"{host.url}/draft", folder)


def test_long_header_takes_a_second_request(host: Host) -> None:
    folder = host.root / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    header = {f"layers.{i}.weight": entry(4 * i, 4 * i + 4) for i in range(3000)}
    (folder / "model.safetensors").write_bytes(encoded(header, bytes(12_000)))
    same_as_local(f"{host.url}/draft", folder)
    assert len([path for path, _ in host.asked if path.endswith("model.safetensors")]) == 2


def test_hub(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_draft(host.root / "org" / "draft" / "resolve" / "main", tiny_tensors(), tiny_config())
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    same_as_local("hf://org/draft", folder)
    assert all(headers["Authorization"] == "Bearer hf_secret" for _, headers in host.asked)
    same_as_local("https://huggingface.co/org/draft", folder)
    same_as_local("https://huggingface.co/org/draft/blob/main/model.safetensors", folder)
    other = write_draft(host.root / "org" / "draft" / "resolve" / "v2" / "epoch_3", tiny_tensors(), tiny_config(vocab_size=300))
    same_as_local("hf://org/draft@v2/epoch_3", other)
    same_as_local("https://huggingface.co/org/draft/tree/v2/epoch_3", other)
    assert open_checkpoint("hf://org/draft").path == "hf://org/draft"


def test_token_does_not_follow_to_another_host(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cdn").mkdir()
    cdn = Host(big_draft(tmp_path / "cdn" / "draft"))
    monkeypatch.setenv("HF_ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def send_on(handler: Any) -> None:
        handler.answer(302, b"", {"Location": f"{cdn.url}/model.safetensors"})

    host.special["/org/draft/resolve/main/model.safetensors"] = send_on
    assert "fc.weight" in open_checkpoint("hf://org/draft").tensors
    assert cdn.asked
    assert all("Authorization" not in headers for _, headers in cdn.asked)
    cdn.server.shutdown()
    cdn.server.server_close()


def test_server_without_ranges(host: Host) -> None:
    folder = big_draft(host.root / "draft")
    host.ranges = False
    same_as_local(f"{host.url}/draft", folder)


def status(code: int) -> Callable[[Any], None]:
    return lambda handler: handler.answer(code, b"<html>no</html>")


def ranged(body: bytes, said: str) -> Callable[[Any], None]:
    return lambda handler: handler.answer(206, body, {"Content-Range": said})


def stingy(handler: Any) -> None:
    begin = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
    body = encoded(b"{}" + b" " * 90)[:50] if begin == 0 else b""
    handler.answer(206, body, {"Content-Range": f"bytes {begin}-{begin + len(body)}/100"})


def hang_up(handler: Any) -> None:
    handler.close_connection = True


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "401": (status(401), "HTTP 401; sign in"),
    "403": (status(403), "HTTP 403; sign in"),
    "418": (status(418), "HTTP 418; check the URL"),
    "500": (status(500), "HTTP 500; try again later"),
    "html": (lambda h: h.answer(200, b"<!doctype html><html>sign in"), "an HTML page"),
    "empty": (lambda h: h.answer(200, b""), "0 bytes; a safetensors file needs at least 8"),
    "no-size": (ranged(encoded({}), "bytes 0-9/*"), "does not tell how large"),
    "other-range": (ranged(encoded({}), "bytes 5-14/99"), "other bytes than asked for"),
    "short": (stingy, "gave 42 of 92 header bytes"),
    "header-too-long": (ranged(encoded(b"{}", length=1 << 40), "bytes 0-9/10000"), "exceeds 100,000,000"),
    "to-file": (lambda h: h.answer(302, b"", {"Location": "file:///etc/passwd"}), "HTTP 302; it sends on"),
    "to-ftp": (lambda h: h.answer(302, b"", {"Location": "ftp://127.0.0.1/x"}), "another protocol (ftp); refused"),
    "to-itself": (lambda h: h.answer(302, b"", {"Location": h.path}), "HTTP 302"),
    "hang-up": (hang_up, "the connection failed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers(host: Host, name: str) -> None:
    big_draft(host.root / "draft")
    answer, says = WRONG[name]
    host.special["/draft/model.safetensors"] = answer
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{host.url}/draft")
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


def test_nothing_there(host: Host) -> None:
    with pytest.raises(CheckpointError, match="no index and no config"):
        open_checkpoint(f"{host.url}/nowhere")
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(f"{host.url}/nowhere/model.safetensors")
    host.server.shutdown()
    host.server.server_close()
    with pytest.raises(CheckpointError, match=r"cannot be reached .*refused"):
        open_checkpoint(f"{host.url}/nowhere")
    host.server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=host.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def test_configs(host: Host) -> None:
    folder = host.root / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    assert open_checkpoint(f"{host.url}/target").form == "none"
    (folder / "config.json").write_text('{"a": [')
    assert [i.kind for i in open_checkpoint(f"{host.url}/target").issues] == ["config-unreadable"]


def test_shard_names_stay_on_the_host(host: Host) -> None:
    folder = host.root / "draft"
    folder.mkdir()
    for name in ("../x.safetensors", "http://127.0.0.1:9/x", "/x.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="leaves the folder"):
            open_checkpoint(f"{host.url}/draft")


def test_check_reads_no_values(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle3diag.cli import main

    write_draft(host.root / "draft", tiny_tensors(), tiny_config())
    assert main(["check", f"{host.url}/draft", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "healthy"
    assert any("headers" in s["why"] for s in report["skipped"])


def test_values_are_refused(host: Host) -> None:
    big_draft(host.root / "draft")
    opened = open_checkpoint(f"{host.url}/draft")
    with pytest.raises(CheckpointError, match="--headers-only"):
        opened.read("fc.weight")
    with pytest.raises(CheckpointError, match="--headers-only"):
        next(opened.blocks("fc.weight"))


def test_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/bucket/draft/{path.name}", path.read_bytes())
    same_as_local("memory://bucket/draft", folder)
    same_as_local("memory://bucket/draft/model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint("memory://bucket/nowhere")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hf://only-one", "expected hf://organisation/repository"),
        ("hf://a/..", "'..' has no place"),
        ("gopher://x/y", "is not understood"),
        ("file:///tmp/x", "give a local path"),
        ("https://[::1", "not a valid URL"),
    ],
)
def test_urls_that_make_no_sense(url: str, says: str) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(UsageError) as caught:
        open_checkpoint(url)
    assert says in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match=r"pip install 'eagle3diag\[remote\]'"):
        open_checkpoint("s3://bucket/draft")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.gguf", "config.json"])
def test_other_files_are_not_read_remotely(name: str) -> None:
    for url in (f"https://example.invalid/x/{name}", f"hf://a/b/{name}"):
        with pytest.raises(CheckpointError, match=r"only \.safetensors files"):
            open_checkpoint(url)
