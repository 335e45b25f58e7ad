"""Attention and states as a model calls them: each call is checked, and computed in float64 by its definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from slotline.registry.contracts.attention import AttentionLayer, CacheSlots, KVCache
from slotline.registry.contracts.model_family import ModelFacts
from slotline.registry.contracts.state import StateLayer, kind_of
from slotline.testing.check import Failed
from slotline.testing.oracles import attention as attention_oracle
from slotline.testing.oracles import state as state_oracle

BLOCK = 4


@frozen
class Rows:
    """Part of a step: the request, its new tokens, and the rows of encoder states that begin with it."""

    request: int
    count: int
    states: int = 0


class KeptKeys:
    """Keys, values and states of requests, with `attend` and `advance` for a model's forward passes.

    Attributes:
        facts: whose layers call.
        seen: copies of all tensors that were handed over in the last step, in order.
        dtype: dtype that queries, keys and values must have. None for any.
    """

    def __init__(self, facts: ModelFacts, dtype: torch.dtype | None = None) -> None:
        self.facts, self.dtype = facts, dtype
        self.seen: list[torch.Tensor] = []
        self.keeps = False
        self.fast = False
        self._rows: Sequence[Rows] = ()
        self._wanted: torch.Tensor | None = None
        self._calls: list[AttentionLayer] = []
        self._state_calls: list[StateLayer] = []
        self._keys: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    @property
    def attend(self) -> Any:
        """What a model gets as `attend`."""
        return self._attend

    def begin(self, rows: Sequence[Rows], wanted: torch.Tensor | None) -> None:
        """Begin a step."""
        self._rows, self._wanted = rows, wanted
        self._calls, self._state_calls, self.seen = [], [], []

    def end(self) -> None:
        """End a step.

        Raises:
            Failed: unless each layer was called once, in the order of the facts.
        """
        expected = [layer for layer in self.facts.layers if not self._left_out(layer)]
        _same_order("attend", self._calls, expected)
        _same_order("advance", self._state_calls, self.facts.state_layers)

    def forget(self, request: int) -> None:
        """Drop what is kept of a request."""
        self._keys = {key: pair for key, pair in self._keys.items() if key[0] != request}
        self._states = {key: state for key, state in self._states.items() if key[0] != request}

    def fork(self) -> KeptKeys:
        """Return a copy that goes on by itself."""
        other = type(self)(self.facts, self.dtype)
        other._keys, other._states = dict(self._keys), dict(self._states)
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(rows.count for rows in self._rows)

    # --- attention

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        written: bool = False,
        wanted: bool = False,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if written or wanted:
            name = "written" if written else "wanted"
            raise Failed(f"layer {layer.index}: attend was called with {name}=True, which no one offered")
        self._check(layer, query, key, value, sinks, inputs or {})
        return self._computed(layer, query, key, value, sinks)

    def _computed(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        device, dtype = query.device, query.dtype
        host = [part.detach().to("cpu", torch.float64) for part in (query, key, value)]
        sink = None if sinks is None else sinks.detach().to("cpu", torch.float64)
        out = query.new_zeros((len(query), layer.num_heads, layer.head_size_v))
        if self._few(layer):
            assert self._wanted is not None
            whole = host[0].new_zeros((self.num_tokens, *host[0].shape[1:]))
            whole[self._wanted.cpu()] = host[0]
            host[0] = whole
        found, start, begun = [], 0, 0
        for rows in self._rows:
            own = slice(start, start + rows.count)
            start += rows.count
            if layer.attention_type == "cross":
                self._keep_states(layer, rows, host, begun)
                begun += rows.states
            else:
                self._keep(layer, rows, host, own)
            found.append(self._one(layer, rows, host[0][own], sink))
        result = torch.cat(found) if found else host[0].new_zeros((0, *out.shape[1:]))
        if self._few(layer):
            assert self._wanted is not None
            result = result[self._wanted.cpu()]
        out[: len(result)] = result.to(device, dtype)
        return out

    def _keep(self, layer: AttentionLayer, rows: Rows, host: Sequence[torch.Tensor], own: slice) -> None:
        if layer.shares_kv_with is not None:
            return
        pair, before = (host[1][own], host[2][own]), self._keys.get((rows.request, layer.index))
        if before is not None and layer.attention_type != "encoder_only":
            pair = torch.cat((before[0], pair[0])), torch.cat((before[1], pair[1]))
        self._keys[rows.request, layer.index] = pair

    def _keep_states(self, layer: AttentionLayer, rows: Rows, host: Sequence[torch.Tensor], begun: int) -> None:
        if rows.states:
            own = slice(begun, begun + rows.states)
            self._keys[rows.request, layer.index] = host[1][own], host[2][own]

    def _one(self, layer: AttentionLayer, rows: Rows, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        owner = layer.index if layer.shares_kv_with is None else layer.shares_kv_with
        keys, values = self._keys[rows.request, owner]
        if not rows.count:
            return query.new_zeros((0, layer.num_heads, layer.head_size_v))
        causal = layer.attention_type == "decoder"
        seen = None
        if layer.attention_type == "cross":
            seen = torch.ones(len(query), len(keys), dtype=torch.bool)
        elif layer.chunk is not None:
            place = torch.arange(len(keys))
            at = place[len(keys) - len(query) :, None]
            seen = (place[None, :] <= at) & (place[None, :] // layer.chunk == at // layer.chunk)
        return attention_oracle.attention(
            query,
            keys,
            values,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=sinks,
            slopes=layer.alibi_slopes,
            biases=layer.position_bias,
            causal=causal,
            seen=seen,
        ).out

    # --- states

    def advance(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the outputs of a state layer, one row for each token."""
        if layer not in self.facts.state_layers:
            raise Failed(f"advance was called for the layer {layer.name!r}, which the facts do not have")
        self._state_calls.append(layer)
        if missing := [name for name in kind_of(layer).token_inputs if name not in inputs]:
            raise Failed(f"{layer.name}: advance got no {missing[0]!r}, which the kind {layer.state_kind} needs")
        token_wise = state_oracle.token_inputs(layer, inputs)
        for name in token_wise:
            if len(inputs[name]) < self.num_tokens:
                raise Failed(f"{layer.name}: {name} has {len(inputs[name])} rows, the step {self.num_tokens} tokens")
        if self.keeps:
            self.seen += [tensor.detach().clone() for tensor in inputs.values()]
        host = {name: tensor.detach().to("cpu") for name, tensor in inputs.items()}
        outputs, start = [], 0
        for rows in self._rows:
            own = {n: x[start : start + rows.count] if n in token_wise else x for n, x in host.items()}
            start += rows.count
            state = self._states.get((rows.request, layer.name)) or state_oracle.zero_state(layer)
            out, self._states[rows.request, layer.name] = state_oracle.advance(layer, own, state)
            outputs.append(out)
        first = inputs[token_wise[0]]
        return torch.cat(outputs).to(first.device, first.dtype)

    # --- what was handed over

    def _check(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Compare one call with the layer's facts.

        Raises:
            Failed: naming the layer and what differs.
        """
        if layer not in self.facts.layers:
            raise Failed(f"attend was called for {layer}, which is none of the facts' layers")
        self._calls.append(layer)
        tokens = len(self._wanted) if self._few(layer) and self._wanted is not None else self.num_tokens
        keys = sum(rows.states for rows in self._rows) if layer.attention_type == "cross" else self.num_tokens
        if self._left_behind(layer):
            keys = tokens
        shapes = {
            "query": (query, (tokens, layer.num_heads, layer.head_size)),
            "key": (key, (keys, layer.num_kv_heads, layer.head_size)),
            "value": (value, (keys, layer.num_kv_heads, layer.head_size_v)),
        }
        for name, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise Failed(f"layer {layer.index} ({layer.name}): {name} is {list(tensor.shape)}, not {list(shape)}")
            if self.dtype is not None and tensor.dtype != self.dtype:
                raise Failed(f"layer {layer.index} ({layer.name}): {name} is {tensor.dtype}, not {self.dtype}")
        if layer.sinks != (sinks is not None):
            given = "sinks" if sinks is not None else "no sinks"
            raise Failed(f"layer {layer.index} ({layer.name}): it came with {given}, its facts say {layer.sinks}")
        if sinks is not None and tuple(sinks.shape) != (layer.num_heads,):
            raise Failed(f"layer {layer.index} ({layer.name}): sinks are {list(sinks.shape)}, not [{layer.num_heads}]")
        if set(inputs) != {one.name for one in layer.inputs}:
            raise Failed(f"layer {layer.index} ({layer.name}): inputs are {sorted(inputs)}, not those of its facts")
        for one in layer.inputs:
            if tuple(inputs[one.name].shape) != (tokens, *one.shape):
                raise Failed(f"layer {layer.index}: {one.name} is {list(inputs[one.name].shape)}, not {one.shape} each")
        if self.keeps:
            given_tensors = (query, key, value, *inputs.values(), *(() if sinks is None else (sinks,)))
            self.seen += [tensor.detach().clone() for tensor in given_tensors]

    def _few(self, layer: AttentionLayer) -> bool:
        """Return True if a layer is called with the wanted tokens alone."""
        return self._left_behind(layer)

    def _left_behind(self, layer: AttentionLayer) -> bool:
        """Return True in fast prefill for the layers after the last one that owns a cache."""
        owners = [other.index for other in self.facts.layers if other.shares_kv_with is None]
        return self.fast and layer.index > max(owners, default=-1)

    def _left_out(self, layer: AttentionLayer) -> bool:
        return self._left_behind(layer) and self._wanted is not None and not len(self._wanted)


class StoringKeys(KeptKeys):
    """The same as a `StoringAttend`: models may store keys themselves, and attend for the wanted tokens alone.

    What a model stores is compared with what it hands over.
    """

    def __init__(self, facts: ModelFacts, dtype: torch.dtype | None = None) -> None:
        super().__init__(facts, dtype)
        self.stored = 0
        self.reduced = 0
        self._slots: dict[int, CacheSlots] = {}
        self._reduced_layer: int | None = None

    @property
    def attend(self) -> Any:
        """What a model gets as `attend`."""
        return self

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """See `slotline.registry.contracts.model_family.StoringAttend.slots`."""
        if layer.shares_kv_with is not None or layer.attention_type != "decoder" or layer.mla:
            return None
        count = self.num_tokens
        blocks = -(-count // BLOCK) + 2
        shapes = [(blocks, BLOCK, layer.num_kv_heads, size) for size in (layer.head_size, layer.head_size_v)]
        cache = KVCache(*(torch.full(shape, float("nan"), dtype=key.dtype, device=key.device) for shape in shapes))
        mapping = torch.arange(count, device=key.device).flip(0) + BLOCK  # in no order that one may guess
        self._slots[layer.index] = CacheSlots(cache, mapping)
        return self._slots[layer.index]

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """See `slotline.registry.contracts.model_family.StoringAttend.takes_wanted`."""
        return self._wanted is not None and layer.attention_type == "decoder"

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        written: bool = False,
        wanted: bool = False,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `slotline.registry.contracts.model_family.StoringAttend`."""
        if wanted and not self.takes_wanted(layer):
            raise Failed(f"layer {layer.index}: attend was called with wanted=True, but takes_wanted says no")
        self._reduced_layer = layer.index if wanted else None
        self.reduced += wanted
        self._check(layer, query, key, value, sinks, inputs or {})
        if written:
            self._expect_stored(layer, key, value)
        return self._computed(layer, query, key, value, sinks)

    def _expect_stored(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer.index not in self._slots:
            raise Failed(f"layer {layer.index}: attend was called with written=True, and slots was not asked")
        self.stored += 1
        cache, mapping = self._slots[layer.index]
        for name, pages, given in (("key", cache.key, key), ("value", cache.value, value)):
            kept = pages.flatten(0, 1)[mapping]
            if not torch.equal(kept, given):
                raise Failed(f"layer {layer.index}: the stored {name} of some token is not the one handed over")

    def _few(self, layer: AttentionLayer) -> bool:
        return layer.index == self._reduced_layer or super()._few(layer)


def _same_order(name: str, calls: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise `Failed` unless each layer was called once and in order."""
    found, wanted = [layer.name for layer in calls], [layer.name for layer in expected]
    if found == wanted:
        return
    missing = [one for one in wanted if one not in found]
    twice = sorted({one for one in found if found.count(one) > 1})
    if missing:
        raise Failed(f"{name} was not called for {', '.join(missing[:3])}")
    if twice:
        raise Failed(f"{name} was called more than once for {', '.join(twice[:3])}")
    raise Failed(f"{name} was called in the order {found[:4]}, the facts say {wanted[:4]}")
