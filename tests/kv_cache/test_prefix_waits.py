"""Requests that share a prefix and arrive together: the first computes it, and the others wait and share its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from attrs import evolve
from engine_driver import GREEDY, random_prompts

from slotline.core import LLM
from slotline.core.batch.request import Request
from slotline.core.kv_cache.block_hashes import extend_hashes
from slotline.registry.errors import ConfigError

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
SHARED = random_prompts([32], seed=5)[0]
PROMPTS = [SHARED + own for own in random_prompts([3, 5, 6, 9], seed=6)]


@pytest.fixture(params=[False, True], ids=["in_turn", "async"])
def waiting(request: pytest.FixtureRequest, tiny: Tiny, engines: Engines) -> LLM:
    """An engine whose requests wait for a single block."""
    settings = {"scheduler.async": request.param, "cache.prefix_wait": BLOCK}
    return engines(tiny("llama"), block_size=BLOCK, max_num_seqs=8, **settings)


def add(llm: LLM, prompts: Sequence[list[int]]) -> list[Request]:
    return [llm.engine.add(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]


def run(llm: LLM, each_step: Callable[[], None] = lambda: None) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        each_step()


def blocks_held(llm: LLM, requests: Sequence[Request]) -> list[list[int]]:
    """The blocks of prompt tokens that each running request may share."""
    (group,) = llm.engine.scheduler.cache.groups
    own = [(request.row, (len(request.prompt_token_ids) - 1) // BLOCK) for request in requests]
    return [group.blocks[row][:count] for row, count in own if row >= 0]


def hashes_alone(request: Request) -> list[bytes]:
    """The hashes of a request's pieces, made from all of its tokens."""
    alone = evolve(request, block_hashes=[])
    return extend_hashes(alone, np.array(request.token_array, np.int32), len(request.prompt_token_ids) // BLOCK, BLOCK)


def test_a_prefix_is_computed_once_and_kept_once(waiting: LLM, greedy: Greedy, tiny: Tiny) -> None:
    requests, most = add(waiting, PROMPTS), 0

    def look() -> None:
        nonlocal most
        most = max(most, len({held[0] for held in blocks_held(waiting, requests) if held}))

    run(waiting, look)
    assert most == 1
    assert [request.metrics.num_cached_tokens for request in requests] == [0, 32, 32, 32]
    first, *others = (request.block_hashes for request in requests)
    assert all(one[i] is first[i] for one in others for i in range(32 // BLOCK)), "hashed once too"
    assert [list(r.output_token_ids) for r in requests] == [greedy(tiny("llama"), prompt, 20) for prompt in PROMPTS]


def test_the_next_step_already_shares_what_is_being_computed(waiting: LLM) -> None:
    requests = add(waiting, PROMPTS)
    waiting.engine.step()
    assert [request.row >= 0 for request in requests] == [True, False, False, False]
    waiting.engine.step()
    assert all(request.row >= 0 for request in requests)
    assert len({held[0] for held in blocks_held(waiting, requests)}) == 1
    run(waiting)


@pytest.mark.parametrize("wait", [0, 36])
def test_fewer_tokens_than_the_configured_are_not_waited_for(wait: int, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), block_size=BLOCK, **{"cache.prefix_wait": wait})
    first, second, *_ = add(llm, PROMPTS)
    llm.engine.step()
    assert first.row >= 0 <= second.row
    run(llm)
    assert second.metrics.num_cached_tokens == 0


def test_random_trees_of_prefixes_are_kept_in_the_fewest_blocks(waiting: LLM, greedy: Greedy, tiny: Tiny) -> None:
    random = Random(7)
    for _ in range(4):
        waiting.engine.scheduler.cache.reset()
        prompts: list[list[int]] = []
        for own in random_prompts([random.randrange(1, 14) for _ in range(8)], seed=random.randrange(1000)):
            before = random.choice([[], *prompts])
            prompts.append(before[: random.randrange(len(before) + 1)] + own)
        random.shuffle(prompts)
        requests = add(waiting, prompts)
        while any(request.row < 0 for request in requests):
            waiting.engine.step()
        assert all(one.block_hashes[: len(known)] == known for one in requests if (known := hashes_alone(one)[:-1]))
        held = [block for blocks in blocks_held(waiting, requests) for block in blocks]
        prefixes = {tuple(p[:end]) for p in prompts for end in range(BLOCK, len(p), BLOCK)}
        assert len(set(held)) == len(prefixes)
        run(waiting)
        assert [list(r.output_token_ids) for r in requests] == [greedy(tiny("llama"), p, 20) for p in prompts]


def test_a_request_goes_on_if_the_one_that_it_waits_for_is_aborted(waiting: LLM, greedy: Greedy, tiny: Tiny) -> None:
    first, *others = add(waiting, PROMPTS)
    waiting.engine.step()
    assert [request.row >= 0 for request in (first, *others)] == [True, False, False, False]
    waiting.engine.abort(first.request_id)
    run(waiting)
    assert [list(r.output_token_ids) for r in others] == [greedy(tiny("llama"), p, 20) for p in PROMPTS[1:]]


def test_requests_that_are_preempted_wait_for_each_other_and_end(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    settings = {"scheduler.max_batched_tokens": 16, "cache.prefix_wait": BLOCK}
    llm = engines(tiny("llama"), block_size=BLOCK, memory="80KiB", **settings)
    prompts = [SHARED[:16] + own for own in random_prompts([9, 14, 5, 11, 8, 3], seed=8)]
    requests = add(llm, prompts)
    run(llm)
    assert [list(r.output_token_ids) for r in requests] == [greedy(tiny("llama"), p, 20) for p in prompts]
    assert sum(request.metrics.num_preemptions for request in requests) > 0


def test_other_salts_share_nothing_and_do_not_wait(waiting: LLM) -> None:
    salted = [waiting.engine.add(f"salt {salt}", SHARED, GREEDY, cache_salt=salt) for salt in "ab"]
    waiting.engine.step()
    assert all(request.row >= 0 for request in salted)
    run(waiting)
    a, b = (request.block_hashes for request in salted)
    assert set(a).isdisjoint(b)


def test_hybrids_wait_for_a_checkpoint_and_never_for_ever(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("qwen3_next")
    llm = engines(path, **{"cache.prefix_wait": 1})
    requests = add(llm, PROMPTS)
    run(llm)
    assert [list(r.output_token_ids) for r in requests] == [greedy(path, prompt, 20) for prompt in PROMPTS]


def test_a_negative_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.prefix_wait"):
        LLM(**{"cache.prefix_wait": -1})
