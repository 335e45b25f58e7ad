"""Lists of numbers by permanent row, packed into one array so that a step takes those of all its rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


class RowValues:
    """Lists of values by row, packed again only after lists were added or removed.

    Args:
        max_requests: number of rows.
        width: numbers in a value. None for a single number.
        dtype: dtype of the numbers.
    """

    def __init__(self, max_requests: int, width: int | None = None, dtype: type[np.generic] = np.int64) -> None:
        self._shape = (0,) if width is None else (0, width)
        self._dtype = dtype
        self._lists: dict[int, npt.NDArray[Any]] = {}
        self._starts = np.zeros(max_requests, np.int64)
        self._counts = np.zeros(max_requests, np.int64)
        self._packed: npt.NDArray[Any] | None = None

    def set(self, row: int, values: npt.ArrayLike) -> None:
        """Give a row its values."""
        self._lists[row] = np.array(values, self._dtype).reshape(-1, *self._shape[1:])
        self._packed = None

    def drop(self, row: int) -> None:
        """Take them away."""
        self._lists.pop(row, None)
        self._counts[row] = 0
        self._packed = None

    def take(self, rows: Int) -> tuple[Int, npt.NDArray[Any]]:
        """Return the values of `rows` [n] in order: the index of each value's row [m], and values [m] or [m, width]."""
        if self._packed is None:
            self._pack()
        counts = self._counts[rows]
        entries = np.repeat(np.arange(len(rows)), counts)
        first = np.repeat(self._starts[rows] - (np.cumsum(counts) - counts), counts)
        return entries, self._packed[first + np.arange(len(entries))]  # type: ignore[index]

    def _pack(self) -> None:
        start = 0
        for row, values in self._lists.items():
            self._starts[row], self._counts[row] = start, len(values)
            start += len(values)
        empty = np.zeros(self._shape, self._dtype)
        self._packed = np.concatenate([empty, *self._lists.values()])
