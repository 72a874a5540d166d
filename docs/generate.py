"""The pages that the library writes about itself: every command, every public name, every notebook as it runs on the sample.

They go to ``docs/commands/``, ``docs/api/`` and ``docs/notebooks/``, which git ignores; a file is touched only where its text changes, so
that Sphinx reads again only what is new. Executing the notebooks is most of the work of a build.
"""

from __future__ import annotations

import argparse
import base64
import html
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK_HEAD = """# Notebooks

Each runs as it lies on the packaged sample, and on your files by its parameters alone:
`eagle3diag notebook NAME -p KEY VALUE … -o FILE.html` writes one page without code, with the executed notebook beside it. Or open them
in JupyterLab. {how}; code is folded.

| notebook | what it answers |
|---|---|
"""

API_HEAD = """# Python

What there is to import from `eagle3diag`. Each name is looked up when first used: the import loads neither torch nor matplotlib. Results
are frozen dataclasses that show themselves in a notebook and as text, turn into JSON with `to_dict()`, where they are tables into a data
frame with `to_frame()`, and where they are visual into a picture with `plot()`. Errors are `CheckpointError` (an input cannot be read) and
`UsageError` (a question makes no sense), each one line. The examples are run by the tests, from the folder of a checkout.
"""

COMMANDS_HEAD = """# The command line

`python -m eagle3diag` is the same. Results go to stdout, everything else to stderr. {epilog}.
"""

#: results of the public functions, in the order of the functions
RESULTS = (
    "checkpoint.model.Checkpoint", "checkpoint.model.DraftSpec", "checkpoint.model.TargetSpec", "hidden.model.HiddenDump",
    "checkpoint.wiring.Wiring", "engines.model.ServedDraft", "rules.model.Report", "rules.model.Finding", "weights.diff.WeightDiff",
    "weights.convert.Conversion", "draft.agreement.Agreement", "draft.ranking.WiringRanking",
)  # fmt: skip


def put(path: Path, text: str | bytes) -> None:
    """Writes a file where its content differs."""
    raw = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != raw:
        path.write_bytes(raw)


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")


# The command line


