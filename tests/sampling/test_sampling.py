"""Sampling: the right distribution, texts that depend on nothing but their seed, and log-probabilities."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_driver import GREEDY, add, random_prompts, run_all
from sampling_cases import allowed, batch, columns, draw, drawn, masked

from slotline.builder import sampling_profile
from slotline.builder.sampling_profile import warm_up
from slotline.core import LLM, Logprob, SamplingParams
from slotline.core.batch.logprobs import pack_logprobs, unpack_logprobs
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.sampling.sampler import uniforms
from slotline.kernels.torch_sampling import scale
from slotline.registry.errors import CapacityError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=16, ignore_eos=True)


# ---- the distribution


def test_temperature_zero_takes_the_most_likely_token_beside_rows_that_sample() -> None:
    logits = torch.randn(60, 50, generator=torch.Generator().manual_seed(0))
    temperature = np.tile([0, 1.5, 0, 0.1, 2, 0], 10)
    rows = batch(60, temperature=temperature, top_k=np.tile([0, 3, 9, 0, 0, 1], 10), seed=np.arange(60))
    tokens, final = drawn(logits.clone(), rows)
    greedy = torch.from_numpy(temperature == 0)
    assert torch.equal(tokens[greedy], logits[greedy].argmax(dim=-1))
    assert torch.equal(final[greedy], logits[greedy])
    assert (tokens[~greedy] != logits[~greedy].argmax(dim=-1)).any()


def test_sampling_does_not_change_its_input() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    drawn(logits, batch(3, top_k=2, top_p=0.5, min_p=0.1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-30, 1e-7, 1e-3])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1)) * 30
    tokens, final = drawn(logits, batch(4, temperature=temperature, seed=np.arange(4)))
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert not final.isnan().any()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 7, "top_p": 0.8},
        {"top_k": 500, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 6, "top_p": 0.7, "min_p": 0.1},
    ],
)
def test_the_tokens_that_may_be_drawn_are_those_of_the_definition(limits: dict[str, float]) -> None:
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(2)) * 2
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    kept = masked(logits, batch(20, **full)) > -torch.inf
    for row in range(20):
        want = allowed(logits[row].double().softmax(-1).numpy(), int(full["top_k"]), full["top_p"], full["min_p"])
        assert kept[row].tolist() == want.tolist()


def test_each_row_has_limits_of_its_own() -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)).repeat(4, 1)
    limits = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.3)]
    mixed = masked(logits, batch(4, top_k=[3 * (i == 1) for i in range(4)], top_p=[1, 1, 0.5, 1], min_p=[0, 0, 0, 0.3]))
    for row, (top_k, top_p, min_p) in enumerate(limits):
        alone = masked(logits[:1], batch(1, top_k=top_k, top_p=top_p, min_p=min_p))
        assert torch.equal(mixed[row], alone[0])


def test_a_row_without_top_p_loses_no_token_to_its_neighbours() -> None:
    """In float32 the running sum of a peaked distribution reaches 1 long before the last token."""
    peaked = torch.linspace(30, -30, 200)[None]
    mixed = masked(peaked.repeat(2, 1), batch(2, top_p=[1.0, 0.5]))
    assert (mixed[0] > -torch.inf).all()
    assert (mixed[1] > -torch.inf).sum() < 10


def test_equal_logits_stay_or_go_together_in_any_batch() -> None:
    tied = torch.zeros(1, 64)
    tied[0, 7] = 1.0
    alone = masked(tied, batch(1, top_k=3))
    beside = masked(torch.cat([tied, torch.randn(1, 64)]), batch(2, top_k=[3, 0], top_p=[1.0, 0.9]))
    assert torch.equal(alone[0], beside[0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 6, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 8, 0.9, 0.1)],
)
@pytest.mark.behaviour(103)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    draws, vocab = 20_000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4)) * 1.5
    probabilities = (logits[0].double() / temperature).softmax(-1).numpy()
    probabilities = np.where(allowed(probabilities, top_k, top_p, min_p), probabilities, 0)
    expected = draws * probabilities / probabilities.sum()
    for varied in ("seed", "positions"):  # over requests, and over the tokens of one request
        rows = batch(
            draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, **{varied: np.arange(draws)}
        )
        tokens, _ = drawn(logits.expand(draws, -1), rows)
        seen = np.bincount(tokens.numpy(), minlength=vocab)
        possible = expected > 0
        assert not seen[~possible].any()
        statistic = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
        assert statistic < 35  # the 99.98 % quantile for 11 degrees of freedom


def test_uniform_numbers_are_uniform_and_independent_between_neighbouring_seeds_and_positions() -> None:
    seeds, positions = np.arange(200, dtype=np.uint64), np.arange(200)
    grid = np.stack([uniforms(np.full(200, seed), positions) for seed in seeds])  # [200, 200]
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 0.005
    for shifted in (grid[1:], grid[:, 1:], grid[1:, 1:]):
        correlation = np.corrcoef(grid[: shifted.shape[0], : shifted.shape[1]].ravel(), shifted.ravel())[0, 1]
        assert abs(correlation) < 0.03


def test_no_probability_means_never_drawn_at_either_end() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 2] = 0.0
    assert draw(logits.expand(500, -1), columns(batch(500, seed=np.arange(500)))).unique().tolist() == [2]


def test_few_tokens_and_many_are_drawn_alike_whatever_rows_are_around() -> None:
    """On a CPU few tokens are summed by themselves; rows with many, and rows without any limit, are not."""
    logits = 3 * torch.randn(60, 400, generator=torch.Generator().manual_seed(0))
    logits[50:55, 3:] = -torch.inf  # three tokens are left, but no limit is asked for
    logits[55:58], logits[58:] = -torch.inf, torch.nan
    limits = {
        "temperature": [0.8] * 58 + [0.7, 0.7],
        "top_k": [5] * 20 + [0] * 30 + [0, 0, 9, 9, 2] + [4] * 5,
        "top_p": [1.0] * 20 + [0.3, 0.999] * 10 + [1.0] * 20,
        "min_p": [0.0] * 40 + [0.2, 1e-9] * 5 + [0.0] * 10,
        "seed": list(range(60)),
    }
    together, final = drawn(logits, batch(60, **limits))
    want = draw(final, columns(batch(60, **limits)))
    assert together[:55].tolist() == want[:55].tolist()
    assert ((together >= 0) & (together < 400)).all()
    for row in range(60):
        only = batch(1, **{name: values[row] for name, values in limits.items()})
        assert drawn(logits[row : row + 1], only)[0].tolist() == together[row : row + 1].tolist(), row


def test_scaling_leaves_greedy_rows_alone() -> None:
    logits = torch.tensor([[2.0, 4.0], [2.0, 4.0]])
    assert scale(logits, columns(batch(2, temperature=[0, 2]))).tolist() == [[2.0, 4.0], [1.0, 2.0]]


# ---- seeds


def text(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


@pytest.fixture
def alone(tiny: Tiny, engines: Engines) -> list[int]:
    """What the seeded request gives alone."""
    return text(engines(tiny("llama")), random_prompts([40], seed=20)[0], SEEDED)


@pytest.mark.behaviour(34, 103)
def test_a_seeded_text_is_the_same_in_another_batch_and_row(tiny: Tiny, engines: Engines, alone: list[int]) -> None:
    llm = engines(tiny("llama"))
    (prompt,) = random_prompts([40], seed=20)
    others = random_prompts([5, 30, 2], seed=21)
    warm = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    for position in range(4):
        prompts = [*others[:position], prompt, *others[position:]]
        params = [SEEDED if p is prompt else warm for p in prompts]
        assert llm.generate(prompts, params)[position].outputs[0].token_ids == alone
    assert len(set(alone)) > 4


@pytest.mark.behaviour(34, 106)
def test_a_seeded_text_is_the_same_in_chunks_of_any_size(tiny: Tiny, engines: Engines, alone: list[int]) -> None:
    for chunk in (7, 24):
        llm = engines(tiny("llama"), **{"scheduler.max_batched_tokens": chunk})
        assert text(llm, random_prompts([40], seed=20)[0], SEEDED) == alone


@pytest.mark.behaviour(34, 106)
def test_a_seeded_text_is_the_same_when_it_is_preempted(tiny: Tiny, engines: Engines, alone: list[int]) -> None:
    llm = engines(tiny("llama"), block_size=4, memory="80KiB")
    first, prompt = random_prompts([30], seed=22)[0], random_prompts([40], seed=20)[0]
    add(llm, "first", first, SamplingParams(temperature=1, max_tokens=30, ignore_eos=True))
    llm.engine.step()
    request = add(llm, "seeded", prompt, SEEDED)
    run_all(llm)
    assert request.metrics.num_preemptions > 0
    assert request.output_token_ids == alone


@pytest.mark.behaviour(34, 103)
@pytest.mark.parametrize("settings", [{"backend": "cpu"}, {"backend": "flex"}, {"scheduler.async": True}], ids=str)
def test_a_seeded_text_is_the_same_with_any_backend_and_way_to_schedule(
    settings: dict[str, Any], tiny: Tiny, engines: Engines
) -> None:
    """Graph modes: tests/device/test_graphs_cuda.py."""
    (prompt,) = random_prompts([40], seed=20)
    want = text(engines(tiny("llama"), backend="torch"), prompt, SEEDED)
    assert text(engines(tiny("llama"), **settings), prompt, SEEDED) == want


@pytest.mark.parametrize("settings", [{}, {"scheduler.async": True}], ids=str)
def test_a_step_runs_no_more_python_for_more_requests(settings: dict[str, Any], tiny: Tiny, engines: Engines) -> None:
    """From the schedule to the hand-out of a decoding step; blocks and the torch backend go by request."""
    wanted = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    wanted |= {"logit_bias": {7: 1.0}, "min_tokens": 30, "allowed_token_ids": list(range(300)), "bad_words": ["x"]}
    wanted |= {"stop_token_ids": list(range(350, 380))}
    llm = engines(tiny("llama"), **{"block_size": 64, "max_num_seqs": 24, **settings})
    lines = []
    for count in (4, 20):
        for index, prompt in enumerate(random_prompts([6] * count, seed=60)):
            add(llm, f"{count}-{index}", prompt, SamplingParams(seed=index, max_tokens=30, ignore_eos=True, **wanted))
        for _ in range(5):
            llm.engine.step()
        lines.append(batched_lines(llm.engine.step))
        run_all(llm)
    assert lines[0] == lines[1]
    assert {"core/sampling/sampler.py", "plugins/logits_processors/penalties/processor.py"} <= set(lines[0])


BATCHED = (
    "core/engine/engine.py",
    "core/model_runner/",
    "core/batch/step_output.py",
    "core/batch/model_inputs.py",
    "core/batch/input_batch_cpu.py",
    "core/batch/placeholder_tokens.py",
    "core/batch/sampling_metadata.py",
    "core/batch/logprobs.py",
    "core/device/transfer_buffer.py",
    "core/sampling/",
    "core/batch/request_table.py",
    "core/engine/stop_checker.py",
    "plugins/logits_processors/",
)


def batched_lines(work: Callable[[], Any]) -> Counter[str]:
    """How often `work` runs a line of each file that handles all rows at once."""
    seen: Counter[str] = Counter()

    def trace(frame: Any, event: str, _: Any) -> Any:
        _, _, file = frame.f_code.co_filename.partition("/slotline/")
        if not file.startswith(BATCHED):
            return None
        seen[file] += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return seen


def test_other_seeds_give_other_texts(tiny: Tiny, engines: Engines) -> None:
    llm, (prompt,) = engines(tiny("llama")), random_prompts([10])
    texts = {
        tuple(text(llm, prompt, SamplingParams(seed=seed, max_tokens=10, ignore_eos=True)))
        for seed in (0, 1, -1, 2**62, -(2**63))
    }
    assert len(texts) == 5


def test_requests_without_a_seed_differ_from_each_other(tiny: Tiny, engines: Engines) -> None:
    llm, (prompt,) = engines(tiny("llama")), random_prompts([10])
    outputs = llm.generate([prompt] * 4, SamplingParams(max_tokens=10, ignore_eos=True))
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 4


def test_n_outputs_differ_and_their_seeds_reproduce_them(tiny: Tiny, engines: Engines) -> None:
    llm, (prompt,) = engines(tiny("llama")), random_prompts([10])
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    texts = [o.token_ids for o in first.outputs]
    assert texts == [o.token_ids for o in second.outputs]
    assert len({tuple(t) for t in texts}) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]


def test_the_highest_seed_serves_many_outputs(tiny: Tiny, engines: Engines) -> None:
    params = SamplingParams(n=2, seed=2**63 - 1, max_tokens=3, ignore_eos=True)
    (output,) = engines(tiny("llama")).generate(random_prompts([10]), params)
    assert len(output.outputs) == 2


def test_the_engines_seed_reproduces_a_whole_run_and_another_one_does_not(tiny: Tiny) -> None:
    from tiny_engines import DEFAULTS

    def run(seed: int) -> list[list[int]]:
        llm = LLM(tiny("llama"), **{**DEFAULTS, "seed": seed})
        outputs = llm.generate(random_prompts([10, 4, 7]), SamplingParams(max_tokens=12, ignore_eos=True))
        return [o.outputs[0].token_ids for o in outputs]

    zero, one = run(0), run(1)
    assert run(0) == zero
    assert all(a != b for a, b in zip(zero, one, strict=True))


def test_the_streams_of_two_engine_seeds_are_not_each_other_shifted() -> None:
    from core_cases import Bench

    bench = Bench()
    request = bench.add("a", 3)
    streams = []
    for seed in (0, 1):
        bench.scheduler.default_seed = seed
        own = np.full(50, bench.scheduler._seed(request), np.uint64)
        streams.append(set(uniforms(own, np.arange(50)).tolist()))
    assert not streams[0] & streams[1]


# ---- log-probabilities


def reference(path: Path, tokens: list[int]) -> torch.Tensor:
    return tiny_models.logits_reference(path, tokens)


def entries_match(entry: dict[int, Logprob], values: torch.Tensor, chosen: int, top: int) -> None:
    """An entry holds the chosen token and the top ones, with value and rank from `values` [vocab_size]."""
    best = values.topk(top).indices.tolist() if top else []
    assert next(iter(entry)) == chosen
    assert set(entry) == {chosen, *best}
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(values[token]), abs=2e-4)
        assert logprob.rank == int((values > values[token]).sum()) + 1


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.behaviour(14, 111)
def test_logprobs_of_each_mode_are_those_of_transformers(mode: str, top: int, tiny: Tiny, engines: Engines) -> None:
    path, (prompt,) = tiny("llama"), random_prompts([12], seed=30)
    llm = engines(path, **{"sampling.logprobs_mode": mode})
    bias = {50: 3.5, 60: -4.0}
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=8, ignore_eos=True, logprobs=top, logit_bias=bias, frequency_penalty=0.8
    )
    output = llm.generate([prompt], params)[0].outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 8
    logits = reference(path, prompt + output.token_ids)[len(prompt) - 1 : -1]
    for i, entry in enumerate(output.logprobs):
        values = logits[i].clone()
        if mode.startswith("processed"):
            for token in output.token_ids[:i]:
                values[token] -= 0.8
            for token, by in bias.items():
                values[token] += by
            values = values / 0.7
        entries_match(entry, values.log_softmax(-1) if mode.endswith("logprobs") else values, output.token_ids[i], top)
    total = sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.behaviour(111)
def test_rows_of_one_batch_get_as_many_logprobs_as_each_asked_for(tiny: Tiny, engines: Engines) -> None:
    llm, prompts = engines(tiny("llama")), random_prompts([5, 6, 7, 8], seed=31)
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=k) for k in (None, 0, 4, 20)]
    found = [o.outputs[0].logprobs for o in llm.generate(prompts, params)]
    assert found[0] is None
    assert [{len(entry) for entry in entries or ()} for entries in found[1:]] == [{1}, {4}, {20}]


@pytest.mark.behaviour(111)
def test_a_token_far_from_the_top_keeps_its_rank(tiny: Tiny, engines: Engines) -> None:
    path, (prompt,) = tiny("llama"), random_prompts([6], seed=32)
    worst = int(reference(path, prompt)[-1].argmin())
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias={worst: 100.0})
    (entry,) = engines(path).generate([prompt], params)[0].outputs[0].logprobs or [{}]
    assert entry[worst].rank == tiny_models.VOCAB_SIZE
    assert len(entry) == 3
    assert entry[worst].decoded_token is not None


def test_top_tokens_come_in_rank_order_after_the_chosen_one() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    packed = pack_logprobs(scores, torch.tensor([2]), 3, normalise=False).numpy()
    (entry,) = unpack_logprobs(packed, [3])
    assert list(entry) == [2, 1, 3]
    assert {token: value.rank for token, value in entry.items()} == {1: 1, 3: 2, 2: 3}
    assert unpack_logprobs(packed, [1])[0] == {2: Logprob(1.0, 3), 1: Logprob(3.0, 1)}


@pytest.mark.parametrize("chunk", [64, 24, 7])
@pytest.mark.behaviour(112)
def test_prompt_logprobs_do_not_depend_on_chunks_and_equal_transformers(
    chunk: int, tiny: Tiny, engines: Engines
) -> None:
    path, (prompt,) = tiny("llama"), random_prompts([40], seed=33)
    llm = engines(path, **{"scheduler.max_batched_tokens": chunk})
    others = random_prompts([10, 3], seed=34)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3), GREEDY]
    found = llm.generate([others[0], prompt, others[1]], params)[1].prompt_logprobs
    assert found is not None
    assert len(found) == 40
    assert found[0] is None
    values = reference(path, prompt).log_softmax(-1)
    for position in range(1, 40):
        entry = found[position]
        assert entry is not None
        entries_match(entry, values[position - 1], prompt[position], 3)


@pytest.mark.behaviour(112)
def test_prompt_logprobs_of_a_preempted_request_are_complete(tiny: Tiny, engines: Engines) -> None:
    path, (first, prompt) = tiny("llama"), random_prompts([30, 30], seed=35)
    llm = engines(path, block_size=4, memory="80KiB")
    add(llm, "first", first, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    request = add(llm, "scored", prompt, params)
    run_all(llm)
    assert request.metrics.num_preemptions > 0
    found = llm.engine.output([request])
    values = reference(path, prompt + request.output_token_ids).log_softmax(-1)
    entries = [*(found.prompt_logprobs or ())[1:], *(found.outputs[0].logprobs or ())]
    assert len(entries) == 49
    for position, entry in enumerate(entries):
        assert entry is not None
        entries_match(entry, values[position], (prompt + request.output_token_ids)[position + 1], 0)


@pytest.mark.behaviour(112)
def test_a_prompt_of_one_token_has_nothing_to_score(tiny: Tiny, engines: Engines) -> None:
    (output,) = engines(tiny("llama")).generate([[5]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs == [None]


# ---- NaN, memory, processors


@pytest.fixture
def poisoned(tiny: Tiny, engines: Engines) -> Iterator[LLM]:
    """An engine whose model gives NaN for a prompt with token 300 in it, and for no other."""
    llm = engines(tiny("llama"), **{"observability.count_nans": True, "cache.prefix_caching": False})
    model: Any = llm.engine.runner.model
    weight = model.hf_model.get_input_embeddings().weight
    kept = weight.data[300].clone()
    weight.data[300] = torch.nan
    yield llm
    weight.data[300] = kept


@pytest.mark.behaviour(105)
def test_nan_logits_are_counted_for_the_request_that_has_them(poisoned: LLM) -> None:
    clean, other = random_prompts([40, 6], seed=40, vocab_size=290)
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logit_bias={9: 100.0}) for n in (1, 4))
    # the first request leaves at once, so rows and places in the batch differ from then on
    outputs = poisoned.generate([clean, other, [5, 300, 6], other], [short, short, long, long])
    assert [o.metrics.num_nans for o in outputs] == [0, 0, tiny_models.VOCAB_SIZE, 0]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error", "length"]


@pytest.mark.behaviour(140)
def test_a_sampler_that_does_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    warm_up(3, 50, "cpu", CpuOps())
    monkeypatch.setattr(sampling_profile, "sample_checked", fail)
    with pytest.raises(CapacityError, match=r"sampling 3 rows of 50 logits[\s\S]*scheduler.max_requests"):
        warm_up(3, 50, "cpu", CpuOps())


def naive_penalties(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    values = logits.clone()
    for token in set(prompt + output):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return values


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.6},
        {"presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 0.8},
    ],
)
@pytest.mark.behaviour(19)
def test_penalties_equal_their_formulas(penalties: dict[str, float], tiny: Tiny, engines: Engines) -> None:
    path, prompts = tiny("llama"), random_prompts([6, 12, 9], seed=50)
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, **penalties)  # type: ignore[arg-type]
    plain = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    outputs = [o.outputs[0].token_ids for o in engines(path).generate(prompts, [params, plain, params])]
    for prompt, tokens in zip([prompts[0], prompts[2]], [outputs[0], outputs[2]], strict=True):
        logits = reference(path, prompt + tokens)[len(prompt) - 1 :]
        want = [int(naive_penalties(logits[i], prompt, tokens[:i], params).argmax()) for i in range(14)]
        assert tokens == want
    assert outputs[1] == reference(path, prompts[1] + outputs[1])[11:-1].argmax(-1).tolist()


@pytest.mark.behaviour(19)
def test_a_row_that_is_used_again_keeps_nothing_of_the_request_before(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), max_num_seqs=1)
    prompts = random_prompts([8, 8], seed=51)
    (plain,) = llm.generate(prompts[1:], GREEDY)
    heavy = SamplingParams(
        temperature=0,
        max_tokens=6,
        ignore_eos=True,
        repetition_penalty=2.0,
        presence_penalty=2.0,
        logit_bias={5: 50.0},
        stop_token_ids=[6],
        min_tokens=5,
    )
    outputs = llm.generate(prompts, [heavy, GREEDY])
    assert outputs[1].outputs[0].token_ids == plain.outputs[0].token_ids
    assert not any(slot.active.any() for slot in llm.engine.pipeline.slots)


@pytest.mark.behaviour(19)
def test_processors_run_in_their_order_whatever_order_they_were_found_in(tiny: Tiny, engines: Engines) -> None:
    from slotline.core.sampling.logits_processors import ProcessorPipeline

    pipeline = engines(tiny("llama")).engine.pipeline
    assert [slot.name for slot in pipeline.slots] == [
        "guidance",
        "penalties",
        "logit_bias",
        "min_tokens",
        "allowed_token_ids",
        "bad_words",
        "speech_rules",
        "forced_tokens",
        "callables",
    ]
    turned = ProcessorPipeline(pipeline.slots[::-1], engines(tiny("llama")).engine.rows, frozenset())
    assert turned.slots == pipeline.slots


@pytest.mark.behaviour(19)
def test_bias_and_minimum_act_together_in_the_right_order(tiny: Tiny, engines: Engines) -> None:
    """A biased stop token must still not come before the minimum."""
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, stop_token_ids=[77], logit_bias={77: 100.0})
    (output,) = engines(tiny("llama")).generate(random_prompts([5]), params)
    tokens = output.outputs[0].token_ids
    assert tokens.index(77) == 4
    assert len(tokens) == 5
    assert output.outputs[0].stop_reason == 77


@pytest.mark.behaviour(19)
def test_raw_logprobs_do_not_see_the_processors_of_the_same_batch(tiny: Tiny, engines: Engines) -> None:
    path, prompts = tiny("llama"), random_prompts([6, 7], seed=52)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, logit_bias={9: 100.0})
    for prompt, output in zip(prompts, engines(path).generate(prompts, params), strict=True):
        (entry,) = output.outputs[0].logprobs or [{}]
        entries_match(entry, reference(path, prompt)[-1].log_softmax(-1), 9, 1)


def test_what_a_row_is_left_does_not_hang_on_the_limits_of_others() -> None:
    limits = [
        (0, 1.0, 0.0),
        (3, 1.0, 0.0),
        (40, 0.8, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.2),
        (10**6, 0.9, 0.1),
        (5, 0.5, 0.3),
    ]
    logits = 3 * torch.randn(len(limits), 90, generator=torch.Generator().manual_seed(0))
    top_k, top_p, min_p = zip(*limits, strict=True)
    together = masked(logits, batch(len(limits), top_k=top_k, top_p=top_p, min_p=min_p))
    for i, (k, p, least) in enumerate(limits):
        alone = masked(logits[i : i + 1], batch(1, top_k=k, top_p=p, min_p=least))
        assert torch.equal(together[i : i + 1], alone)
        kept = allowed(logits[i].double().softmax(-1).numpy(), 0 if k >= 90 else k, p, least)
        assert together[i].isfinite().tolist() == kept.tolist()
