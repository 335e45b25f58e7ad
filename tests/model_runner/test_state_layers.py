"""Models with state layers through the whole engine: transformers' tokens, whatever batching and preemption do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded
from tiny_models import STATE_FAMILIES, family, logits_reference, oracle

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families.decoder import STATE_ARCHITECTURES
from slotline.registry.contracts.state import STATE_KINDS, StateLayer

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
HYBRIDS = tuple(name for name in STATE_FAMILIES if family(name).windows)


def expected(greedy: Greedy, path: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy(path, prompt, 20) for prompt in prompts]


def poison(llm: LLM) -> None:
    """NaN into every slot: what a request finds there before its first token must not matter. No checkpoint stays."""
    llm.engine.scheduler.cache.reset()
    states = llm.engine.extension("states").dispatcher
    for group in states.groups:
        for layer in group.layers:
            for tensor in states.state(layer).values():
                tensor.fill_(float("nan"))


@pytest.mark.spread(5, slow=5)
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", STATE_FAMILIES)
@pytest.mark.behaviour(46, 62, 153, 155)
def test_every_family_gives_transformers_tokens_in_mixed_chunked_batches(
    name: str, optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    backend = "cpu" if optimize else "torch"
    llm = engines(path, optimize=optimize, backend=backend, **{"scheduler.max_batched_tokens": 24})
    with recorded(llm) as steps:
        first = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in first] == expected(greedy, path)
    assert len({token for o in first for token in o.outputs[0].token_ids}) > 20  # no model that says one word
    assert any(mixes_decode_and_prefill(step) for step in steps)
    assert max(int(step.num_scheduled.max()) for step in steps) < 40  # the longest prompt came in chunks
    poison(llm)
    again = llm.generate(PROMPTS[::-1], GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected(greedy, path)[::-1]
    assert all(o.metrics.num_cached_tokens == 0 for o in again)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h"])
def test_a_gated_norm_over_one_group_keeps_its_gate(name: str, tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    """Without the gate it is a plain norm, which a pass would replace."""
    path = tiny(name, n_groups=1)
    llm = engines(path, optimize=True, backend="cpu", **{"scheduler.max_batched_tokens": 24})
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], GREEDY)] == expected(greedy, path, PROMPTS[:3])


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.behaviour(33, 39)
def test_preempted_requests_of_hybrids_start_from_nothing_or_a_checkpoint(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    settings: dict[str, Any] = {"scheduler.max_batched_tokens": 24, "state.checkpoints": 2}
    free = engines(path, **settings)
    memory = free.engine.memory
    assert memory is not None
    blocks = 20 if None in family(name).windows else 14  # windows give theirs back
    cache = (blocks * memory.block // 4 + memory.states) // 1024 + 1
    llm = engines(path, block_size=4, memory=f"{cache}KiB", **settings)
    assert llm.engine.memory is not None
    assert llm.engine.memory.num_blocks < 30
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


@pytest.mark.behaviour(33)
def test_a_preempted_request_without_attention_is_computed_again(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    """No block ever runs out here, so the scheduler is told to."""
    path = tiny("mamba2")
    llm = engines(path, **{"scheduler.max_batched_tokens": 24})
    scheduler = llm.engine.scheduler
    requests = [llm.engine.add(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    for number in range(200):
        if number in (4, 9):
            scheduler._preempt_last()
        if not llm.engine.has_work:
            break
        llm.engine.step()
    assert [r.output_token_ids for r in requests] == expected(greedy, path)
    assert sum(r.metrics.num_preemptions for r in requests) == 2


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_tokens_of_a_step_in_flight_reach_the_states(name: str, tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny(name)
    llm = engines(path, **{"scheduler.max_batched_tokens": 24, "scheduler.async": True})
    assert llm.engine.asynchronous
    short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    params = [GREEDY, short, GREEDY, short, GREEDY, GREEDY]
    for _ in range(2):
        outputs = llm.generate(PROMPTS, params)
        wanted = [tokens[: p.max_tokens] for tokens, p in zip(expected(greedy, path), params, strict=True)]
        assert [o.outputs[0].token_ids for o in outputs] == wanted


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_prompt_logprobs_and_sampling_do_not_depend_on_the_batch(name: str, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny(name), **{"scheduler.max_batched_tokens": 24})
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    together = llm.generate(PROMPTS[:3], params)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS[:3]]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
        pairs = zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        assert all(_close(a, b) for a, b in pairs)


def _close(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(abs(one[k].logprob - other[k].logprob) < 1e-3 for k in one)


@pytest.mark.behaviour(155)
def test_the_tensors_of_a_slot_lie_in_one_padded_page() -> None:
    from slotline.planner.state_specs import HeldStates
    from slotline.plugins.kv_specs.state_slots import ALIGNMENT, StateSlots
    from slotline.plugins.states.dispatcher import allocate_pages, bind_states
    from slotline.registry.contracts import StateLayer, StateSpecContext, StateTensorSpec

    tensors = (
        StateTensorSpec(name="conv", shape=(5, 3), dtype="bfloat16"),
        StateTensorSpec(name="ssm", shape=(2, 3, 4), dtype="float32"),
    )
    layer = StateLayer(name="mixer", index=0, state_kind="both", tensors=tensors, facts={})
    spec = StateSlots(StateSpecContext(contract=1, layers=(layer,), prefix_unit=16, max_model_len=64))
    held = [HeldStates("mamba", spec, (layer,))]
    state = bind_states(held, allocate_pages(held, 3, "cpu"), 3)[0]
    assert spec.page_bytes(layer) == 2 * ALIGNMENT
    assert [tuple(tensor.shape) for tensor in state.values()] == [(3, 5, 3), (3, 2, 3, 4)]
    assert state["ssm"].stride() == (2 * ALIGNMENT // 4, 12, 4, 1)
    assert state["ssm"].data_ptr() - state["conv"].data_ptr() == ALIGNMENT
    state["conv"].fill_(1)
    assert not state["ssm"].any()
    assert torch.equal(state["conv"], torch.ones(3, 5, 3, dtype=torch.bfloat16))


@pytest.mark.spread(6, slow=1)
@pytest.mark.parametrize("name", STATE_FAMILIES)
def test_embeddings_are_transformers_last_hidden_states(name: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny(name)
    llm = engines(path, task="embed", **{"scheduler.max_batched_tokens": 24})
    model = oracle(path).base_model
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        with torch.no_grad():
            last = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, last / last.norm(), atol=1e-4, rtol=1e-4)


def test_every_served_architecture_with_states_is_tested() -> None:
    assert {family(name).architecture for name in STATE_FAMILIES} == set(STATE_ARCHITECTURES)


def test_weights_are_reloaded_in_place(tiny: Tiny, greedy: Greedy) -> None:
    path, other = tiny("bamba"), tiny("bamba", seed=1)
    llm = LLM(path, dtype="float32", memory="4MiB", max_model_len=64, max_num_seqs=8)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected(greedy, path)
    llm.update_config(model=str(other))
    llm.reload_weights()
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected(greedy, other)


@pytest.mark.spread(13, slow=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STATE_FAMILIES)
def test_state_layers_are_called_as_the_contract_says(name: str, dtype: str, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny(name), dtype=dtype)
    router, called = llm.engine.extension("states").dispatcher, list[str]()
    original = router.advance

    def advance(layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        called.append(layer.name)
        kind = STATE_KINDS[layer.state_kind]
        assert {*kind.token_inputs, *kind.parameters} <= inputs.keys()
        assert inputs.keys() <= {*kind.token_inputs, *kind.parameters, *kind.optional}
        assert set(kind.facts) - {"dt_limit"} <= layer.facts.keys()
        for key, value in inputs.items():
            of_tokens = key in kind.token_inputs or key == "z"
            single = key == "g" or (not of_tokens and key not in ("weight", "bias"))
            assert value.dtype == (torch.float32 if single else getattr(torch, dtype)), key
            assert value.stride(-1) == 1, key
            assert of_tokens or value.is_contiguous(), key
        output = original(layer, inputs)
        assert output.dtype == getattr(torch, dtype)
        return output

    router.advance = advance  # type: ignore[method-assign]
    try:
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    finally:
        del router.advance
    assert set(called) == {layer.name for group in llm.plan.state_groups for layer in group.layers}


def test_a_limited_time_step_holds_for_prompts_and_single_tokens(tiny: Tiny, engines: Engines) -> None:
    """Against transformers without a cache, which limits every token; with one it limits the prompt's alone."""
    path = tiny("zamba2", time_step_min=0.5)
    llm = engines(path, **{"scheduler.max_batched_tokens": 24})
    (output,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens, known = output.outputs[0].token_ids, list(PROMPTS[1])
    for token in tokens:
        assert token == int(logits_reference(path, known)[-1].argmax())
        known.append(token)
    unlimited = engines(tiny("zamba2"), **{"scheduler.max_batched_tokens": 24})
    (other,) = unlimited.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert other.outputs[0].token_ids != tokens