def _options(parser: argparse.ArgumentParser) -> list[str]:
    rows = ["| option | |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            value = action.metavar or "|".join(map(str, action.choices or [action.dest.upper()]))
            names += " " + (" ".join(value) if isinstance(value, tuple) else value)
        must = " (required)" if action.required and action.option_strings else ""
        rows.append(f"| `{names.replace('|', chr(92) + '|')}` | {cell(action.help or '')}{must} |")
    return rows


def commands() -> str:
    """The page of the command line, from the parser itself."""
    from eagle3diag.cli.parser import EPILOG, build_parser

    os.environ["COLUMNS"] = "92"
    top = build_parser()
    (sub,) = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    lines = [COMMANDS_HEAD.format(epilog=EPILOG[0].upper() + EPILOG[1:])]
    for name, parser in sub.choices.items():
        usage = parser.format_usage().removeprefix("usage: ").rstrip()
        lines += [f"## {name}", "", cell(parser.description or ""), "", "```text", usage, "```", "", *_options(parser), ""]
    return "\n".join(lines)


# The public names


def api() -> str:
    """The page of the public names, for autodoc to fill."""
    import eagle3diag

    lines = [API_HEAD, "## Functions", "", "```{eval-rst}"]
    lines += [f".. autofunction:: eagle3diag.{name}\n" for name in eagle3diag.__all__]
    lines += ["```", "", "## What they return", "", "```{eval-rst}"]
    lines += [f".. autoclass:: eagle3diag.{name}\n   :members:\n   :no-undoc-members:\n" for name in RESULTS]
    lines += ["```", "", "## Errors", "", "```{eval-rst}"]
    lines += [f".. autoexception:: eagle3diag.errors.{name}\n" for name in ("Eagle3DiagError", "CheckpointError", "UsageError")]
    return "\n".join([*lines, "```", ""])


# The notebooks


def _fenced(language: str, text: str) -> list[str]:
    fence = "`" * (3 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence, ""]


def _use(name: str) -> list[str]:
    """How to run a notebook on one's own files, and a table of its parameters."""
    from eagle3diag.report.notebooks import parameters

    known = parameters(name)
    lines = (
        ["On your own files:", "", *_fenced("bash", f"eagle3diag notebook {name} -p {known[0].name} VALUE -o page.html")] if known else []
    )
    rows = [f"| `{p.name}` | `{p.type}` | `{p.default}` | {cell(p.help)} |" for p in known]
    return [*lines, *(["| parameter | type | default | |", "|---|---|---|---|", *rows, ""] if rows else [])]


def _output(output: Any, place: Path, picture: str) -> list[str]:
    """One output of a cell as Markdown; pictures become files."""
    if output.output_type == "error":
        raise RuntimeError(f"{picture}: {output.ename}: {output.evalue}")
    if output.output_type == "stream":
        return _fenced("text", output.text.rstrip()) if output.name == "stdout" else []
    data = output.data
    if "image/png" in data:
        about = output.metadata.get("image/png", {})
        put(place / picture, base64.b64decode(data["image/png"]))
        alt = " ".join(str(about.get("alt", "")).split())
        return [f":::{{figure}} {picture}", f":alt: {alt}", "", html.escape(str(about.get("caption", "")), quote=False), ":::", ""]
    if output.metadata.get("text/html", {}).get("caption"):
        return []  # it stands in the figure above
    if "text/html" in data:
        return _fenced("{raw} html", str(data["text/html"]))
    if "text/markdown" in data:
        return [str(data["text/markdown"]), ""]
    return _fenced("text", str(data["text/plain"])) if "text/plain" in data else []


def notebook(name: str, place: Path, executed: Any) -> str:
    """The page of one notebook.

    Args:
        place: folder for its pictures.
        executed: as nbformat reads it; a notebook that was not run shows its text, its code and no results.
    """
    lines: list[str] = []
    for k, part in enumerate(executed.cells):
        tags = part.metadata.get("tags", [])
        if part.cell_type == "markdown":
            lines += [part.source, "", *(_use(name) if k == 0 else [])]
        elif part.cell_type == "code" and "parameters" not in tags and "injected-parameters" not in tags:
            lines += ['<details class="code"><summary>code</summary>', "", *_fenced("python", part.source), "</details>", ""]
            for j, output in enumerate(part.get("outputs", [])):
                lines += _output(output, place, f"{name}-{k}-{j}.png")
    return "\n".join(lines)


def _answers(source: str) -> str:
    found = re.search(r"\*\*What it answers\.\*\*\s*(.+)", source)
    return found[1] if found else ""


def notebooks(place: Path, run: bool) -> None:
    """A page for every packaged notebook, executed by the library's own runner where ``run``."""
    import nbformat

    from eagle3diag.report import notebooks as packaged

    logging.getLogger("papermill").setLevel(logging.WARNING)  # Sphinx shows what libraries log
    how = "The pages here were executed when this documentation was built" if run else "In this build they were *not* executed"
    index = NOTEBOOK_HEAD.format(how=how)
    for name in packaged.available():
        with tempfile.TemporaryDirectory() as scratch:
            source = packaged.folder() / f"{name}.ipynb"
            if run:
                source = Path(packaged.run(name, {}, Path(scratch) / "page.html").notebook)
            executed = nbformat.read(source, as_version=4)
        put(place / f"{name}.md", notebook(name, place, executed))
        title, _, rest = executed.cells[0].source.partition("\n")
        index += f"| [{name}]({name}.md): {cell(title.lstrip('# '))} | {_answers(rest)} |\n"
    put(place / "index.md", index)


# The style of results


def style() -> str:
    """The library's own style of results, with its two palettes hung on the theme's switch."""
    from eagle3diag.report.html import STYLE

    palettes = re.findall(r":root \{(.*?)\}", STYLE, flags=re.S)
    light, dark = (" ".join(re.findall(r"--(?:error|warning|info|ok|skipped): [^;]+;", p)) for p in palettes)
    plain = "--line: var(--color-background-border); --faint: var(--color-foreground-secondary);"
    rules = STYLE[STYLE.index(".e3d table") :]
    return (
        f".e3d {{ {light} {plain} }}\nbody[data-theme=dark] .e3d {{ {dark} }}\n"
        f"@media (prefers-color-scheme: dark) {{ body:not([data-theme=light]) .e3d {{ {dark} }} }}\n{rules}\n"
        "details.code { margin: .4rem 0; }\n"
        "details.code summary { cursor: pointer; color: var(--color-foreground-secondary); font-size: .85rem; }\n"
        "figure img { background: #ffffff; } td code { overflow-wrap: break-word; }\n"
        "article h1 { font-size: 2rem; } article h2 { font-size: 1.5rem; } article h3 { font-size: 1.2rem; }\n"
    )


def write(docs: Path, *, run: bool = True) -> None:
    """Everything generated, into the folder of the sources."""
    put(docs / "commands" / "index.md", commands())
    put(docs / "api" / "index.md", api())
    put(docs / "_static" / "eagle3diag.css", style())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = Path.cwd()
    os.chdir(docs.parent)
    try:
        notebooks(docs / "notebooks", run)
    finally:
        os.chdir(before)
