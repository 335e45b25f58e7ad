"""Graphs of a drafter: one for its observation of a verifying step, one for all steps of a proposal.

Both read changing data from fixed addresses: the step's inputs, the results of the model's graphs, and buffers filled
on the device before a replay. The attention of all steps of a proposal is planned once, at capture, so capturing needs
backends whose plans serve every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen

from slotline.builder.counted import counted
from slotline.builder.graph_capture import WARM_UPS, GraphCapture
from slotline.builder.graph_capturer import GraphCapturer
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.padding import padded_size
from slotline.kernels.graph_capture_state import alias_without_ownership
from slotline.proposers.speculation.draft_attention import CapturedAttention, DraftAttention, StagedAttention
from slotline.proposers.speculation.hidden_states import ComputedStates
from slotline.registry.contracts import ComputedTokens, Draft, DraftBatch, Drafter, Observer
from slotline.registry.contracts.device import Graph
from slotline.registry.contracts.device import GraphCapture as GraphSession
from slotline.registry.engine_reports import CaptureReport
from slotline.registry.errors import ContractError, IntegrityError

NAME = "drafts"


class _Computed(Protocol):
    def __call__(self, states: ComputedStates, following: torch.Tensor | None = None) -> ComputedTokens: ...


@frozen(eq=False)
class _Observation:
    replay: Callable[[], None]
    computed: ComputedTokens  # the graph's inputs, which must not be freed
    addresses: tuple[int, ...]
    observed: tuple[torch.Tensor, ...]  # [num_tokens, ...] each


@frozen(eq=False)
class _Proposal:
    replay: Callable[[], None]
    batch: DraftBatch  # the graph's inputs, which must not be freed; tokens and states are filled before a replay
    positions: torch.Tensor  # [num_requests] int64, negative where padded; filled too
    attention: CapturedAttention | None
    token_ids: torch.Tensor  # [num_requests, num_tokens] int64, the result


class DraftGraphs:
    """Captures a drafter's work for the uniform batches of the model's graphs, and replays it.

    Args:
        drafter: a drafter that declares `graphs`.
        target: the model's graphs, already captured.
        computed: makes the drafter's view of a step.
        attention: of the drafter's own layers.
        num_tokens: draft tokens.
        needs_computed, needs_hidden_states, catches_up: as the drafter declares.
        device: torch device string.

    Attributes:
        report: time and memory of capturing.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: GraphCapturer,
        computed: _Computed,
        attention: DraftAttention | None,
        *,
        num_tokens: int,
        needs_computed: bool,
        needs_hidden_states: bool,
        catches_up: bool,
        device: str,
    ) -> None:
        self.report = CaptureReport()
        self._drafter, self._target, self._computed, self._attention = drafter, target, computed, attention
        self._needs_computed, self._needs_hidden_states = needs_computed, needs_hidden_states
        self._catches_up = catches_up
        self._query_len, self._device = 1 + num_tokens, device
        lengths = (1, self._query_len)  # steps without drafts are observed too
        self._shapes = [s for s in target.shapes.largest_first if s.query_len in lengths and not s.cascade]
        most = max((shape.num_tokens for shape in self._shapes), default=0)
        # A step's tokens and those that follow them. For a step in flight the latter are known only on the device.
        self._tokens = torch.zeros(2, most, dtype=torch.int64, device=device)
        self._observations: dict[GraphShape, _Observation] = {}
        self._proposals: dict[int, _Proposal] = {}
        self._sizes: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self, *, progress: bool = False) -> None:
        """Capture all shapes once, before the first request.

        Raises:
            CapacityError: if the device runs out of memory.
            ModelError: if the drafter cannot be captured, although it declares `graphs`.
            ContractError: if its proposal is not a chain on the device.
        """
        with GraphCapture(
            "set drafter.graphs = false, and tell the author of the drafter", self._target.device
        ) as capturing:
            for shape in counted(self._shapes, "capturing drafts", show=progress):
                size = shape.padded_requests
                capturing.what = f"the drafts of {size} requests"
                if self._needs_computed:
                    self._observations[shape] = self._capture_observation(shape, capturing.pool)
                if shape.query_len == self._query_len and size not in self._proposals:
                    self._proposals[size] = self._capture_proposal(shape, capturing.pool)
        self._sizes = tuple(sorted(self._proposals))
        count = len(self._observations) + len(self._proposals)
        self.report = capturing.report(count, count)

    def size_for(self, count: int) -> int | None:
        """Return the captured number of requests to which `count` are padded, or None to propose for them eagerly."""
        return padded_size(count, self._sizes) if self._sizes and count <= self._sizes[-1] else None

    def observes(self, states: ComputedStates) -> bool:
        """Return True if the drafter's observation of this step is captured."""
        return states.inputs.shape in self._observations

    def observe(self, states: ComputedStates, computed: ComputedTokens) -> tuple[torch.Tensor, ...]:
        """Show the drafter a captured step. The next replay overwrites the result."""
        shape = states.inputs.shape
        assert shape is not None
        captured = self._observations[shape]
        if self._addresses(states, computed) != captured.addresses:
            raise IntegrityError(f"what a step of {shape} computed is not where the drafter's graph reads it")
        for own, tokens in zip(self._tokens, (computed.token_ids, computed.next_token_ids), strict=True):
            own[: shape.num_tokens].copy_(tokens)
        captured.replay()
        return captured.observed

    def propose(self, size: int, batch: DraftBatch, attend: StagedAttention | None) -> Draft:
        """Return the proposal for a batch padded to `size`. The next replay overwrites it."""
        captured, count = self._proposals[size], len(batch.rows)
        own = [captured.batch.last_token_ids, captured.positions]
        given = [batch.last_token_ids, batch.positions]
        if captured.batch.previous_token_ids is not None and batch.previous_token_ids is not None:
            own.append(captured.batch.previous_token_ids)
            given.append(batch.previous_token_ids)
        torch._foreach_copy_([tensor[:count] for tensor in own], given)  # one launch for all
        if count < size:
            captured.positions[count:].fill_(-1)
        for states, found in zip(_states(captured.batch), _states(batch), strict=True):
            states[:count].copy_(found)
        if captured.attention is not None and attend is not None:
            captured.attention.fill(attend)
        captured.replay()
        return Draft(token_ids=captured.token_ids[:count])

    def _capture_observation(self, shape: GraphShape, pool: GraphSession) -> _Observation:
        inputs, attend = self._target.made_up(shape)
        hidden, layers = self._results(shape)
        token_ids, following = self._tokens[:, : shape.num_tokens]
        states = ComputedStates(inputs=inputs, token_ids=token_ids, attend=attend, hidden=hidden, layers=layers)
        observer: Observer = self._drafter  # type: ignore[assignment]  # it declares needs_computed
        computed = self._computed(states, following)
        graph, observed = _captured(lambda: observer.observe(computed) or (), pool)
        return _Observation(
            graph.replay, computed, self._addresses(states, computed), tuple(map(alias_without_ownership, observed))
        )

    def _capture_proposal(self, shape: GraphShape, pool: GraphSession) -> _Proposal:
        size, (hidden, layers) = shape.padded_requests, self._results(shape)
        observed = self._observations[shape].observed if self._needs_computed else ()
        attention = None if self._attention is None else self._attention.captured(size)
        zeros = torch.zeros(size, dtype=torch.int64, device=self._device)
        positions = torch.full_like(zeros, -1) if attention is None else attention.positions
        newest = zeros.clone() if attention is None else attention.places.positions[0]  # 0 where padded
        batch = DraftBatch(
            rows=torch.zeros(size, dtype=torch.int64),
            token_table=torch.zeros((0, 0), dtype=torch.int32),
            num_tokens=torch.ones(size, dtype=torch.int32),
            last_token_ids=zeros,
            positions=newest,
            previous_token_ids=zeros.clone() if self._catches_up else None,
            hidden_states=_like(hidden, size) if self._needs_hidden_states else None,
            layer_hidden_states=None if layers is None else _like(layers, size),
            observed=tuple(_like(states, size) for states in observed),
            attend=None if attention is None else attention.attend,
            temperature=torch.zeros(size, device=self._device),
        )

        def propose() -> Draft:
            if attention is None:
                batch.positions.copy_(positions.clamp(min=0))
            else:
                attention.refresh()
            return self._drafter.propose(batch)

        graph, draft = _captured(propose, pool)
        elsewhere = draft.token_ids.device != zeros.device
        if draft.parents is not None or draft.probabilities is not None or elsewhere:
            raise ContractError(
                "the drafter declares graphs, and its proposal is no chain on the device",
                fix="set drafter.graphs = false, and tell the author of the plugin",
            )
        return _Proposal(graph.replay, batch, positions, attention, alias_without_ownership(draft.token_ids))

    def _results(self, shape: GraphShape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states and the inputs of layers that a replay of the model writes."""
        hidden, extras = self._target.results(shape)
        return hidden, extras.get(NAME)

    def _addresses(self, states: ComputedStates, computed: ComputedTokens) -> tuple[int, ...]:
        """Return the addresses of an observation's inputs that are not copied."""
        read = (computed.positions, computed.hidden_states, computed.layer_hidden_states)
        return (*self._target.addresses(states.inputs), *(t.data_ptr() for t in read if t is not None))


def _states(batch: DraftBatch) -> Sequence[torch.Tensor]:
    """Return the states copied before a replay, in addition to tokens and positions."""
    more = (batch.hidden_states, batch.layer_hidden_states)
    return (*batch.observed, *(states for states in more if states is not None))


def _like(states: torch.Tensor, size: int) -> torch.Tensor:
    return states.new_zeros((size, *states.shape[1:]))


def _captured(work: Callable[[], Any], pool: GraphSession) -> tuple[Graph, Any]:
    """Run the work as warm-up, then capture it."""
    for _ in range(WARM_UPS):
        work()
    graph = pool.graph()
    graph.begin()
    try:
        result = work()
    finally:
        graph.end()
    return graph, result
