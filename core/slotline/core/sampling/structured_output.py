"""Structured output: the tokens that a request's grammar allows next, by permanent row.

The masks of a step are made while its forward pass runs. If every earlier token is known when the pass starts, many
masks are made in a thread of their own. Otherwise, under asynchronous scheduling, they are made once those tokens are
handed out, while the device is busy. Drafts are walked with a mask for each, and the state is rolled back afterwards. A
grammar advances by the tokens that are handed out and by nothing else, so preemption and rejected drafts need no care.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np
import numpy.typing as npt
from attrs import evolve

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.sampling.bitmask import TokenBitmask
from slotline.core.sampling.grammar_bitmask import GrammarBitmasks
from slotline.core.sampling.grammar_compiler import GrammarCompiler
from slotline.core.sampling.logits_processors import Processed
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.built import GRAMMAR_STATE, misfits_of
from slotline.registry.config import StructuredOutputConfig
from slotline.registry.contracts import (
    Constraint,
    GrammarState,
    StructuredOutputCapabilities,
    StructuredOutputContext,
)
from slotline.registry.descriptor import Descriptor
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.loading import typed_failures

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")
WORTH_A_THREAD = 2**21
"""Bits of masks: fewer are made in less time than two threads lose to each other."""


class StructuredOutputs:
    """The plugin's states of all rows, and the masks that steps ask for.

    Attributes:
        name: of the plugin, from the package `source`.
        compiler: compiles the grammars that requests wait for.
        active: [max_requests] bool, rows with a grammar.
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
        source: str = "",
        plugins: BuiltPlugins | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self._plugins = BuiltPlugins() if plugins is None else plugins
        self.compiler = compiler
        self.active = np.zeros(rows.max_requests, bool)
        self._capabilities = capabilities
        self._rows = rows
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._states: list[GrammarState | None] = [None] * rows.max_requests
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slotline-masks")
        self._filling: Future[None] | None = None

    def validate(self, request: Request) -> None:
        """Refuse constraints that the plugin cannot serve, as far as this is known at once.

        Raises:
            RequestError: with the position of the error.
            PluginError: if the plugin fails in another way.
        """
        if request.params.structured_outputs is not None:
            self.check(request.params.structured_outputs.constraint)

    def check(self, constraint: Constraint) -> None:
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

    def admit(self, request: Request) -> None:
        """Start the state of a request that took its row. Its grammar is compiled."""
        if request.params.structured_outputs is not None:
            state = self.compiler.backend.start(self.compiler.grammar(request))
            if texts := list(misfits_of(GRAMMAR_STATE, self._capabilities, state)):
                raise ContractError(
                    f"structured-output plugin {self.name!r}: what start() made does not fit the contract: "
                    f"{'; '.join(texts)}",
                    fix=f"name another in structured_output.backend{self._brought}",
                )
            self._states[request.row] = state
            self.active[request.row] = True

    def resume(self, request: Request, token_ids: Sequence[int]) -> None:
        """Rebuild the state of a request's row as it was after the output `token_ids`.

        Raises:
            ContractError: if the plugin refuses these tokens, which were already handed out.
        """
        self._settle()
        state = self.compiler.backend.start(self.compiler.grammar(request))
        if token_ids and state.accept(list(token_ids)) != len(token_ids):
            raise ContractError(f"structured-output plugin {self.name!r} refuses tokens that it has accepted before")
        self._states[request.row] = state
        self.active[request.row] = True

    def clear(self, row: int) -> None:
        """Forget the state of a row, whose request has left it or begins anew."""
        self._settle()
        self._states[row] = None
        self.active[row] = False

    def release(self, request: Request) -> None:
        """Release a request, from its row or before it got one.

        Its grammar is forgotten once the request has ended.
        """
        if request.params.structured_outputs is not None and request.row >= 0:
            self.clear(request.row)

    def begin(self, inputs: ModelInputs, *, beside: bool = False) -> GrammarBitmasks | None:
        """Ask for the masks of a step's logits. Return None if none of its rows has a grammar.

        All earlier tokens must be known. With `beside`, a thread makes the masks while the caller does other things, if
        there are enough of them.
        """
        self._settle()
        rows, draft_positions = inputs.sampling.rows, inputs.draft_positions
        masked = self.active[rows]
        places = np.flatnonzero(masked)
        if not len(places):
            return None
        bitmask = TokenBitmask(len(places), self._vocab_size, inputs.logits_indices.device)
        bitmask.places[:] = places
        firsts, counts = np.arange(len(places)), np.zeros(len(places), np.int64)
        if draft_positions is not None:
            firsts = np.flatnonzero(draft_positions[places] == 0)
            counts = np.diff(firsts, append=len(places)) - 1
        own = rows[places[firsts]]
        drafts: list[list[int]] = [[]] * len(own)
        if counts.any():
            drafts = [self._drafts(row)[:n] if n else [] for row, n in zip(own.tolist(), counts.tolist(), strict=True)]
        masks = GrammarBitmasks(
            bitmask=bitmask,
            masked=masked,
            logits_rows=rows,
            rows=own,
            states=[self._state(row) for row in own.tolist()],
            drafts=drafts,
            firsts=firsts,
            counts=counts,
        )
        if beside and len(places) * self._vocab_size >= WORTH_A_THREAD:
            self._filling = masks.filling = self._thread.submit(masks.fill, self.compiler.backend)
        return masks

    def apply(self, processed: Processed, masks: GrammarBitmasks | None, *, keep_raw: bool) -> Processed:
        """Return the logits with every token banned that a grammar does not allow next.

        `keep_raw` says that the model's own logits are read afterwards, also those of banned tokens.
        """
        if masks is None:
            return processed
        rows = masks.logits_rows
        failed = masks.wait(self.compiler.backend, self.name, self._plugins)
        if (endless := self._rows.ignore_eos[rows[masks.masked]]).any():
            masks.bitmask.ban(endless, self._eos_token_ids)
        errors = dict(processed.errors)
        for row, error in failed.items():
            errors.update(dict.fromkeys(np.flatnonzero(rows == row).tolist(), error))
        touched = masks.masked if processed.touched is None else masks.masked | processed.touched
        logits = masks.bitmask.apply(processed.logits, in_place=processed.logits is not processed.raw or not keep_raw)
        return evolve(processed, logits=logits, touched=touched, errors=errors)

    def advance(self, rows: Int, token_ids: npt.NDArray[np.int32], stopped: Sequence[int]) -> dict[int, str | None]:
        """Advance the grammars of distinct rows [n] by a token each, except rows that a stop token or text `stopped`.

        Returns:
            Rows whose text is over: None if it is complete, else the error.
        """
        over: dict[int, str | None] = {}
        bound = self.active[rows]
        for row, token in zip(rows[bound].tolist(), token_ids[bound].tolist(), strict=True):
            if row in stopped:
                continue
            try:
                state = self._state(row)
                if state.accept([token]) == 0:
                    raise ContractError(f"structured-output plugin {self.name!r} let token {token} pass its mask")
                if state.finished:
                    over[row] = None
            except Exception as error:  # a plugin's code may raise anything
                over[row] = self._plugins.described(error)
        return over

    def draft(self, rows: Int, most: int) -> None:
        """Draft the tokens that the grammars of rows [n] force, up to `most` for each row.

        If a grammar forces nothing, cut the row's existing drafts from the first banned one on, which cannot be
        accepted.

        Of a tree the first nodes remain that form a chain: a grammar's states follow one path.

        None of these drafts is verified by rejection sampling. The cut depends on the drawn drafts, so the remaining
        drafts do not follow the distribution that the drafter names, and the text would lean towards them.
        """
        self._rows.draft_entry[rows[self.active[rows]]] = -1
        most = most if (tree := self._rows.tree) is None else min(most, tree.num_chained)
        room = np.minimum(self._rows.length_limit[rows] - self._rows.num_tokens[rows] - 1, most)
        for row, longest in zip(rows.tolist(), room.tolist(), strict=True):
            if not self.active[row] or longest <= 0:
                continue
            state = self._state(row)
            self._rows.num_drafts[row] = min(int(self._rows.num_drafts[row]), longest)
            try:
                forced = list(state.forced())[:longest]
                if forced:
                    count = state.count_legal(forced)
                    self._rows.draft(np.array([row]), np.array([forced]), np.array([count]), forced=True)
                elif self._rows.num_drafts[row]:
                    self._rows.num_drafts[row] = state.count_legal(self._drafts(row))
            except Exception:  # a plugin's code may raise anything, and a mask that fails ends the request
                logger.exception("structured-output plugin %r failed on drafts", self.name)
                self._rows.num_drafts[row] = 0

    def _settle(self) -> None:
        """Wait for the masks of a step whose forward pass failed, since states may have only one user."""
        if self._filling is not None:
            wait([self._filling])
            self._filling = None

    def _drafts(self, row: int) -> list[int]:
        known = int(self._rows.num_tokens[row])
        drafts: list[int] = self._rows.token_ids[row, known : known + self._rows.num_drafts[row]].tolist()
        return drafts

    def _state(self, row: int) -> GrammarState:
        state = self._states[row]
        if state is None:
            raise ContractError(f"row {row} has no grammar", fix="report it: this is a bug in slotline")
        return state


def build_structured_output(
    registry: PluginRegistry,
    descriptor: Descriptor[StructuredOutputCapabilities],
    context: StructuredOutputContext,
    rows: RequestTable,
    config: StructuredOutputConfig,
) -> StructuredOutputs:
    """Build structured output with a plugin.

    The plugin is built now if the configuration names it, else when it is first needed.

    Raises:
        PluginError: if a named plugin cannot be built.
    """
    compiler = GrammarCompiler(
        partial(registry.build, descriptor, context), threads=config.compile_threads, capacity=config.cached_grammars
    )
    if config.backend != "auto":
        compiler.build()
    return StructuredOutputs(
        descriptor.name,
        descriptor.capabilities,
        compiler,
        rows,
        vocab_size=context.vocab_size,
        eos_token_ids=context.eos_token_ids,
        source=registry.source(descriptor),
        plugins=registry.built,
    )
