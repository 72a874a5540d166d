"""papermill with this interpreter as the kernel, and an executed notebook that is the same whenever and wherever it ran."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3diag.errors import UsageError, escaped

__all__ = ["KERNEL", "execute", "kernel"]

KERNEL = "eagle3diag-here"
#: errors whose message is the whole truth: no traceback is kept for them
PLAIN_ERRORS = ("CheckpointError", "UsageError", "Eagle3DiagError")
_CELL_FILE = re.compile(r"\S*ipykernel_\d+[/\\]\d+\.py")  # a temporary file that is called otherwise on each run
#: What the kernel runs. Nothing is imported from the working directory, which may be a folder that somebody else filled; and what the
#: kernel says of itself (that it was interrupted, that it lost its socket) is kept from stderr, where one line of ours is to stand.
_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 2);"
    " from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def kernel(place: Path) -> Iterator[None]:
    """A kernelspec that is this interpreter, found through ``JUPYTER_PATH`` for the time of the run."""
    spec = place / "kernels" / KERNEL
    spec.mkdir(parents=True)
    (place / "tmp").mkdir()
    env = {
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "IPYTHONDIR": str(place / "ipython"),
        "PYTHONWARNINGS": "ignore",
        "MPLBACKEND": "agg",
        "TMPDIR": str(place / "tmp"),
    }
    top = Path(__file__).resolve().parents[2]
    if top.name not in (
        "site-packages",
        "dist-packages",
    ):  # from a checkout: the kernel must find the same package, whatever its working directory
        env["PYTHONPATH"] = os.pathsep.join([str(top), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = ["--HistoryManager.enabled=False", "--InteractiveShellApp.ignore_cwd=True"]
    argv = [sys.executable, "-Xfrozen_modules=off", "-c", _START, "-f", "{connection_file}", *quiet]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python", "env": env}))
    before = {k: os.environ.get(k) for k in ("JUPYTER_PATH", "JUPYTER_PLATFORM_DIRS")}
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(place), *filter(None, [before["JUPYTER_PATH"]])])
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"  # silences a notice of jupyter_core on stderr
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Deprecations among the Jupyter packages, and what they log of a kernel that died, are not news of this run: stderr has one line."""
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def execute(path: Path, values: Mapping[str, Any]) -> tuple[Any, str]:
    """Run the notebook at ``path``.

    Args:
        values: parameters, already in the right types.

    Returns:
        The executed notebook, cleaned of everything that differs from run to run, and why it stopped early: empty where it did not.

    Raises:
        UsageError: no room for it among the temporary files.
    """
    import nbformat
    import papermill
    from papermill.exceptions import PapermillExecutionError

    failure = ""
    with tempfile.TemporaryDirectory(prefix="eagle3diag-") as place, _quiet():
        done = Path(place) / "executed.ipynb"  # papermill formats braces in paths: these have none
        source = nbformat.read(path, as_version=4)
        with kernel(Path(place) / "jupyter"):
            try:
                papermill.execute_notebook(
                    source,
                    str(done),
                    parameters=dict(values),
                    kernel_name=KERNEL,
                    progress_bar=False,
                    start_timeout=300,
                    cwd=str(Path.cwd()),
                )
            except PapermillExecutionError as error:
                failure = _one_line(error.ename, error.evalue)
            except (RuntimeError, TimeoutError) as error:  # the kernel died or never came up
                failure = (
                    f"the notebook's kernel stopped ({escaped(error, 200)}), often for want of memory: give it more, or a smaller dump"
                )
            except OSError as error:  # what was written so far may be cut anywhere
                raise UsageError(
                    f"{Path(place).parent}: no notebook can run there ({error.strerror}): free room, or set TMPDIR to another folder"
                ) from None
        notebook = nbformat.read(done, as_version=4) if done.exists() else source
    return _cleaned(notebook, path, values), failure


def _one_line(name: str, message: str) -> str:
    text = escaped(" ".join(message.split()), 1000)
    return text if name in PLAIN_ERRORS else f"the notebook stopped: {name}: {text}"


def _cleaned(notebook: Any, path: Path, values: Mapping[str, Any]) -> Any:
    """Without times, paths of temporary files or of the home folder, random ids, and tracebacks of messages that need none."""
    import nbformat

    from eagle3diag import __version__
    from eagle3diag.report.private import shared

    notebook.metadata.pop("papermill", None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["eagle3diag"] = {"version": __version__, "notebook": path.stem, "parameters": dict(values)}
    for k, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{k}"
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                if output.ename in PLAIN_ERRORS:
                    output["traceback"] = [f"{output.ename}: {output.evalue}"]
                output["traceback"] = [_CELL_FILE.sub("cell", _ANSI.sub("", line)) for line in output["traceback"]]
    return nbformat.from_dict(shared(notebook))
