"""Extension of a plan with microbatches: it runs large steps piece after piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, StepPlans
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.plugins.microbatches.pieces import Microbatches, cut, even_pieces, places_in
from slotline.registry.contracts import AttentionLayer, CacheSlots, ExtensionContext


class MicrobatchesExtension:
    """Forward pass in pieces.

    Attributes:
        rule: the steps that are cut, and their pieces.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        scheduler = parts.planned.loaded.config.scheduler
        self.rule = Microbatches(scheduler.microbatches, scheduler.microbatch_tokens)
        self.overlaps = parts.planned.place.layout.data > 1
        self._agreed = 0

    def agree(self, tokens: Sequence[int]) -> int:
        """Return the number of pieces of the next forward pass, which all replicas cut alike.

        Args:
            tokens: of each replica in that pass.
        """
        self._agreed = max(map(self.rule.count, tokens))
        return self._agreed

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass that cuts large eager steps. Replays stay whole."""

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            if not runner.runs_eagerly(inputs):
                return forward(inputs, whole=whole)
            count, self._agreed = self._agreed or self.rule.count(inputs.num_tokens), 0
            if count < 2:
                return forward(inputs, whole=whole)
            pieces = even_pieces(min(count, inputs.num_tokens), inputs.num_tokens, inputs.num_padded_tokens)
            run = partial(_overlapped, count=count) if self.overlaps else _run
            return _in_pieces(runner, inputs, pieces, run, whole=whole)

        return compute


def _in_pieces(
    runner: ModelRunner, inputs: ModelInputs, pieces: Sequence[slice], run: Callable[..., torch.Tensor], *, whole: bool
) -> ComputedPass:
    """Plan all pieces, then run them: hidden states of the wanted tokens, or of all if `whole`."""
    with runner.profiler.scope("plan"):
        plans = [runner.router.plans([cut(batch, piece) for batch in inputs.batches]) for piece in pieces]
        attend = runner.router.bind_plans(plans[0])
        runner.plan_others(inputs)
    with runner.profiler.scope("forward"):
        hidden = run(runner, inputs, pieces, plans, whole=whole)
    return ComputedPass(attend, hidden, None, {})


def _run(
    runner: ModelRunner, inputs: ModelInputs, pieces: Sequence[slice], plans: Sequence[StepPlans], *, whole: bool
) -> torch.Tensor:
    """Run one piece after the other."""
    return torch.cat([runner.model.forward(*each) for each in _arguments(runner, inputs, pieces, plans, whole=whole)])


def _overlapped(
    runner: ModelRunner,
    inputs: ModelInputs,
    pieces: Sequence[slice],
    plans: Sequence[StepPlans],
    *,
    whole: bool,
    count: int,
) -> torch.Tensor:
    """Run the pieces at once, and as many without tokens that there are `count`."""
    given = [*_arguments(runner, inputs, pieces, plans, whole=whole)] + [None] * (count - len(pieces))
    hidden = runner.model.forward_pieces(given)  # type: ignore[attr-defined]
    return torch.cat([one for one in hidden if one is not None])


def _arguments(
    runner: ModelRunner, inputs: ModelInputs, pieces: Sequence[slice], plans: Sequence[StepPlans], *, whole: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each piece's forward pass."""
    token_ids = runner.token_ids(inputs)
    for piece, own in zip(pieces, plans, strict=True):
        there = places_in(inputs.logits_indices_cpu, piece)
        wanted = None if whole else inputs.logits_indices[there] - piece.start
        some = () if inputs.embeds is None else (inputs.embeds[piece],)
        yield token_ids[piece], inputs.positions[piece], PieceAttention(runner.router, own), wanted, *some


class PieceAttention:
    """Attention callable of a piece, whose plans come into force with each call.

    It implements `slotline.registry.contracts.model_family.StoringAttend`.
    """

    def __init__(self, router: AttentionDispatcher, plans: StepPlans) -> None:
        self._router, self._plans = router, plans
        self._attend: Any = router.bind_plans(plans)

    def __call__(self, layer: AttentionLayer, *given: Any, **said: Any) -> torch.Tensor:
        """See `DispatchedAttention.__call__`."""
        self._router.step = self._plans
        out: torch.Tensor = self._attend(layer, *given, **said)
        return out

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """See `slotline.registry.contracts.model_family.StoringAttend.takes_wanted`."""
        self._router.step = self._plans
        found: bool = self._attend.takes_wanted(layer)
        return found

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """See `slotline.registry.contracts.model_family.StoringAttend.slots`."""
        self._router.step = self._plans
        found: CacheSlots | None = self._attend.slots(layer, key)
        return found
