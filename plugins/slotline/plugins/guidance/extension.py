"""Extension of a plan with companions: pairs of requests that sample in the same steps.

The companion is a request like any other, with a row, blocks and prefixes of its own. Neither of a pair samples without
the other, and the companion gets its leader's token. They are preempted and ended together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request, Status
from slotline.core.batch.request_table import RequestTable
from slotline.core.sampling.logits_processors import ProcessorSlot
from slotline.plugins.guidance.pairs import LivePairs, pair, refuse_companion
from slotline.plugins.guidance.places import CompanionFields, follow
from slotline.registry.contracts import Companion, ExtensionContext
from slotline.registry.errors import IntegrityError, RequestError
from slotline.registry.processor_checks import checking

Int = npt.NDArray[np.int64]


class GuidanceExtension:
    """Pairs of an engine.

    Attributes:
        pairs: the unfinished ones.
        fields: of the batches of processors that read companions.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        self._rows: RequestTable = context.rows
        self._tokenizer = parts.tokenizer
        self._processors = [one for one in parts.processors if one.capabilities.companions]
        self._drafts = "drafts" in context.features
        self._chunked_prefill = parts.planned.chunked_prefill
        self.pairs = LivePairs(context.max_requests)
        self.fields = CompanionFields(self.pairs)

    def processor_fields(self, slot: ProcessorSlot) -> CompanionFields | None:
        """Return the further fields of a processor's batches, None if it reads no companions."""
        return self.fields if slot.capabilities.companions else None

    def followers(self, request: Request) -> Sequence[Request]:
        """Return the companion of a request that a processor asks for.

        Raises:
            RequestError: if it cannot be computed, or if two processors ask for one.
            PluginError: if a processor fails in another way.
        """
        asked = self._asked(request)
        if asked is None:
            return ()
        refuse_companion(
            request, asked.asked, self._rows.max_requests, drafts=self._drafts, chunked_prefill=self._chunked_prefill
        )
        return (pair(request, asked, self._tokenizer, self._rows.max_model_len),)

    def _asked(self, request: Request) -> Companion | None:
        found: list[Companion] = []
        if request.leader is None:
            for slot in self._processors:
                with checking(slot.name, slot.source):
                    companion = slot.processor.companion(request.params.as_mapping(), list(request.known_prompt))
                found += [] if companion is None else [companion]
        if len(found) > 1:
            raise RequestError(
                f"{' and '.join(one.asked for one in found)} need a companion each, and a request has one at most",
                fix="leave out all but one of them",
            )
        return found[0] if found else None

    def enter(self, request: Request) -> None:
        """Note a pair when its companion enters, after its leader."""
        if request.leader is not None:
            self.pairs.add(request.leader, request)

    def leave(self, request: Request) -> None:
        """Forget the pair of a request that ends."""
        self.pairs.remove(request)

    def linked(self, request: Request) -> Sequence[Request]:
        """Return the other one of a request's pair."""
        other = self.pairs.other(request)
        return () if other is None else (other,)

    def first_waiting(self, rows: Int) -> Request | None:
        """Return the waiting request whose partner is running, if there is one.

        It goes before all others, whatever their priority: its partner can neither sample nor end without it, and holds
        a row, blocks and perhaps other resources that those others may need.
        """
        for one, other in self.pairs:
            for running, waiting in ((one, other), (other, one)):
                if running.status is Status.RUNNING and waiting.status is not Status.RUNNING:
                    return waiting
        return None

    def limit_prompt(self, request: Request, computed: int, count: int) -> int | None:
        """Leave a request's last token to a step in which both of the pair are running."""
        if self.pairs.other(request) is None:
            return count
        known = len(request.prompt_token_ids) if request.row < 0 else int(self._rows.num_tokens[request.row])
        return min(count, known - computed - 1)

    def trim_tokens(self, rows: Int, counts: Int) -> Int:
        """Return `counts` [n] so that no row of a pair computes its last known token, and so samples, alone."""
        if not self.pairs:
            return counts
        partners = self.pairs.partners()[rows]
        paired = partners != LivePairs.NONE
        if not paired.any():
            return counts
        left = self._rows.num_tokens[rows] - self._rows.num_computed_tokens[rows]
        samples = np.zeros(self._rows.max_requests, bool)
        samples[rows] = counts >= left
        alone = paired & ~((partners >= 0) & samples[partners])
        capped: Int = np.where(alone, np.minimum(counts, np.maximum(left - 1, 0)), counts)
        return capped

    def leaves_logits(self, inputs: ModelInputs) -> bool:
        """Return True if no pair runs."""
        return not self.pairs

    def revise_tokens(self, tokens: torch.Tensor, final: torch.Tensor | None, inputs: ModelInputs) -> torch.Tensor:
        """Give each companion its leader's token."""
        return follow(self.pairs, inputs.sampling.rows, tokens) if self.pairs else tokens

    def restore(self, requests: Sequence[Request]) -> None:
        """Keep the pairs of unfinished requests."""
        self.pairs.retain(requests)

    def check(self) -> None:
        """Raise IntegrityError unless both of each pair have equally many outputs."""
        lengths = self._rows.num_tokens - self._rows.num_prompt_tokens
        for one, other in self.pairs:
            if one.row >= 0 and other.row >= 0 and lengths[one.row] != lengths[other.row]:
                raise IntegrityError(f"rows {one.row} and {other.row} are a pair and do not have the same outputs")
