"""The LoRA contract, version 1: adapters loaded by name, held in slots, and applied by row of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class LoraCapabilities:
    """What a LoRA plugin offers.

    Attributes:
        devices: device types.
        dtypes: dtypes of the base model.
        target_modules: module names that may carry an adapter, the last parts of their paths.
        max_rank, max_adapters: limits.
        rslora, dora: variants.
        graphs: which batches its kernels can be captured for.
        graph_key: whether graphs differ with and without adapters.
        merged: whether it has `MergedLora.apply_merged`.
        embeddings: whether `Lora.apply` serves the modules of `LoraContext.embeddings`.
        extended: whether it has `ExtendedLora.expand`.
        single: whether it has `SingleLora.plan_single`.
        staged: whether it leaves out what an adapter has for `LoraContext.elsewhere`, and gives equal slots for equal
            histories of loading and unloading, so that there can be one of it for each pipeline stage.
        batch_invariant: whether it can add to a token's output what is bitwise the same in any batch.
    """

    devices: Set[str]
    dtypes: Set[str]
    target_modules: Set[str]
    max_rank: Max = Max()
    max_adapters: Max = Max()
    rslora: Flag = Flag(False)
    dora: Flag = Flag(False)
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    graph_key: bool = True
    merged: Flag = Flag(False)
    embeddings: Flag = Flag(False)
    extended: Flag = Flag(False)
    single: Flag = Flag(False)
    staged: Flag = Flag(False)
    batch_invariant: Flag = Flag(False)


class Extend(Protocol):
    """What makes room for matrices A behind a weight."""

    def __call__(self, names: tuple[str, ...], rows: int, max_tokens: int, single_rows: int = 0) -> torch.Tensor | None:
        """See `LoraContext.extend`."""
        ...


@frozen(kw_only=True)
class LoraContext:
    """What a LoRA plugin's factory gets.

    Attributes:
        modules: path of each module that may carry an adapter -> (in_features, out_features).
        merged: modules of equal input whose outputs lie side by side in one tensor, in that order; each is in
            `modules` too. Only for a plugin that declares `merged`, else empty.
        embeddings: those of `modules` and `elsewhere` that look rows of a table up, (num_embeddings, embedding_dim)
            there. Only for a plugin that declares `embeddings`, else empty.
        extend: gives room for adapters' matrices A behind the weight of a product, called as ``extend(names, rows,
            max_tokens)`` with one module's name or one tuple of `merged`: zeros [rows, in_features] on the device, or
            None where there can be none. In steps of up to `max_tokens` tokens the product of the inputs with both
            is one, and `ExtendedLora.expand` is called in place of `apply`; in a step of `SingleLora.plan_single` it is
            the product with the first `single_rows` alone. Only for a plugin that declares `extended`, else None.
        max_adapters: slots on the device; `max_cpu_adapters` how many adapters to keep in host memory, those on the
            device included, so that loading one again reads no file.
        elsewhere: modules in other pipeline stages, which plugins of their own serve: sizes as in `modules`. What an
            adapter has for them is as welcome as the rest, and left out. Only for a plugin that declares `staged`.
        batch_invariant: whether what is added must be what the capability of that name says.
    """

    contract: int
    modules: dict[str, tuple[int, int]]
    max_adapters: int
    max_rank: int
    max_tokens: int
    device: str
    dtype: str
    merged: tuple[tuple[str, ...], ...] = ()
    embeddings: tuple[str, ...] = ()
    extend: Extend | None = None
    max_cpu_adapters: int = 0
    elsewhere: Mapping[str, tuple[int, int]] = field(factory=dict)
    batch_invariant: bool = False
    options: Any = None


class Lora(Protocol):
    """What a built LoRA plugin can do."""

    def load(self, name: str, path: str) -> int:
        """Read a PEFT folder into a free slot and return the slot, 0 to max_adapters - 1. A refusal changes nothing.

        Raises:
            slotline.registry.errors.RequestError: for a rank, target, variant or setting that it cannot hold, and for
                files that are missing or do not fit; names the fault.
            slotline.registry.errors.CapacityError: if `max_adapters` are loaded.
        """
        ...

    def unload(self, name: str) -> None:
        """Free the adapter's slot.

        Raises:
            slotline.registry.errors.RequestError: if no adapter of that name is loaded.
        """
        ...

    def plan(self, slots: torch.Tensor) -> None:
        """Take the slot of each token of the step, [num_tokens] int64 on the device, -1 for none; outside graphs.

        A slot that holds no adapter adds nothing: made-up steps measure and capture with such.
        """
        ...

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' share of `module`, a path of `LoraContext.modules`, for `inputs` [num_tokens, in_features]
        to `out` [num_tokens, out_features], in place; `out` may be columns of a wider tensor.

        For an embedding, `inputs` are token ids [num_tokens] int64, each of which stands for the row of an identity.
        """
        ...


class MergedLora(Lora, Protocol):
    """A plugin that serves projections merged into one matrix product in one go."""

    def apply_merged(self, modules: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor) -> None:
        """As `apply` for one tuple of `LoraContext.merged`: `out` [num_tokens, all out_features] holds the outputs of
        the modules side by side."""
        ...


class ExtendedLora(Lora, Protocol):
    """A plugin whose matrices A may lie behind the base model's weights, so that a product gives both."""

    def expand(self, modules: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        """As `apply` or `apply_merged` for modules whose weight was extended: `inner` [num_tokens, rows] is the product
        of the inputs with the rows that `LoraContext.extend` gave; it may be columns of a wider tensor, as `out`. Or it
        is [parts, num_tokens, rows] float32 whose sum is that product; `out` is float32 then."""
        ...


class SingleLora(Lora, Protocol):
    """A plugin that serves a step of one adapter in a way of its own."""

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        """As `plan` for a step whose tokens all have `slot` or none.

        Until the next plan, `inner` in `ExtendedLora.expand` is the product with the `single_rows` of
        `LoraContext.extend` alone. A step that was captured for one slot is planned for any other before its replay.
        """
        ...


class ForgetfulLora(Lora, Protocol):
    """A plugin that keeps copies of adapters in host memory, and drops them when an adapter is removed."""

    def forget(self, path: str) -> None:
        """Drop all copies of a folder that is in no slot. The next `load` of it reads its files.

        The engine calls it where the plugin has it. A folder of which nothing is kept is no error.
        """
        ...
