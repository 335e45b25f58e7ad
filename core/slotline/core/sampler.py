"""Sampling: logits to tokens, for a batch of rows at once.

Order of operations: logits processors, then temperature, then min-p, top-k, top-p, then one draw per row. The draw is
the inverse of the cumulative distribution at a number that depends on nothing but the request's seed and the token's
position, so a request's text does not change with the batch around it, with chunked prefill or with preemption; a
sample that is thrown away needs no rewinding of a generator.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.rows import Rows
from slotline.registry.errors import CapacityError

Int = npt.NDArray[np.int64]


@define(kw_only=True, eq=False)
class SamplingBatch:
    """The sampling parameters of the logits' rows, gathered.

    Attributes:
        rows: [n] int64, permanent rows.
        positions: [n] int64, position that the sampled token will have.
        temperature, top_p, min_p: [n] float32; top_k: [n] int64, 0 for all.
        seed: [n] uint64.
        all_greedy: whether every row takes the most likely token.
    """

    rows: Int
    positions: Int
    temperature: npt.NDArray[np.float32]
    top_k: Int
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    all_greedy: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.all_greedy = not self.temperature.any()

    @classmethod
    def gather(cls, rows: Rows, which: Int, draft_positions: Int | None = None) -> SamplingBatch:
        """The parameters of the permanent rows `which`, each after as many drafts as `draft_positions` says."""
        known = rows.num_tokens[which]
        return cls(
            rows=which,
            positions=known if draft_positions is None else known + draft_positions,
            temperature=rows.temperature[which],
            top_k=rows.top_k[which],
            top_p=rows.top_p[which],
            min_p=rows.min_p[which],
            seed=rows.seed[which],
        )


def uniforms(seed: npt.NDArray[np.uint64], position: Int) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row from seed and position: SplitMix64 (Steele, Lea, Flood 2014, fig. 17)."""
    with np.errstate(over="ignore"):
        z = seed + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def scale(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Divide by the temperature; greedy rows stay as they are."""
    clamped = np.maximum(batch.temperature, np.float32(1e-6))  # below that the quotient may overflow
    temperature = torch.from_numpy(np.where(batch.temperature == 0, np.float32(1), clamped)).to(logits.device)
    return logits / temperature[:, None]


def mask_unlikely(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Set what min-p, top-k and top-p leave out to minus infinity; [n, vocab_size] float32 in and out."""
    if batch.min_p.any():
        floor = logits.max(dim=-1, keepdim=True).values + _column(np.log(np.maximum(batch.min_p, 1e-30)), logits)
        logits = logits.masked_fill((logits < floor) & (_column(batch.min_p, logits) > 0), -torch.inf)
    if not (batch.top_k.any() or (batch.top_p < 1).any()):
        return logits
    vocab_size = logits.shape[-1]
    top_k = np.where(batch.top_k == 0, vocab_size, np.minimum(batch.top_k, vocab_size))
    largest = int(top_k.max())
    if largest < vocab_size:  # a partial sort is enough when every row limits its tokens
        ordered = torch.topk(logits, largest, dim=-1).values
    else:
        ordered = torch.sort(logits, dim=-1, descending=True).values
    rank = torch.arange(largest, device=logits.device)
    drop = rank >= _column(top_k, logits)
    probabilities = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = _column(batch.top_p, logits)  # [n, 1]; a sum may round to 1 before the last token, so 1 drops nothing
    drop |= (before >= top_p) & (top_p < 1) & (rank > 0)
    # by value, not by place: equal logits stay or go together, whatever order the sort gave them
    least = ordered.masked_fill(drop, torch.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -torch.inf)


def draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """One token per row, [n] int64, by inverse transform of the softmax."""
    return invert(logits.softmax(dim=-1).double(), uniforms(batch.seed, batch.positions))


def invert(weights: torch.Tensor, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """The token [n] int64 at which the cumulative weights [n, vocab_size] float64 pass a share [n] of their sum."""
    cumulative = weights.cumsum(dim=-1)
    target = torch.from_numpy(numbers).to(weights.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_max(weights.shape[-1] - 1)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample every row.

    Args:
        logits: [n, vocab_size] float32, after the logits processors; not changed.

    Returns:
        Token ids [n] int64, and the logits that they were drawn from (scaled and masked; as given where all is greedy).
    """
    if batch.all_greedy:
        return logits.argmax(dim=-1), logits
    final = mask_unlikely(scale(logits, batch), batch)
    tokens = draw(final, batch)
    if (greedy := batch.temperature == 0).any():
        mask = torch.from_numpy(greedy).to(logits.device)
        tokens = torch.where(mask, logits.argmax(dim=-1), tokens)
        final = torch.where(mask[:, None], logits, final)
    return tokens, final


def warm_up(num_rows: int, vocab_size: int, device: str) -> None:
    """Run the sampler once at full size on random logits, so that its memory is part of the profile.

    Raises:
        CapacityError: if the device runs out of memory; names what to lower.
    """
    batch = SamplingBatch(
        rows=np.arange(num_rows),
        positions=np.zeros(num_rows, np.int64),
        temperature=np.full(num_rows, 0.5, np.float32),
        top_k=np.full(num_rows, max(1, vocab_size - 1), np.int64),
        top_p=np.full(num_rows, 0.9, np.float32),
        min_p=np.full(num_rows, 0.01, np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
    )
    try:
        sample(torch.randn(num_rows, vocab_size, device=device), batch)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(
            f"sampling {num_rows} rows of {vocab_size} logits does not fit into memory",
            fix="lower scheduler.max_requests or cache.memory",
        ) from error


def _column(values: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)[:, None]
