"""Choice of what starts ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slotline.ranks.launchers import choose_launcher, refuse_replicas_elsewhere
from slotline.ranks.ray_room import package
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def choice(environment: dict[str, str] | None = None, **parallel: Any) -> str:
    settings = {f"parallel.{name}": value for name, value in {"tensor": 4, **parallel}.items()}
    return choose_launcher(load_config(values=settings, environ={}), environment or {})


@pytest.mark.parametrize(
    ("parallel", "environment", "expected"),
    [
        ({}, {}, "local"),
        ({}, TORCHRUN, "torchrun"),
        ({"nodes": 2}, {}, "ray"),
        ({"nodes": 2}, TORCHRUN, "torchrun"),
        ({"launcher": "torchrun"}, TORCHRUN, "torchrun"),
        ({"launcher": "ray"}, {}, "ray"),
        ({"launcher": "ray"}, TORCHRUN, "ray"),
        ({"launcher": "torchrun", "tensor": 1}, {}, "torchrun"),
    ],
)
def test_auto_is_torchrun_where_it_runs_else_local_or_ray(
    parallel: dict[str, Any], environment: dict[str, str], expected: str
) -> None:
    assert choice(environment, **parallel) == expected


@pytest.mark.parametrize(
    ("parallel", "environment", "text"),
    [
        ({"nodes": 3}, {}, "parallel.nodes = 3 does not divide 4 ranks"),
        ({"launcher": "torchrun"}, {}, "in a process that torchrun did not start"),
        ({"launcher": "local", "nodes": 2}, {}, "'local' starts processes on this machine, and parallel.nodes = 2"),
        ({"nodes": 4}, TORCHRUN, "parallel.nodes = 4, and torchrun started 2 of 4 ranks on this one"),
    ],
)
def test_what_cannot_start_the_ranks_is_refused(
    parallel: dict[str, Any], environment: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        choice(environment, **parallel)


@pytest.mark.parametrize("parallel", [{"nodes": 2}, {"launcher": "ray"}])
def test_replicas_start_on_this_machine(parallel: dict[str, Any]) -> None:
    values = {f"parallel.{name}": value for name, value in {"data": 2, **parallel}.items()}
    with pytest.raises(ConfigError, match=r"with parallel.data = 2, whose replicas start on this machine"):
        refuse_replicas_elsewhere(load_config(values=values, environ={}))


def test_the_extra_is_named_where_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install slotline\[ray\]"):
        package()
