"""Problems for the operations of a device: arguments, the call, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from slotline.registry.contracts.device import DeviceOps, DraftPlaces
from slotline.testing.check import Failed, Run
from slotline.testing.environments.device import Array, DeviceUnderTest, Laid, nan_rows, same
from slotline.testing.oracles import device as oracle

NOT_FINITE, NONE_LEFT, NOT_DRAWN = -2, -3, -5
BLOCK = 4
"""Tokens in a kernel block."""
MAX_DRAFTS = 3
Arguments = dict[str, Any]
Tensors = Mapping[str, Any]


@frozen(kw_only=True)
class Operation:
    """One operation and how to ask for it.

    Attributes:
        name: its name in `DeviceOps`.
        make: returns its arguments for so many rows and a vocabulary, arrays for the tensors.
        call: calls it with tensors in place of arrays, and returns its results by name.
        expected: returns the results, and the arguments that it writes, as arrays.
        variants: further arguments of `make`, one run each.
        writes: arguments that it has to write.
        may_write: arguments that it may write and need not.
    """

    name: str
    make: Callable[..., Arguments]
    call: Callable[[DeviceOps, Tensors], Mapping[str, torch.Tensor]]
    expected: Callable[..., Mapping[str, Array]]
    variants: tuple[Mapping[str, Any], ...] = field(default=(MappingProxyType({}),))
    writes: tuple[str, ...] = ()
    may_write: tuple[str, ...] = ()


def run_operation(operation: Operation, run: Run, rows: int, vocab_size: int, layout: str = "plain") -> None:
    """Run every variant of an operation.

    Raises:
        Failed: if a result or an argument differs from the oracle's, or memory beside a tensor was written.
    """
    under_test = DeviceUnderTest(run)
    for variant in operation.variants:
        arguments = operation.make(under_test.rng, rows, vocab_size, **variant)
        where = f"{operation.name}({', '.join(f'{name}={value}' for name, value in variant.items())}) of {rows} rows"
        _run(operation, under_test, arguments, layout, where)


def _run(operation: Operation, under_test: DeviceUnderTest, arguments: Arguments, layout: str, where: str) -> None:
    expected = operation.expected(**arguments)
    laid = {name: under_test.lay(value, layout) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    given = {name: laid[name].tensor if name in laid else value for name, value in arguments.items()}
    with under_test.at_work():
        results = dict(operation.call(under_test.ops, given))
    for name, tensor in results.items():
        wanted = expected[name]
        dtype = torch.from_numpy(np.empty(0, wanted.dtype)).dtype
        under_test.expect_tensor(tensor, wanted.shape, dtype, f"{where}: {name}")
        same(wanted, under_test.host(tensor), f"{where}: {name}")
    for name, one in laid.items():
        _expect_argument(operation, under_test, name, one, (arguments[name], expected.get(name)), where)


def _expect_argument(
    operation: Operation,
    under_test: DeviceUnderTest,
    name: str,
    laid: Laid,
    values: tuple[Array, Array | None],
    where: str,
) -> None:
    """Raise `Failed` unless an argument holds what it should, and its surroundings what they held."""
    before, after = values
    found = under_test.host(laid.tensor)
    unchanged = name in operation.may_write and np.array_equal(before, found, equal_nan=before.dtype.kind == "f")
    written = (*operation.writes, *operation.may_write)
    same(before if after is None or unchanged or name not in written else after, found, f"{where}: argument {name}")
    if laid.touched_outside():
        raise Failed(f"{where}: memory beside the argument {name} was written")


# --- logits


def _logits(rng: np.random.Generator, rows: int, vocab_size: int) -> Arguments:
    return {"logits": rng.normal(size=(rows, vocab_size)).astype(np.float32)}


def _argmax(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    return {"tokens": ops.argmax(given["logits"])}


def _argmax_checked(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    tokens, holds_nan = ops.argmax_checked(given["logits"])
    if holds_nan is None:
        return {"tokens": tokens}
    return {"tokens": tokens, "holds_nan": holds_nan}


def _checked(logits: Array) -> Mapping[str, Array]:
    return {**oracle.argmax(logits), "holds_nan": nan_rows(logits)}


def _masked(rng: np.random.Generator, rows: int, vocab_size: int, in_place: bool) -> Arguments:
    some = rng.permutation(rows)[: max(rows - 1, min(rows, 1))].astype(np.int32)
    words = rng.integers(-(2**31), 2**31, (len(some), -(-vocab_size // 32)), dtype=np.int64).astype(np.int32)
    return {**_logits(rng, rows, vocab_size), "words": words, "rows": some, "in_place": in_place}


def _apply_bitmask(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    found = ops.apply_bitmask(given["logits"], given["words"], given["rows"], in_place=given["in_place"])
    return {"logits": found}


def _bitmasked(logits: Array, words: Array, rows: Array, in_place: bool) -> Mapping[str, Array]:
    return oracle.apply_bitmask(logits, words, rows)


def _unusable(rng: np.random.Generator, rows: int, vocab_size: int, touched: bool, all_greedy: bool) -> Arguments:
    """Return rows that are usable, without any token, with NaN and infinity that were there before, or were not."""
    logits = rng.normal(size=(rows, vocab_size)).astype(np.float32)
    raw = logits.copy()
    for row in range(rows):
        place, kind = int(rng.integers(vocab_size)), row % 6
        if kind == 1:
            logits[row] = -np.inf
        elif kind >= 2:
            logits[row, place] = np.nan if kind % 2 else np.inf
            raw[row, place] = logits[row, place] if kind >= 4 else raw[row, place]
    tokens = oracle.argmax(logits)["tokens"] if all_greedy else rng.integers(0, vocab_size, rows)
    looked_at = (rng.random(rows) < 0.7) if touched else None
    return {"logits": logits, "raw": raw, "touched": looked_at, "tokens": tokens, "all_greedy": all_greedy}


def _mark_unusable(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    marks = {"not_finite": NOT_FINITE, "none_left": NONE_LEFT, "all_greedy": given["all_greedy"]}
    return {"marked": ops.mark_unusable(given["logits"], given["raw"], given["touched"], given["tokens"], **marks)}


def _marked(**arguments: Any) -> Mapping[str, Array]:
    return oracle.mark_unusable(**arguments, not_finite=NOT_FINITE, none_left=NONE_LEFT)


# --- tables


def _table(rng: np.random.Generator, rows: int, vocab_size: int) -> Array:
    width = vocab_size % 61 + 3
    found: Array = rng.integers(1, 1 << 20, (2 * rows + 3, width)).astype(np.int32)
    return found


def _put(rng: np.random.Generator, rows: int, vocab_size: int) -> Arguments:
    table = _table(rng, rows, vocab_size)
    chosen = rng.permutation(len(table))[:rows].astype(np.int64)
    return {"table": table, "rows": chosen, "values": rng.integers(0, 99, (rows, table.shape[1])).astype(np.int32)}


def _put_rows(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    ops.put_rows(given["table"], given["rows"], given["values"])
    return {}


def _gather(rng: np.random.Generator, rows: int, vocab_size: int) -> Arguments:
    table = _table(rng, rows, vocab_size)
    return {"table": table, "rows": rng.integers(0, len(table), rows), "out": np.full_like(table, 7)}


def _gather_rows(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    ops.gather_rows(given["table"], given["rows"], given["out"])
    return {}


# --- drafts


def _bounds(rng: np.random.Generator, rows: int, _vocab_size: int, accepted: bool, groups: int) -> Arguments:
    """Return a step of `rows` requests with one padded token and one padded request row."""
    counts = rng.integers(1, MAX_DRAFTS + 2, rows)
    owners = np.concatenate([np.repeat(np.arange(rows), counts), [rows] if rows else []]).astype(np.int64)
    rejected = rng.integers(0, MAX_DRAFTS, 2 * rows + 3).astype(np.int64)
    rejected[-1] = 0
    chosen = np.concatenate([rng.permutation(2 * rows + 2)[:rows], [2 * rows + 2]]).astype(np.int64)
    begins = rng.integers(MAX_DRAFTS, 20, rows)
    offsets = np.arange(len(owners)) - np.concatenate([np.cumsum(counts) - counts, [0]])[owners] * (owners < rows)
    positions = np.where(owners < rows, np.concatenate([begins, [0]])[owners] + offsets, 0).astype(np.int64)
    found: Arguments = {"rejected": rejected, "rows": chosen, "owners": owners, "positions": positions}
    found["seq_lens"] = (begins + counts).astype(np.int32)
    found["accepted"] = rng.integers(MAX_DRAFTS, 9, rows).astype(np.int32) if accepted else None
    for number in range(groups):
        slots = np.where(owners < rows, 1, -1).astype(np.int64)
        slots[: len(slots) // 4] = -1
        found[f"table{number}"] = rng.integers(1, 99, (rows, 24)).astype(np.int32)
        found[f"slots{number}"] = slots
    return found


def _groups(given: Tensors) -> list[tuple[Any, Any, int]]:
    """Return the groups of a step, the second with larger blocks."""
    numbers = [number for number in range(2) if f"table{number}" in given]
    return [(given[f"table{number}"], given[f"slots{number}"], BLOCK << number) for number in numbers]


_STEP = ("rejected", "rows", "owners", "positions", "seq_lens", "accepted")


def _subtract_rejected(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    ops.subtract_rejected(*[given[name] for name in _STEP] + [_groups(given)])
    return {}


def _subtracted(**arguments: Any) -> Mapping[str, Array]:
    return oracle.subtract_rejected(*[arguments[name] for name in _STEP] + [_groups(arguments)])


def _verification(rng: np.random.Generator, rows: int, vocab_size: int, drafted: bool) -> Arguments:
    """Return rows with up to `MAX_DRAFTS` drafts, some right. Inputs are tokens or the row's own placeholder."""
    verified = rng.integers(0, MAX_DRAFTS + 1, rows) if drafted else np.zeros(rows, np.int64)
    first = np.cumsum(verified + 1) - (verified + 1)
    num_logits = int((verified + 1).sum())
    sampled = rng.integers(0, vocab_size, num_logits)
    drafts = sampled.copy()
    drafts[rng.random(num_logits) < 0.4] += 1
    drafts[first + verified] = -1
    sampled[rng.random(num_logits) < 0.1] = NOT_DRAWN
    stand_ins = vocab_size + rng.permutation(2 * rows)[:rows] * (1 + MAX_DRAFTS)
    size = vocab_size + 2 * rows * (1 + MAX_DRAFTS) + 1
    places = np.repeat(np.arange(rows), verified + 1).astype(np.int64)
    indices, input_ids = rng.permutation(num_logits + 4)[:num_logits], np.zeros(num_logits + 4, np.int64)
    read = np.where(rng.random(num_logits) < 0.5, stand_ins[places], rng.integers(0, vocab_size, num_logits))
    input_ids[indices] = read
    expected = np.stack([first, verified, rng.integers(5, 90, rows), stand_ins, rng.integers(0, 9, rows)])
    return {
        "sampled": sampled,
        "drafts": drafts if drafted else None,
        "expected": expected.astype(np.int64),
        "rows": rng.permutation(2 * rows + 1)[:rows].astype(np.int64),
        "places": places,
        "input_ids": input_ids,
        "logits_indices": indices.astype(np.int64),
        "table": rng.integers(0, vocab_size, size),
        "rejected": rng.integers(0, 9, 2 * rows + 2),
        "max_drafts": MAX_DRAFTS,
    }


