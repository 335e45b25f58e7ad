"""The state contract, version 1: layers with a fixed-size state per request (Mamba, gated delta nets, convolutions).

A backend is built once for a group of state layers. In each step the core calls `plan` once, on the host, then for each
layer `forward`; after drafts were verified, `commit` for each layer. A model layer with a convolution before its
recurrence (Mamba, Mamba-2, gated delta nets) is two state layers, a ``short_conv`` and the other, whose tensors may lie
in one page.

**Inputs.** What `inputs` holds for each kind. T is the number of tokens; tensors over T have the activation dtype
unless marked f32, and their last dimension is contiguous, the others have any stride. What has no T is a parameter:
contiguous, f32 but for `weight` and `bias`, which have the activation dtype. Those two are the model's own tensors: no
kernel of a step writes them, so they may be read while the kernels in front still run; other parameters may be made
anew by each forward. Names in brackets may be absent, and are then not in the mapping. Names that a backend does not
know, in `inputs` and in `facts`, are to be ignored.

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

`activation` is ``silu`` or ``none``; `dt_softplus` and `qk_l2norm` are booleans; `dt_limit` is (low, high), absent for
none; `scale` is a float, commonly ``K ** -0.5``. Outputs have the activation dtype.

**State tensors.** [num_slots, *shape]: conv [C, W - 1], ssm [D, N] or [H, P, N], delta [Hv, K, V]; `STATE_KINDS` has
this as data. With a dtype pair (activation, state), ssm and delta have the state dtype and conv, which holds plain
inputs, the activation dtype. A slot's values are dense, row-major, or channel-last for conv (stride 1 over C, C over
the window); the stride between slots is any number, since a slot may be one part of a padded page.

**Arithmetic**, per request, token t after token t - 1, from zeros or the slot's content; in float32 whatever the
dtypes, with operands of a product rounded to the activation dtype at will (so no TF32 where that is float32), the state
rounded when it is stored and the output once at the end:

* short_conv: with X the conv state followed by the inputs, y[t] = act(bias + sum over j of weight[:, j] * X[t + j]), so
  ``weight[:, W - 1]`` meets the newest token. The new conv state is the last W - 1 columns of X, oldest first; inputs
  before the first token are zeros.
* mamba1, mamba2: d = dt + dt_bias, then softplus if `dt_softplus`, then clamped to `dt_limit`;
  h = exp(d * A) * h + d * x (outer) B; y = h C + D * x; then y = y * silu(z) where z is given. A is the negative rate
  itself, not its logarithm. Head i reads group ``i // (H // G)`` of B and C.
* gated_delta: where `qk_l2norm`, q and k are divided by sqrt(sum of squares + 1e-6); q is multiplied by `scale`;
  S = exp(g) * S; S = S + k (outer) (beta * (v - S^T k)); y = S^T q. Value head i uses key head ``i // (Hv // Hk)``.
  g is the logarithm of the decay (at most 0), beta is used as it is.

Sources: Gu and Dao, arXiv 2312.00752, section 3 (mamba1); Dao and Gu, arXiv 2405.21060, sections 3 and 6 (mamba2); Yang
and others, arXiv 2412.06464, section 3 (gated_delta).

**Slots.**

* A request owns one slot; no two rows of a batch have the same slot, but for -1. Any slot number from 0 may be used.
* Slot -1 is padding, wherever it stands: its tokens' outputs may be anything finite, and no state is read or written.
* `has_initial_state` False: start from zeros, whatever the slot holds (NaN in tests).
* A request with no tokens in a batch keeps its state as it is, also if `has_initial_state` is False.
* Updates are destructive, and no other slot changes, not even in the last bit. `inputs` stay unchanged.
* Tensors may be longer than `num_requests` and `num_tokens` say, for graphs: further rows have slot -1 and
  `query_start_loc` goes on without decreasing; the output has as many rows as the inputs, those of padding finite.
* A slot is never shared with the prefix cache: a checkpoint is a copy into another slot. The core calls `copy` between
  two steps, behind the `commit` of the first, in the order of the device's work; nothing waits for it.

**Speculation.** A verified request brings 1 + k tokens, k up to the context's `max_draft_tokens`; after `forward` its
state is as after all of them. Where `rollback` is declared, `commit` then makes it as after the first `accepted`.
So a backend keeps what it needs for that whenever a request has at most ``1 + max_draft_tokens`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
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


@frozen(kw_only=True)
class StateKind:
    """What a kind of state layer takes and keeps; see the module's table.

    Attributes:
        token_inputs: required inputs with one row per token.
        parameters: required inputs without.
        optional: inputs that may be absent: ``z`` has one row per token, the others are parameters.
        facts: names of the layer's facts, in the order in which shapes use them.
        tensors: state tensor -> the facts that its shape is made of; ``width - 1`` is meant as it stands.
        recurrent: True if the tensors have the state dtype, False for the activation dtype.
    """

    token_inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    optional: tuple[str, ...]
    facts: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    recurrent: bool = True


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
        ),
    }
)
"""The kinds of contract version 1; a plugin may declare others, which the conformance suite then cannot check."""


@frozen(kw_only=True, field_transformer=declared)
class StateCapabilities:
    """What a state backend offers.

    Attributes:
        devices: device types.
        state_kinds: layer kinds, e.g. ``mamba2``, ``gated_delta``, ``short_conv``.
        dtypes: pairs (activation dtype, state dtype); a convolution keeps its state in the activation dtype.
        query_len: most new tokens of a request in one batch.
        rollback: whether `commit` can go back to an accepted draft position.
        rollback_copy: True if it holds room for the states of `max_requests` once more for that, from the start.
        checkpoints: whether `copy` works, so that a state can be kept for prefix reuse and resumed.
        graphs: which batches can be captured.
        limits: offers that shrink when another feature is needed.
        priority: `auto` prefers the higher figure.
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


