"""A cache for a few requests in float64, by the definition of each layer, for the self-check at load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.state import StateLayer
from slotline.testing.oracles import attention as attention_oracle
from slotline.testing.oracles import state as state_oracle


class TrialCache:
    """Keys, values and states of requests, with `attend` and `advance` for a forward of their flattened tokens.

    Attributes:
        counts: new tokens of each request in the forward, in the order of the batch.
    """

    def __init__(self) -> None:
        self.counts: Sequence[tuple[int, int]] = ()
        self._keys: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._index_keys: dict[tuple[int, int], torch.Tensor] = {}
        self._picks: dict[tuple[int, int], torch.Tensor] = {}
        self._states: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return attention [num_tokens, num_heads, head_size_v] over everything that each request has seen."""
        outputs, start = [], 0
        for request, count in self.counts:
            rows = slice(start, start + count)
            start += count
            owner = layer.index if layer.shares_kv_with is None else layer.shares_kv_with
            if owner == layer.index:
                before = self._keys.get((request, owner))
                pair = key[rows].double(), value[rows].double()
                if before is not None:
                    pair = torch.cat((before[0], pair[0])), torch.cat((before[1], pair[1]))
                self._keys[request, owner] = pair
            if inputs is not None and layer.index_topk is not None:
                own = {name: states[rows] for name, states in inputs.items()}
                self._picks[request, layer.index] = self._pick(request, layer.index, layer.index_topk, own)
            picks = self._picks.get((request, layer.index if layer.index_from is None else layer.index_from))
            outputs.append(_attention(layer, query[rows], *self._keys[request, owner], sinks, picks))
        return torch.cat(outputs).to(query.dtype)

    def _pick(self, request: int, index: int, most: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return which keys of a request its new tokens attend to in a layer, [q, L] bool."""
        before, new = self._index_keys.get((request, index)), inputs["index_key"].double()
        keys = self._index_keys[request, index] = new if before is None else torch.cat((before, new))
        seen = attention_oracle.visible(len(new), len(keys))
        return attention_oracle.picked(inputs["index_query"], keys, inputs["index_weight"], seen, most)

    def advance(self, layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the outputs of a state layer, one row for each token."""
        token_wise = state_oracle.token_inputs(layer, inputs)
        outputs, start = [], 0
        for request, count in self.counts:
            own = {n: x[start : start + count] if n in token_wise else x for n, x in inputs.items()}
            start += count
            state = self._states.get((request, layer.name)) or state_oracle.zero_state(layer)
            out, self._states[request, layer.name] = state_oracle.advance(layer, own, state)
            outputs.append(out)
        return torch.cat(outputs).to(inputs[token_wise[0]].dtype)


def _attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    if layer.chunk is not None:
        place = torch.arange(len(keys))
        own = place[len(keys) - len(query) :, None]
        seen = (place[None, :] <= own) & (place[None, :] // layer.chunk == own // layer.chunk)
    answer = attention_oracle.attention(
        query,
        keys,
        values,
        scale=layer.scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=sinks,
        slopes=layer.alibi_slopes,
        seen=seen,
    )
    return answer.out
