"""The logits-processor pipeline: built plugins in order, each shown only the rows that it has work for.

What a processor does wrong ends the requests that it does it to, and no other. The step pays for that only when
something changed the logits: their largest number is checked, and the result is sent with the tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.sampling.nan_logits import NAN_LOGITS
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import (
    DeviceOps,
    LogitsBatch,
    LogitsProcessor,
    LogitsProcessorCapabilities,
)
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.loading import typed_failures

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
    active: npt.NDArray[np.bool_] = field()
    num_active: int = 0

    def set_active(self, row: int, active: bool) -> None:
        """Set whether there is work for a row from now on."""
        self.num_active += int(active) - int(self.active[row])
        self.active[row] = active


@frozen(kw_only=True, eq=False)
class Processed:
    """Logits after the processors.

    Attributes:
        logits: [n, vocab_size] float32. `raw` are the logits before any processor.
        touched: [n] bool, the rows of the logits that some processor had work for. None means no row.
        errors: by place in the batch, the reason for logits that could not be processed.
    """

    logits: torch.Tensor
    raw: torch.Tensor
    touched: npt.NDArray[np.bool_] | None = None
    errors: dict[int, str] = field(factory=dict)

    def mark(self, tokens: torch.Tensor, ops: DeviceOps, *, all_greedy: bool = False) -> torch.Tensor:
        """Return the tokens [n] sampled from the logits, with a negative mark where none can be sampled.

        Nothing is waited for.

        Args:
            ops: operations of the device.
            all_greedy: each token is the place of its row's largest logit, or of NaN, so that no search is needed.
        """
        if self.touched is None:
            return tokens
        touched = None if self.touched.all() else torch.from_numpy(self.touched).to(tokens.device, non_blocking=True)
        marked = ops.mark_unusable(
            self.logits,
            self.raw,
            touched,
            tokens,
            not_finite=NOT_FINITE,
            none_left=NONE_LEFT,
            all_greedy=all_greedy,
        )
        if self.errors:
            marked[torch.tensor(list(self.errors), device=tokens.device)] = FAILED
        return marked


@frozen(eq=False)
class LogitsRows:
    """The rows of a step's logits: see `ProcessorPipeline.apply`."""

    rows: Int
    spec_positions: Int | None
    spec_paths: Int | None


