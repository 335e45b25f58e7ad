"""Blocks that turn out equal are merged: trees of prefixes are kept in the fewest blocks, and texts stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from engine_driver import random_prompts, tokens_of
from tiny_engines import everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Request
from slotline.core.kv_cache.block_pool import NULL_BLOCK

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
LONG = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


def tree(random: Random, count: int) -> list[list[int]]:
    """Prompts of which many begin as another one does, or are equal to one."""
    prompts: list[list[int]] = []
    for own in random_prompts([random.randrange(14) for _ in range(count)], seed=random.randrange(1000)):
        before = random.choice([[], *prompts, *prompts])
        kept = random.choice([len(before), random.randrange(len(before) + 1)])
        prompts.append((before[:kept] + own)[:34] or [7])
    random.shuffle(prompts)
    return prompts


def kept_and_fewest(llm: LLM, requests: list[Request]) -> list[tuple[int, int]]:
    """By cache group: the blocks that hold whole blocks of prompts, and how many there are at the optimum."""
    found = []
    for group in llm.engine.scheduler.cache.groups:
        kept, prefixes = set[int](), set[tuple[int, ...]]()
        for request in requests:
            prompt = request.prompt_token_ids
            for place, block in enumerate(group.blocks[request.row][: len(prompt) // group.block_size]):
                if block != NULL_BLOCK:
                    kept.add(block)
                    prefixes.add(tuple(prompt[: (place + 1) * group.block_size]))
        found.append((len(kept), len(prefixes)))
    return found


def arrive(llm: LLM, prompts: list[list[int]], random: Random, params: SamplingParams) -> list[Request]:
    """Add requests, some at a time, and step until each has computed its prompt. None ends before."""
    requests: list[Request] = []
    while len(requests) < len(prompts) or not all(prompt_done(llm, request) for request in requests):
        for _ in range(random.randrange(4)):
            if len(requests) < len(prompts):
                requests.append(llm.engine.add(str(len(requests)), prompts[len(requests)], params))
        llm.engine.step()
    return requests


def prompt_done(llm: LLM, request: Request) -> bool:
    rows = llm.engine.rows
    return request.row >= 0 and bool(
        rows.num_tokens[request.row] - rows.num_pending[request.row] > len(request.prompt_token_ids)
    )


CASES = [(family, turn) for family in ("llama", "gemma2", "mistral", "qwen3_next") for turn in (True, False)]


@pytest.mark.parametrize(
    ("family", "asynchronous"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_random_trees_are_kept_in_the_fewest_blocks_once_their_prompts_are_computed(
    family: str, asynchronous: bool, tiny: Tiny, engines: Engines
) -> None:
    path, random = tiny(family), Random(11)
    settings = {"scheduler.async": asynchronous, "scheduler.max_batched_tokens": 24, "cache.prefix_wait": 12}
    llm = engines(path, block_size=BLOCK, max_num_seqs=12, memory="2MiB", **settings)
    alone = engines(path, block_size=BLOCK, enable_prefix_caching=False)
    groups = llm.engine.scheduler.cache.groups
    merged = 0
    for _ in range(2):
        before = sum(group.num_replaced for group in groups)
        llm.engine.scheduler.cache.reset()
        prompts = tree(random, 10)
        requests = arrive(llm, prompts, random, LONG)
        for kept, fewest in kept_and_fewest(llm, requests):
            assert kept == fewest
        while llm.engine.has_work:
            llm.engine.step()
        everything_returned(llm)
        merged += sum(group.num_replaced for group in groups) - before
        assert [list(r.output_token_ids) for r in requests] == tokens_of(alone, prompts, LONG)
    assert merged > 0


def test_equal_prompts_share_their_last_block_and_the_copies_are_free_again(tiny: Tiny, engines: Engines) -> None:
    """Steps in turn, and whole blocks: nothing is waited for, so that each computes all of it once."""
    llm = engines(tiny("llama"), block_size=BLOCK, max_num_seqs=8, **{"scheduler.async": False, "cache.prefix_wait": 0})
    cache = llm.engine.scheduler.cache
    (group,), prompt = cache.groups, random_prompts([3 * BLOCK], seed=3)[0]
    requests = [llm.engine.add(str(index), prompt, LONG) for index in range(3)]
    versions = group.versions.copy()
    llm.engine.step()
    held = [group.blocks[request.row][:3] for request in requests]
    assert held[0] == held[1] == held[2]
    assert cache.pool.ref_count[held[0]].tolist() == [3, 3, 3]
    size = llm.plan.cache_groups[0].kernel_block_size
    for request in requests:  # tables on a device are sent again where they have changed
        assert group.table[request.row, : 3 * BLOCK // size].tolist() == group.kernel_blocks(held[0]).tolist()
    changes = (group.versions - versions)[[request.row for request in requests]]
    assert (changes - changes[0]).tolist() == [0, 3, 3]
    others = [len(group.blocks[request.row]) - 3 for request in requests]
    assert cache.pool.num_blocks - 1 - cache.pool.num_free == 3 + sum(others)
    cache.check(llm.engine.rows)
    llm.engine.abort("0")
    while llm.engine.has_work:
        llm.engine.step()
    assert len({tuple(request.output_token_ids) for request in requests[1:]}) == 1
    everything_returned(llm)


def test_equal_texts_that_are_generated_share_their_blocks_too(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), block_size=BLOCK, max_num_seqs=8, **{"scheduler.async": True, "cache.prefix_wait": 0})
    (group,) = llm.engine.scheduler.cache.groups
    prompt, longest = random_prompts([9], seed=4)[0], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    requests = [llm.engine.add(str(index), prompt, longest) for index in range(3)]
    most = 0
    while llm.engine.has_work:
        llm.engine.step()
        held = [group.blocks[request.row] for request in requests if request.row >= 0]
        most = max(most, sum(len(set(blocks)) == 1 for blocks in zip(*held, strict=False)) if len(held) == 3 else 0)
    assert most >= 8  # hashed eight at a time once the prompt is computed
    assert len({tuple(request.output_token_ids) for request in requests}) == 1
