"""A drafter for tests: proposes noise and keeps every hidden state that it is shown, by row and position."""

from __future__ import annotations

import torch

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import ComputedTokens, Draft, DraftBatch, DrafterCapabilities, DrafterContext
from slotline.registry.descriptor import Descriptor, Kind

LAYERS = (2, 0, 1)


class Watcher:
    """Reads all there is: the last hidden states and those of three layers, of all tokens and of the drafted rows."""

    descriptor = Descriptor(
        kind=Kind.DRAFTER,
        name="watcher",
        capabilities=DrafterCapabilities(
            devices=Set(None), max_tokens=Max(), needs_hidden_states=True, needs_layers=True, needs_computed=True
        ),
        factory=None,
    )
    layer_ids: tuple[int, ...] = LAYERS

    def __init__(self, context: DrafterContext) -> None:
        self.vocab_size = context.vocab_size
        self.requests: list[tuple[list[int], dict[int, tuple[int, int, torch.Tensor]]]] = []
        self.by_row: dict[int, dict[int, tuple[int, int, torch.Tensor]]] = {}  # by position: token, next token, states

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """A new request: what its row shows from now on is its."""
        self.by_row[row] = {}
        self.requests.append((prompt_token_ids, self.by_row[row]))

    def release(self, row: int) -> None:
        """The last step of a finished request is yet to be observed."""

    def observe(self, computed: ComputedTokens) -> None:
        """Keep the states of every position; what comes again replaces what was."""
        assert computed.hidden_states is not None
        assert computed.layer_hidden_states is not None
        self.states = states = torch.cat([computed.hidden_states, computed.layer_hidden_states], -1)
        starts = computed.query_start_loc.tolist()
        for row, start, end in zip(computed.rows.tolist(), starts[:-1], starts[1:], strict=True):
            for i in range(start, end):
                token, after = int(computed.token_ids[i]), int(computed.next_token_ids[i])
                self.by_row[row][int(computed.positions[i])] = (token, after, states[i].clone())

    def propose(self, batch: DraftBatch) -> Draft:
        """Noise that is right now and then, for tiny vocabularies; the batch's states must be the step's."""
        assert batch.computed_index is not None
        own = torch.cat([batch.hidden_states, batch.layer_hidden_states], -1)  # type: ignore[list-item]
        assert torch.equal(own, self.states[batch.computed_index])
        for row, position, state in zip(batch.rows.tolist(), batch.positions.tolist(), own, strict=True):
            assert torch.equal(self.by_row[row][position - 1][2], state)
        return Draft(token_ids=(batch.last_token_ids[:, None] + torch.arange(3)) % self.vocab_size)


class TooDeep(Watcher):
    """Asks for a layer that no tiny model has."""

    layer_ids = (0, 99)
