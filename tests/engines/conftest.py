"""A run of engine tests in which no test was executed has failed: it proves nothing."""

import pytest

_executed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped:
        _executed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _executed and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
