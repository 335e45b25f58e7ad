"""The command line as a process: closed and full streams, readers that stop, and interrupts at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from slotline.builder.counted import counted
from slotline.cli import main
from slotline.llm.progress import progress_bar
from slotline.registry.errors import ConfigError

LIGHT = ("config show", "plugins", "explain N191", "--help")


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def shell(line: str, **more: str) -> tuple[int, str, str]:
    """The exit code of the first program of a line, and what came out; `$S` is `slotline`."""
    script = f"S='{sys.executable} -m slotline'; {line}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=environment(**more), capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", [*LIGHT, "generate x", "doctor"])
def test_a_closed_standard_output_is_an_error_before_any_work(command: str) -> None:
    before = time.monotonic()
    code, out, err = shell(f"$S {command} >&-")
    assert (code, out) == (2, "")
    assert err.startswith("error: standard output is closed\n  fix: ")
    assert time.monotonic() - before < 10
    assert shell(f"$S {command} >&- 2>&- <&-") == (2, "", "")


@pytest.mark.spread(2)
@pytest.mark.parametrize("command", LIGHT)
def test_a_full_disk_is_an_error_and_a_reader_that_stops_is_none(command: str) -> None:
    assert shell(f"$S {command} > /dev/full") == (2, "", "error: [Errno 28] No space left on device\n")
    assert shell(f"$S {command} | head -c 0") == (0, "", "")
    assert shell(f"$S {command} 2>&1 | head -c 0") == (0, "", "")


@pytest.mark.parametrize(("module", "frozen"), [("json", True), ("triton._C.libtriton", False)])
def test_the_end_of_a_process_collects_no_garbage_and_still_runs_what_is_registered(module: str, frozen: bool) -> None:
    pytest.importorskip(module.partition(".")[0])
    code = f"""
        import atexit, gc, sys, {module}
        sys.argv = ["slotline", "config", "show", "--json"]
        young = []
        atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 1_000, max(young, default=0) < 5_000))
        from slotline.cli import main
        gc.callbacks.append(lambda *_: young.append(len(gc.get_objects(generation=0))))
        sys.exit(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, f"frozen: {frozen} {frozen}", "")


def test_what_belongs_on_standard_error_does_not_appear_among_the_results_where_that_is_closed() -> None:
    code, out, _ = shell("$S config show --json 2>&-", SLOTLINE_ROOT="/opt")
    assert code == 0
    assert out.startswith("{")
    assert "SLOTLINE_ROOT" not in out
    assert shell("$S plugins --set nope=1 2>&-")[:2] == (2, "")
    assert shell("$S plugins --set nope=1 2>/dev/full")[:2] == (2, "")
    assert shell("$S nonsense 2>&-")[:2] == (2, "")


def test_a_prompt_from_a_closed_standard_input_or_one_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    code, _, err = shell("$S generate - <&-")
    assert code == 2
    assert "standard input is closed" in err
    (tmp_path / "prompt").write_bytes(b"a\xff")
    for locale in ("C", "C.UTF-8"):
        code, _, err = shell(f"$S generate - < {tmp_path}/prompt", LC_ALL=locale)
        assert code == 2
        assert "the prompt is no text" in err
        code, _, err = shell("$S generate $'a\\xff'", LC_ALL=locale)
        assert code == 2
        assert "the prompt is no text" in err


def test_output_that_the_terminal_cannot_show_is_escaped() -> None:
    code, out, _ = shell("$S config show --set 'model=\u00e9'", PYTHONIOENCODING="ascii")
    assert code == 0
    assert 'model = "\\xe9"' in out
    code, out, _ = shell("$S config show --set model=$'\\xff'", PYTHONIOENCODING="utf-8:strict")
    assert code == 0
    assert 'model = "\\udcff"' in out


def test_a_program_without_a_standard_error_may_ask_for_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(counted([1, 2], "", show=True)) == [1, 2]
    with progress_bar(2, enabled=True) as bar:
        bar.advance(1, tokens=1)


def interrupted(arguments: Sequence[str], wait: str, delay: float = 0.0) -> tuple[int, str]:
    """The exit code and standard error of a command that gets SIGINT so long after it has read a certain module."""
    program = (
        "import sys, builtins, signal, os, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        f"wanted, delay = {wait!r}, {delay}\n"
        "real = builtins.__import__\n"
        "def watching(name, *a, **k):\n"
        "    if name == wanted:\n"
        "        builtins.__import__ = real\n"
        "        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return real(name, *a, **k)\n"
        "builtins.__import__ = watching\n"
        "from slotline.cli import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment(), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("module", "delay"),
    [
        ("slotline.registry.errors", 0.0),
        ("argparse", 0.0),
        ("attrs", 0.0),
        ("attrs", 0.1),
        ("torch", 0.0),
        ("torch", 0.3),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_exit_code_130(module: str, delay: float) -> None:
    code, err = interrupted(["explain"], module, delay)
    assert code == 130
    assert err == "interrupted\n"


@pytest.mark.parametrize("then", ["pass", "raise ValueError"])
def test_an_interrupt_that_a_library_loses_or_turns_into_an_error_is_told(then: str) -> None:
    program = (
        "import os, signal, sys\nfrom slotline.cli.process import run_process\ndef command(interrupts):\n"
        "    interrupts.start()\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        signal.pause()\n"
        f"    except KeyboardInterrupt:\n        {then}\n    return 0\nsys.exit(run_process(command))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    program = (
        "import os, signal, sys, threading\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from slotline.cli import main\n"
        "threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program, "config", "show"], env=environment(), capture_output=True)
    assert done.returncode == 0


def test_main_called_from_python_leaves_signals_and_streams_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["explain", "N191"]) == 0
    assert signal.getsignal(signal.SIGINT) is before

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slotline.cli.command.load_config", stop)
    assert main(["plugins"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_standard_input_that_is_closed_is_refused_in_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.cli.generate import _prompt_text

    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        _prompt_text("-")
