"""KV connectors of several ranks: each saves and loads its own part of a block, and all ranks know the same of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engine_driver import add, random_prompts, tokens_of
from replica_threads import replicas_as_threads
from repository import SUPPORT
from sharing_threads import sharing_replicas
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, AsyncLLM, SamplingParams
from slotline.planner.plan import make_plan
from slotline.plugins.kv_transfer.agreement import EVENT_BYTES, _packed
from slotline.ranks.replicas.reports import BlockCounts
from slotline.registry.config import load_config
from slotline.registry.errors import NegotiationError
from slotline.server.metrics import Metrics

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
MIXED = [*PROMPTS, PROMPTS[0][:16] + PROMPTS[2][:20]]
SMALL: dict[str, Any] = {
    **DEFAULTS,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 2,
}
HOST: dict[str, Any] = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB"}
FAILING: dict[str, Any] = {
    "plugins.inline": (f"{SUPPORT / 'failing_connector.py'}:Failing",),
    "kv_connector.name": "failing",
}
SHARED: dict[str, Any] = {
    "plugins.inline": (f"{SUPPORT / 'shared_store.py'}:Shared",),
    "kv_connector.name": "shared_files",
}
HYBRID: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
WAYS = ("load", "late", "some", "wait", "held", "failed", "save", "forgets")
TWO: dict[str, Any] = {"parallel.tensor": 2}
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "plain": {"scheduler.async": False},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 3},
}


def tight(blocks: int, path: Path, **settings: Any) -> dict[str, Any]:
    """Settings with memory for so many blocks on each rank."""
    plan = make_plan(load_config(values={"model": str(path), "device": "cpu", **_values(settings)})).plan
    assert plan.pool is not None
    return {**settings, "memory": f"{-(-blocks * plan.pool.block_bytes // 1024)}KiB"}


def _values(settings: dict[str, Any]) -> dict[str, Any]:
    short = {
        "block_size": "cache.block_size",
        "memory": "cache.memory",
        "backend": "attention.backend",
        "max_num_batched_tokens": "scheduler.max_batched_tokens",
        "max_num_seqs": "scheduler.max_requests",
        "max_model_len": "scheduler.max_model_len",
    }
    return {short.get(key, key): value for key, value in settings.items() if key in short or "." in key}


def connector_of(llm: LLM) -> Any:
    """The connector of a rank."""
    return llm.engine.extension("kv_transfer").transfers.connector


def counts_of(llm: LLM) -> BlockCounts:
    """What a rank knows of all ranks' connectors."""
    return llm.engine.extension("kv_transfer").counts


