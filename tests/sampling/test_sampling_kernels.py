"""The sampler's Triton kernels against definitions in float64 and against torch: on the card where there is one, else
in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from devices import transfer_buffer_for
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import allowed, batch, params, sample

from slotline.core.batch.logprobs import pack_logprobs
from slotline.core.batch.sampling_metadata import PACKED_WIDTH, PackedParameters, SamplingMetadata
from slotline.core.device.torch_ops import TorchOps
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.core.sampling.logits_processors import NONE_LEFT, NOT_FINITE
from slotline.core.sampling.sampler import uniforms
from slotline.kernels.torch_sampling import draw_torch

pytest.importorskip("triton", reason="the kernels are Triton's")
from slotline.backends.cuda import triton_argmax as triton_likeliest
from slotline.backends.cuda import triton_sampling
from slotline.backends.cuda.triton_logits_ops import mark_unusable

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_the_card = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
MIXES = [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 6, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 8, 0.9, 0.1)]


def run(logits: torch.Tensor, rows: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' tokens and least logits, on the host."""
    tokens, least = triton_sampling.sample_triton(logits.to(DEVICE), params(rows, DEVICE))
    return tokens.cpu(), least.cpu()


def random_logits(n: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def nucleus(scaled: np.ndarray, top_k: int, top_p: float, floor: float) -> float:
    """The smallest logit that the limits keep, from the definitions."""
    ordered = np.sort(scaled[scaled >= floor])[::-1]
    ordered = ordered[: top_k or None]
    weights = np.exp(ordered - ordered[0])
    before = np.cumsum(weights) - weights
    kept = (before < top_p * weights.sum()) if top_p < 1 else np.ones(len(ordered), bool)
    kept[0] = True
    return float(ordered[kept][-1])


def right(logits: np.ndarray, rows: SamplingMetadata, i: int, token: int, least: float) -> None:
    """A row's token and least logit are the definitions', with room for the rounding of float32 sums."""
    assert 0 <= token < logits.shape[-1]
    row = np.where(np.isnan(logits[i]), -np.inf, logits[i])
    if rows.temperature[i] == 0:
        assert token == int(row.argmax())
        return
    scaled = row / np.maximum(rows.temperature[i], np.float32(1e-6))  # float32, as the definition says
    floor = float(scaled.max() + rows.log_floor[i])
    limits = int(rows.top_k[i]), floor
    loose, tight = (nucleus(scaled, limits[0], float(rows.top_p[i]) * by, limits[1]) for by in (1 + 1e-5, 1 - 1e-5))
    if rows.top_p[i] == 1:
        loose = tight = nucleus(scaled, limits[0], 1.0, limits[1])
    kept = scaled >= least
    assert (scaled >= tight).sum() <= kept.sum() <= (scaled >= loose).sum()
    weights = np.where(kept, np.exp(scaled.astype(np.float64) - scaled.max()), 0)
    cumulative = np.cumsum(weights) / weights.sum()
    number = float(uniforms(rows.seed[i : i + 1], rows.positions[i : i + 1])[0])
    assert weights[token] > 0
    assert cumulative[token] - weights[token] / weights.sum() - 1e-5 <= number <= cumulative[token] + 1e-5


@st.composite
def cases(draw: Any) -> tuple[torch.Tensor, SamplingMetadata]:
    """Logits with ties, masked tokens and flat or peaked rows, and a mix of parameters."""
    n, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**31))
    vocab_size = draw(st.sampled_from([1, 2, 31, 32, 33, 500, 4097, 9000]))
    logits = random_logits(n, vocab_size, seed, draw(st.sampled_from([0.01, 1.0, 5.0])))
    if draw(st.booleans()):
        logits = logits.round()
    if draw(st.booleans()):
        logits[random_logits(n, vocab_size, seed + 1, 1.0) < draw(st.sampled_from([0.0, 2.5]))] = -torch.inf
        logits[:, seed % vocab_size] = 0

    def by_row(values: list[float]) -> list[float]:
        return draw(st.lists(st.sampled_from(values), min_size=n, max_size=n))

    rows = batch(
        n,
        temperature=by_row([0.0, 1e-7, 0.3, 1.0, 1.7, 50.0]),
        top_k=by_row([0, 1, 2, 40, 129, 3000, 2**40]),
        top_p=by_row([1.0, 0.95, 0.5, 1e-6]),
        min_p=by_row([0.0, 0.0, 1e-3, 0.2, 1.0]),
        seed=[seed + i for i in range(n)],
        positions=np.arange(n) * 7,
    )
    return logits, rows


