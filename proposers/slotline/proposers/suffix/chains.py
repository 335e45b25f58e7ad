"""Hash chains over tokens, compiled: keeping them, and voting over the places that they lead to."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import numpy as np

from slotline.kernels.numba_cache import cached_njit


@cached_njit(nogil=True)
def _hash(tokens: Any, end: int, count: int, buckets: int) -> int:
    """Return the bucket of the `count` tokens up to and including `end` of a ring."""
    size = len(tokens)
    value = np.uint32(0)
    for i in range(count):
        value = np.uint32((value ^ np.uint32(tokens[(end - i) % size])) * np.uint32(0x9E3779B1))
    return int(value >> np.uint32(7)) & (buckets - 1)


@cached_njit(nogil=True)
def extend(rows: Any, table: Any, known: Any, tokens: Any, before: Any, latest: Any, count: Any, shortest: int) -> None:
    """Add the tokens that `rows` [n] got since the last call: tokens [.., length], `before` and `latest` by row.

    Args:
        table: [max_requests, max_model_len], read up to `known` [n].
        count: [max_requests], tokens that were added before. Becomes `known`.
    """
    for index in range(len(rows)):
        row, end = rows[index], known[index]
        for place in range(count[row], end):
            tokens[row, place] = table[row, place]
            before[row, place] = -1
            if place + 1 >= shortest:
                bucket = _hash(tokens[row], place, shortest, latest.shape[1])
                before[row, place] = latest[row, bucket]
                latest[row, bucket] = place
        count[row] = end


@cached_njit(nogil=True)
def remember(text: Any, past: Any, gaps: Any, latest: Any, end: int, shortest: int) -> int:
    """Append `text` and -1 to the ring `past`, whose next token is number `end`, and return the new end."""
    size = len(past)
    for i in range(len(text) + 1):
        at = end % size
        past[at] = text[i] if i < len(text) else -1
        gaps[at] = 0
        if shortest - 1 <= i < len(text):
            bucket = _hash(past, end, shortest, len(latest))
            if latest[bucket] >= 0 and end - latest[bucket] < size:
                gaps[at] = end - latest[bucket]
            latest[bucket] = end
        end += 1
    return end


@cached_njit(nogil=True)
def _match(text: Any, last: int, other: Any, place: int, room: int, longest: int) -> int:
    """Return the number of tokens up to `last` of a text that equal those up to `place` of a ring, at most `room`."""
    size = len(other)
    length = 0
    most = min(longest, room, last + 1)
    while length < most and text[last - length] == other[(place - length) % size]:
        length += 1
    return length


@cached_njit(nogil=True)
def _keep(places: Any, kept: int, best: int, length: int, place: int) -> tuple[int, int]:
    """Record a place of a match, and keep only those of the longest match. Return their number and its length."""
    if length > best:
        kept, best = 0, length
    if length == best:
        places[kept] = place
        kept += 1
    return kept, best


@cached_njit(nogil=True)
def _vote(source: Any, end: int, places: Any, kept: int, most: int, least: float, wraps: bool, out: Any) -> float:
    """Fill `out` with the tokens that most places agree on and return the sum of their probabilities.

    Args:
        source: a ring of tokens, of which those below number `end` are known.
        places: [kept] numbers of the tokens that matched, whose order is not preserved.
        most, least: most drafts, and the least probability of a draft.
        wraps: True if `end` is the end of the text itself, which its own draft continues.
    """
    size, alive, score = len(source), kept, 0.0
    for position in range(most):
        token, votes = -1, 0
        for i in range(alive):
            candidate = _behind(source, size, places[i] + 1 + position, end, wraps, out)
            if candidate < 0 or candidate == token:
                continue
            count = 0
            for other in range(i, alive):
                count += _behind(source, size, places[other] + 1 + position, end, wraps, out) == candidate
            if count > votes:
                token, votes = candidate, count
        if token < 0 or votes < least * kept:
            break
        agreeing = 0
        for i in range(alive):
            if _behind(source, size, places[i] + 1 + position, end, wraps, out) == token:
                places[agreeing] = places[i]
                agreeing += 1
        alive = agreeing
        out[position] = token
        score += votes / kept
    return score


@cached_njit(nogil=True)
def _behind(source: Any, size: int, number: int, end: int, wraps: bool, out: Any) -> int:
    """Return token `number` of a ring. After its end, return the draft's token if it `wraps`, else -1."""
    if number < end:
        return int(source[number % size])
    return out[number - end] if wraps else -1


@cached_njit(nogil=True)
def propose(
    rows: Any,
    known: Any,
    tokens: Any,
    before: Any,
    latest: Any,
    past: Any,
    gaps: Any,
    past_latest: Any,
    past_end: int,
    shortest: int,
    longest: int,
    most_places: int,
    factor: float,
    least: float,
    drafts: Any,
) -> None:
    """Fill drafts [n, k], which holds -1, for `rows` [n], from each one's text or from the past, whatever says more."""
    for index in range(len(rows)):
        row = rows[index]
        text, last = tokens[row], known[row] - 1
        if last + 1 < shortest:
            continue
        places = np.empty(most_places, np.int64)
        kept, best = 0, shortest
        place = int(before[row, last])
        for _ in range(most_places):
            if place < 0:
                break
            length = _match(text, last, text, place, place + 1, longest)
            kept, best = _keep(places, kept, best, length, place)
            place = int(before[row, place])
        most = min(drafts.shape[1], max(1, int(factor * best)))
        score = _vote(text, last + 1, places, kept, most, least, True, drafts[index])
        if len(past) == 0:
            continue
        kept, best = 0, shortest
        number = past_latest[_hash(text, last, shortest, len(past_latest))]
        for _ in range(most_places):
            room = number - (past_end - len(past)) + 1  # tokens before that the ring still holds
            if number < 0 or room < shortest:
                break
            length = _match(text, last, past, number, min(room, number + 1), longest)
            kept, best = _keep(places, kept, best, length, number)
            gap = gaps[number % len(past)]
            if gap == 0:
                break
            number -= gap
        other = np.full(drafts.shape[1], -1, np.int64)
        most = min(drafts.shape[1], max(1, int(factor * best)))
        if kept and _vote(past, past_end, places, kept, most, least, False, other) > score:
            drafts[index] = other
