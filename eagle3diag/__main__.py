"""``python -m eagle3diag``."""

from eagle3diag.cli import entry

raise SystemExit(entry())
