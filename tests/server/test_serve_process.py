"""`slotline serve` as a process: where it listens, how it ends, and what it refuses to start with."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from slotline.cli import main

COMMAND = [sys.executable, "-c", "import sys; from slotline.cli import main; sys.exit(main())", "serve"]
BODY = {"prompt": "def main(", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process, and the URL that it says."""
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        place = re.search(r" on (\S+) ", line)
        assert place is not None, line + process.stderr.read()
        process.stderr.readline()  # the plan
        yield process, place[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_signal_lets_requests_finish_and_a_second_one_does_not(tmp_path: Path) -> None:
    with started("--port", "0") as (process, url), httpx.Client(timeout=120) as client:
        with client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        assert process.wait(30) == 0
    with (
        started("--port", "0") as (process, url),
        httpx.Client(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - start < 5
        lines.close()


@pytest.fixture
def systemd() -> Iterator[socket.socket]:
    """A socket that hears what systemd is told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        yield heard


@pytest.mark.slow
def test_a_unix_socket_the_access_log_and_what_systemd_hears(
    tmp_path: Path, systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "socket"
    systemd.settimeout(60)
    systemd.bind(str(tmp_path / "systemd"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "systemd"))
    with started("--set", f"server.socket={place}") as (process, said):
        assert said == f"unix:{place}"
        assert systemd.recv(100) == b"READY=1"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), timeout=60) as client:
            body = {"prompt": "secret words", "max_tokens": 2}
            assert client.post("http://x/v1/completions", json=body, headers={"x-request-id": "r1"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        line = json.loads(process.stderr.read().splitlines()[0])
        assert systemd.recv(100) == b"STOPPING=1"
    assert (line["method"], line["path"], line["status"], line["request_id"]) == ("POST", "/v1/completions", 200, "r1")
    assert "secret" not in str(line)
    assert not place.exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a server says that does not start."""
    assert main(["serve", *arguments]) == 2
    return capsys.readouterr().err


def test_an_address_in_use_is_refused_before_the_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "--port", str(port), "--model", "no-such-folder")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "fix: set server.host and server.port" in said


def test_wrong_keys_and_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n# none\n")
    assert "has no key" in refused(capsys, "--port", "0", "--set", f"server.api_keys={empty}")
    assert "99999" in refused(capsys, "--port", "99999")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; sys.modules['uvicorn'] = None\n"
        "from slotline.cli import main; sys.exit(main(['serve']))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2
    assert "fix: pip install 'slotline[server]'" in process.stderr
