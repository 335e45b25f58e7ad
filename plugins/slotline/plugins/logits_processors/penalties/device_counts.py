"""Token counts of requests on the device: a list of each request's distinct tokens, which a step tells of new ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.kernels.triton_launcher import Launcher, cdiv, next_power_of_2
from slotline.plugins.logits_processors.penalties import kernels
from slotline.registry.contracts import LogitsBatch

Int = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
_BLOCK = 512
"""Distinct tokens that a program penalises."""
_NEWS_BLOCK = 1024
_LEAST_CAPACITY = 1024
_MOST_ADDED = 32
"""New tokens of a row that are looked for in its list one by one. With more the list is written anew."""

_take_news, _penalise = Launcher(kernels.take_news), Launcher(kernels.penalise)


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
    """Lists by permanent row, created when a request first asks for a penalty.

    `entries` [max_requests, capacity] int64 are the distinct tokens of prompt and output, each once, with the number
    of times that it stands in the output. `lengths` [max_requests] int32 is their number. A row's known tokens never
    change, so each is counted once. Drafts are not counted.

    New tokens are sent and counted in a stream of its own, beside the forward pass that the logits come from. Only the
    penalties are in the logits' stream.
    """

    def __init__(self, max_requests: int, vocab_size: int, device: str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._seen = np.zeros(max_requests, np.int64)
        self._stale = np.ones(max_requests, bool)
        self._most = np.zeros(max_requests, np.int64)  # entries of a row at most
        self._entries = torch.empty(max_requests, 0, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._sent = torch.empty(0, dtype=torch.int32, device=device)
        self._beside = _Beside.of(self._device) if self._device.type == "cuda" else None

    def forget(self, row: int) -> None:
        """Forget a row, which another request took."""
        self._stale[row] = True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch, penalties: Float32) -> torch.Tensor:
        """Penalise [n, vocab_size] float32 logits in place by `penalties` [3, n]: presence, frequency, repetition."""
        n, drafts = len(batch.rows), batch.draft_token_ids
        if drafts is None:
            drafts = np.zeros((n, 0), np.int64)
        wanted = np.zeros((n, 8), np.int32)
        wanted[:, 0], wanted[:, 1:4], wanted[:, 4] = batch.rows, penalties.view(np.int32).T, batch.draft_positions
        news = self._news(batch)
        with nullcontext() if self._beside is None else self._beside.scope():
            on_device, values, news_on_device, their_drafts = self._send(wanted, news.values, news.lists, drafts)
            self._reserve(news.longest * 5 // 4)
            tables = (self._entries, self._lengths, self._entries.shape[1])
            if len(news.lists):
                _take_news((len(news.lists),), news_on_device, values, *tables, self._vocab_size, _NEWS_BLOCK)
        self._seen[news.rows], self._most[news.rows], self._stale[news.rows] = news.known, news.most, False
        if self._beside is not None:
            self._beside.join()
        _penalise(
            (n, cdiv(int(news.most.max(initial=1)), _BLOCK)),
            *(logits, logits.stride(0), on_device, their_drafts, drafts.shape[1], *tables, self._vocab_size),
            *(_BLOCK, max(16, next_power_of_2(drafts.shape[1]))),
            enable_fp_fusion=False,  # so that a CPU gives the same bits
        )
        if self._beside is not None:
            self._beside.release()
        return logits

    def _news(self, batch: LogitsBatch) -> _News:
        """Return what the lists have to be told."""
        rows, first = np.unique(batch.rows, return_index=True)
        known, prompt, seen = batch.num_tokens[first], batch.num_prompt_tokens[first], self._seen[rows]
        more, most = known - seen, self._most[rows] + known - seen
        anew = self._stale[rows] | (more < 0) | (more > _MOST_ADDED)
        anew |= most > self._entries.shape[1]  # if tokens recurred, there is room for more
        more[anew] = 0
        starts = np.cumsum(more) - more
        if (more == 1).all():  # as in all but a request's first step
            values = batch.token_table[rows, seen]
        else:
            places = np.arange(int(more.sum())) + np.repeat(seen - starts, more)
            values = batch.token_table[np.repeat(rows, more), places]
        lists = np.zeros((len(rows), 4), np.int32)
        lists[:, 0], lists[:, 1], lists[:, 2] = rows, more, starts
        lists = lists[more > 0]
        if anew.any():
            parts: list[npt.NDArray[Any]] = [values]
            whole, start = list[list[int]](), len(values)
            for i in np.flatnonzero(anew).tolist():
                tokens, times = self._counted(batch.token_table[rows[i], : known[i]], int(prompt[i]))
                whole.append([int(rows[i]), len(tokens), start, 1])
                parts += [tokens, times]
                start += 2 * len(tokens)
                most[i] = len(tokens)
            values, lists = np.concatenate(parts), np.concatenate([lists, np.array(whole, np.int32)])
        return _News(rows, known, most, lists, values, int(most[anew].max(initial=0)))

    def _counted(self, tokens: npt.NDArray[np.int32], num_prompt: int) -> tuple[npt.NDArray[np.int32], Int]:
        """Return the distinct tokens of a row, and how often each stands behind the prompt."""
        inside = (tokens >= 0) & (tokens < self._vocab_size)
        distinct = np.unique(tokens[inside])
        output = tokens[num_prompt:][inside[num_prompt:]]
        return distinct, np.bincount(np.searchsorted(distinct, output), minlength=len(distinct))

    def _reserve(self, longest: int) -> None:
        """Make room for the given number of entries in a row."""
        before = self._entries.shape[1]
        if longest > before:
            capacity = max(_LEAST_CAPACITY, next_power_of_2(longest))
            entries = torch.empty(len(self._seen), capacity, dtype=torch.int64, device=self._device)
            entries[:, :before] = self._entries
            self._entries = entries

    def _send(self, *parts: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Return the arrays as int32 on the device, in one copy without waiting. The next call overwrites them."""
        ends = np.cumsum([cdiv(part.size, 4) * 4 for part in parts]).tolist()  # each begins at 16 bytes
        flat = torch.empty(ends[-1], dtype=torch.int32, pin_memory=self._beside is not None)
        host, starts = flat.numpy(), [0, *ends]
        for start, part in zip(starts, parts, strict=False):
            host[start : start + part.size] = part.ravel()
        if ends[-1] > len(self._sent):
            self._sent = torch.empty(next_power_of_2(ends[-1]), dtype=torch.int32, device=self._device)
        self._sent[: ends[-1]].copy_(flat, non_blocking=True)
        return [self._sent[start:] for start in starts[:-1]]


