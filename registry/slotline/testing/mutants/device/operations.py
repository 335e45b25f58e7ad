"""Tables of operations with a bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.core.device import TorchOps
from slotline.registry.contracts.device import DecodeBatch, Download, TokenSampler, Verified
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.device.making import of_ops
from slotline.testing.reference.device import Advance, OwnOps, TableSampler

Tensor = torch.Tensor


class LastTie(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return logits.shape[1] - 1 - logits.flip(1).argmax(-1)


class Int32(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return super().argmax(logits).int()


class Column(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1, keepdim=True)

    def argmax_checked(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None]).squeeze(1).isnan()


class BlindToNan(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)


class NoNan(TorchOps):
    def argmax_checked(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.argmax(logits), None


class NanOrInfinity(TorchOps):
    def argmax_checked(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = self.argmax(logits)
        return tokens, ~logits.gather(1, tokens[:, None]).squeeze(1).isfinite()


class SmallVocabulary(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return logits[:, :4096].argmax(-1)


class IgnoresStrides(TorchOps):
    def argmax(self, logits: Tensor) -> Tensor:
        n, size = logits.shape
        return logits.as_strided((n, size), (logits.stride(0), 1)).argmax(-1)


class NextBit(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        return super().apply_bitmask(logits, words.long().bitwise_right_shift(1).int(), rows, in_place=in_place)


class NextWord(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        moved = torch.cat([words[:, :1], words[:, :-1]], 1) if words.shape[1] > 1 else words
        return super().apply_bitmask(logits, moved, rows, in_place=in_place)


class TailAllowed(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        whole = logits.shape[1] // 32 * 32
        found = super().apply_bitmask(logits, words, rows, in_place=in_place).clone()
        found[:, whole:] = logits[:, whole:]
        return found


class FirstRows(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        return super().apply_bitmask(logits, words, torch.arange(len(rows), dtype=rows.dtype), in_place=in_place)


class AlwaysInPlace(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        return super().apply_bitmask(logits, words, rows, in_place=True)


class SomeRow(TorchOps):
    def apply_bitmask(self, logits: Tensor, words: Tensor, rows: Tensor, *, in_place: bool = False) -> Tensor:
        if not rows.numel():
            raise ValueError("no rows")
        return super().apply_bitmask(logits, words, rows, in_place=in_place)


class MarksInOrder(TorchOps):
    def mark_unusable(self, logits: Tensor, raw: Tensor, touched: Any, tokens: Tensor, **marks: Any) -> Tensor:
        found = super().mark_unusable(logits, raw, touched, tokens, **marks)
        return found.masked_fill(found == marks["none_left"], marks["not_finite"])


class IgnoresTouched(TorchOps):
    def mark_unusable(self, logits: Tensor, raw: Tensor, touched: Any, tokens: Tensor, **marks: Any) -> Tensor:
        return super().mark_unusable(logits, raw, None, tokens, **marks)


class IgnoresRaw(TorchOps):
    def mark_unusable(self, logits: Tensor, raw: Tensor, touched: Any, tokens: Tensor, **marks: Any) -> Tensor:
        return super().mark_unusable(logits, torch.zeros_like(raw), touched, tokens, **marks)


class PutsInOrder(TorchOps):
    def put_rows(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        super().put_rows(table, rows.sort().values, values)


class GathersPacked(TorchOps):
    def gather_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        width = table.shape[1]
        packed = table.as_strided((len(table), width), (width, 1)) if table.stride(0) >= width else table
        super().gather_rows(packed, rows, out)


class ClearsRest(TorchOps):
    def gather_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        super().gather_rows(table, rows, out)
        out[len(rows) :] = 0


class WritesPadding(TorchOps):
    def gather_rows(self, table: Tensor, rows: Tensor, out: Tensor) -> None:
        super().gather_rows(table, rows, out)
        if out.stride(1) == 1 and out.stride(0) > out.shape[1]:
            out.as_strided((len(out), out.stride(0)), out.stride())[: len(rows), -1] = 0


class FindsPadded(TorchOps):
    def subtract_rejected(self, *given: Any) -> None:
        before = [slots.clone() for _, slots, _ in given[-1]]
        super().subtract_rejected(*given)
        for (table, slots, size), old in zip(given[-1], before, strict=True):
            blocks = table[given[2].clamp(max=len(table) - 1), given[3] // size].long() if len(table) else old
            slots.copy_(torch.where(old < 0, blocks * size + given[3] % size, slots))


class KeepsAccepted(TorchOps):
    def subtract_rejected(self, *given: Any) -> None:
        super().subtract_rejected(*[*given[:5], None, given[6]])


class FirstGroup(TorchOps):
    def subtract_rejected(self, *given: Any) -> None:
        super().subtract_rejected(*[*given[:6], given[6][:1]])


class CountsAllEqual(TorchOps):
    def verify_drafts(self, *given: Any, **named: Any) -> Verified:
        sampled, drafts, places = named["sampled"], named["drafts"], named["places"]
        if drafts is None:
            return super().verify_drafts(*given, **named)
        equal = (sampled == drafts).long()
        counts = torch.zeros_like(named["expected"][0]).index_add(0, places, equal)
        expected = named["expected"]
        right = torch.arange(len(sampled)) - expected[0][places] < counts[places]
        return super().verify_drafts(*given, **{**named, "drafts": torch.where(right, sampled, -1)})


class ReadsPreviousLate(TorchOps):
    def verify_drafts(self, *given: Any, **named: Any) -> Verified:
        found = super().verify_drafts(*given, **named)
        late = named["table"][named["input_ids"][named["logits_indices"][found.last]]]
        return found._replace(previous=late)


class KeepsMarks(TorchOps):
    def verify_drafts(self, *given: Any, **named: Any) -> Verified:
        found = super().verify_drafts(*given, **named)
        newest = named["sampled"][found.last]
        named["table"].scatter_(0, named["expected"][3], newest)
        return found._replace(newest=newest)


class RejectsAll(TorchOps):
    def verify_drafts(self, *given: Any, **named: Any) -> Verified:
        found = super().verify_drafts(*given, **named)
        named["rejected"][named["rows"]] = named["expected"][1]
        return found


class KeepsNoToken(TorchOps):
    def fill_drafts(self, found: Tensor, *given: Any, **named: Any) -> Tensor:
        return super().fill_drafts(**{**named, "vocab_size": named["vocab_size"] + 1}, found=found)


class LeavesMissing(TorchOps):
    def fill_drafts(self, found: Tensor, *given: Any, **named: Any) -> Tensor:
        answer = super().fill_drafts(**named, found=found)
        answer[:, 2 * found.shape[1] :] = 0
        return answer


class OnePlaceEarly(TorchOps):
    def fill_drafts(self, found: Tensor, *given: Any, **named: Any) -> Tensor:
        return super().fill_drafts(**{**named, "stand_ins": named["stand_ins"] - 1}, found=found)


class NullBlocks(TorchOps):
    def draft_places(self, found: Any, slots: Tensor, lead_slots: Tensor, positions: Tensor, *rest: Any) -> None:
        super().draft_places(found, slots, lead_slots, positions, rest[0].clamp(min=1), *rest[1:])


class BehindTheLongest(TorchOps):
    def draft_places(self, found: Any, slots: Tensor, lead_slots: Tensor, positions: Tensor, *rest: Any) -> None:
        super().draft_places(found, slots, lead_slots, positions, rest[0], rest[1], rest[2] + 1)


class LeadsBySide(TorchOps):
    def draft_places(self, found: Any, slots: Tensor, lead_slots: Tensor, positions: Tensor, *rest: Any) -> None:
        super().draft_places(found, slots, lead_slots, positions, *rest)
        if lead_slots.numel():
            lead_slots.copy_(lead_slots.view(-1, 2).T.flatten().clone())


class SlotsOfBefore(Advance):
    def __call__(self, at: int, width: int) -> None:
        taken = self.batch.taken.clone()
        super().__call__(at, width)
        batch, n = self.batch, len(self.batch.rows)
        positions = batch.positions[:n]
        blocks = taken[:n].gather(1, positions[:, None] // batch.block_size).squeeze(1).long()
        batch.slots[:n] = blocks * batch.block_size + positions % batch.block_size


class EveryGroup(Advance):
    def __call__(self, at: int, width: int) -> None:
        self.batch = self.batch._replace(first=True)
        super().__call__(at, width)


class PaddedToo(Advance):
    def __call__(self, at: int, width: int) -> None:
        super().__call__(at, width)
        self.batch.seq_lens[len(self.batch.rows) :] += self.batch.first


class NewTablesOnly(Advance):
    def __call__(self, at: int, width: int) -> None:
        table = self.batch.table.clone()
        super().__call__(at, width)
        self.batch.table.copy_(table)


def _advancing(kind: type[Advance]) -> type[TorchOps]:
    def advance_decode_batch(self: TorchOps, batch: DecodeBatch) -> Callable[[int, int], None] | None:
        return kind(batch)

    return type("Ops", (TorchOps,), {"advance_decode_batch": advance_decode_batch})


class ForgetsTable(TableSampler):
    def __call__(
        self, logits: Tensor, params: Tensor | None, stand_ins: Tensor, *, captured: bool
    ) -> tuple[Tensor, Download]:
        table = self.table.clone()
        found = super().__call__(logits, params, stand_ins, captured=captured)
        self.table.copy_(table)
        return found


class LandsBefore(TableSampler):
    def __call__(
        self, logits: Tensor, params: Tensor | None, stand_ins: Tensor, *, captured: bool
    ) -> tuple[Tensor, Download]:
        landed = self.landing.clone()
        tokens, _ = super().__call__(logits, params, stand_ins, captured=captured)
        return tokens, self.buffer.arriving(landed[: len(tokens)])


def _sampling(kind: type[TableSampler]) -> type[TorchOps]:
    def token_sampler(self: Any, table: Tensor, buffer: Any, max_rows: int, vocab_size: int) -> TokenSampler | None:
        return kind(table, buffer, max_rows)

    return type("Ops", (OwnOps,), {"token_sampler": token_sampler})


L1, L2 = Level.NUMERICS, Level.HOSTILE
ALL: tuple[Mutant, ...] = (
    of_ops("argmax-int32", "argmax gives int32", L1, Int32),
    of_ops("argmax-column", "argmax gives a column", L1, Column),
    of_ops("argmax-last-tie", "argmax takes the last of equal logits", L2, LastTie),
    of_ops("argmax-blind-to-nan", "argmax passes over NaN", L2, BlindToNan),
    of_ops("argmax-small-vocabulary", "argmax looks at 4096 tokens", L2, SmallVocabulary),
    of_ops("argmax-ignores-strides", "argmax takes a row's logits to be side by side", L2, IgnoresStrides),
    of_ops("checked-no-nan", "argmax_checked says that no row holds NaN", L2, NoNan),
    of_ops("checked-infinity", "argmax_checked takes infinity for NaN", L2, NanOrInfinity),
    of_ops("bitmask-next-bit", "the mask is off by one bit", L1, NextBit),
    of_ops("bitmask-next-word", "the mask is off by one word", L1, NextWord),
    of_ops("bitmask-tail-allowed", "tokens of the last, partial word are allowed", L1, TailAllowed),
    of_ops("bitmask-first-rows", "masks are of the first rows", L1, FirstRows),
    of_ops("bitmask-in-place", "the given logits are changed", L1, AlwaysInPlace),
    of_ops("bitmask-some-row", "no mask at all is an error", L2, SomeRow),
    of_ops("marks-in-order", "a row without tokens is marked as not finite", L1, MarksInOrder),
    of_ops("marks-all", "rows that nothing touched are marked", L1, IgnoresTouched),
    of_ops("marks-the-models", "NaN and infinity of the model are marked", L1, IgnoresRaw),
    of_ops("puts-in-order", "rows are put in ascending order", L1, PutsInOrder),
    of_ops("clears-rest", "rows behind those that are gathered are cleared", L1, ClearsRest),
    of_ops("gathers-packed", "rows of a part of a table are gathered as if they were side by side", L2, GathersPacked),
    of_ops("writes-padding", "the element behind a gathered row is cleared", L2, WritesPadding),
    of_ops("finds-padded", "slots of padded tokens are found", L1, FindsPadded),
    of_ops("keeps-accepted", "numbers of accepted tokens stay bounds", L1, KeepsAccepted),
    of_ops("first-group", "slots of the first cache group alone are found anew", L1, FirstGroup),
    of_ops("counts-all-equal", "drafts behind a wrong one count", L1, CountsAllEqual),
    of_ops(
        "previous-late", "the token in front of the newest is read after the newest was written", L1, ReadsPreviousLate
    ),
    of_ops("keeps-marks", "marks of rows without a token reach the table", L1, KeepsMarks),
    of_ops("rejects-all", "accepted drafts are noted as rejected", L1, RejectsAll),
    of_ops("keeps-no-token", "a draft one above the vocabulary is kept", L1, KeepsNoToken),
    of_ops("leaves-missing", "missing drafts are token 0", L1, LeavesMissing),
    of_ops("one-place-early", "drafts are kept one place early", L1, OnePlaceEarly),
    of_ops("null-blocks", "places without a block get a slot", L1, NullBlocks),
    of_ops("behind-the-longest", "a place behind the longest sequence gets a slot", L1, BehindTheLongest),
    of_ops("leads-by-side", "slots in front of the newest tokens are in another order", L1, LeadsBySide),
    of_ops("slots-of-before", "a repeated step finds slots in the tables of before", L1, _advancing(SlotsOfBefore)),
    of_ops("every-group", "each cache group moves the positions", L1, _advancing(EveryGroup)),
    of_ops("padded-too", "a repeated step moves padded rows", L1, _advancing(PaddedToo)),
    of_ops("new-tables-only", "a repeated step leaves the permanent tables", L1, _advancing(NewTablesOnly)),
    of_ops("forgets-table", "tokens do not reach the next step", L1, _sampling(ForgetsTable)),
    of_ops("lands-before", "the tokens of the step before arrive", L1, _sampling(LandsBefore)),
)
