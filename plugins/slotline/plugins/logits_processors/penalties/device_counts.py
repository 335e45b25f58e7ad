"""Token counts of requests on the device: a list of each request's distinct tokens, which a step tells of new ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.kernels.triton_launcher import Launch, Launcher, cdiv, next_power_of_2
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

_FEW = 1024
"""With fewer tokens it is faster to sort them than to look through marks of the vocabulary."""

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
        self._marks = np.zeros(vocab_size, bool)  # all False between calls
        self._sent = torch.empty(0, dtype=torch.int32, device=device)
        self._beside = _Beside.of(self._device) if self._device.type == "cuda" else None
        self._last: _Step | None = None

    def forget(self, row: int) -> None:
        """Forget a row, which another request took."""
        self._stale[row] = True
        self._last = None

    def apply(self, logits: torch.Tensor, batch: LogitsBatch, penalties: Float32) -> torch.Tensor:
        """Penalise [n, vocab_size] float32 logits in place.

        Args:
            penalties: presence, frequency and repetition [3, max_requests], which change only for rows to forget.
        """
        drafts, last = batch.draft_token_ids, self._last
        self._last = None  # if this fails
        if last is not None and drafts is None and last.precedes(batch, self._entries.shape[1]):
            self._count_one_more(last, batch)
        else:
            last = self._count(batch, penalties)
        num_drafts = 0 if drafts is None else drafts.shape[1]
        _penalise(
            (len(batch.rows), cdiv(last.most, _BLOCK)),
            *(logits, logits.stride(0), last.sent.wanted, last.sent.drafts, num_drafts),
            *(self._entries, self._lengths, self._entries.shape[1], self._vocab_size),
            *(_BLOCK, max(16, next_power_of_2(num_drafts))),
            enable_fp_fusion=False,  # so that a CPU gives the same bits
        )
        if self._beside is not None:
            self._beside.release()
        self._last = last
        return logits

    def _count(self, batch: LogitsBatch, penalties: Float32) -> _Step:
        """Send what a step needs, and count its new tokens."""
        wanted = np.zeros((len(batch.rows), 8), np.int32)
        wanted[:, 0], wanted[:, 4] = batch.rows, batch.draft_positions
        wanted[:, 1:4] = penalties[:, batch.rows].view(np.int32).T
        drafts = np.zeros(0, np.int64) if batch.draft_token_ids is None else batch.draft_token_ids
        news = self._news(batch)
        with self._beside or nullcontext():
            sent = _Sent(*self._send(wanted, news.values, news.lists, drafts))
            self._reserve(news.longest * 5 // 4)
            alike = news.one_each and batch.draft_token_ids is None and len(news.rows) == len(batch.rows)
            most = int(news.most.max(initial=1))
            step = _Step(batch.rows.copy(), batch.num_tokens.copy(), news.rows, news.known, most, alike, sent)
            if len(news.lists):
                self._launch(step, len(news.lists))()
        self._seen[news.rows], self._most[news.rows], self._stale[news.rows] = news.known, news.most, False
        return step

    def _count_one_more(self, step: _Step, batch: LogitsBatch) -> None:
        """Count one new token for each row of a step, and make it the next one. All else is on the device."""
        n, tokens = len(step.unique), batch.token_table[step.unique, step.known]
        flat = torch.empty(n, dtype=torch.int32, pin_memory=self._beside is not None)
        flat.numpy()[:] = tokens
        with self._beside or nullcontext():
            step.sent.values[:n].copy_(flat, non_blocking=True)
            if step.launch is None:
                step.launch = self._launch(step, n).prepared()
            else:
                step.launch()
        step.num_tokens, step.known, step.most = step.num_tokens + 1, step.known + 1, step.most + 1
        self._seen[step.unique] = step.known
        self._most[step.unique] += 1

    def _launch(self, step: _Step, num_lists: int) -> Launch:
        """Return the launch that counts a step's new tokens."""
        tables = (self._entries, self._lengths, self._entries.shape[1], self._vocab_size)
        return Launch(_take_news, (num_lists,), (step.sent.lists, step.sent.values, *tables, _NEWS_BLOCK), {})

    def _news(self, batch: LogitsBatch) -> _News:
        """Return what the lists have to be told."""
        rows, first = np.unique(batch.rows, return_index=True)
        known, prompt, seen = batch.num_tokens[first], batch.num_prompt_tokens[first], self._seen[rows]
        more, most = known - seen, self._most[rows] + known - seen
        anew = self._stale[rows] | (more < 0) | (more > _MOST_ADDED)
        anew |= most > self._entries.shape[1]  # if tokens recurred, there is room for more
        more[anew] = 0
        starts = np.cumsum(more) - more
        one_each = bool((more == 1).all())  # as in all but a request's first step
        if one_each:
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
        return _News(rows, known, most, lists, values, int(most[anew].max(initial=0)), one_each)

    def _counted(self, tokens: npt.NDArray[np.int32], num_prompt: int) -> tuple[npt.NDArray[np.int32], Int]:
        """Return the distinct tokens of a row, and how often each stands behind the prompt."""
        inside = (tokens >= 0) & (tokens < self._vocab_size)
        known = tokens[inside]
        if len(known) < _FEW:
            distinct = np.unique(known)
        else:
            self._marks[known] = True
            distinct = np.flatnonzero(self._marks).astype(np.int32)
            self._marks[distinct] = False
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
    one_each: bool  # whether each row has one new token


class _Sent(NamedTuple):
    """What a step sent to the device, as int32: see `penalise` and `take_news`."""

    wanted: torch.Tensor
    values: torch.Tensor
    lists: torch.Tensor
    drafts: torch.Tensor


@define(eq=False)
class _Step:
    """A step, and what it sent to the device."""

    rows: Int  # [n]
    num_tokens: Int  # [n]
    unique: Int  # distinct rows
    known: Int  # their numbers of tokens
    most: int  # entries of a row at most
    one_each: bool  # whether each row had one new token and no drafts, and occurred once
    sent: _Sent
    launch: Callable[[], None] | None = None

    def precedes(self, batch: LogitsBatch, capacity: int) -> bool:
        """Return whether a batch without drafts needs only one more token counted for each row, and has the room."""
        same = self.one_each and self.most < capacity and np.array_equal(self.rows, batch.rows)
        return same and np.array_equal(self.num_tokens + 1, batch.num_tokens)


@define(eq=False)
class _Beside:
    """A stream beside the one that logits are in, and the current one in its context.

    It waits until the lists are no longer read. The logits' stream waits for what it is told.
    """

    stream: Any
    logits: Any
    counted: Any
    penalised: Any

    @classmethod
    def of(cls, device: torch.device) -> _Beside:
        """Create the stream. It waits for what the current one is told by now."""
        logits = torch.cuda.current_stream(device)
        made = cls(torch.cuda.Stream(device), logits, torch.cuda.Event(), torch.cuda.Event())
        made.release()
        return made

    def __enter__(self) -> None:
        """Make the stream the current one."""
        self.logits = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_event(self.penalised)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        """Go back to the logits' stream, which waits."""
        torch.cuda.set_stream(self.logits)
        self.counted.record(self.stream)
        self.logits.wait_event(self.counted)

    def release(self) -> None:
        """Note that the lists are read no longer when the logits' stream has got this far."""
        self.penalised.record(self.logits)
