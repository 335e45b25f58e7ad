"""The drafter `suffix`: held against its definition, with texts that leave and a ring that overflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.proposers.suffix import SuffixOptions
from slotline.proposers.suffix.drafter import SuffixDrafter
from slotline.registry.contracts import DraftBatch, DrafterContext
from slotline.registry.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SUFFIX = {"drafter.name": "suffix", "drafter.tokens": 4, "drafter.adaptive": False}
ROWS, LENGTH, K = 4, 48, 5


def drafter(**options: Any) -> SuffixDrafter:
    context = DrafterContext(
        contract=1,
        num_tokens=K,
        vocab_size=8,
        hidden_size=8,
        max_requests=ROWS,
        max_model_len=LENGTH,
        device="cpu",
        dtype="float32",
        options=SuffixOptions(**options),
    )
    return SuffixDrafter(context)


def proposed(made: SuffixDrafter, texts: dict[int, list[int]]) -> list[list[int]]:
    """Its proposal for texts on rows, each up to the first -1; what lies behind the texts is garbage."""
    table = torch.full((ROWS, LENGTH), 77, dtype=torch.int32)
    for row, text in texts.items():
        table[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts.values()], dtype=torch.int32)
    batch = DraftBatch(
        rows=torch.tensor(list(texts)),
        token_table=table,
        num_tokens=lengths,
        last_token_ids=torch.tensor([text[-1] for text in texts.values()]),
        positions=lengths.long() - 1,
    )
    ids = made.propose(batch).token_ids.tolist()
    return [row[: row.index(-1)] if -1 in row else row for row in ids]


def voted(text: list[int], source: Sequence[int], options: SuffixOptions, *, own: bool) -> tuple[list[int], float]:
    """The draft from one source and its score, from the definition: all places of the longest match vote."""
    ends = range(len(source) - 1 if own else len(source))
    lengths = {}
    for end in ends:
        length = 0
        while length < min(options.max_depth, len(text), end + 1) and source[end - length] == text[-1 - length]:
            length += 1
        if length >= options.min_tokens:
            lengths[end] = length
    if not lengths:
        return [], 0.0
    lengths = dict(sorted(lengths.items(), reverse=True)[: options.max_places])
    best = max(lengths.values())
    alive = sorted((end for end, length in lengths.items() if length == best), reverse=True)
    total, draft, score = len(alive), list[int](), 0.0
    while len(draft) < min(K, max(1, int(options.factor * best))):
        reach = [*source, *draft] if own else source
        found = [reach[end + 1 + len(draft)] if end + 1 + len(draft) < len(reach) else -1 for end in alive]
        counts = {token: found.count(token) for token in found if token >= 0}
        if not counts or max(counts.values()) < options.min_probability * total:
            break
        token = max(counts, key=lambda t: counts[t])  # of equals the one of the latest place
        alive = [end for end, t in zip(alive, found, strict=True) if t == token]
        draft.append(token)
        score += counts[token] / total
    return draft, score


@pytest.mark.spread(1)
@pytest.mark.parametrize("past_tokens", [0, 7, 60, 4096])
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_drafts_are_those_of_the_definition(past_tokens: int, factor: float) -> None:
    """Requests come, grow and leave on four rows; few tokens, so that passages repeat."""
    rng, past, live = Random(past_tokens), list[int](), dict[int, tuple[int, list[int]]]()
    options = SuffixOptions(past_tokens=past_tokens, factor=factor, max_places=40, min_probability=0.4, max_depth=6)
    made = drafter(past_tokens=past_tokens, factor=factor, max_places=40, min_probability=0.4, max_depth=6)
    drafted = 0
    for _ in range(400):
        for row in range(ROWS):
            if row not in live and rng.random() < 0.5:
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
                made.admit(row, prompt)
                live[row] = (len(prompt), prompt)
            elif row in live:
                live[row][1].extend(rng.randrange(3) for _ in range(rng.randint(1, 4)))
        shown = {row: text for row, (_, text) in live.items() if rng.random() < 0.8}
        if shown:
            for (row, text), draft in zip(shown.items(), proposed(made, shown), strict=True):
                own, score = voted(text, text, options, own=True)
                other, more = voted(text, past[-past_tokens:] if past_tokens else [], options, own=False)
                assert draft == (other if more > score else own), (row, text)
                drafted += len(draft)
        for row, (prompt, text) in tuple(live.items()):
            if len(text) > 40:
                proposed(made, {row: text})
                made.release(row)
                first = max(0, prompt - 6)
                if past_tokens and len(text) - first > 2:
                    past += [*text[first:], -1]
                del live[row]
    assert drafted > 500


def test_a_text_that_was_generated_before_is_proposed_again(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **SUFFIX)
    prompts = random_prompts((9, 14, 5), seed=2)
    expected = tokens_of(plain, prompts)
    counts = llm.engine.extension("drafts").drafting.counts
    assert tokens_of(llm, prompts) == expected
    first = counts.accepted
    assert tokens_of(llm, prompts) == expected
    assert counts.accepted - first >= first + 20
    assert counts.failures == 0


def test_sampled_text_is_the_same_with_it(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **SUFFIX)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, repetition_penalty=0.6)
    prompts = random_prompts((9, 14, 5), seed=4)
    for _ in range(2):
        assert tokens_of(llm, prompts, params) == tokens_of(plain, prompts, params)
    assert tokens_of(llm, prompts, GREEDY) == tokens_of(plain, prompts, GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 0},
        {"min_tokens": 30},
        {"max_places": 0},
        {"past_tokens": -1},
        {"factor": 0},
        {"min_probability": 2},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        SuffixOptions(**options)


def test_memory_does_not_grow_with_what_was_generated() -> None:
    made = drafter(past_tokens=1000)

    def sizes() -> dict[str, int]:
        return {name: value.nbytes for name, value in vars(made).items() if isinstance(value, np.ndarray)}

    before, rng = sizes(), Random(0)
    for _ in range(100):
        made.admit(0, [1, 2])
        proposed(made, {0: [1, 2, *(rng.randrange(8) for _ in range(40))]})
        made.release(0)
    assert sizes() == before
