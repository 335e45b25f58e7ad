"""Structured output: the tokens that a request's grammar allows next, by permanent row.

The masks of a step are made while its forward pass runs. If every earlier token is known when the pass starts, many
masks are made in a thread of their own. Otherwise, under asynchronous scheduling, they are made once those tokens are
handed out, while the device is busy. Drafts are walked with a mask for each, and the state is rolled back afterwards. A
grammar advances by the tokens that are handed out and by nothing else, so preemption and rejected drafts need no care.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.core.batch.extensions import Ended
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import Processed
from slotline.plugins.structured_output.forced_drafts import DraftTable, drafts_of, force_drafts
from slotline.plugins.structured_output.grammar_bitmask import GrammarBitmasks, KnownMasks
from slotline.plugins.structured_output.grammar_compiler import GrammarCompiler
from slotline.plugins.structured_output.mask_cache import CachedState
from slotline.plugins.structured_output.mask_table import MaskTable, StepMasks
from slotline.plugins.structured_output.waiting import Decode, WaitingGrammar
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.built import GRAMMAR_STATE, misfits_of
from slotline.registry.contracts import Constraint, GrammarState, StructuredOutputCapabilities
from slotline.registry.contracts.device import Device
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.loading import typed_failures

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")
WORTH_A_THREAD = 2**21
"""Bits of masks: fewer are made in less time than two threads lose to each other."""


class StructuredOutputs:
    """The plugin's states of all rows, and the masks that steps ask for.

    Args:
        ahead: whether all earlier tokens are known when a forward pass starts.
        count_nans: whether NaN is counted in the model's own logits after they were masked.

    Attributes:
        name: of the plugin, from the package `source`.
        compiler: compiles the grammars that requests wait for.
        device: of the logits.
        active: [max_requests] bool, rows with a grammar, also with one that waits for a text.
    """

    def __init__(
        self,
        name: str,
        capabilities: StructuredOutputCapabilities,
        compiler: GrammarCompiler,
        rows: RequestTable,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: Device,
        profiler: StepProfiler,
        ahead: bool,
        count_nans: bool,
        source: str,
        plugins: BuiltPlugins,
        decode: Decode,
    ) -> None:
        self.name = name
        self.source = source
        self.compiler = compiler
        self.active = np.zeros(rows.max_requests, bool)
        self._plugins = plugins
        self._capabilities = capabilities
        self._rows = rows
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.device = device
        self._profiler = profiler
        self._ahead = ahead
        self._count_nans = count_nans
        self._decode = decode
        self._states: dict[int, GrammarState] = {}  # by row
        self._waiting: dict[int, WaitingGrammar] = {}  # by row
        self._begun: WeakKeyDictionary[ModelInputs, GrammarBitmasks | StepMasks] = WeakKeyDictionary()
        self._table = MaskTable(vocab_size, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slotline-masks")
        self._filling: Future[None] | None = None

    def validate(self, request: Request) -> None:
        """Refuse constraints that the plugin cannot serve, as far as this is known at once.

        Raises:
            RequestError: with the position of the error.
            PluginError: if the plugin fails in another way.
        """
        if request.params.structured_outputs is not None:
            self.check_constraint(request.params.structured_outputs.constraint)

    def check_constraint(self, constraint: Constraint) -> None:
        """Check that the plugin takes a constraint."""
        kind = constraint.kind
        if refusal := self._capabilities.constraints.refusal(kind):
            raise RequestError(
                f"structured_outputs.{kind}: the plugin {self.name!r} does not take it ({refusal})",
                fix="name another plugin with structured_output.backend",
            )
        if self.compiler.knows(constraint):
            return
        backend = self.compiler.backend
        with typed_failures(
            f"structured-output plugin {self.name!r} failed on structured_outputs.{kind}",
            fix=f"change the constraint, or name another plugin with structured_output.backend{self._brought}",
        ):
            backend.check(constraint)

    @property
    def _brought(self) -> str:
        return f"; {self.name!r} is brought by {self.source}" if self.source else ""

    def defer(self, request: Request) -> bool:
        """Have a request's grammar compiled. Return True until `collect_ready` hands the request over.

        Raises:
            RequestError: in a forked child.
            PluginError: if the plugin cannot be built.
        """
        wanted = request.params.structured_outputs
        if wanted is None:
            return False
        if not self.compiler.has(request):
            self.compiler.submit(request, wanted.constraint)
        return self.compiler.is_waiting(request)

    def collect_ready(
        self, *, idle: bool, gives_way: Callable[[], bool]
    ) -> tuple[Sequence[Request], Sequence[tuple[Request, BaseException]]]:
        """Return the requests whose grammar has been compiled, and those whose grammar cannot be."""
        if not self.compiler.num_waiting:
            return (), ()
        ready, failed = self.compiler.collect(idle=idle, gives_way=gives_way)
        for request, error in failed:
            logger.error("request %r: its grammar cannot be compiled: %s", request.request_id, error)
        return ready, failed

    def admit(self, request: Request) -> None:
        """Start the state of a request that took its row. Its grammar is compiled."""
        if request.params.structured_outputs is not None:
            state = self.compiler.start(request)
            own = state.own if isinstance(state, CachedState) else state
            if texts := list(misfits_of(GRAMMAR_STATE, self._capabilities, own)):
                raise ContractError(
                    f"structured-output plugin {self.name!r}: what start() made does not fit the contract: "
                    f"{'; '.join(texts)}",
                    fix=f"name another in structured_output.backend{self._brought}",
                )
            self._keep(request, state, ())

    def resume(self, request: Request, token_ids: Sequence[int]) -> None:
        """Make the state of a request's row that of the output `token_ids`.

        Raises:
            ContractError: if the plugin refuses these tokens, which were already handed out.
        """
        if request.params.structured_outputs is None:
            return
        self._settle()
        self._keep(request, self.compiler.start(request), token_ids)

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget the grammars of all but the unfinished requests."""
        self.compiler.retain({request.request_id: request for request in requests})

    def release(self, row: int) -> None:
        """Forget the state of a row, whose request has left it or begins anew."""
        if self.active[row]:
            self._settle()
            self.active[row] = False
            self._states.pop(row, None)
            self._waiting.pop(row, None)

    def leave(self, request: Request) -> None:
        """Forget the grammar of a request that has ended."""
        self.compiler.forget(request)

    def restrictions(self, row: int) -> Sequence[str]:
        """Return the name of the parameter that bans tokens of a row, if it has a grammar."""
        return ("structured_outputs",) if row in self._states else ()

    def begin_logits(self, inputs: ModelInputs) -> None:
        """Begin a step's masks while its forward pass runs, if all earlier tokens are known."""
        if not self._ahead or not self._any:
            return
        with self._profiler.scope("grammar"):
            masks = self.begin(inputs, beside=True)
        if masks is not None:
            self._begun[inputs] = masks

    def leaves_logits(self, inputs: ModelInputs) -> bool:
        """Return True if nothing but bans is to be done with the logits of a step: each row has a token left."""
        if not self._any or not self.active[inputs.sampling.rows].any():
            return True
        with self._profiler.scope("grammar"):
            masks = self._begun.get(inputs) or self.begin(inputs)
            if masks is None:
                return True
            self._begun[inputs] = masks
            return not self._failures(masks) and masks.leave_tokens()

    def ban_tokens(self, logits: torch.Tensor, inputs: ModelInputs) -> torch.Tensor:
        """Return the logits with every token banned that a grammar does not allow next."""
        masks = self._begun.pop(inputs, None)
        if masks is None:
            return logits
        with self._profiler.scope("grammar"):
            return masks.apply(logits, in_place=True)

    def process(self, processed: Processed, inputs: ModelInputs) -> Processed:
        """Return the logits with every token banned that a grammar does not allow next."""
        if not self._any:
            return processed
        with self._profiler.scope("grammar"):
            masks = self._begun.pop(inputs, None) or self.begin(inputs)
            return self.apply(processed, masks, keep_raw=inputs.scored is not None or self._count_nans)

    def advance(self, rows: Int, token_ids: npt.NDArray[np.int32], ended: Ended) -> Ended:
        """Advance the grammars of distinct rows [n] by a token each, except rows that a stop token or text ended.

        Returns:
            Rows whose text is over: with reason `stop` if it is complete, else with the error.
        """
        return self._accept(rows, token_ids, ended) if self._any else {}

    def after_draft(self, drafts: DraftTable, rows: Int, most: int) -> None:
        """Draft the tokens that the grammars of rows [n] force, up to `most` for each row, see `force_drafts`."""
        if self._any:
            self._force(drafts, rows, most)

    def begin(self, inputs: ModelInputs, *, beside: bool = False) -> GrammarBitmasks | StepMasks | None:
        """Ask for the masks of a step's logits. Return None if none of its rows has a grammar.

        All earlier tokens must be known. With `beside`, a thread makes the masks while the caller does other things, if
        there are enough of them. If there are too few, None is returned too: they are made in the next call.
        """
        self._settle()
        masked = self.active[inputs.sampling.rows]
        if self._waiting:
            masked = masked & ~self._free(inputs)
        if not masked.any():
            return None
        rows = inputs.sampling.rows
        if inputs.spec_positions is None and (known := KnownMasks.of(rows[masked], self._states)) is not None:
            if beside and known.asked and len(known.asked) * self._vocab_size < WORTH_A_THREAD:
                return None
            if (not beside or not known.asked) and known.ask(self.compiler.backend, self._vocab_size):
                found = known.found(self._rows.ignore_eos[rows[masked]].tolist(), self._eos_token_ids)
                if (step := StepMasks.of(rows, masked, found, self._table)) is not None:
                    return step
        banned = self._rows.ignore_eos
        masks = GrammarBitmasks.of(inputs, masked, self._state, self._drafts, self._vocab_size, self.device, banned)
        if beside and masks.num_asked * self._vocab_size >= WORTH_A_THREAD:
            self._filling = masks.filling = self._thread.submit(masks.fill, self.compiler.backend)
        return masks

    def apply(self, processed: Processed, masks: GrammarBitmasks | StepMasks | None, *, keep_raw: bool) -> Processed:
        """Return the logits with every token banned that a grammar does not allow next.

        `keep_raw` says that the model's own logits are read afterwards, also those of banned tokens.
        """
        if masks is None:
            return processed
        rows, failed = masks.logits_rows, self._failures(masks)
        errors = dict(processed.errors)
        for row, error in failed.items():
            errors.update(dict.fromkeys(np.flatnonzero(rows == row).tolist(), error))
        touched = masks.masked if processed.touched is None else masks.masked | processed.touched
        logits = masks.apply(processed.logits, in_place=processed.logits is not processed.raw or not keep_raw)
        return evolve(processed, logits=logits, touched=touched, errors=errors)

    def _failures(self, masks: GrammarBitmasks | StepMasks) -> Mapping[int, str]:
        """Finish the masks, once. Return the reasons for rows that have none."""
        if isinstance(masks, StepMasks):
            return masks.failed
        if masks.failed is None:
            masks.failed = masks.wait(self.compiler.backend, self.name, self._plugins)
            if (endless := self._rows.ignore_eos[masks.logits_rows[masks.masked]]).any():
                masks.bitmask.ban(endless, self._eos_token_ids)
        return masks.failed

    def _accept(self, rows: Int, token_ids: npt.NDArray[np.int32], ended: Ended) -> Ended:
        over: Ended = {}
        bound = self.active[rows]
        states = self._states
        for row, token in zip(rows[bound].tolist(), token_ids[bound].tolist(), strict=True):
            known = states.get(row)
            if ended.get(row, ("", None))[0] == "stop" or (isinstance(known, CachedState) and known.follow(token)):
                continue
            try:
                if row in self._waiting:
                    self._wake(row, token)
                    continue
                state = self._state(row)
                if state.accept([token]) == 0:
                    raise ContractError(
                        f"structured-output plugin {self.name!r} let token {token} pass its mask, or the model's own "
                        "logits are minus infinity for all tokens of the mask"
                    )
                if state.finished:
                    over[row] = ("stop", None)
            except Exception as error:  # a plugin's code may raise anything
                over[row] = ("error", self._plugins.described(error))
        return over

    def _force(self, drafts: DraftTable, rows: Int, most: int) -> None:
        force_drafts(drafts, self._states, rows, most, self.name)
        if cut := [row for row in rows.tolist() if row in self._waiting]:
            drafts.keep_chains(np.array(cut))  # their grammars may begin in the middle of the drafts

    @property
    def _any(self) -> bool:
        return bool(self._states or self._waiting)

    def _keep(self, request: Request, state: GrammarState, token_ids: Sequence[int]) -> None:
        """Keep the state of a request, advanced by the output `token_ids`."""
        row, wanted = request.row, request.params.structured_outputs
        self.active[row] = True
        if wanted is not None and wanted.after is not None:
            waiting = WaitingGrammar(state, wanted.after, self._decode)
            written = next((i for i, token in enumerate(token_ids, 1) if waiting.add(token)), None)
            if written is None:
                self._waiting[row] = waiting
                return
            token_ids = token_ids[written:]
        if len(token_ids) and state.accept(list(token_ids)) != len(token_ids):
            raise ContractError(f"structured-output plugin {self.name!r} refuses tokens that it has accepted before")
        self._states[row] = state

    def _wake(self, row: int, token: int) -> None:
        """Add a token to the free text of a row, whose grammar begins if it is over."""
        if self._waiting[row].add(token):
            self._states[row] = self._waiting.pop(row).state

    def _free(self, inputs: ModelInputs) -> npt.NDArray[np.bool_]:
        """Return which logits [num_logits] of a step belong to free text: those before the end of a marker."""
        rows, positions = inputs.sampling.rows, inputs.spec_positions
        free = np.zeros(len(rows), bool)
        for row, waiting in self._waiting.items():
            own = np.flatnonzero(rows == row)
            end = waiting.end_in(self._drafts(row)[: len(own) - 1]) if len(own) > 1 else None
            free[own] = True if end is None or positions is None else positions[own] < end
        return free

    def _settle(self) -> None:
        """Wait for the masks of a step whose forward pass failed, since states may have only one user."""
        if self._filling is not None:
            wait([self._filling])
            self._filling = None

    def _drafts(self, row: int) -> list[int]:
        return drafts_of(self._rows, row)

    def _state(self, row: int) -> GrammarState:
        state = self._states.get(row)
        if state is None and row in self._waiting:
            state = self._waiting[row].state
        if state is None:
            raise ContractError(f"row {row} has no grammar", fix="report it: this is a bug in slotline")
        return state
