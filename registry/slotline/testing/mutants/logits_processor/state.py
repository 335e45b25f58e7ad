"""Logits processors that are wrong about rows, history and drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.testing.reference.logits_processor import MovingFloor, RecentPenalty, RepeatLimit

Params = Mapping[str, Any]

# --- rows


class PlaceForRow(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        rows = attrs.evolve(batch, rows=np.arange(len(batch.rows)))
        for entry in range(len(batch.rows)):
            penalty, window, banned = self.rows.get(entry, (1.0, 1, []))
            self.penalise(logits[entry], self.history(rows, entry)[-window:], penalty)
            logits[entry, banned] = -torch.inf
        return logits


class FirstRowOnly(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        first = attrs.evolve(batch, rows=batch.rows[:1], num_tokens=batch.num_tokens[:1])
        logits[:1] = super().apply(logits[:1], first)
        return logits


class FirstLengthForAll(RecentPenalty):
    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        return batch.token_table[batch.rows[entry], : batch.num_tokens[0]].tolist()  # type: ignore[no-any-return]


class SortedByRow(RecentPenalty):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        order = torch.from_numpy(np.argsort(batch.rows, kind="stable"))
        return super().apply(logits, batch)[order.to(logits.device)]


class LastRequestForAll(RecentPenalty):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        answer = super().admit(row, params, prompt_token_ids)
        self.rows = dict.fromkeys(range(max(row, *self.rows) + 1), self.rows[row])
        return answer


class BansPileUp(RecentPenalty):
    """Adds a new request's bans to those that the row had."""

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        before = self.rows.get(row, (1.0, 1, []))[2]
        answer = super().admit(row, params, prompt_token_ids)
        penalty, window, banned = self.rows[row]
        self.rows[row] = (penalty, window, before + banned)
        return answer

    def release(self, row: int) -> None: ...


class CountsAreNotReset(RepeatLimit):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        counts = self.counts[row].copy()
        answer = super().admit(row, params, prompt_token_ids)
        self.counts[row] = counts
        return answer


class ForgetsNotWhatItCounted(RepeatLimit):
    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        counted = self.counted[row]
        answer = super().admit(row, params, prompt_token_ids)
        self.counted[row] = counted
        return answer


class ReleaseForgetsAll(RepeatLimit):
    def release(self, row: int) -> None:
        self.counts[:] = 0


class CachesByRowAndLength(RecentPenalty):
    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.cache: dict[tuple[int, int], list[int]] = {}

    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        key = int(batch.rows[entry]), int(batch.num_tokens[entry]) // 8
        return self.cache.setdefault(key, super().known(batch, entry))


# --- history


class ReadsOneBeyond(RecentPenalty):
    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        tokens = batch.token_table[batch.rows[entry], : batch.num_tokens[entry] + 1]
        return np.clip(tokens, 0, self.vocab_size - 1).tolist()  # type: ignore[no-any-return]


class ReadsRestOfRow(RepeatLimit):
    """Reads the table to its end where the request has no output yet."""

    def count(self, batch: LogitsBatch) -> None:
        super().count(batch)
        for entry, row in enumerate(batch.rows.tolist()):
            if batch.num_tokens[entry] == batch.num_prompt_tokens[entry]:
                rest = batch.token_table[row, batch.num_tokens[entry] :]
                np.add.at(self.counts[row], rest[(rest > 0) & (rest < self.counts.shape[1])], 1)


class WritesDraftsIntoTable(RecentPenalty):
    def history(self, batch: LogitsBatch, entry: int) -> list[int]:
        row, known = batch.rows[entry], int(batch.num_tokens[entry])
        drafts = self.drafts(batch, entry)
        batch.token_table[row, known : known + len(drafts)] = drafts
        return batch.token_table[row, : known + len(drafts)].tolist()  # type: ignore[no-any-return]


class LastStepOnly(RepeatLimit):
    def count(self, batch: LogitsBatch) -> None:
        for row in set(batch.rows.tolist()):
            entry = batch.rows.tolist().index(row)
            end = int(batch.num_tokens[entry] - batch.num_prompt_tokens[entry])
            if 0 < self.counted[row] < end:
                self.counted[row] = end - 1  # a step brings one token, it thinks
        super().count(batch)


# --- speculation


class IgnoresDrafts(RecentPenalty):
    def drafts(self, batch: LogitsBatch, entry: int) -> list[int]:
        return []


class AllDraftsAtOnce(RecentPenalty):
    def drafts(self, batch: LogitsBatch, entry: int) -> list[int]:
        if batch.draft_token_ids is None:
            return []
        own = batch.draft_token_ids[batch.rows == batch.rows[entry]]
        return [token for token in own.max(axis=0).tolist() if token >= 0]


