"""The pytest plugin of the conformance suite: ``pytest --pyargs slotline.conformance -p slotline.testing.plugin``.

It does nothing in a session that does not collect the suite, so an author's own configuration may contain it:

    [pytest]
    addopts = ["-p", "slotline.testing.plugin"]
    consider_namespace_packages = true
    slotline_plugin = "my_attn"
    slotline_expected_failures = ["attention.sinks=not written yet"]
"""

from __future__ import annotations

import json
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from slotline.registry.errors import ConfigError, SlotlineError
from slotline.testing.junit import properties
from slotline.testing.pytest_options import add_options, asked_of
from slotline.testing.report import plain, structured
from slotline.testing.runner import Outcome, Record
from slotline.testing.selection import Selected
from slotline.testing.session import Session
from slotline.testing.summary import headline, summary

SUITE = "slotline.conformance"
_SESSION = pytest.StashKey[Session]()
_RECORD = pytest.StashKey[Record]()
_TEST = "test_conformance.py::test_check["
_ATTRIBUTE = "slotline_record"  # attribute of a test report, sent from xdist's workers to the controller
_STYLES: dict[str, dict[str, bool]] = {
    "good": {"green": True},
    "bad": {"red": True},
    "odd": {"yellow": True},
    "head": {"bold": True},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line and of the configuration file."""
    add_options(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin under test if the suite is requested. An error in it must stop everything."""
    if asks_for_suite(config):
        _refuse_foreign_name(config)
        session_of(config)


def asks_for_suite(config: pytest.Config) -> bool:
    """Return True if the arguments name the suite, as a package or as files."""
    return any(_names_suite(str(argument).partition("::")[0]) for argument in config.args)


def _names_suite(argument: str) -> bool:
    if argument == SUITE or argument.startswith(SUITE + "."):
        return True
    spec = find_spec(SUITE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    return folder is not None and Path(argument).resolve().is_relative_to(folder)


def _refuse_foreign_name(config: pytest.Config) -> None:
    if not config.getini("consider_namespace_packages"):
        raise pytest.UsageError(
            "slotline is a namespace package, and pytest would import the suite under a wrong name: "
            "set consider_namespace_packages = true in the configuration, or give -o consider_namespace_packages=true"
        )


def session_of(config: pytest.Config) -> Session:
    """Return the session's state, created on first use.

    Raises:
        pytest.UsageError: if no plugin is named, it cannot be loaded, or an option is wrong.
    """
    if _SESSION not in config.stash:
        try:
            session = config.stash[_SESSION] = _open(config)
        except SlotlineError as error:
            raise pytest.UsageError(f"{error}{_cause(error)}") from error
        if not _is_worker(config):
            config.pluginmanager.register(Collector(session), "slotline-collector")
    return config.stash[_SESSION]


def _open(config: pytest.Config) -> Session:
    asked = asked_of(config)
    if not asked.plugin:
        raise ConfigError(
            "no plugin is named to test",
            fix='give --slotline-plugin NAME, or write slotline_plugin = "NAME" in the configuration',
        )
    stream = _path(config, "--slotline-stream")
    if _is_worker(config):
        return Session.of(asked, stream=stream, worker=True)
    return Session.of(asked, _path(config, "--slotline-report"), stream)


def _is_worker(config: pytest.Config) -> bool:
    """Return True in a worker process of xdist."""
    return hasattr(config, "workerinput")


def _path(config: pytest.Config, option: str) -> Path | None:
    text = config.getoption(option)
    return config.invocation_params.dir / text if text else None


def _cause(error: SlotlineError) -> str:
    cause = error.__cause__
    if cause is None or str(cause) in str(error):
        return ""
    return f"\n  cause: {type(cause).__name__}: {cause}"


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the plugin under test and the device."""
    session = config.stash.get(_SESSION, None)
    return [] if session is None else [f"slotline: {headline(session.report())}"]


def generate(metafunc: pytest.Metafunc, module: str) -> None:
    """Generate the tests of the suite, one for each selected run of a check."""
    if not metafunc.config.pluginmanager.has_plugin(__name__):
        raise pytest.UsageError(f"the conformance suite needs its plugin: give -p {__name__}")
    if not module.startswith(f"{SUITE}."):
        raise pytest.UsageError(f"the suite was imported as {module!r}: set consider_namespace_packages = true")
    selected = session_of(metafunc.config).selected
    metafunc.parametrize("selected", [pytest.param(item, id=item.key) for item in selected])


def perform(selected: Selected, request: pytest.FixtureRequest) -> None:
    """Run one check and end the test with the record's outcome."""
    session = session_of(request.config)
    record = session.run(selected)
    request.node.stash[_RECORD] = record
    request.node.user_properties.extend(properties(record))
    if session.lost(record):
        request.session.shouldstop = f"{record.key} left the device unusable: run it alone, with CUDA_LAUNCH_BLOCKING=1"
    _end(record)


def _end(record: Record) -> None:
    if record.outcome is Outcome.XFAILED:
        pytest.xfail(record.reason)
    if record.outcome is Outcome.SKIPPED:
        pytest.skip(record.reason)
    if record.outcome is Outcome.DISABLED:
        pytest.skip(f"switched off: {record.reason}")
    if record.bad:
        lines = [record.reason, f"{record.level} {record.key}: {record.summary}", record.reproducer, ""]
        pytest.fail("\n".join([*lines, str(record.details.get("traceback", ""))]), pytrace=False)
    if record.outcome is Outcome.FAILED:
        pytest.xfail(f"does not count: {record.reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record to the test report as text, so that xdist sends it on."""
    report = yield
    record = item.stash.get(_RECORD, None)
    if record is not None and report.when == "call":
        setattr(report, _ATTRIBUTE, json.dumps(plain(record)))
    return report


class Collector:
    """Collector of the records in the process that writes the report: pytest's own, or xdist's controller."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the begin of a test."""
        if _key(nodeid):
            self._session.started(_key(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the end of a test's phase. A test that failed without a record died before it could create one."""
        text = getattr(report, _ATTRIBUTE, None)
        if text is not None:
            self._session.ended(structured(json.loads(text), Record))
        elif report.failed:
            self._session.died(_key(report.nodeid), str(report.longrepr))

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        self._session.finish()


def _key(nodeid: str) -> str:
    return nodeid.partition("[")[2].removesuffix("]") if _TEST in nodeid else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the report in words."""
    session = config.stash.get(_SESSION, None)
    if session is None or not session.records:
        return
    report = session.report()
    terminalreporter.section(f"slotline conformance: {headline(report)}")
    for line in summary(report):
        terminalreporter.write_line(line.text, **_STYLES.get(line.tone, {}))
