"""Drafts change how fast a text comes, never which text: drafting, verification, and drafters that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, add, random_prompts, recorded, run_all, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import SUPPORT

from slotline.core import LLM, SamplingParams
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.proposers.speculation.draft_table import DraftTable
from slotline.proposers.speculation.rejections import Rejections
from slotline.proposers.speculation.verification import reject, standing
from slotline.registry.contracts import Draft, DraftBatch
from slotline.registry.errors import ConfigError, NegotiationError, PluginNotFoundError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
NGRAM = {"drafter.name": "ngram", "drafter.tokens": 4, "drafter.adaptive": False}
LENGTHS = (5, 40, 17, 1, 30, 12)


def pool_of(blocks: int) -> str:
    """`cache.memory` for so many usable blocks of 16 tokens; a token of the tiny Llama takes 1 KiB."""
    return f"{blocks * 16}KiB"


class Guided:
    """Proposes what it was told will come, wrong now and then; keeps what it saw."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]], num_tokens: int, right: float, vocab: int) -> None:
        self.texts, self.num_tokens, self.right, self.vocab = texts, num_tokens, right, vocab
        self.rng = Random(1)
        self.rows: dict[int, list[int]] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        assert row not in self.rows
        self.rows[row] = prompt_token_ids

    def release(self, row: int) -> None:
        del self.rows[row]

    def propose(self, batch: DraftBatch) -> Draft:
        drafts = np.full((len(batch.rows), self.num_tokens), -1, np.int64)
        for i, row in enumerate(batch.rows.tolist()):
            known = batch.token_table[row, : int(batch.num_tokens[i])].tolist()
            assert known[-1] == int(batch.last_token_ids[i])
            assert len(known) == int(batch.positions[i]) + 1
            prompt = self.rows[row]
            text = self.texts[tuple(prompt)]
            for j, token in enumerate(text[len(known) - len(prompt) :][: self.rng.randint(0, self.num_tokens)]):
                wrong = self.rng.randrange(self.vocab)
                drafts[i, j] = token if self.rng.random() < self.right else wrong
        return Draft(token_ids=torch.from_numpy(drafts))


@contextmanager
def drafted_by(llm: LLM, drafter: Any) -> Iterator[None]:
    """The engine with another drafter in its slot."""
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    before, drafting.drafter = drafting.drafter, drafter
    drafting.counts.failures = 0
    try:
        yield
    finally:
        drafting.drafter = before


def guided(prompts: list[list[int]], texts: list[list[int]], right: float = 0.8) -> Guided:
    return Guided({tuple(p): t for p, t in zip(prompts, texts, strict=True)}, 4, right, 384)


# ---- equality


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_greedy_text_is_the_same_whatever_is_drafted(tiny: Tiny, engines: Engines, family: str, right: float) -> None:
    plain, llm = engines(tiny(family)), engines(tiny(family), **NGRAM)
    prompts = random_prompts(LENGTHS, seed=3)
    expected = tokens_of(plain, prompts)
    with drafted_by(llm, guided(prompts, expected, right)):
        assert tokens_of(llm, prompts) == expected


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 16}, {"memory": pool_of(8), "max_num_batched_tokens": 24}]
)
def test_chunks_and_preemption_change_nothing(tiny: Tiny, engines: Engines, settings: dict[str, Any]) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM, **settings)
    prompts = random_prompts((30, 25, 40, 10, 33, 28), seed=8)
    expected = tokens_of(plain, prompts)
    with drafted_by(llm, guided(prompts, expected)):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    if "memory" in settings:
        assert sum(r.metrics.num_preemptions for r in requests) > 0


def test_a_prefix_that_was_cached_under_drafts_is_the_right_one(tiny: Tiny, engines: Engines) -> None:
    """Blocks are remembered by accepted tokens alone: rejected drafts were computed into them and overwritten."""
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((20, 21, 22), seed=4)
    expected = tokens_of(plain, prompts)
    with drafted_by(llm, guided(prompts, expected, 0.5)):
        assert tokens_of(llm, prompts) == expected
        longer = [p + t[:14] for p, t in zip(prompts, expected, strict=True)]
        more = tokens_of(plain, longer)
        with drafted_by(llm, guided(longer, more, 0.5)):
            requests = [add(llm, str(i), prompt) for i, prompt in enumerate(longer)]
            run_all(llm)
    assert [r.output_token_ids for r in requests] == more
    assert all(r.metrics.num_cached_tokens >= 32 for r in requests)


def test_sampled_text_is_the_same_as_without_drafts(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts(LENGTHS, seed=5)
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=20, ignore_eos=True)
    expected = tokens_of(plain, prompts, params)
    with drafted_by(llm, guided(prompts, expected)):
        assert tokens_of(llm, prompts, params) == expected
        assert llm.engine.extension("drafts").drafting.counts.accepted > 0


