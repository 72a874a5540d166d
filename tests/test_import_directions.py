"""Rooms import downwards only, and importing the package stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eagle3diag"
LEVELS = {
    "": 0,
    "checkpoint": 1,
    "weights": 2,
    "engines": 2,
    "hidden": 2,
    "draft": 2,
    "serving": 2,
    "rules": 3,
    "report": 4,
    "cli": 5,
    "__main__": 6,
}
ROOTS = ("errors", "provenance", "display")  # at the bottom of the house
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*.py"))
DRAWING = ("matplotlib", "IPython", "ipywidgets", "papermill", "nbconvert", "nbformat", "jinja2")


def _room(parts: tuple[str, ...]) -> str:
    """The room of ``eagle3diag.room.module``; root modules and the package itself have none."""
    return parts[1] if len(parts) > 1 and parts[1] not in ROOTS else ""


def _imports(path: Path) -> list[tuple[str, int]]:
    """Every import of a module, inside functions too, as ``(dotted name, line)``; the lazy ``import_module`` counts as one."""
    out = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            # `from eagle3diag import x` may name a room
            deeper = [f"{node.module}.{a.name}" for a in node.names] if node.module == "eagle3diag" else []
            out += [(n, node.lineno) for n in [node.module or "", *deeper]]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            arg = node.args[0]
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                out.append((arg.value, node.lineno))
    return out


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    path = ROOT / module
    parts = Path(module).with_suffix("").parts
    if parts == ("eagle3diag", "__init__"):
        return  # the façade stands above the house; that it loads nothing by itself is tested below
    here = _room(parts)
    upward = []
    for name, line in _imports(path):
        if name.split(".")[0] != "eagle3diag":
            continue
        there = _room(tuple(name.split(".")))
        if there == "__version__":
            continue
        if LEVELS[there] > LEVELS[here] or (LEVELS[there] == LEVELS[here] == 2 and there != here and (there, here) not in SIDEWAYS):
            upward.append(f"{module}:{line} imports {name}")
    if parts[1:] == ("display",):
        # the one upward edge: a result asks report to show it, when asked
        assert upward
        assert all(".report." in u for u in upward)
    else:
        assert upward == []


#: (used, by) inside the middle floor: serving judges with the draft's arithmetic, the draft reads dumps, and so on
SIDEWAYS = {
    ("hidden", "draft"),
    ("engines", "draft"),
    ("draft", "serving"),
    ("engines", "serving"),
    ("engines", "weights"),
    ("hidden", "serving"),
}


@pytest.mark.parametrize(
    "module", [m for m in MODULES if not m.startswith(("eagle3diag/report/", "eagle3diag/cli", "eagle3diag/__main__"))]
)
def test_no_drawing_html_or_printing_below_report(module: str) -> None:
    path = ROOT / module
    drawing = [n for n, _ in _imports(path) if n.split(".")[0] in DRAWING or n == "html"]
    assert drawing == []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prints = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"]
    assert prints == []
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    tags = ("<table", "<div", "<span", "<html", "<td", "<tr>", "<p>")
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs]
    assert [n.lineno for n in texts if any(t in n.value for t in tags)] == []


def _loaded(statement: str) -> set[str]:
    """Top-level packages a fresh interpreter has imported after a statement, by ``-X importtime``."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    names = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return {n.split(".")[0] for n in names}


HEAVY = {"torch", "numpy", "matplotlib", "IPython", "papermill", "pandas", "transformers", "safetensors"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded("import eagle3diag")
    assert "eagle3diag" in loaded
    assert loaded & HEAVY == set()


def test_the_rules_load_nothing_heavy() -> None:
    loaded = _loaded("import eagle3diag.cli, eagle3diag.rules.registry as r; r.load_all()")
    assert loaded & HEAVY == set()