class _News(NamedTuple):
    """What a step tells the lists, whose rows [r] have `known` [r] tokens and at most `most` [r] entries then."""

    rows: Int
    known: Int
    most: Int
    lists: npt.NDArray[np.int32]  # [m, 4], see `take_news`
    values: npt.NDArray[Any]
    longest: int  # entries of the longest list that is written anew


@define(eq=False)
class _Beside:
    """A stream beside the one that logits are in."""

    stream: Any
    counted: Any
    penalised: Any

    @classmethod
    def of(cls, device: torch.device) -> _Beside:
        """Create the stream. It waits for what the current one is told by now."""
        made = cls(torch.cuda.Stream(device), torch.cuda.Event(), torch.cuda.Event())
        made.release()
        return made

    def scope(self) -> AbstractContextManager[Any]:
        """Make the stream the current one. It waits until the lists are no longer read."""
        self.stream.wait_event(self.penalised)
        scope: AbstractContextManager[Any] = torch.cuda.stream(self.stream)
        return scope

    def join(self) -> None:
        """Let the current stream wait for the lists."""
        self.counted.record(self.stream)
        torch.cuda.current_stream(self.stream.device).wait_event(self.counted)

    def release(self) -> None:
        """Note that the lists are read no longer when the current stream has got this far."""
        self.penalised.record(torch.cuda.current_stream(self.stream.device))
