"""The draws of steps that ask for tokens alone: what they leave on the device and on the host, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import transfer_buffer_for
from engine_driver import add, random_prompts, run_all
from sampling_cases import batch, params
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.registry.errors import IntegrityError

pytest.importorskip("triton", reason="the kernels are Triton's")
from slotline.backends.cuda.triton_fast_sampler import FastSampler
from slotline.backends.cuda.triton_sampling import sample_triton

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB_SIZE, MOST = 500, 6
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on a CPU runs the kernels interpreted")

Tiny = Callable[..., Path]


def draws_of(table: PlaceholderTokens, vocab_size: int = VOCAB_SIZE, most: int = MOST) -> FastSampler:
    return FastSampler(table, transfer_buffer_for(DEVICE), most, vocab_size, DEVICE)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_the_tokens_are_the_samplers_and_lie_in_the_table_and_on_the_host(*, greedy: bool, captured: bool) -> None:
    table = PlaceholderTokens(VOCAB_SIZE, MOST, DEVICE)
    draws, n = draws_of(table), 4
    rows = np.array([5, 0, 3, 2])
    stand_ins = torch.from_numpy(table.stand_ins(rows)).to(DEVICE)
    kinds = batch(n, temperature=[0.0, 0.7, 1.0, 2.0], top_k=[0, 0, 9, 0], top_p=[1.0, 0.8, 1.0, 1.0], seed=range(n))
    packed = None if greedy else params(kinds, DEVICE)
    logits = torch.empty(n, VOCAB_SIZE, device=DEVICE)  # the same memory throughout, as that of a graph
    seen = set()
    for step in range(4):
        logits.copy_(torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)))
        kept = draws(logits, packed, stand_ins, captured=captured)
        expected = logits.argmax(-1) if packed is None else sample_triton(logits, packed)[0]
        assert kept[0].equal(expected)
        assert kept[1].wait().tolist() == expected.tolist()
        found = table.tokens[VOCAB_SIZE:].tolist()
        assert [found[row] for row in rows] == expected.tolist()
        assert found[1] == found[4] == 0  # of rows that are not in the step
        seen.add(tuple(expected.tolist()))
    assert len(seen) == 4
    assert table.tokens[:VOCAB_SIZE].equal(torch.arange(VOCAB_SIZE, device=DEVICE))


def test_steps_of_other_sizes_take_the_same_memory_and_what_arrived_stays() -> None:
    table = PlaceholderTokens(VOCAB_SIZE, MOST, DEVICE)
    draws = draws_of(table)
    logits = torch.randn(MOST, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    places = torch.from_numpy(table.stand_ins(np.arange(MOST))).to(DEVICE)
    arrived = []
    for n in (MOST, 1, 3, MOST, 1, 0, 3):
        tokens, arriving = draws(logits[:n], None, places[:n], captured=True)
        assert tokens.tolist() == logits[:n].argmax(-1).tolist()
        arrived.append((n, arriving.wait()))
    for n, tokens in arrived:
        assert tokens.tolist() == logits[:n].argmax(-1).tolist()


def test_graphs_share_memory_and_rows_of_logits_in_it_may_be_of_another_length() -> None:
    """As a head with adapters leaves them: its product has columns behind the vocabulary's."""
    table, n = PlaceholderTokens(VOCAB_SIZE, MOST, DEVICE), 3
    draws = draws_of(table)
    places = torch.from_numpy(table.stand_ins(np.arange(n))).to(DEVICE)
    memory = torch.randn(n * (VOCAB_SIZE + 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    packed = params(batch(n, seed=range(n)), DEVICE)
    for width in (VOCAB_SIZE, VOCAB_SIZE + 16, VOCAB_SIZE):
        logits = memory[: n * width].view(n, width)[:, :VOCAB_SIZE]
        for given in (None, packed):
            expected = logits.argmax(-1) if given is None else sample_triton(logits, given)[0]
            assert draws(logits, given, places, captured=True)[0].equal(expected)


def test_logits_that_there_is_no_room_for_are_refused() -> None:
    table = PlaceholderTokens(VOCAB_SIZE, MOST, DEVICE)
    draws = draws_of(table)
    for shape in ((MOST + 1, VOCAB_SIZE), (1, VOCAB_SIZE + 1)):
        places = torch.zeros(shape[0], dtype=torch.int64, device=DEVICE)
        with pytest.raises(IntegrityError, match=f"logits {shape[0]} x {shape[1]} .* room for {MOST} x {VOCAB_SIZE}"):
            draws(torch.zeros(shape, device=DEVICE), None, places, captured=True)


class Counted:
    """An engine's draws, counted; on a CPU the kernels run interpreted."""

    def __init__(self, llm: LLM) -> None:
        self.rows = list[list[int]]()
        engine = llm.engine
        table = engine.runner.last_tokens
        assert table is not None
        own = draws_of(table, engine.limits.vocab_size, engine.rows.max_requests)

        def counted(logits: torch.Tensor, *rest: Any, **more: Any) -> Any:
            self.rows.append(list(logits.shape))
            return own(logits, *rest, **more)

        engine.runner.head.plain_draws = counted  # type: ignore[assignment]


SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24, "scheduler.max_requests": 4}
ON: dict[str, Any] = {"scheduler.async": True, "observability.check_integrity": True}


@interpreted
@pytest.mark.behaviour(20, 55)
def test_an_engine_draws_the_same_tokens_plainly(tiny: Tiny) -> None:
    prompts, outputs = random_prompts([3, 33, 17, 40, 1, 25]), []
    for plainly in (True, False):
        llm = LLM(tiny("llama"), **{**DEFAULTS, **SMALL, **ON})
        counted = Counted(llm)
        if not plainly:
            llm.engine.runner.head.plain_draws = None
        requests = [
            add(llm, f"r{i}", prompt, SamplingParams(temperature=i % 2, seed=i, max_tokens=7 + i, ignore_eos=True))
            for i, prompt in enumerate(prompts)
        ]
        run_all(llm)
        outputs.append([request.output_token_ids for request in requests])
        assert bool(counted.rows) == plainly
    assert outputs[0] == outputs[1]


ASKING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logprobs": 1}, {}),
    ({"prompt_logprobs": 1}, {}),
    ({"min_tokens": 2, "stop_token_ids": [5]}, {}),
    ({"repetition_penalty": 1.5, "bad_words_token_ids": [[5]]}, {}),
    ({"guidance_scale": 1.5}, {}),
    ({}, {"observability.count_nans": True}),
]


