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
        self._states: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
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
            outputs.append(_attention(layer, query[rows], *self._keys[request, owner], sinks))
        return torch.cat(outputs).to(query.dtype)

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
    layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    seen = None
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
