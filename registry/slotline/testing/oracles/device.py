"""Results of the operations of a device, one row at a time in numpy.

Each function takes an operation's arguments as arrays. It returns the results, and the arguments that the operation
writes as they are afterwards. Nothing here is shared with the torch operations of the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Results = dict[str, Array]
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of SplitMix64 (Steele, Lea, Flood 2014, fig. 17)."""
GROWTH = 0x9E3779B97F4A7C15
"""Growth of SplitMix64's counter for each position."""
_MASK = (1 << 64) - 1


def argmax(logits: Array) -> Results:
    """Return the first place of the largest entry of each row. NaN counts as infinity."""
    values = np.where(np.isnan(logits), np.float32(np.inf), logits)
    return {"tokens": np.array([int(np.flatnonzero(row == row.max())[0]) for row in values], np.int64)}


def apply_bitmask(logits: Array, words: Array, rows: Array) -> Results:
    """Return the logits with minus infinity where a token's bit is 0."""
    result = logits.copy()
    for row, own in zip(rows.tolist(), words, strict=True):
        for token in range(logits.shape[1]):
            if not int(own[token // 32]) >> (token % 32) & 1:
                result[row, token] = -np.inf
    return {"logits": result}


def mark_unusable(
    logits: Array,
    raw: Array,
    touched: Array | None,
    tokens: Array,
    *,
    not_finite: int,
    none_left: int,
    all_greedy: bool,
) -> Results:
    """Return the tokens with a mark in rows where none could be drawn."""
    marked = tokens.copy()
    for row, values in enumerate(logits):
        if touched is not None and not touched[row]:
            continue
        place = int(tokens[row]) if all_greedy else int(argmax(values[None])["tokens"][0])
        if values[place] == -np.inf:
            marked[row] = none_left
        elif not np.isfinite(values[place]) and np.isfinite(raw[row, place]):
            marked[row] = not_finite
    return {"marked": marked}


def put_rows(table: Array, rows: Array, values: Array) -> Results:
    """Return the table with `values` over the rows `rows`."""
    table = table.copy()
    for row, own in zip(rows.tolist(), values, strict=True):
        table[row] = own
    return {"table": table}


def gather_rows(table: Array, rows: Array, out: Array) -> Results:
    """Return `out` with the rows `rows` of the table in front."""
    out = out.copy()
    for at, row in enumerate(rows.tolist()):
        out[at] = table[row]
    return {"out": out}


def subtract_rejected(
    rejected: Array,
    rows: Array,
    owners: Array,
    positions: Array,
    seq_lens: Array,
    accepted: Array | None,
    groups: Sequence[tuple[Array, Array, int]],
) -> Results:
    """Return exact positions, lengths, accepted numbers, and each group's slots as `slots0`, `slots1` and so on."""
    positions, seq_lens = positions.copy(), seq_lens.copy()
    accepted = None if accepted is None else accepted.copy()
    for request in range(len(seq_lens)):
        seq_lens[request] -= rejected[rows[request]]
        if accepted is not None:
            accepted[request] -= rejected[rows[request]]
    for token, owner in enumerate(owners.tolist()):
        positions[token] -= rejected[rows[owner]]
    found = {"positions": positions, "seq_lens": seq_lens}
    if accepted is not None:
        found["accepted"] = accepted
    for number, (table, slots, size) in enumerate(groups):
        own = slots.copy()
        for token, position in enumerate(positions.tolist()):
            if own[token] >= 0:
                own[token] = int(table[owners[token], position // size]) * size + position % size
        found[f"slots{number}"] = own
    return found


def verify_drafts(
    sampled: Array,
    drafts: Array | None,
    expected: Array,
    rows: Array,
    places: Array,
    input_ids: Array,
    logits_indices: Array,
    table: Array,
    rejected: Array,
    max_drafts: int,
) -> Results:
    """Return the fields of `Verified`, and the tables of placeholders and of rejected drafts."""
    before, table, rejected = table, table.copy(), rejected.copy()
    found: dict[str, list[int]] = {name: [] for name in ("last", "newest", "positions", "rejected", "previous")}
    for row, (first, count, known, stand_in) in enumerate(expected[:4].T.tolist()):
        stood = 0
        while drafts is not None and stood < count and sampled[first + stood] == drafts[first + stood]:
            stood += 1
        last = first + stood
        newest = max(int(sampled[last]), 0)
        values = (last, newest, known + stood, count - stood, int(before[input_ids[logits_indices[last]]]))
        for own, value in zip(found.values(), values, strict=True):
            own.append(value)
        table[stand_in], rejected[rows[row]] = newest, count - stood
    results: Results = {f"verified.{name}": np.array(values, np.int64) for name, values in found.items()}
    return {**results, "table": table, "rejected": rejected}


def fill_drafts(
    found: Array, newest: Array, stand_ins: Array, table: Array, max_drafts: int, vocab_size: int
) -> Results:
    """Return what the drafter answered with the drafts behind it, and the table that keeps them."""
    table, answer = table.copy(), []
    for own, token, stand_in in zip(found.tolist(), newest.tolist(), stand_ins.tolist(), strict=True):
        said = [own[j] if j < len(own) and 0 <= own[j] < vocab_size else token for j in range(max_drafts)]
        table[stand_in + 1 : stand_in + 1 + max_drafts] = said
        answer.append([*own, *said])
    shape = (len(found), found.shape[1] + max_drafts)
    return {"answer": np.array(answer, np.int64).reshape(shape), "table": table}


def draft_places(
    seq_lens: Array,
    places: Array,
    lead_positions: Array,
    slots: Array,
    lead_slots: Array,
    positions: Array,
    table: Array,
    block_size: int,
    max_model_len: int,
) -> Results:
    """Return lengths, positions and slots of a drafter's tokens."""

    def slot(request: int, place: int) -> int:
        inside = min(max(place, 0), max_model_len - 1)
        block = int(table[request, inside // block_size])
        stored = positions[request] >= 0 and place == inside and block != 0
        return block * block_size + inside % block_size if stored else -1

    seq_lens, places, slots = seq_lens.copy(), places.copy(), slots.copy()
    lead_positions, lead_slots = lead_positions.copy(), lead_slots.copy()
    for request, newest in enumerate(positions.tolist()):
        for j in range(len(slots)):
            inside = min(max(newest + j, 0), max_model_len - 1)
            places[j, request], seq_lens[j, request] = inside, inside + 1 if newest >= 0 else 0
            slots[j, request] = slot(request, newest + j)
        if len(lead_slots):
            for j, place in enumerate((newest - 1, newest)):
                lead_positions[2 * request + j] = min(max(place, 0), max_model_len - 1)
                lead_slots[2 * request + j] = slot(request, place)
    return {
        "seq_lens": seq_lens,
        "places": places,
        "slots": slots,
        "lead_positions": lead_positions,
        "lead_slots": lead_slots,
    }


def advance(batch: Mapping[str, Any], at: int, width: int) -> Results:
    """Return the tensors of a `DecodeBatch` one token further."""
    after = {name: value.copy() for name, value in batch.items() if isinstance(value, np.ndarray)}
    count, size = len(batch["rows"]), batch["block_size"]
    for request, row in enumerate(batch["rows"].tolist()):
        change = int(batch["changes"][at + request]) if width else -1
        if change >= 0:
            begin = at + count + change * width
            columns = batch["changes"][begin : begin + width]
            after["table"][row, :width] = after["taken"][request, :width] = columns
        if batch["first"]:
            after["positions"][request] += 1
            after["seq_lens"][request] += 1
            if batch["drawn"]:
                counter = (int(after["counters"][request, 3]) + batch["stride"]) & _MASK
                after["counters"][request, 3] = counter - (1 << 64 if counter >> 63 else 0)
        position = int(after["positions"][request])
        after["slots"][request] = int(after["taken"][request, position // size]) * size + position % size
    return after


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position: SplitMix64's, of counter seed + (position + 1) * GROWTH."""
    z = (seed + (position + 1) * GROWTH) & _MASK
    for shift, factor in MIX:
        z = (z ^ (z >> shift)) * factor & _MASK
    return (z >> 11) * 2.0**-53


def kept(logits: Array, temperature: float, floor: float, top_k: int, top_p: float) -> Array:
    """Return scaled logits [vocab_size] float64 of one row, minus infinity where floor, top-k or top-p excludes one."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    ordered = scaled[order]
    left = ordered >= ordered[0] + floor
    if top_k > 0:
        left &= np.arange(len(left)) < top_k
    weights = np.where(left, np.exp(ordered - ordered[0]), 0.0)
    shares = weights / weights.sum()
    if top_p < 1:
        left &= (np.cumsum(shares) - shares < top_p) | (np.arange(len(left)) == 0)
    result = np.full(len(scaled), -np.inf)
    result[order[left]] = ordered[left]
    return result


def drawn(final: Array, number: float, slack: float) -> set[int]:
    """Return the tokens that a draw at `number` may give, from logits [vocab_size] float64. `slack` is for rounding."""
    weights = np.exp(final - final.max())
    ends = np.cumsum(weights / weights.sum())
    begins = ends - weights / weights.sum()
    return set(np.flatnonzero((weights > 0) & (begins - slack <= number) & (number <= ends + slack)).tolist())