@settings(max_examples=60, deadline=None)
@given(cases())
def test_tokens_and_thresholds_are_those_of_the_definitions(case: tuple[torch.Tensor, SamplingMetadata]) -> None:
    logits, rows = case
    tokens, least = run(logits, rows)
    for i in range(len(tokens)):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_tokens_and_masked_logits_are_those_of_torch(case: tuple[torch.Tensor, SamplingMetadata]) -> None:
    """Random numbers and sums that lie so close together that rounding decides are rarer than these examples."""
    logits, rows = case
    if (rows.top_p < 1e-3).any() or (rows.temperature < 1e-3).any():
        rows = batch(1, top_k=5)
        logits = logits[:1]
    tokens, least = run(logits, rows)
    want, final, _ = draw_torch(logits, rows, params(rows), keep_final=True)
    assert final is not None
    scaled = logits / PackedParameters(params(rows)).temperature[:, None]
    assert torch.equal(scaled.masked_fill(scaled < least[:, None], -torch.inf), final)
    assert torch.equal(tokens, want)


@on_the_card  # the interpreter would take minutes; the same draws are tested against torch's
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.behaviour(103)
def test_draws_follow_the_distribution(mix: tuple[float, int, float, float]) -> None:
    temperature, top_k, top_p, min_p = mix
    draws, vocab_size = 20_000, 12
    logits = random_logits(1, vocab_size, 4, 1.5)
    probabilities = (logits[0].double() / temperature).softmax(-1).numpy()
    probabilities = np.where(allowed(probabilities, top_k, top_p, min_p), probabilities, 0)
    expected = draws * probabilities / probabilities.sum()
    rows = batch(draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=np.arange(draws))
    seen = np.bincount(run(logits.expand(draws, -1).contiguous(), rows)[0].numpy(), minlength=vocab_size)
    possible = expected > 0
    assert not seen[~possible].any()
    assert ((seen - expected)[possible] ** 2 / expected[possible]).sum() < 35  # the 99.98 % quantile for 11 degrees


@pytest.mark.behaviour(34, 103)
def test_a_row_gives_the_same_bits_alone_and_in_any_batch() -> None:
    logits = torch.cat([random_logits(3, 6000, 5), random_logits(3, 6000, 6, 0.1)])
    rows = batch(
        6, temperature=[0.7, 1.0, 0.0, 1.2, 1.0, 0.9], top_k=[0, 40, 0, 0, 500, 0], top_p=[0.9, 0.9, 1, 0.8, 1, 1]
    )
    tokens, least = run(logits, rows)
    for i in range(6):
        one = batch(1, temperature=rows.temperature[i], top_k=rows.top_k[i], top_p=rows.top_p[i])
        alone = run(logits[i : i + 1], one)
        assert (int(alone[0]), float(alone[1])) == (int(tokens[i]), float(least[i]))


def test_equal_logits_stay_or_go_together() -> None:
    tied = torch.zeros(2, 5000)
    tied[:, 77] = 1.0
    _, least = run(tied, batch(2, top_k=[3, 0], top_p=[1.0, 0.5]))
    assert least.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_masked_logits_are_not_kept_by_a_top_k_of_all_others(top_k: int, top_p: float) -> None:
    logits = torch.full((2, 31), -torch.inf)
    logits[0, [0, 23]] = torch.tensor([0.0, -0.0232])
    logits[1, [4, 9]] = 1.0
    rows = batch(2, temperature=[1e-7, 1.0], top_k=top_k, top_p=top_p)
    tokens, least = run(logits, rows)
    for i in range(2):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))
    if (top_k, top_p) == (2, 1.0):
        assert least.tolist() == [float(logits[0, 23] / 1e-6), 1.0]


def test_the_first_of_the_largest_logits_is_taken_by_a_greedy_row() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [70, 71, 4000]] = 3.0
    tokens, _ = run(logits, batch(2, temperature=[0, 1]))
    assert int(tokens[0]) == 70


def test_rows_of_nothing_but_nan_and_infinity_give_tokens_of_the_vocabulary() -> None:
    logits = torch.zeros(6, 1000)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.inf
    logits[3, 5] = torch.nan
    logits[4, 5] = torch.inf
    for temperature in (0.0, 1.0):
        for limits in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}):
            rows = batch(6, temperature=[temperature] * 5 + [1.0], seed=np.arange(6), **limits)
            tokens, _ = run(logits, rows)
            assert ((tokens >= 0) & (tokens < 1000)).all()
            assert int(tokens[4]) == 5
    nan = run(logits, batch(6, temperature=[0.0] * 5 + [1.0]))[0]
    assert int(nan[3]) == int(logits[3].argmax()) == 5


