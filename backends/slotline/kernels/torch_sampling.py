"""Sampling in torch, for any device: what the CPU runs, and what kernels of devices are held against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.packed_parameters import PackedParameters
from slotline.registry.contracts.device import Drawn, SampledRows


def draw_torch(logits: torch.Tensor, batch: SampledRows, params: torch.Tensor, *, keep_final: bool = False) -> Drawn:
    """Sample rows of which at least one is not greedy, see `DeviceOps.sample`."""
    columns = PackedParameters(params)
    scaled = scale(logits, columns)
    least = least_kept(scaled, batch, columns)
    final = None
    if least is not None and logits.device.type == "cpu":
        tokens, maybe_nan = _draw_on_host(scaled, least, params)
        if keep_final:
            final = scaled.masked_fill(scaled < least, -torch.inf)
    else:
        final = scaled if least is None else scaled.masked_fill(scaled < least, -torch.inf)
        weights = final.softmax(dim=-1)
        tokens, maybe_nan = invert(weights.double(), columns.uniform), weights[:, 0].isnan()
    if (batch.temperature == 0).any():
        greedy = columns.greedy
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        final = None if final is None else torch.where(greedy[:, None], logits, final)
    return Drawn(tokens, final if keep_final else None, _nan_among(logits, maybe_nan))


def _nan_among(logits: torch.Tensor, maybe_nan: torch.Tensor) -> torch.Tensor | None:
    """Return the rows [n] bool that hold NaN, among those that may.

    The sums of rows with infinity are NaN too.
    """
    if logits.device.type != "cpu":
        return logits.isnan().any(dim=-1)
    if not bool(maybe_nan.any()):
        return None
    found = maybe_nan.clone()
    found[maybe_nan] = logits[maybe_nan].isnan().any(dim=-1)
    return found


def _draw_on_host(scaled: torch.Tensor, least: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [n], and which rows [n] bool may hold NaN."""
    tokens, many = _draw_among(scaled, least, PackedParameters(params))
    maybe_nan = least.squeeze(1).isnan()
    if many.any():
        rest = torch.from_numpy(np.flatnonzero(many))
        final = scaled[rest].masked_fill_(scaled[rest] < least[rest], -torch.inf)
        weights = final.softmax(dim=-1)
        tokens[rest] = invert(weights.double(), PackedParameters(params[rest]).uniform)
        maybe_nan[rest] |= weights[:, 0].isnan()
    return tokens, maybe_nan


def _draw_among(
    logits: torch.Tensor, least: torch.Tensor, columns: PackedParameters
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Draw one token per row, [n] int64, among the logits of at least `least` [n, 1], if these are few.

    The logits [n, vocab_size] float32 lie on the CPU. A cumulative sum in float64 over the whole vocabulary, nearly all
    of it zeros, took most of a sampling step. A row's sums, and the choice to make them here, do not depend on other
    rows.

    Returns:
        The tokens, and for which rows [n] bool there are too many to be drawn here.
    """
    values = logits.numpy()
    kept = values >= least.numpy()
    counts = np.count_nonzero(kept, axis=1)
    many = (counts > values.shape[1] // 8) | (least.numpy()[:, 0] == -np.inf)  # without a limit NaN would go unseen
    if many.any():
        kept &= ~many[:, None]
        counts[many] = 0
    rows, tokens = np.divmod(np.flatnonzero(kept), values.shape[1])  # by row, then by token
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (len(values), int(counts.max(initial=1)))
    found, weights, ids = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape, np.int64)
    found[rows, places], ids[rows, places] = values[rows, tokens], tokens
    with np.errstate(invalid="ignore"):  # a row without any finite logit gets some token
        weights[rows, places] = np.exp(found[rows, places] - found.max(axis=1)[rows])
    cumulative = weights.cumsum(axis=1)
    passed = (cumulative <= columns.uniform.numpy()[:, None] * cumulative[:, -1:]).sum(axis=1)
    drawn = ids[np.arange(len(ids)), np.minimum(passed, np.maximum(counts, 1) - 1)]
    return torch.from_numpy(drawn), many


def scale(logits: torch.Tensor, columns: PackedParameters) -> torch.Tensor:
    """Divide by the temperature. Greedy rows stay as they are."""
    return logits / columns.temperature[:, None]


def least_kept(logits: torch.Tensor, batch: SampledRows, columns: PackedParameters) -> torch.Tensor | None:
    """Return the lowest logit [n, 1] that the floor, top-k and top-p keep, or None if no row uses any of them.

    Tokens are kept by value, not by place: equal logits stay or go together, whatever order a sort gives them. Rows
    with top-k are sorted up to the largest k, rows with only top-p are sorted completely, and other rows are not
    sorted.
    """
    floor = None
    if (batch.log_floor > -np.inf).any():
        floor = logits.amax(dim=-1, keepdim=True) + columns.log_floor[:, None]
    vocab_size = logits.shape[-1]
    by_count = (batch.top_k > 0) & (batch.top_k < vocab_size)
    by_mass = ~by_count & (batch.top_p < 1)
    if not (by_count.any() or by_mass.any()):
        return floor
    least = torch.full_like(logits[:, :1], -torch.inf) if floor is None else floor.clone()
    for which, most in ((by_count, int(batch.top_k[by_count].max(initial=1))), (by_mass, vocab_size)):
        if which.all():
            return _least_ordered(logits, floor, columns, most)
        if which.any():
            index = torch.from_numpy(np.flatnonzero(which)).to(logits.device, non_blocking=True)
            part = PackedParameters(columns.packed[index])
            least[index] = _least_ordered(logits[index], None if floor is None else floor[index], part, most)
    return least


def _least_ordered(
    logits: torch.Tensor, floor: torch.Tensor | None, columns: PackedParameters, most: int
) -> torch.Tensor:
    """Return the lowest logit [n, 1] that is left of the `most` largest in each row."""
    if most < logits.shape[-1]:
        ordered = torch.topk(logits, most, dim=-1).values
    else:
        ordered = torch.sort(logits, dim=-1, descending=True).values
    rank = torch.arange(most, device=logits.device)
    top_k = columns.top_k[:, None]
    drop = (rank >= top_k) & (top_k > 0)
    if floor is not None:
        drop |= ordered < floor
    probabilities = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = columns.top_p[:, None]  # [n, 1], and 1 drops nothing, as a sum may round to 1 before the last token
    drop |= (before >= top_p) & (top_p < 1) & (rank > 0)
    return ordered.masked_fill(drop, torch.inf).amin(dim=-1, keepdim=True)


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the token [n] int64 where the cumulative weights [n, vocab_size] float64 pass a share [n] of their sum."""
    cumulative = weights.cumsum(dim=-1)
    target = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_max(weights.shape[-1] - 1)
