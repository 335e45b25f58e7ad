"""The linear contract, version 1 (provisional): products with quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import frozen

from slotline.registry.capability import Align, Flag, GraphSupport, Level, Set
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class LinearCapabilities:
    """Capabilities that a linear plugin declares.

    Attributes:
        devices: device types.
        dtypes: dtypes of activations.
        schemes: names of the schemes that it multiplies by.
        granularities: some of ``tensor``, ``channel``, ``group`` and ``block``.
        scale_groups: inputs that share a scale, for the granularities ``group`` and ``block``.
        ragged: blocks that do not divide the inputs, so that the last one of each row is shorter.
        offsets: schemes that are not symmetric.
        act_order: schemes with act order.
        split_order: with act order also a part of a weight's inputs, whose groups have unequal numbers of them.
        in_features, out_features: sizes of the weight.
        activation: what it rounds activations to, "" for nothing. It is chosen only for schemes that permit it.
        graphs: the batches that its product can be captured for.
        rounded_inputs: it takes inputs that were rounded before, as attention may hand them over. Its products are
            `RoundedLinear`s.
        batch_invariant: a token's outputs can be bitwise the same in any batch.
        priority: where nothing was measured, the plugin with the highest one that fits is chosen.
    """

    devices: Set[str]
    dtypes: Set[str]
    schemes: Set[str]
    granularities: Set[str] = Set(("tensor", "channel", "group", "block"))
    scale_groups: Align = Align()
    ragged: Flag = Flag(False)
    offsets: Flag = Flag(False)
    act_order: Flag = Flag(False)
    split_order: Flag = Flag(True)
    in_features: Align = Align()
    out_features: Align = Align()
    activation: Literal["", "int8", "fp8"] = ""
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    rounded_inputs: Flag = Flag(False)
    batch_invariant: Flag = Flag(False)
    priority: int = 0


@frozen(kw_only=True)
class LinearContext:
    """Input of a linear plugin's factory, once for each scheme, size and engine.

    Attributes:
        scheme: form of the weights.
        in_features, out_features: sizes of the weights. Weights that are joined along the outputs have more outputs.
        dtype: torch dtype of activations, by name.
        device: torch device string.
        max_tokens: most tokens of a step.
        batch_invariant: True if the plan relies on the capability of that name.
        options: the plugin's own table.
    """

    contract: int
    scheme: WeightScheme
    in_features: int
    out_features: int
    dtype: str
    device: str
    max_tokens: int = 8192
    batch_invariant: bool = False
    options: Any = None


class Linear(Protocol):
    """Product of a linear plugin's factory. It keeps no weight itself: one instance serves many modules."""

    def pack(self, weight: QuantizedWeight) -> Mapping[str, torch.Tensor]:
        """Bring a weight into the layout of the kernel, once when it is loaded.

        The host keeps the tensors as buffers by these names, moves and reloads them. The names and shapes depend on the
        scheme and the sizes alone.

        Args:
            weight: on the context's device. Its tensors may be kept or overwritten.
        """
        ...

    def apply(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        """Return ``x @ weight.T`` [tokens, out_features] in the dtype of x [tokens, in_features], without bias.

        x is contiguous, of the context's dtype, and must not be changed. There may be no tokens.
        """
        ...

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the packed form of a weight."""
        ...


class RoundedLinear(Linear, Protocol):
    """Product of a linear plugin that declares `rounded_inputs`."""

    def rounded_groups(self) -> int:
        """Return the number of groups of inputs that have a scale of their own, all of equal size, in order.

        0 if inputs of this scheme cannot be rounded before.
        """
        ...

    def apply_rounded(
        self, codes: torch.Tensor, scales: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int
    ) -> torch.Tensor:
        """Return the product of inputs that are codes times scales, [tokens, out_features] in the context's dtype.

        Args:
            codes: [tokens, in_features] int8 from -127 to 127, contiguous.
            scales: [tokens, rounded groups] float32, contiguous, at least 0.
        """
        ...
