"""Handlers that ask an engine: its source, or a running server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from eagle3diag.cli.output import outside, show
from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle3diag.report.layout import View


def scan(a: argparse.Namespace) -> int:
    """What one copy of an engine does with a target and a draft."""
    from eagle3diag.engines.scan import scan

    found = scan(a.source, a.target_arch, draft=a.draft, engine=a.of, runner=a.runner)

    def data() -> dict[str, Any]:
        return {"schema": 1, **found.to_dict()}

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(found)]

    show(a, data, views, f"eagle3diag scan {a.source}")
    return 0


def capture_server(a: argparse.Namespace, layers: Any) -> int:
    """The states a running server hands out over texts, as a portable dump."""
    from eagle3diag.report import jsonout
    from eagle3diag.serving.server_capture import capture_server

    given = {
        "--for": a.draft,
        "--decode-output": a.decode_out,
        "--device": a.device,
        "--dtype": a.dtype,
        "--no-decode": a.no_decode or None,
    }
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is for a target that runs here; a server hands out what it was started for")
    if layers == "all":
        raise UsageError("--layers all is for a target that runs here; name the HF indices the server hands out")
    outside(a, a.out)
    target, tokenizer = _told(a.target_config, not a.no_chat) if a.target_config is not None else (None, None)
    numbers = {"new_tokens": a.new_tokens, "max_tokens": a.max_tokens}
    found = capture_server(
        a.target,
        a.text,
        a.out,
        layers=layers,
        target=target,
        tokenizer=tokenizer,
        chat=not a.no_chat,
        storage=a.storage,
        **{k: v for k, v in numbers.items() if v is not None},
    )

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(found)]

    show(a, lambda: jsonout.captured(found), views)
    return 0


def _told(path: str, chat: bool) -> tuple[Any, Any]:
    """The target's facts, and its tokenizer where the folder holds one and transformers is there."""
    from pathlib import Path

    from eagle3diag.checkpoint.target import open_target

    target = open_target(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not chat or not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return target, None
    from importlib import import_module

    try:
        transformers = import_module("transformers")
    except ImportError:
        raise UsageError("the chat template needs transformers: pip install 'eagle3diag[target]', or give --no-chat") from None
    return target, transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
