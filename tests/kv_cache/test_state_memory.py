"""What requests hold: windows, chunks and states bound it, and hybrids run as many together as `explain` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import add, random_prompts, run_all
from tiny_models import known_oracle

from slotline.core import LLM, SamplingParams
from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.plugins.states.slots import count_slots
from slotline.registry.engine_reports import DeviceMemory
from slotline.registry.errors import CapacityError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1200,
}
BOUNDED = {
    "a window": ("mistral", {**ONE_LAYER, "sliding_window": 64}, 6),  # 63 before the query and 16 tokens, any offset
    "chunks": (
        "llama4",
        {**ONE_LAYER, "layer_types": ["chunked_attention"], "attention_chunk_size": 64, "floor_scale": 10**6},
        5,
    ),
    "a state": ("mamba2", {"num_hidden_layers": 1, "max_position_embeddings": 1200}, 0),
}


def blocks_held(llm: LLM) -> int:
    """Of all groups and rows."""
    groups = llm.engine.scheduler.cache.groups
    return sum(block != NULL_BLOCK for group in groups for row in group.blocks for block in row)


@pytest.mark.spread(2)
@pytest.mark.parametrize(("name", "settings", "most"), BOUNDED.values(), ids=BOUNDED)
def test_a_long_generation_holds_no_more_than_its_layers_read(
    name: str, settings: dict[str, Any], most: int, tiny: Tiny
) -> None:
    """In a pool of exactly that; benchmarks/long_sequences.py goes on to a hundred thousand tokens."""
    llm = LLM(
        tiny(name, **settings),
        dtype="float32",
        backend="torch",
        block_size=16,
        max_model_len=1200,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        memory="64KiB",
        optimize=False,
        **{"cache.prefix_caching": False, "observability.progress": False},
    )
    memory = llm.engine.memory
    assert memory is not None
    assert memory.num_blocks == max(most, 1) + 1
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False)
    request = add(llm, "long", random_prompts([800], seed=13)[0], params)
    held = 0
    while llm.engine.has_work:
        llm.engine.step()
        held = max(held, blocks_held(llm))
    assert len(request.output_token_ids) == 400
    assert request.metrics.num_preemptions == 0
    assert held in (most, most - 1)  # a request may begin where the worst offset does not occur


@pytest.mark.parametrize(
    "length", [pytest.param(20_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.exhaustive)]
)
def test_many_thousands_of_tokens_are_generated_in_the_memory_of_a_window(length: int, tiny: Tiny) -> None:
    """All but the prompt's four, in a pool of five blocks; drafts make it thousands of steps instead of a hundred.

    With one layer a token hangs on the window before it alone, so transformers can say what the last ones are.
    """
    window = 32
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "max_position_embeddings": length}
    path = tiny("mistral", **{**ONE_LAYER, **sizes, "sliding_window": window}, seed=3)  # 17 tokens, round after round
    llm = LLM(
        path,
        dtype="float32",
        backend="cpu",
        block_size=16,
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        memory="64KiB",
        **{"drafter.name": "ngram", "drafter.tokens": 28, "drafter.adaptive": False},
        **{"drafter.ngram.min_tokens": 1, "drafter.ngram.max_tokens": 64},
        **{"cache.prefix_caching": False, "observability.progress": False},
    )
    memory = llm.engine.memory
    assert memory is not None
    assert memory.num_blocks == 1 + 5  # the null block; 31 tokens before the query and 32 of a step, at any offset
    params = SamplingParams(temperature=0, max_tokens=length - 4, ignore_eos=True, detokenize=False)
    request = add(llm, "long", [5, 6, 7, 8], params)
    run_all(llm, most_steps=length // 4)
    tokens = request.output_token_ids
    assert len(tokens) == length - 4
    assert request.metrics.num_preemptions == 0
    last = torch.tensor([tokens[-4 * window :]])  # [1, 4 * window]
    places = torch.arange(length - last.shape[1], length)[None]
    with torch.no_grad():
        logits = known_oracle(path)(last, position_ids=places, use_cache=False).logits[0]  # [4 * window, vocab_size]
    assert logits.argmax(-1)[window:-1].tolist() == tokens[-3 * window + 1 :]


@pytest.mark.exhaustive
def test_forty_thousand_tokens_are_generated_in_the_memory_of_a_chunk(tiny: Tiny) -> None:
    """Chunks that end within blocks, in a pool of five; transformers says what each of the tokens is.

    The only backend that serves chunks gathers a table as long as the text for each token, masked before the chunk, so
    that time grows with the square of the length: one head and drafts keep it short.
    """
    length, chunk, block, step = 40_960, 40, 16, 32
    sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "head_dim": 8}
    sizes |= {"num_attention_heads": 1, "max_position_embeddings": length}
    kind = {"layer_types": ["chunked_attention"], "attention_chunk_size": chunk, "floor_scale": 10**6}
    path = tiny("llama4", **{**ONE_LAYER, **sizes, **kind}, seed=3)
    llm = LLM(
        path,
        dtype="float32",
        backend="torch",
        block_size=block,
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=step,
        memory="64KiB",
        optimize=False,
        **{"drafter.name": "ngram", "drafter.tokens": 28, "drafter.adaptive": False},
        **{"drafter.ngram.min_tokens": 4, "drafter.ngram.max_tokens": 64},
        **{"cache.prefix_caching": False, "observability.progress": False},
    )
    memory, rows, most = llm.engine.memory, llm.engine.rows, 5
    assert memory is not None
    assert memory.num_blocks == 1 + most  # the null block; 39 tokens before the query and 32 of a step
    prompt = [5, 6, 7, 8]
    params = SamplingParams(temperature=0, max_tokens=length - len(prompt), ignore_eos=True, detokenize=False)
    request = add(llm, "long", prompt, params)
    steps = reached = 0
    while llm.engine.has_work:
        computed = int(rows.num_computed_tokens[request.row]) if request.row >= 0 else 0
        llm.engine.step()
        held = blocks_held(llm)
        assert held <= -(-(computed + step) // block) - computed // chunk * chunk // block
        steps, reached = steps + 1, max(reached, held)
        assert steps < length // 4, "too many drafts are rejected"
    assert reached == most
    assert request.metrics.num_preemptions == 0
    tokens = torch.tensor([*prompt, *request.output_token_ids])  # [length]
    assert len(tokens) == length
    shape = (-1, 8 * chunk)  # each row begins with a chunk, and transformers parts it into eight
    with torch.no_grad():
        places = torch.arange(length).view(shape)
        logits = known_oracle(path)(tokens.view(shape), position_ids=places, use_cache=False).logits
    assert logits.argmax(-1).flatten()[len(prompt) - 1 : -1].tolist() == request.output_token_ids


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["bamba", "qwen3_next", "zamba2"])
def test_as_many_requests_of_a_hybrid_run_together_as_explain_says(name: str, tiny: Tiny, engines: Engines) -> None:
    length, wanted = 256, 12
    settings = {"block_size": 4, "max_model_len": length, "backend": "cpu", "state.checkpoints": 0}
    path = tiny(name, max_position_embeddings=length)
    plan = engines(path, **settings).plan
    assert plan.states is not None
    memory = wanted * plan.states.bytes_per_request(plan.pool)
    best = plan.states.optimal_bytes_per_request(plan.pool)
    assert f"where {2**30 / best:.1f} is the optimum" in " ".join(plan.explain().split())
    size = f"{-(-memory // 1024)}KiB"
    llm = engines(path, **settings, max_num_seqs=wanted, memory=size)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, detokenize=False)
    prompts = random_prompts([length - 96] * wanted, seed=12)
    requests = [add(llm, str(i), prompt, params) for i, prompt in enumerate(prompts)]
    together = 0
    while llm.engine.has_work:
        llm.engine.step()
        rows = [request.row for request in llm.engine.scheduler.running]
        together = max(together, int((llm.engine.rows.num_tokens[rows] > length - 96).sum()))
    assert sum(request.metrics.num_preemptions for request in requests) == 0
    assert together == wanted >= 0.95 * memory / best


def test_the_memory_of_checkpoints_is_counted_and_bounded(tiny: Tiny, engines: Engines) -> None:
    path = tiny("bamba")
    llm = engines(path, memory="1MiB", **{"state.checkpoints": 5})
    states, memory = llm.plan.states, llm.engine.memory
    assert states is not None
    assert memory is not None
    assert "5 checkpoints of" in llm.plan.explain()
    assert (memory.checkpoints, memory.states) == (5, 13 * states.slot_bytes)
    assert memory.states + memory.cache <= 2**20 + memory.block  # and the null block
    auto = engines(path, memory="1MiB")
    assert auto.engine.memory is not None
    assert auto.engine.memory.checkpoints == min(8, (2**20 - 8 * states.slot_bytes) // 4 // states.slot_bytes)
    run_all(auto)


def test_slots_without_padding_say_nothing_of_it(tiny: Tiny, engines: Engines) -> None:
    plain, padded = engines(tiny("bamba")).plan, engines(tiny("lfm2", hidden_size=72)).plan
    assert plain.states is not None
    assert padded.states is not None
    assert plain.states.padding == 0
    assert "because each tensor begins at a multiple" not in plain.explain()
    assert 0 < padded.states.padding < 0.5
    assert f"{100 * padded.states.padding:.1f} % padding because" in " ".join(padded.explain().split())


def test_what_backends_hold_to_go_back_is_set_apart_from_the_room_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 100 bytes: six rows of ten and as much besides do not fit, four leave room for two checkpoints."""
    monkeypatch.setattr("slotline.plugins.states.slots.room_for", lambda *_, **__: 100)
    memory = DeviceMemory(device="cpu", total=0, block=0)
    with pytest.raises(CapacityError, match="take 120 bytes, 20 each") as error:
        count_slots(10, 6, "auto", 0.9, memory, explicit=True, beside=10)
    assert "scheduler.max_requests = 5" in str(error.value)
    assert count_slots(10, 4, 2, 0.9, memory, explicit=True, beside=10) == 4 + 2
    with pytest.raises(CapacityError, match=r"set state\.checkpoints = 2"):
        count_slots(10, 4, 3, 0.9, memory, explicit=True, beside=10)
    assert count_slots(10, 1, "auto", 0.9, memory, explicit=True, beside=10) == 1 + 1
    assert count_slots(10, 6, "auto", 0.9, memory, explicit=True) == 6 + 1
    assert count_slots(10, 6, 4, "0.1KB", memory, explicit=True, beside=10) == 6 + 4  # a size for the cache alone
