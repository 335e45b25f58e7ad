"""Two and four processes give the texts and log-probabilities of one, whatever happens to the requests."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.api.outputs import RequestOutput
from slotline.registry.contracts.sampling_params import StructuredOutputsParams
from slotline.registry.errors import ConfigError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(9, 43)]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,  # prompts are computed in chunks
    "plugins.inline": (f"{SUPPORT / 'failing_processor.py'}:Failing",),
    "observability.check_integrity": True,  # compares the rows of the ranks in every step
    "observability.progress": False,
}
TIGHT = {"cache.memory": "1280KiB"}
"""Memory for 160 tokens of one process: running requests are preempted."""
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {"scheduler.async": True},
    "synchronous": {"scheduler.async": False},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 4},
    "tight": TIGHT,
}
HEAD = "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n"
PROMPTS = [
    HEAD + "        print(",
    HEAD + "        os.",
    "class A:\n    def __init__(self",
    "x = [1, 2, 3, 4, 1, 2, 3,",
]
WORD = StructuredOutputsParams(regex="[a-c]{3,9}")
CHOICE = StructuredOutputsParams(choice=["import", "return"])


def params(**given: Any) -> SamplingParams:
    """Parameters with log-probabilities."""
    return SamplingParams(**{"max_tokens": 24, "logprobs": 2, "ignore_eos": True, **given})


WORKLOAD = [
    (PROMPTS, [params(temperature=0)] * 4),
    (PROMPTS, [params(temperature=0.9, top_p=0.9, n=2)] * 4),  # seeds by arrival; prefixes are found in the cache
    (
        PROMPTS,
        [params(temperature=0.8, seed=one, repetition_penalty=1.2, presence_penalty=0.4) for one in range(4)],
    ),
    (
        PROMPTS,
        [
            params(temperature=0, ignore_eos=False, structured_outputs=WORD),
            params(temperature=0, min_p=0.1, logit_bias={10: 3.0}),
            params(temperature=0.7, seed=3, ignore_eos=False, structured_outputs=CHOICE),
            params(temperature=0, extra_args={"fail": "raise", "fail_at": 3}),  # ends with an error, alone
        ],
    ),
]


def run(llm: LLM) -> list[RequestOutput]:
    """Generate for the whole workload, with requests that are aborted in between."""
    found = []
    for prompts, given in WORKLOAD:
        for index, prompt in enumerate(PROMPTS):
            llm.engine.add(f"aborted-{index}", llm.tokenizer.encode(prompt), params(temperature=0.5))
        llm.engine.step()
        llm.engine.abort("aborted-0")
        llm.engine.step()
        for index in range(1, len(PROMPTS)):
            llm.engine.abort(f"aborted-{index}")
        found += llm.generate(prompts, given)
    everything_returned(llm)
    return found


def assert_equal(found: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    """The same tokens, ends and log-probabilities."""
    for ours, theirs in zip(found, want, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            for scores, others in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert scores.keys() == others.keys()
                for token, score in scores.items():
                    assert score.logprob == pytest.approx(others[token].logprob, abs=2e-4)


@cache
def want(mode: str) -> list[RequestOutput]:
    """What one process generates in a mode."""
    found = run(LLM(**{**SETTINGS, **MODES[mode]}))
    assert mode != "tight" or sum(output.metrics.num_preemptions for output in found) > 0
    return found


def equal_in(mode: str, size: int) -> LLM:
    """Compare a mode of several ranks with one process. Return the engine."""
    settings = {**SETTINGS, **MODES[mode]}
    if mode == "tight":
        settings["cache.memory"] = f"{1280 // size}KiB"  # of each rank
    llm = LLM(**settings, tensor=size)
    assert_equal(run(llm), want(mode))
    return llm


@pytest.mark.slow
def test_two_ranks_are_equal_to_one_and_survive_interrupts_and_errors_of_requests() -> None:
    llm = equal_in("asynchronous", 2)
    with pytest.raises(ConfigError, match="runs in this process already"):
        LLM(tensor=2)
    with pytest.raises(RequestError, match="cannot be sent to the other ranks"):
        llm.generate("a", SamplingParams(logits_processors=[lambda _tokens, logits: logits]))
    for seconds in (0.2, 0.31):
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 4, params(temperature=0, max_tokens=400))
        everything_returned(llm)
    assert_equal(llm.generate(*WORKLOAD[0]), want("asynchronous")[:4])
    llm.close()
    with pytest.raises(RequestError, match="was closed"):
        llm.generate("a")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "asynchronous"])
def test_two_ranks_in_other_modes(mode: str) -> None:
    llm = equal_in(mode, 2)
    del llm
    gc.collect()  # which ends the other rank


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["asynchronous", "drafted"])
def test_four_ranks(mode: str) -> None:
    equal_in(mode, 4).close()
