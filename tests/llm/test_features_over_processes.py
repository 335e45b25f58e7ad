"""Two processes as one engine: what rank 0 is asked to do with adapters, grammars and caches is done by both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slotline.core import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.errors import RequestError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SETTINGS = {
    "dtype": "float32",
    "lora.name": "torch",
    "lora.max_adapters": 2,
    "drafter.name": "eagle3",
    "drafter.tokens": 3,
    "scheduler.async": True,
    "observability.check_integrity": True,
}
TYPED, DOCS = (
    LoRARequest(name, i, SMALL_MODEL / "adapters" / name) for i, name in enumerate(("typed", "docstrings"), 1)
)
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range("]


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    llm = LLM(tensor=2, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM(**SETTINGS)


def texts(llm: LLM, params: list[SamplingParams], adapters: list[LoRARequest | None]) -> list[str]:
    return [one.outputs[0].text for one in llm.generate(PROMPTS, params, lora_request=adapters)]


def regex(pattern: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex=pattern))


def test_adapters_are_changed_and_used_by_both(pair: LLM, alone: LLM) -> None:
    greedy = [SamplingParams(temperature=0, max_tokens=16)] * 4
    for llm in (pair, alone):
        assert (llm.add_lora(TYPED), llm.add_lora(TYPED), llm.pin_lora(1), llm.list_loras()) == (True, False, True, {1})
    assert texts(pair, greedy, [TYPED, None, DOCS, DOCS]) == texts(alone, greedy, [TYPED, None, DOCS, DOCS])
    with pytest.raises(RequestError, match="cannot read"):
        pair.add_lora(LoRARequest("missing", 9, "/nowhere"))
    for llm in (pair, alone):
        assert (llm.remove_lora(1), llm.remove_lora(1), llm.list_loras()) == (True, False, {2})
    again = LoRARequest("typed", 3, TYPED.lora_path)
    assert texts(pair, greedy, [DOCS, again, None, again]) == texts(alone, greedy, [DOCS, again, None, again])


def test_grammars_are_compiled_by_both(pair: LLM, alone: LLM) -> None:
    params = [
        regex(r"[a-z]{3} = \d{2,5}"),
        SamplingParams(temperature=0, max_tokens=20),
        regex(r"(yes|no)!"),
        regex(r"\(\w+\)"),
    ]
    adapters = [None, DOCS, None, None]
    assert texts(pair, params, adapters) == texts(alone, params, adapters)
    with pytest.raises(RequestError):
        pair.generate(PROMPTS[0], regex("(unclosed"))
    assert texts(pair, params[::-1], adapters) == texts(alone, params[::-1], adapters)


def test_beams_under_a_grammar_are_the_same(pair: LLM, alone: LLM) -> None:
    wanted = StructuredOutputsParams(regex=r"[a-z]{1,6}\(\)")
    params = BeamSearchParams(beam_width=2, max_tokens=4, structured_outputs=wanted)
    found, expected = (
        [[one.text for one in answer.sequences] for answer in llm.beam_search(PROMPTS[:2], params)]
        for llm in (pair, alone)
    )
    assert found == expected
