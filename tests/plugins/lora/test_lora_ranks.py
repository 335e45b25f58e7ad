"""Adapters over several ranks: each rank has its part of every matrix, and every request gets what PEFT gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import random_prompts
from lora_cases import PeftOracle
from repository import SUPPORT
from thread_ranks import ThreadRanks

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import NegotiationError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
ADAPTERS = {
    "plain": {},
    "stabilised": {"r": 8, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}
SETTINGS = {
    "lora.name": "torch",
    "lora.max_adapters": 2,
    "lora.max_rank": 8,
    "lora.target_modules": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("embed_tokens", "lm_head"),
    ),
}
PROMPTS = random_prompts([5, 30, 17, 1, 9, 12])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def oracle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    return PeftOracle(tiny("llama"), tmp_path_factory.mktemp("adapters"), ADAPTERS)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tiny: Tiny) -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(tiny("llama"), tensor=request.param, **SETTINGS)  # four ranks share two KV heads
    yield ranks
    ranks.close()


def answers(oracle: PeftOracle, names: list[str | None]) -> Callable[[LLM], list[list[int]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(names)]]
    adapters = [oracle.request(name) for name in names]
    return lambda llm: [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, lora_request=adapters)]


def test_adapters_of_a_batch_are_those_of_peft(ranks: ThreadRanks, oracle: PeftOracle) -> None:
    names = ["plain", None, "ends", "stabilised", "plain", "ends"]  # three adapters in two slots
    found = ranks.same(answers(oracle, names))
    assert found == [oracle.greedy(name, prompt, 6) for name, prompt in zip(names, PROMPTS, strict=True)]


def test_adapters_are_added_pinned_and_removed_on_all_ranks(ranks: ThreadRanks, oracle: PeftOracle) -> None:
    ranks.each(lambda llm: [llm.remove_lora(number) for number in llm.list_loras()])
    one, other = oracle.request("plain"), oracle.request("ends")
    assert one is not None
    assert other is not None
    assert ranks.same(lambda llm: (llm.add_lora(one), llm.add_lora(one), llm.pin_lora(1), llm.list_loras())) == (
        *(True, False, True),
        {1},
    )
    with pytest.raises(RequestError, match="pinned in the last of 2 slots"):
        ranks.each(lambda llm: (llm.add_lora(other), llm.pin_lora(other.lora_int_id)))
    assert ranks.same(lambda llm: [llm.remove_lora(number) for number in (1, 3, 9)]) == [True, True, False]
    assert ranks.same(lambda llm: llm.list_loras()) == set()


def test_a_merged_adapter_is_part_of_each_ranks_weights(tiny: Tiny, oracle: PeftOracle) -> None:
    ranks = ThreadRanks(tiny("llama"), **{**SETTINGS, "lora.max_adapters": 1, "lora.merge": True})
    for name in ("ends", "plain"):
        expected = [oracle.greedy(name, prompt, 6) for prompt in PROMPTS[:2]]
        assert ranks.same(answers(oracle, [name, name])) == expected
        number = oracle.names.index(name) + 1
        assert ranks.same(lambda llm, number=number: llm.remove_lora(number))
    assert ranks.same(answers(oracle, [None])) == [oracle.greedy(None, PROMPTS[0], 6)]
    ranks.close()


def test_a_plugin_that_reads_whole_adapters_is_refused(tiny: Tiny) -> None:
    inline = (f"{SUPPORT / 'gathered_lora.py'}:descriptor",)
    settings = {**SETTINGS, "lora.name": "gathered_lora", "plugins.inline": inline}
    with pytest.raises(NegotiationError, match=r"each layer is divided among 2 ranks"):
        ThreadRanks(tiny("llama"), **settings)
