"""Token counts of requests on the device. A step sends only new tokens and reads only the logits of counted ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from slotline.plugins.logits_processors.penalties.kernels import clear_rows, count_tokens, penalise
from slotline.registry.contracts import LogitsBatch

Int = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
_BLOCK = 1024
_LEAST_CAPACITY = 1024


def warm_up(vocab_size: int, device: str) -> None:
    """Launch the kernels for one request, so that none is compiled while the first one that asks for them waits."""
    one = np.ones(1, np.int64)
    batch = LogitsBatch(
        rows=one - 1,
        draft_positions=one - 1,
        token_table=np.zeros((1, 1), np.int32),
        num_tokens=one,
        num_prompt_tokens=one,
    )
    DeviceCounts(1, vocab_size, device).apply(
        torch.zeros(1, vocab_size, device=device), batch, np.ones((3, 1), np.float32)
    )


class DeviceCounts:
    """Tables by permanent row, created when a request first asks for a penalty.

    `counts` [max_requests, vocab_size] int32 has the number of occurrences of a token in the output, and a flag for the
    prompt. `distinct` [max_requests, capacity] int32 has the tokens with a count, each once and unordered.
    `num_distinct` [max_requests] int32 is their number. A row's known tokens never change, so each is counted once.
    Drafts are not counted.
    """

    def __init__(self, max_requests: int, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._seen = np.zeros(max_requests, np.int64)
        self._stale = np.ones(max_requests, bool)
        self._counts: torch.Tensor | None = None
        self._distinct = torch.empty(max_requests, 0, dtype=torch.int32, device=self._device)

    def forget(self, row: int) -> None:
        """Forget a row, which another request took."""
        self._stale[row] = True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch, penalties: Float32) -> torch.Tensor:
        """Penalise [n, vocab_size] float32 logits in place by `penalties` [3, n]: presence, frequency, repetition."""
        counts = self._tables(int(batch.num_tokens.max(initial=1)))
        fresh, *entries = self._news(batch)
        n, drafts = len(batch.rows), batch.draft_token_ids
        if drafts is None:
            drafts = np.zeros((n, 0), np.int64)
        parts = (fresh, np.concatenate(entries), batch.rows, penalties.view(np.int32), batch.draft_positions, drafts)
        fresh_rows, entry_values, rows, wanted, draft_counts, draft_ids = self._send([part.ravel() for part in parts])
        num_entries = len(entries[0])
        common = (self._distinct, self._num_distinct, self._distinct.shape[1], self._vocab_size)
        if len(fresh):
            clear_rows[len(fresh), triton.cdiv(self._vocab_size, _BLOCK)](
                counts, self._num_distinct, fresh_rows, self._vocab_size, block=_BLOCK
            )
        if num_entries:
            count_tokens[(triton.cdiv(num_entries, _BLOCK),)](counts, *common, entry_values, num_entries, block=_BLOCK)
        penalise[n, triton.cdiv(int(batch.num_tokens.max(initial=1)), _BLOCK)](
            logits,
            logits.stride(0),
            rows,
            wanted.view(torch.float32),
            draft_counts,
            draft_ids,
            drafts.shape[1],
            counts,
            *common,
            n,
            block=_BLOCK,
            width=max(16, triton.next_power_of_2(drafts.shape[1])),
            enable_fp_fusion=False,  # so that a CPU gives the same bits
        )
        return logits

    def _tables(self, longest: int) -> torch.Tensor:
        """Return the counts, with room for the given number of tokens in a row."""
        if self._counts is None:
            shape = len(self._seen), self._vocab_size
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._num_distinct = torch.zeros(shape[:1], dtype=torch.int32, device=self._device)
        before = self._distinct.shape[1]
        if longest > before:
            capacity = max(_LEAST_CAPACITY, triton.next_power_of_2(longest))
            distinct = torch.empty(len(self._seen), capacity, dtype=torch.int32, device=self._device)
            distinct[:, :before] = self._distinct
            self._distinct = distinct
        return self._counts

    def _news(self, batch: LogitsBatch) -> tuple[Int, Int, Int, Int]:
        """Return rows [f] to count anew, and for each uncounted token [m] its row, itself, and 1 if in the prompt."""
        rows, first = np.unique(batch.rows, return_index=True)
        known, prompt = batch.num_tokens[first], batch.num_prompt_tokens[first]
        stale = self._stale[rows] | (known < self._seen[rows])
        fresh = rows[stale]
        self._seen[fresh] = 0
        self._stale[fresh] = False
        seen = self._seen[rows]
        new = known - seen
        self._seen[rows] = known
        if (new == 1).all():  # as in all but a request's first step
            entry_rows, places, ends = rows, seen, prompt
        else:
            entry_rows, ends = np.repeat(rows, new), np.repeat(prompt, new)
            places = np.arange(len(entry_rows)) + np.repeat(seen - (np.cumsum(new) - new), new)
        tokens = batch.token_table[entry_rows, places].astype(np.int64)
        return fresh, entry_rows, tokens, (places < ends).astype(np.int64)

    def _send(self, parts: list[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return the arrays as int32 on the device, in one copy without waiting."""
        sizes = [len(part) for part in parts]
        flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        np.concatenate(parts, out=flat.numpy(), casting="unsafe")
        return list(flat.to(self._device, non_blocking=True).split(sizes))