def test_processors_see_each_draft_position(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama", eos_token_id=2)), engines(tiny("llama", eos_token_id=2), **NGRAM)
    prompts = random_prompts(LENGTHS, seed=6)
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=24,
        min_tokens=9,
        presence_penalty=0.8,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={2: 6.0, 9: 3.0},
    )
    expected = tokens_of(plain, prompts, params)
    with drafted_by(llm, guided(prompts, expected)):
        assert tokens_of(llm, prompts, params) == expected


def test_logprobs_are_those_of_the_tokens_that_stand(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts(LENGTHS, seed=7)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    expected = [o.outputs[0] for o in plain.generate(prompts, params)]
    with drafted_by(llm, guided(prompts, [o.token_ids for o in expected])):
        outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
    for output, right in zip(outputs, expected, strict=True):
        assert output.token_ids == right.token_ids
        assert [list(entry) for entry in output.logprobs] == [list(entry) for entry in right.logprobs]
        for entry, other in zip(output.logprobs, right.logprobs, strict=True):
            assert [v.logprob for v in entry.values()] == pytest.approx([v.logprob for v in other.values()], abs=1e-4)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_inside_accepted_drafts_ends_the_text_there(tiny: Tiny, engines: Engines, at: int) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompt = random_prompts((9,), seed=2)
    full = tokens_of(plain, prompt)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[full[0][at]])
    expected = plain.generate(prompt, params)[0].outputs[0]
    with drafted_by(llm, guided(prompt, full, 1.0)):
        output = llm.generate(prompt, params)[0].outputs[0]
        short = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=at, ignore_eos=True))[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.text) == (
        expected.token_ids,
        expected.finish_reason,
        expected.text,
    )
    assert (short.token_ids, short.finish_reason) == (full[0][:at], "length")


