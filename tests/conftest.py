"""Skips are held to a list: with ``--strict-skips`` a skipped test that ``allowed_skips.txt`` does not name fails the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

ALLOWED = Path(__file__).parent / "allowed_skips.txt"


def allowed_skips() -> dict[str, str]:
    """Test id (or the beginning of one, ending in ``*``) -> reason."""
    lines = [line.split("#", 1) for line in ALLOWED.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#")]
    return {test.strip(): reason[0].strip() if reason else "" for test, *reason in lines}


def is_allowed(test: str, allowed: dict[str, str]) -> bool:
    """Whether the list names this test."""
    return any(test == name or (name.endswith("*") and test.startswith(name[:-1])) for name in allowed)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strict-skips", action="store_true", help="fail where a test is skipped that tests/allowed_skips.txt does not name")


class Skips:
    """Collects what was skipped; with several workers this runs in the one that gathers their reports."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.seen[report.nodeid] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.seen[report.nodeid] = str(report.longrepr)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.getoption("--strict-skips") or hasattr(session.config, "workerinput"):
            return
        allowed = allowed_skips()
        unnamed = {test: why for test, why in self.seen.items() if not is_allowed(test, allowed)}
        for test, why in sorted(unnamed.items()):
            print(f"\nskipped without being named in {ALLOWED.name}: {test} ({why})")
        if unnamed and session.exitstatus == 0:
            session.exitstatus = 1


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(), "eagle3diag-skips")
