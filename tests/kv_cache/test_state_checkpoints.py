"""Prefix hits of models with states: transformers' tokens from checkpoints on, and each rule of their ownership."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, add, mixes_decode_and_prefill, random_prompts, recorded, run_all, tokens_of
from tiny_models import STATE_FAMILIES, family

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.core.batch.request_table import RequestTable
from slotline.core.scheduler.integrity import check_integrity
from slotline.plugins.kv_specs.state_slots import INTERVAL, StateSlots
from slotline.plugins.states.checkpoints import Checkpoints
from slotline.plugins.states.dispatcher import StateDispatcher
from slotline.registry.contracts import Draft, DraftBatch, StateSpecContext
from slotline.registry.errors import IntegrityError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

SHARED = random_prompts([20], seed=7)[0]
TAILS = random_prompts([5, 13, 1, 9], seed=8)
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
HYBRIDS = tuple(name for name in STATE_FAMILIES if family(name).windows)


def checkpoints_of(llm: LLM) -> Checkpoints:
    found: Checkpoints = llm.engine.extension("states").checkpoints
    return found


def states_of(llm: LLM, slot: int) -> list[torch.Tensor]:
    """A copy of everything in a slot."""
    router = llm.engine.extension("states").dispatcher
    return [t[slot].clone() for group in router.groups for layer in group.layers for t in router.state(layer).values()]


def cached(llm: LLM, prompts: list[list[int]]) -> list[int]:
    return [o.metrics.num_cached_tokens for o in llm.generate(prompts, GREEDY)]


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", STATE_FAMILIES)
@pytest.mark.behaviour(26, 33, 69)
def test_every_family_goes_on_from_a_checkpoint_with_transformers_tokens(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """Hits in mixed, chunked batches: the first request leaves the prefix, the second parts from it, the others hit."""
    path = tiny(name)
    llm = engines(path, **SMALL)
    prompts = [SHARED + tail for tail in TAILS]
    hits, found = [], []
    for prompt in prompts[:2]:
        (output,) = llm.generate(prompt, GREEDY)
        hits.append(output.metrics.num_cached_tokens)
        found.append(output.outputs[0].token_ids)
    with recorded(llm) as steps:
        outputs = llm.generate([*prompts[2:], prompts[0]], GREEDY)
    hits += [o.metrics.num_cached_tokens for o in outputs]
    found += [o.outputs[0].token_ids for o in outputs]
    assert found == [greedy(path, prompt, 20) for prompt in [*prompts, prompts[0]]]
    assert hits == [0, 0, 20, 20, 24]  # 20 tokens are shared; of the first prompt's 25, 24 are whole blocks
    assert any(mixes_decode_and_prefill(step) for step in steps)
    assert checkpoints_of(llm).counts.restored >= 3


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["mamba2", "bamba", "qwen3_next"])
@pytest.mark.behaviour(33)
def test_one_token_behind_a_hit_is_a_step_like_any_other(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    llm = engines(path, **SMALL)
    prompt = random_prompts([25], seed=3)[0]
    first = tokens_of(llm, [prompt])
    with recorded(llm) as steps:
        assert cached(llm, [prompt]) == [24]
    assert steps[0].num_scheduled.tolist() == [1]
    assert tokens_of(llm, [prompt]) == first == [greedy(path, prompt, 20)]


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_a_second_turn_goes_on_from_the_first_ones_prompt(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    llm = engines(path, **SMALL)
    prompt = random_prompts([18], seed=4)[0]
    (answer,) = tokens_of(llm, [prompt])
    turn = prompt + answer[:9] + [5, 6]
    (output,) = llm.generate(turn, GREEDY)
    assert output.metrics.num_cached_tokens == 16
    assert output.outputs[0].token_ids == greedy(path, turn, 20)


def test_generation_leaves_a_checkpoint_at_each_interval(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("mamba2", max_position_embeddings=512)
    llm = engines(path, max_model_len=400, memory="8MiB")
    prompt = random_prompts([INTERVAL - 30], seed=5)[0]
    (answer,) = tokens_of(llm, [prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    turn = prompt + answer
    (output,) = llm.generate(turn, GREEDY)
    assert output.metrics.num_cached_tokens == INTERVAL
    assert output.outputs[0].token_ids == greedy(path, turn, 20)


@pytest.mark.spread(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "bamba", "lfm2"])
@pytest.mark.behaviour(33, 39)
def test_hits_survive_preemption_eviction_and_steps_in_flight(
    name: str, asynchronous: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """Three checkpoints for eight prompts with two prefixes; requests are put back now and then."""
    path = tiny(name)
    llm = engines(path, **SMALL, **{"scheduler.async": asynchronous, "state.checkpoints": 3})
    other = random_prompts([12], seed=11)[0]
    prompts = [prefix + tail for tail in TAILS for prefix in (SHARED, other)]
    before = checkpoints_of(llm).counts.restored
    for turn in range(3):
        requests = [add(llm, f"{turn}-{i}", prompt) for i, prompt in enumerate(prompts)]
        for number in range(300):
            if not llm.engine.has_work:
                break
            if number % 7 == 5 and llm.engine.scheduler.running:
                llm.engine.scheduler._preempt_last()
            llm.engine.step()
        assert [r.output_token_ids for r in requests] == [greedy(path, prompt, 20) for prompt in prompts]
    counts = checkpoints_of(llm).counts
    assert counts.restored - before > 5
    assert counts.evicted > 5
    assert checkpoints_of(llm).num_slots == 3


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_no_cut_and_no_hit_without_slots_for_checkpoints(name: str, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny(name), **{"state.checkpoints": 0})
    prompt = random_prompts([40], seed=6)[0]
    with recorded(llm) as steps:
        assert cached(llm, [prompt]) == [0]
        assert cached(llm, [prompt]) == [0]
    assert int(steps[0].num_scheduled[0]) == 40


def test_prompts_stay_whole_where_they_may_not_be_divided(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("bamba"), **{"scheduler.chunked_prefill": False})
    with recorded(llm) as steps:
        assert cached(llm, [random_prompts([40], seed=6)[0]]) == [0]
    assert int(steps[0].num_scheduled[0]) == 40


def test_prompt_logprobs_need_every_position_and_take_no_checkpoint(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("bamba"), **SMALL)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    for _ in range(2):
        (output,) = llm.generate(SHARED, params)
        assert output.metrics.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        assert all(entry for entry in output.prompt_logprobs[1:])


def test_other_salts_find_no_checkpoint(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("mamba2"), **SMALL)
    for salt, hit in (("a", 0), ("a", 16), ("b", 0)):
        request = add(llm, f"{salt}{hit}", SHARED, cache_salt=salt)
        run_all(llm)
        assert request.metrics.num_cached_tokens == hit


def test_reloaded_weights_forget_the_checkpoints(tiny: Tiny) -> None:
    llm = LLM(tiny("mamba2"), dtype="float32", memory="4MiB", max_model_len=64, max_num_seqs=4)
    assert [cached(llm, [SHARED + SHARED])[0] for _ in range(2)] == [0, 32]
    llm.reload_weights()
    assert cached(llm, [SHARED + SHARED]) == [0]


# What follows breaks one rule of ownership each (a state is destructive, so each would give wrong tokens unseen).


@pytest.fixture
def holding(tiny: Tiny, engines: Engines) -> Iterator[LLM]:
    """An engine with a checkpoint and two requests in the middle of their texts."""
    llm = engines(tiny("bamba"), **SMALL)
    add(llm, "one", SHARED + TAILS[0])
    add(llm, "two", SHARED + TAILS[1])
    for _ in range(6):
        llm.engine.step()
    yield llm
    for name in list(llm.engine.requests):
        llm.engine.abort(name)


def broken(llm: LLM, text: str) -> None:
    with pytest.raises(IntegrityError, match=text):
        check_integrity(llm.engine.scheduler)


def test_a_sound_engine_passes_the_check(holding: LLM) -> None:
    check_integrity(holding.engine.scheduler)


@pytest.mark.behaviour(155)
def test_a_checkpoint_is_a_copy_that_the_live_request_no_longer_changes(holding: LLM) -> None:
    (slot, *_) = checkpoints_of(holding)._slot_of.values()
    before = states_of(holding, slot)
    running = [states_of(holding, row) for row in (0, 1)]
    holding.engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, states_of(holding, slot), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(running[0], states_of(holding, 0), strict=True))


def test_a_live_slot_in_the_cache_is_seen(holding: LLM) -> None:
    """Rule 5: never share a live slot with the cache."""
    kept = checkpoints_of(holding)._slot_of
    key, slot = next(iter(kept.items()))
    kept[key] = 0
    try:
        broken(holding, r"checkpoints hold slots \[0\], which are those of live rows")
    finally:
        kept[key] = slot


def test_a_slot_with_two_owners_is_seen(holding: LLM) -> None:
    """Rule 1: a slot has one owner."""
    kept = checkpoints_of(holding)._slot_of
    kept[b"another prefix"] = next(iter(kept.values()))
    try:
        broken(holding, "not each either free or of one checkpoint")
    finally:
        del kept[b"another prefix"]


def test_a_slot_that_nobody_owns_is_seen(holding: LLM) -> None:
    free = checkpoints_of(holding)._free
    lost = free.pop()
    try:
        broken(holding, "not each either free or of one checkpoint")
    finally:
        free.append(lost)


def test_a_state_kept_for_another_prefix_is_seen(holding: LLM) -> None:
    """Rule 4: the position of a checkpoint and what its state covers are one number."""
    found = checkpoints_of(holding)
    slot = next(iter(found._slot_of.values()))
    found.lengths[slot] -= 1
    try:
        broken(holding, "and the prefixes that they are found by have")
    finally:
        found.lengths[slot] += 1


def test_a_hit_without_its_state_is_seen(tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 5: what a request goes on from is a checkpoint, and one of the tokens that it need not compute."""
    llm = engines(tiny("bamba"), **SMALL)
    assert cached(llm, [SHARED]) == [0]
    monkeypatch.setattr(checkpoints_of(llm), "begin", lambda row, hashes, hit: None)
    add(llm, "hit", SHARED)
    try:
        with pytest.raises(IntegrityError, match="row 0 computed 20 tokens and its state covers"):
            llm.engine.step()
    finally:
        llm.engine.abort("hit")


