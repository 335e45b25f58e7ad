"""A rank that dies, hangs, stops, raises or disagrees ends the engine within seconds, with one error that names it."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faulty_rank import FAULT
from repository import SUPPORT

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import CapacityError, PluginError, RankError, SlotlineError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(9)]

TIMEOUT = 3.0
SECONDS = TIMEOUT + 7.0
"""Within which a fault must end the engine, on a busy machine."""
SETTINGS: dict[str, Any] = {
    "tensor": 2,
    "backend": "faulty",
    "plugins.inline": (f"{SUPPORT / 'faulty_rank.py'}:descriptor", f"{SUPPORT / 'faulty_rank.py'}:Drawing"),
    "parallel.timeout": TIMEOUT,
    "observability.check_integrity": True,
    "observability.progress": False,
}
PROMPTS = ["def main(", "class A:"]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
Fault = Callable[[str], None]


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Makes ranks go wrong in their next forward pass, see `faulty_rank`. An empty text ends that."""
    file = tmp_path / "fault"
    monkeypatch.setenv(FAULT, str(file))

    def set_to(text: str) -> None:
        file.write_text(text)

    return set_to


@pytest.fixture
def llm(fault: Fault) -> Iterator[LLM]:
    made = LLM(**SETTINGS)
    made.generate(PROMPTS, GREEDY)
    yield made
    made.close()
    assert ranks() == []


def ranks() -> list[psutil.Process]:
    """The processes that this one started and that live."""
    return [one for one in psutil.Process().children(recursive=True) if "slotline.ranks" in " ".join(one.cmdline())]


def failure(call: Callable[[], Any]) -> SlotlineError:
    """The error that a call raises within seconds. No other process is left then."""
    start = time.monotonic()
    with pytest.raises(SlotlineError) as caught:
        call()
    assert time.monotonic() - start < SECONDS
    assert ranks() == []
    return caught.value


def generate(llm: LLM, **options: Any) -> Callable[[], Any]:
    """A call that generates."""
    return lambda: llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, **options))


def rank_error(error: SlotlineError, text: str) -> RankError:
    """The error, which names rank 1 in the step after those of the fixture."""
    assert isinstance(error, RankError)
    assert error.rank == 1
    assert error.message.startswith(f"rank 1 failed in step {error.step}: ")
    assert error.step >= 6
    assert text in error.message
    return error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message", "detail"),
    [
        ("1 SIGKILL", "its process has ended: killed by SIGKILL", ""),
        ("1 SIGSTOP", "its process was stopped by a signal", ""),
        ("1 raise", "PluginError: attention:faulty of the inline plugin", 'raise ValueError("wrong on purpose")'),
        ("1 sleep", f"it hangs, and the others have waited for {TIMEOUT:g} s", "time.sleep(3600)"),
    ],
)
def test_a_rank_that_goes_wrong_in_a_step_is_named(
    text: str, message: str, detail: str, llm: LLM, fault: Fault
) -> None:
    fault(text)
    error = rank_error(failure(generate(llm)), message)
    assert detail in error.details
    assert str(error).count("fix: ") >= 1
    assert failure(generate(llm)) is error  # and again, at once


@pytest.mark.exhaustive
def test_a_rank_that_ends_between_steps_is_known_without_a_step(llm: LLM) -> None:
    (process,) = ranks()
    process.kill()
    until = time.monotonic() + SECONDS
    while llm.engine.failure is None and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.01)
    error = failure(generate(llm))
    assert isinstance(error, RankError)
    assert error.message.startswith("rank 1 failed after step ")
    second = LLM(**SETTINGS)  # the first does not stand in its way
    second.generate(PROMPTS, GREEDY)
    second.close()


@pytest.mark.exhaustive
def test_an_error_of_rank_0_alone_ends_the_others(llm: LLM, fault: Fault) -> None:
    fault("0 raise")
    error = failure(generate(llm))
    assert isinstance(error, RankError)
    assert error.rank == 0
    assert "it raised an error that the others did not: PluginError" in error.message


@pytest.mark.exhaustive
def test_ranks_that_draw_differently_are_told_apart(llm: LLM) -> None:
    rank_error(failure(generate(llm, extra_args={"skewed": True})), "it disagrees with rank 0: row 0 has token 7 at")


@pytest.mark.exhaustive
def test_an_error_of_all_ranks_is_raised_as_with_one_and_the_engine_goes_on(llm: LLM, fault: Fault) -> None:
    want = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]
    fault("all raise")
    with pytest.raises(PluginError, match="wrong on purpose"):
        llm.generate(PROMPTS, GREEDY)
    fault("")
    assert [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)] == want
    del llm
    gc.collect()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 SIGKILL", "its process has ended: killed by SIGKILL"),
        ("1 memory", "it raised CapacityError: a step of 256 tokens of 256 requests does not fit into memory"),
        ("1 sleep", "it is not ready after 30 s"),
        ("all memory", ""),
    ],
)
def test_a_rank_that_goes_wrong_while_the_engine_is_built(text: str, message: str, fault: Fault) -> None:
    fault(text)
    with pytest.raises(SlotlineError) as caught:
        LLM(**SETTINGS, **{"parallel.start_timeout": 30.0 if text == "1 sleep" else 300.0})
    assert ranks() == []
    if message:
        assert caught.value.message.startswith(f"rank 1 failed while the engine was built: {message}")
        assert isinstance(caught.value, RankError)
    else:
        assert type(caught.value) is CapacityError


SCRIPT = """
import os, signal, sys, threading
from slotline.core import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(tensor=2, **{"observability.progress": False})
    llm.generate("a", SamplingParams(max_tokens=2))
    print("ready", flush=True)
    if sys.argv[1] == "in a step":
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        llm.generate(["a"] * 32, SamplingParams(max_tokens=4000, ignore_eos=True))
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["ended", "killed", "in a step"])
def test_the_others_end_with_rank_0(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    others = [one for one in psutil.Process(process.pid).children() if one.is_running()]
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (0 if how == "ended" else -signal.SIGKILL)
    assert said == ""  # no noise of the launcher's or of the other rank's
    _, left = psutil.wait_procs(others, timeout=SECONDS)
    assert left == []
    assert how == "in a step" or len(others) == 1
