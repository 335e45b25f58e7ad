"""Operations of a step in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from slotline.backends.cuda.triton_argmax import likeliest_triton
from slotline.backends.cuda.triton_bounds import take_off_triton
from slotline.backends.cuda.triton_drafts import find_stood_triton, keep_drafts_triton
from slotline.backends.cuda.triton_fast_sampler import FastSampler
from slotline.backends.cuda.triton_logits_ops import ban_by_bitmask, mark_unusable
from slotline.backends.cuda.triton_places import fill_places
from slotline.backends.cuda.triton_repeats import BLOCK, advance_decode_batch
from slotline.backends.cuda.triton_sampling import are_limited, sample_into
from slotline.backends.cuda.triton_tables import put_rows, take_rows
from slotline.core.device import TorchOps
from slotline.kernels.packed_parameters import PackedParameters
from slotline.kernels.triton_launcher import as_pointer
from slotline.registry.contracts.device import (
    DecodeBatch,
    DraftPlaces,
    Drawn,
    SampledRows,
    TokenSampler,
    TransferBuffer,
    Verified,
)


class TritonOps(TorchOps):
    """Operations as Triton's kernels.

    Args:
        device: torch device string; the caller has made it the current GPU.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Cut few rows into parts; torch gives each row to one multiprocessor, and the others are idle."""
        return likeliest_triton(logits)

    def sample(
        self, logits: torch.Tensor, rows: SampledRows, params: torch.Tensor, *, keep_final: bool = False
    ) -> Drawn:
        """Draw in two kernels, and two more for deep rows."""
        scratch = sample_into(logits, params, limited=are_limited(rows))
        final = _final(logits, params, scratch.least) if keep_final else None
        return Drawn(scratch.tokens, final, scratch.holds_nan)

    def apply_bitmask(
        self, logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, *, in_place: bool = False
    ) -> torch.Tensor:
        """Write minus infinities only."""
        own = in_place and logits.is_contiguous()
        result = logits if own else logits.clone(memory_format=torch.contiguous_format)
        ban_by_bitmask(result, words.contiguous(), rows.contiguous())
        return result

    def mark_unusable(
        self,
        logits: torch.Tensor,
        raw: torch.Tensor,
        touched: torch.Tensor | None,
        tokens: torch.Tensor,
        *,
        not_finite: int,
        none_left: int,
        all_greedy: bool,
    ) -> torch.Tensor:
        """Look at each row in one program."""
        touched = touched if touched is None else touched.contiguous()
        return mark_unusable(
            logits, raw, touched, tokens, not_finite=not_finite, none_left=none_left, all_greedy=all_greedy
        )

    def token_sampler(
        self, table: torch.Tensor, buffer: TransferBuffer, max_rows: int, vocab_size: int
    ) -> TokenSampler | None:
        """Return launches that write tokens to the table and to host memory themselves."""
        return FastSampler(_placeholders(table), buffer, max_rows, vocab_size, self._device)

    def put_rows(self, table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Copy in one launch without looking at indices."""
        if not _are_packed(table, rows, values):
            return super().put_rows(table, rows, values)
        return put_rows(table, rows, values)

    def gather_rows(self, table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy in one launch."""
        if not _are_packed(table, rows, out):
            return super().gather_rows(table, rows, out)
        return take_rows(table, rows, out)

    def advance_decode_batch(self, batch: DecodeBatch) -> Callable[[int, int], None] | None:
        """Launch one kernel, looked up once."""
        count = len(batch.rows)
        tensors = (
            batch.positions,
            batch.seq_lens,
            batch.counters,
            batch.changes,
            batch.rows,
            batch.table,
            batch.taken,
            batch.slots,
        )
        rest = (batch.table.shape[1], batch.block_size, batch.first, batch.drawn, BLOCK)
        addresses = tuple(map(as_pointer, tensors))
        bound: Callable[..., None] | None = None

        def advance(at: int, width: int) -> None:
            nonlocal bound
            if bound is not None:
                bound(*addresses, at, width, *rest)
                return
            advance_decode_batch((count,), *tensors, at, width, *rest, num_warps=1)
            bound = advance_decode_batch.remembered((count,), *tensors, at, width, *rest, num_warps=1)

        return advance

    def subtract_rejected(
        self,
        rejected: torch.Tensor,
        rows: torch.Tensor,
        owners: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        accepted: torch.Tensor | None,
        groups: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    ) -> None:
        """Launch once for each cache group: the forward pass waits for it."""
        given = (rejected, rows, owners, positions, seq_lens, accepted)
        if not _are_packed(*given, *(slots for _, slots, _ in groups)) or not _have_rows(*(one[0] for one in groups)):
            return super().subtract_rejected(*given, groups)
        return take_off_triton(*given, groups)

    def verify_drafts(
        self,
        sampled: torch.Tensor,
        drafts: torch.Tensor | None,
        expected: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        input_ids: torch.Tensor,
        logits_indices: torch.Tensor,
        table: torch.Tensor,
        rejected: torch.Tensor,
        max_drafts: int,
    ) -> Verified:
        """Look at each row in one program; in torch they would be some forty launches."""
        given = (sampled, drafts, expected, rows, places, input_ids, logits_indices, table, rejected)
        if not _are_packed(*given):
            return super().verify_drafts(*given, max_drafts)
        noted = _placeholders(table, rejected, max_drafts)
        found = find_stood_triton(sampled, drafts, expected, rows, input_ids, logits_indices, noted)
        return Verified(*found)

    def fill_drafts(
        self,
        found: torch.Tensor,
        newest: torch.Tensor,
        stand_ins: torch.Tensor,
        table: torch.Tensor,
        max_drafts: int,
        vocab_size: int,
    ) -> torch.Tensor:
        """Write each row in one program."""
        if not _are_packed(table):
            return super().fill_drafts(found, newest, stand_ins, table, max_drafts, vocab_size)
        return keep_drafts_triton(found, newest, stand_ins, _placeholders(table, table, max_drafts), vocab_size)

    def draft_places(
        self,
        found: DraftPlaces,
        slots: torch.Tensor,
        lead_slots: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Launch one program for each request, in place of some twenty launches."""
        given = (slots, lead_slots, positions)
        if not _are_packed(*found, *given) or not _have_rows(table):
            return super().draft_places(found, *given, table, block_size, max_model_len)
        return fill_places(cast("Any", found), *given, table, block_size, max_model_len)


class _Placeholders(NamedTuple):
    tokens: torch.Tensor
    rejected: torch.Tensor
    max_spec_tokens: int


def _are_packed(*tensors: torch.Tensor | None) -> bool:
    """Return True if all tensors are contiguous, as kernels take them. Torch's operations take the others."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _have_rows(*tables: torch.Tensor) -> bool:
    """Return True if the elements of a row lie side by side in every table. Its rows may be parts of wider ones."""
    return all(table.stride(1) == 1 for table in tables)


def _placeholders(table: torch.Tensor, rejected: torch.Tensor | None = None, max_drafts: int = 0) -> Any:
    """Return the table of placeholders as the kernels' callers take it."""
    return _Placeholders(table, table if rejected is None else rejected, max_drafts)


def _final(logits: torch.Tensor, params: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    scaled = logits / PackedParameters(params).temperature[:, None]
    return scaled.masked_fill_(scaled < least[:, None], -torch.inf)
