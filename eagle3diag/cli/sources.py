"""Handler of the command that reads an engine's source."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from eagle3diag.cli.output import show

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
