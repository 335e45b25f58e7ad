"""Common parts of the kernels of several kinds: the request of a block, and functions of one value."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = 1.4426950408889634


@triton.jit
def find_chunk(index, starts, first, end, chunk: tl.constexpr):
    """Return the request among `first` .. `end` that a chunk of tokens belongs to, and the chunk's number in it.

    Request r begins at chunk (tokens before) // chunk + (requests before). This leaves room for all its chunks, and for
    some unused chunks, whose number in the request is beyond its end.
    """
    offset = tl.load(starts + first)
    low, high = first, end
    while low + 1 < high:
        middle = (low + high) // 2
        begin = (tl.load(starts + middle) - offset) // chunk + middle - first
        if begin <= index:
            low = middle
        else:
            high = middle
    begin = (tl.load(starts + low) - offset) // chunk + low - first
    return low, index - begin


@triton.jit(do_not_specialize=["first", "end", "num_tokens"])
def clear(out, starts, slots, first, end, num_tokens, size, block: tl.constexpr):
    """Clear the tokens of padded requests and those after the last one.

    Grid: (requests `first` .. `end` and one more, any number).
    """
    row = first + tl.program_id(0)
    padded = tl.load(slots + row, mask=row < end, other=-1) < 0
    begin = tl.load(starts + row)
    last = tl.load(starts + row + 1, mask=row < end, other=num_tokens)
    last = tl.where(padded, last, begin)
    stop = last.to(tl.int64) * size
    each = block * tl.num_programs(1)
    for at in range(begin.to(tl.int64) * size + tl.program_id(1) * block, stop, each):
        place = at + tl.arange(0, block)
        tl.store(out + place, tl.zeros([block], out.dtype.element_ty), mask=place < stop)


@triton.jit
def limit(has_state, size):
    """Return how many of `size` numbers along an axis of a state to read: all, or none of a request that starts."""
    return tl.where(tl.load(has_state) != 0, size, 0)


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), also if 1 + exp(x) rounds to 1: the rounding error of the sum is corrected."""
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    kept = tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.where(x > 20.0, x, tl.where(total == 1.0, grown, tl.log(total) * (grown / kept)))


@triton.jit
def time_step(dt, low, high, has_softplus: tl.constexpr, has_limit: tl.constexpr):
    """Return dt with its bias: made positive, then clamped."""
    if has_softplus:
        dt = softplus(dt)
    if has_limit:
        dt = tl.minimum(tl.maximum(dt, low), high)
    return dt


@triton.jit
def before_states(waits, ahead: tl.constexpr):
    """Let the next kernel start, in a kernel that may start while the previous one ends.

    If it `waits`, the next kernel starts only after all previous ones have ended. With `ahead`, slots and states are
    read before the kernel's own wait. `order.Order` decides this.
    """
    if waits != 0:
        gdc_wait()
    gdc_launch_dependents()
    if not ahead:
        gdc_wait()


@triton.jit
def before_inputs(ahead: tl.constexpr):
    """Wait for the previous kernels. Results of the step must not be read or written before.

    A second wait would delay the following work until the states have been loaded.
    """
    if ahead:
        gdc_wait()
