"""The logits-processor pipeline: built plugins in order, each shown only the rows that it has work for.

What a processor does wrong ends the requests that it does it to, and no other. The step pays for that only when
something changed the logits: their largest number is checked, and the result is sent with the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.sampling.nan_logits import NAN_LOGITS
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import DeviceOps, LogitsBatch, LogitsProcessor, LogitsProcessorCapabilities
from slotline.registry.contracts.logits_processor import BatchFields
from slotline.registry.processor_checks import check_floor, checking, misfit, refuse_unhandled, unusable

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")

FAILED, NOT_FINITE, NONE_LEFT = -1, -2, -3
"""Marks in place of a token: the logits could not be processed, hold NaN or infinity, or are all banned.

`NAN_LOGITS` is the fourth mark: the model itself gave NaN.
"""


@define(kw_only=True, eq=False)
class ProcessorSlot:
    """A built processor and the rows that it has work for, [max_requests] bool, and how many those are.

    `source` is the package of the plugin.
    """

    name: str
    source: str = ""
    processor: LogitsProcessor
    capabilities: LogitsProcessorCapabilities
    active: npt.NDArray[np.bool_]
    num_active: int = 0

    def set_active(self, row: int, active: bool) -> None:
        """Set whether there is work for a row from now on."""
        self.num_active += int(active) - int(self.active[row])
        self.active[row] = active

    def has_work(self, rows: Int, *, all_greedy: bool) -> bool:
        """Return whether there is work for some of `rows` [n]."""
        skipped = all_greedy and self.capabilities.argmax_invariant
        return not skipped and bool(self.active[rows].any())

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Apply the processor to logits.

        Raises:
            ContractError: if the result has another shape, dtype or device.
        """
        want = (logits.shape, logits.dtype, logits.device)
        found = self.processor.apply(logits, batch)
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype, found.device) != want:
            raise misfit(self.name, self.source, found, logits)
        return found


@frozen(kw_only=True, eq=False)
class Processed:
    """Logits after the processors.

    Attributes:
        logits: [n, vocab_size] float32. `raw` are the logits before any processor.
        touched: [n] bool, the rows of the logits that may hold new infinities or NaN. None means no row.
        errors: by place in the batch, the reason for logits that could not be processed.
    """

    logits: torch.Tensor
    raw: torch.Tensor
    touched: npt.NDArray[np.bool_] | None = None
    errors: dict[int, str] = field(factory=dict)

    def mark(self, tokens: torch.Tensor, ops: DeviceOps, *, all_greedy: bool = False) -> torch.Tensor:
        """Return the tokens [n] sampled from the logits, with a negative mark where none can be sampled.

        Nothing is waited for. With `all_greedy` each token is the place of its row's largest logit, or of NaN, so that
        no search is needed.
        """
        if self.touched is None:
            return tokens
        touched = None if self.touched.all() else torch.from_numpy(self.touched).to(tokens.device, non_blocking=True)
        marks = {"not_finite": NOT_FINITE, "none_left": NONE_LEFT}
        marked = ops.mark_unusable(self.logits, self.raw, touched, tokens, all_greedy=all_greedy, **marks)
        if self.errors:
            marked[torch.tensor(list(self.errors), device=tokens.device)] = FAILED
        return marked


@frozen(eq=False)
class LogitsRows:
    """The rows of a step's logits: see `ProcessorPipeline.apply`."""

    raw: torch.Tensor
    rows: Int
    spec_positions: Int | None
    spec_paths: Int | None


