"""Views as static, semantic HTML: words and tables first, style as garnish.

No script, no link out, no font, nothing loaded: a page is one file that opens anywhere. A fragment reads well without its style (viewers
of notebooks strip it) and inherits the colours around it; a page brings a light and a dark palette and follows the reader's choice.
Every text goes through ``html.escape`` after control and bidirectional characters were made visible. Ids are hashes of the content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import escaped
from eagle3diag.report.layout import Block, Status, Table, View, mark

if TYPE_CHECKING:
    from eagle3diag.rules.model import Report

__all__ = ["STYLE", "cell", "fragment", "page", "render"]

#: Okabe-Ito hues, darkened for white and lightened for black: at least 4.5:1 on their ground, and never the only sign.
STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1b1b; --faint: #5a5a5a; --line: #c9c9c9;
  --error: #a33b00; --warning: #7a5200; --info: #005a8c; --ok: #00694b; --skipped: #5a5a5a; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --ink: #e8e6e3; --faint: #a9a9a9; --line: #4a4d52;
  --error: #ff9a66; --warning: #f0c04a; --info: #7cc4f5; --ok: #58d3a7; --skipped: #a9a9a9; } }
body { background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem 1.25rem 4rem; }
h1, h2, h3, h4, p, li, figcaption { overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin-top: 2.2rem; }
h3 { font-size: 1.05rem; margin-bottom: .3rem; }
a { color: var(--info); }
img { max-width: 100%; height: auto; background: #ffffff; }
figure { margin: 1rem 0; }
figcaption { color: var(--faint); }
.e3d table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; text-align: left; }
.e3d caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.e3d th, .e3d td { border: 1px solid var(--line, currentColor); padding: .25rem .55rem;
  vertical-align: top; text-align: left; overflow-wrap: anywhere; }
.e3d tbody th, .e3d tbody th code { overflow-wrap: break-word; }
.e3d td.n { white-space: nowrap; }
.e3d th[scope=row] { min-width: 6rem; }
.e3d code { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere; }
.e3d .finding { border-left: .3rem solid var(--line, currentColor); padding: .1rem 0 .1rem .9rem; margin: 1.1rem 0; }
.e3d .error { border-color: var(--error, currentColor); }
.e3d .warning { border-color: var(--warning, currentColor); }
.e3d .info { border-color: var(--info, currentColor); }
.e3d .ok { border-color: var(--ok, currentColor); }
.e3d .s-error { color: var(--error, inherit); }
.e3d .s-warning { color: var(--warning, inherit); }
.e3d .s-info { color: var(--info, inherit); }
.e3d .s-ok { color: var(--ok, inherit); }
.e3d .s-skipped { color: var(--skipped, inherit); }
.e3d dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: .3rem 0; }
.e3d dt { color: var(--faint, inherit); }
.e3d dd { margin: 0; overflow-wrap: anywhere; }
.e3d .summary { font-size: 1.1rem; font-weight: 600; }
.e3d thead th { overflow-wrap: normal; }
.contents { border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); margin: 2rem 0; padding: .6rem 0; }
.contents p { font-weight: 600; margin: 0; }
.contents ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
.contents li { display: flex; flex-wrap: wrap; gap: .2rem .8rem; }
.wide { overflow-x: auto; }
@media (max-width: 40rem) { .e3d dl { display: block; }
  .e3d dd { margin: 0 0 .3rem 1rem; } .e3d th[scope=row] { min-width: 8rem; }
  .e3d td:not(.n) { min-width: 9rem; } .e3d th, .e3d td { overflow-wrap: break-word; } }
"""


#: what a notebook cell brings along: JupyterLab sets tables flush right, which words cannot be read in, and lets the terms of a list float
CELL_STYLE = """<style>.e3d .wide table :is(caption, th, td) { text-align: left; vertical-align: top; }
@media (min-width: 40rem) { .e3d dl { display: grid; grid-template-columns: max-content 1fr; column-gap: 1em; }
  .e3d dl :is(dt, dd) { width: auto; } }</style>
"""

