"""Places of a step that rejection sampling decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata, uniforms
from slotline.proposers.speculation.draft_table import DraftTable

Int = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]
_ACCEPT = np.uint64(0x9E6C63D0876A9A4F)
"""Separates the numbers that accept drafts from those that draw tokens."""
_PLACE = np.dtype(
    [
        ("place", np.int64),  # among the logits rows
        ("draft", np.int64),
        ("entry", np.int64),  # of the request in the drafter's proposal
        ("position", np.int64),  # of the draft in it
        ("accept", np.float64),
        ("draw", np.float64),
    ]
)
PLACE_WIDTH = _PLACE.itemsize // 8
"""int64 words of a place that rejection sampling decides."""


@frozen(kw_only=True, eq=False)
class Rejections:
    """The places of a step that rejection sampling decides: drafts of sampled requests whose distribution is known.

    Attributes:
        packed: [m, 6] int64 on the device, see `_PLACE`. A single array is uploaded with the step's one copy.
    """

    packed: torch.Tensor

    @classmethod
    def gather(
        cls, table: DraftTable, batch: SamplingMetadata, draft_positions: Int, drafts: Int, upload: Upload
    ) -> Rejections | None:
        """Gather the places among the logits rows of `batch`. Return None for none.

        This is host work before the forward pass.

        Args:
            draft_positions, drafts: [n], as in `ModelInputs`.
        """
        guessed = (drafts >= 0) & (draft_positions < table.num_guesses[batch.rows])
        places = np.flatnonzero(guessed & (batch.temperature > 0) & (table.entry[batch.rows] >= 0))
        if len(places) == 0:
            return None
        seed, positions = batch.seed[places], batch.positions[places]
        return cls.of(
            places=places,
            drafts=drafts[places],
            entries=table.entry[batch.rows[places]],
            positions=draft_positions[places],
            accept=uniforms(seed ^ _ACCEPT, positions),
            draw=uniforms(seed, positions),
            upload=upload,
        )

    @classmethod
    def of(
        cls,
        *,
        places: Int,
        drafts: Int,
        entries: Int,
        positions: Int,
        accept: npt.NDArray[np.float64],
        draw: npt.NDArray[np.float64],
        upload: Upload,
    ) -> Rejections:
        """Pack the fields [m] of `_PLACE` into one array."""
        out = np.empty(len(places), _PLACE)
        out["place"], out["draft"], out["entry"], out["position"] = places, drafts, entries, positions
        out["accept"], out["draw"] = accept, draw
        return cls(packed=upload(out.view(np.int64).reshape(-1, PLACE_WIDTH)))


def drafted(rows: RequestTable, logits_rows: Int, draft_positions: Int) -> Int:
    """Return the draft at the place of each logits row, [n], -1 after the last draft of a request."""
    last = np.append(draft_positions[1:] == 0, True)
    places = np.minimum(rows.num_tokens[logits_rows] + draft_positions, rows.max_model_len - 1)
    return np.where(last, -1, rows.token_ids[logits_rows, places])
