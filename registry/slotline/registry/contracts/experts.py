"""The experts contract, version 1 (provisional): mixtures of experts with quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import field, frozen

from slotline.registry.capability import Align, Flag, GraphSupport, Level, Max, Set
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class ExpertsCapabilities:
    """Capabilities that an experts plugin declares.

    Attributes:
        devices, dtypes, schemes, granularities, scale_groups, ragged, offsets: as in `LinearCapabilities`.
        in_features, out_features: sizes of the first product.
        graphs, priority: as in `LinearCapabilities`.
        activations: some of ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` and ``swiglu_oai``.
        bias: products with a bias.
        max_experts: most experts.
        activation: what it rounds activations to, as in `LinearCapabilities`.
        batch_invariant: a token's outputs can be bitwise the same in any batch.
    """

    devices: Set[str]
    dtypes: Set[str]
    schemes: Set[str]
    granularities: Set[str] = Set(("tensor", "channel", "group", "block"))
    scale_groups: Align = Align()
    ragged: Flag = Flag(False)
    offsets: Flag = Flag(False)
    in_features: Align = Align()
    out_features: Align = Align()
    activations: Set[str] = Set(("silu",))
    bias: Flag = Flag(False)
    max_experts: Max = Max()
    activation: Literal["", "int8", "fp8"] = ""
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    batch_invariant: Flag = Flag(False)
    priority: int = 0


@frozen(kw_only=True)
class ExpertsContext:
    """Input of an experts plugin's factory, once for each scheme, size and engine.

    Attributes:
        scheme: form of the weights of both products.
        experts: number of experts.
        in_features: inputs of the first product, and outputs of the second.
        out_features: outputs of the first product: gate and up together.
        interleaved: True if the outputs of the first product alternate (gate, up, gate, up), False if all gates come
            before all ups.
        activation: as in `Experts.apply`.
        constants: numbers of the activation by name: `alpha` and `limit` of ``swiglu_oai``.
        dtype, device, max_tokens, batch_invariant, options: as in `LinearContext`.
    """

    contract: int
    scheme: WeightScheme
    experts: int
    in_features: int
    out_features: int
    interleaved: bool = False
    activation: str = "silu"
    constants: Mapping[str, float] = field(factory=dict)
    dtype: str
    device: str
    max_tokens: int = 8192
    batch_invariant: bool = False
    options: Any = None


class Experts(Protocol):
    """Product of an experts plugin's factory. It keeps no weight itself: one instance serves many layers."""

    def pack(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Mapping[str, torch.Tensor]:
        """Bring the weights of a mixture into the layout of the kernel, once when they are loaded.

        Args:
            gate_up: [experts, out_features, in_features], on the context's device.
            down: [experts, in_features, out_features / 2].
            gate_up_bias: [experts, out_features] or None.
            down_bias: [experts, in_features] or None.
        """
        ...

    def apply(
        self,
        x: torch.Tensor,
        packed: Mapping[str, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs times their weights, [tokens, in_features] in the dtype of x.

        An expert's output is ``down(activation(gate, up))``. For ``silu``, ``gelu``, ``gelu_tanh`` and ``relu`` that
        activation is ``act(gate) * up``. For ``swiglu_oai`` gate is limited to at most `limit` and up to within it, and
        the activation is ``gate * sigmoid(alpha * gate) * (up + 1)``.

        Args:
            x: [tokens, in_features], contiguous.
            topk_ids: [tokens, k] int64, the experts of each token. The number of experts stands for none.
            topk_weights: [tokens, k].
        """
        ...

    def num_bytes(self) -> int:
        """Return the bytes of the packed form of the weights of a mixture."""
        ...
