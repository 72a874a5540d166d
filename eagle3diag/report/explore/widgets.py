"""The widgets of an ``Explorer``: the only module that asks for ipywidgets. It decides nothing that is shown."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import Any

from eagle3diag.errors import Eagle3DiagError, UsageError, escaped
from eagle3diag.report.explore.explorer import Control, Explorer, Panel
from eagle3diag.report.html import fragment
from eagle3diag.report.layout import View

__all__ = ["board", "display_board", "panel_html"]

WIDE = 8  #: rows of a list of several
#: a widget's HTML gets none of the style of a cell's output: JupyterLab's class brings it, and room between columns everywhere
STYLE = "<style>.e3d-panel th, .e3d-panel td { padding: .2em .7em; } .e3d-panel.jp-RenderedHTMLCommon table { margin: .5em 0; }</style>"


def panel_html(panel: Panel) -> str:
    """A panel as an HTML fragment: the view, then the picture with its words."""
    body = fragment(panel.view, level=4)
    if panel.png:
        image = b64encode(panel.png).decode("ascii")
        style = "max-width:100%;background:#ffffff"
        body += f'<img alt="{escape(escaped(panel.alt, 4000), quote=True)}" style="{style}" src="data:image/png;base64,{image}">'
    return f'{STYLE}<div class="e3d-panel jp-RenderedHTMLCommon" aria-live="polite">{body}</div>'


def board(explorer: Explorer) -> Any:
    """Controls over their panel, as one widget.

    Raises:
        UsageError: ipywidgets is not installed.
    """
    try:
        import ipywidgets
    except ImportError:
        raise UsageError(
            "the controls of explore need ipywidgets: python -m pip install 'eagle3diag[notebook]', then reload the page"
        ) from None

    controls = {c.key: _widget(ipywidgets, c) for c in explorer.controls}
    shown, busy = ipywidgets.HTML(), ipywidgets.HTML()

    def refresh(_change: Any = None) -> None:
        busy.value = "<p>computing …</p>"
        try:
            setting = {k: w.value for k, w in controls.items()}
            for key, high in (explorer.highs(setting) if explorer.highs is not None else {}).items():
                if controls[key].max != high:
                    controls[key].max = high  # clips the value, which calls here again
                    setting[key] = controls[key].value
            shown.value = panel_html(explorer.shown(setting))
        except Eagle3DiagError as error:
            shown.value = panel_html(Panel(view=View(title="", summary=str(error), status="error")))
        except Exception as error:  # a callback's traceback would go where nobody looks
            what = f"{type(error).__name__}: {error}"
            shown.value = panel_html(Panel(view=View(title="", summary=f"this setting failed: {what}", status="error")))
        finally:
            busy.value = ""

    for one in controls.values():
        one.observe(refresh, names="value")
    refresh()
    row = ipywidgets.Layout(flex_flow="row wrap", align_items="flex-start")
    return ipywidgets.VBox([ipywidgets.Box(list(controls.values()), layout=row), busy, shown])


def _widget(kit: Any, control: Control) -> Any:
    style: dict[str, Any] = {"description": control.label, "style": {"description_width": "initial"}}
    layout = {"width": "auto", "margin": "2px 18px 2px 2px"}
    options = [(escaped(words, 80), value) for words, value in control.options]
    if control.kind == "toggle":
        return kit.Checkbox(value=control.value, indent=False, layout=layout, **style)
    if control.kind == "slider":
        wide = {**layout, "width": "26em"}
        return kit.IntSlider(value=control.value, min=0, max=control.high, continuous_update=control.live, layout=wide, **style)
    if control.kind == "stops":
        wide = {**layout, "width": "26em"}
        return kit.SelectionSlider(options=options, value=control.value, continuous_update=control.live, layout=wide, **style)
    if control.kind == "several":
        return kit.SelectMultiple(
            options=options, value=tuple(control.value), rows=min(WIDE, max(2, len(options))), layout={**layout, "width": "34em"}, **style
        )
    if control.kind == "choice":
        return kit.Dropdown(options=options, value=control.value, layout=layout, **style)
    return kit.Text(value=control.value, continuous_update=True, placeholder="any word", layout=layout, **style)


def display_board(explorer: Explorer) -> None:
    """Display the controls; a viewer without widgets shows the sentence that says what they do."""
    from IPython.display import display

    one = board(explorer)
    bundle = one._repr_mimebundle_()
    data = dict(bundle[0] if isinstance(bundle, tuple) else bundle)
    data["text/plain"] = f"Controls of a live notebook: {explorer.how}."
    display(data, raw=True)
