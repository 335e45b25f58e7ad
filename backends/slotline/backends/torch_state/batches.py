"""Host work of a step: index tensors of the tokens and requests that are advanced together.

Requests with one token are advanced in one operation. Longer ones are divided into chunks. Wave k has the k-th chunk of
every request that has one, requests with more chunks first, so that the requests of a wave are the first of the
previous wave. Example with chunks of 4 and requests of 9, 2 and 5 tokens (sorted: 9, 5, 2): wave 0 holds 4, 4 and 2
tokens, wave 1 holds 4 and 1, wave 2 holds 1. The number of operations follows the longest request, not the number of
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from slotline.registry.contracts.state import StateBatch

Int = npt.NDArray[np.int64]
State = Mapping[str, Tensor]

CHUNK = 64
"""Most tokens of a request that are computed as one matrix product."""


class Slots:
    """The slots of some requests of a batch, and how their states are read and written.

    Args:
        batch: the step's batch.
        rows: [n] positions of the requests in it.
        on_host: whether the host could tell padding, so that there is none among `rows`. Where only the device knows
            which slots are -1, a padded request starts from zeros and writes once more what a live one writes.
    """

    def __init__(self, batch: StateBatch, rows: Tensor, *, on_host: bool) -> None:
        self.index = batch.slots.index_select(0, rows).long()  # [n]
        self.has_state = batch.has_initial_state.index_select(0, rows)  # [n]
        self.source: Tensor | None = None
        self.run: slice | None = None  # the slots, if they are contiguous
        if on_host:
            first = int(self.index[0])
            if torch.equal(self.index, torch.arange(first, first + len(rows))):
                self.run = slice(first, first + len(rows))
            return
        live = self.index >= 0
        self.any_live = live.any()
        self.source = torch.where(live, torch.arange(len(rows), device=rows.device), live.int().argmax())
        self.has_state = self.has_state & live
        self.index = self.index.index_select(0, self.source).clamp(min=0)

    def read(self, state: Tensor) -> Tensor:
        """Return [n, *shape] float32, with zeros for requests that start. It may be changed before `write`.

        Contiguous float32 states are read in place, which saves two copies in a decode step.
        """
        if self.run is not None and state.dtype == torch.float32:
            found = state[self.run]
            if not self.has_state.all():
                found[~self.has_state] = 0.0
            return found
        found = state.index_select(0, self.index).float()
        has_state = self.has_state.view(-1, *[1] * (found.ndim - 1))
        return torch.where(has_state, found, 0.0)  # not a product: a slot may hold anything before its first use

    def write(self, state: Tensor, values: Tensor) -> None:
        """Store [n, *shape]."""
        if self.run is not None:
            if values.data_ptr() != state[self.run].data_ptr():
                state[self.run] = values.to(state.dtype)
            return
        values = values.to(state.dtype)
        if self.source is not None:
            values = torch.where(self.any_live, values.index_select(0, self.source), state.index_select(0, self.index))
        state.index_copy_(0, self.index, values)


class Tokens:
    """Some tokens of a batch, read and written without a copy of their indices if they are contiguous.

    Args:
        numbers: [n] int64, their positions in the batch.
        device: device of the tensors that they are taken from.
    """

    def __init__(self, numbers: Int, device: torch.device) -> None:
        first = int(numbers[0])
        self.run = slice(first, first + len(numbers)) if (np.diff(numbers) == 1).all() else None
        self.index = None if self.run else _upload(numbers, device)

    def take(self, values: Tensor) -> Tensor:
        """Take [num_tokens, ...] -> [n, ...]."""
        return values[self.run] if self.index is None else values.index_select(0, self.index)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write [n, ...] into [num_tokens, ...]."""
        if self.index is None:
            target[self.run] = values
        else:
            target.index_copy_(0, self.index, values.to(target.dtype))


