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
    """Capabilities that a LoRA plugin declares.

    Attributes:
        devices: device types.
        dtypes: dtypes of the base model.
        target_modules: module names that may carry an adapter, the last parts of their paths.
        max_rank, max_adapters: limits.
        rslora, dora: variants.
        graphs: the batches that its kernels can be captured for.
        graph_key: graphs with and without adapters differ.
        merged: it implements `MergedLora.apply_merged`.
        embeddings: `Lora.apply` supports the modules of `LoraContext.embeddings`.
        extended: it implements `ExtendedLora.expand`.
        single: it implements `SingleLora.plan_single`.
        staged: it ignores an adapter's weights for `LoraContext.elsewhere`, and assigns the same slots for the same
            sequence of loads and unloads, so that each pipeline stage can have its own instance.
        batch_invariant: the values that it adds to a token's output can be bitwise the same in any batch.
        divided: it takes the modules' parts of an adapter's weights, as `LoraContext.parts` says.
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
    divided: Flag = Flag(False)


@frozen(kw_only=True, eq=False)
class ModulePart:
    """Part of a module that a rank of a tensor group has.

    Attributes:
        in_features, out_features: sizes of the whole module, which those of an adapter's files are.
        inputs, outputs: numbers of its inputs and outputs that the rank has, in order, [n] int64 in host memory. None
            for all. If the rank's own size is above n, the rest is padding, for which an adapter adds nothing.
    """

    in_features: int
    out_features: int
    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None


class Extend(Protocol):
    """Callable that makes room for matrices A after a weight."""

    def __call__(self, names: tuple[str, ...], rows: int, max_tokens: int, single_rows: int = 0) -> torch.Tensor | None:
        """See `LoraContext.extend`."""
        ...


@frozen(kw_only=True)
class LoraContext:
    """Input of a LoRA plugin's factory.

    Attributes:
        modules: path of each module that may carry an adapter -> (in_features, out_features).
        merged: tuples of modules with the same input whose outputs are adjacent columns of one tensor, in that order.
            Each is in `modules` too. Only for a plugin that declares `merged`, else empty.
        embeddings: the modules of `modules` and `elsewhere` that look up rows of a table. Their sizes there are
            (num_embeddings, embedding_dim). Only for a plugin that declares `embeddings`, else empty.
        extend: makes room for adapters' matrices A after the weight of a matrix product, called as ``extend(names,
            rows, max_tokens)`` with one module's name or one tuple of `merged`. Returns zeros [rows, in_features] on
            the device, or None if there can be no room. In steps of up to `max_tokens` tokens the inputs are multiplied
            with both in one product, and `ExtendedLora.expand` is called instead of `apply`. In a step of
            `SingleLora.plan_single` the product includes only the first `single_rows` rows. Only for a plugin that
            declares `extended`, else None.
        max_adapters: slots on the device.
        max_cpu_adapters: adapters to keep in host memory, those on the device included, so that loading one again reads
            no file.
        elsewhere: modules in other pipeline stages, which have plugin instances of their own. Sizes as in `modules`. An
            adapter's weights for them are accepted and ignored. Only for a plugin that declares `staged`.
        batch_invariant: True if the plan relies on the capability of that name.
        parts: those of `modules` of which a rank of a tensor group has a part, by path. Sizes in `modules` are the
            rank's own. What `Lora.apply` adds for a part of the inputs is a part of the sum that the ranks make. Only
            for a plugin that declares `divided`, else empty.
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
    parts: Mapping[str, ModulePart] = field(factory=dict)


class Lora(Protocol):
    """Protocol of a built LoRA plugin."""

    def load(self, name: str, path: str) -> int:
        """Read a PEFT folder into a free slot and return the slot, 0 to max_adapters - 1. An error changes nothing.

        Raises:
            slotline.registry.errors.RequestError: for a rank, target, variant or setting that is not supported, and for
                files that are missing or do not fit. The message names the problem.
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
        """Set the slot of each token of the step, [num_tokens] int64 on the device, -1 for none. Called outside graphs.

        A slot without an adapter adds nothing. Dummy steps for measurement and capture use empty slots.
        """
        ...

    def apply(self, module: str, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' contribution of `module` to `out`, in place.

        Args:
            module: a path of `LoraContext.modules`.
            inputs: [num_tokens, in_features]. For an embedding, token ids [num_tokens] int64, each equivalent to a
                one-hot row.
            out: [num_tokens, out_features]. It may be columns of a wider tensor.
        """
        ...


class MergedLora(Lora, Protocol):
    """Protocol of a plugin that handles projections merged into one matrix product in a single call."""

    def apply_merged(self, modules: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Do the work of `apply` for one tuple of `LoraContext.merged`.

        `out` [num_tokens, all out_features] holds the outputs of the modules in adjacent columns.
        """
        ...


class ExtendedLora(Lora, Protocol):
    """Protocol of a plugin whose matrices A may be appended to the base model's weights. One product computes both."""

    def expand(self, modules: tuple[str, ...], inner: torch.Tensor, out: torch.Tensor) -> None:
        """Do the work of `apply` or `apply_merged` for modules whose weight was extended.

        `inner` [num_tokens, rows] is the product of the inputs with the rows that `LoraContext.extend` returned. Both
        `inner` and `out` may be columns of a wider tensor. Alternatively `inner` is [parts, num_tokens, rows] float32,
        and the product is its sum over the parts. `out` is float32 then.
        """
        ...


class SingleLora(Lora, Protocol):
    """Protocol of a plugin with a special path for steps of one adapter."""

    def plan_single(self, slots: torch.Tensor, slot: int) -> None:
        """Do the work of `plan` for a step whose tokens all have `slot` or none.

        Until the next plan, `inner` in `ExtendedLora.expand` is the product with only the `single_rows` of
        `LoraContext.extend`. A step that was captured for one slot is planned for any other before its replay.
        """
        ...


class ForgetfulLora(Lora, Protocol):
    """Protocol of a plugin that keeps copies of adapters in host memory, and drops them when an adapter is removed."""

    def forget(self, path: str) -> None:
        """Drop all copies of a folder that is in no slot. The next `load` of it reads its files.

        The engine calls this if the plugin has it. A folder without copies is not an error.
        """
        ...