def loaded(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Of each prompt, served alone: tokens from a cache, and those of them that the connector brought."""
    outputs = [llm.generate([prompt], SHORT)[0] for prompt in prompts]
    return [(o.metrics.num_cached_tokens, o.metrics.num_loaded_tokens) for o in outputs]


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_every_rank_keeps_its_own_heads(asynchronous: bool, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    settings = {**tight(18, path, **SMALL, **TWO), "scheduler.async": asynchronous}
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), PROMPTS, SHORT)
    ranks = ThreadRanks(path, **settings, **HOST)
    assert ranks.same(lambda llm: [tokens_of(llm, [prompt], SHORT)[0] for prompt in PROMPTS]) == want
    hits = ranks.same(lambda llm: loaded(llm, PROMPTS))
    assert [hit for hit, _ in hits] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    assert all(0 < count <= hit for hit, count in hits)
    ranks.each(lambda llm: connector_of(llm)._counts.update(mine=1.5 + llm.engine.group.place.rank))
    ranks.same(lambda llm: loaded(llm, PROMPTS[:1]))
    assert [one["mine"] for one in ranks.same(counts_of).events] == [1.5, 2.5]
    ranks.each(everything_returned)
    ranks.close()


@pytest.mark.parametrize("how", ["never", "some"])
def test_ranks_that_share_keys_keep_their_own_tokens(how: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama", num_key_value_heads=1)
    settings = tight(10, path, **SMALL, **TWO, **{"parallel.decode_context": 2})
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), PROMPTS, SHORT)
    ranks = ThreadRanks(path, **settings, **FAILING)
    ranks.each(lambda llm: setattr(connector_of(llm), "how", how if llm.engine.group.place.rank else "never"))
    assert ranks.same(lambda llm: [tokens_of(llm, [prompt], SHORT)[0] for prompt in PROMPTS]) == want
    hits = ranks.same(lambda llm: loaded(llm, PROMPTS))
    if how == "never":
        assert [hit for hit, _ in hits] == [(len(prompt) - 1) // 8 * 8 for prompt in PROMPTS]
    assert any(count for _, count in hits)
    assert ranks.same(lambda llm: tokens_of(llm, PROMPTS, SHORT)) == want
    counts = ranks.same(counts_of)
    assert (counts.lost > 0) == (how == "some")
    parts = ranks.each(lambda llm: connector_of(llm).context.part)
    assert parts == ["tensor 0/2, tokens 0/2, 1 KV heads", "tensor 1/2, tokens 1/2, 1 KV heads"]
    ranks.each(everything_returned)
    ranks.close()


@pytest.fixture(scope="module")
def failing(tiny: Tiny) -> Iterator[Callable[[str], ThreadRanks]]:
    made: dict[str, ThreadRanks] = {}
    path = tiny("llama")

    def get(mode: str) -> ThreadRanks:
        if mode not in made:
            made[mode] = ThreadRanks(path, **{**tight(32, path, **SMALL, **TWO), **MODES[mode], **FAILING})
        return made[mode]

    yield get
    for ranks in made.values():
        ranks.close()


ALWAYS = {("asynchronous", "late", 1), ("asynchronous", "failed", 0), ("asynchronous", "forgets", 1)}
SLOW = {("plain", "some", 1), ("plain", "held", 0), ("drafted", "wait", 0), ("drafted", "load", 1)}
CASES = [
    pytest.param(
        *case,
        marks=() if case in ALWAYS else pytest.mark.slow if case in SLOW else pytest.mark.exhaustive,
        id="-".join(map(str, case)),
    )
    for case in product(MODES, WAYS, (0, 1))
]
"""Each way on each rank in each mode."""


@pytest.mark.spread(2)
@pytest.mark.parametrize(("mode", "how", "rank"), CASES)
def test_a_failure_on_one_rank_is_computed_again_on_all(
    mode: str, how: str, rank: int, failing: Callable[[str], ThreadRanks], tiny: Tiny, engines: Engines
) -> None:
    """The integrity checker compares the rows of the ranks in every step."""
    ranks = failing(mode)
    want = tokens_of(engines(tiny("llama"), **{**SMALL, "memory": "4MiB"}), MIXED, SHORT)

    def run(llm: LLM) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        engine = llm.engine
        engine.forget_prefixes()
        connector_of(llm).how = how if engine.group.place.rank == rank else "never"
        assert tokens_of(llm, MIXED, SHORT) == want
        for name, prompt in (("a", PROMPTS[0]), ("b", PROMPTS[1]), ("c", PROMPTS[3])):
            add(llm, name, prompt, SHORT)
        engine.step()
        engine.abort("a")
        engine.step()
        engine.abort("b")
        engine.abort("c")
        outputs = llm.generate(MIXED, SHORT)
        everything_returned(llm)
        counted = [o.metrics for o in outputs]
        figures = [(one.num_cached_tokens, one.num_loaded_tokens, one.num_preemptions) for one in counted]
        return [list(o.outputs[0].token_ids) for o in outputs], figures

    before = ranks.same(counts_of)
    tokens, figures = ranks.same(run)
    counts = ranks.same(counts_of)
    assert tokens == want
    assert (sum(loads for _, loads, _ in figures) > 0) == (how in ("some", "forgets"))
    assert counts.failed[1 - rank] == before.failed[1 - rank]
    if how in ("load", "late", "some", "wait", "failed"):
        assert sum(preempted for *_, preempted in figures) > 0
        assert counts.failed[rank] - before.failed[rank] == counts.lost - before.lost > 0
    else:
        assert counts.lost == before.lost
        assert counts.held[1 - rank] - before.held[1 - rank] > counts.held[rank] - before.held[rank]


@pytest.mark.parametrize(
    "family", [pytest.param("llama_deep", marks=pytest.mark.exhaustive), pytest.param("gemma3", marks=pytest.mark.slow)]
)
def test_stages_keep_their_own_layers(family: str, tiny: Tiny, engines: Engines) -> None:
    """A stage of the second has no layer of one of the groups."""
    path = tiny(family, **(HYBRID if family == "gemma3" else {}))
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), PROMPTS, SHORT)
    ranks = ThreadRanks(path, tensor=1, pipeline=2, **tight(20, path, **SMALL), **FAILING)
    for how in ("never", "late", "forgets"):

        def run(llm: LLM, how: str = how) -> list[list[int]]:
            llm.engine.forget_prefixes()
            connector_of(llm).how = how if llm.engine.group.place.rank else "never"
            assert [tokens_of(llm, [prompt], SHORT)[0] for prompt in PROMPTS] == want
            return tokens_of(llm, PROMPTS, SHORT)

        assert ranks.same(run) == want
        hits = ranks.same(lambda llm: loaded(llm, PROMPTS))
        if how != "forgets":
            assert any(count for _, count in hits) == (how == "never")
    parts = ranks.each(lambda llm: connector_of(llm).context.part)
    assert [part[:12] for part in parts] == ["pipeline 0/2", "pipeline 1/2"]
    ranks.each(everything_returned)
    ranks.close()


@pytest.mark.slow
def test_a_store_that_ranks_share_never_mixes_their_blocks(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    """Another engine of as many ranks finds them, and one of another number does not."""
    path = tiny("llama")
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), PROMPTS)
    shared = {**SMALL, **SHARED, "kv_connector.shared_files.folder": str(tmp_path)}
    first, second = (ThreadRanks(path, **shared) for _ in range(2))
    assert first.same(lambda llm: tokens_of(llm, PROMPTS)) == want
    assert len(list(tmp_path.iterdir())) == 2
    assert all(count == 0 for _, count in engines_loaded(path, shared))
    assert len(list(tmp_path.iterdir())) == 3
    assert [one[1] for one in second.same(lambda llm: loaded(llm, PROMPTS))] == [32, 36, 36, 24]
    assert second.same(lambda llm: tokens_of(llm, PROMPTS)) == want
    some = sorted(tmp_path.glob(f"{connector_of(second.llms[1]).context.identity}/*"))
    for file in some[::2]:  # lost on one rank alone
        file.unlink()
    second.each(lambda llm: llm.engine.scheduler.cache.reset())
    assert second.same(lambda llm: tokens_of(llm, PROMPTS)) == want
    first.close()
    second.close()


def engines_loaded(path: Path, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """What one process finds."""
    return loaded(LLM(path, **settings), PROMPTS)


@pytest.mark.parametrize("experts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_replica_finds_what_another_has_computed(experts: int, tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    """So do replicas that share experts, and take decisions of their own."""
    path = tiny("llama" if experts == 1 else "mixtral")
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), PROMPTS, SHORT)
    given = {**SMALL, **SHARED, "kv_connector.shared_files.folder": str(tmp_path), "parallel.data": 2}
    with ExitStack() as stack:
        if experts == 1:
            stack.enter_context(replicas_as_threads())
        else:
            _, settings = stack.enter_context(sharing_replicas())
            inline = (*given["plugins.inline"], *settings["plugins.inline"])
            given |= {**settings, "parallel.expert": experts, "plugins.inline": inline}
        llm = LLM(path, **given)
        stack.callback(llm.close)
        assert "each of 2 replicas has its own" in llm.plan.explain()
        front, found = llm.front, []
        for number in range(2):
            front.router.route = front.router.route_held = lambda *_, number=number: number
            found.append(llm.generate(PROMPTS, SHORT))
        assert [[list(o.outputs[0].token_ids) for o in outputs] for outputs in found] == [want, want]
        assert [sum(o.metrics.num_loaded_tokens for o in outputs) for outputs in found] == [0, 128]
    assert len(list(tmp_path.iterdir())) == 1


def test_counts_of_each_rank_are_in_the_metrics(tiny: Tiny) -> None:
    path = tiny("llama")
    llm = AsyncLLM(path, **tight(20, path, **SMALL), **HOST)
    engine = llm.front
    for number in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.add(f"{number}-{index}", prompt, SHORT)
            while engine.has_work:
                engine.step()
    counts = engine.extension("kv_transfer").counts
    text = Metrics(llm, "m").text().decode()
    for what, value, labels in (
        ("asked", counts.asked, ""),
        ("loads", counts.loads, ""),
        ("held", counts.held[0], 'rank="0",'),
        ("failed", 0, 'rank="0",'),
    ):
        assert f'slotline:kv_connector_blocks_{what}_total{{model_name="m",' in text
        line = next(one for one in text.splitlines() if one.startswith(f"slotline:kv_connector_blocks_{what}_total"))
        assert float(line.split()[-1]) == value
        assert labels.strip(",") in line
    assert counts.asked > counts.held[0] >= counts.loads > 0
    (line,) = [one for one in text.splitlines() if 'event="saved"' in one]
    assert 'rank="0"' in line
    assert float(line.split()[-1]) == counts.events[0]["saved"] > 0


def test_events_of_a_rank_have_the_same_bytes_however_many_there_are() -> None:
    many = {f"event {number}": 0.5 + number for number in range(500)}
    for events in ({}, {"a": 1.0}, many):
        packed = _packed(events)
        assert len(packed) == EVENT_BYTES
        found = json.loads(packed)
        assert found == dict(list(events.items())[: len(found)])
    assert 80 < len(found) < 500


def test_the_plan_says_what_each_rank_keeps_and_what_is_refused(tiny: Tiny) -> None:
    path = str(tiny("llama"))
    values = {"model": path, "device": "cpu", "parallel.tensor": 2, "kv_connector.name": "host_memory"}
    text = " ".join(make_plan(load_config(values=values)).plan.explain().split())
    assert "each of 2 ranks saves and loads its own heads" in text
    shared = {**values, "parallel.tensor": 4, "parallel.decode_context": 2}
    text = " ".join(make_plan(load_config(values=shared)).plan.explain().split())
    assert "each of 4 ranks saves and loads its own heads and tokens" in text
    apart = {"parallel.tensor": 1, "parallel.context_shards": ("cpu", "cpu"), "attention.backend": "torch"}
    with pytest.raises(NegotiationError, match="the tokens of a block lie in several caches"):
        make_plan(load_config(values={**values, **apart}))


@pytest.mark.slow
def test_two_processes_load_what_they_saved(tiny: Tiny, engines: Engines) -> None:
    """One of them loses a third of its loads."""
    path = tiny("llama")
    want = tokens_of(engines(path, **{**SMALL, "memory": "4MiB"}), MIXED)
    options = {"kv_connector.failing.how": "some", "kv_connector.failing.part": "tensor 1/2"}
    llm = LLM(path, **tight(24, path, **SMALL, **TWO), **FAILING, **options)
    for _ in range(3):
        assert tokens_of(llm, MIXED) == want
    counts = counts_of(llm)
    assert counts.loads > counts.lost == counts.failed[1] > 0 == counts.failed[0]
    everything_returned(llm)
    llm.close()
