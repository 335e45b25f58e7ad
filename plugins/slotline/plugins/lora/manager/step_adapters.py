"""Adapters in a step: the slot of each token, and their products beside those of the model's linear layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.input_batch_cpu import PAD_SLOT, InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.plugins.lora.manager.adapter_use import AdapterUse
from slotline.registry.contracts import AdaptableModel, Lora

Int = npt.NDArray[np.int64]
NO_SLOT = -1
OUTPUT_PROJECTION = "lm_head"


@frozen(eq=False)
class AdapterBatch:
    """Adapters of a step's tokens, which `ModelInputs.extras` holds.

    Attributes:
        slots: [num_padded_tokens] int64 on the device of the first stage, the slot of each token's adapter, -1 for
            none.
        single_slot: the slot of all tokens that have one if the step runs for one adapter, else None.
    """

    slots: torch.Tensor
    single_slot: int | None


class StepAdapters:
    """Methods of the extension that a step calls.

    Args:
        lora: the built plugin.
        model: the model that the adapters join.
        modules: the linear layers and embeddings that may carry an adapter.
        embeddings: the embeddings among the modules.
        max_requests: rows of the request table.
        max_adapters: as in the configuration.
        captured: for a query length, the uses of adapters that its batches are captured for.
        apply_merged: the plugin's method, if it has one.
        merged: the groups of layers that `apply_merged` serves.
        expand: the plugin's method, if it has one.
        extended: the groups of layers that `expand` serves. The model may have extended others for an earlier engine.
        plan_single: the plugin's method, if both plugin and model have a special path for steps of one adapter.

    Attributes:
        slots: [max_requests] int64, the slot of each row's adapter, -1 for none.
    """

    def __init__(
        self,
        lora: Lora,
        model: AdaptableModel,
        modules: Mapping[str, tuple[int, int]],
        *,
        embeddings: Collection[str] = (),
        max_requests: int,
        max_adapters: int,
        captured: Callable[[int], tuple[AdapterUse, ...]],
        apply_merged: Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None] | None = None,
        merged: Collection[tuple[str, ...]] = (),
        expand: Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None] | None = None,
        extended: Collection[tuple[str, ...]] = (),
        plan_single: Callable[[torch.Tensor, int], None] | None = None,
    ) -> None:
        self._lora = lora
        self._model = model
        self._modules = modules
        self._max_adapters = max_adapters
        self._ends = {names: np.cumsum([model.linears[name][1] for name in names]) for names in model.merged_linears}
        self._apply_merged, self._merged = apply_merged, frozenset(merged)
        self._expand, self._extended = expand, frozenset(extended)
        self._plan_single = plan_single
        self._head = OUTPUT_PROJECTION in modules
        self._guards = self._head or bool(embeddings)
        self.captured_variants = captured
        self.slots = np.full(max_requests, NO_SLOT, np.int64)

    def step_variants(self) -> Sequence[AdapterUse]:
        """Return the uses of adapters that a step may have, in ascending order."""
        return tuple(use for use in AdapterUse if use != AdapterUse.ONE or self._plan_single is not None)

    def graph_variant(self, rows: Int) -> AdapterUse:
        """Return how many adapters the rows use. ONE is returned only if the plugin has a special path for it."""
        slots = self.slots[rows]
        most = int(slots.max(initial=NO_SLOT))
        if most == NO_SLOT:
            return AdapterUse.NONE
        one = self._plan_single is not None and bool(((slots == most) | (slots == NO_SLOT)).all())
        return AdapterUse.ONE if one else AdapterUse.MANY

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> AdapterBatch | None:
        """Upload the slots of a step's tokens. Return None if it runs without adapters.

        The tokens of a made-up step use the first slot, or one slot after the other. The slots may hold anything.
        """
        if batch.variant == AdapterUse.NONE:
            return None
        single = batch.variant == AdapterUse.ONE
        if batch.made_up:
            slots = np.arange(len(batch.token_rows)) % (1 if single else self._max_adapters)
        else:
            slots = self.slots[batch.token_rows]
        padding = len(batch.input_ids) - len(slots)
        sent = upload(np.pad(slots, (0, padding), constant_values=PAD_SLOT) if padding else slots)
        return AdapterBatch(sent, int(slots.max()) if single else None)

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes of the slots of `max_tokens` tokens."""
        return reserved_bytes((max_tokens,), np.int64)

    def plan(self, inputs: ModelInputs) -> None:
        """Prepare a forward pass, with adapters or without."""
        batch: AdapterBatch | None = inputs.extras["adapters"]
        if batch is not None:
            self._plan(batch.slots, batch.single_slot)
        further = {} if self._plan_single is None else {"single": batch is not None and batch.single_slot is not None}
        self._model.adapt(None if batch is None else self._add, self._modules, **further)

    def plan_logits(self, inputs: ModelInputs, indices: torch.Tensor) -> None:
        """Prepare the output projection for the tokens `indices` [n] int64."""
        batch: AdapterBatch | None = inputs.extras["adapters"]
        if batch is not None and self._head:
            self._plan(batch.slots.to(indices.device)[indices], batch.single_slot)

    def outside_steps(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the model's embedding or output projection without adapters, for rows that none is planned for."""
        if not self._guards:
            return call

        def without_adapters(inputs: torch.Tensor) -> torch.Tensor:
            self._model.adapt(None)
            return call(inputs)

        return without_adapters

    def _plan(self, slots: torch.Tensor, single_slot: int | None) -> None:
        if single_slot is None or self._plan_single is None:
            self._lora.plan(slots)
        else:
            self._plan_single(slots, single_slot)

    def _add(
        self, names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None
    ) -> None:
        """Add the adapters' contributions to one product's linear layers, or to an embedding."""
        if inner is not None and self._expand is not None and names in self._extended:
            self._expand(names, inner, out)
        elif len(names) == 1:
            self._lora.apply(names[0], inputs, out)
        elif self._apply_merged is not None and names in self._merged:
            self._apply_merged(names, inputs, out)
        else:
            for name, end in zip(names, self._ends[names].tolist(), strict=True):
                if name in self._modules:
                    self._lora.apply(name, inputs, out[:, end - self._modules[name][1] : end])