def test_the_logits_kept_may_lie_in_one_group_or_in_all_of_them() -> None:
    logits = random_logits(4, 9000, 8, 0.5)
    logits[0, 320:400] += 30  # 80 neighbours, top-k within them
    logits[1, ::100] += 30  # one in each group at most
    rows = batch(4, top_k=[50, 60, 700, 0], top_p=[0.9, 1.0, 0.9, 0.97])
    tokens, least = run(logits, rows)
    for i in range(4):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))


@pytest.mark.parametrize("vocab_size", [262_144, 300_001])
def test_a_large_vocabulary_fills_the_groups(vocab_size: int) -> None:
    count = 4 if DEVICE == "cuda" else 3  # the last row, a flat nucleus, is slow in the interpreter
    logits = random_logits(count, vocab_size, 9, 2.0)
    top_k, top_p, min_p = [50, 0, 0, 0], [0.9, 1, 1, 0.3], [0, 0.2, 0, 0]
    rows = batch(
        count, temperature=[1, 1, 0, 0.8][:count], top_k=top_k[:count], top_p=top_p[:count], min_p=min_p[:count], seed=7
    )
    tokens, least = run(logits, rows)
    for i in range(count):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))


def test_logits_that_are_not_contiguous_and_no_rows_at_all() -> None:
    logits = random_logits(3, 700, 10)
    rows = batch(3, top_k=20, seed=np.arange(3))
    want, _ = run(logits, rows)
    wide = torch.zeros(3, 1400)
    wide[:, ::2] = logits
    assert torch.equal(run(wide[:, ::2], rows)[0], want)
    assert run(logits[:0], batch(0))[0].shape == (0,)


@on_the_card
@pytest.mark.behaviour(30, 88)
def test_a_sampling_step_never_waits_for_the_device() -> None:
    n, staging = 16, transfer_buffer_for("cuda")
    staging.reserve(reserved_bytes((n, PACKED_WIDTH), np.int32))
    logits = random_logits(n, 5000, 11).cuda()
    mixed = batch(n, temperature=[0.0, 0.7] * 8, top_k=[0, 40, 3, 0] * 4, top_p=[1, 0.9] * 8, min_p=[0.0, 0.1] * 8)
    greedy = batch(n, temperature=0.0)

    def step(rows: SamplingMetadata) -> torch.Tensor:
        staging.begin()
        sent = None if rows.all_greedy else staging.upload(rows.packed())
        staging.flush()
        staging.mark()
        tokens, final = sample(logits, rows, sent, keep_final=True)
        assert final is not None
        staging.download(pack_logprobs(final, tokens, 5, normalise=True))
        return tokens

    wanted = [step(rows) for rows in (mixed, greedy)]  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(rows) for rows in (mixed, greedy)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert torch.equal(found[0].cpu(), sample(logits.cpu(), mixed, params(mixed))[0])


@pytest.mark.parametrize("vocab_size", [5, 8192, 20_000])
@pytest.mark.parametrize("all_touched", [True, False])
def test_rows_that_nothing_can_be_drawn_from_are_marked_as_in_torch(vocab_size: int, all_touched: bool) -> None:
    raw = random_logits(8, vocab_size, 3)
    raw[1, 3] = torch.nan  # the model's own
    logits = raw.clone()
    logits[2, vocab_size - 1] = torch.nan
    logits[3, 0] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    touched = np.array([True] * 7 + [all_touched])
    if not all_touched:
        touched[3] = False
    in_torch = partial(TorchOps().mark_unusable, logits, raw, not_finite=NOT_FINITE, none_left=NONE_LEFT)
    tokens = torch.arange(8) % vocab_size
    which = None if all_touched else torch.from_numpy(touched)
    want = in_torch(which, tokens, all_greedy=False)
    assert want.tolist() == [0, 1, NOT_FINITE, 3 if not all_touched else NOT_FINITE, NONE_LEFT, *(tokens[5:].tolist())]

    def mark(places: torch.Tensor, *, all_greedy: bool) -> torch.Tensor:
        return mark_unusable(
            *(tensor.to(DEVICE) for tensor in (logits, raw)),
            None if which is None else which.to(DEVICE),
            places.to(DEVICE),
            not_finite=NOT_FINITE,
            none_left=NONE_LEFT,
            all_greedy=all_greedy,
        )

    assert mark(tokens, all_greedy=False).tolist() == want.tolist()
    best = logits.argmax(dim=-1)
    greedy = in_torch(which, best, all_greedy=True)
    assert torch.equal(greedy, in_torch(which, best, all_greedy=False))
    assert greedy.tolist() == mark(best, all_greedy=True).tolist()


