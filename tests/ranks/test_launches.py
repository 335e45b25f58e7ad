"""Commands and programs over several ranks: by torchrun, on a thread of `AsyncLLM`, and as a server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from slotline.core import AsyncLLM, SamplingParams
from slotline.registry.errors import RankError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(9), pytest.mark.exhaustive]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SLOTLINE = [sys.executable, "-m", "slotline"]
GENERATE = ["generate", "def main(", "--max-tokens", "8", "--set", "parallel.tensor=2"]
SCRIPT = """
import os, signal, sys, time
from slotline.core import LLM, SamplingParams
from slotline.registry.contracts.sampling_params import StructuredOutputsParams
from slotline.registry.errors import RankError

if __name__ == "__main__":
    rank, end = os.environ["RANK"], sys.argv[1]
    llm = LLM(tensor=2, **{"parallel.timeout": 3.0, "observability.check_integrity": True})
    word = StructuredOutputsParams(regex="[a-c]{3,9}")
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=8, n=2), SamplingParams(structured_outputs=word)])
    print(f"<{rank}> {[one.text for output in outputs for one in output.outputs]} <end>", flush=True)
    if end == "late" and rank == "1":
        time.sleep(2)  # rank 0 has ended by then, which is no failure
    elif end == "hang" and rank == "1":
        time.sleep(3600)
    elif end not in ("late", "hang") and rank == "1":
        os.kill(os.getpid(), getattr(signal, end))
    if end != "late":
        try:
            llm.generate("a", SamplingParams(max_tokens=50))
        except RankError as error:
            print(f"<{rank}> {error.message}", flush=True)
            time.sleep(1)
            raise
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command. No process of it is left."""
    mark = {"TEST_LAUNCH": uuid4().hex}
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **mark})
    assert [one for one in psutil.process_iter() if mark.items() <= environment(one).items()] == []
    return found


def environment(process: psutil.Process) -> dict[str, str]:
    """The environment of a process that may have ended."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def said(text: str) -> dict[str, list[str]]:
    """What the ranks of `SCRIPT` printed, by rank."""
    found: dict[str, list[str]] = {"0": [], "1": []}
    for rank, line in re.findall(r"<(\d)> (.*?) <end>", text):  # lines of two processes may run into each other
        found[rank].append(line)
    return found


def script(folder: Path) -> str:
    """A file with `SCRIPT`."""
    file = folder / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_program_of_torchruns_gets_the_same_outputs_on_all_ranks(tmp_path: Path) -> None:
    ended = run(*TORCHRUN, script(tmp_path), "late")
    assert ended.returncode == 0, ended.stderr
    found = said(ended.stdout)
    assert len(found["0"]) == 1
    assert found["0"] == found["1"]


@pytest.mark.parametrize(
    ("end", "message"), [("SIGSTOP", "was stopped by a signal"), ("hang", "it hangs, and the others have waited for")]
)
def test_a_rank_of_torchruns_that_fails_ends_all(end: str, message: str, tmp_path: Path) -> None:
    start = time.monotonic()
    ended = run(*TORCHRUN, script(tmp_path), end)
    assert ended.returncode == 1
    assert time.monotonic() - start < 120
    assert "rank 1 failed" in ended.stdout + ended.stderr
    assert message in ended.stdout + ended.stderr


def test_a_command_of_torchruns_is_run_by_rank_0_alone() -> None:
    alone, launched = run(*SLOTLINE, *GENERATE), run(*TORCHRUN, "-m", "slotline", *GENERATE)
    assert (alone.returncode, launched.returncode) == (0, 0), alone.stderr + launched.stderr
    assert launched.stdout == alone.stdout
    assert len(launched.stdout) > 8
    for ended in (alone, launched):
        assert ended.stderr.count("[plan ") == 1
        assert "Sending process" not in ended.stderr
    refused = run(*TORCHRUN, "-m", "slotline", *GENERATE[:-1], "parallel.tensor=3")
    assert refused.returncode == 1
    assert "error: 2 processes were started for 3 ranks (tensor 3)" in refused.stderr


def test_an_async_llm_starts_and_ends_its_ranks() -> None:
    async def answers() -> None:
        async with AsyncLLM(tensor=2, **{"parallel.timeout": 3.0}) as llm:
            asked = SamplingParams(max_tokens=4, ignore_eos=True)
            outputs = [one async for one in llm.generate("def main(", asked, output_kind="final_only")]
            assert len(outputs[0].outputs[0].token_ids) == 4
            (rank,) = psutil.Process().children()
            rank.kill()
            until = time.monotonic() + 10
            while llm.error is None and time.monotonic() < until:
                await asyncio.sleep(0.02)
            assert isinstance(llm.error, RankError)
            with pytest.raises(RankError, match="rank 1 failed after step"):
                await anext(llm.generate("a"))
        assert psutil.Process().children() == []

    asyncio.run(answers())


@contextmanager
def serving(*command: str) -> Iterator[tuple[subprocess.Popen[str], str, list[psutil.Process]]]:
    """A server's process, its URL and all processes."""
    process = subprocess.Popen([*command, "serve", "--port", "0", "--set", "parallel.tensor=2"], stderr=-1, text=True)
    processes: list[psutil.Process] = []
    try:
        assert process.stderr is not None
        place, lines = None, list[str]()
        while place is None:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
            place = re.search(r"serving .* on (\S+) ", lines[-1])
        top = psutil.Process(process.pid)
        processes = [top, *top.children(recursive=True)]
        yield process, place[1], processes
    finally:
        process.terminate()
        _, left = psutil.wait_procs(processes, timeout=20)
        for one in left:
            one.kill()
        process.communicate()
        assert left == []


BODY = {"prompt": "def main(", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("command", [SLOTLINE, [*TORCHRUN, "-m", "slotline"]], ids=["alone", "torchrun"])
def test_a_server_drains_and_leaves_no_process(command: list[str]) -> None:
    with serving(*command) as (process, url, processes), httpx.Client(timeout=60) as client:
        assert len(processes) == (2 if command is SLOTLINE else 3)
        assert client.get(f"{url}/health").status_code == 200
        with client.stream("POST", f"{url}/v1/completions", json=BODY) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert "vllm:num_requests_running" in client.get(f"{url}/metrics").text
            if command is SLOTLINE:
                process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        if command is SLOTLINE:
            assert process.wait(30) == 0


def test_a_servers_health_names_the_rank_that_failed() -> None:
    with serving(*SLOTLINE) as (process, url, processes), httpx.Client(timeout=60) as client:
        processes[1].kill()
        until = time.monotonic() + 10
        while (answer := client.get(f"{url}/health")).status_code == 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert answer.status_code == 503
        assert "rank 1 failed after step 0: its process has ended: killed by SIGKILL" in answer.text
        assert client.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 2
