"""Ranks as actors of Ray, on a cluster of two nodes on this machine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RankError

ray = pytest.importorskip("ray", reason="ray is not installed: pip install slotline[ray]")
pytestmark = pytest.mark.slow
SPREAD: dict[str, Any] = {"parallel.launcher": "ray", "parallel.nodes": 2, "tensor": 2}
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            yield
        finally:
            started = psutil.Process().children(recursive=True)
            ray.shutdown()
            cluster.shutdown()
            _, left = psutil.wait_procs([one for one in started if "ray" in "".join(cmdline(one))], timeout=10)
            for one in left:
                one.kill()


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def alive_actors() -> list[str]:
    from ray._private.state import actors

    return [name for name, about in actors().items() if about["State"] != "DEAD"]


def groups() -> list[str]:
    return [name for name, about in ray.util.placement_group_table().items() if about["state"] != "REMOVED"]


def nothing_left() -> bool:
    """Wait a moment until Ray has noted what has ended, and return whether that is everything."""
    until = time.monotonic() + 5
    while (alive_actors() or groups()) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive_actors() and not groups()


def tokens(llm: LLM) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(PROMPTS, PARAMS)]


def test_two_nodes_give_the_text_of_one_process_and_leave_nothing(tiny: Callable[..., Path]) -> None:
    model = tiny("llama")
    expected = tokens(LLM(model, **DEFAULTS))
    llm = LLM(model, **{**DEFAULTS, **SPREAD})
    (worker,) = llm.engine.links.followers
    assert len(alive_actors()) == 1
    (group,) = groups()
    places = ray.util.placement_group_table()[group]["bundles_to_node_id"]
    assert places[0] == ray.get_runtime_context().get_node_id() != places[1]
    assert tokens(llm) == expected
    assert psutil.pid_exists(worker.pid)
    llm.close()
    assert nothing_left()


def test_a_killed_worker_is_named_within_seconds(tiny: Callable[..., Path]) -> None:
    llm = LLM(tiny("llama"), **{**DEFAULTS, **SPREAD})
    (worker,) = llm.engine.links.followers
    tokens(llm)
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed in step .*: its process has ended"):
        tokens(llm)
    assert time.monotonic() - began < 5
    assert nothing_left()


def test_too_few_nodes_are_named_after_the_time_to_start(tiny: Callable[..., Path]) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"2 ranks need 2 CPU on this node; Ray has .*1 on \S+ \(this one\)") as error:
        LLM(tiny("llama"), **{**DEFAULTS, **SPREAD, "parallel.nodes": 1, "parallel.start_timeout": 1.0})
    assert "raise parallel.start_timeout" in str(error.value)
    assert 1 <= time.monotonic() - began < 10
    assert nothing_left()
