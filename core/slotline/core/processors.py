"""The logits-processor pipeline: built plugins in order, each shown only the rows that it has work for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.request import Request
from slotline.core.rows import Rows
from slotline.registry.contracts import LogitsBatch, LogitsProcessor, LogitsProcessorCapabilities
from slotline.registry.errors import RequestError

Int = npt.NDArray[np.int64]


@define(kw_only=True, eq=False)
class ProcessorSlot:
    """A built processor and the rows that it has work for, [max_requests] bool."""

    name: str
    processor: LogitsProcessor
    capabilities: LogitsProcessorCapabilities
    active: npt.NDArray[np.bool_] = field()


class ProcessorPipeline:
    """Applies the processors to logits and keeps their state in step with the rows."""

    def __init__(self, slots: Sequence[ProcessorSlot], rows: Rows, known_parameters: frozenset[str]) -> None:
        self.slots = tuple(sorted(slots, key=lambda s: (s.capabilities.order, s.name)))
        self._rows = rows
        self._known = known_parameters
        self._handled = frozenset(p for s in slots for p in s.capabilities.parameters)

    def validate(self, request: Request) -> None:
        """Let every processor check the request, and refuse parameters that nobody here handles.

        Raises:
            RequestError: naming the parameter, its value and what is allowed.
        """
        params = request.params.as_mapping()
        for name in request.params.extra_args or ():
            if name not in self._handled:
                raise RequestError(
                    f"extra_args names {name!r}, which no logits processor of this run takes",
                    fix=f"name it under [logits_processors]; this run takes: {', '.join(sorted(self._handled))}",
                )
        defaults = type(request.params)().as_mapping()
        for name in self._known - self._handled:
            if params.get(name) != defaults.get(name):
                raise RequestError(
                    f"{name}={params[name]!r} needs a logits processor that this run does not have",
                    fix="name one that takes it under [logits_processors], see `slotline plugins`",
                )
        for slot in self.slots:
            slot.processor.validate(params)

    def admit(self, request: Request) -> None:
        """A request took its row."""
        params = request.params.as_mapping() if self.slots else {}
        for slot in self.slots:
            slot.active[request.row] = slot.processor.admit(request.row, params, request.prompt_token_ids)

    def release(self, row: int) -> None:
        """The request of `row` leaves."""
        for slot in self.slots:
            if slot.active[row]:
                slot.active[row] = False
                slot.processor.release(row)

    def apply(
        self, logits: torch.Tensor, rows: Int, draft_positions: Int | None = None, *, all_greedy: bool
    ) -> torch.Tensor:
        """Logits [n, vocab_size] float32 of permanent rows [n], processed; the input is not changed.

        `draft_positions` [n] says how many of its row's drafts each assumes; None for none.
        """
        changed = False
        for slot in self.slots:
            wanted = slot.active[rows]
            if not wanted.any() or (all_greedy and slot.capabilities.argmax_invariant):
                continue
            if not changed:
                logits, changed = logits.clone(), True
            if wanted.all():
                logits = slot.processor.apply(logits, self._batch(rows, draft_positions))
            else:
                index = torch.from_numpy(np.flatnonzero(wanted)).to(logits.device)
                assumed = None if draft_positions is None else draft_positions[wanted]
                logits[index] = slot.processor.apply(logits[index], self._batch(rows[wanted], assumed))
        return logits

    def _batch(self, rows: Int, draft_positions: Int | None) -> LogitsBatch:
        drafts = None
        if draft_positions is not None:
            index = np.arange(int(draft_positions.max(initial=0)))
            places = np.minimum(self._rows.num_tokens[rows][:, None] + index, self._rows.max_model_len - 1)
            drafts = np.where(index < draft_positions[:, None], self._rows.token_ids[rows[:, None], places], -1)
        return LogitsBatch(
            rows=rows,
            draft_positions=np.zeros(len(rows), np.int64) if draft_positions is None else draft_positions,
            token_table=self._rows.token_ids,
            num_tokens=self._rows.num_tokens[rows],
            num_prompt_tokens=self._rows.num_prompt_tokens[rows],
            draft_token_ids=drafts,
        )
