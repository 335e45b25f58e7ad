"""Data that the parts of a step hand to each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen

from slotline.core.api.outputs import TokenLogprobs
from slotline.core.batch.attend import Attend
from slotline.core.batch.draft_tree import DraftTree
from slotline.core.batch.hidden_states import ComputedStates, HiddenStates
from slotline.core.batch.logprobs import PendingLogprobs
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.device.transfer_buffer import Download

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class ForwardOutput:
    """Forward pass that the device may still be running.

    Attributes:
        inputs: of the forward pass.
        attend: as planned for it.
        hidden: [num_padded_tokens, hidden_size], or only of the wanted tokens.
        logits: of the same tokens, if a graph computes them.
        layers: [num_padded_tokens, layers * hidden_size], the inputs of the layers that a drafter reads, if any.
        whole: whether hidden states of all tokens are wanted, for instance to score a prompt's tokens.
    """

    inputs: ModelInputs
    attend: Attend
    hidden: torch.Tensor
    logits: torch.Tensor | None
    layers: torch.Tensor | None
    whole: bool


@frozen(kw_only=True, eq=False)
class PendingSample:
    """Tokens that the device may still be sampling. The host has not read or waited for any of them.

    Attributes:
        batch: of the logits rows, with their `draft_positions` [n], None without drafts.
        drafts: [n] int64, the draft at each place, -1 after a request's last draft. None without drafts.
        tree, draft_nodes: as in `ModelInputs`. With a tree `drafts` are those of the nodes.
        tokens: [n] int64 on their way to the host. `sampled` are the same on the device, with the negative marks of
            `Processed.mark`.
        guesses: [n] int64, the number of drafts of each row that its drafter proposed.
        states: of the logits rows, if a drafter reads any. `computed` are those of all tokens, if it reads them.
        num_nans: [n] int64 on their way to the host, if they are counted.
        logprobs: on their way to the host, if requested.
        prompt_logprobs: as in `StepOutput`.
        errors: by place, the reason for logits that could not be processed.
    """

    batch: SamplingMetadata
    draft_positions: Int | None
    drafts: Int | None
    tokens: Download
    sampled: torch.Tensor
    guesses: Int
    tree: DraftTree | None = None
    draft_nodes: Int | None = None
    states: HiddenStates | None = None
    computed: ComputedStates | None = None
    num_nans: Download | None = None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(factory=dict)
    errors: dict[int, str] = field(factory=dict)

    def without_states(self) -> PendingSample:
        """Return the same without what a drafter has read of the model."""
        return self if self.states is None and self.computed is None else evolve(self, states=None, computed=None)


@frozen(kw_only=True, eq=False)
class StepOutput:
    """Results of a step.

    Attributes:
        rows: [n] int64, permanent rows that got a token, once for each token, a row's tokens in order.
        token_ids: [n] int32.
        draft_positions: [n] int64, the number of each token among its row's tokens in this step. None without drafts.
        num_kept: [n] int64, drafts up to each token whose keys and values count as computed: all of a chain.
        hidden_states: of each distinct row's last accepted position, if a drafter reads any. `computed` are those of
            all tokens, if it reads them.
        logprobs: by row, an entry for each token, if requested.
        prompt_logprobs: by row, entries for the prompt positions that this step covered, with the first position.
        num_nans: by row, only rows with NaN logits.
        answers: by row, the answers [size] float32 of requests that get no token.
        failed: by row, the reason why it gets no further token. Its request ends with an error.
        spoiled: the failed rows whose logits were NaN. Their stored blocks are of no use to others.
    """

    rows: Int = field(factory=lambda: np.zeros(0, np.int64))
    token_ids: npt.NDArray[np.int32] = field(factory=lambda: np.zeros(0, np.int32))
    draft_positions: Int | None = None
    num_kept: Int | None = None
    hidden_states: HiddenStates | None = None
    computed: ComputedStates | None = None
    logprobs: dict[int, list[TokenLogprobs]] = field(factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(factory=dict)
    num_nans: dict[int, int] = field(factory=dict)
    answers: dict[int, npt.NDArray[np.float32]] = field(factory=dict)
    failed: dict[int, str] = field(factory=dict)
    spoiled: frozenset[int] = frozenset()

    def without(self, rows: Int) -> StepOutput:
        """Return the same results without those of some rows."""
        if len(rows) == 0:
            return self
        kept = ~np.isin(self.rows, rows)
        gone = set(rows.tolist())
        return evolve(
            self,
            rows=self.rows[kept],
            token_ids=self.token_ids[kept],
            draft_positions=None if self.draft_positions is None else self.draft_positions[kept],
            num_kept=None if self.num_kept is None else self.num_kept[kept],
            logprobs={row: entries for row, entries in self.logprobs.items() if row not in gone},
            prompt_logprobs={row: entries for row, entries in self.prompt_logprobs.items() if row not in gone},
            num_nans={row: count for row, count in self.num_nans.items() if row not in gone},
            answers={row: vector for row, vector in self.answers.items() if row not in gone},
            failed={row: cause for row, cause in self.failed.items() if row not in gone},
            spoiled=self.spoiled - gone,
        )

    def rounds(self) -> Iterator[tuple[Int, npt.NDArray[np.int32]]]:
        """Yield distinct rows with a token of each: the first tokens of all, then the second ones, and so on."""
        if self.draft_positions is None:
            yield self.rows, self.token_ids
            return
        for position in range(int(self.draft_positions.max(initial=0)) + 1):
            own = self.draft_positions == position
            yield self.rows[own], self.token_ids[own]
