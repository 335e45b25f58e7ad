"""The state contract, version 1: layers with a fixed-size state per request (Mamba, gated delta nets, convolutions).

A backend is built once for a group of state layers. In each step the core calls `plan` once, on the host, then
`forward` for each layer. After drafts were verified, it calls `commit` for each layer. A model layer with a convolution
before its recurrence (Mamba, Mamba-2, gated delta nets) is two state layers: a ``short_conv`` and the recurrence. Their
tensors may share a page.

**Inputs.** The table lists the contents of `inputs` for each kind. T is the number of tokens. Tensors over T have the
activation dtype unless marked f32. Their last dimension is contiguous, and the others have any stride. Tensors without
T are parameters. They are contiguous and f32, except `weight` and `bias`, which have the activation dtype. `weight` and
`bias` are the model's own tensors. No kernel of a step writes them, so they may be read while earlier kernels still
run. Other parameters may be computed by each forward pass. Names in brackets may be missing from the mapping. Backends
ignore unknown names in `inputs` and in `facts`.

============  ==================================================  ========================================  ==========
kind          inputs                                              facts                                     output
============  ==================================================  ========================================  ==========
short_conv    x [T, C], weight [C, W], [bias [C]]                 channels C, width W >= 2, activation      [T, C]
mamba1        x, dt [T, D], A [D, N], B, C [T, N], [D [D]],       channels D, state_size N, dt_softplus     [T, D]
              [dt_bias [D]], [z [T, D]]
mamba2        x [T, H, P], dt [T, H], A [H], B, C [T, G, N],      num_heads H, head_size P, num_groups G,   [T, H, P]
              [D [H]], [dt_bias [H]], [z [T, H, P]]               state_size N, dt_softplus, dt_limit
gated_delta   q, k [T, Hk, K], v [T, Hv, V], g [T, Hv] f32,       num_k_heads Hk, num_v_heads Hv,           [T, Hv, V]
              beta [T, Hv]                                        head_size_k K, head_size_v V, qk_l2norm,
                                                                  scale
============  ==================================================  ========================================  ==========

`activation` is ``silu`` or ``none``. `dt_softplus` and `qk_l2norm` are booleans. `dt_limit` is (low, high), absent for
no limit. `scale` is a float, commonly ``K ** -0.5``. Outputs have the activation dtype.

**State tensors.** [num_slots, *shape]: conv [C, W - 1], ssm [D, N] or [H, P, N], delta [Hv, K, V]. `STATE_KINDS` has
this as data. With a dtype pair (activation, state), ssm and delta have the state dtype. conv holds plain inputs and has
the activation dtype. A slot's values are dense and row-major, or channel-last for conv (stride 1 over C, C over the
window). The stride between slots is arbitrary, since a slot may be one part of a padded page.

**Arithmetic.** The formulas apply per request, token t after token t - 1, from zeros or the slot's content. Everything
is computed in float32 for all dtypes. Operands of a product may be rounded to the activation dtype (so TF32 is not
allowed if that is float32). The state is rounded when it is stored, and the output once at the end.

* short_conv: with X the conv state followed by the inputs, y[t] = act(bias + sum over j of weight[:, j] * X[t + j]), so
  ``weight[:, W - 1]`` is multiplied with the newest token. The new conv state is the last W - 1 columns of X, oldest
  first. Inputs before the first token are zeros.
* mamba1, mamba2: d = dt + dt_bias, then softplus if `dt_softplus`, then clamped to `dt_limit`. Then h = exp(d * A) * h
  + d * x (outer) B, y = h C + D * x, and y = y * silu(z) if z is given. A is the negative rate itself, not its
  logarithm. Head i reads group ``i // (H // G)`` of B and C.
* gated_delta: if `qk_l2norm`, q and k are divided by sqrt(sum of squares + 1e-6). q is multiplied by `scale`. Then S =
  exp(g) * S, S = S + k (outer) (beta * (v - S^T k)), and y = S^T q. Value head i uses key head ``i // (Hv // Hk)``. g
  is the logarithm of the decay (at most 0). beta is used unchanged.

**Kinds of plugins.** A plugin may bring a kind of its own: a `StateKind` with `step`, the definition, `draw` and
`sizes` in `StateCapabilities.own_kinds`. The conformance suite runs a backend of it as it runs the kinds above, with
`step` in float64 as the oracle. A model family sets `StateLayer.own_kind`. `slotline.registry.kimi_delta` is one.

Sources: Gu and Dao, arXiv 2312.00752, section 3 (mamba1), Dao and Gu, arXiv 2405.21060, sections 3 and 6 (mamba2), Yang
and others, arXiv 2412.06464, section 3 (gated_delta).

**Slots.**

* A request owns one slot. No two rows of a batch have the same slot, except -1. Any slot number from 0 may be used.
* Slot -1 is padding, at any place in the batch. Its tokens' outputs may be any finite values, and no state is read or
  written.
* If `has_initial_state` is False, start from zeros and ignore the slot's content (NaN in tests).
* A request without tokens in a batch keeps its state, also if `has_initial_state` is False.
* Updates are destructive, and no other slot changes, not even in the last bit. `inputs` stay unchanged.
* For graphs, tensors may be longer than `num_requests` and `num_tokens`. The extra rows have slot -1, and
  `query_start_loc` continues without decreasing. The output has as many rows as the inputs, with finite values in
  padding rows.
* A slot is never shared with the prefix cache: a checkpoint is a copy into another slot. The core calls `copy` between
  two steps, after the `commit` of the first, in the order of the device's work, without waiting.

**Speculation.** A verified request has 1 + k tokens, k up to the context's `max_draft_tokens`. After `forward` its
state includes all of them. If `rollback` is declared, `commit` then resets the state to the one after the first
`accepted` tokens. A backend must keep the data for this whenever a request has at most ``1 + max_draft_tokens`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

from slotline.registry.capability import Flag, GraphSupport, Level, Limit, Max, Set
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    StateStep = Callable[
        [Mapping[str, Any], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
        tuple[torch.Tensor, dict[str, torch.Tensor]],
    ]
    StateDraw = Callable[[Mapping[str, Any], int, torch.Generator], dict[str, torch.Tensor]]


@frozen(kw_only=True)
class StateKind:
    """Inputs, facts and state tensors of a kind of state layer, as in the module's table.

    Attributes:
        token_inputs: required inputs with one row per token.
        parameters: required inputs without rows per token.
        optional: inputs that may be absent. ``z`` has one row per token, the others are parameters.
        facts: names of the layer's facts, in the order in which shapes use them.
        tensors: state tensor -> the facts that form its shape. ``width - 1`` is meant literally.
        recurrent: True if the tensors have the state dtype, False for the activation dtype.
        step: of a plugin's own kind, its definition as ``step(facts, token, state)``: the output of one token of one
            request, and the state after it. `token` has the inputs without their first dimension. `state` has the
            tensors by name. All are in float64 if exactness is wanted, and the arithmetic must keep their dtype.
        draw: of a plugin's own kind, random inputs for the conformance suite as ``draw(facts, count, generator)``:
            [count, ...] float32 on the CPU by name, whose recurrence neither vanishes nor grows.
        wide: names of token inputs that are float32 whatever the activation dtype is.
        sizes: of a plugin's own kind, the facts of the layers that the conformance suite runs.
        output: the token input that has the shape of the output.
    """

    token_inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    optional: tuple[str, ...]
    facts: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    recurrent: bool = True
    step: StateStep | None = None
    draw: StateDraw | None = None
    wide: tuple[str, ...] = ()
    sizes: tuple[Mapping[str, Any], ...] = ()
    output: str = "x"


STATE_KINDS: Mapping[str, StateKind] = MappingProxyType(
    {
        "short_conv": StateKind(
            token_inputs=("x",),
            parameters=("weight",),
            optional=("bias",),
            facts=("channels", "width", "activation"),
            tensors={"conv": ("channels", "width - 1")},
            recurrent=False,
        ),
        "mamba1": StateKind(
            token_inputs=("x", "dt", "B", "C"),
            parameters=("A",),
            optional=("D", "dt_bias", "z"),
            facts=("channels", "state_size", "dt_softplus"),
            tensors={"ssm": ("channels", "state_size")},
        ),
        "mamba2": StateKind(
            token_inputs=("x", "dt", "B", "C"),
            parameters=("A",),
            optional=("D", "dt_bias", "z"),
            facts=("num_heads", "head_size", "num_groups", "state_size", "dt_softplus", "dt_limit"),
            tensors={"ssm": ("num_heads", "head_size", "state_size")},
        ),
        "gated_delta": StateKind(
            token_inputs=("q", "k", "v", "g", "beta"),
            parameters=(),
            optional=(),
            facts=("num_k_heads", "num_v_heads", "head_size_k", "head_size_v", "qk_l2norm", "scale"),
            tensors={"delta": ("num_v_heads", "head_size_k", "head_size_v")},
            output="v",
        ),
    }
)
"""The kinds of contract version 1. A plugin may bring others (`StateCapabilities.own_kinds`)."""


@frozen(kw_only=True, field_transformer=declared)
class StateCapabilities:
    """Capabilities that a state backend declares.

    Attributes:
        devices: device types.
        state_kinds: layer kinds, e.g. ``mamba2``, ``gated_delta``, ``short_conv``.
        own_kinds: definitions of those of the kinds that the contract does not have. The conformance suite runs them.
        dtypes: pairs (activation dtype, state dtype). A convolution keeps its state in the activation dtype.
        query_len: most new tokens of a request in one batch.
        rollback: `commit` can go back to an accepted draft position.
        rollback_copy: True if rollback needs memory for a second copy of the states of `max_requests`, from the start.
        checkpoints: `copy` works, so that a state can be kept for prefix reuse and resumed.
        graphs: the batches that can be captured.
        limits: offers that shrink when another feature is needed.
        priority: `auto` prefers the higher number.
    """

    devices: Set[str]
    state_kinds: Set[str]
    dtypes: Set[tuple[str, str]]
    query_len: Max = Max()
    rollback: Flag = Flag(False)
    rollback_copy: bool = False
    checkpoints: Flag = Flag(False)
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    limits: tuple[Limit, ...] = ()
    priority: int = 0
    own_kinds: Mapping[str, StateKind] = field(factory=dict)


@frozen(kw_only=True)
class StateTensorSpec:
    """Tensor of a layer's state: its name, its shape for one slot, and its dtype by name.

    In a model's facts the dtype may be ``auto``: the dtype of the activations, which the plan decides.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Number of elements in one slot."""
        return prod(self.shape)