@frozen(kw_only=True, eq=False)
class Part:
    """Requests that are advanced together.

    Attributes:
        rows: [n] int64, positions of the requests in the batch, most chunks first.
        slots: slots of the n requests.
        tokens: the part's tokens in the batch, request by request.
        chunk: places of a chunk. 1 if every request has one token.
        places: [num_tokens] int64, index of each token among all chunks' places, wave by wave.
        waves: (requests, longest chunk) of each wave.
    """

    rows: Tensor
    slots: Slots
    tokens: Tokens
    chunk: int
    places: Tensor
    waves: tuple[tuple[int, int], ...]

    def spread(self, values: Tensor) -> Tensor:
        """Spread [num_tokens, ...] -> [num_chunks, chunk, ...], with zeros in the rest of a chunk."""
        num_chunks = sum(count for count, _ in self.waves)
        if self.chunk == 1:
            return values.unsqueeze(1)
        spread = values.new_zeros((num_chunks * self.chunk, *values.shape[1:]))
        return spread.index_copy_(0, self.places, values).view(num_chunks, self.chunk, *values.shape[1:])

    def gather(self, spread: Tensor) -> Tensor:
        """Map back [num_chunks, chunk, ...] -> [num_tokens, ...]."""
        return spread.flatten(0, 1).index_select(0, self.places)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Return, for each wave, its chunks and the places with tokens."""
        first = 0
        for count, longest in self.waves:
            yield slice(first, first + count), slice(0, longest)
            first += count


@frozen(kw_only=True, eq=False)
class Stream:
    """All tokens in a row, as a convolution sees them.

    Attributes:
        slots: of the n requests with tokens, in batch order.
        tokens: their tokens in the batch.
        request_of: [num_tokens] int64, whose each is: 0 to n - 1.
        ends: [n] int64, number of tokens up to the last one of each.
    """

    slots: Slots
    tokens: Tokens
    request_of: Tensor
    ends: Tensor


@frozen(kw_only=True, eq=False)
class StatePlan:
    """Result of `plan` for every `forward` of a step.

    Attributes:
        batch: the step's batch.
        parts: parts for the recurrences.
        stream: part for the convolutions.
        verified: the requests that `commit` may roll back, as one chunk each. One of the parts.
    """

    batch: StateBatch
    parts: tuple[Part, ...] = ()
    stream: Stream | None = None
    verified: Part | None = None


def plan_of(batch: StateBatch, *, recurs: bool, convolves: bool, on_host: bool, most_drafts: int = 0) -> StatePlan:
    """Return the plan of a batch.

    Args:
        batch: the step's batch.
        recurs, convolves: halves of the plan that will be used.
        most_drafts: most drafts of a verified request.
        on_host: True if the batch is in host memory, so that padding can be skipped.
    """
    starts = batch.query_start_loc_cpu[: batch.num_requests + 1].astype(np.int64)
    lens = np.diff(starts)
    active = lens > 0
    if on_host:
        active &= batch.slots[: batch.num_requests].numpy() >= 0
    rows = np.flatnonzero(active)
    if not len(rows):
        return StatePlan(batch=batch)
    single, short = lens[rows] == 1, (lens[rows] > 1) & (lens[rows] <= 1 + most_drafts)
    verified = None
    if short.any():
        verified = _part(batch, _longest_first(rows[short], lens), starts, lens, 1 + most_drafts, on_host=on_host)
    parts: list[Part] = []
    if recurs:
        if single.any():
            parts.append(_part(batch, rows[single], starts, lens, 1, on_host=on_host))
        if verified is not None:
            parts.append(verified)
        if len(longer := rows[~single & ~short]):
            parts.append(_part(batch, _longest_first(longer, lens), starts, lens, CHUNK, on_host=on_host))
    return StatePlan(
        batch=batch,
        parts=tuple(parts),
        stream=_stream(batch, rows, starts, lens, on_host=on_host) if convolves else None,
        verified=verified,
    )


def _longest_first(rows: Int, lens: Int) -> Int:
    return rows[np.argsort(-lens[rows], kind="stable")]


def _part(batch: StateBatch, rows: Int, starts: Int, lens: Int, chunk: int, *, on_host: bool) -> Part:
    longest = int(lens[rows[0]])
    request, offset = _expand(lens[rows])
    counts = (lens[rows] > np.arange(0, longest, chunk)[:, None]).sum(1)  # [num_waves]
    first = np.cumsum(counts) - counts
    places = (first[offset // chunk] + request) * chunk + offset % chunk
    device = batch.slots.device
    positions = _upload(rows, device)
    return Part(
        rows=positions,
        slots=Slots(batch, positions, on_host=on_host),
        tokens=Tokens(starts[rows][request] + offset, device),
        chunk=chunk,
        places=_upload(places, device),
        waves=tuple((count, min(chunk, longest - k * chunk)) for k, count in enumerate(counts.tolist())),
    )


def _stream(batch: StateBatch, rows: Int, starts: Int, lens: Int, *, on_host: bool) -> Stream:
    request, offset = _expand(lens[rows])
    device = batch.slots.device
    return Stream(
        slots=Slots(batch, _upload(rows, device), on_host=on_host),
        tokens=Tokens(starts[rows][request] + offset, device),
        request_of=_upload(request, device),
        ends=_upload(np.cumsum(lens[rows]), device),
    )


def _expand(lens: Int) -> tuple[Int, Int]:
    """Return the request of every token and its offset there: lens [2, 1] give [0, 0, 1] and [0, 1, 0]."""
    request = np.repeat(np.arange(len(lens)), lens)
    return request, np.arange(len(request)) - np.repeat(np.cumsum(lens) - lens, lens)


def _upload(values: Int, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