def test_a_state_that_did_not_advance_with_its_request_is_seen(holding: LLM) -> None:
    """Rule 3: no rollback; the rows may not say less than the state has seen."""
    rows = holding.engine.rows
    rows.num_computed_tokens[0] -= 1
    try:
        broken(holding, "row 0 computed .* tokens and its state covers")
    finally:
        rows.num_computed_tokens[0] += 1


def test_a_preempted_request_starts_from_nothing_or_from_a_checkpoint(holding: LLM) -> None:
    """Rules 2 and 6: the slot still holds the old state, and neither the step nor the check takes it for the row's."""
    scheduler = holding.engine.scheduler
    victim = scheduler._preempt_last()
    check_integrity(scheduler)
    before = checkpoints_of(holding).counts.restored
    with recorded(holding) as steps:
        holding.engine.step()
    place = steps[0].rows.tolist().index(victim.row)
    assert int(steps[0].num_computed[place]) % 4 == 0
    assert checkpoints_of(holding).counts.restored == before + 1


def test_padding_never_reaches_a_slot(tiny: Tiny, engines: Engines) -> None:
    """Rule 2: a row of padding has slot -1, and counts for nobody's state."""
    llm = engines(tiny("mamba2"), **SMALL)
    before = [states_of(llm, row) for row in range(8)]
    inputs = made_up_inputs(llm.engine.gatherer, [1, 1])
    inputs.extras["states"].slots.fill_(-1)
    llm.engine.runner.launch(inputs)
    for row, values in enumerate(before):
        assert all(torch.equal(a, b) for a, b in zip(values, states_of(llm, row), strict=True))