@interpreted
@pytest.mark.parametrize(("asked", "settings"), ASKING, ids=lambda value: next(iter(value), "plain"))
def test_a_step_that_asks_for_more_is_not_drawn_plainly(
    asked: dict[str, Any], settings: dict[str, Any], tiny: Tiny
) -> None:
    llm = LLM(tiny("llama"), **{**DEFAULTS, **SMALL, **ON, **settings})
    counted = Counted(llm)
    add(llm, "more", random_prompts([9])[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **asked))
    run_all(llm)
    assert all(rows == 0 for rows, _ in counted.rows) or "prompt_logprobs" in asked  # its prompt's step alone asks
    before = len(counted.rows)
    add(llm, "plain", random_prompts([9])[0], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    run_all(llm)
    assert (len(counted.rows) > before) == (not settings)


@interpreted
@pytest.mark.behaviour(102)
def test_steps_are_drawn_plainly_behind_processors_that_keep_logits_finite(tiny: Tiny) -> None:
    asked: list[dict[str, Any]] = [{"repetition_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {5: 4.0}}, {}]
    prompts, outputs = random_prompts([9, 4, 14]), []
    llm = LLM(tiny("llama"), **{**DEFAULTS, **SMALL, **ON})
    counted, head = Counted(llm), llm.engine.runner.head
    for draws in (head.plain_draws, None):
        head.plain_draws = draws  # type: ignore[union-attr]
        before = len(counted.rows)
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=6, **one) for i, one in enumerate(asked)]
        requests = [add(llm, f"{before} {i}", prompts[i], one) for i, one in enumerate(params)]
        run_all(llm)
        outputs.append([request.output_token_ids for request in requests])
        assert (len(counted.rows) > before + 4) == (draws is not None)
    assert outputs[0] == outputs[1]


@interpreted
@pytest.mark.behaviour(102)
def test_tokens_are_banned_before_plain_draws() -> None:
    llm = LLM(device="cpu", memory="64MiB", max_model_len=128, **ON)
    counted, head, outputs = Counted(llm), llm.engine.runner.head, []
    wanted = [StructuredOutputsParams(regex="[0-9]{2}!"), None, StructuredOutputsParams(choice=["a"])]
    params = [SamplingParams(temperature=0, max_tokens=3, structured_outputs=one) for one in wanted]
    for draws in (head.plain_draws, None):
        head.plain_draws = draws  # type: ignore[union-attr]
        before = len(counted.rows)
        found = [output.outputs[0] for output in llm.generate(["x = "] * 3, params)]
        outputs.append([(one.text, one.finish_reason) for one in found])
        assert (len(counted.rows) > before) == (draws is not None)
    assert outputs[0] == outputs[1]
    assert re.match(r"\d\d", outputs[0][0][0])
    assert outputs[0][2] == ("a", "stop")


@interpreted
@pytest.mark.behaviour(102)
def test_a_row_without_a_token_left_is_not_drawn_plainly() -> None:
    llm = LLM(device="cpu", memory="64MiB", max_model_len=128, **ON)
    counted = Counted(llm)
    # A text that may only end, where end-of-sequence tokens are banned and the state is not asked whether it is over.
    params = SamplingParams(max_tokens=8, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="ab?"))
    grammars = llm.engine.extension("structured_output")
    grammars._accept = lambda rows, token_ids, ended: (_accept_all(grammars, rows, token_ids), {})[1]
    (output,) = llm.generate(["x"], [params])
    assert (output.outputs[0].finish_reason, output.outputs[0].text[:1]) == ("error", "a")
    assert counted.rows  # those before


def _accept_all(grammars: Any, rows: Any, token_ids: Any) -> None:
    for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
        grammars._state(row).accept([token])