class BatchFields(Protocol):
    """Further fields of the batches of some processors, which an extension gives."""

    def has(self, rows: Int, which: Int) -> npt.NDArray[np.bool_]:
        """Return which of the places `which` [m] among a step's `rows` [n] have these fields."""
        ...

    def of(self, raw: torch.Tensor, rows: Int, which: Int) -> Mapping[str, Any]:
        """Return the fields of `LogitsBatch` for the places `which` [m], by name.

        Args:
            raw: [n, vocab_size] float32, the step's logits before any processor.
            rows: [n] permanent rows.
            which: [m] places among them.
        """
        ...


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
        self._fields = dict(fields)
        ordered = sorted(slots, key=lambda s: (s.capabilities.order, s.name))
        self.slots = tuple(slot for slot in ordered if not slot.capabilities.floors)
        self._floors = tuple(slot for slot in ordered if slot.capabilities.floors)
        self._rows = rows
        self._known = known_parameters
        self._handled = handled_elsewhere.union(*(slot.capabilities.parameters for slot in slots))
        self._defaults = SamplingParams().as_mapping()

    def validate(self, request: Request) -> None:
        """Let every processor check the request, and refuse parameters that no processor handles.

        Raises:
            RequestError: naming the parameter, its value and the allowed values.
            PluginError: if a processor fails in another way.
        """
        params = request.params.as_mapping()
        for name in request.params.extra_args or ():
            if name not in self._handled:
                raise RequestError(
                    f"extra_args names {name!r}, which no logits processor of this run takes",
                    fix=f"name it under [logits_processors]; this run takes: {', '.join(sorted(self._handled))}",
                )
        for name in self._known - self._handled:
            if params.get(name) != self._defaults.get(name):
                raise RequestError(
                    f"{name}={params[name]!r} needs a logits processor that this run does not have",
                    fix="name one that takes it under [logits_processors], see `slotline plugins`",
                )
        for slot in (*self.slots, *self._floors):
            with checking(slot):
                slot.processor.validate(params)

    def admit(self, request: Request) -> None:
        """Tell the processors that a request took its row.

        Raises:
            ContractError: if a processor returns an invalid floor (NaN or above 0).
        """
        row = request.row
        params = {**request.params.as_mapping(), "seed": int(self._rows.seed[row])}
        for slot in self._floors:
            floor = slot.processor.floor(params)
            if math.isnan(floor) or floor > 0:
                raise ContractError(
                    f"logits processor {slot.name!r} has the floor {floor}",
                    fix=f"return a number of 0 or below{_brought(slot)}",
                )
            self._rows.log_floor[row] = max(self._rows.log_floor[row], floor)
        for slot in self.slots:
            slot.set_active(row, bool(slot.processor.admit(row, params, list(request.prompt_token_ids))))

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
    ) -> Processed:
        """Process the logits of a step.

        If a processor fails, each of its rows is processed by itself to find the logits that it fails on.

        Args:
            logits: [n, vocab_size] float32, which are not changed.
            rows: [n] permanent rows.
            spec_positions: [n], the tokens to verify that each assumes, as in `ModelInputs`. None if there are none.
            all_greedy: whether only the most likely tokens are wanted.
            spec_paths: [n, most], as in `ModelInputs`.
        """
        slots = self._working(rows, all_greedy=all_greedy)
        if not slots:
            return Processed(logits=logits, raw=logits)
        errors: dict[int, str] = {}
        step = LogitsRows(rows, spec_positions, spec_paths)
        try:
            result = self._run(slots, logits, step, np.arange(len(rows)))
        except Exception:  # a plugin's code may raise anything
            logger.exception("a logits processor failed; processing each row of logits alone")
            result, errors = self._run_alone(slots, logits, step)
        touched = np.logical_or.reduce([slot.active[rows] for slot in slots])
        return Processed(logits=result, raw=logits, touched=touched, errors=errors)

    def has_work(self, rows: Int, *, all_greedy: bool) -> bool:
        """Return whether `apply` would look at logits of `rows` [n]."""
        return bool(self._working(rows, all_greedy=all_greedy))

    def failures(
        self,
        rows: Int,
        token_ids: Int,
        errors: Sequence[str | None],
        restrictions: Sequence[Callable[[int], Sequence[str]]] = (),
        nan_cause: str = "",
    ) -> dict[int, str]:
        """Return the reason, by row, for each of `rows` [n] that has a negative mark for a token.

        `errors` [n] are the reasons that are already known.

        Each of `restrictions` returns the names of parameters by which an extension bans tokens of a row. `nan_cause`
        is the reason to give for rows whose logits are NaN before any processor.
        """
        found: dict[int, str] = {}
        for row, token, error in zip(rows.tolist(), token_ids.tolist(), errors, strict=True):
            if token == NAN_LOGITS:
                found[row] = error or nan_cause
            elif token < 0:
                names = [slot.name for slot in self.slots if slot.active[row]]
                names += [name for named in restrictions for name in named(row)]
                found[row] = error or _unusable(token, names)
        return found

    def _working(self, rows: Int, *, all_greedy: bool) -> list[ProcessorSlot]:
        """Return the processors with work for some of `rows`."""
        return [
            slot
            for slot in self.slots
            if slot.num_active
            and not (all_greedy and slot.capabilities.argmax_invariant)
            and bool(slot.active[rows].any())
        ]

    def _run(self, slots: Sequence[ProcessorSlot], raw: torch.Tensor, step: LogitsRows, which: Int) -> torch.Tensor:
        """Process the rows at the places `which` [m] of a step's logits `raw` [n, vocab_size]: [m, vocab_size]."""
        logits = raw.clone() if len(which) == len(raw) else raw[which]
        for slot in slots:
            wanted = slot.active[step.rows[which]]
            if (further := self._fields.get(slot.name)) is not None:
                wanted &= further.has(step.rows, which)
            if wanted.all():
                logits = _applied(slot, logits, self._batch(slot, raw, step, which))
            elif wanted.any():
                index = torch.from_numpy(np.flatnonzero(wanted)).to(logits.device, non_blocking=True)
                logits[index] = _applied(slot, logits[index], self._batch(slot, raw, step, which[wanted]))
        return logits

    def _run_alone(
        self, slots: Sequence[ProcessorSlot], raw: torch.Tensor, step: LogitsRows
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Process each row of the logits by itself, and leave it unchanged on failure.

        Returns the logits, and the reasons of the failures by place.
        """
        result, errors = raw.clone(), dict[int, str]()
        for i in range(len(raw)):
            try:
                result[i : i + 1] = self._run(slots, raw, step, np.array([i]))
            except Exception as error:  # a plugin's code may raise anything
                errors[i] = self._plugins.described(error)
        return result, errors

    def _batch(self, slot: ProcessorSlot, raw: torch.Tensor, step: LogitsRows, which: Int) -> LogitsBatch:
        """Build a processor's batch of the rows at the places `which` of a step's logits `raw`."""
        rows = step.rows[which]
        spec_positions = None if step.spec_positions is None else step.spec_positions[which]
        token_ids, further = None, self._fields.get(slot.name)
        if spec_positions is not None:
            index = np.arange(int(spec_positions.max(initial=0)))
            path = np.where(index < spec_positions[:, None], index, -1)
            if step.spec_paths is not None:
                path = step.spec_paths[which]
            places = np.minimum(self._rows.num_tokens[rows][:, None] + path, self._rows.max_model_len - 1)
            token_ids = np.where(path >= 0, self._rows.token_ids[rows[:, None], places], -1)
        return LogitsBatch.of(
            rows=rows,
            spec_positions=np.zeros(len(rows), np.int64) if spec_positions is None else spec_positions,
            spec_token_ids=token_ids,
            token_table=self._rows.shown_token_ids,
            num_tokens=self._rows.num_tokens[rows],
            num_prompt_tokens=self._rows.num_prompt_tokens[rows],
            **({} if further is None else further.of(raw, step.rows, which)),
        )


def checking(slot: ProcessorSlot) -> AbstractContextManager[None]:
    """Turn what a processor raises while it checks a request into a typed error."""
    return typed_failures(
        f"logits processor {slot.name!r} failed to check a request",
        fix=f"change the parameters that it takes, or do without it{_brought(slot)}",
    )


def _brought(slot: ProcessorSlot) -> str:
    return f"; {slot.name!r} is brought by {slot.source}" if slot.source else ""


def _applied(slot: ProcessorSlot, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
    """Apply a processor to logits.

    Raises:
        ContractError: if the result has another shape or dtype.
    """
    want = (logits.shape, logits.dtype, logits.device)
    found = slot.processor.apply(logits, batch)
    if not isinstance(found, torch.Tensor):
        raise ContractError(
            f"logits processor {slot.name!r} returned {type(found).__name__}", fix=f"return the logits{_brought(slot)}"
        )
    if (found.shape, found.dtype, found.device) != want:
        raise ContractError(
            f"logits processor {slot.name!r} returned {found.dtype} {list(found.shape)} on {found.device}",
            fix=f"return {want[1]} {list(want[0])} on {want[2]}{_brought(slot)}",
        )
    return found


def _unusable(mark: int, names: Sequence[str]) -> str:
    working = f"the logits processors with work for this request ({', '.join(names)})"
    if mark == NONE_LEFT:
        error = RequestError(
            f"no token is left to sample: {working} ban all of them",
            fix="loosen what bans tokens: allowed_token_ids, bad_words, logit_bias, or a processor of your own",
        )
        return f"RequestError: {error}"
    return f"ContractError: {working} made NaN or infinity of a logit"
