"""The façade: eleven names, each found where it says, none loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import eagle3diag


@pytest.mark.parametrize("name", eagle3diag.__all__)
def test_each_public_name_is_callable(name):
    assert callable(getattr(eagle3diag, name))
    assert name in dir(eagle3diag)


def test_eleven_names_and_no_more():
    assert len(eagle3diag.__all__) == 11


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'utils'"):
        eagle3diag.utils  # noqa: B018


def test_import_loads_nothing_heavy():
    code = (
        "import sys, eagle3diag; print([m for m in ('torch', 'numpy', 'matplotlib', 'IPython', 'papermill', 'einops') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
