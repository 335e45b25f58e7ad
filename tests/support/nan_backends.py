"""Attention and state backends that leave NaN behind or change what they are shown, from the time that they are armed.

Each is a shipped backend around whose calls something is done; `backend_HOW` and `state_HOW` name it.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from broken_plugins import armed

from slotline.backends import torch_sdpa, torch_state
from slotline.registry.loading import resolve_factory


class Backend:
    """Attention that goes wrong in one way; `armed` holds what token it does so for, or that it always does."""

    def __init__(self, built: Any, how: str) -> None:
        self._built, self._how, self._batch = built, how, None

    def plan(self, batch: Any) -> Any:
        self._batch = batch
        if armed and self._how == "table":
            batch.block_table += 1
        if armed and self._how == "lengths":
            batch.seq_lens_cpu[0] += 1
        return self._built.plan(batch)

    def write(self, *arguments: Any) -> None:
        self._built.write(*arguments)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any, out: Any, sinks: Any) -> Any:
        if self._how == "returns":
            result = torch.empty_like(out)
            self._built.forward(layer, query, key, value, cache, plan, result, sinks)
            return result
        self._built.forward(layer, query, key, value, cache, plan, out, sinks)
        if self._how == "always" or (self._how == "later" and armed):
            out.fill_(torch.nan)
        if self._how == "long" and armed:  # of requests that have more tokens than it can count
            starts = self._batch.query_start_loc_cpu
            for i, length in enumerate(self._batch.seq_lens_cpu[: self._batch.num_requests].tolist()):
                if length > 20:
                    out[int(starts[i]) : int(starts[i + 1])] = torch.nan
        if self._how == "forward_table" and armed:
            self._batch.block_table.zero_()
        return None


class State:
    """A state backend that goes wrong in one way."""

    def __init__(self, built: Any, how: str) -> None:
        self._built, self._how = built, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built, name)

    def forward(self, layer: Any, inputs: Any, state: Any, plan: Any) -> Any:
        found = self._built.forward(layer, inputs, state, plan)
        return {"none": None, "short": found[:-1], "nan": torch.full_like(found, torch.nan)}[self._how]


def __getattr__(name: str) -> Any:
    kind, _, how = name.partition("_")
    if kind not in ("backend", "state") or not how:
        raise AttributeError(name)
    shipped, wrapper = (torch_sdpa, Backend) if kind == "backend" else (torch_state, State)

    def factory(context: Any) -> Any:
        return wrapper(resolve_factory(shipped.descriptor)(context), how)

    return evolve(shipped.descriptor, name="wrong", factory=factory)
