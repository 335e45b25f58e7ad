"""Steps whose forward pass is cut into pieces: the same text, padding with the last piece, refusals with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.planner.plan import make_plan
from slotline.plugins.microbatches.pieces import Microbatches, cut, places_in
from slotline.registry.config import load_config
from slotline.registry.contracts import AttentionBatch
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24}
CUT: dict[str, Any] = {**SETTINGS, "scheduler.microbatches": 2, "scheduler.microbatch_tokens": 2}
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.4
)


@contextmanager
def forwards(llm: LLM) -> Iterator[list[int]]:
    """How many tokens each call of the model's forward inside has."""
    model, seen = llm.engine.runner.model, list[int]()
    original = model.forward

    def forward(input_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(len(input_ids))
        return original(input_ids, *rest, **more)

    model.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del model.forward


@pytest.mark.parametrize(
    ("most", "fewest", "tokens", "padded", "expected"),
    [
        (1, 1, 10, 10, []),
        (2, 5, 10, 10, [(0, 5), (5, 10)]),
        (2, 5, 11, 16, [(0, 5), (5, 16)]),
        (2, 6, 11, 16, []),
        (3, 4, 11, 11, [(0, 5), (5, 11)]),
        (3, 1, 10, 12, [(0, 3), (3, 6), (6, 12)]),
        (4, 1, 2, 8, [(0, 1), (1, 8)]),
        (2, 1, 0, 0, []),
    ],
)
@pytest.mark.behaviour(91)
def test_pieces_are_even_and_the_last_one_takes_the_padding(
    most: int, fewest: int, tokens: int, padded: int, expected: list[tuple[int, int]]
) -> None:
    assert [(each.start, each.stop) for each in Microbatches(most, fewest).pieces(tokens, padded)] == expected


def batch_of(counts: list[int], computed: list[int], padding: int = 0) -> AttentionBatch:
    """A step's batch whose slots tell the request and the position: 100 * request + position."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.array(counts, np.int32) + np.array(computed, np.int32)
    positions = [
        place for count, before in zip(counts, computed, strict=True) for place in range(before, before + count)
    ]
    slots = [100 * r + computed[r] + i for r, count in enumerate(counts) for i in range(count)]
    return AttentionBatch(
        num_requests=len(counts),
        num_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(lens.max()),
        query_start_loc=torch.from_numpy(starts.copy()),
        seq_lens=torch.from_numpy(lens.copy()),
        block_table=torch.arange(len(counts), dtype=torch.int32)[:, None],
        slot_mapping=torch.tensor(slots + [-1] * padding),
        positions=torch.tensor(positions + [0] * padding),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        common_prefix_len=4,
        common_prefix=torch.tensor([4], dtype=torch.int32),
    )


@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6),
    most=st.integers(2, 4),
    padding=st.integers(0, 3),
)
@pytest.mark.behaviour(73, 91)
def test_every_token_has_its_request_position_and_keys_in_one_piece(
    requests: list[tuple[int, int]], most: int, padding: int
) -> None:
    counts, computed = (list(each) for each in zip(*requests, strict=True))
    whole, seen = batch_of(counts, computed, padding), list[tuple[int, int]]()
    pieces = Microbatches(most, 1).pieces(whole.num_tokens, whole.num_tokens + padding)
    for piece in pieces:
        part = cut(whole, piece)
        assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist()
        assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist()
        assert len(part.slot_mapping) == piece.stop - piece.start
        assert (part.common_prefix_len, part.common_prefix) == (0, None)
        starts = part.query_start_loc_cpu.tolist()
        assert (starts[0], starts[-1], len(starts)) == (0, part.num_tokens, part.num_requests + 1)
        lens = np.diff(starts)
        assert lens.min() > 0
        assert (part.max_query_len, part.max_seq_len) == (lens.max(), part.seq_lens_cpu.max())
        assert all(lens[: part.num_decodes] == 1)
        assert part.num_decodes == len(lens) or lens[part.num_decodes] != 1
        for own in range(part.num_requests):
            request = int(part.block_table[own, 0])
            places = part.positions[starts[own] : starts[own + 1]].tolist()
            assert places[-1] == part.seq_lens_cpu[own] - 1, "its queries are its last tokens"
            assert [100 * request + place for place in places] == part.slot_mapping[
                starts[own] : starts[own + 1]
            ].tolist()
            seen += [(request, place) for place in places]
    expected = [(r, computed[r] + i) for r, count in enumerate(counts) for i in range(count)]
    assert seen == (expected if pieces else [])


def test_places_in_a_piece() -> None:
    places = np.array([0, 4, 5, 9])
    assert [places_in(places, slice(*each)) for each in ((0, 5), (5, 9), (9, 12))] == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
    ]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("family", "backend", "settings"),
    [
        ("llama", "torch", {}),
        ("llama", "cpu", {"scheduler.microbatches": 3}),
        ("gemma3", "cpu", {}),
        ("bloom", "torch", {}),
        ("llama", "torch", {"parallel.pipeline": ("cpu",) * 2}),
        ("gpt_oss", "cpu", {"parallel.pipeline": ("cpu",) * 3, "scheduler.microbatches": 3}),
        ("llama", "cpu", {"parallel.pipeline": ("cpu",) * 2, "scheduler.async": True}),
        ("llama", "cpu", {"drafter.name": "ngram", "drafter.tokens": 3, "drafter.ngram.min_tokens": 1}),
    ],
)
@pytest.mark.behaviour(91, 98)
def test_the_text_is_that_of_whole_steps(
    family: str, backend: str, settings: dict[str, Any], tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    """Prompts in chunks, mixed with decodes, and behind cached prefixes; drawn with seeds and penalties, too."""
    path = tiny(family)
    llm = engines(path, backend=backend, **{**CUT, **settings})
    with forwards(llm) as sizes:
        for _ in range(2):
            assert tokens_of(llm, PROMPTS) == [greedy(path, ids, GREEDY.max_tokens or 0) for ids in PROMPTS]
    assert max(sizes) <= 12
    assert min(sizes) < 12
    assert tokens_of(llm, PROMPTS, DRAWN) == tokens_of(engines(path, backend=backend, **SETTINGS), PROMPTS, DRAWN)


def test_log_probabilities_of_prompts_and_outputs_are_the_same(tiny: Tiny, engines: Engines) -> None:
    params = evolve(GREEDY, max_tokens=4, logprobs=3, prompt_logprobs=2)
    found = []
    for settings in (SETTINGS, CUT):
        outputs = engines(tiny("llama"), backend="torch", **settings).generate(PROMPTS, params)
        found.append([(o.prompt_logprobs, o.outputs[0].logprobs) for o in outputs])
    for whole, pieces in zip(*found, strict=True):
        for one, other in zip(whole, pieces, strict=True):
            assert len(one) == len(other)
            for here, there in zip(one, other, strict=True):
                assert (here is None) == (there is None)
                if here is not None:
                    assert {t: e.logprob for t, e in here.items()} == pytest.approx(
                        {t: e.logprob for t, e in there.items()}, abs=1e-4
                    )


def test_steps_with_few_tokens_stay_whole(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), backend="torch", **{**CUT, "scheduler.microbatch_tokens": 12})
    with forwards(llm) as sizes:
        tokens_of(llm, PROMPTS[:2])
    assert sizes[:4] == [12, 12, 13, 2]  # a step of 24 tokens in two pieces, then what is left of the prompts


@pytest.mark.behaviour(91)
def test_the_last_piece_of_a_padded_step_is_extended_to_the_padded_total(tiny: Tiny, engines: Engines) -> None:
    """A step padded to a shape that nothing was captured for runs by itself, in pieces."""
    llm = engines(tiny("llama"), backend="torch", **CUT)
    runner, gatherer = llm.engine.runner, llm.engine.gatherer
    shape = GraphShape(16, 2, 0)
    hidden, sizes = [], list[int]()
    for most in (1, 2):
        inputs = made_up_inputs(gatherer, [2] * 5, seq_len=2, vocab_size=300, shape=shape)
        assert (inputs.num_tokens, inputs.num_padded_tokens) == (10, 16)
        llm.engine.extension("microbatches").rule = Microbatches(most, 2)
        try:
            with forwards(llm) as sizes:
                hidden.append(runner.launch(inputs).hidden)
        finally:
            llm.engine.extension("microbatches").rule = Microbatches(2, 2)
    assert sizes == [5, 11]
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-5, rtol=1e-5)


def planned(path: Path, **settings: Any) -> Any:
    values = {"model": str(path), "device": "cpu", "dtype": "float32", "scheduler.microbatches": 2, **settings}
    return make_plan(load_config(values=values))


@pytest.mark.behaviour(10, 73)
def test_a_plan_says_that_steps_are_cut_and_that_no_prefix_is_served_apart_then(tiny: Tiny) -> None:
    plan = planned(tiny("llama"), **{"attention.backend": "torch", "parallel.pipeline": ("cpu",) * 2}).plan
    settings = {each.key: each for each in plan.settings}
    assert settings["scheduler.microbatches"].resolved == "2"
    assert "pieces of 512 tokens" in settings["scheduler.microbatches"].origin
    assert "overlaps" not in settings["scheduler.microbatches"].origin
    assert settings["attention.cascade"].resolved == "false"
    assert "scheduler.microbatches = 2" in settings["attention.cascade"].origin
    assert {group.cascade for group in plan.groups} == {"none"}
    alone = planned(tiny("llama")).plan
    assert "without pipeline stages nothing overlaps" in alone.explain().replace("\n", " ").replace("  ", "")
    whole = planned(tiny("llama"), **{"scheduler.microbatches": 1, "attention.backend": "torch"}).plan
    assert "scheduler.microbatches" not in {each.key for each in whole.settings}
    assert {group.cascade for group in whole.groups} == {"eager"}


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"attention.cascade": True}, "attention.cascade = true"),
        ("llama", {"task": "embed"}, "task 'embed' reads hidden states of whole prompts"),
        ("bamba", {}, "BambaForCausalLM keeps states"),
        ("llama", {"lora.name": "torch"}, "adapters are planned for all tokens"),
    ],
)
@pytest.mark.behaviour(73)
def test_what_needs_whole_steps_is_refused_with_the_reason(
    family: str, settings: dict[str, Any], reason: str, tiny: Tiny
) -> None:
    with pytest.raises(NegotiationError, match=reason) as caught:
        planned(tiny(family), **settings)
    assert "scheduler.microbatches = 1" in str(caught.value)


def test_a_backend_that_keeps_one_plan_is_refused(tiny: Tiny) -> None:
    backend = str(ROOT / "docs" / "examples" / "pages_of_256.py") + ":PagesOf256"
    with pytest.raises(NegotiationError, match="'pages_of_256' keeps one plan at a time"):
        planned(tiny("llama"), **{"plugins": (backend,), "attention.backend": "pages_of_256"})