def test_where_a_step_ends_for_a_checkpoint() -> None:
    rows = RequestTable(4, 2048)
    router = StateDispatcher([], {}, 6, "cpu")
    rules = StateSlots(StateSpecContext(contract=1, layers=(), prefix_unit=16, max_model_len=2048))
    found = Checkpoints(rows, router, 16, rules)
    hashes = [bytes([number]) for number in range(40)]
    assert found.aim(0, hashes[:20], 0, 325, divisible=True) == 320  # the last whole unit, before the interval's 256
    found.begin(0, hashes[:20], 0)
    other = [*hashes[:7], *(bytes([1, number]) for number in range(20))]
    assert found.aim(1, other, 0, 440, divisible=True) == 7 * 16  # where it leaves the first one's tokens
    cut = found.cut(np.array([1, 1, 1]), np.array([112, 200, 256]), np.array([300, 300, 8]))
    assert cut.tolist() == [256 - 112, 432 - 200, 8]  # the interval; the last unit; nothing within reach
    assert found.aim(2, other, 0, 440, divisible=False) == 440


@pytest.mark.spread(2, slow=1)
@pytest.mark.parametrize("name", STATE_FAMILIES)
@pytest.mark.behaviour(47, 64, 72)
def test_every_family_with_a_drafter_gives_transformers_tokens(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """A single token that stood in the text before is enough for a guess; most fall."""
    path = tiny(name)
    llm = engines(
        path,
        **SMALL,
        **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1, "drafter.adaptive": False},
    )
    prompts = [SHARED + tail for tail in TAILS]
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    before = drafting.counts.proposed
    found = [tokens_of(llm, some) for some in (prompts[:2], prompts[2:])]  # the last two from checkpoints
    assert [*found[0], *found[1]] == [greedy(path, prompt, 20) for prompt in prompts]
    assert drafting.counts.proposed - before > 10