@pytest.mark.parametrize(("room", "listed"), [(16, 16), (256, 16), (256, 256)])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 4.0])
def test_a_nucleus_deeper_than_the_first_look_is_the_definitions(
    spread: float, room: int, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "TILE", 8)  # 94 groups are many, then
    monkeypatch.setattr(triton_sampling, "ROOM", room)  # what overflows is searched without a list
    monkeypatch.setattr(triton_sampling, "LISTED", listed)  # longer lists are read in parts
    logits = random_logits(5, 3000, 9, spread)
    logits[3] = logits[3].round(decimals=1)  # equal ones at every place
    logits[4, ::3] = -torch.inf
    rows = batch(5, top_p=[0.9, 0.999, 0.5, 0.8, 0.95], temperature=[0.8, 1.0, 1.5, 1.0, 1.0], seed=list(range(5)))
    tokens, least = run(logits, rows)
    for i in range(5):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))


@pytest.mark.parametrize("limits", [{"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 1500}, {"top_k": 1500, "top_p": 0.7}])
def test_rows_that_other_programs_sum_up_keep_what_torch_keeps(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampling, "TILE", 8)
    logits = random_logits(6, 3000, 12, 1.0)
    logits[1] += 40  # rounded to fewer places, and so are quotients
    logits[2, ::7] = torch.nan
    logits[3, 5] = torch.inf
    rows = batch(6, temperature=[0.8, 0.3, 1.0, 1.0, 3.0, 0.7], seed=np.arange(6), **limits)
    tokens, least = run(logits, rows)
    logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    want, final, _ = draw_torch(logits, rows, params(rows), keep_final=True)
    assert final is not None
    scaled = logits / PackedParameters(params(rows)).temperature[:, None]
    finite = [0, 1, 2, 4, 5]
    assert torch.equal(scaled.masked_fill(scaled < least[:, None], -torch.inf)[finite], final[finite])
    assert torch.equal(tokens[finite], want[finite])
    assert int(tokens[3]) == 5


def test_rows_without_limits_need_two_launches() -> None:
    logits = random_logits(3, 20_000, 13)
    plain, limited = batch(3, temperature=[0.0, 1.0, 0.7]), [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}]
    assert not triton_sampling.are_limited(plain)
    assert all(triton_sampling.are_limited(batch(3, **limits)) for limits in limited)
    sent = params(plain, DEVICE)
    scratch = triton_sampling.Scratch.of(3, 20_000, DEVICE)
    few = triton_sampling.launches(logits.to(DEVICE), sent, scratch, limited=False)
    assert (len(few), len(triton_sampling.launches(logits.to(DEVICE), sent, scratch))) == (2, 4)
    for launch in few:
        launch()
    assert torch.equal(scratch.tokens.cpu(), run(logits, plain)[0])


@pytest.mark.parametrize(
    ("n", "dtype"), [(0, torch.float32), (1, torch.float16), (2, torch.float32), (3, torch.float32)]
)
@pytest.mark.parametrize("vocab_size", [3, 500, 1003])
def test_the_likeliest_token_is_the_first_of_the_largest(
    n: int, vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":  # the interpreter takes its time for each program
        for name, size in (("MANY_ROWS", 2), ("PARTS", 4), ("FEW_PARTS", 2), ("BLOCK", 128)):
            monkeypatch.setattr(triton_likeliest, name, size)
    generator = torch.Generator().manual_seed(n + vocab_size)
    logits = torch.randint(0, 40, (n, vocab_size + 5), generator=generator).to(DEVICE, dtype)[:, :vocab_size]  # ties
    assert triton_likeliest.likeliest_triton(logits).equal(logits.argmax(-1))
    if n > 1:
        logits[1] = -torch.inf
        logits[0, vocab_size // 2] = torch.nan
        expected = logits.argmax(-1)
        assert expected[:2].tolist() == [vocab_size // 2, 0]
        assert triton_likeliest.likeliest_triton(logits).equal(expected)
    assert triton_likeliest.likeliest_triton(logits.mT.contiguous().mT).equal(logits.argmax(-1))


@pytest.mark.skipif(DEVICE == "cuda", reason="looks into the interpreter")
@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9, 0.99])
def test_a_flat_nucleus_is_found_in_one_pass_over_its_row(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.backends.cuda import triton_kernels

    monkeypatch.setattr(triton_sampling, "TILE", 16)
    search, searched = triton_kernels._nucleus, []

    def counted(*arguments: Any, **settings: Any) -> Any:
        searched.append(1)
        return search(*arguments, **settings)

    monkeypatch.setattr(triton_kernels, "_nucleus", counted)
    logits = random_logits(6, 5000, 3, 1.0)
    rows = batch(6, top_p=top_p, temperature=[0.8, 2.0, 0.5] * 2, seed=list(range(6)))
    tokens, least = run(logits, rows)
    for i in range(6):
        right(logits.numpy(), rows, i, int(tokens[i]), float(least[i]))
    assert not searched
