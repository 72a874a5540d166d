"""Ask a running server: JSON in and out, with limits of time and size, and which engine it is.

Questions and prompts go to the server that was named and to no other: no redirect leads elsewhere, and prompts follow none.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eagle3diag.errors import CheckpointError, UsageError, escaped

__all__ = ["LARGE", "ServerInfo", "address", "ask", "opener", "server_info"]

_QUICK, _LONG = 20.0, 900.0  # seconds for a question about the server, and for one generation
_SMALL = 8 << 20  # bytes of an answer about the server
LARGE = 2 << 30  #: bytes of an answer that holds states


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        engine: ``sglang`` or ``vllm``.
        version: its release; empty where it does not say.
        model: path or name of the target it serves.
        settings: SGLang's start options; empty for vLLM.
    """

    engine: str
    version: str
    model: str
    settings: Mapping[str, Any]


class _Stay(urllib.request.HTTPRedirectHandler):
    """Lets a question be sent on within the same server (``/metrics`` to ``/metrics/``), and nothing else."""

    def redirect_request(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        same = urlsplit(newurl)[:2] == urlsplit(req.full_url)[:2]
        return super().redirect_request(req, fp, code, msg, headers, newurl) if same and req.get_method() == "GET" else None


def address(url: str) -> str:
    """The base of a server's addresses.

    Raises:
        UsageError: no URL of a server.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{escaped(url, 120)}: not a valid URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise UsageError(f"{escaped(url.partition('?')[0], 120)}: give http://HOST:PORT of an SGLang or vLLM server")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path.removesuffix('/v1')}"


def opener(url: str) -> urllib.request.OpenerDirector:
    """Asks that server alone: no redirect leads elsewhere, and this machine is reached without a proxy."""
    handlers = [urllib.request.ProxyHandler({})] if urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1") else []
    return urllib.request.build_opener(_Stay, *handlers)


def ask(base: str, path: str, body: Mapping[str, Any] | None = None, *, limit: int = _SMALL) -> Any:
    """The JSON a server answers with; None where it has no such address.

    Raises:
        CheckpointError: not reachable, refuses, or answers with something else.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data=data, headers={"Content-Type": "application/json", "User-Agent": "eagle3diag"})
    where = f"{escaped(base, 100)}{path}"
    try:
        with opener(base).open(request, timeout=_QUICK if body is None else _LONG) as answer:
            raw = answer.read(limit + 1)
    except urllib.error.HTTPError as error:
        told = _message(error.read(4096))
        if error.code in (404, 405) and body is None:
            return None
        raise CheckpointError(f"{where}: HTTP {error.code}{f': {told}' if told else ''}") from None
    except urllib.error.URLError as error:
        raise CheckpointError(f"{where}: cannot be reached ({escaped(error.reason, 100)}); is the server up?") from None
    except (TimeoutError, OSError, http.client.HTTPException) as error:
        raise CheckpointError(f"{where}: the connection failed ({type(error).__name__}); try again") from None
    if len(raw) > limit:
        raise CheckpointError(f"{where}: an answer of more than {limit:,} bytes; capture shorter texts (--max-tokens)")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None if body is None else _not_json(where)


def _not_json(where: str) -> Any:
    raise CheckpointError(f"{where}: the answer is no JSON; is this an SGLang or vLLM server?")


def _message(raw: bytes) -> str:
    """What a server says in an error."""
    text = raw.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return escaped(text.strip(), 200)
    for key in ("message", "detail", "error"):
        held = found.get(key) if isinstance(found, dict) else None
        if isinstance(held, dict):
            held = held.get("message")
        if isinstance(held, str) and held:
            return escaped(held, 300)
    return escaped(text.strip(), 200)


def server_info(url: str) -> ServerInfo:
    """Which engine answers there, and what it says of itself.

    Raises:
        CheckpointError: not reachable, or neither SGLang nor vLLM.
        UsageError: no URL of a server.
    """
    base = address(url)
    for path in ("/server_info", "/get_server_info"):
        held = ask(base, path)
        if isinstance(held, dict) and ("internal_states" in held or "speculative_algorithm" in held):
            model = held.get("model_path")
            if not isinstance(model, str):
                told = ask(base, "/model_info") or ask(base, "/get_model_info") or {}
                model = told.get("model_path") if isinstance(told, dict) else None
            return ServerInfo(engine="sglang", version=str(held.get("version") or ""), model=str(model or ""), settings=held)
    models, version = ask(base, "/v1/models"), ask(base, "/version")
    listed = models.get("data") if isinstance(models, dict) else None
    if isinstance(listed, list) and listed and isinstance(listed[0], dict) and isinstance(version, dict):
        return ServerInfo(engine="vllm", version=str(version.get("version") or ""), model=str(listed[0].get("id") or ""), settings={})
    raise CheckpointError(f"{escaped(base, 100)}: neither SGLang (/server_info) nor vLLM (/version, /v1/models) answers there")
