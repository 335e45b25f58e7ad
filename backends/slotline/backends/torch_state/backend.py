"""The `torch` state backend: every kind of contract version 1, in float32 matrix products of torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from slotline.backends.torch_state.batches import Part, StatePlan, Stream, plan_of
from slotline.backends.torch_state.recurrences import RECURRENCES, own_inputs
from slotline.backends.torch_state.trails import Trail, trail_of
from slotline.registry.contracts.state import StateBatch, StateContext, StateLayer, kind_of

Tensors = Mapping[str, Tensor]


class TorchState:
    """See `slotline.registry.contracts.state.StateBackend`.

    Attributes:
        on_host: whether slots can be read without waiting for a device.
    """

    def __init__(self, context: StateContext) -> None:
        kinds = {layer.state_kind for layer in context.layers}
        self._convolves = "short_conv" in kinds
        self._recurs = bool(kinds - {"short_conv"})
        self._most_drafts = context.max_draft_tokens
        self._trails: dict[int, Trail] = {}  # by layer, of the last step
        self.on_host = torch.device(context.device).type == "cpu"

    def plan(self, batch: StateBatch) -> StatePlan:
        """Return index tensors of the step, without waiting for the device."""
        self._trails.clear()
        return plan_of(
            batch,
            recurs=self._recurs,
            convolves=self._convolves,
            on_host=self.on_host,
            most_drafts=self._most_drafts,
        )

    def forward(self, layer: StateLayer, inputs: Tensors, state: Tensors, plan: StatePlan) -> Tensor:
        """See the contract."""
        like = inputs[kind_of(layer).output]
        output = torch.zeros_like(like, memory_format=torch.contiguous_format)
        if plan.verified is not None:
            self._trails[layer.index] = trail_of(layer, inputs, state, plan.batch, plan.verified)
        if plan.stream is not None and layer.state_kind == "short_conv":
            convolved = _convolve(layer, inputs, state["conv"], plan.stream)
            plan.stream.tokens.put(output, convolved)
        elif layer.state_kind in RECURRENCES:
            (tensor,) = state.values()
            for part in plan.parts:
                part.tokens.put(output, _advance(layer, inputs, tensor, part))
        return output

    def commit(self, layer: StateLayer, state: Tensors, slots: Tensor, accepted: Tensor) -> None:
        """See the contract: the accepted tokens once more, from the state before them."""
        trail = self._trails.get(layer.index)
        if trail is not None:
            (tensor,) = state.values()
            trail.go_back(tensor, slots, accepted, on_host=self.on_host)

    def copy(self, layer: StateLayer, state: Tensors, source: int, target: int) -> None:
        """See the contract."""
        for tensor in state.values():
            tensor[target].copy_(tensor[source])


def _advance(layer: StateLayer, inputs: Tensors, state: Tensor, part: Part) -> Tensor:
    """Return outputs [num_tokens, ...] float32 of the part's tokens. Its slots hold the states after them."""
    recurrence, facts = RECURRENCES[layer.state_kind], layer.facts
    own = own_inputs(layer, inputs, part.tokens)
    pieces = recurrence.pieces(facts, own)
    now = part.slots.read(state)
    if part.chunk == 1:
        output, now = recurrence.step(facts, own, pieces, now)
    else:
        spread = tuple(part.spread(piece) for piece in pieces)
        outputs = now.new_empty((*spread[0].shape[:2], *own["v" if "v" in own else "x"].shape[1:]))
        for chunks, places in part.slices():
            count = chunks.stop - chunks.start
            chunk = tuple(piece[chunks, places] for piece in spread)
            outputs[chunks, places], now[:count] = recurrence.chunk(facts, own, chunk, now[:count])
        output = part.gather(outputs)
    part.slots.write(state, now)
    return _finish(output, own)


def _finish(output: Tensor, inputs: Tensors) -> Tensor:
    """Apply the skip connection, then the gate."""
    if "D" in inputs:
        skip = inputs["D"]
        output = output + skip.view(*skip.shape, *[1] * (output.ndim - 1 - skip.ndim)) * inputs["x"].float()
    return output * F.silu(inputs["z"].float()) if "z" in inputs else output


def _convolve(layer: StateLayer, inputs: Tensors, state: Tensor, stream: Stream) -> Tensor:
    """Return outputs [num_tokens, C] float32: states and tokens concatenated by request, summed over the taps."""
    facts, x = layer.facts, stream.tokens.take(inputs["x"]).float()
    kept = facts["width"] - 1
    before = stream.slots.read(state)  # [n, C, W - 1]
    num_requests, channels = before.shape[:2]
    # Behind `kept` columns of state for each request up to it; its own columns stand right before its first token.
    place_of = torch.arange(len(x), device=x.device) + kept * (stream.request_of + 1)  # [num_tokens]
    taps = torch.arange(kept, device=x.device)
    ends = stream.ends + kept * torch.arange(1, num_requests + 1, device=x.device)  # [n], after the last token
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])  # [n], the first column of state
    line = x.new_empty((len(x) + kept * num_requests, channels))
    line.index_copy_(0, (begins[:, None] + taps).flatten(), before.transpose(1, 2).reshape(-1, channels))
    line.index_copy_(0, place_of, x)
    weight = inputs["weight"].float()  # [C, W]
    output = x * weight[:, kept]
    for tap in range(kept):
        output.addcmul_(line.index_select(0, place_of - kept + tap), weight[:, tap])
    if "bias" in inputs:
        output += inputs["bias"].float()
    after = line.index_select(0, (ends[:, None] - kept + taps).flatten())  # [n * (W - 1), C]
    stream.slots.write(state, after.view(num_requests, kept, channels).transpose(1, 2))
    return F.silu(output) if facts["activation"] == "silu" else output