def _verify_drafts(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    found = ops.verify_drafts(**given)
    return {f"verified.{name}": getattr(found, name) for name in found._fields}


def _filling(rng: np.random.Generator, rows: int, vocab_size: int, columns: int, dtype: Any) -> Arguments:
    stand_ins = vocab_size + rng.permutation(rows + 2)[:rows] * (1 + MAX_DRAFTS)
    return {
        "found": rng.integers(-2, vocab_size + 2, (rows, columns)).astype(dtype),
        "newest": rng.integers(0, vocab_size, rows),
        "stand_ins": stand_ins.astype(np.int64),
        "table": rng.integers(0, vocab_size, vocab_size + (rows + 2) * (1 + MAX_DRAFTS)),
        "max_drafts": MAX_DRAFTS,
        "vocab_size": vocab_size,
    }


def _fill_drafts(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    return {"answer": ops.fill_drafts(**given)}


def _placing(rng: np.random.Generator, rows: int, _vocab_size: int, lead: bool) -> Arguments:
    """Return requests in the middle, at both ends of the longest sequence, and rows of no request."""
    longest = 40
    positions = rng.integers(0, longest, rows).astype(np.int64)
    positions[1::4], positions[2::4], positions[3::4] = longest - 2, -1, 0
    table = rng.integers(0, 30, (rows, longest // BLOCK + 1)).astype(np.int32)
    table[rng.random(table.shape) < 0.2] = 0
    shape, leads = (MAX_DRAFTS, rows), 2 * rows if lead else 0
    return {
        "seq_lens": np.full(shape, 5, np.int32),
        "places": np.full(shape, 5, np.int64),
        "lead_positions": np.full(leads, 5, np.int64),
        "slots": np.full(shape, 5, np.int64),
        "lead_slots": np.full(leads, 5, np.int64),
        "positions": positions,
        "table": table,
        "block_size": BLOCK,
        "max_model_len": longest,
    }


def _draft_places(ops: DeviceOps, given: Tensors) -> Mapping[str, torch.Tensor]:
    found = DraftPlaces(given["seq_lens"], given["places"], given["lead_positions"])
    rest = (given[name] for name in ("slots", "lead_slots", "positions", "table", "block_size", "max_model_len"))
    ops.draft_places(found, *rest)
    return {}


OPERATIONS: tuple[Operation, ...] = (
    Operation(name="argmax", make=_logits, call=_argmax, expected=oracle.argmax),
    Operation(name="argmax_checked", make=_logits, call=_argmax_checked, expected=_checked),
    Operation(
        name="apply_bitmask",
        make=_masked,
        call=_apply_bitmask,
        expected=_bitmasked,
        variants=({"in_place": False},),
    ),
    Operation(
        name="apply_bitmask_in_place",
        make=_masked,
        call=_apply_bitmask,
        expected=_bitmasked,
        variants=({"in_place": True},),
        may_write=("logits",),
    ),
    Operation(
        name="mark_unusable",
        make=_unusable,
        call=_mark_unusable,
        expected=_marked,
        variants=tuple({"touched": one, "all_greedy": other} for one in (False, True) for other in (False, True)),
    ),
    Operation(name="put_rows", make=_put, call=_put_rows, expected=oracle.put_rows, writes=("table",)),
    Operation(name="gather_rows", make=_gather, call=_gather_rows, expected=oracle.gather_rows, writes=("out",)),
    Operation(
        name="subtract_rejected",
        make=_bounds,
        call=_subtract_rejected,
        expected=_subtracted,
        variants=({"accepted": False, "groups": 1}, {"accepted": True, "groups": 2}, {"accepted": True, "groups": 0}),
        writes=("positions", "seq_lens", "accepted", "slots0", "slots1"),
    ),
    Operation(
        name="verify_drafts",
        make=_verification,
        call=_verify_drafts,
        expected=oracle.verify_drafts,
        variants=({"drafted": True}, {"drafted": False}),
        writes=("table", "rejected"),
    ),
    Operation(
        name="fill_drafts",
        make=_filling,
        call=_fill_drafts,
        expected=oracle.fill_drafts,
        variants=({"columns": MAX_DRAFTS, "dtype": np.int64}, {"columns": 1, "dtype": np.int32}),
        writes=("table",),
    ),
    Operation(
        name="draft_places",
        make=_placing,
        call=_draft_places,
        expected=oracle.draft_places,
        variants=({"lead": False}, {"lead": True}),
        writes=("seq_lens", "places", "lead_positions", "slots", "lead_slots"),
    ),
)
"""Operations whose results the arguments determine. Draws and repeated steps have checks of their own."""
