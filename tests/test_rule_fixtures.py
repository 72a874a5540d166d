"""Every registered rule has a case that makes it speak and one that must not; severities are the catalogue's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from eagle3diag.rules.registry import RULES, load_all, run

FIXTURES = ("fixtures_cfg_key", "fixtures_val", "fixtures_aux_eng", "fixtures_dmp", "fixtures_agr", "fixtures_srv")

# by hand from the catalogue: the default severities of the families judged from files, launch lines, dumps and logs
ERROR = (101, 104, 105, 106, 107, 112, 113, 201, 203, 204, 205, 206, 207, 208, 210, 301, 302, 303, 304, 305, 306, 307, 404, 405, 501, 504)
ERROR += (601, 602, 603, 604, 605, 606, 701, 705, 801, 802, 803, 808)
WARNING = (103, 108, 110, 111, 114, 202, 209, 308, 309, 310, 401, 402, 403, 406, 407, 502, 503, 506, 607, 608, 609, 610)
WARNING += (702, 703, 704, 706, 805, 806, 807)
INFO = (102, 109, 115, 505, 507, 508, 707, 804, 809)
FAMILIES = {1: "CFG", 2: "KEY", 3: "VAL", 4: "AUX", 5: "ENG", 6: "DMP", 7: "AGR", 8: "SRV"}


def _gathered(which: str) -> dict[str, object]:
    out: dict[str, object] = {}
    for module in FIXTURES:
        for code, build in getattr(import_module(f"tests.{module}"), which).items():
            assert code not in out, f"{code} has two {which} fixtures"
            out[code] = build
    return out


FIRING, QUIET = _gathered("FIRING"), _gathered("QUIET")
load_all()


def test_every_code_of_these_families_is_registered_with_its_severity() -> None:
    expected = {f"{FAMILIES[n // 100]}{n}": s for ns, s in ((ERROR, "error"), (WARNING, "warning"), (INFO, "info")) for n in ns}
    assert len(expected) == len(ERROR + WARNING + INFO)
    assert {code: r.severity.value for code, r in RULES.items() if code[:3] in FAMILIES.values()} == expected


def test_every_rule_has_both_fixtures() -> None:
    assert set(FIRING) == set(RULES)
    assert set(QUIET) == set(RULES)


@pytest.mark.parametrize("code", sorted(RULES))
def test_firing(code: str, tmp_path: Path) -> None:
    report = run(FIRING[code](tmp_path), [code])  # type: ignore[operator]
    (outcome,) = report.outcomes
    assert outcome.status == "ran", outcome.why
    assert [f.code for f in outcome.findings][:1] == [code]
    for found in outcome.findings:
        assert found.title
        assert "\n" not in found.title
        assert found.remedy


@pytest.mark.parametrize("code", sorted(RULES))
def test_quiet(code: str, tmp_path: Path) -> None:
    report = run(QUIET[code](tmp_path), [code])  # type: ignore[operator]
    (outcome,) = report.outcomes
    assert outcome.status == "ran", outcome.why
    assert [f.title for f in outcome.findings if f.severity.value != "info"] == []
    if RULES[code].severity.value == "info":
        assert outcome.findings == ()