@frozen(kw_only=True)
class StateTensorSpec:
    """One tensor of a layer's state: its name, its shape for one slot, and its dtype by name.

    In a model's facts the dtype may be ``auto``: that of the activations, which the plan decides.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Elements in one slot."""
        return prod(self.shape)


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
    """What a state backend's factory gets.

    Attributes:
        contract: the bound contract version.
        layers: the layers of the group, all that `forward` will be called for.
        device: torch device string.
        dtype: of activations, by name; a state tensor's is in its spec.
        max_query_len, max_requests, max_tokens: bounds on every batch.
        max_draft_tokens: most draft tokens of one request that a `commit` may reject; 0 without speculation.
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
    """One step's batch as a state group sees it.

    Attributes:
        num_requests, num_tokens, max_query_len: without padding.
        query_start_loc: [num_requests + 1] int32, prefix sums of query lengths, starts with 0, non-decreasing.
        slots: [num_requests] int32, -1 for padding.
        has_initial_state: [num_requests] bool; False means start from zeros whatever the slot holds.
        num_accepted: [num_requests] int32, tokens of the previous step that were accepted (1 without speculation).
            For information: where that mattered, `commit` was called with the same figure.
        query_start_loc_cpu: query_start_loc on the host, [num_requests + 1]; never rewritten once handed out.
        num_decodes: requests at the front of the batch with one token each; some may have no initial state.
        extras: what later minor versions add.
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
    """What a built state backend can do. `state` maps tensor names to [num_slots, *shape] tensors of the layer."""

    def plan(self, batch: StateBatch) -> Any:
        """Host work of one step, outside graphs. The result is handed to every `forward` of the step.

        Under graphs it is called before each replay as well; tensors of the plan that a captured `forward` reads must
        then keep their addresses.
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
        """Make the state after `accepted` of the last step's tokens the current one.

        Called at most once after a `forward` of the layer and before the next. Without it all tokens count.

        Args:
            slots: [num_requests] int32, the rows of the last batch in their order; -1 for those to leave alone, which
                includes every row with more than ``1 + max_draft_tokens`` tokens, or none.
            accepted: [num_requests] int32, 1 up to the row's tokens. Never 0 with a slot: the first token of a verified
                request was sampled, not drafted, and stays.
        """
        ...

    def copy(self, layer: StateLayer, state: Mapping[str, torch.Tensor], source: int, target: int) -> None:
        """Copy one slot to another, all tensors of the layer, for checkpoints and forks. Both live on apart."""
        ...