class OneDraftShort(RecentPenalty):
    def drafts(self, batch: LogitsBatch, entry: int) -> list[int]:
        return super().drafts(batch, entry)[:-1]


class CountsDraftsForGood(RepeatLimit):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        after = super().apply(logits, batch)
        if batch.draft_token_ids is not None:
            for entry, row in enumerate(batch.rows.tolist()):
                np.add.at(self.counts[row], batch.draft_token_ids[entry, : batch.draft_positions[entry]], 1)
        return after


class TrustsItsDrafts(RecentPenalty):
    """Keeps what it has seen of each row, and takes the last step's drafts for accepted."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.seen: dict[int, list[int]] = {}

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        self.seen[row] = []
        return super().admit(row, params, prompt_token_ids)

    def known(self, batch: LogitsBatch, entry: int) -> list[int]:
        known = super().known(batch, entry)
        return (self.seen[int(batch.rows[entry])] + known[len(self.seen[int(batch.rows[entry])]) :])[: len(known)]

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        histories = [self.history(batch, entry) for entry in range(len(batch.rows))]
        after = super().apply(logits, batch)
        for row, history in zip(batch.rows.tolist(), histories, strict=True):
            self.seen[row] = max(self.seen[row], history, key=len)
        return after


class CountsCalls(RepeatLimit):
    """Takes each call for one more token, though a step may be called for again."""

    def count(self, batch: LogitsBatch) -> None:
        for row in set(batch.rows.tolist()):
            entry = batch.rows.tolist().index(row)
            self.counts[row, batch.token_table[row, int(batch.num_tokens[entry]) - 1]] += 1


class PacksTooSeldom(RecentPenalty):
    """Packs the rows' parameters anew only when their number has changed."""

    packed: dict[int, tuple[float, int, list[int]]]

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        if len(getattr(self, "packed", {})) != len(self.rows):
            self.packed = dict(self.rows)
        own, self.rows = self.rows, {**self.rows, **self.packed}
        after = super().apply(logits, batch)
        self.rows = own
        return after


class PaddingForTokens(RecentPenalty):
    """Indexes the logits with the -1 that stands before the first token of a short history."""

    def history(self, batch: LogitsBatch, entry: int) -> list[int]:
        return batch.tail()[entry].tolist()  # type: ignore[no-any-return]

    def penalise(self, logits: torch.Tensor, recent: list[int], penalty: float) -> None:
        super().penalise(logits, [token % len(logits) for token in recent], penalty)


# --- sequences


class MovesAtEachCall(MovingFloor):
    def moves(self, before: int, length: int) -> bool:
        return length in (before, before + 1)


class GoesOn(MovingFloor):
    """Writes a request's floor only into a row that had none."""

    def admit(self, row: int, params: Params, prompt_token_ids: list[int]) -> bool:
        before = self.floors[row]
        answer = super().admit(row, params, prompt_token_ids)
        self.floors[row] = before or self.floors[row]
        return answer


class RemembersByPlace(MovingFloor):
    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        by_place = {entry: self.shown.get(entry) for entry in range(len(batch.rows))}
        shown = {row: by_place[entry] for entry, row in enumerate(batch.rows.tolist())}
        self.shown = {row: known for row, known in shown.items() if known is not None}
        found = super().apply(logits, batch)
        self.shown = {entry: self.shown[row] for entry, row in enumerate(batch.rows.tolist())}
        return found


# --- a row's third request, with a prompt that was there before


class SettingsByPrompt(RecentPenalty):
    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.settings: dict[tuple[int, ...], tuple[float, int, list[int]]] = {}

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        answer = super().admit(row, params, prompt_token_ids)
        self.rows[row] = self.settings.setdefault(tuple(prompt_token_ids), self.rows[row])
        return answer


class EqualPromptIsTheSameRequest(SettingsByPrompt):
    """Keeps what it knows of a row's last prompt, by row."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.last: dict[int, tuple[tuple[int, ...], tuple[float, int, list[int]]]] = {}

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        answer = RecentPenalty.admit(self, row, params, prompt_token_ids)
        before = self.last.get(row)
        if before is not None and before[0] == tuple(prompt_token_ids):
            self.rows[row] = before[1]
        self.last[row] = (tuple(prompt_token_ids), self.rows[row])
        return answer


class OnlyTwoUses(RecentPenalty):
    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.uses: dict[tuple[int, ...], int] = {}

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        answer = super().admit(row, params, prompt_token_ids)
        key = tuple(prompt_token_ids)
        self.uses[key] = self.uses.get(key, 0) + 1
        if self.uses[key] > 2:
            self.rows[row] = (1.0, 1, [])
        return answer
