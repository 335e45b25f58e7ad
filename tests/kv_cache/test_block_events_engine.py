"""Block events in whole engines: an extension's sums of blocks are those of the cache, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import random_prompts, tokens_of
from repository import SUPPORT
from tiny_engines import DEFAULTS, everything_returned

from slotline.builder.watched_blocks import WatchedGroup, WatchedPool
from slotline.core import LLM, SamplingParams
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.registry.errors import ContractError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
FILE = SUPPORT / "summing_extension.py"
PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
MIXED = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][:20]]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {
    **DEFAULTS, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 3, "memory": "80KiB",
}  # fmt: skip
SUMS: dict[str, Any] = {"plugins.inline": (f"{FILE}:descriptor",), "extensions.sums": {}}
LOADS: dict[str, Any] = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "4MiB"}
SLOW: dict[str, Any] = {
    "plugins.inline": (f"{FILE}:descriptor", f"{SUPPORT / 'slow_connector.py'}:Slow"), "kv_connector.name": "slow",
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"scheduler.async": False}),
    "overlapping-loads": ("llama", {"scheduler.async": True, **LOADS}),
    "slow-loads": ("llama", SLOW),
    "windows": ("gemma2", {"scheduler.async": True}),
    "drafts": ("llama", {"drafter.name": "ngram", "drafter.tokens": 3}),
}


@pytest.mark.parametrize(
    "case", [c if c == "overlapping-loads" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_what_is_kept_for_each_block_is_never_stale(tiny: Tiny, case: str) -> None:
    """With preemption, cached prefixes, loads and forgotten prefixes. The extension checks itself before each step."""
    family, settings = CASES[case]
    path = tiny(family)
    llm = LLM(path, **{**SMALL, **SUMS, **settings})
    want = tokens_of(LLM(path, **{**SMALL, "memory": "4MiB"}), MIXED, SHORT)
    sums = llm.engine.extension("sums")
    for _ in range(2):
        assert tokens_of(llm, MIXED, SHORT) == want
        assert tokens_of(llm, MIXED[::-1], SHORT) == want[::-1]
    llm.engine.forget_prefixes()
    assert tokens_of(llm, MIXED, SHORT) == want
    everything_returned(llm)
    assert sums.steps > 30
    never = {name for name, count in sums.heard.items() if not count}
    assert never == {"moved"} | (set() if "kv_connector.name" in settings else {"loaded"})


def test_an_engine_in_which_nobody_listens_records_nothing_and_one_with_a_listener_does(tiny: Tiny) -> None:
    path = tiny("llama")
    plain, listening = LLM(path, **SMALL), LLM(path, **{**SMALL, **SUMS})
    for llm, pool, group in ((plain, BlockPool, object), (listening, WatchedPool, WatchedGroup)):
        assert type(llm.engine.scheduler.cache.pool) is pool
        assert all(isinstance(one, group) for one in llm.engine.scheduler.cache.groups)
    assert plain.engine.extension("block_events") is None


def test_an_exception_in_a_step_makes_all_cached_blocks_count_as_loaded(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **{**SMALL, **SUMS, "memory": "4MiB", "scheduler.async": True})
    sums = llm.engine.extension("sums")
    expected = tokens_of(llm, MIXED, SHORT)
    raised, launch = list[bool](), llm.engine.runner.launch

    def fail(inputs: Any) -> Any:
        if not raised:
            raised.append(True)
            sums.sums = [{} for _ in sums.groups]  # all that was kept is lost
            sums.held = [set() for _ in sums.groups]
            raise OSError("a step fails")
        return launch(inputs)

    llm.engine.runner.launch = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="a step fails"):
        tokens_of(llm, MIXED, SHORT)
    for request in list(llm.engine.requests.values()):
        llm.engine.abort(request.request_id)
    sums.heard = dict.fromkeys(sums.heard, 0)
    assert tokens_of(llm, MIXED, SHORT) == expected
    assert sums.heard["loaded"] > 0
    everything_returned(llm)


def test_an_extension_with_the_method_alone_is_told_to_declare_it(tiny: Tiny) -> None:
    with pytest.raises(ContractError, match="block_events") as caught:
        LLM(tiny("llama"), **{**SMALL, "plugins.inline": (f"{FILE}:silent",), "extensions.silent": {}})
    assert "block_events=True" in (caught.value.fix or "")
