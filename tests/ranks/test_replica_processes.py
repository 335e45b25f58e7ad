"""Replicas as processes: the outputs of one engine, and clear ends when one dies, stops or cannot be built."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import CapacityError, RankError

SETTINGS = {"dtype": "float32", "observability.progress": False}
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range("] * 2
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture
def none_left() -> Iterator[None]:
    """No child process is left at the end."""
    before = set(psutil.Process().children(recursive=True))
    yield
    gc.collect()
    left = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive


@pytest.mark.usefixtures("none_left")
@pytest.mark.slow
def test_two_processes_have_the_outputs_of_one_and_a_killed_one_ends_both_with_its_name() -> None:
    llm = LLM(data=2, **SETTINGS)
    expected = [output.outputs[0].text for output in LLM(**SETTINGS).generate(PROMPTS)]
    assert [output.outputs[0].text for output in llm.generate(PROMPTS)] == expected
    a_third_joins_and_leaves(llm)
    killed = threading.Timer(0.5, os.kill, (llm.front.links.pid_of(1), signal.SIGKILL))
    killed.start()
    with pytest.raises(RankError, match="replica 1 failed: its process has ended: killed by SIGKILL"):
        llm.generate(PROMPTS, LONG)
    with pytest.raises(RankError, match="replica 1 failed"):
        llm.generate("again")
    assert not llm.front.requests


def a_third_joins_and_leaves(llm: LLM) -> None:
    """Let a process join after another was killed while it was built, and leave."""
    greedy = SamplingParams(temperature=0)
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, greedy)]
    first = set(psutil.Process().children())

    def kill_new() -> None:
        while not (new := set(psutil.Process().children()) - first):
            time.sleep(0.01)
        time.sleep(0.3)
        new.pop().kill()

    killer = threading.Thread(target=kill_new)
    killer.start()
    with pytest.raises(RankError, match=r"replica 2 .*killed by SIGKILL"):
        llm.scale(3)
    killer.join()
    assert set(psutil.Process().children()) == first
    assert llm.scale(3).started == 1
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, greedy)] == expected
    assert llm.scale(2).leaving == 0
    psutil.wait_procs(set(psutil.Process().children()) - first, timeout=5)
    assert set(psutil.Process().children()) == first


@pytest.mark.usefixtures("none_left")
@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [{"tensor": 2}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_stopped_process_is_found_and_two_ranks_make_a_replica(ranks: dict[str, int]) -> None:
    llm = LLM(data=2, **ranks, **SETTINGS)
    expected = [output.outputs[0].text for output in LLM(**SETTINGS).generate(PROMPTS)]
    assert [output.outputs[0].text for output in llm.generate(PROMPTS)] == expected
    family = psutil.Process().children(recursive=True)
    assert len(family) >= 4  # of which two are not children of this process
    stopped = threading.Timer(0.5, os.kill, (llm.front.links.pid_of(0), signal.SIGSTOP))
    stopped.start()
    start = time.monotonic()
    with pytest.raises(RankError, match="replica 0 failed: its process was stopped by a signal"):
        llm.generate(PROMPTS, LONG)
    assert time.monotonic() - start < 30
    assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.usefixtures("none_left")
@pytest.mark.exhaustive
def test_what_a_replica_raises_while_it_is_built_is_raised_here() -> None:
    with pytest.raises(CapacityError, match="cache"):
        LLM(data=2, memory="1KiB", **SETTINGS)
