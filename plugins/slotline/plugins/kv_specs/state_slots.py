"""The `mamba` cache spec: a slot of state for each request, and the rules of its checkpoints.

A state can be kept only at the moment when a request has computed exactly a prefix. So the tokens of a step end where a
copy is worth most. These places are

* the last whole unit of the tokens that a request comes with, since the next request may bring the same tokens and
  more,
* the place where its tokens leave those of earlier requests, since others will share that prefix too,
* each multiple of the interval, in long prompts and while text is generated.

The second rule is that of Marconi (Pan et al., arXiv 2411.19379, section 4.1), which calls it the branching point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts.kv_spec import UNDIVIDED, BlockHash, StateSpecContext
from slotline.registry.contracts.state import StateLayer, StateTensorSpec

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INTERVAL = 256
"""Tokens, rounded up to whole units: a request leaves a checkpoint at each multiple."""

ALIGNMENT = 128
"""Bytes; where a tensor begins in a slot's page, and what the page is padded to. Kernels load whole vectors."""


class StateSlots:
    """Memory of states and rules of their checkpoints. Implements `StateSpec`."""

    def __init__(self, context: StateSpecContext) -> None:
        self.interval = -(-INTERVAL // context.prefix_unit) * context.prefix_unit
        self.alignment = ALIGNMENT

    def page_bytes(self, layer: StateLayer) -> int:
        return sum(_aligned(_num_bytes(tensor)) for tensor in layer.tensors)

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Mapping[str, torch.Tensor]:
        found, first = {}, 0
        for tensor in layer.tensors:
            part = raw[:, first : first + _num_bytes(tensor)]
            found[tensor.name] = part.view(_dtype(tensor)).unflatten(1, tensor.shape)
            first += _aligned(_num_bytes(tensor))
        return found

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        stop = np.where(last == UNDIVIDED, 0, ends // self.interval * self.interval)
        stop = np.where(last <= ends, np.maximum(stop, last), stop)
        stop = np.where((branch > computed) & (branch <= ends), branch, stop)
        chosen: Int = np.where(stop > computed, stop, ends)
        return chosen

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        wanted: Mask = (computed % self.interval == 0) | (computed == last) | (computed == branch)
        return wanted

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: Callable[[BlockHash], bool]) -> int:
        return next((count for count in range(len(hashes), 0, -1) if is_kept(hashes[count - 1])), 0)

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        back: Mask = accepted < counts
        return back


def _num_bytes(tensor: StateTensorSpec) -> int:
    return tensor.num_elements * _dtype(tensor).itemsize


def _dtype(tensor: StateTensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
