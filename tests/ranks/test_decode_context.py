"""Ranks of a tensor group that share the keys of requests: the same text, more tokens, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_backend
import recorded_communicator
from cli_cases import pretend_project_installed
from context_shards_cases import DECODES, MIXED, compare_ranks
from engine_driver import random_prompts
from repository import TESTS
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError, NegotiationError
from slotline.registry.ranks import Place, RankLayout

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(8, 162)]

Tiny = Callable[..., Path]
Greedy = Callable[[Path, list[int], int], list[int]]
PROMPTS = random_prompts([3, 33, 17, 1])
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {**DEFAULTS, "block_size": 4, "max_num_batched_tokens": 24, "memory": "96KiB"}


@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("backend", "num_ranks"), [("torch", 2), ("cpu", 4)])
def test_ranks_merge_to_the_attention_of_all_heads_over_all_keys(
    backend: str, num_ranks: int, sinks: bool, requests: list[tuple[int, int]]
) -> None:
    for output, lse in compare_ranks(backend, requests, num_ranks, sinks=sinks):
        assert output < 2e-6
        assert lse < 4e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {"num_key_value_heads": 1}), ("deepseek_v2", {})],  # one KV head, latents
)
def test_two_ranks_hold_twice_the_tokens_and_give_the_text_of_one(
    family: str,
    settings: dict[str, Any],
    tiny: Tiny,
    greedy: Callable[[Path, list[int], int], list[int]],
) -> None:
    path = tiny(family, **settings)
    want = [greedy(path, prompt, 8) for prompt in PROMPTS]
    whole = make_plan(load_config(values={**_values(path), "parallel.tensor": 2}, environ={}))
    llm = LLM(path, **SMALL, **{"parallel.tensor": 2, "parallel.decode_context": 2})
    assert llm.plan.block_size == 8
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == want
    again = llm.generate(PROMPTS, PARAMS)  # prefixes hit in blocks of the ranks together
    assert [o.outputs[0].token_ids for o in again] == want
    assert any(o.metrics.num_cached_tokens for o in again)
    everything_returned(llm)
    assert whole.plan.pool is not None
    assert llm.engine.memory is not None
    assert llm.engine.memory.num_blocks - 1 == (96 << 10) // whole.plan.pool.block_bytes  # each of twice the tokens
    llm.close()


def test_captured_decodes_give_the_text_of_one(tiny: Tiny, greedy: Greedy, tmp_path: Path) -> None:
    path, lens = tiny("llama", num_key_value_heads=1), (6, 14, 9, 20)
    want = [greedy(path, prompt, count) for prompt, count in zip(PROMPTS, lens, strict=True)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lens]
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            patch.delitem(sys.modules, name)
        pretend_project_installed(patch, tmp_path / "site", TESTS / "third_party" / "acme-device")
        backend = {"backend": "recorded_attention", "plugins.inline": (f"{recorded_backend.__file__}:descriptor",)}
        shared = {"device": "acme", "parallel.decode_context": 2, "graphs.sizes": (1, 2, 4)}
        ranks = ThreadRanks(path, communicator=recorded_communicator, **SMALL | backend | shared)
        assert dict(ranks.llms[0].plan.groups[0].graphs) == {"decode": "captured", "mixed": "eager"}
        replayed = _replayed(ranks.llms[0])
        for _ in range(2):  # the second time with prefixes
            found = ranks.same(lambda llm: [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            assert found == want
        assert {1, 2, 4} <= {shape.num_tokens for shape in replayed if shape.query_len == 1}
        ranks.close()


def _replayed(llm: LLM) -> list[GraphShape]:
    """Return the list that the shapes of an engine's replays are appended to."""
    graphs: Any = llm.engine.graphs
    found, plain = list[GraphShape](), graphs.replay

    def replay(inputs: Any) -> Any:
        found.append(inputs.shape)
        return plain(inputs)

    graphs.replay = replay
    return found


def _values(path: Path, **settings: Any) -> dict[str, Any]:
    return {
        "model": str(path),
        "device": "cpu",
        "dtype": "float32",
        "attention.backend": "torch",
        "cache.block_size": 4,
        "scheduler.max_model_len": 64,
        "optimize": False,
        **settings,
    }


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "one rank": ({}, {"parallel.tensor": 1}, ConfigError, "does not divide the 1 ranks of parallel.tensor"),
    "own heads": ({}, {}, NegotiationError, "has 2 KV heads over 2 ranks, so that no two of them hold the same keys"),
    "two of four": (
        {"num_key_value_heads": 2},
        {"parallel.tensor": 4, "parallel.decode_context": 4},
        NegotiationError,
        "2 KV heads over 4 ranks, so that 2 of them hold the same keys",
    ),
    "in one process too": ({}, {"parallel.context_shards": 2}, ConfigError, "with parallel.context_shards"),
    "drafter": ({"num_key_value_heads": 1}, {"drafter.name": "ngram"}, NegotiationError, "are not verified over"),
    "graphs": ({"num_key_value_heads": 1}, {"graphs.mode": "full"}, NegotiationError, "steps with prompts is planned"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_with_keys_of_their_own_and_what_shards_cannot_hold_are_refused(name: str, tiny: Tiny) -> None:
    settings, parallel, error, text = REFUSED[name]
    values = _values(tiny("llama", **settings), **{"parallel.tensor": 2, "parallel.decode_context": 2, **parallel})
    with pytest.raises(error, match=text):
        make_plan(load_config(values=values, environ={}))


def test_explain_says_which_ranks_hold_a_block(tiny: Tiny) -> None:
    values = _values(tiny("llama", num_key_value_heads=1), **{"parallel.tensor": 2, "parallel.decode_context": 2})
    text = " ".join(make_plan(load_config(values=values, environ={})).plan.explain().split())
    assert "parallel.decode_context 2 -> 2" in text
    assert "a block of the pool is 2 times 4 tokens, in turn on 2 ranks of 2" in text


def test_neighbours_share_keys(tiny: Tiny) -> None:
    values = _values(tiny("llama", num_key_value_heads=2), **{"parallel.tensor": 4, "parallel.decode_context": 2})
    loaded = load_config(values=values, environ={})
    places = [Place(rank=rank, layout=RankLayout(tensor=4)) for rank in range(4)]
    plans = [make_plan(loaded, place=place) for place in places]
    assert [planned.shards.ranks for planned in plans] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert len({planned.plan.digest for planned in plans}) == 1  # or the ranks would refuse each other
