"""Data that the parts of a step hand to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen

from slotline.core.api.outputs import TokenLogprobs
from slotline.core.batch.attend import Attend
from slotline.core.batch.logprobs import PendingLogprobs, PendingPrompts
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
        extras: [num_padded_tokens, ...] each, what `take_results` of extensions returned, by the extension's name.
        whole: whether hidden states of all tokens are wanted, for instance to score a prompt's tokens.
    """

    inputs: ModelInputs
    attend: Attend
    hidden: torch.Tensor
    logits: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]
    whole: bool


@frozen(kw_only=True, eq=False)
class PendingSample:
    """Tokens that the device may still be sampling. The host has not read or waited for any of them.

    Attributes:
        batch: of the logits rows.
        spec_positions: [n] int64, as in `ModelInputs`.
        tokens: [n] int64 on their way to the host. `sampled` are the same on the device, with the negative marks of
            `Processed.mark`.
        extras: what `keep_states` of extensions returned, by the extension's name.
        num_nans: [n] int64 on their way to the host, if they are counted.
        logprobs: on their way to the host, if requested.
        prompt_logprobs: of prompts that end in the step, on their way to the host, if requested.
        errors: by place, the reason for logits that could not be processed.
    """

    batch: SamplingMetadata
    spec_positions: Int | None
    tokens: Download
    sampled: torch.Tensor
    extras: Mapping[str, Any] = field(factory=dict)
    num_nans: Download | None = None
    logprobs: PendingLogprobs | None = None
    prompt_logprobs: PendingPrompts | None = None
    errors: dict[int, str] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class StepOutput:
    """Results of a step.

    Attributes:
        rows: [n] int64, permanent rows that got a token, once for each token, a row's tokens in order.
        token_ids: [n] int32.
        places: [n] int64, the logits row of each token. None if they are all, in order.
        spec_positions: [n] int64, the number of each token among its row's tokens in this step. None if no step could
            give a row several.
        num_kept: [n] int64, verified tokens up to each token whose keys and values count as computed. None for all.
        extras: as in `PendingSample`.
        logprobs: by row, an entry for each token, if requested.
        prompt_logprobs: by row, entries for the positions of a prompt that ended in this step, with the first one.
        num_nans: by row, only rows with NaN logits.
        answers: by row, the answers [size] or [num_tokens, size] float32 of requests that get no token.
        failed: by row, the reason why it gets no further token. Its request ends with an error.
        spoiled: the failed rows whose logits were NaN. Their stored blocks are of no use to others.
    """

    rows: Int = field(factory=lambda: np.zeros(0, np.int64))
    token_ids: npt.NDArray[np.int32] = field(factory=lambda: np.zeros(0, np.int32))
    places: Int | None = None
    spec_positions: Int | None = None
    num_kept: Int | None = None
    extras: Mapping[str, Any] = field(factory=dict)
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
            places=None if self.places is None else self.places[kept],
            spec_positions=None if self.spec_positions is None else self.spec_positions[kept],
            num_kept=None if self.num_kept is None else self.num_kept[kept],
            logprobs={row: entries for row, entries in self.logprobs.items() if row not in gone},
            prompt_logprobs={row: entries for row, entries in self.prompt_logprobs.items() if row not in gone},
            num_nans={row: count for row, count in self.num_nans.items() if row not in gone},
            answers={row: vector for row, vector in self.answers.items() if row not in gone},
            failed={row: cause for row, cause in self.failed.items() if row not in gone},
            spoiled=self.spoiled - gone,
        )

    def rounds(self, positions: Int) -> Iterator[tuple[Int, npt.NDArray[np.int32]]]:
        """Yield distinct rows with a token of each: the first tokens of all, then the second ones, and so on.

        Args:
            positions: [n] int64, the number of each token among its row's tokens, as in `spec_positions`.
        """
        for position in range(int(positions.max(initial=0)) + 1):
            own = positions == position
            yield self.rows[own], self.token_ids[own]
