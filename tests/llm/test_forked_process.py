"""Forks after an engine or a grammar was made: the child gets a typed error or an answer, and never hangs."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from structured_texts import context, tokenizer

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.testing.subject import subject_of

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.usefixtures("one_thread"),
]


def in_child(work: Callable[[], str]) -> str:
    """What a forked child says, or the name and text of its exception; it is killed after half a minute."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child hung or was killed"
    return said


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_an_engine_in_a_forked_child_is_refused_and_the_parent_s_goes_on(attention: str) -> None:
    llm = LLM(max_model_len=64, memory="4MiB", **{"attention.backend": attention})

    def say(*texts: str) -> str:
        wanted = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=texts))
        return llm.generate("x", wanted)[0].outputs[0].text

    def step() -> str:
        llm.engine.step()
        return "stepped"

    assert say("yes") == "yes"
    for work in (lambda: say("no"), lambda: say("yes"), lambda: llm.generate("x")[0].outputs[0].text, step):
        said = in_child(work)
        assert said.startswith("RequestError: ")
        assert f"the engine was made in process {os.getpid()} and is used in its forked child" in said
        assert "spawn" in said
    assert say("no") == "no"


@pytest.mark.parametrize(("plugin", "threads"), [("xgrammar", {"mask_threads": 3}), ("llguidance", {"threads": 3})])
def test_a_plugin_s_grammars_are_compiled_and_filled_in_a_forked_child(plugin: str, threads: dict[str, int]) -> None:
    backend = subject_of(f"structured_output:{plugin}", options=threads).build(context())

    def allowed(expression: str) -> str:
        grammar = backend.compile(StructuredOutputsParams(regex=expression).constraint)
        words = np.full((300, -(-len(tokenizer()) // 32)), -1, np.int32)
        backend.fill([backend.start(grammar) for _ in words], [[]] * len(words), list(range(len(words))), words)
        return str(int(np.unpackbits(words.view(np.uint8)).sum()))

    known = allowed("[a-c]")
    assert int(known) > 0
    assert in_child(lambda: allowed("[a-c]")) == known
    assert in_child(lambda: allowed("[b-d]")) == allowed("[b-d]")
