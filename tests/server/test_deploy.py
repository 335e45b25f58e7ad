"""The files of deploy/: what they name exists, and their commands are ones that slotline takes."""

from __future__ import annotations

import configparser
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT
from running_server import RunningServer

from slotline.cli import build_parser
from slotline.cli.serve import server_config
from slotline.registry.config.schema import ServerConfig

DEPLOY = ROOT / "deploy"
Instruction = tuple[str, str]
"""An instruction of a Dockerfile and its text."""


def server_of(command: Sequence[str]) -> ServerConfig:
    """The configuration of a server that a command of a deployed machine starts."""
    program, *words = command
    assert program in ("slotline", "/opt/slotline/bin/slotline")
    here = [word.replace("/etc/slotline/run.toml", str(DEPLOY / "run.toml")) for word in words]
    arguments = build_parser().parse_args(here)
    assert arguments.command == "serve"
    return server_config(arguments).config.server


def instructions() -> list[Instruction]:
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    found = [tuple(line.split(maxsplit=1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    return [(name, " ".join(text.split())) for name, text in found]


def stages() -> dict[str, list[Instruction]]:
    """The instructions of each stage of the Dockerfile, those of the stages that it is built from first."""
    found: dict[str, list[Instruction]] = {}
    for name, text in instructions():
        if name == "FROM":
            source, _, stage = (*text.split(), "", "last")[:3]
            found[stage] = list(found.get(source, []))
        elif found:
            found[stage].append((name, text))
    return found


def last(stage: Sequence[Instruction], name: str) -> str:
    """The instruction of a stage that is in force."""
    return [text for found, text in stage if found == name][-1]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "slotline.service").read_text())
    return parser


@pytest.mark.parametrize("stage", ["cpu", "cuda", "last"])
def test_an_image_starts_the_server_as_a_user_without_rights(stage: str) -> None:
    found = stages()[stage]
    server = server_of(json.loads(last(found, "ENTRYPOINT")) + json.loads(last(found, "CMD")))
    assert (server.host, server.port) == ("0.0.0.0", int(last(found, "EXPOSE")))
    user = last(found, "USER")
    assert user != "root"
    assert any(name == "RUN" and text.startswith("useradd ") and text.endswith(user) for name, text in found)


def test_the_health_check_asks_for_the_readiness(server: RunningServer) -> None:
    check = last(stages()["cpu"], "HEALTHCHECK")
    program, *words = json.loads(check[check.index(" CMD ") + 5 :])
    assert program == "python"
    assert f":{server_of(['slotline', 'serve', '/etc/slotline/run.toml']).port}/ready'" in words[1]
    words[1] = words[1].replace("http://127.0.0.1:8000", server.url)

    def status() -> int:
        return subprocess.run([sys.executable, *words], capture_output=True, timeout=60, check=False).returncode

    assert status() == 0
    server.state.draining = True
    try:
        assert status() == 1
    finally:
        server.state.draining = False


def test_an_image_is_built_from_what_the_wheel_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = [text.split()[0] for name, text in stages()["wheel"] if name == "COPY"][1:]
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(copied) == sorted(package.partition("/")[0] for package in packages)
    for name, text in instructions():
        if name == "COPY":
            *sources, _ = text.split()
            assert all((ROOT / source).exists() for source in sources), text
    (extras,) = (text.removeprefix("EXTRAS=") for name, text in stages()["cpu"] if text.startswith("EXTRAS="))
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert {"server", "otel"} <= set(extras.split(","))


def test_the_composed_services_start_the_server_and_stop_it_after_it_drained() -> None:
    found = compose()
    assert set(found["services"]) == {"slotline", "cuda"}
    for service in found["services"].values():
        server = server_of(["slotline", *service["command"]])
        (ports,) = service["ports"]
        assert ports.endswith(f":{server.port}")
        assert server.api_keys == f"/run/secrets/{service['secrets'][0]}"
        assert int(service["stop_grace_period"].removesuffix("s")) > server.drain_timeout
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert (context / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] in stages()
        mounted, cache = (volume.split(":") for volume in service["volumes"])
        assert (DEPLOY / mounted[0]).is_file()
        assert cache[0] in found["volumes"]
        assert cache[1] == last(stages()["cpu"], "VOLUME")
        assert set(service["secrets"]) == set(found["secrets"])


def test_the_unit_starts_the_server_and_stops_it_after_it_drained() -> None:
    service = unit()["Service"]
    server = server_of(shlex.split(service["ExecStart"]))
    name, place = service["LoadCredential"].split(":")
    assert server.api_keys.endswith(f"/{name}")
    assert place.startswith("/etc/slotline/")
    assert int(service["TimeoutStopSec"]) > server.drain_timeout
    for variable in service["Environment"].split():
        assert variable.partition("=")[2].startswith(f"/var/cache/{service['CacheDirectory']}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "slotline.service"
    text = (DEPLOY / "slotline.service").read_text()
    file.write_text(text.replace("/opt/slotline/bin/slotline", sys.executable))
    process = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="this machine has no nginx")
def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    log = tmp_path / "log"
    file.write_text(
        f"pid {tmp_path}/pid; error_log {log}; events {{}} http {{ access_log {log}; include {DEPLOY}/nginx.conf; }}"
    )
    command = ["nginx", "-t", "-c", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr


def test_the_page_shows_every_file() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    for file in DEPLOY.iterdir():
        assert f"../deploy/{file.name}" in page
