"""The state contract, version 1: layers with a fixed-size state per request (Mamba, gated delta nets, convolutions).

A request owns one slot; slot -1 is padding and is skipped. Updates are destructive. A slot is never shared with the
prefix cache: a checkpoint is a copy. After speculation the core calls `commit` with the accepted position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, frozen

from slotline.registry.capability import Flag, GraphSupport, Level, Limit, Max, Set

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class StateCapabilities:
    """What a state backend offers.

    Attributes:
        devices: device types.
        state_kinds: layer kinds, e.g. ``mamba2``, ``gated_delta``, ``short_conv``.
        dtypes: pairs (activation dtype, state dtype).
        query_len: most new tokens of a request in one batch.
        rollback: whether `commit` can go back to an accepted draft position.
        checkpoints: whether a state may be copied out and resumed for prefix reuse.
        graphs: which batches can be captured.
        limits: offers that shrink when another feature is needed.
        priority: `auto` prefers the higher figure.
    """

    devices: Set[str]
    state_kinds: Set[str]
    dtypes: Set[tuple[str, str]]
    query_len: Max = Max()
    rollback: Flag = Flag(False)
    checkpoints: Flag = Flag(False)
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    limits: tuple[Limit, ...] = ()
    priority: int = 0


@frozen(kw_only=True)
class StateTensorSpec:
    """One tensor of a layer's state: its name, its shape for one slot, and its dtype by name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@frozen(kw_only=True)
class StateLayer:
    """The static facts of one state layer; `facts` are the sizes that its kind defines (heads, groups, widths)."""

    name: str
    index: int
    state_kind: str
    tensors: tuple[StateTensorSpec, ...]
    facts: Mapping[str, Any]


@frozen(kw_only=True)
class StateContext:
    """What a state backend's factory gets."""

    contract: int
    layers: tuple[StateLayer, ...]
    device: str
    dtype: str
    max_query_len: int
    max_requests: int
    max_tokens: int
    options: Any = None


@define(kw_only=True, eq=False)
class StateBatch:
    """One step's batch as a state group sees it.

    Attributes:
        num_requests, num_tokens, max_query_len: without padding.
        query_start_loc: [num_requests + 1] int32.
        slots: [num_requests] int32, -1 for padding.
        has_initial_state: [num_requests] bool; False means start from zeros whatever the slot holds.
        num_accepted: [num_requests] int32, tokens of the previous step that were accepted (1 without speculation).
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    slots: torch.Tensor
    has_initial_state: torch.Tensor
    num_accepted: torch.Tensor


class StateBackend(Protocol):
    """What a built state backend can do. `state` maps tensor names to [num_slots, *shape] tensors of the layer."""

    def plan(self, batch: StateBatch) -> Any:
        """Host work of one step, outside graphs."""
        ...

    def forward(
        self, layer: StateLayer, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], plan: Any
    ) -> torch.Tensor:
        """Advance the state of each request by its new tokens and return their outputs, [num_tokens, ...]."""
        ...

    def commit(
        self, layer: StateLayer, state: Mapping[str, torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Make the state after `accepted` [num_requests] of the last step's tokens the current one."""
        ...

    def copy(self, layer: StateLayer, state: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one slot to another, for checkpoints and forks."""
        ...
