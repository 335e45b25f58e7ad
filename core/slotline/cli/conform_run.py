"""The suite in a process of its own, followed from this one, so that a plugin that crashes is a result too."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import IO, TYPE_CHECKING, NoReturn

import attrs
from attrs import frozen

from slotline.registry.errors import SlotlineError

if TYPE_CHECKING:
    from slotline.testing.report import Report
    from slotline.testing.stream import Reader

_USAGE = 4  # pytest's exit code for wrong options
_PROCESSES = 20  # that may die before the rest is abandoned
_POLL_S = 0.05
# The author's own pytest configuration must not influence the result.
_CONFIG = "[pytest]\nconsider_namespace_packages = true\n"
_QUIET = ("--noconftest", "-q", "--tb=no", "--no-summary")


def require_packages(jobs: int = 1) -> None:
    """Check that the suite can run, in `jobs` processes.

    Raises:
        SlotlineError: naming the packages that are missing.
    """
    if jobs > 1 and find_spec("xdist") is None:
        raise SlotlineError(
            f"--jobs {jobs} needs pytest-xdist, not installed here", fix="pip install pytest-xdist, or leave --jobs out"
        )
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        raise SlotlineError(
            f"the conformance suite needs {' and '.join(missing)}, not installed here",
            fix="pip install 'slotline[conformance]'",
        )


def run_suite(
    options: Sequence[str],
    on_news: Callable[[Reader], None],
    timeout: float,
    jobs: int = 1,
    session_timeout: float = math.inf,
) -> Report:
    """Run the suite and return its report.

    A check that takes its process down, or that does not end, is a failure of that check. Another process goes on with
    the rest. Checks that have not run when the session's time is over are missing from the report, and count for no
    plugin as a failure.

    Args:
        options: of the pytest plugin.
        on_news: called repeatedly while the suite runs.
        timeout: seconds that one run of a check may take.
        jobs: processes that share the runs, by pytest-xdist.
        session_timeout: seconds that the whole session may take.

    Raises:
        SlotlineError: if the suite does not begin, with the output of pytest.
    """
    from slotline.testing.stream import Reader, Writer

    deadline = time.monotonic() + session_timeout

    with tempfile.TemporaryDirectory(prefix="slotline-conform-") as folder:
        events = Path(folder) / "events.jsonl"
        reader = Reader(events)
        shared = ("-p", "xdist", "-n", str(jobs)) if jobs > 1 else ()
        command = _command(Path(folder), [*options, *shared, f"--slotline-stream={events}"])
        report: Report | None = None
        for _ in range(_PROCESSES):
            before = len(reader.records)
            end = _follow(command, Path(folder), reader, on_news, timeout, deadline)
            report = reader.report
            if report is None:
                raise _no_start(end)
            if end.over:
                break
            if reader.running is not None:
                dead = attrs.evolve(reader.running, reason=_cause_of_death(end, timeout), seconds=end.seconds)
                Writer(events).record(attrs.evolve(dead, details={"traceback": end.output}))
                reader.follow()
            if len(reader.records) in (before, report.planned):
                break
        on_news(reader)
        assert report is not None  # at least one process ran
        return attrs.evolve(report, records=tuple(reader.records))


def _command(folder: Path, options: Sequence[str]) -> list[str]:
    config = folder / "pytest.toml"
    config.write_text(_CONFIG, encoding="utf-8")
    spec = find_spec("slotline.conformance")
    assert spec is not None  # it is in the same distribution
    assert spec.origin is not None
    words = [sys.executable, "-P", "-m", "pytest", "-c", str(config), f"--rootdir={Path(spec.origin).parent}"]
    words += ["-p", "slotline.testing.plugin", "-p", "no:cacheprovider", *_QUIET]
    return [*words, "--pyargs", "slotline.conformance", *options]


@frozen
class _End:
    """End of a process: exit code, its last lines, and the seconds of its last check.

    `late` says that the check took too long, `over` that the session's time was over.
    """

    code: int
    output: str
    seconds: float
    late: bool
    over: bool


def _follow(
    command: Sequence[str],
    folder: Path,
    reader: Reader,
    on_news: Callable[[Reader], None],
    timeout: float,
    deadline: float,
) -> _End:
    """Run a process to its end, its own files in `folder`."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder)}
    environment.pop("PYTEST_ADDOPTS", None)
    key, since, late, over = "", time.monotonic(), False, False
    with _ended_as_a_whole(), tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        # A session of its own: pytest-xdist's processes end with it.
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        ) as process:
            try:
                while process.poll() is None and not (late or over):
                    time.sleep(_POLL_S)
                    reader.follow()
                    on_news(reader)
                    running = reader.running.key if reader.running else ""
                    if running != key:
                        key, since = running, time.monotonic()
                    late = bool(key) and time.monotonic() - since > timeout
                    over = time.monotonic() > deadline
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        reader.follow()
        return _End(process.returncode, _tail(output), time.monotonic() - since, late, over)


@contextmanager
def _ended_as_a_whole() -> Iterator[None]:
    """Leave by an exception if this process is told to end, since the suite's session would outlive it otherwise."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave) if current_thread() is main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _tail(output: IO[str], lines: int = 40) -> str:
    output.seek(0)
    return "".join(output.readlines()[-lines:])


def _no_start(end: _End) -> SlotlineError:
    if end.over:
        return SlotlineError("the session's time was over before the suite began", fix="raise --session-timeout")
    text = end.output.strip()
    if end.code == _USAGE:
        message, _, fix = text.partition("ERROR: ")[2].partition("\n  fix: ")
        return SlotlineError(message.strip() or text, fix=fix.strip() or None)
    return SlotlineError(f"the suite did not begin (exit code {end.code}):\n{text}")


def _cause_of_death(end: _End, timeout: float) -> str:
    if end.late:
        return f"it did not end within {timeout:g} s"
    try:
        cause = f"exit code {end.code}" if end.code >= 0 else f"signal {signal.Signals(-end.code).name}"
    except ValueError:
        cause = f"signal {-end.code}"
    return f"its process died: {cause}"
