"""Spec of states that keeps them at the ends of prompts and every fourth unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import BlockHash, KVSpecCapabilities, StateLayer, StateSpecContext, StateTensorSpec
from slotline.registry.contracts.kv_spec import UNDIVIDED
from slotline.registry.descriptor import Descriptor, Kind

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class PlainStates:
    """Spec that stores the tensors of a slot one after the other, each padded to 16 bytes."""

    alignment = 16

    def __init__(self, context: StateSpecContext) -> None:
        self.unit = context.prefix_unit

    @property
    def interval(self) -> int:
        return 4 * self.unit

    def size(self, tensor: StateTensorSpec) -> int:
        """Return the bytes of a tensor in one slot, padding included."""
        return -(-tensor.num_elements * dtype_of(tensor).itemsize // self.alignment) * self.alignment

    def page_bytes(self, layer: StateLayer) -> int:
        return sum(map(self.size, layer.tensors))

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Mapping[str, torch.Tensor]:
        found, first = {}, 0
        for tensor in layer.tensors:
            found[tensor.name] = self.view(raw[:, first:], tensor)
            first += self.size(tensor)
        return found

    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        """Return a tensor [num_slots, *shape] at the beginning of each row."""
        used = tensor.num_elements * dtype_of(tensor).itemsize
        view: torch.Tensor = part[:, :used].view(dtype_of(tensor)).unflatten(1, tensor.shape)
        return view

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        place = np.where((last > computed) & (last <= ends), last, ends // self.interval * self.interval)
        return np.where((last != UNDIVIDED) & (place > computed), place, ends)

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        wanted: Mask = (computed == last) | (computed % self.interval == 0)
        return wanted

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: Callable[[BlockHash], bool]) -> int:
        return max((length for length, block_hash in enumerate(hashes, 1) if is_kept(block_hash)), default=0)

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        back: Mask = accepted < counts
        return back


def dtype_of(tensor: StateTensorSpec) -> torch.dtype:
    """Return the torch dtype of a tensor."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="reference_states",
    capabilities=KVSpecCapabilities(kv_kinds=Set(None), exact_kinds=Set(None), state=Flag(True)),
    factory=PlainStates,
)
