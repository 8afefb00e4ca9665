"""What holds for every test: nothing but a test marked gpu may be skipped, and nothing may be deselected."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

_GPU_REASON = "needs a GPU"
_left_out: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--complete``, which make passes: whatever did not run fails the run."""
    parser.addoption("--complete", action="store_true", help="fail if anything but a gpu test was left out")


def _is_allowed(keywords: object, reason: str) -> bool:
    return "gpu" in keywords and _GPU_REASON in reason  # type: ignore[operator]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked gpu on a machine without one."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=_GPU_REASON))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note every skip and expected failure that is not a gpu test's."""
    reason = str(report.longrepr)
    if (report.skipped or hasattr(report, "wasxfail")) and not _is_allowed(report.keywords, reason):
        _left_out.append(f"{report.nodeid}: skipped or expected to fail ({reason})")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself while it is imported counts too."""
    if report.skipped:
        _left_out.append(f"{report.nodeid}: skipped at collection ({report.longrepr})")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """A deselected test is one that did not run."""
    _left_out.extend(f"{item.nodeid}: deselected" for item in items)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run, in the controller as in a worker, if anything was left out."""
    config = session.config
    worker_output = getattr(config, "workeroutput", None)
    if worker_output is not None:
        worker_output["left_out"] = _left_out
        return
    if _left_out and session.exitstatus == pytest.ExitCode.OK and config.option.complete:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Collect what an xdist worker left out."""
    _left_out.extend(getattr(node, "workeroutput", {}).get("left_out", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out."""
    for line in dict.fromkeys(_left_out):
        terminalreporter.write_line(f"NOT RUN: {line}", red=True)
