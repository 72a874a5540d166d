"""Ordering of engine releases."""

from __future__ import annotations

import random

import pytest

from eagle3diag.engines.versions import at_least, nearest, parse, within
from eagle3diag.errors import UsageError

ORDER = ["0.4.5", "0.4.5.post3", "0.4.9", "0.4.10", "0.5.0.dev3", "0.5.0a1", "0.5.0rc1", "0.5.0rc2.dev1", "0.5.0rc2", "0.5.0", "0.5.4"]
ORDER += ["0.5.4.post3", "0.5.10rc0", "0.5.10", "0.9.0", "0.9.0.1", "0.10.1", "0.10.1.1", "0.11.0"]


def test_order() -> None:
    shuffled = ORDER[:]
    random.Random(1).shuffle(shuffled)
    assert sorted(shuffled, key=parse) == ORDER


def test_equal_spellings() -> None:
    assert parse("v0.5") == parse("0.5.0") == parse(" 0.5.0+cu128 ") == parse("0.5.0.0")
    assert parse("0.5.4-post3") == parse("0.5.4.post3") == parse("0.5.4post3")


def test_within() -> None:
    assert within("0.5.9", "0.4.9", "0.5.9")
    assert within("0.5.9", None, None)
    assert not within("0.5.9.post1", "0.4.9", "0.5.9")
    assert not within("0.5.0rc2", "0.5.0", None)
    assert at_least("0.5.10", "0.5.9")


def test_nearest() -> None:
    releases = ["0.5.10", "0.5.9", "0.5.0rc2"]
    assert nearest("0.5.9.post4", releases) == "0.5.9"
    assert nearest("99", releases) == "0.5.10"
    assert nearest("0.1", releases) == "0.5.0rc2"


@pytest.mark.parametrize("bad", ["", "latest", "0.5.x", "0..5", "0.5.", "٠.٥", "0.5.0rc1rc2", "9" * 5000, "0.5.9\x1b[31m", "-1", "0.5 9"])
def test_garbage(bad: str) -> None:
    with pytest.raises(UsageError) as e:
        nearest(bad, ["0.5.9", "0.4.9"])
    assert "0.4.9 to 0.5.9" in str(e.value)
    assert "\x1b" not in str(e.value)
    with pytest.raises(UsageError):
        parse(bad)
