"""The masks of one step, on their way from a structured-output plugin to the logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.core.batch.model_inputs import ModelInputs
from slotline.plugins.structured_output.bitmask import TokenBitmask, num_words
from slotline.plugins.structured_output.mask_cache import CachedState, KeptMask
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import GrammarState, StructuredOutput
from slotline.registry.contracts.device import Device

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")
_FIRST_WORDS = 64
"""Of a mask, among which mostly is a token that is allowed."""


@define(kw_only=True, eq=False)
class GrammarBitmasks:
    """Request for the plugin's masks of one step, and the place of its answer. Kept masks are not asked for.

    Attributes:
        bitmask: of the logits rows with a grammar. `masked` [num_logits] marks these rows, and `logits_rows`
            [num_logits] are the permanent rows of all logits.
        rows: [m] permanent rows whose masks are asked for, with their `states` and `drafts`.
        firsts: [m] the first mask of each of these rows. `counts` [m] more masks follow it, one for each draft.
        filling: the plugin's work in another thread, if it was given to one.
        failed: the reasons for rows without a mask. None until the masks are finished.
    """

    bitmask: TokenBitmask
    masked: npt.NDArray[np.bool_]
    logits_rows: Int
    rows: Sequence[int]
    states: Sequence[GrammarState]
    drafts: Sequence[Sequence[int]]
    firsts: Sequence[int]
    counts: Sequence[int]
    filling: Future[None] | None = None
    failed: dict[int, str] | None = None

    @classmethod
    def of(
        cls,
        inputs: ModelInputs,
        masked: npt.NDArray[np.bool_],
        state_of: Callable[[int], GrammarState],
        drafts_of: Callable[[int], list[int]],
        vocab_size: int,
        device: Device,
        banned: npt.NDArray[np.bool_],
    ) -> GrammarBitmasks:
        """Return masks that are yet to be written, of the `masked` [num_logits] logits of a step, at least one.

        Args:
            masked: of a row, all logits or those behind some of its drafts.
            state_of: returns the state of a row, of the text before its first masked logits. `drafts_of` returns its
                drafts.
            device: where the logits are.
            banned: [max_requests] rows in whose masks more tokens will be banned.
        """
        rows, draft_positions = inputs.sampling.rows, inputs.spec_positions
        places = np.flatnonzero(masked)
        firsts, counts = np.arange(len(places)), np.zeros(len(places), np.int64)
        if draft_positions is not None:
            firsts = np.flatnonzero((draft_positions[places] == 0) | (np.diff(rows[places], prepend=-1) != 0))
            counts = np.diff(firsts, append=len(places)) - 1
        own = rows[places[firsts]].tolist()
        drafts: list[list[int]] = [[]] * len(own)
        if counts.any():
            assert draft_positions is not None  # there are drafts
            before = draft_positions[places[firsts]].tolist()
            ranges = zip(own, before, counts.tolist(), strict=True)
            drafts = [drafts_of(row)[i : i + n] if n else [] for row, i, n in ranges]
        states = [state_of(row) for row in own]
        shared = SharedMasks.of(states, drafts, counts.tolist(), banned[own].tolist())
        bitmask = TokenBitmask(len(places), vocab_size, device, num_masks=shared.count if shared.kept else None)
        bitmask.places[:] = places
        bitmask.mask_of[:] = shared.mask_of
        bitmask.allow_all(shared.num_asked)
        for number, mask in enumerate(shared.kept, shared.num_asked):
            bitmask.words[number] = -1 if mask is None else mask.words
        asked = shared.asked
        return cls(
            bitmask=bitmask,
            masked=masked,
            logits_rows=rows,
            rows=[own[i] for i in asked],
            states=[states[i] for i in asked],
            drafts=[drafts[i] for i in asked],
            firsts=shared.firsts,
            counts=counts[asked].tolist(),
        )

    @property
    def num_asked(self) -> int:
        """Masks that the plugin writes."""
        return len(self.firsts) + sum(self.counts)

    def leave_tokens(self) -> bool:
        """Return True if each mask allows a token."""
        words = self.bitmask.words
        left = words[:, :_FIRST_WORDS].any(axis=1)
        return bool(left.all() or words[~left].any(axis=1).all())

    def apply(self, logits: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return the logits with minus infinity for every banned token, see `TokenBitmask.apply`."""
        return self.bitmask.apply(logits, in_place=in_place)

    def fill(self, backend: StructuredOutput) -> None:
        """Write the masks that are asked for. Raises any exception of the plugin."""
        if self.states:
            write_masks(backend, self.states, self.drafts, self.firsts, self.bitmask.words[: self.num_asked])

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
        places = zip(self.rows, self.firsts, self.counts, strict=True)
        for i, (row, first, count) in enumerate(places):
            own = self.bitmask.words[first : first + 1 + count]
            own[:] = -1
            try:
                write_masks(backend, self.states[i : i + 1], self.drafts[i : i + 1], [0], own)
            except Exception as error:  # a plugin's code may raise anything
                errors[row] = plugins.described(error)
        return errors