@frozen(kw_only=True)
class StateLayer:
    """Static facts of one state layer. `facts` are the sizes that its kind defines (heads, groups, widths).

    `own_kind` is the definition of a kind that the contract does not have.
    """

    name: str
    index: int
    state_kind: str
    tensors: tuple[StateTensorSpec, ...]
    facts: Mapping[str, Any]
    own_kind: StateKind | None = None


def kind_of(layer: StateLayer) -> StateKind:
    """Return the definition of a layer's kind.

    Raises:
        KeyError: if the contract does not have the kind, and the layer does not bring it.
    """
    return layer.own_kind or STATE_KINDS[layer.state_kind]


@frozen(kw_only=True)
class StateContext:
    """Input of a state backend's factory.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the group. `forward` is called for no others.
        device: torch device string.
        dtype: dtype of activations, by name. A state tensor's dtype is in its spec.
        max_query_len, max_requests, max_tokens: bounds on every batch.
        max_draft_tokens: most draft tokens of one request that a `commit` may reject. 0 without speculation.
        options: the plugin's own table, an instance of its options class, or None.
    """

    contract: int
    layers: tuple[StateLayer, ...]
    device: str
    dtype: str
    max_query_len: int
    max_requests: int
    max_tokens: int
    max_draft_tokens: int = 0
    options: Any = None