def test_streamed_text_with_drafts_is_the_text(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompt = random_prompts((9,), seed=2)[0]
    expected = plain.generate([prompt], GREEDY)[0].outputs[0]
    with drafted_by(llm, guided([prompt], [expected.token_ids], 1.0)):
        texts = [o.outputs[0].text for o in llm.stream(prompt, GREEDY)]
    assert texts[-1] == expected.text
    assert all(after.startswith(before) for before, after in pairwise(texts))


# ---- rows and schedule


@pytest.mark.behaviour(44, 117)
def test_drafts_stand_behind_the_known_tokens_and_are_cleared(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((9,), seed=2)
    text = tokens_of(llm, prompts)[0]
    with drafted_by(llm, guided(prompts, [text], 1.0)), recorded(llm) as schedules:
        request = add(llm, "a", prompts[0])
        rows, sizes = llm.engine.rows, []
        while llm.engine.has_work:
            llm.engine.step()
            if request.row >= 0:
                known, drafts = int(rows.num_tokens[request.row]), int(rows.num_spec_tokens[request.row])
                place = known - len(prompts[0])
                assert rows.token_ids[request.row, known : known + drafts].tolist() == text[place : place + drafts]
                assert rows.num_computed_tokens[request.row] == known - 1
                sizes.append(drafts)
    assert request.output_token_ids == text
    assert [int(s.num_scheduled[0]) for s in schedules[1:]] == [1 + d for d in sizes]
    assert max(sizes) >= 3


def test_a_guess_never_costs_another_request_its_blocks(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **NGRAM, max_model_len=32, memory=pool_of(2))
    prompts = random_prompts((12, 12), seed=2)
    texts = tokens_of(engines(tiny("llama"), max_model_len=32), prompts)
    expected = [text[: text.index(text[2]) + 1] for text in texts]
    with drafted_by(llm, Rogue("nothing")), recorded(llm) as schedules:
        requests = [
            add(llm, str(i), prompt, SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[text[2]]))
            for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        run_all(llm)
    assert [r.output_token_ids for r in requests] == expected  # each ends inside its first block of 16 tokens
    assert not any(r.metrics.num_preemptions for r in requests)
    assert {int(n) for s in schedules[1:] for n in s.num_scheduled} == {1, 4}  # a guess went where there was room


def test_a_new_proposal_forgets_the_drafts_of_requests_that_waited(tiny: Tiny, engines: Engines) -> None:
    """Their distributions went with the last proposal, and after a token they would stand in the wrong place."""
    llm = engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((9, 9), seed=2)
    texts = tokens_of(llm, prompts)
    with drafted_by(llm, Rogue("nothing")):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        llm.engine.step()
        rows = [request.row for request in requests]
        assert llm.engine.rows.num_spec_tokens[rows].tolist() == [3, 3]
        llm.engine.extension("drafts").drafting.propose(np.array(rows[:1]), None)
        assert llm.engine.rows.num_spec_tokens[rows].tolist() == [3, 0]
        llm.engine.extension("drafts").drafting.drafter = Rogue("propose")
        llm.engine.step()
        assert llm.engine.rows.num_spec_tokens[rows].tolist() == [0, 0]
        run_all(llm)
    assert [request.output_token_ids for request in requests] == texts


def test_acceptance_is_counted(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **NGRAM)
    prompts = random_prompts((9,), seed=2)
    text = tokens_of(llm, prompts)[0]
    drafting = llm.engine.extension("drafts").drafting
    before = (drafting.counts.steps, drafting.counts.proposed, drafting.counts.accepted)
    with drafted_by(llm, guided(prompts, [text], 1.0)), recorded(llm) as schedules:
        assert tokens_of(llm, prompts) == [text]
    proposed = sum(int(s.num_scheduled[0]) - 1 for s in schedules[1:])
    assert drafting.counts.proposed - before[1] == proposed
    assert drafting.counts.accepted - before[2] == proposed
    assert drafting.counts.steps - before[0] == sum(int(s.num_scheduled[0]) > 1 for s in schedules[1:])
    assert drafting.counts.acceptance_length > 1


# ---- drafters that misbehave


class Rogue:
    """Does one thing wrong."""

    def __init__(self, what: str) -> None:
        self.what = what

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        if self.what == "admit":
            raise RuntimeError("admit")

    def release(self, row: int) -> None:
        if self.what == "release":
            raise RuntimeError("release")

    def propose(self, batch: DraftBatch) -> Draft:
        n = len(batch.rows)
        if self.what == "propose":
            raise RuntimeError("propose")
        if self.what == "none":
            return None  # type: ignore[return-value]
        shapes = {"too many": (n, 9), "too few rows": (n - 1, 2), "flat": (n,)}
        ids = torch.full(shapes.get(self.what, (n, 3)), 5)
        if self.what == "vocabulary":
            ids[:, 1] = 384
        if self.what == "negative":
            ids[:, 1] = -2
        if self.what == "probabilities":
            return Draft(token_ids=ids, probabilities=torch.ones(n, 3, 7))
        if self.what == "tree":
            return Draft(token_ids=ids, parents=torch.zeros(3, dtype=torch.int64))
        return Draft(token_ids=ids)


@pytest.mark.parametrize(
    "what",
    [
        "admit",
        "release",
        "propose",
        "none",
        "too many",
        "too few rows",
        "flat",
        "vocabulary",
        "negative",
        "probabilities",
        "tree",
    ],
)
def test_a_drafter_that_fails_costs_drafts_and_nothing_else(
    tiny: Tiny, engines: Engines, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **NGRAM)
    prompts = random_prompts(LENGTHS, seed=3)
    expected = tokens_of(plain, prompts)
    with drafted_by(llm, Rogue(what)):
        assert tokens_of(llm, prompts) == expected
        assert llm.engine.extension("drafts").drafting.counts.failures > 0
    assert [r.message for r in caplog.records if "drafter:" in r.message]


# ---- refusals


@pytest.mark.behaviour(15)
def test_an_unknown_drafter_is_named_with_those_that_exist(tiny: Tiny) -> None:
    with pytest.raises(PluginNotFoundError, match=r"ngrm(.|\n)*ngram"):
        LLM(tiny("llama"), **{"drafter.name": "ngrm"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_tokens": 0}, "min_tokens=0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens=6 and max_tokens=5"),
        ({"most_tokens": 5}, "no key 'most_tokens' .* did you mean"),
        ({"min_tokens": "two"}, "min_tokens"),
    ],
)
def test_options_of_the_ngram_drafter_that_cannot_be_are_refused(
    options: dict[str, Any], says: str, tiny: Tiny
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(tiny("llama"), **NGRAM, **{f"drafter.ngram.{key}": value for key, value in options.items()})


def test_more_drafts_than_the_model_has_room_for_are_refused(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=r"drafter.tokens = 64 does not fit .* max_model_len=64"):
        LLM(tiny("llama"), max_model_len=64, **{"drafter.name": "ngram", "drafter.tokens": 64})


def test_a_processor_that_is_wrong_at_draft_positions_is_refused(tiny: Tiny) -> None:
    script = f"{SUPPORT / 'scripted_tokens.py'}:Script"
    with pytest.raises(NegotiationError, match=r"'script' cannot be used: N162 draft positions"):
        LLM(tiny("llama"), **{**NGRAM, "plugins.inline": (script,)})


def test_the_plan_names_the_drafter_and_its_query_length(tiny: Tiny, engines: Engines) -> None:
    plan = engines(tiny("llama"), **NGRAM).plan
    assert [part.name for part in plan.parts if part.kind == "drafter"] == ["ngram"]
    assert "ngram" in plan.explain()
    assert {group.query_len for group in plan.groups} == {5}


# ---- verification alone


@given(st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_drafts_that_stand_are_those_before_the_first_wrong_one(matches: list[list[bool]]) -> None:
    tokens, drafts, positions, expected = [], [], [], []
    for row in matches:
        right = row.index(False) if False in row else len(row)
        for position, match in enumerate([*row, False]):
            tokens.append(position)
            drafts.append(-1 if position == len(row) else position if match else 99)
            positions.append(position)
            expected.append(position <= right)
    stands = standing(np.array(tokens), np.array(drafts), np.array(positions))
    assert stands.tolist() == expected


@pytest.mark.behaviour(104)
def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    """Chi-square over 40,000 draws of 6 tokens: the 99.9 % point of 5 degrees of freedom is 20.5."""
    n, generator = 40_000, torch.Generator().manual_seed(0)
    target = torch.tensor([0.35, 0.05, 0.2, 0.0, 0.3, 0.1])
    drafter = torch.tensor([0.1, 0.3, 0.25, 0.2, 0.1, 0.05])
    drafts = torch.multinomial(drafter, n, replacement=True, generator=generator).numpy()
    drafts_of_rows = DraftTable(RequestTable(1, 8))
    drafts_of_rows.entry[:] = 0
    drafts_of_rows.num_guesses[:] = 1
    batch = SamplingMetadata(
        rows=np.zeros(n, np.int64),
        positions=np.arange(n),
        temperature=np.ones(n, np.float32),
        top_k=np.zeros(n, np.int64),
        top_p=np.ones(n, np.float32),
        log_floor=np.full(n, -np.inf, np.float32),
        seed=np.full(n, 5, np.uint64),
    )
    rejections = Rejections.gather(drafts_of_rows, batch, np.zeros(n, np.int64), drafts, torch.from_numpy)
    assert rejections is not None
    logits = target.log().expand(n, -1)
    tokens = reject(logits, torch.zeros(n, dtype=torch.int64), drafter.expand(1, 1, -1), rejections)
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[3] == 0
    seen = target > 0
    chi_square = ((counts - n * target) ** 2 / (n * target))[seen].sum()
    assert chi_square < 20.5
    accepted = float((tokens.numpy() == drafts).mean())
    assert accepted >= 1 - 0.5 * float((target - drafter).abs().sum()) - 0.01  # Leviathan et al., corollary 3.6


# ---- the n-gram drafter


def plain_lookup(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What prompt lookup proposes, from its definition."""
    best, place = shortest - 1, None
    for end in range(len(tokens) - 1):
        length = 0
        while length < longest and length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length > best or (length == best and place is not None):
            best, place = length, end + 1
    return [] if place is None else tokens[place : place + count]


@pytest.mark.behaviour(118)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=5), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_the_ngram_drafter_looks_up_the_longest_latest_match(texts: list[list[int]], shortest: int) -> None:
    from slotline.proposers.ngram import NgramOptions
    from slotline.proposers.ngram.drafter import NgramDrafter
    from slotline.registry.contracts import DrafterContext

    context = DrafterContext(
        contract=1,
        num_tokens=3,
        vocab_size=4,
        hidden_size=8,
        max_requests=8,
        max_model_len=40,
        device="cpu",
        dtype="float32",
        options=NgramOptions(min_tokens=shortest, max_tokens=4),
    )
    drafter = NgramDrafter(context)
    table = torch.full((8, 40), 77, dtype=torch.int32)  # garbage behind each text
    rows = torch.randperm(8)[: len(texts)]
    for row, text in zip(rows.tolist(), texts, strict=True):
        table[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    last = torch.tensor([text[-1] for text in texts])
    drafts = drafter.propose(
        DraftBatch(rows=rows, token_table=table, num_tokens=lengths, last_token_ids=last, positions=lengths.long() - 1)
    ).token_ids
    for text, draft in zip(texts, drafts.tolist(), strict=True):
        expected = plain_lookup(text, shortest, 4, 3)
        assert draft == expected + [-1] * (3 - len(expected))


def test_the_ngram_drafter_guesses_text_that_repeats(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **NGRAM)
    prompts = [[5, 6, 7, 8] * 8]
    bias = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={5: 100.0})
    before = llm.engine.extension("drafts").drafting.counts.accepted
    assert tokens_of(llm, prompts, bias) == [[5] * 20]
    assert llm.engine.extension("drafts").drafting.counts.accepted - before >= 8