_SHORT = 16


def _safe(text: str, limit: int = 4000) -> str:
    return escape(escaped(text, limit), quote=True)


def _sign(status: Status) -> str:
    return f'<strong class="s-{status}">{mark(status)}</strong> ' if mark(status) else ""


def _anchor(*parts: str) -> str:
    return "e3d-" + hashlib.blake2b("\0".join(parts).encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()


def _block(block: Block, level: int) -> str:
    lines = [f'<section class="finding {block.status}" id="{_anchor(block.code, block.title)}">']
    lines.append(f"<h{level}>{_sign(block.status)}<code>{_safe(block.code)}</code> {_safe(block.title)}</h{level}>")
    facts = [*block.evidence, *([("where", block.engines)] if block.engines else [])]
    if facts:
        lines.append("<dl>" + "".join(f"<dt>{_safe(k)}</dt><dd><code>{_safe(v)}</code></dd>" for k, v in facts) + "</dl>")
    if block.remedy:
        lines.append(f"<p><strong>Fix:</strong> {_safe(block.remedy)}</p>")
    return "\n".join([*lines, "</section>"])


def _cell(text: str) -> str:
    """A cell; what is short, numbers above all, is never broken."""
    opening = '<td class="n">' if len(text) <= _SHORT else "<td>"
    return f"{opening}{_safe(text, 1000)}</td>"


def _table(one: Table) -> str:
    head = "".join(f'<th scope="col">{_safe(h)}</th>' for h in one.head)
    label = _safe(one.caption, 300)
    lines = [
        f'<div class="wide" role="group" tabindex="0" aria-label="{label}"><table>',
        f"<caption>{_safe(one.caption)}</caption>",
        f"<thead><tr>{head}</tr></thead>",
        "<tbody>",
    ]
    for k, row in enumerate(one.rows):
        status = one.status[k] if k < len(one.status) else "none"
        first = f'<th scope="row">{_sign(status) if status not in ("none", "ok") else ""}<code>{_safe(row[0], 300)}</code></th>'
        lines.append("<tr>" + first + "".join(_cell(c) for c in row[1:]) + "</tr>")
    lines.append("</tbody></table></div>")
    if one.more:
        lines.append(f"<p>… {_safe(one.more)}</p>")
    return "\n".join(lines)


def fragment(view: View, *, level: int = 2) -> str:
    """One view as an HTML fragment for a page or a notebook cell.

    Args:
        level: heading level of the view's title; findings are one deeper, or as deep where it has no title.
    """
    lines = [f'<section class="e3d"><h{level}>{_safe(view.title)}</h{level}>' if view.title else '<section class="e3d">']
    lines.append(f'<p class="summary">{_sign(view.status)}{_safe(view.summary)}</p>')
    lines += [_block(b, level + 1 if view.title else level) for b in view.blocks]
    lines += [_table(t) for t in view.tables if t.rows]
    lines += [f"<p>{_safe(n)}</p>" for n in view.notes]
    return "\n".join([*lines, "</section>"])


def cell(view: View) -> str:
    """One view as the output of a notebook cell; where the style is stripped only the words' places change."""
    return CELL_STYLE + fragment(view, level=3)


def page(title: str, views: Sequence[View]) -> str:
    """One self-contained document."""
    body = "\n".join(fragment(v) for v in views)
    return document(title, f"<h1>{_safe(title)}</h1>\n{body}")


def document(title: str, body: str) -> str:
    """``body`` (trusted HTML) in a document with the style, and nothing loaded from anywhere."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # without it a browser asks the server for an icon
        f"<title>{_safe(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>"
    )


def render(report: Report | Any, title: str = "") -> str:
    """A report (or any result that has a view) as one self-contained page."""
    from eagle3diag.report.views import view

    shown = view(report)
    return page(title or f"eagle3diag: {shown.title}", [shown])
