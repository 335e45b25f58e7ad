"""Grammars over several ranks: compiled by each of them, and queued in the same step by all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from repository import SUPPORT
from thread_ranks import ThreadRanks

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.registry.errors import RankError

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {
    "dtype": "float32",
    "plugins.inline": (f"{SUPPORT / 'structured_cases.py'}:Wayward",),
    "structured_output.backend": "wayward",
}
PROMPTS = ["def main(", "class A:\n    def", "import "]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(**SETTINGS)
    yield ranks
    ranks.close()


def params(text: str) -> list[SamplingParams]:
    """One request that runs at once, one that waits for its grammar, one without a token of its own choice."""
    chosen = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=[text, "value"]))
    return [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), chosen, chosen]


def texts(text: str) -> Callable[[LLM], list[str]]:
    return lambda llm: [answer.outputs[0].text for answer in llm.generate(PROMPTS, params(text))]


def gate_of(llm: LLM, text: str) -> threading.Event:
    """Hold back what a rank compiles for a text."""
    backend = llm.engine.extension("structured_output").compiler.backend
    gate: threading.Event = backend.gates.setdefault(text, threading.Event())
    return gate


@pytest.mark.spread(2)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_compiles_later_gets_the_same_texts(
    ranks: ThreadRanks, engines: Callable[..., LLM], late: int
) -> None:
    text = f"choice {late}"
    gate = gate_of(ranks.llms[late], text)
    timer = threading.Timer(0.3, gate.set)
    timer.start()
    found = ranks.same(texts(text))
    timer.join()
    assert found == texts(text)(engines(None, **SETTINGS))


def test_a_request_waits_until_rank_0_has_its_grammar(ranks: ThreadRanks) -> None:
    gate = gate_of(ranks.llms[0], "held")
    one, held, _ = params("held")
    ranks.each(lambda llm: llm.engine.add("free", [5, 6, 7], one))
    ranks.each(lambda llm: llm.engine.add("held", [5, 6, 7], held))
    for _ in range(3):
        ranks.each(lambda llm: llm.engine.step())
    assert ranks.same(lambda llm: [one.request_id for one in llm.engine.scheduler.running]) == ["free"]
    gate.set()
    ranks.llms[0].engine.extension("structured_output").compiler._waiting["held"][1].result()
    ranks.each(lambda llm: llm.engine.step())
    assert ranks.same(lambda llm: [one.request_id for one in llm.engine.scheduler.running]) == ["free", "held"]
    ranks.each(lambda llm: [llm.engine.abort(name) for name in ("free", "held")])


def test_a_grammar_that_fails_on_all_ranks_fails_its_request_alone(
    ranks: ThreadRanks, engines: Callable[..., LLM]
) -> None:
    found = ranks.same(texts("uncompilable"))
    assert found == texts("uncompilable")(engines(None, **SETTINGS))
    assert found[1] == ""


def test_a_grammar_that_fails_on_one_rank_ends_the_ranks(ranks: ThreadRanks) -> None:
    backend = ranks.llms[1].engine.extension("structured_output").compiler.backend
    backend.compile = lambda constraint: 1 / 0
    with pytest.raises(RankError, match=r"request 'request-\d+' did not fail on rank 0 but here: ZeroDivisionError"):
        ranks.each(texts("fails here"))