class ProcessorPipeline:
    """Applies the processors to logits and keeps their state in step with the rows.

    Args:
        slots: the built processors, in any order.
        rows: the request table.
        known_parameters: sampling parameters that only a processor can honour.
        plugins: used to trace errors to plugins.
        handled_elsewhere: names in `extra_args` that extensions take.
        fields: of batches, by the name of the processor.
    """

    def __init__(
        self,
        slots: Sequence[ProcessorSlot],
        rows: RequestTable,
        known_parameters: frozenset[str],
        plugins: BuiltPlugins | None = None,
        *,
        handled_elsewhere: frozenset[str] = frozenset(),
        fields: Mapping[str, BatchFields] = MappingProxyType({}),
    ) -> None:
        self._plugins = BuiltPlugins() if plugins is None else plugins
        self._fields = fields
        ordered = sorted(slots, key=lambda s: (s.capabilities.order, s.name))
        self.slots = tuple(slot for slot in ordered if not slot.capabilities.floors)
        self._floors = tuple(slot for slot in ordered if slot.capabilities.floors)
        self._rows = rows
        self._known = known_parameters
        self._handled = handled_elsewhere.union(*(slot.capabilities.parameters for slot in slots))

    def validate(self, request: Request) -> None:
        """Let every processor check the request, and refuse parameters that no processor handles.

        Raises:
            RequestError: naming the parameter, its value and the allowed values.
            PluginError: if a processor fails in another way.
        """
        refuse_unhandled(request.params, self._known - self._handled, self._handled)
        params = request.params.as_mapping()
        for slot in (*self.slots, *self._floors):
            try:
                slot.processor.validate(params)
            except (Exception, SystemExit):  # a plugin's code may raise anything
                with checking(slot.name, slot.source):
                    raise

    def admit(self, request: Request) -> None:
        """Tell the processors that a request took its row.

        Raises:
            ContractError: if a processor returns an invalid floor (NaN or above 0).
        """
        row = request.row
        params = {**request.params.as_mapping(), "seed": int(self._rows.seed[row])}
        for slot in self._floors:
            floor = slot.processor.floor(params)
            check_floor(slot.name, slot.source, floor)
            self._rows.log_floor[row] = max(self._rows.log_floor[row], floor)
        for slot in self.slots:
            slot.set_active(row, bool(slot.processor.admit(row, params, list(request.known_prompt))))

    def release(self, row: int) -> None:
        """Release the request of `row` in every processor. Failures are logged, and the other processors go on."""
        for slot in self.slots:
            if slot.active[row]:
                slot.set_active(row, False)
                try:
                    slot.processor.release(row)
                except Exception:  # a plugin's code may raise anything
                    logger.exception("logits processor %r failed to release row %d", slot.name, row)

    def apply(
        self,
        logits: torch.Tensor,
        rows: Int,
        spec_positions: Int | None = None,
        *,
        all_greedy: bool,
        spec_paths: Int | None = None,
        keep_raw: bool = True,
    ) -> Processed:
        """Process the logits of a step.

        If a processor fails, each of its rows is processed by itself to find the logits that it fails on.

        Args:
            logits: [n, vocab_size] float32, which are not changed, unless `keep_raw` is False.
            rows: [n] permanent rows.
            spec_positions, spec_paths: [n] and [n, most], the tokens to verify, as in `ModelInputs`, or None.
            all_greedy: whether only the most likely tokens are wanted.
        """
        slots = [slot for slot in self.slots if slot.num_active and slot.has_work(rows, all_greedy=all_greedy)]
        if not slots:
            return Processed(logits=logits, raw=logits)
        step, errors = LogitsRows(logits, rows, spec_positions, spec_paths), dict[int, str]()
        marked = [slot for slot in slots if not slot.capabilities.keeps_finite]
        try:
            shared = keep_raw or marked or len(slots) > 1 or not logits.is_contiguous()
            result = self._run(slots, logits.clone() if shared else logits, step, np.arange(len(rows)))
        except Exception:  # a plugin's code may raise anything
            logger.exception("a logits processor failed; processing each row of logits alone")
            result, marked = logits.clone(), slots
            for i in range(len(rows)):
                try:
                    result[i : i + 1] = self._run(slots, logits[i : i + 1].clone(), step, np.array([i]))
                except Exception as error:
                    errors[i] = self._plugins.described(error)
        touched = np.logical_or.reduce([slot.active[rows] for slot in marked]) if marked else None
        return Processed(logits=result, raw=logits, touched=touched, errors=errors)

    def has_work(self, rows: Int, *, all_greedy: bool) -> bool:
        """Return whether `apply` would look at logits of `rows` [n]."""
        return any(slot.num_active and slot.has_work(rows, all_greedy=all_greedy) for slot in self.slots)

    def failures(
        self,
        rows: Int,
        token_ids: Int,
        errors: Sequence[str | None],
        restrictions: Sequence[Callable[[int], Sequence[str]]] = (),
        nan_cause: str = "",
    ) -> dict[int, str]:
        """Return the reason, by row, for each of `rows` [n] that has a negative mark for a token.

        Args:
            rows: permanent rows.
            token_ids: [n] tokens and marks.
            errors: [n] reasons that are known already.
            restrictions: each returns the names of parameters by which an extension bans tokens of a row.
            nan_cause: reason for rows whose logits are NaN before any processor.
        """
        found: dict[int, str] = {}
        for row, mark, error in zip(rows.tolist(), token_ids.tolist(), errors, strict=True):
            if mark == NAN_LOGITS:
                found[row] = error or nan_cause
            elif mark < 0:
                names = [slot.name for slot in self.slots if slot.active[row]]
                names += [name for named in restrictions for name in named(row)]
                found[row] = error or unusable(names, none_left=mark == NONE_LEFT)
        return found

    def _run(self, slots: Sequence[ProcessorSlot], logits: torch.Tensor, step: LogitsRows, which: Int) -> torch.Tensor:
        """Process `logits` [m, vocab_size] of the rows at the places `which` [m] of a step, in place or not."""
        for slot in slots:
            wanted = slot.active[step.rows[which]]
            if (further := self._fields.get(slot.name)) is not None:
                wanted &= further.has(step.rows, which)
            if wanted.all():
                logits = slot.apply(logits, self._batch(further, step, which))
            elif wanted.any():
                index = torch.from_numpy(np.flatnonzero(wanted)).to(logits.device, non_blocking=True)
                logits[index] = slot.apply(logits[index], self._batch(further, step, which[wanted]))
        return logits

    def _batch(self, further: BatchFields | None, step: LogitsRows, which: Int) -> LogitsBatch:
        """Build a processor's batch of the rows at the places `which` of a step's logits."""
        rows, spec_positions, token_ids = step.rows[which], np.zeros(len(which), np.int64), None
        if step.spec_positions is not None:
            spec_positions = step.spec_positions[which]
            index = np.arange(int(spec_positions.max(initial=0)))
            path = np.where(index < spec_positions[:, None], index, -1)
            if step.spec_paths is not None:
                path = step.spec_paths[which]
            places = np.minimum(self._rows.num_tokens[rows][:, None] + path, self._rows.max_model_len - 1)
            token_ids = np.where(path >= 0, self._rows.token_ids[rows[:, None], places], -1)
        return LogitsBatch.of(
            rows=rows,
            spec_positions=spec_positions,
            spec_token_ids=token_ids,
            token_table=self._rows.shown_token_ids,
            num_tokens=self._rows.num_tokens[rows],
            num_prompt_tokens=self._rows.num_prompt_tokens[rows],
            **({} if further is None else further.of(step.raw, step.rows, which)),
        )
