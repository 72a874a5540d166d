"""A running server's own numbers: ``/metrics`` of both engines, ``/server_info`` of SGLang. Read once, with limits, nothing is sent."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import urlsplit, urlunsplit

from eagle3diag.errors import UsageError, escaped
from eagle3diag.serving.server import opener

__all__ = ["fetch"]

_LIMIT = 64 << 20
_TIMEOUT = 15.0
_PATHS = ("/metrics", "/server_info", "/get_server_info")


def fetch(url: str) -> list[tuple[str, bytes]]:
    """What the server answers.

    Args:
        url: ``http://HOST:PORT``, or the full address of one endpoint.

    Returns:
        (address, body) of each answer; of a bare address all that are there.

    Raises:
        UsageError: no answer, or none that says anything.
    """
    try:
        parts = urlsplit(url)
        known = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{escaped(url.partition('?')[0], 200)}: no address of a server; give http://HOST:PORT")
    if parts.path not in ("", "/"):
        body, why = _get(url)
        if body is None:
            raise UsageError(f"{_shown(url)}: {why}")
        return [(_shown(url), body)]
    out: list[tuple[str, bytes]] = []
    reasons: list[str] = []
    for path in _PATHS:
        if path == "/get_server_info" and any(name.endswith("/server_info") for name, _ in out):
            continue
        one = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        body, why = _get(one)
        if body is not None:
            out.append((_shown(one), body))
        else:
            reasons.append(f"{path}: {why}")
    if not out:
        raise UsageError(f"{_shown(url)}: {'; '.join(reasons)}; is the server up, with --enable-metrics (SGLang)?")
    return out


def _shown(url: str) -> str:
    """Without user, password and what stands after the question mark."""
    parts = urlsplit(url)
    where = parts.hostname or ""
    return escaped(urlunsplit((parts.scheme, f"{where}:{parts.port}" if parts.port else where, parts.path, "", "")), 200)


def _get(url: str) -> tuple[bytes | None, str]:
    request = urllib.request.Request(url, headers={"User-Agent": "eagle3diag"})
    try:
        with opener(url).open(request, timeout=_TIMEOUT) as answer:
            body: bytes = answer.read(_LIMIT + 1)
    except urllib.error.HTTPError as error:
        return None, f"answered {error.code}"
    except (urllib.error.URLError, OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error).strip() or type(error).__name__
        return None, f"no answer ({escaped(reason, 80)})"
    if len(body) > _LIMIT:
        return None, f"answered more than {_LIMIT:,} bytes"
    return body, ""
