"""Slots padded to one rank, and two launches for each product of the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from slotline.plugins.lora.peft_folder import PeftAdapter
from slotline.plugins.lora.segmented import kernels
from slotline.plugins.lora.segmented.tiling import FIXED, MANY, MOST_SPLITS, Tiling, fitting, tiling
from slotline.plugins.lora.slots import AdapterSlots
from slotline.registry.contracts import LoraContext
from slotline.registry.errors import CapacityError

LEAST_RANK = 16
"""What a product on the matrix units takes at least."""
FEW_TOKENS, FEW_M, MANY_M = 256, 16, 64
"""Up to so many tokens a block has `FEW_M` lines, else `MANY_M`."""
MOST_EXTENDED = 0.25
"""So many rows may lie behind a weight, as a share of its own: each step fetches all slots' rows then, used or not."""
EARLIEST = (9, 0)
"""The compute capability from which a kernel can start early."""


class Weights(NamedTuple):
    """Weights of one product in all slots.

    Attributes:
        a: [num_slots, parts, rank, in_features], a slot's at its place. Of an embedding [num_slots, 1, num_embeddings,
            rank] by slot.
        b: [num_slots, all out_features, rank].
        scales: [num_slots, parts] float32. 0 if the slot's adapter does not change the part.
        sizes: out_features of each part.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    sizes: tuple[int, ...]


class SegmentedLora(AdapterSlots):
    """Implements `slotline.registry.contracts.lora.MergedLora`, `ExtendedLora` and `SingleLora`.

    Slots' matrices A are stored at places. The last adapter that was the only one in a step has the first place, so
    that the product with the first rows after a weight is its own.

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
        self._part = {name: (names, i) for names in products for i, name in enumerate(names)}
        tokens, slots, device = context.max_tokens, context.max_adapters, context.device
        self._block_slots = torch.full((triton.cdiv(tokens, FEW_M) + slots,), -1, dtype=torch.int32, device=device)
        self._block_tokens = torch.full((tokens + (slots + 1) * MANY_M,), -1, dtype=torch.int32, device=device)
        self._block_m = self._blocks = 0
        self._token_slots = torch.full((tokens if context.embeddings else 0,), -1, dtype=torch.int64, device=device)
        width = self._rank * max(map(len, products), default=1)
        most = max(tokens, MOST_SPLITS * min(tokens, FEW_TOKENS))
        self._inner = torch.zeros(width * most, device=device)
        self._slots_padded = triton.next_power_of_2(slots)
        self._places = list(range(slots))
        self._places_there = torch.arange(slots, dtype=torch.int32, device=device)
        self._single = False
        is_float32, on_gpu = self._dtype == torch.float32, torch.device(device).type == "cuda"
        self._precision = "ieee" if is_float32 else "tf32"  # which has no effect on 16 bits
        self._early = on_gpu and torch.cuda.get_device_capability(device) >= EARLIEST

    def plan(self, slots: torch.Tensor) -> None:
        """See `Lora.plan`: one launch, which reads the slots on the device."""
        self._single = False
        self._sort(slots, self.context.max_adapters)

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        """See `SingleLora.plan_single`: the adapter's matrices A go to the first place, if they are not there."""
        self._bring_first(slot)
        self._single = True
        self._sort(slots, 1)

    def _sort(self, slots: torch.Tensor, most: int) -> None:
        """Sort the tokens by slot, with at most `most` slots."""
        count = len(slots)
        if self.context.embeddings:
            self._token_slots[:count].copy_(slots)
        self._block_m = FEW_M if count <= FEW_TOKENS or self.context.batch_invariant else MANY_M
        self._blocks = triton.cdiv(count, self._block_m) + max(
            0, min(most, count) - 1
        )  # each slot's last may be half full
        kernels.sort_tokens[(self.context.max_adapters,)](
            slots,
            self._block_slots,
            self._block_tokens,
            count,
            self._blocks,
            block_m=self._block_m,
            slots_padded=self._slots_padded,
            chunk=max(16, min(1024, 16384 // self._slots_padded)),
        )

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See `Lora.apply`."""
        if module in self.context.embeddings:
            self._look_up(self._weights[module,], inputs, out)
            return
        names, part = self._part[module]
        weights = self._weights[names]
        begin = sum(weights.sizes[:part])
        one = Weights(
            weights.a[:, part : part + 1], weights.b[:, begin:], weights.scales[:, part:], (weights.sizes[part],)
        )
        self._launch(one, inputs, out)

    def apply_merged(self, modules: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See `MergedLora.apply_merged`."""
        self._launch(self._weights[modules], inputs, out)

    def expand(self, modules: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExtendedLora.expand`."""
        if len(out):
            weights = self._weights[modules]
            inner = inner if inner.dim() == 3 else inner[None]
            cut = self._cut(weights, self._rank, out.itemsize)._replace(splits=len(inner))
            self._expand(weights, inner, out, cut, behind=True, single=self._single)

    def _launch(self, weights: Weights, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens, k = inputs.shape
        if num_tokens == 0:
            return
        cut, width = self._cut(weights, k, inputs.itemsize), len(weights.sizes) * self._rank
        per_split = triton.cdiv(k, cut.splits * cut.block_k) * cut.block_k
        inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
        inner = self._inner[: cut.splits * num_tokens * width].view(cut.splits, num_tokens, width)
        kernels.shrink[(self._blocks, cut.splits)](
            inputs,
            weights.a,
            inner,
            self._block_slots,
            self._block_tokens,
            self._places_there,
            num_tokens,
            k,
            inputs.stride(0),
            weights.a.stride(0),
            per_split,
            width=width,
            padded=triton.next_power_of_2(width),
            block_k=cut.block_k,
            num_warps=cut.shrink_warps,
            block_m=self._block_m,
            precision=self._precision,
            early=self._early,
        )
        self._expand(weights, inner, out, cut)

    def _look_up(self, weights: Weights, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Compute an embedding's contribution by looking up the row of A of each token."""
        if len(token_ids) == 0:
            return
        slots = self._token_slots[: len(token_ids)].clamp(min=0)  # tokens without an adapter are in no block
        inner = weights.a[slots, 0, token_ids][None]  # [1, num_tokens, rank]
        self._expand(weights, inner, out, self._cut(weights, self._rank, out.itemsize)._replace(splits=1))

    def _cut(self, weights: Weights, k: int, itemsize: int) -> Tiling:
        """Return the sizes for this step's blocks and rows of k elements."""
        if self.context.batch_invariant:
            cut = FIXED
        elif self._block_m == FEW_M:
            cut = tiling(self._blocks, k)
        else:
            cut = MANY
        padded = triton.next_power_of_2(len(weights.sizes) * self._rank)
        return fitting(cut, self._block_m, padded, self._rank, itemsize)

    def _expand(
        self,
        weights: Weights,
        inner: torch.Tensor,
        out: torch.Tensor,
        cut: Tiling,
        *,
        behind: bool = False,
        single: bool = True,
    ) -> None:
        """Add what follows from inner, see `kernels.expand`."""
        columns = sum(triton.cdiv(size, cut.block_n) for size in weights.sizes)
        kernels.expand[(columns, self._blocks)](
            inner,
            weights.b,
            weights.scales,
            out,
            self._block_slots,
            self._block_tokens,
            self._places_there,
            inner.stride(0),
            inner.stride(1),
            out.stride(0),
            weights.b.stride(0),
            weights.scales.stride(0),
            *(*weights.sizes, 0, 0)[:3],
            splits=cut.splits,
            rank=self._rank,
            parts=len(weights.sizes),
            block_m=self._block_m,
            block_n=cut.block_n,
            behind=behind,
            single=single,
            precision=self._precision,
            num_warps=cut.expand_warps,
            early=self._early,
            **({"launch_pdl": True} if self._early else {}),
        )

    def _empty(self, names: tuple[str, ...]) -> Weights:
        slots, device = self.context.max_adapters, self.context.device
        inner, sizes = self.context.modules[names[0]][0], tuple(self.context.modules[name][1] for name in names)
        return Weights(
            self._room(names, inner, sum(sizes)),
            torch.zeros(slots, sum(sizes), self._rank, dtype=self._dtype, device=device),
            torch.zeros(slots, len(names), device=device),
            sizes,
        )

    def _room(self, names: tuple[str, ...], inner: int, outer: int) -> torch.Tensor:
        """Return the matrices A of a product's modules, after its weight if they are small compared with it."""
        slots, parts, extend = self.context.max_adapters, len(names), self.context.extend
        rows = slots * parts * self._rank
        embeds = names[0] in self.context.embeddings
        if extend is not None and not embeds and rows <= MOST_EXTENDED * outer:
            room = extend(names, rows, FEW_TOKENS, parts * self._rank)
            if room is not None:
                return room.view(slots, parts, self._rank, inner)
        shape = (inner, self._rank) if embeds else (self._rank, inner)
        return torch.zeros(slots, parts, *shape, dtype=self._dtype, device=self.context.device)

    def _write(self, slot: int, adapter: PeftAdapter) -> None:
        for names, weights in self._weights.items():
            a, b = torch.zeros_like(weights.a[slot], device="cpu"), torch.zeros_like(weights.b[slot], device="cpu")
            scales, begin = torch.zeros(len(names)), 0
            for part, (name, size) in enumerate(zip(names, weights.sizes, strict=True)):
                if (share := adapter.shares.get(name)) is not None:
                    rank = len(share.a)
                    (a[part].T if name in self.context.embeddings else a[part])[:rank] = share.a
                    b[begin : begin + size, :rank] = share.b
                    scales[part] = share.scale
                begin += size
            place = slot if names[0] in self.context.embeddings else self._places[slot]
            weights.a[place].copy_(a)
            weights.b[slot].copy_(b)
            weights.scales[slot].copy_(scales)

    def _clear(self, slot: int) -> None:
        """See `AdapterSlots._clear`."""
        for weights in self._weights.values():
            weights.scales[slot].zero_()

    def _bring_first(self, slot: int) -> None:
        """Exchange a slot's matrices A with those at the first place."""
        place = self._places[slot]
        if place == 0:
            return
        other = self._places.index(0)
        for names, weights in self._weights.items():
            if names[0] not in self.context.embeddings:
                kept = weights.a[0].clone()  # one at a time: there may be little memory left
                weights.a[0].copy_(weights.a[place])
                weights.a[place].copy_(kept)
        for moved, to in ((slot, 0), (other, place)):
            self._places[moved] = to
            self._places_there[moved] = to
