"""Drafting: asking the drafter after each step, checking what it says, and counting how well it guesses.

A drafter can make a run faster or slower; it cannot make it wrong. Whatever it raises, and any token that is not in
the vocabulary, costs the request its drafts in that step and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.draft_tree import DraftTree
from slotline.core.batch.hidden_states import ComputedStates, HiddenStates, LayerTaps
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.core.speculation.draft_attention import DraftAttention, StagedAttention
from slotline.core.speculation.draft_graphs import DraftGraphs
from slotline.core.speculation.draft_history import DraftHistory
from slotline.core.speculation.draft_inputs import computed_tokens, draft_batch, following_tokens
from slotline.core.speculation.draft_length_controller import DraftLengthController
from slotline.core.speculation.draft_timing import StepTimes
from slotline.core.speculation.spec_decode_metrics import SpecDecodeMetrics
from slotline.registry.contracts import (
    ComputedTokens,
    Draft,
    DraftBatch,
    Drafter,
    DrafterCapabilities,
    LayerReader,
    Observer,
)

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


class DraftRunner:
    """The drafter and what the core knows about its proposals.

    Attributes:
        name: of the plugin and who brings it.
        control: chooses how many drafts are verified; None for all that are proposed.
        paused: whether nothing is drafted for now.
        served: [max_requests] bool, rows whose requests the drafter took.
        uniform: whether all requests get equally many drafts, so that a captured graph fits.
        history: the tokens that the drafter is shown.
        probabilities: [requests, k, vocab_size] on the device, what the last proposal was drawn from, if that is known;
            `RequestTable.draft_entry` says which request is which.
        observing: whether the drafter sees what the step that runs computes.
        attention: of the drafter's own layers, where it has any; set when the caches are there.
        graphs: replays the drafter's work, where that is captured.
    """

    attention: DraftAttention | None = None
    graphs: DraftGraphs | None = None

    def __init__(
        self,
        drafter: Drafter,
        capabilities: DrafterCapabilities,
        rows: RequestTable,
        *,
        name: str = "drafter",
        num_tokens: int,
        vocab_size: int,
        device: str,
        control: DraftLengthController | None = None,
        trees: bool = False,
        uniform: bool = False,
        check: bool = False,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.drafter = drafter
        self.name = name
        self.control = control
        self._proposes_trees, self._verifies_trees = bool(capabilities.tree.support), trees
        self.uniform = uniform
        self.paused = False
        self.num_tokens = num_tokens
        self.needs_hidden_states = capabilities.needs_hidden_states
        self.needs_computed = self.observing = capabilities.needs_computed
        self.catches_up = capabilities.catches_up
        self._caught_up = np.full(rows.max_requests, -1)  # generations of rows whose tokens the drafter's cache has
        self.remembers = capabilities.remembers
        self.taps: LayerTaps | None = None
        if capabilities.needs_layers:
            reader: LayerReader = drafter  # type: ignore[assignment]  # what it declares says so
            self.taps = LayerTaps(reader.layer_ids, device)
        self.counts = SpecDecodeMetrics(accepted_at=[0] * num_tokens)
        self._rows = rows
        self.history, self._check = DraftHistory(rows), check
        self.needs_history = capabilities.needs_history
        self._vocab_size = vocab_size
        self._device = device
        self._embed = embed
        self._observed: tuple[torch.Tensor, ...] = ()  # of the tokens of the last step
        self.served = np.zeros(rows.max_requests, bool)
        self.probabilities: torch.Tensor | None = None
        self._times = StepTimes(device)

    def admit(self, request: Request) -> None:
        """A request took its row. If the drafter cannot take it, it runs without drafts."""
        self.served[request.row] = False
        self.history.begin(request.row)
        if self.control is not None:
            self.control.admit(request.row)
        try:
            self.drafter.admit(request.row, list(request.prompt_token_ids))
        except Exception as error:  # a plugin may raise anything
            self.failed(1, f"admit({request.request_id!r}) raised {type(error).__name__}: {error}")
        else:
            self.served[request.row] = True

    def release(self, row: int) -> None:
        """The request of `row` leaves."""
        if self.served[row]:
            self.served[row] = False
            try:
                self.drafter.release(row)
            except Exception as error:
                self.failed(1, f"release({row}) raised {type(error).__name__}: {error}")

    def starting(self, schedule: SchedulerOutput) -> None:
        """A step begins."""
        drafts = self._rows.num_drafts[schedule.rows]
        decodes = bool((schedule.num_scheduled == 1 + drafts).all())
        self._times.begin(schedule.num_tokens, drafted=bool(drafts.any()), decodes=decodes)
        rows = schedule.rows
        ready = (self._caught_up[rows] == self._rows.generation[rows]) & ~self._rows.forced[rows]
        self.observing = self.needs_computed and not (self.catches_up and decodes and bool(ready.all()))
        self._learn()

    def computed(self) -> None:
        """The step's tokens are there, and the drafter has seen what it sees; a proposal comes next, if at all."""
        self._times.computed()

    @torch.inference_mode()
    def rehearse(self, states: ComputedStates | None) -> None:
        """Show the drafter a made-up step before the first request: it takes its memory, and errors are raised."""
        if states is not None:
            observer: Observer = self.drafter  # type: ignore[assignment]
            made_up = self._computed(states)
            made_up.rows = torch.zeros(0, dtype=torch.int64)
            made_up.query_start_loc = torch.zeros(1, dtype=torch.int64)
            observer.observe(made_up)

    def capture(self, target: GraphRunner, *, progress: bool = False) -> None:
        """Capture the drafter's work for the batches that the model's verification is captured for.

        Raises:
            SlotlineError: as `DraftGraphs.capture`.
        """
        graphs = DraftGraphs(
            self.drafter,
            target,
            self._computed,
            self.attention,
            num_tokens=self.num_tokens,
            needs_computed=self.needs_computed,
            needs_hidden_states=self.needs_hidden_states,
            catches_up=self.catches_up,
            device=self._device,
        )
        graphs.capture(progress=progress)
        self.graphs = graphs

    @torch.inference_mode()
    def observe(self, states: ComputedStates, following: torch.Tensor | None = None) -> None:
        """Show the drafter what a step computed.

        Args:
            following: [num_padded_tokens] int64 on the device, the token behind each; None where the tokens that the
                step gave are in the rows by now.
        """
        observer: Observer = self.drafter  # type: ignore[assignment]  # as above
        self._observed = ()
        try:
            computed = self._computed(states, following)
            if self.graphs is not None and self.graphs.observes(states):
                self._observed = self.graphs.observe(states, computed)
            else:
                self._observed = observer.observe(computed) or ()
        except Exception as error:  # as in `propose`
            self.failed(len(states.inputs.rows), f"observe raised {type(error).__name__}: {error}")

    @torch.inference_mode()
    def propose(self, rows: Int, hidden_states: HiddenStates | None) -> None:
        """Ask for drafts behind the known tokens of `rows`, each of which has just got a token, and write them there.

        All earlier drafts are forgotten, those of rows that were not scheduled too: a proposal is kept whole or not.

        Args:
            hidden_states: of the last accepted position, by entry of `rows`; None if the drafter reads none.
        """
        self.computed()
        self.forget()
        self.behind(rows)
        known = self._rows.num_tokens[rows]
        room = self._rows.length_limit[rows] - known - 1  # the token after the drafts ends the request at the latest
        wanted = self.wanted(rows, room)
        if not wanted.all():
            rows, known, room = rows[wanted], known[wanted], room[wanted]
            if hidden_states is not None:
                hidden_states = hidden_states.take(np.flatnonzero(wanted))
        if not self.asks(rows):
            return
        start = perf_counter()
        try:
            self.history.follow(rows, known)
            shown = self.history.tensor
            batch = draft_batch(self._rows, rows, known, hidden_states, self.num_tokens, self._device, shown)
            staged = None
            if self.catches_up:
                previous = self._rows.token_ids[rows, known - 2].astype(np.int64)
                batch.previous_token_ids = self._upload(previous)
            if self.attention is not None:
                staged = self.attention.stage(rows, known - 1, self._upload)
            draft = self.ask(batch, staged)
            if self._check and self.history.restore(rows, known):
                raise ValueError("it wrote into token_table, which it is only shown")
            token_ids, tree = self._checked(draft, len(rows))
        except Exception as error:  # a plugin may raise anything; the requests go on without drafts
            self.failed(len(rows), f"propose raised {type(error).__name__}: {error}")
            return
        counts = self._lengths(token_ids, tree, known, room)
        counts = self.chosen(rows, counts, perf_counter() - start)
        self._rows.draft(rows, token_ids, counts)
        self._rows.tree = tree
        if self.uniform and tree is None and counts.any():
            self._fill(rows, known)
        whole = self._rows.num_guesses[rows] == self._rows.num_drafts[rows]  # what fills is not in the drafter's cache
        self.caught_up(rows[whole], known[whole] - 1)
        if draft.probabilities is not None and draft.parents is None:  # a tree is verified token by token
            self.probabilities = draft.probabilities.to(self._device, non_blocking=True)
            self._rows.draft_entry[rows] = np.arange(len(rows))

    def wanted(self, rows: Int, room: Int) -> npt.NDArray[np.bool_]:
        """Which of `rows` [n] the drafter is asked for, if it is, where `room` [n] drafts of each fit.

        One that catches up is asked for all if for any, so that it need not see what the others compute; so is any
        where all requests get equally many drafts.
        """
        wanted: npt.NDArray[np.bool_] = self.served[rows] & (room > 0)
        return self.served[rows] if (self.catches_up or self.uniform) and wanted.any() else wanted

    def most(self, known: Int) -> Int:
        """The most drafts behind `known` [n] tokens, [n]: those and the token behind them must fit into a row."""
        return np.clip(self._rows.max_model_len - known - 1, 0, self.num_tokens)

    def caught_up(self, rows: Int, bounds: Int) -> None:
        """`rows` [n], whose newest tokens are at `bounds` [n] at most, have just been proposed for.

        If the drafter's cache has room for what it proposed, it has seen all that stands before the next proposal.
        """
        if self.catches_up and self.attention is not None:
            rows = rows[self.attention.has_room(rows, bounds)]
            self._caught_up[rows] = self._rows.generation[rows]

    def ask(self, batch: DraftBatch, attend: StagedAttention | None) -> Draft:
        """The drafter's answer, from a graph where there is one for so many requests.

        Args:
            attend: of the drafter's own layers, which is no part of `batch` yet.
        """
        if (index := batch.computed_index) is not None:
            batch.observed = tuple(states.index_select(0, index) for states in self._observed)
        if self.graphs is not None and (size := self.graphs.size_for(len(batch.rows))) is not None:
            return self.graphs.propose(size, batch, attend)
        batch.attend = None if attend is None else attend(batch.positions)
        return self.drafter.propose(batch)

    def behind(self, rows: Int) -> None:
        """A step of `rows` [n] was sampled, and nothing is proposed behind it yet."""
        self._caught_up[rows] = -1

    def forget(self) -> None:
        """Forget all drafts, those of rows that were not scheduled too: a proposal is kept whole or not."""
        self._rows.num_drafts[:] = 0
        self._rows.draft_entry[:] = -1
        self._rows.tree = None  # or what a grammar forces would be cut to the form of drafts that are gone
        self.probabilities = None

    def asks(self, rows: Int) -> bool:
        """Whether the drafter is asked now for drafts of `rows`."""
        return len(rows) > 0 and not self.paused and (self.control is None or self.control.asks(rows))

    def chosen(self, rows: Int, counts: Int, seconds: float) -> Int:
        """How many of the `counts` [n] drafts of `rows`, asked for in so many seconds of the host, are verified."""
        self._times.proposed(counts)
        self.counts.proposals += 1
        self.counts.draft_seconds += seconds
        return counts if self.control is None else self.control.lengths(rows, counts)

    def count(self, rows: Int, draft_positions: Int, stands: npt.NDArray[np.bool_], guesses: Int) -> None:
        """Add a step to the counts.

        Args:
            rows, draft_positions: [n] of the logits rows, their requests and the drafts that each assumes.
            stands: [n] which of them stand; guesses: [n] drafts of each request that its drafter proposed.
        """
        drafted = (draft_positions > 0) & (draft_positions <= guesses)
        first = np.flatnonzero(draft_positions == 0)
        drafts, stood = np.add.reduceat(drafted, first), np.add.reduceat(drafted & stands, first)
        some = drafts > 0
        self.counts.steps += int(some.sum())
        self.counts.proposed += int(drafted.sum())
        accepted = np.bincount(draft_positions[drafted & stands] - 1, minlength=self.num_tokens)
        judged = some & ~self._rows.forced[rows[first]]
        if self.control is not None and judged.any():
            self.control.judged(rows[first][judged], drafts[judged], stood[judged])
        self.counts.accepted += int(accepted.sum())
        self.counts.accepted_at = [a + int(b) for a, b in zip(self.counts.accepted_at, accepted, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """The counts, what was decided about lengths where that is adaptive, and what graphs took, as JSON types."""
        return {
            **self.counts.to_json(),
            "adaptive": None if self.control is None else self.control.to_json(),
            "graphs": None if self.graphs is None else self.graphs.report.to_json(),
        }

    def _fill(self, rows: Int, known: Int) -> None:
        """Make all requests' drafts equally many, so that a captured graph fits: with the newest token again and again.

        Any token may stand behind the guesses, since none stands that the model would not have sampled; and a text ends
        at its limit, whatever stands behind.
        """
        guesses, most = self._rows.num_guesses[rows], self.most(known)
        newest, places = self._rows.token_ids[rows, known - 1], np.arange(self.num_tokens)
        left_open = (guesses[:, None] <= places) & (places < most[:, None])
        self._rows.write_drafts(rows, np.broadcast_to(newest[:, None], left_open.shape), left_open)
        self._rows.num_drafts[rows] = np.maximum(guesses, most)

    def _learn(self) -> None:
        """What the steps that are over by now took."""
        for step in self._times.take():
            seconds, draft_seconds = step.seconds, step.draft_seconds
            if step.decodes and seconds is not None:
                self.counts.decodes[step.drafted] += 1
                self.counts.decode_seconds[step.drafted] += seconds
                if self.control is not None:
                    self.control.stepped(step.num_tokens, seconds, drafted=step.drafted)
            if self.control is not None and step.lengths is not None and draft_seconds is not None:
                self.control.proposed(step.lengths, draft_seconds)

    def _computed(self, states: ComputedStates, following: torch.Tensor | None = None) -> ComputedTokens:
        if following is None:
            following = torch.from_numpy(self.following(states.inputs)).to(self._device)
        return computed_tokens(
            states,
            following,
            self._device,
            embed=self._embed,
            hidden_states=self.needs_hidden_states,
            attends=self.attention is not None,
        )

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def following(self, inputs: ModelInputs) -> Int:
        """The token behind each of a step's [num_padded_tokens], as far as the host knows it."""
        return following_tokens(self._rows, inputs)

    def check_shape(self, draft: Draft, count: int) -> None:
        """Raise ValueError unless a proposal for `count` requests has the shape and the form that were negotiated."""
        found = tuple(draft.token_ids.shape)
        if len(found) != 2 or found[0] != count or found[1] > self.num_tokens:
            raise ValueError(f"token_ids has shape {found}, not [{count}, at most {self.num_tokens}]")
        if draft.parents is not None and not self._proposes_trees:
            raise ValueError("a tree was proposed where a chain was negotiated")

    def outside(self, token_ids: Int) -> npt.NDArray[np.bool_]:
        """Which of the proposed `token_ids` [n, k] are neither tokens nor -1; rows with such count as failures."""
        found: npt.NDArray[np.bool_] = (token_ids < -1) | (token_ids >= self._vocab_size)
        if found.any():
            token = int(token_ids[found][0])
            self.failed(int(found.any(1).sum()), f"token {token} is outside the vocabulary of {self._vocab_size}")
        return found

    def _checked(self, draft: Draft, count: int) -> tuple[Int, DraftTree | None]:
        """The proposal as [count, k] int64 on the host; a token outside the vocabulary ends its row's drafts.

        And its form, where it is a tree that is verified as one; else its first path is what is taken of it.

        Raises:
            ValueError: if its shape is not what the contract says.
        """
        self.check_shape(draft, count)
        token_ids = draft.token_ids.cpu().numpy()
        shape = (*token_ids.shape, self._vocab_size)
        if draft.probabilities is not None and tuple(draft.probabilities.shape) != shape:
            raise ValueError(f"probabilities has shape {tuple(draft.probabilities.shape)}, not {shape}")
        checked: Int = np.where(self.outside(token_ids), -1, token_ids).astype(np.int64)
        if draft.parents is None:
            return checked, None
        tree = DraftTree.of(draft.parents.cpu().numpy()[: token_ids.shape[1]])
        return (checked, tree) if self._verifies_trees else (checked[:, tree.first_path], None)

    def _lengths(self, token_ids: Int, tree: DraftTree | None, known: Int, room: Int) -> Int:
        """Tokens of each row before its first -1, and before one that would stand behind its room."""
        depths = np.arange(1, token_ids.shape[1] + 1) if tree is None else tree.depths
        fits = (token_ids >= 0) & (depths <= room[:, None])
        lengths: Int = np.cumprod(fits, axis=1).sum(axis=1)
        return np.minimum(lengths, self._rows.max_model_len - known)

    def failed(self, count: int, what: str) -> None:
        """Count `count` lost proposals, and log the first."""
        if self.counts.failures == 0:
            logger.warning("%s: %s; requests go on without drafts (told once, counted always)", self.name, what)
        self.counts.failures += count
        self.counts.last_failure = f"{self.name}: {what}"
