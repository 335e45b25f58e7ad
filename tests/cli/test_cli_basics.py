"""The command line as a whole: help, version, errors, and what the light commands must not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slotline.cli import build_parser, main

COMMANDS = ("generate", "explain", "plugins", "doctor", "schema", "config", "bench", "save-weights", "new-plugin")


def in_process_of_its_own(program: str) -> str:
    """What a program prints that runs with this process's import path and a bare interpreter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"examples:\n  slotline {command}" in capsys.readouterr().out


def test_the_list_of_commands_is_whole() -> None:
    assert all(command in build_parser().format_help() for command in COMMANDS)


def test_a_command_imports_no_module_of_another() -> None:
    lines = [
        "import sys",
        "from slotline.cli import build_parser",
        "build_parser('new-plugin').parse_args(['new-plugin', 'attention', 'mine'])",
        "print([name for name in ('generate', 'new_plugin', 'serve') if f'slotline.cli.{name}' in sys.modules])",
    ]
    assert in_process_of_its_own("\n".join(lines)) == "['new_plugin']\n"


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"slotline {version('slotline')}\n"


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().err


def test_an_error_is_a_message_and_a_fix_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "attentoin", "mine"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: 'attentoin' is no kind of plugin\n  fix: ")
    assert "Traceback" not in shown.err


def test_traceback_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--set", "nope=1", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_light_commands_import_no_torch(tmp_path: Path) -> None:
    lines = [
        "import sys, contextlib, io",
        "from slotline.cli import main",
        "codes = []",
        "with contextlib.redirect_stdout(io.StringIO()):",
        "    for line in (['plugins'], ['plugins', '--load'], ['schema'], ['explain', 'N191'], ['config', 'show'],",
        f"                 ['new-plugin', 'attention', 'my_attn', '--path', {str(tmp_path / 'mine')!r}]):",
        "        codes.append(main(line))",
        "print(codes, 'torch' in sys.modules, 'transformers' in sys.modules)",
    ]
    assert in_process_of_its_own("\n".join(lines)) == "[0, 0, 0, 0, 0, 0] False False\n"


def test_python_m_slotline_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slotline", "explain", "N191"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("N191")
