"""Replicas that share experts, as processes: the text of one engine, and the end of all with that of one."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import tiny_models
from tiny_engines import DEFAULTS

from slotline.core import LLM, RequestOutput, SamplingParams
from slotline.core.engine.engine import Engine
from slotline.registry.errors import RankError, RequestError

PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range("]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SCORED = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.mark.exhaustive
def test_processes_have_the_text_of_one_and_a_killed_one_without_requests_ends_all(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model")
    llm = LLM(path, data=2, expert=2, **DEFAULTS)
    one = LLM(path, **DEFAULTS)
    assert [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY)] == [
        each.outputs[0].text for each in one.generate(PROMPTS, GREEDY)
    ]
    llm.reload_weights()
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text == one.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    for data in (3, 2):  # the third takes its experts, and gives them back
        llm.scale(data)
        assert [each.outputs[0].text for each in llm.generate(PROMPTS, GREEDY)] == [
            each.outputs[0].text for each in one.generate(PROMPTS, GREEDY)
        ]
    processes = [psutil.Process(llm.front.links.pid_of(number)) for number in (0, 1)]
    killed = threading.Timer(0.3, os.kill, (processes[1].pid, signal.SIGKILL))
    killed.start()
    with pytest.raises(RankError, match="replica 1 failed: its process has ended: killed by SIGKILL"):
        generate_on(llm)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.slow
def test_replicas_of_two_ranks_have_the_text_of_one_and_a_killed_rank_ends_all(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model")
    settings = DEFAULTS | {"max_num_batched_tokens": 12, "parallel.redundant_experts": 4}
    before = set(psutil.Process().children(recursive=True))
    llm, one = LLM(path, data=2, tensor=2, expert=4, **settings), LLM(path, **DEFAULTS)
    wanted = one.generate(PROMPTS, SCORED)
    same(llm.generate(PROMPTS, SCORED), wanted)
    same(llm.generate(PROMPTS[0], SCORED), wanted[:1])  # the other replica is idle, and so are both of its ranks
    llm.reload_weights()
    same(llm.generate(PROMPTS, SCORED), wanted)
    with pytest.raises(RequestError, match="replicas of 2 ranks"):
        llm.scale(3)
    processes = [one for one in psutil.Process().children(recursive=True) if one not in before]
    ranks = [one for one in processes if "slotline.ranks.replicas.sharing_follower" in one.cmdline()]
    assert len(ranks) == 2
    killed = threading.Timer(0.3, os.kill, (ranks[1].pid, signal.SIGKILL))
    killed.start()
    with pytest.raises(RankError, match=r"replica \d failed"):
        generate_on(llm)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Compare texts and the log-probabilities of their tokens."""
    for each, other in zip(found, wanted, strict=True):
        assert each.outputs[0].text == other.outputs[0].text
        pairs = zip(each.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            token = other.outputs[0].token_ids[at]
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def generate_on(llm: LLM) -> None:
    """Give a request after another, of which replica 1 has none."""
    while True:
        llm.generate(PROMPTS[0], LONG)


@pytest.mark.exhaustive
def test_a_stopped_replica_without_requests_ends_all(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model")
    llm = LLM(path, data=2, expert=2, **DEFAULTS)
    os.kill(llm.front.links.pid_of(1), signal.SIGSTOP)
    with pytest.raises(RankError, match="replica 1 failed: its process was stopped by a signal"):
        llm.generate(PROMPTS[0], LONG)


def fail_in_forward(engine: Engine) -> None:
    """Have the model of an engine fail in its next forward pass."""

    def forward(*_given: object, **_options: object) -> None:
        raise ValueError("on purpose")

    engine.runner.model.forward = forward  # type: ignore[assignment, method-assign]


@pytest.mark.exhaustive
def test_an_error_in_a_forward_pass_ends_all_with_its_name(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model")
    llm = LLM(path, data=2, expert=2, **DEFAULTS)
    llm.front.ask_first(fail_in_forward)
    with pytest.raises(RankError, match="replica 0 failed: it raised ValueError") as caught:
        llm.generate(PROMPTS, GREEDY)
    assert "on purpose" in str(caught.value.__cause__)
    with pytest.raises(RankError, match="replica 0 failed"):
        llm.generate(PROMPTS, GREEDY)
