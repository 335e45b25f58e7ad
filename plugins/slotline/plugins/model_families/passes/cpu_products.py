"""Choice of how a CPU multiplies by a weight: its layout for all numbers of rows, and the kernel for each.

Which is fastest hangs on the processor, the threads, the dtype and the shape, so candidates are timed once when a model
is loaded. The answer is kept in the cache folder, and whoever writes it first decides: every later start, and every
rank that starts at the same time, computes alike. `docs/decisions/cpu-linear.md` has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from attrs import asdict, frozen
from torch.nn import functional

from slotline.plugins.model_families.linear_records import CLASSES, FOLDER, LAYOUTS, Record
from slotline.plugins.model_families.passes.few_rows import ADD, LANES, MOST_ROWS, dense_kernels, panel_kernels
from slotline.registry.cache_folder import cache_folder, write_first
from slotline.registry.processor import processor

Choice = Literal["timed", "onednn", "plain"]
"""`timed`; or a layout: oneDNN's blocked one with oneDNN's products alone, or the checkpoint's own for torch's product
and our kernel."""

SMALL = 1 << 16
"""Bytes of a weight below which nothing is timed: caches hold it, and oneDNN's layout is taken."""
MOST_OUTPUTS = 4096
"""Outputs of a shape that is timed; larger weights are taken to be like it."""
COPIES_BYTES = 1 << 26
"""Bytes of weights that a candidate goes through in turn, so that no cache holds them."""
FEWEST_CALLS, MOST_CALLS, CLASS_SECONDS = 4, 40, 0.03
"""Calls of each candidate in a class of rows, and the seconds after which no more begin than the fewest. A call is
short enough to be left alone by other work on the machine now and then, and the least time counts."""
IMPORTANCE = (3, 1, 2, 2)
"""Weights of the classes of rows where layouts are compared."""
MARGIN = 0.02
"""Share by which the plain layout must be faster, so that noise seldom decides."""
MOST_LOSS = 0.3
"""Logarithm of the ratio of times by which the plain layout may lose in any class of rows."""

_ONEDNN = torch.ops.mkldnn._linear_pointwise


@frozen
class Way:
    """How one shape is multiplied.

    Attributes:
        layout: ``onednn`` or ``plain``.
        kernels: for each class of rows: ``onednn`` or ``panels`` in oneDNN's layout, ``torch`` or ``numba`` in the
            plain one.
    """

    layout: str = "onednn"
    kernels: tuple[str, ...] = ("onednn",) * len(CLASSES)

    def kernel(self, rows: int) -> str:
        """Return the kernel for a number of rows."""
        return self.kernels[next((i for i, most in enumerate(CLASSES[:-1]) if rows <= most), len(CLASSES) - 1)]


ONEDNN = Way()


def way_for(choice: Choice, out_features: int, in_features: int, dtype: torch.dtype) -> Way:
    """Return how weights of a shape are multiplied. Times candidates if this is asked for and was not done before."""
    if choice == "onednn" or dtype not in (torch.float32, torch.bfloat16):
        return ONEDNN
    if choice == "timed" and out_features * in_features * dtype.itemsize < SMALL:
        return ONEDNN
    shape = min(out_features, MOST_OUTPUTS), in_features
    if choice == "plain":
        few = "numba" if _has_kernel(in_features) else "torch"
        return Way("plain", (few, few, few, "torch"))
    record = _record(*shape, dtype, torch.get_num_threads())
    return ONEDNN if record is None else Way(record.layout, tuple(record.kernels))


def has_panels(dtype: torch.dtype, in_features: int) -> bool:
    """Return True if our kernel of few rows reads oneDNN's layout of such weights."""
    even = dtype == torch.float32 or in_features % 2 == 0
    return even and bool(dense_kernels().runs() and panel_kernels().has_panels(dtype))


def _has_kernel(in_features: int) -> bool:
    return in_features % LANES == 0 and bool(dense_kernels().runs())


