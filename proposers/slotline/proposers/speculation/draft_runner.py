"""Draft runner: calls the drafter after each step, checks its output, and counts its acceptance.

A drafter can make a run faster or slower, but never wrong. If it raises, or proposes a token outside the vocabulary,
the request loses its drafts in that step and the failure is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.builder.communicators import HostLink
from slotline.builder.graph_capturer import GraphCapturer
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.device.torch_device import HostTime
from slotline.proposers.speculation.draft_attention import DraftAttention, StagedAttention
from slotline.proposers.speculation.draft_graphs import DraftGraphs
from slotline.proposers.speculation.draft_history import DraftHistory
from slotline.proposers.speculation.draft_inputs import computed_tokens, draft_batch, following_tokens
from slotline.proposers.speculation.draft_length_controller import DraftLengthController
from slotline.proposers.speculation.draft_table import DraftTable
from slotline.proposers.speculation.draft_timing import MeasuredStep, StepTimes
from slotline.proposers.speculation.draft_tree import DraftTree, TreesByRow, first_paths, refuse_no_tree
from slotline.proposers.speculation.elsewhere import Elsewhere, Proposed
from slotline.proposers.speculation.hidden_states import ComputedStates, HiddenStates, LayerTaps
from slotline.proposers.speculation.spec_decode_metrics import SpecDecodeMetrics
from slotline.registry.contracts import (
    ComputedTokens,
    Draft,
    DraftBatch,
    Drafter,
    DrafterCapabilities,
    Observer,
    StatefulDrafter,
    TimePoint,
)
from slotline.registry.ranks import ALONE, Place

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


class DraftRunner:
    """The drafter, and the core's record of its proposals.

    Attributes:
        name: of the plugin and its package.
        drafts: those of all rows.
        control: chooses how many drafts are verified. None to verify all that are proposed.
        paused: True if drafting is paused.
        served: [max_requests] bool, rows whose requests the drafter admitted.
        uniform: True if all requests get equally many drafts, so that a captured graph fits.
        history: the copy of tokens that the drafter reads.
        probabilities: [requests, k, vocab_size] on the device, the distributions of the last proposal, if known.
            `DraftTable.entry` maps rows to its entries.
        gives_probabilities: True if the drafter declares that it gives them.
        observing: True if the drafter observes the running step.
        attention: of the drafter's own layers, if it has any and the caches exist.
        graphs: replays the drafter's work, if it is captured.
    """

    graphs: DraftGraphs | None = None

    def __init__(
        self,
        drafter: Drafter,
        capabilities: DrafterCapabilities,
        rows: RequestTable,
        *,
        name: str = "drafter",
        num_tokens: int,
        max_len: int | None = None,
        vocab_size: int,
        device: str,
        control: DraftLengthController | None = None,
        form: str = "chain",
        uniform: bool = False,
        check: bool = False,
        embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        time_point: Callable[[], TimePoint] = HostTime,
        attention: DraftAttention | None = None,
        place: Place = ALONE,
        layer_ids: Sequence[int] = (),
        link: HostLink | None = None,
    ) -> None:
        self.attention = attention
        self._link = link
        self._is_told = isinstance(drafter, Elsewhere)
        self._place = place
        self.drafter = drafter
        self.name = name
        self.control = control
        self._serves_embeds = not capabilities.needs_computed or bool(capabilities.prompt_embeds.support)
        self._proposes_trees, self._verifies_trees = bool(capabilities.tree.support), form != "chain"
        self._differ = bool(capabilities.request_trees.support)
        self.uniform = uniform
        self.paused = False
        self.num_tokens = num_tokens
        self._max_len = rows.max_model_len if max_len is None else max_len
        self.needs_hidden_states = capabilities.needs_hidden_states and not self._is_told
        self.needs_computed = self.observing = capabilities.needs_computed and not self._is_told
        self.catches_up = capabilities.catches_up
        self._has_blocks = capabilities.block_attention != "none"
        self._keeps_rows = capabilities.state == "rows" and not self._is_told
        self.gives_probabilities = bool(capabilities.probabilities.support)
        self._caught_up = np.full(rows.max_requests, -1)  # generations of rows whose tokens the drafter's cache has
        self._generations = np.full(rows.max_requests, -1)  # of rows when the drafter heard of them last
        self.remembers = capabilities.remembers
        self.taps = LayerTaps(layer_ids, device) if layer_ids else None
        self.counts = SpecDecodeMetrics(accepted_at=[0] * num_tokens)
        trees = TreesByRow(rows.max_requests, num_tokens) if form == "request_trees" else None
        self._rows, self.drafts = rows, DraftTable(rows, trees)
        self.history, self._check = DraftHistory(rows), check
        self.needs_history = capabilities.needs_history
        self._vocab_size = vocab_size
        self._device = device
        self._embed = embed
        self._observed: tuple[torch.Tensor, ...] = ()  # of the last step's tokens
        self.served = np.zeros(rows.max_requests, bool)
        self.probabilities: torch.Tensor | None = None
        self._times = StepTimes(time_point)

    def admit(self, request: Request) -> None:
        """Admit a request that took its row. If the drafter refuses or cannot read it, it runs without drafts."""
        self.served[request.row] = False
        self.history.begin(request.row, 0 if request.prompt_known else len(request.prompt_token_ids))
        if self.control is not None:
            self.control.admit(request.row)
        if not (request.prompt_known or self._serves_embeds):
            return
        try:
            self.drafter.admit(request.row, list(request.known_prompt))
        except Exception as error:  # a plugin may raise anything
            self.failed(1, f"admit({request.request_id!r}) raised {type(error).__name__}: {error}")
        else:
            self.served[request.row] = True
            self._generations[request.row] = self._rows.generation[request.row]

    def release(self, row: int) -> None:
        """Release the request of `row`."""
        if self.served[row]:
            self.served[row] = False
            try:
                self.drafter.release(row)
            except Exception as error:
                self.failed(1, f"release({row}) raised {type(error).__name__}: {error}")

    def _preempt(self, rows: Int) -> None:
        """Tell a drafter that keeps states of the rows whose computed tokens were given up since the last step."""
        given_up = rows[self.served[rows] & (self._generations[rows] != self._rows.generation[rows])]
        self._generations[rows] = self._rows.generation[rows]
        for row in given_up.tolist():
            stateful: StatefulDrafter = self.drafter  # type: ignore[assignment]  # it declares a state
            try:
                stateful.preempt(row)
            except Exception as error:  # as in `admit`
                self.lose(np.array([row]))
                self.failed(1, f"preempt({row}) raised {type(error).__name__}: {error}")

    def lose(self, rows: Int) -> None:
        """Release rows whose states a failure has left undefined. Their requests go on without drafts."""
        for row in rows.tolist() if self._keeps_rows else ():
            self.release(row)

    def begin_step(self, schedule: SchedulerOutput) -> None:
        """Record the start of a step."""
        drafts = self._rows.num_spec_tokens[schedule.rows]
        decodes = bool((schedule.num_scheduled == 1 + drafts).all())
        self._times.begin(schedule.num_tokens, drafted=bool(drafts.any()), decodes=decodes)
        rows = schedule.rows
        if self._keeps_rows:
            self._preempt(rows)
        ready = (self._caught_up[rows] == self._rows.generation[rows]) & ~self.drafts.forced[rows]
        self.observing = self.needs_computed and not (self.catches_up and decodes and bool(ready.all()))
        if self._place.rank > 0:
            self.measured()  # it learns what rank 0 has measured
        elif self._place.size == 1:
            self.learn(self.measured())

    def record_computed(self) -> None:
        """Record that the step's tokens are computed and observed. A proposal comes next, if any."""
        self._times.record_computed()

    @torch.inference_mode()
    def rehearse(self, states: ComputedStates | None) -> None:
        """Show the drafter a dummy step before the first request, so that it allocates memory. Errors are raised."""
        if states is not None:
            observer: Observer = self.drafter  # type: ignore[assignment]
            made_up = self._computed(states)
            made_up.rows = torch.zeros(0, dtype=torch.int64)
            made_up.served = torch.zeros(0, dtype=torch.bool)
            made_up.query_start_loc = torch.zeros(1, dtype=torch.int64)
            observer.observe(made_up)

    def capture(self, target: GraphCapturer, *, progress: bool = False) -> None:
        """Capture the drafter's work for the batches whose verification by the model is captured.

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
        """Show the drafter a computed step.

        Args:
            states: the step's inputs and hidden states.
            following: [num_padded_tokens] int64 on the device, the token after each. None if the step's tokens are
                already in
                the rows.
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
            self.lose(states.inputs.rows)
            self.failed(len(states.inputs.rows), f"observe raised {type(error).__name__}: {error}")

    @torch.inference_mode()
    def propose(self, rows: Int, hidden_states: HiddenStates | None) -> None:
        """Propose drafts after the known tokens of `rows`, which have just got a token, and write them to the rows.

        All earlier drafts are forgotten, also those of rows that were not scheduled: a proposal is kept whole or not at
        all.

        Args:
            rows: [n], the requests' rows.
            hidden_states: of the last accepted position, by entry of `rows`. None if the drafter reads none.
        """
        self.record_computed()
        self.forget()
        self.mark_unproposed(rows)
        found = None if self._is_told else self._proposed(rows, hidden_states)
        if self._link is not None and len(rows):
            found = self._shared(found, self._link)
        if found is not None:
            self._write(found)

    def _shared(self, found: Proposed | None, link: HostLink) -> Proposed | None:
        """Tell the other ranks of a proposal, or be told of it."""
        if not self._is_told:
            link.send(None if found is None else found.told())
            return found
        told: Proposed | None = link.receive()
        if told is not None:
            self._times.proposed(told.counts)
            self.counts.proposals += 1
        return told

    def _proposed(self, rows: Int, hidden_states: HiddenStates | None) -> Proposed | None:
        """Call the drafter, as `propose` says. Return None if there are no drafts."""
        known = self._rows.num_tokens[rows]
        room = self._rows.length_limit[rows] - known - 1  # the token after the drafts ends the request at the latest
        wanted = self.select_rows(rows, room)
        if not wanted.all():
            rows, known, room = rows[wanted], known[wanted], room[wanted]
            if hidden_states is not None:
                hidden_states = hidden_states.take(np.flatnonzero(wanted))
        if not self.should_propose(rows):
            return None
        start = perf_counter()
        try:
            self.history.follow(rows, known)
            batch = draft_batch(self._rows, rows, known, hidden_states, self.num_tokens, self._device, self.history)
            staged = None
            if self.catches_up:
                previous = self._rows.token_ids[rows, known - 2].astype(np.int64)
                batch.previous_token_ids = self._upload(previous)
            if self.attention is not None:
                staged = self.attention.stage(rows, known - 1, self._upload)
            draft = self.call_drafter(batch, staged)
            if self._check and self.history.restore(rows, known):
                raise ValueError("it wrote into token_table, which it is only shown")
            token_ids, tree, parents = self._checked(draft, len(rows))
        except Exception as error:  # a plugin may raise anything, and the requests continue without drafts
            self.lose(rows)
            self.failed(len(rows), f"propose raised {type(error).__name__}: {error}")
            return None
        depths = _depths(token_ids.shape[1]) if tree is None else tree.depths
        if parents is not None:
            assert self.drafts.trees is not None
            self.drafts.trees.write(rows, parents)
            depths = self.drafts.trees.depths[rows, : token_ids.shape[1]]
        counts = self._lengths(token_ids, depths, known, room)
        counts = self.choose_counts(rows, counts, perf_counter() - start)
        return Proposed(
            rows=rows,
            token_ids=token_ids,
            counts=counts,
            tree=tree,
            parents=parents,
            probabilities=draft.probabilities,
        )

    def _write(self, found: Proposed) -> None:
        """Write a proposal to its rows."""
        rows, known = found.rows, self._rows.num_tokens[found.rows]
        counts = found.counts
        if self.drafts.trees is not None and self.uniform:
            counts = np.minimum(counts, self._limit_nodes(rows))
        self.drafts.write(rows, found.token_ids, counts)
        self.drafts.tree = found.tree
        if found.parents is not None and self.drafts.trees is not None:
            kept = np.arange(found.parents.shape[1]) < counts[:, None]
            self.drafts.trees.write(rows, np.where(kept, found.parents, -1))  # what fills a batch follows no node
        if self.uniform and found.tree is None and found.counts.any():
            self._fill(rows, known)
        whole = (
            self.drafts.num_guesses[rows] == self._rows.num_spec_tokens[rows]
        )  # fillers are not in the drafter's cache
        self.caught_up(rows[whole], known[whole] - 1)
        if found.probabilities is not None and not self._verifies_trees:  # trees are verified token by token
            self.probabilities = found.probabilities.to(self._device, non_blocking=True)
            self.drafts.entry[rows] = np.arange(len(rows))

    def select_rows(self, rows: Int, room: Int) -> npt.NDArray[np.bool_]:
        """Select which of `rows` [n] get drafts if the drafter is called, given that `room` [n] drafts of each fit.

        A drafter that catches up is called for all rows or none, so that it need not observe the steps of the others.
        The same holds if all requests get equally many drafts. Rows that are too long for the drafter never count.
        """
        served: npt.NDArray[np.bool_] = self.served[rows]
        if self._max_len < self._rows.max_model_len:
            known = self._rows.length_limit[rows] - 1 - room
            served = served & (known + self.num_tokens <= self._max_len)
        wanted = served & (room > 0)
        return served if (self.catches_up or self.uniform) and wanted.any() else wanted

    def limit_drafts(self, known: Int) -> Int:
        """Return the most drafts [n] after `known` [n] tokens. They and the token after them must fit into a row."""
        return np.clip(self._rows.max_model_len - known - 1, 0, self.num_tokens)

    def _limit_nodes(self, rows: Int) -> Int:
        """Return the most nodes [n] of trees that replay a graph with a fixed number of tokens of each request.

        Accepted nodes whose keys lie elsewhere are computed again with the next step, and take the place of nodes.
        """
        again = self._rows.num_tokens[rows] - 1 - self._rows.num_computed_tokens[rows]
        most: Int = np.maximum(self.num_tokens - again, 0)
        return most

    def caught_up(self, rows: Int, bounds: Int) -> None:
        """Mark `rows` [n], with newest tokens at `bounds` [n] at most, as having just been proposed for.

        If the drafter's cache had room for its proposal, it has seen all tokens before the next proposal.
        """
        if self.catches_up and self.attention is not None:
            rows = rows[self.attention.has_room(rows, bounds)]
            self._caught_up[rows] = self._rows.generation[rows]

    def call_drafter(self, batch: DraftBatch, attend: StagedAttention | None) -> Draft:
        """Return the drafter's answer, from a graph if one is captured for this number of requests.

        Args:
            batch: the drafter's inputs.
            attend: attention of the drafter's own layers, which `batch` does not include yet.
        """
        if (index := batch.computed_index) is not None:
            batch.observed = tuple(states.index_select(0, index) for states in self._observed)
        if self.graphs is not None and (size := self.graphs.size_for(len(batch.rows))) is not None:
            return self.graphs.propose(size, batch, attend)
        if attend is not None:
            batch.attend = attention = attend(batch.positions)
            batch.attend_tree = attention.tree if self._verifies_trees else None
            batch.attend_block = attention.block if self._has_blocks else None
        return self.drafter.propose(batch)

    def mark_unproposed(self, rows: Int) -> None:
        """Mark `rows` [n] as sampled without a proposal yet."""
        self._caught_up[rows] = -1

    def forget(self) -> None:
        """Forget all drafts, also those of rows that were not scheduled: a proposal is kept whole or not at all."""
        self.drafts.forget()
        self.probabilities = None

    def should_propose(self, rows: Int) -> bool:
        """Return True if the drafter is called now for drafts of `rows`."""
        return len(rows) > 0 and not self.paused and (self.control is None or self.control.should_propose(rows))

    def choose_counts(self, rows: Int, counts: Int, seconds: float) -> Int:
        """Return how many of the `counts` [n] drafts of `rows`, proposed in `seconds` on the host, are verified."""
        self._times.proposed(counts)
        self.counts.proposals += 1
        self.counts.draft_seconds += seconds
        return counts if self.control is None else self.control.lengths(rows, counts)

    def count(self, rows: Int, draft_positions: Int, stands: npt.NDArray[np.bool_], guesses: Int) -> None:
        """Add a step to the counts.

        Args:
            rows: [n], the request of each logits row.
            draft_positions: [n], the drafts that each logits row assumes.
            stands: [n], True for accepted logits rows.
            guesses: [n], drafts of each request that its drafter proposed.
        """
        drafted = (draft_positions > 0) & (draft_positions <= guesses)
        first = np.flatnonzero(draft_positions == 0)
        drafts, stood = np.add.reduceat(drafted, first), np.add.reduceat(drafted & stands, first)
        some = drafts > 0
        self.counts.steps += int(some.sum())
        self.counts.proposed += int(drafted.sum())
        accepted = np.bincount(draft_positions[drafted & stands] - 1, minlength=self.num_tokens)
        judged = some & ~self.drafts.forced[rows[first]]
        if self.control is not None and judged.any():
            self.control.judged(rows[first][judged], drafts[judged], stood[judged])
        self.counts.accepted += int(accepted.sum())
        self.counts.accepted_at = [a + int(b) for a, b in zip(self.counts.accepted_at, accepted, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the counts, the decisions about adaptive lengths, and the cost of graphs, as JSON types."""
        return {
            **self.counts.to_json(),
            "adaptive": None if self.control is None else self.control.to_json(),
            "graphs": None if self.graphs is None else self.graphs.report.to_json(),
        }

    def _fill(self, rows: Int, known: Int) -> None:
        """Fill the drafts of all requests to equal numbers with their newest token, so that a captured graph fits.

        Any token may follow the guesses, since a draft is accepted only if the model samples it. A text also ends at
        its limit, whatever follows.
        """
        guesses, most = self.drafts.num_guesses[rows], self.limit_drafts(known)
        if self.drafts.trees is not None:
            most = np.minimum(most, self._limit_nodes(rows))
        newest, places = self._rows.token_ids[rows, known - 1], np.arange(self.num_tokens)
        left_open = (guesses[:, None] <= places) & (places < most[:, None])
        self._rows.write_spec_tokens(rows, np.broadcast_to(newest[:, None], left_open.shape), left_open)
        self._rows.num_spec_tokens[rows] = np.maximum(guesses, most)

    def measured(self) -> list[MeasuredStep]:
        """Return the times of the steps that are over by now, once."""
        return list(self._times.take())

    def learn(self, steps: Sequence[MeasuredStep]) -> None:
        """Take the times of steps into account."""
        for step in steps:
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
        computed = computed_tokens(
            states,
            following,
            self._device,
            embed=self._embed,
            hidden_states=self.needs_hidden_states,
            attends=self.attention is not None,
            served=self.served,
        )
        if self._max_len < self._rows.max_model_len:  # the drafter may have no position beyond
            computed.positions = computed.positions.clamp(max=self._max_len - 1)
        return computed

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def following(self, inputs: ModelInputs) -> Int:
        """Return the token after each of a step's [num_padded_tokens], as far as the host knows it."""
        return following_tokens(self._rows, inputs)

    def check_shape(self, draft: Draft, count: int) -> None:
        """Raise ValueError unless a proposal for `count` requests has the negotiated shape and form."""
        found = tuple(draft.token_ids.shape)
        if len(found) != 2 or found[0] != count or found[1] > self.num_tokens:
            raise ValueError(f"token_ids has shape {found}, not [{count}, at most {self.num_tokens}]")
        if draft.parents is None:
            return
        if not self._proposes_trees:
            raise ValueError("a tree was proposed where a chain was negotiated")
        if draft.parents.ndim == 2 and not self._differ:
            raise ValueError("trees of requests were proposed where one for all was negotiated")
        if draft.parents.ndim == 2 and tuple(draft.parents.shape) != found:
            raise ValueError(f"parents has shape {tuple(draft.parents.shape)}, not that of token_ids, {found}")

    def outside(self, token_ids: Int) -> npt.NDArray[np.bool_]:
        """Return a mask of the `token_ids` [n, k] that are neither tokens nor -1. Their rows count as failures."""
        found: npt.NDArray[np.bool_] = (token_ids < -1) | (token_ids >= self._vocab_size)
        if found.any():
            token = int(token_ids[found][0])
            self.failed(int(found.any(1).sum()), f"token {token} is outside the vocabulary of {self._vocab_size}")
        return found

    def _checked(self, draft: Draft, count: int) -> tuple[Int, DraftTree | None, Int | None]:
        """Return the proposal as [count, k] int64 on the host, and its tree or the parents of each request's own.

        A token outside the vocabulary ends its row's drafts. Only the first path of a tree is taken if trees are not
        verified.

        Raises:
            ValueError: if its shape violates the contract, or trees differ and the same was negotiated for all.
        """
        self.check_shape(draft, count)
        token_ids = draft.token_ids.cpu().numpy()
        shape = (*token_ids.shape, self._vocab_size)
        if draft.probabilities is not None and tuple(draft.probabilities.shape) != shape:
            raise ValueError(f"probabilities has shape {tuple(draft.probabilities.shape)}, not {shape}")
        checked: Int = np.where(self.outside(token_ids), -1, token_ids).astype(np.int64)
        if draft.parents is None:
            return checked, None, None
        parents: Int = draft.parents.cpu().numpy()[..., : token_ids.shape[1]]
        refuse_no_tree(parents)
        if self.drafts.trees is not None:
            return checked, None, np.broadcast_to(parents, checked.shape)
        if parents.ndim == 1:
            tree = DraftTree.of(parents)
            return (checked, tree, None) if self._verifies_trees else (checked[:, tree.first_path], None, None)
        if self._verifies_trees:
            raise ValueError("trees of requests were proposed where one for all was negotiated")
        return first_paths(checked, parents), None, None

    def _lengths(self, token_ids: Int, depths: Int, known: Int, room: Int) -> Int:
        """Count each row's tokens before its first -1 and within its room. `depths` are [k] or [n, k]."""
        fits = (token_ids >= 0) & (depths <= room[:, None])
        lengths: Int = np.cumprod(fits, axis=1).sum(axis=1)
        return np.minimum(lengths, self._rows.max_model_len - known)

    def failed(self, count: int, what: str) -> None:
        """Count `count` lost proposals, and log the first."""
        if self.counts.failures == 0:
            logger.warning("%s: %s; requests go on without drafts (told once, counted always)", self.name, what)
        self.counts.failures += count
        self.counts.last_failure = f"{self.name}: {what}"


def _depths(count: int) -> Int:
    """Return the places of `count` drafts of a chain, from 1."""
    return np.arange(1, count + 1)
