"""The masks of one step, on their way from a structured-output plugin to the logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from attrs import define

from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.structured_output.bitmask import TokenBitmask
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import GrammarState, StructuredOutput
from slotline.registry.contracts.device import Device

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


@define(kw_only=True, eq=False)
class GrammarBitmasks:
    """Request for the plugin's masks of one step, and the place of its answer.

    Attributes:
        bitmask: of the logits rows with a grammar. `masked` [num_logits] marks these rows, and `logits_rows`
            [num_logits] are the permanent rows of all logits.
        rows: [m] permanent rows, with their `states` and `drafts`.
        firsts: [m] the first place of each row in `bitmask`. `counts` [m] more places follow it, one for each draft.
        filling: the plugin's work in another thread, if it was given to one.
    """

    bitmask: TokenBitmask
    masked: npt.NDArray[np.bool_]
    logits_rows: Int
    rows: Int
    states: Sequence[GrammarState]
    drafts: Sequence[Sequence[int]]
    firsts: Int
    counts: Int
    filling: Future[None] | None = None

    @classmethod
    def of(
        cls,
        inputs: ModelInputs,
        masked: npt.NDArray[np.bool_],
        state_of: Callable[[int], GrammarState],
        drafts_of: Callable[[int], list[int]],
        vocab_size: int,
        device: Device,
    ) -> GrammarBitmasks:
        """Return masks that are yet to be written, of the `masked` [num_logits] logits of a step, at least one.

        Args:
            masked: of a row, all logits or those behind some of its drafts.
            state_of: returns the state of a row, of the text before its first masked logits. `drafts_of` returns its
                drafts.
            device: where the logits are.
        """
        rows, draft_positions = inputs.sampling.rows, inputs.spec_positions
        places = np.flatnonzero(masked)
        bitmask = TokenBitmask(len(places), vocab_size, device)
        bitmask.places[:] = places
        firsts, counts = np.arange(len(places)), np.zeros(len(places), np.int64)
        if draft_positions is not None:
            firsts = np.flatnonzero((draft_positions[places] == 0) | (np.diff(rows[places], prepend=-1) != 0))
            counts = np.diff(firsts, append=len(places)) - 1
        own = rows[places[firsts]]
        drafts: list[list[int]] = [[]] * len(own)
        if counts.any():
            assert draft_positions is not None  # there are drafts
            before = draft_positions[places[firsts]].tolist()
            ranges = zip(own.tolist(), before, counts.tolist(), strict=True)
            drafts = [drafts_of(row)[i : i + n] if n else [] for row, i, n in ranges]
        return cls(
            bitmask=bitmask,
            masked=masked,
            logits_rows=rows,
            rows=own,
            states=[state_of(row) for row in own.tolist()],
            drafts=drafts,
            firsts=firsts,
            counts=counts,
        )

    def fill(self, backend: StructuredOutput) -> None:
        """Write all masks. Raises any exception of the plugin."""
        backend.fill(self.states, self.drafts, self.firsts.tolist(), self.bitmask.words)

    def wait(self, backend: StructuredOutput, name: str, plugins: BuiltPlugins) -> dict[int, str]:
        """Write the masks, or wait for the thread that writes them. If that fails, write each row's mask by itself.

        Errors are traced to one of the `plugins`.

        Returns:
            The reasons for rows that fail again.
        """
        try:
            if self.filling is None:
                self.fill(backend)
            else:
                self.filling.result()
            return {}
        except Exception:  # a plugin's code may raise anything
            logger.exception("structured-output plugin %r failed; filling each request's masks alone", name)
        errors = {}
        places = zip(self.rows.tolist(), self.firsts.tolist(), self.counts.tolist(), strict=True)
        for i, (row, first, count) in enumerate(places):
            own = self.bitmask.words[first : first + 1 + count]
            own[:] = -1
            try:
                backend.fill(self.states[i : i + 1], self.drafts[i : i + 1], [0], own)
            except Exception as error:  # a plugin's code may raise anything
                errors[row] = plugins.described(error)
        return errors