@cache
def _record(out_features: int, in_features: int, dtype: torch.dtype, threads: int) -> Record | None:
    """Return the kept record of a shape, made now if there is none. None if it cannot be kept."""
    facts = {
        "processor": processor(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads,
        "shape": [out_features, in_features],
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    try:
        file = cache_folder() / FOLDER / f"{name}.json"
        if (found := Record.read(file)) is None:
            _keep(file, judge(facts, times(out_features, in_features, dtype)))
            found = Record.read(file)
    except OSError:
        return None  # a start that cannot keep its answer must not compute otherwise than the next one
    return found


def _keep(file: Path, record: Record) -> None:
    """Write a record unless another process was first."""
    write_first(file, json.dumps(asdict(record), indent=1).encode())


def judge(facts: dict[str, object], found: dict[str, list[float]]) -> Record:
    """Return the record of a shape: the layout whose kernels are fastest, by the mean over classes of rows.

    Args:
        found: seconds of each candidate for each of `CLASSES`, infinite where it has no kernel.
    """
    classes = range(len(CLASSES))
    blocked, plain = (
        [min((name for name in names if name in found), key=lambda name: found[name][i]) for i in classes]
        for names in LAYOUTS.values()
    )
    gain = [math.log(found[blocked[i]][i] / found[plain[i]][i]) for i in classes]
    mean = sum(g * share for g, share in zip(gain, IMPORTANCE, strict=True)) / sum(IMPORTANCE)
    layout = "plain" if mean > MARGIN and min(gain) > -MOST_LOSS else "onednn"
    if layout == "plain" or mean <= 0:
        other = "oneDNN's layout" if mean > 0 else "the plain layout"
        reason = f"{math.exp(abs(mean)):.2f} times the speed of {other}"
    elif mean > MARGIN:
        reason = f"the plain layout has {math.exp(min(gain)):.2f} times the speed in a class of rows"
    else:
        reason = "the plain layout's gain is within the margin"
    kernels = plain if layout == "plain" else blocked
    times_us = {name: [round(s * 1e6, 1) if s < 1e3 else None for s in seconds] for name, seconds in found.items()}
    return Record(**facts, layout=layout, kernels=kernels, reason=reason, microseconds=times_us)  # type: ignore[arg-type]


def times(out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the least seconds of a call of each candidate, for each of `CLASSES`, in turn with the others.

    No candidate takes the weight that another has just read, which the processor's cache would still hold.
    """
    size = out_features * in_features * dtype.itemsize
    weights = [
        torch.full((out_features, in_features), 0.01, dtype=dtype) for _ in range(max(2, min(40, COPIES_BYTES // size)))
    ]
    found: dict[str, list[float]] = {name: [] for names in LAYOUTS.values() for name in names}
    with torch.inference_mode():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
        for rows in CLASSES:
            best = dict.fromkeys(found, math.inf)
            x, other = torch.ones(rows, in_features, dtype=dtype), torch.ones(rows, out_features, dtype=dtype)
            calls = dict(_candidates(x, other, weights, packed))
            for call in calls.values():
                call(0)
            end = perf_counter() + CLASS_SECONDS
            for turn in range(1, MOST_CALLS + 1):
                for place, (name, call) in enumerate(calls.items()):
                    number = (turn + place * len(weights) // len(calls)) % len(weights)
                    start = perf_counter()
                    call(number)
                    best[name] = min(best[name], perf_counter() - start)
                if turn >= FEWEST_CALLS and perf_counter() > end:
                    break
            for name, seconds in best.items():
                found[name].append(seconds)
    return found


def _candidates(
    x: torch.Tensor, other: torch.Tensor, weights: list[torch.Tensor], packed: list[torch.Tensor]
) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Yield each candidate's product with the i-th weight, plus `other`, as residuals are added."""
    yield "onednn", lambda i: _ONEDNN.binary(x, other, packed[i], None, "add")
    if len(x) <= MOST_ROWS and has_panels(x.dtype, x.shape[1]):
        outputs = other.shape[1]
        at = [panel_kernels().address_of(weight) for weight in packed]
        yield "panels", lambda i: panel_kernels().few_rows(x, at[i], outputs, None, other, ADD)
    yield "torch", lambda i: functional.linear(x, weights[i]).add_(other)
    if len(x) <= MOST_ROWS and _has_kernel(x.shape[1]):
        yield "numba", lambda i: dense_kernels().few_rows(x, weights[i], None, other, ADD)
