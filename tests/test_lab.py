"""JupyterLab, started for real and driven in a real browser: the explorers of notebooks 03 and 05 show what the library computes.

The server is this test's own (free port on the loopback, own folders, a kernel that is this interpreter) and is stopped whatever happens.
With ``EAGLE3DIAG_SCREENSHOTS=FOLDER`` the pages are kept as pictures, light and dark.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import CHROMIUM, running

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
MISSING = [m for m in ("jupyterlab", "ipywidgets", "ipykernel", "playwright") if importlib.util.find_spec(m) is None]
PATIENCE = 300  #: seconds for a notebook on a busy machine

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

#: whole notebooks in the page, no news, nothing fetched
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a running server, and its settings folder."""
    place = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", place / "work")
    settings = place / "settings"
    for name, content in SETTINGS.items():
        write(settings / "@jupyterlab" / f"{name}.jupyterlab-settings", content)
    quiet = ["-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False"]
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kernel = {"argv": [sys.executable, *quiet], "display_name": "Python 3", "language": "python", "env": {"PYTHONPATH": python}}
    write(place / "path" / "kernels" / "python3" / "kernel.json", kernel)
    folders = {f"JUPYTER_{n}_DIR": str(place / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")}
    env = {
        **{k: v for k, v in os.environ.items() if k != "EAGLE3DIAG_WIDGETS"},
        **folders,
        "JUPYTER_PATH": str(place / "path"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(place / "workspaces"),
        "IPYTHONDIR": str(place / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    options = [
        "--no-browser",
        "--allow-root",
        f"--ServerApp.root_dir={place / 'work'}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--PasswordIdentityProvider.hashed_password=",
        "--ServerApp.open_browser=False",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
    ]
    with (place / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=env, stdout=log, stderr=log, cwd=place, start_new_session=True
        )
        try:
            _answers(server, address, place / "server.log")
            yield address, settings
        finally:
            _stopped(server)


def _answers(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/api/status", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _stopped(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets the server end its kernels; a kernel whose server is gone ends by itself."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        try:
            server.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running() as one:
        yield one


DONE = """() => { const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
  return cells.length > 2 && cells.every(c => /^\\[\\d+\\]:?$/.test(c.querySelector('.jp-InputPrompt').innerText.trim())); }"""


def opened(browser: Any, address: str, name: str) -> tuple[Any, list[str]]:
    """The notebook in a new window, every cell run; and the requests it made to other hosts."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    outside: list[str] = []
    tab.on(
        "request", lambda r: None if r.url.startswith((address, address.replace("http", "ws"), "data:", "blob:")) else outside.append(r.url)
    )
    tab.goto(f"{address}/lab/tree/{name}.ipynb?reset", wait_until="domcontentloaded")
    tab.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
    idle = "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    tab.wait_for_function(idle, timeout=120_000)
    tab.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    tab.wait_for_function(DONE, timeout=PATIENCE * 1000)
    errors = tab.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']")
    assert errors.count() == 0, errors.first.inner_text()
    return tab, outside


def until(what: Callable[[], Any], seconds: float = 60) -> Any:
    """The first true answer; the last one otherwise."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def kept(tab: Any, settings: Path, name: str) -> None:
    """Pictures of the page in both themes, where they are asked for."""
    folder = os.environ.get("EAGLE3DIAG_SCREENSHOTS")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for theme in ("Light", "Dark"):
        tab.evaluate(f"window.jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})")
        tab.wait_for_timeout(2500)
        tall = tab.evaluate(
            "Math.max(...[...document.querySelectorAll('.jp-NotebookPanel, .jp-NotebookPanel *')].map(e => e.scrollHeight))"
        )
        tab.set_viewport_size({"width": 1400, "height": min(15_000, tall + 120)})
        tab.evaluate("document.querySelectorAll('.jp-NotebookPanel *').forEach(e => { e.scrollTop = 0; })")
        tab.wait_for_timeout(1500)
        tab.screenshot(path=str(Path(folder) / f"{name}-{theme.lower()}.png"))
        tab.set_viewport_size({"width": 1400, "height": 1000})


def said(tab: Any) -> str:
    """The words of the panel under the controls."""
    return re.sub(r"\s+", " ", tab.locator(".jp-OutputArea-output .widget-html [aria-live]").last.inner_text())


def slider(tab: Any, label: str) -> Any:
    return tab.locator(f".jp-OutputArea-output .widget-hslider:has(label:text-is('{label}'))")


def test_a_slider_shows_the_token_it_stands_at(lab: tuple[str, Path], browser: Any) -> None:
    from eagle3diag.hidden.dumps import open_dump

    address, settings = lab
    tab, outside = opened(browser, address, "03_hidden_states")
    dump = open_dump(SAMPLE / "dumps")
    states = dump.read(dump.samples[0]).states
    handle = slider(tab, "token").locator(".noUi-handle")
    handle.scroll_into_view_if_needed()
    before = int(slider(tab, "token").locator(".widget-readout").inner_text())
    handle.focus()
    for _ in range(7):
        handle.press("ArrowRight")
    token = until(lambda: (now := int(slider(tab, "token").locator(".widget-readout").inner_text())) != before and now)
    assert token == before + 7
    slot = len(dump.slots) // 2

    def norm(at: int) -> str:
        return f"L2 norm {float(states[dump.slots[slot].position][at].float().norm()):.6g},"

    assert norm(token) != norm(before)
    assert until(lambda: f"Token {token} of" in said(tab) and norm(token) in said(tab)), said(tab)
    layer = slider(tab, "state").locator(".noUi-handle")
    layer.focus()
    layer.press("ArrowLeft")
    slot -= 1
    assert until(lambda: f"at HF {dump.slots[slot].hf}" in said(tab) and norm(token) in said(tab)), said(tab)
    kept(tab, settings, "03_hidden_states")
    assert outside == []
    tab.context.close()


def test_a_toggle_shows_the_acceptance_of_its_wiring(lab: tuple[str, Path], browser: Any) -> None:
    from eagle3diag.draft.agreement import agreement
    from eagle3diag.report.opened import opened as open_all

    address, settings = lab
    tab, outside = opened(browser, address, "05_engine_wiring")
    this = open_all()

    def length(**change: Any) -> str:
        wiring = replace(this.spec.wiring, **change)
        found = agreement(this.checkpoint, this.spec, this.dump, this.target, wiring=wiring, on_policy=False)
        return f"expected acceptance length {found.expected_length[4]:.2f} tokens"

    trained, toggled, both = length(), length(norm_output=True), length(norm_output=True, norm_before_residual=True)
    assert len({trained, toggled, both}) == 3
    assert until(lambda: trained in said(tab)), said(tab)
    box = tab.locator(".jp-OutputArea-output .widget-checkbox:has-text('norm_output') input[type=checkbox]")
    box.scroll_into_view_if_needed()
    start = time.monotonic()
    box.check()
    assert until(lambda: toggled in said(tab)), said(tab)
    answered = time.monotonic() - start
    assert answered < 30  # about half a second on a quiet machine
    tab.locator(".jp-OutputArea-output .widget-checkbox:has-text('norm_before_residual') input[type=checkbox]").check()
    assert until(lambda: both in said(tab)), said(tab)
    kept(tab, settings, "05_engine_wiring")
    assert outside == []
    tab.context.close()