@pytest.mark.spread(3, slow=1)
@pytest.mark.parametrize("name", ["mamba2", "bamba", "qwen3_next", "lfm2", "mamba"])
def test_drafts_that_partly_stand_leave_the_states_of_those_that_do(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that knows the text guesses right, then wrong at each place in turn."""
    path = tiny(name)
    llm = engines(path, **SMALL, **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.adaptive": False})
    prompts = [SHARED + tail for tail in TAILS]
    texts = [prompt + greedy(path, prompt, 20) for prompt in prompts]
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    asked = 0

    def propose(batch: DraftBatch) -> Draft:
        nonlocal asked
        guesses = []
        for row, known in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
            (text,) = (t for t in texts if t[:known] == batch.token_table[row, :known].tolist())
            guess = [*text[known : known + 3], 0, 0, 0][:3]
            wrong = asked % 4
            asked += 1
            guesses.append([token if place < wrong else (token + 1) % 384 for place, token in enumerate(guess)])
        return Draft(token_ids=torch.tensor(guesses))

    monkeypatch.setattr(drafting.drafter, "propose", propose)
    counts = drafting.counts
    before = (counts.proposed, counts.accepted)
    found = recorded_accepted(llm)
    assert tokens_of(llm, prompts) == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert counts.proposed - before[0] > counts.accepted - before[1] > 10
    assert found() == {1, 2, 3, 4}


@pytest.mark.behaviour(47, 64, 72)
@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_a_state_backend_is_told_how_many_tokens_of_the_step_before_were_accepted(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(name)
    llm = engines(path, **SMALL, **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.adaptive": False})
    prompts = [SHARED + tail for tail in TAILS]
    texts = [prompt + greedy(path, prompt, 20) for prompt in prompts]
    assert llm.engine.extension("drafts") is not None
    asked = 0

    def propose(batch: DraftBatch) -> Draft:
        nonlocal asked
        guesses = []
        for row, known in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
            (text,) = (t for t in texts if t[:known] == batch.token_table[row, :known].tolist())
            guess, asked = [*text[known : known + 3], 0, 0, 0][:3], asked + 1
            guesses.append([token if place < asked % 4 else (token + 1) % 384 for place, token in enumerate(guess)])
        return Draft(token_ids=torch.tensor(guesses))

    monkeypatch.setattr(llm.engine.extension("drafts").drafting.drafter, "propose", propose)
    requests = [add(llm, f"told {index}", prompt, GREEDY) for index, prompt in enumerate(prompts)]
    gained: dict[int, int] = {}  # row -> tokens that its last step gave, where one was known before
    told = set[int]()
    runner, lens, steps = llm.engine.runner, llm.engine.rows.num_tokens, list[Any]()
    original = runner.launch
    monkeypatch.setattr(runner, "launch", lambda inputs: steps.append(inputs) or original(inputs))
    while llm.engine.has_work:
        rows = [(request.row, len(request.prompt_token_ids)) for request in requests if request.row >= 0]
        before = {row: int(lens[row]) - prompt for row, prompt in rows}
        llm.engine.step()
        states, shown = steps[-1].extras["states"], steps[-1].rows.tolist()
        found = states.num_accepted[: states.num_requests].tolist()
        assert found == [gained.get(row, 1) for row in shown]
        told.update(found)
        gained = {row: max(1, int(lens[row]) - prompt - before[row]) if before[row] else 1 for row, prompt in rows}
    assert told == {1, 2, 3, 4}


def recorded_accepted(llm: LLM) -> Callable[[], set[int]]:
    """Every number of accepted tokens that a step's states were made for."""
    checkpoints, seen = checkpoints_of(llm), set[int]()
    original = checkpoints.commit

    def commit(rows: Any, counts: Any, accepted: Any, verified: Any, *, done: bool) -> None:
        original(rows, counts, accepted, verified, done=done)
        seen.update(checkpoints.num_accepted[rows].tolist())

    checkpoints.commit = commit  # type: ignore[method-assign]

    def found() -> set[int]:
        del checkpoints.commit
        return seen

    return found


def test_a_rejected_draft_that_stays_in_a_state_is_seen(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 3: no rollback without the contract's commit."""
    llm = engines(
        tiny("bamba"),
        **SMALL,
        **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1, "drafter.adaptive": False},
    )
    monkeypatch.setattr(checkpoints_of(llm), "commit", lambda *_, **__: None)
    add(llm, "drafted", SHARED)
    try:
        with pytest.raises(IntegrityError, match=r"row 0 computed .* tokens and its state covers"):
            run_all(llm)
    finally:
        llm.engine.abort("drafted")