@define(eq=False)
class SharedMasks:
    """Number of the mask of each logits row of a step. Masks that are asked for come first, then the kept ones.

    Attributes:
        kept: the distinct ones of the kept masks. None allows every token, as behind an illegal draft.
        asked: [m] places of the requests whose masks are asked for, and the number of their first ones, `firsts` [m].
        mask_of: for each logits row.
    """

    kept: list[KeptMask | None]
    asked: list[int]
    firsts: list[int]
    num_asked: int
    mask_of: list[int]

    @classmethod
    def of(
        cls,
        states: Sequence[GrammarState],
        drafts: Sequence[Sequence[int]],
        counts: Sequence[int],
        banned: Sequence[bool],
    ) -> SharedMasks:
        """Return the masks of requests, each with its first logits row and those of `counts` drafts.

        Args:
            banned: requests in whose masks more tokens will be banned. They share masks with each other only.
        """
        numbers: tuple[dict[int, int], dict[int, int]] = {}, {}  # of kept masks by identity, from -1 downwards
        kept: list[KeptMask | None] = []
        asked: list[int] = []
        firsts: list[int] = []
        mask_of: list[int] = []
        num_asked = 0
        for place, (state, assumed, count, more) in enumerate(zip(states, drafts, counts, banned, strict=True)):
            masks: Sequence[KeptMask | None] | None = None
            if isinstance(state, CachedState):
                masks = state.kept_masks(assumed) if count else (mask,) if (mask := state.kept_mask()) else None
            if masks is None:
                asked.append(place)
                firsts.append(num_asked)
                mask_of += range(num_asked, num_asked + 1 + count)
                num_asked += 1 + count
                continue
            if len(masks) <= count:
                masks = [*masks, *[None] * (1 + count - len(masks))]
            for mask in masks:
                number = numbers[more].setdefault(id(mask), next_number := -1 - len(kept))
                if number == next_number:
                    kept.append(mask)
                mask_of.append(number)
        mask_of = [number if number >= 0 else num_asked - 1 - number for number in mask_of]
        return cls(kept, asked, firsts, num_asked, mask_of)

    @property
    def count(self) -> int:
        """All masks."""
        return self.num_asked + len(self.kept)


@define(eq=False)
class KnownMasks:
    """Kept masks of a step without drafts, as far as they are known, and what the plugin is asked for the others.

    Attributes:
        states, masks: [m], for each row.
        asked: a state of each place whose mask is not known.
    """

    states: list[CachedState]
    masks: list[KeptMask | None]
    asked: dict[tuple[int, int], CachedState]

    @classmethod
    def of(cls, rows: Int, states: Mapping[int, GrammarState]) -> KnownMasks | None:
        """Return the masks of permanent rows. None if no mask is kept for one of them."""
        known = cls([], [], {})
        for row in rows.tolist():
            state = states.get(row)
            if not isinstance(state, CachedState):
                return None
            mask = state.kept_mask()
            if mask is None:
                if (place := state.place) is None:
                    return None
                known.asked.setdefault(place, state)
            known.states.append(state)
            known.masks.append(mask)
        return known

    def ask(self, backend: StructuredOutput, vocab_size: int) -> bool:
        """Ask the plugin for what is not known, once for all rows at one place. Return False if it fails."""
        if count := len(self.asked):
            words = np.full((count, num_words(vocab_size)), -1, np.int32)
            try:
                write_masks(backend, list(self.asked.values()), [[]] * count, range(count), words)
            except Exception:  # a plugin's code may raise anything; each row is asked for by itself then
                return False
            self.masks = [mask or state.kept_mask() for mask, state in zip(self.masks, self.states, strict=True)]
        return None not in self.masks

    def found(self, endless: Sequence[bool], eos_token_ids: Sequence[int]) -> list[KeptMask]:
        """Return all masks, those of `endless` rows without ends."""
        both = zip(self.masks, endless, strict=True)
        return [mask.endless(eos_token_ids) if without else mask for mask, without in both if mask is not None]


def write_masks(
    backend: StructuredOutput,
    states: Sequence[GrammarState],
    drafts: Sequence[Sequence[int]],
    firsts: Sequence[int],
    words: npt.NDArray[np.int32],
) -> None:
    """Have the plugin write masks, see `StructuredOutput.fill`, and keep them. Raises any exception of the plugin."""
    own = [state.current() if isinstance(state, CachedState) else state for state in states]
    backend.fill(own, drafts, firsts, words)
    for state, assumed, first in zip(states, drafts, firsts, strict=True):
        if isinstance(state, CachedState):
            state.keep(assumed, words[first : first + 1 + len(assumed)])
