"""Checkpoints that lie elsewhere, judged from their headers by range requests, without a download.

``https://`` and ``hf://`` need nothing but the standard library; other schemes (``s3://`` …) go through ``fsspec``. Every answer is read
up to a limit and no further, whatever the server says its size is. A Hugging Face token (``HF_TOKEN``) is sent to the hub alone
and not to where it redirects; what stands after ``?`` in a URL may be a signature and is never shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from eagle3diag.checkpoint.configs import parse_json, schema_of
from eagle3diag.checkpoint.header import Header, judge_length, parse_header
from eagle3diag.checkpoint.model import Checkpoint, ConfigFile, Issue, TensorInfo
from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.checkpoint.shards import Index, merge, parse_index
from eagle3diag.errors import CheckpointError, UsageError, escaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["https_parts", "open_remote", "read_remote_configs"]

_FIRST = 64 << 10  # bytes of the first request: most headers fit
_CONFIG_LIMIT = 16 << 20
_INDEX_LIMIT = 64 << 20
_SHARD_LIMIT = 1000
_TIMEOUT = 30.0  # seconds without an answer
_HUB = "https://huggingface.co"
_CONFIGS = ("config.json", "config_speculators.json")
_PAGE = ("tree", "blob", "resolve")
_HINTS = (
    ((401, 403), "sign in (HF_TOKEN) or ask for access"),
    ((429, 500, 502, 503, 504), "try again later"),
    (range(300, 400), "it sends on in circles or to another protocol, which is not followed"),
)

Get = Callable[[str, int, int], "Answer | None"]


class Answer(NamedTuple):
    """Some bytes of a remote file and the size of the whole."""

    data: bytes
    size: int


class _Place(NamedTuple):
    """Where a URL points: how to get parts of files, the one file meant (or None for a folder), and its text for messages."""

    get: Get
    file: str | None
    where: str


def open_remote(url: str) -> Checkpoint:
    """A remote checkpoint: ``tensors`` and ``configs`` as from a local one, no tensor values.

    Args:
        url: ``hf://org/repo[@revision][/folder or file]``, ``https://host/folder/``, ``https://host/file.safetensors``, or any scheme
            ``fsspec`` knows.

    Raises:
        CheckpointError: not reachable, not there, or not a checkpoint; reading values from the result raises it too.
        UsageError: the scheme needs a package that is not installed, or is none.
    """
    place = _place(url)
    index: Index | None = None
    missing: list[str] = []
    headers: dict[str, Header] = {}
    if place.file is not None:
        headers[place.file] = _header(place, place.file) or _absent(f"{place.where}: no such file")
    else:
        listing = _whole(place, "model.safetensors.index.json", _INDEX_LIMIT)
        if listing is not None:
            index = parse_index(listing, f"{place.where}: model.safetensors.index.json", "model.safetensors.index.json")
            if len(index.shards) > _SHARD_LIMIT:
                raise CheckpointError(f"{place.where}: the index lists {len(index.shards):,} files, at most {_SHARD_LIMIT:,} are asked for")
            for shard, header in zip(index.shards, _several(place, index.shards), strict=True):
                if header is None:
                    missing.append(shard)
                else:
                    headers[shard] = header
        else:
            single = _header(place, "model.safetensors")
            if single is not None:
                headers["model.safetensors"] = single
    configs, issues = _configs(place)
    if not headers and not index and all(i.evidence.get("absent") for i in issues) and not configs:
        raise CheckpointError(
            f"{place.where}: no model.safetensors, no index and no config.json there; torch files are read only after a download"
        )
    tensors, more = merge({f: h.tensors for f, h in headers.items()}, index, tuple(missing))
    return Checkpoint(
        path=place.where,
        files=tuple(headers),
        tensors={n: tensors[n] for n in sorted(tensors)},
        configs=configs,
        issues=(*issues, *(i for h in headers.values() for i in h.issues), *more),
        form="sharded" if index else "safetensors" if headers else "none",
        sizes={f: h.size for f, h in headers.items()},
        reader=lambda info: _no_values(place.where, info),
        blocker=lambda info, block: _no_blocks(place.where, info),
        remote=True,
    )


def https_parts(url: str) -> tuple[Callable[[int, int], bytes], int, str]:
    """``(bytes of a range, size, text for messages)`` of one remote file of any kind, by ``http(s)`` range requests.

    Raises:
        CheckpointError: not reachable, not there, or not served in parts; calling the result raises it too.
        UsageError: no valid URL.
    """
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:
        raise UsageError(f"{shown(url.partition('?')[0])}: not a valid URL") from None
    where = shown(urlunsplit((parts.scheme, host, parts.path, "", "")))
    folder, _, last = parts.path.rpartition("/")
    last = unquote(last)
    get = _https(urlunsplit((parts.scheme, parts.netloc, folder + "/", "", "")), parts.query, where, None)

    def read(start: int, end: int) -> bytes:
        answer = get(last, start, end)
        return (answer or _absent(f"{where}: no such file")).data

    first = get(last, 0, 1)
    return read, (first or _absent(f"{where}: no such file")).size, where


def read_remote_configs(get: Get, where: str) -> tuple[tuple[ConfigFile, ...], tuple[Issue, ...]]:
    """``config.json`` and ``config_speculators.json`` of a remote folder, as ``read_configs`` gives them for a local one."""
    configs: list[ConfigFile] = []
    issues: list[Issue] = []
    for file in _CONFIGS:
        answer = get(file, 0, _CONFIG_LIMIT)
        if answer is None:
            if file == "config.json":
                message = "config.json: absent; every engine needs it beside the weights"
                issues.append(Issue("config-unreadable", file, message, {"absent": True}))
            continue
        if answer.size > _CONFIG_LIMIT:
            issues.append(Issue("config-unreadable", file, f"{file}: {answer.size:,} bytes, a config has at most {_CONFIG_LIMIT:,}"))
            continue
        data, issue = parse_json(answer.data, file, infinity=True)
        if issue is not None:
            issues.append(issue)
        elif data is not None:
            configs.append(ConfigFile(file, schema_of(data), data))
    return tuple(configs), tuple(issues)


def _configs(place: _Place) -> tuple[tuple[ConfigFile, ...], tuple[Issue, ...]]:
    try:
        return read_remote_configs(place.get, place.where)
    except CheckpointError:
        if place.file is None:
            raise
        # the URL of one file, perhaps signed for it alone, says nothing about its neighbours
        return (), (Issue("config-unreadable", "config.json", "config.json: not readable beside the file", {"absent": True}),)


def _absent(message: str) -> NoReturn:
    raise CheckpointError(message)


def _no_values(where: str, info: TensorInfo) -> torch.Tensor:
    raise CheckpointError(
        f"{where}: values of '{escaped(info.name)}' are not read over the network; use --headers-only, or download the checkpoint"
    )


def _no_blocks(where: str, info: TensorInfo) -> Iterator[memoryview]:
    _no_values(where, info)
    yield memoryview(b"")


def _whole(place: _Place, file: str, limit: int) -> bytes | None:
    answer = place.get(file, 0, limit)
    if answer is not None and answer.size > limit:
        raise CheckpointError(f"{place.where}: {escaped(file)} has {answer.size:,} bytes, at most {limit:,} are read")
    return None if answer is None else answer.data


def _several(place: _Place, files: tuple[str, ...]) -> list[Header | None]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(8, len(files) or 1)) as pool:  # each waits for the network most of the time
        return list(pool.map(lambda f: _header(place, f), files))


def _header(place: _Place, file: str) -> Header | None:
    """The header of one remote file in one request, or two where it is long; None where there is no such file."""
    answer = place.get(file, 0, _FIRST)
    if answer is None:
        return None
    where = f"{place.where}: {escaped(file, 100)}" if place.file is None else place.where
    length = judge_length(answer.data[:512], answer.size, where)
    raw = answer.data[8 : 8 + length]
    if len(raw) < length:
        rest = place.get(file, len(answer.data), 8 + length)
        if rest is None or rest.size != answer.size:
            raise CheckpointError(f"{where}: changed while being read; run again when nothing writes to it")
        raw += rest.data
    if len(raw) != length:
        raise CheckpointError(f"{where}: the server gave {len(raw):,} of {length:,} header bytes; try again")
    return parse_header(raw, answer.data[:512], answer.size, where, file)


def _place(url: str) -> _Place:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{shown(url.partition('?')[0])}: not a valid URL") from None
    host = f"{parts.hostname or ''}{f':{port}' if port else ''}"
    clean = shown(urlunsplit((parts.scheme, host, parts.path, "", "")))
    scheme = parts.scheme.lower()
    hub = os.environ.get("HF_ENDPOINT", "").rstrip("/") or _HUB
    if scheme == "hf":
        base, file = _hub_parts(hub, [parts.netloc, *parts.path.split("/")], clean)
        return _Place(_https(base, "", clean, hub), file, clean)
    if scheme in ("http", "https") and parts.hostname:
        inside = [p for p in parts.path.split("/") if p]
        if host == urlsplit(_HUB).netloc and len(inside) >= 2:
            at = f"@{inside[3]}" if len(inside) > 3 and inside[2] in _PAGE else ""
            base, file = _hub_parts(hub, [inside[0], inside[1] + at, *(inside[4:] if at else inside[2:])], clean)
            return _Place(_https(base, "", clean, hub), file, clean)
        last = parts.path.rpartition("/")[2]
        file = last if last.endswith((".safetensors", ".bin", ".pt", ".json", ".gguf")) else None
        base = urlunsplit((scheme, parts.netloc, parts.path.removesuffix(last) if file else parts.path.rstrip("/") + "/", "", ""))
        return _checked(_Place(_https(base, parts.query, clean, None), file, clean))
    return _checked(_other(url, scheme, clean))


def _checked(place: _Place) -> _Place:
    if place.file is not None and not place.file.endswith(".safetensors"):
        raise CheckpointError(f"{place.where}: only .safetensors files and their folders are read remotely; download it")
    return place


def _hub_parts(hub: str, parts: list[str], clean: str) -> tuple[str, str | None]:
    """The address of files on the hub, and the one file meant."""
    parts = [p for p in parts if p]
    if len(parts) < 2:
        raise UsageError(f"{clean}: expected hf://organisation/repository[@revision][/folder]")
    repo, _, revision = parts[1].partition("@")
    inner = parts[2:]
    if any(p in (".", "..") for p in (parts[0], repo, revision, *inner)):
        raise UsageError(f"{clean}: '..' has no place in a repository's name")
    file = inner.pop() if inner and inner[-1].endswith((".safetensors", ".bin", ".pt", ".json", ".gguf")) else None
    _checked(_Place(lambda *_: None, file, clean))
    path = "/".join(quote(p, safe="") for p in (parts[0], repo, "resolve", revision or "main"))
    return f"{hub}/{path}/" + "".join(quote(p) + "/" for p in inner), file


def _https(base: str, query: str, where: str, hub: str | None) -> Get:
    """Range requests by the standard library."""
    import http.client
    import urllib.error
    import urllib.request

    token = os.environ.get("HF_TOKEN", "") if hub else ""

    class Redirect(urllib.request.HTTPRedirectHandler):
        max_redirections = 5

        def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            if urlsplit(newurl).scheme not in ("https", urlsplit(req.full_url).scheme):
                raise CheckpointError(f"{where}: the server sends on to another protocol ({escaped(urlsplit(newurl).scheme, 20)}); refused")
            new = super().redirect_request(req, fp, code, msg, headers, newurl)
            if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
                new.remove_header("Authorization")
            return new

    opener = urllib.request.build_opener(Redirect)

    def get(file: str, start: int, end: int) -> Answer | None:
        address = base + "/".join(quote(p) for p in file.split("/")) + (f"?{query}" if query else "")
        request = urllib.request.Request(
            address, headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity", "User-Agent": "eagle3diag"}
        )
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return _answer(answer, start, end, f"{where}: {escaped(file, 100)}")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                return None
            if error.code == 416:  # an empty file has no first byte
                return Answer(b"", 0)
            hint = next((text for codes, text in _HINTS if error.code in codes), "check the URL")
            raise CheckpointError(f"{where}: {escaped(file, 100)}: the server answers HTTP {error.code}; {hint}") from None
        except TimeoutError:
            raise CheckpointError(f"{where}: no answer within {_TIMEOUT:.0f} s") from None
        except urllib.error.URLError as error:
            raise CheckpointError(f"{where}: cannot be reached ({escaped(error.reason, 100)})") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CheckpointError(f"{where}: {escaped(file, 100)}: the connection failed ({type(error).__name__}); try again") from None

    return get


def _answer(answer: Any, start: int, end: int, where: str) -> Answer:
    """Bytes and size from a response; a server that ignores the range is read up to ``end`` and hung up on."""
    total = ""
    if answer.status == 206:
        span, _, total = (answer.headers.get("Content-Range") or "").partition("/")
        if span.strip().lower().removeprefix("bytes").strip().partition("-")[0] != str(start):
            raise CheckpointError(f"{where}: the server answers with other bytes than asked for")
    elif start:
        raise CheckpointError(
            f"{where}: the server does not serve parts of files, and the header is longer than {_FIRST:,} bytes; download it"
        )
    else:
        total = answer.headers.get("Content-Length") or ""
    data: bytes = answer.read(end - start)
    if not total.strip().isdecimal():
        if answer.status == 206 or len(data) == end - start:
            raise CheckpointError(f"{where}: the server does not tell how large the file is; download it")
        total = str(len(data))  # the whole of a short file, sent without its length
    return Answer(data, int(total[:20]))


def _other(url: str, scheme: str, where: str) -> _Place:
    """Everything else by ``fsspec``."""
    if scheme == "file":
        raise UsageError(f"{where}: give a local path without file://")
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{where}: {escaped(scheme, 20)}:// needs fsspec: pip install 'eagle3diag[remote]'") from None
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = escaped(error.name or scheme, 30)
        raise UsageError(
            f"{where}: {escaped(scheme, 20)}:// needs the package {package}: pip install 'eagle3diag[remote]' {package}"
        ) from None
    except Exception as error:  # fsspec's back ends raise what they like
        raise UsageError(f"{where}: {escaped(scheme, 20)}:// is not understood ({type(error).__name__}); known are hf, https, s3") from None
    last = path.rpartition("/")[2]
    file = last if last.endswith((".safetensors", ".bin", ".pt", ".json", ".gguf")) else None
    base = path.removesuffix(last).rstrip("/") if file else path.rstrip("/")

    def get(name: str, start: int, end: int) -> Answer | None:
        try:
            size = int(fs.info(f"{base}/{name}")["size"])
            return Answer(fs.cat_file(f"{base}/{name}", start=start, end=min(end, size)) if start < size else b"", size)
        except FileNotFoundError:
            return None
        except Exception as error:  # as above
            raise CheckpointError(
                f"{where}: {escaped(name, 100)}: cannot be read ({type(error).__name__}: {escaped(error, 100)})"
            ) from None

    return _Place(get, file, where)
