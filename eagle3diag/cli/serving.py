"""Handler of the command that reads what a server printed."""

from __future__ import annotations

import argparse

__all__ = ["log"]


def log(a: argparse.Namespace) -> int:
    """A serving log by itself: its numbers, what they show, whether speculation pays."""
    from eagle3diag.cli.commands import judged
    from eagle3diag.rules.logcase import check_log

    source = a.log[0] if len(a.log) == 1 else a.log
    report = check_log(source, control=a.control, baseline=a.baseline, metrics=a.metrics)
    return judged(a, report, f"eagle3diag log {' '.join(a.log)}")
