"""The attention backend `quest`: which blocks it reads, that it reads all when told to, and how it is negotiated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of

from slotline.backends.quest.backend import bounds_of, choose_blocks, upper_bounds
from slotline.core import LLM
from slotline.registry.errors import ConfigError, NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([33, 17, 60, 1, 25])
FEW = {"backend.quest.top_blocks": 3}


def engine(path: Path, **settings: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "memory": "2MiB", "block_size": 4}
    return LLM(model=str(path), **{**options, "attention.backend": "quest", **settings})


# --- the choice


def keys_and_queries() -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [3 rows, 9 blocks, 4, 2 KV heads, 8] and queries [3, 2, 3, 8]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, 9, 4, 2, 8, generator=generator), torch.randn(3, 2, 3, 8, generator=generator)


def test_bounds_hold_for_every_key_and_ignore_slots_behind_the_last() -> None:
    keys, query = keys_and_queries()
    last = torch.tensor([3, 0, 2, 3, 1, 3, 3, 2, 3])
    bounds = torch.stack([bounds_of(row, last) for row in keys])
    for block, end in enumerate(last.tolist()):
        own = keys[:, block, : end + 1]
        assert torch.equal(bounds[:, block], torch.stack([own.amin(1), own.amax(1)], 1))
    limit = upper_bounds(query, bounds)  # [R, Hkv, G, n]
    products = torch.einsum("rhgd,rnshd->rhgns", query, keys)
    counted = torch.arange(4) <= last[:, None]
    assert bool((products.where(counted, -torch.inf).amax(4) <= limit + 1e-5).all())
    one_key = products[:, :, :, 1, 0]
    assert torch.allclose(limit[:, :, :, 1], one_key, atol=1e-5)


def test_the_blocks_with_the_largest_bounds_are_chosen_by_each_kv_head_with_the_first_and_the_newest() -> None:
    keys, query = keys_and_queries()
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2)
    newest = [8, 6, 3]
    bounds[1, 7:] = torch.nan  # past the newest block
    bounds[2, 4:] = 1e9
    chosen = choose_blocks(query, bounds, torch.tensor(newest), 4)
    for row in range(3):
        for head in range(2):
            best = {
                block: max(
                    sum(
                        max(float(q * low), float(q * high))
                        for q, low, high in zip(each, *bounds[row, block, :, head], strict=True)
                    )
                    for each in query[row, head]
                )
                for block in range(1, newest[row])
            }
            wanted = {0, newest[row], *sorted(best, key=best.__getitem__, reverse=True)[:2]}
            assert set(chosen[row, head].tolist()) == wanted
    assert not torch.equal(chosen[0, 0], chosen[0, 1])


# --- texts


def test_with_as_many_blocks_as_there_are_it_is_full_attention(tiny: Tiny) -> None:
    path = tiny("llama_deep")
    want = tokens_of(engine(path, **{"attention.backend": "torch"}), PROMPTS)
    assert tokens_of(engine(path, **{"backend.quest.top_blocks": 24}), PROMPTS) == want
    assert tokens_of(engine(path), PROMPTS) == want


def test_few_blocks_give_one_text_whole_in_chunks_with_drafts_and_from_shared_prefixes(tiny: Tiny) -> None:
    path, prompts = tiny("llama_deep"), [PROMPTS[2], PROMPTS[2][:28] + PROMPTS[0][:27]]
    want = tokens_of(engine(path, **FEW), prompts)
    assert want != tokens_of(engine(path), prompts)  # blocks are left out
    pieces = engine(path, **FEW, **{"scheduler.max_batched_tokens": 30}, max_num_seqs=1)
    assert tokens_of(pieces, prompts) == want  # the second finds 28 tokens in the cache and reads 27
    drafts = {"drafter.name": "ngram", "drafter.tokens": 3}
    assert tokens_of(engine(path, **FEW, **drafts), prompts) == want


@pytest.mark.slow
def test_bounds_come_back_with_blocks_from_host_memory(tiny: Tiny) -> None:
    path = tiny("llama_deep")
    shared, first, other, second = random_prompts([36, 22, 60, 21])
    prompts = [shared + first, other, shared + second]
    want = [tokens_of(engine(path, **FEW), [prompt])[0] for prompt in prompts]
    pool = engine(path).plan.pool
    assert pool is not None
    host = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "4MiB"}
    llm = engine(path, **FEW, **host, memory=f"{-(-26 * pool.block_bytes // 1024)}KiB", max_num_seqs=1)
    assert [tokens_of(llm, [prompt])[0] for prompt in prompts[:2]] == want[:2]
    (output,) = llm.generate(prompts[2:], GREEDY)
    assert output.outputs[0].token_ids == want[2]
    assert output.metrics.num_loaded_tokens > 0


# --- negotiation


def test_nobody_gets_it_who_does_not_ask(tiny: Tiny) -> None:
    path, held = tiny("llama"), {"cache.kv_spec.full": "full_bounds"}
    assert engine(path, **{"attention.backend": "auto"}).plan.groups[0].backend != "quest"
    with pytest.raises(NegotiationError, match="N184 exact attention") as refused:
        engine(path, **{"attention.backend": "auto", **held})
    assert "attention.approximate = true" in str(refused.value)
    plan = engine(path, **{"attention.backend": "auto", "attention.approximate": True, **held}).plan
    assert plan.groups[0].backend == "quest"


def test_a_plan_says_that_it_approximates(tiny: Tiny) -> None:
    plan = engine(tiny("llama")).plan
    (group,) = plan.groups
    assert (group.backend, group.kv_spec, group.cache_format) == ("quest", "full_bounds", "key_bounds")
    assert "approximate decodes read the `top_blocks` blocks" in plan.explain()
    assert group.decision()["approximate"] == group.approximate


def test_too_few_blocks_are_refused(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="top_blocks"):
        engine(tiny("llama"), **{"backend.quest.top_blocks": 1})
