"""One page per rule, written from the rule's own docstring, so that page, `eagle3diag rules CODE` and behaviour cannot drift apart.

``python -m eagle3diag.rules.pages docs/rules`` writes the pages and the index; a test compares them with the repository's.
"""

from __future__ import annotations

import sys
from inspect import cleandoc
from pathlib import Path

from eagle3diag.rules.registry import RULES, Rule, load_all

__all__ = ["page", "pages", "write"]

_FAMILIES = {
    "CFG": "the config files",
    "KEY": "tensor names and shapes (header only)",
    "VAL": "tensor values",
    "AUX": "which target states reach the draft",
    "ENG": "what the engine does with it",
    "DMP": "hidden-state dumps",
    "AGR": "draft against target logits",
    "SRV": "serving logs and metrics",
}

_NEEDS = {
    "draft": "the draft",
    "values": "its tensor values",
    "target": "a target",
    "engine": "an engine",
    "launch": "a launch line",
    "other": "a second draft",
    "dump": "a dump of hidden states",
    "dump-file": "a dump of hidden states",
    "log": "a serving log",
    "baseline": "the throughput without speculation",
    "metrics": "training metrics",
}


def needs(rule: Rule) -> str:
    """What the rule needs, in words; ``a|b`` reads ``a or b``."""
    return ", ".join(" or ".join(_NEEDS[way] for way in need.split("|")) for need in rule.needs)


def page(rule: Rule) -> str:
    """The page of one rule as Markdown."""
    text = cleandoc(rule.look.__doc__ or "")
    summary, _, sections = text.partition("\n")
    head = f"# {rule.code}: {summary.rstrip('.')}\n\n**{rule.severity.value}** by default · needs {needs(rule)}\n"
    note = "\n---\nGenerated from the rule's docstring by `python -m eagle3diag.rules.pages`; edit it there.\n"
    return head + "\n" + sections.strip().replace("\n## ", "\n\n## ").replace("\n\n\n", "\n\n") + "\n" + note


def pages() -> dict[str, str]:
    """Every page by file name, the index included."""
    load_all()
    out = {f"{rule.code}.md": page(rule) for rule in RULES.values()}
    lines = ["# Rules", "", "Codes are stable. A rule that lacks its evidence is skipped with a reason, never passed."]
    family = ""
    for rule in RULES.values():
        if rule.code[:3] != family:
            family = rule.code[:3]
            lines += ["", f"## {family}: {_FAMILIES[family]}", "", "| code | severity | says | needs |", "|---|---|---|---|"]
        summary = rule.summary.replace("|", "\\|")
        lines.append(f"| [{rule.code}]({rule.code}.md) | {rule.severity.value} | {summary} | {needs(rule)} |")
    out["index.md"] = "\n".join(lines) + "\n"
    return out


def write(folder: Path) -> int:
    """Writes all pages into ``folder`` and removes pages of codes that are no longer there; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    every = pages()
    for old in folder.glob("*.md"):
        if old.name not in every:
            old.unlink()
    for name, text in every.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(every)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/rules"))
