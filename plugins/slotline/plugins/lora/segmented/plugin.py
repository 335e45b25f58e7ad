"""Slots padded to one rank, and two launches for each product of the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from slotline.plugins.lora.peft_folder import PeftAdapter
from slotline.plugins.lora.segmented import kernels
from slotline.plugins.lora.slots import AdapterSlots
from slotline.registry.contracts import LoraContext
from slotline.registry.errors import CapacityError

LEAST_RANK = 16
"""What a product on the matrix units takes at least."""
PROGRAMS = 264
"""Shrinking is cut along its rows until there are about so many programs: two for each multiprocessor of an H200."""
MOST_SPLITS = 16
BLOCK_K, BLOCK_N = 128, 128


class Weights(NamedTuple):
    """One product's weights in all slots.

    Attributes:
        a: [num_slots, parts, rank, in_features].
        b: [num_slots, all out_features, rank].
        scales: [num_slots, parts] float32; 0 where the slot's adapter leaves the part alone.
        sizes: out_features of each part.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    sizes: tuple[int, ...]


class SegmentedLora(AdapterSlots):
    """Implements `slotline.registry.contracts.lora.MergedLora` with the kernels of `kernels`.

    Raises:
        CapacityError: if the slots do not fit into the device's memory.
    """

    def __init__(self, context: LoraContext) -> None:
        super().__init__(context)
        self._dtype = getattr(torch, context.dtype)
        self._rank = max(LEAST_RANK, triton.next_power_of_2(context.max_rank))
        merged = {name for names in context.merged for name in names}
        products = [*context.merged, *((name,) for name in context.modules if name not in merged)]
        try:
            self._weights = {names: self._empty(names) for names in products}
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{context.max_adapters} adapters of rank {context.max_rank} do not fit into the device's memory",
                fix="lower lora.max_adapters or lora.max_rank, or name fewer lora.target_modules",
            ) from error
        self._place = {name: (names, i) for names in products for i, name in enumerate(names)}
        slots, device = context.max_adapters, context.device
        self._order = torch.zeros(slots, context.max_tokens, dtype=torch.int32, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        parts = max(map(len, products), default=1)
        self._inner = torch.zeros(parts * self._rank * max(context.max_tokens, 8 * PROGRAMS), device=device)
        self._precision = "ieee" if self._dtype == torch.float32 else "tf32"  # tf32 has no effect on 16 bits

    def plan(self, slots: torch.Tensor) -> None:
        """See `Lora.plan`: one launch, which reads the slots on the device."""
        kernels.sort_tokens[(self.context.max_adapters,)](
            slots, self._order, self._counts, len(slots), self.context.max_tokens, block=1024
        )

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See `Lora.apply`."""
        names, part = self._place[module]
        weights = self._weights[names]
        begin = sum(weights.sizes[:part])
        one = Weights(
            weights.a[:, part : part + 1], weights.b[:, begin:], weights.scales[:, part:], (weights.sizes[part],)
        )
        self._launch(one, inputs, out)

    def apply_merged(self, modules: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See `MergedLora.apply_merged`."""
        self._launch(self._weights[modules], inputs, out)

    def _launch(self, weights: Weights, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens, k = inputs.shape
        if num_tokens == 0:
            return
        slots, parts = self.context.max_adapters, len(weights.sizes)
        block_m = 16 if num_tokens <= 256 else 64
        blocks = triton.cdiv(num_tokens, block_m) + min(slots, num_tokens)
        splits = self._splits(blocks * parts, num_tokens * parts, k)
        per_split = triton.cdiv(k, splits * BLOCK_K) * BLOCK_K
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        shared = {
            "rank": self._rank,
            "parts": parts,
            "block_m": block_m,
            "slots_padded": triton.next_power_of_2(slots),
            "precision": self._precision,
        }
        tokens = (self._order, self._counts, slots, self.context.max_tokens, num_tokens)
        kernels.shrink[(blocks, splits * parts)](
            inputs, weights.a, weights.scales, self._inner, *tokens, k, inputs.stride(0), weights.a.stride(0),
            weights.scales.stride(0), per_split, block_k=BLOCK_K, **shared,
        )  # fmt: skip
        sizes = (*weights.sizes, 0, 0)[:3]
        columns = sum(triton.cdiv(size, BLOCK_N) for size in weights.sizes)
        kernels.expand[(blocks, columns)](
            self._inner, weights.b, weights.scales, out, *tokens, out.stride(0), weights.b.stride(0),
            weights.scales.stride(0), *sizes, splits=splits, block_n=BLOCK_N, **shared,
        )  # fmt: skip

    def _splits(self, programs: int, lines: int, k: int) -> int:
        """Into how many parts a row is cut: a power of 2, for which there is room, each with elements of its own."""
        splits = 1
        while (
            2 * splits <= MOST_SPLITS
            and splits * programs < PROGRAMS
            and 2 * splits * BLOCK_K <= k
            and 2 * splits * lines * self._rank <= self._inner.numel()
        ):
            splits *= 2
        return splits

    def _empty(self, names: tuple[str, ...]) -> Weights:
        slots, device = self.context.max_adapters, self.context.device
        inner, sizes = self.context.modules[names[0]][0], tuple(self.context.modules[name][1] for name in names)
        return Weights(
            torch.zeros(slots, len(names), self._rank, inner, dtype=self._dtype, device=device),
            torch.zeros(slots, sum(sizes), self._rank, dtype=self._dtype, device=device),
            torch.zeros(slots, len(names), device=device),
            sizes,
        )

    def _write(self, slot: int, adapter: PeftAdapter) -> None:
        for names, weights in self._weights.items():
            a, b = torch.zeros_like(weights.a[slot], device="cpu"), torch.zeros_like(weights.b[slot], device="cpu")
            scales, begin = torch.zeros(len(names)), 0
            for part, (name, size) in enumerate(zip(names, weights.sizes, strict=True)):
                if (share := adapter.shares.get(name)) is not None:
                    rank = len(share.a)
                    a[part, :rank], b[begin : begin + size, :rank] = share.a, share.b
                    scales[part] = share.scale
                begin += size
            for there, here in ((weights.a, a), (weights.b, b), (weights.scales, scales)):
                there[slot].copy_(here)

    def _clear(self, slot: int) -> None:
        """A slot that holds nothing adds nothing."""
        for weights in self._weights.values():
            weights.scales[slot].zero_()