@define(kw_only=True, eq=False)
class StateBatch:
    """State inputs of one group for one step.

    Attributes:
        num_requests, num_tokens, max_query_len: without padding.
        query_start_loc: [num_requests + 1] int32, prefix sums of query lengths, starts with 0, non-decreasing.
        slots: [num_requests] int32, -1 for padding.
        has_initial_state: [num_requests] bool. False means to start from zeros and ignore the slot's content.
        num_accepted: [num_requests] int32, tokens of the previous step that were accepted (1 without speculation). For
            information only: if drafts were rejected, `commit` was called with the same numbers.
        query_start_loc_cpu: query_start_loc on the host, [num_requests + 1]. Never overwritten afterwards.
        num_decodes: requests at the front of the batch with one token each. Some may have no initial state.
        extras: additions of later minor versions.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    slots: torch.Tensor
    has_initial_state: torch.Tensor
    num_accepted: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    num_decodes: int = 0
    extras: dict[str, Any] = field(factory=dict)


class StateBackend(Protocol):
    """Protocol of a built state backend. `state` maps tensor names to [num_slots, *shape] tensors of the layer."""

    def plan(self, batch: StateBatch) -> Any:
        """Do the host work of one step, outside graphs.

        The result is passed to every `forward` of the step. Under graphs this is called before each replay as well.
        Tensors of the plan that a captured `forward` reads must then keep their addresses.
        """
        ...

    def forward(
        self, layer: StateLayer, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], plan: Any
    ) -> torch.Tensor:
        """Advance the state of each request by its new tokens and return their outputs.

        Inputs, formulas and the output's shape are those of the layer's kind, in the module's table. The output is a
        new tensor of the activation dtype with one row for each row of the inputs.
        """
        ...

    def commit(
        self, layer: StateLayer, state: Mapping[str, torch.Tensor], slots: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        """Make the state after `accepted` of the last step's tokens the current state.

        Called at most once after a `forward` of the layer and before the next. Without this call all tokens are
        accepted.

        Args:
            slots: [num_requests] int32, the rows of the last batch in their order. -1 for rows to leave unchanged,
                which include every row without tokens or with more than ``1 + max_draft_tokens`` tokens.
            accepted: [num_requests] int32, from 1 to the row's number of tokens. Never 0 with a slot, because the first
                token of a verified request was sampled, not drafted.
        """
        ...

    def copy(self, layer: StateLayer, state: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one slot to another, all tensors of the layer, for checkpoints and forks.

        Later changes affect only one slot.
        """
        ...
