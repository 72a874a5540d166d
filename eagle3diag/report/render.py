"""An executed notebook as one HTML page: nbconvert with a template of our own that loads nothing.

The stock templates fetch MathJax and require.js and bring 300 KB of style; ours is the page of ``html`` around Markdown and outputs. Code,
prompts and the parameters cell are left out; pictures are embedded with their alternative text.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from copy import copy
from typing import Any

__all__ = ["rendered"]

FIRST = "In short"  #: heading of a verdict that begins a page
_HEAD = re.compile(r"<h2>(.*?)</h2>", re.S)
_FINDING = re.compile(r'<section class="finding (?:error|warning)" id="([^"]+)">\s*<h\d>.*?<code>([A-Z]{3}\d{3})</code>')
_TAG = re.compile(r"<[^>]+>")

_TEMPLATE = """
{%- extends 'display_priority.j2' -%}
{% block input_group %}{% endblock input_group %}
{% block output_group %}{{ super() }}{% endblock output_group %}
{% block in_prompt %}{% endblock in_prompt %}
{% block output_prompt %}{% endblock output_prompt %}
{% block markdowncell scoped %}{{ cell.source | markdown2html | strip_files_prefix }}
{% endblock markdowncell %}
{% block unknowncell scoped %}{% endblock unknowncell %}
{% block rawcell scoped %}{% endblock rawcell %}
{% block stream_stdout scoped %}<pre>{{ output.text | escape }}</pre>
{% endblock stream_stdout %}
{% block stream_stderr scoped %}{% endblock stream_stderr %}
{% block error scoped %}<section class="e3d"><div class="finding error" role="alert"><h3>&#10006; ERROR: the report ends here</h3>
<pre>{{ output.traceback | join('\\n') | escape }}</pre></div></section>
{% endblock error %}
{% block data_html scoped %}{% if not output.metadata.get('text/html', {}).get('caption') %}{{ output.data['text/html'] }}{% endif %}
{% endblock data_html %}
{% block data_markdown scoped %}{{ output.data['text/markdown'] | markdown2html }}
{% endblock data_markdown %}
{% block data_png scoped %}
{%- set about = output.metadata.get('image/png', {}) -%}
<figure><img alt="{{ about.get('alt', '') | escape }}" src="data:image/png;base64,{{ output.data['image/png'] | replace('\\n', '') }}">
{%- if about.get('caption') %}<figcaption>{{ about.get('caption') | escape }}</figcaption>{% endif %}</figure>
{% endblock data_png %}
{% block data_svg scoped %}{% endblock data_svg %}
{% block data_jpg scoped %}{% endblock data_jpg %}
{% block data_latex scoped %}{% endblock data_latex %}
{% block data_javascript scoped %}{% endblock data_javascript %}
{% block data_widget_view scoped %}{% endblock data_widget_view %}
{% block data_text scoped %}<pre>{{ output.data['text/plain'] | escape }}</pre>
{% endblock data_text %}
"""


def rendered(notebook: Any, name: str) -> str:
    """The page of an executed notebook.

    Args:
        notebook: as ``execution.execute`` returns it.
        name: title of the page where the notebook has none.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    from eagle3diag.report.html import document

    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = ["parameters", "injected-parameters", "papermill-error-cell-tag"]
    notebook = _until_it_stopped(notebook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exporter = HTMLExporter(
            config=config,
            extra_loaders=[DictLoader({"eagle3diag.html.j2": _TEMPLATE})],
            template_file="eagle3diag.html.j2",
            exclude_input=True,
            exclude_anchor_links=True,
        )
        body, _ = exporter.from_notebook_node(notebook)
    return document(_title(notebook) or name, _with_contents(_once(body.strip()))) + "\n"


def _until_it_stopped(notebook: Any) -> Any:
    """The notebook without the cells behind one that failed: their words would speak of what is not there."""
    for k, cell in enumerate(notebook.cells):
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            whole = copy(notebook)
            whole.cells = notebook.cells[: k + 1]
            return whole
    return notebook


def _once(body: str) -> str:
    """Every id once: a finding that stands in two sections is numbered in the second."""
    seen: Counter[str] = Counter()

    def numbered(match: re.Match[str]) -> str:
        seen[match[1]] += 1
        return match[0] if seen[match[1]] == 1 else f' id="{match[1]}-{seen[match[1]]}"'

    return re.sub(r' id="([^"]+)"', numbered, body)


def _with_contents(body: str) -> str:
    """The page with its table of contents before the first heading, or behind a verdict that stands there; errors and warnings in it."""
    heads = list(_HEAD.finditer(body))
    if len(heads) < 3:
        return body
    lines, parts = [], [body[: heads[0].start()]]
    for k, head in enumerate(heads):
        until = heads[k + 1].start() if k + 1 < len(heads) else len(body)
        section, words = body[head.end() : until], _TAG.sub("", head[1])
        found = "".join(f'<li><a href="#{i}">{code}</a></li>' for i, code in _FINDING.findall(section))
        lines.append(f'<li><a href="#part-{k + 1}">{words}</a>{f"<ul>{found}</ul>" if found else ""}</li>')
        parts.append(f'<h2 id="part-{k + 1}">{head[1]}</h2>{section}')
    contents = '<nav class="contents" aria-label="Contents">\n<p>Contents</p>\n<ul>\n' + "\n".join(lines) + "\n</ul>\n</nav>\n"
    place = 2 if heads[0][1] == FIRST else 1
    return "".join([*parts[:place], contents, *parts[place:]])


def _title(notebook: Any) -> str:
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return str(cell.source).splitlines()[0][2:]
    return ""
