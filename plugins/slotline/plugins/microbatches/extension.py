"""Extension of a plan with microbatches: it runs large steps piece after piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.model_runner.attention_dispatcher import StepPlans
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.plugins.microbatches.pieces import Microbatches, cut, places_in
from slotline.registry.contracts import ExtensionContext


class MicrobatchesExtension:
    """Forward pass in pieces.

    Attributes:
        rule: the steps that are cut, and their pieces.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        scheduler = parts.planned.loaded.config.scheduler
        self.rule = Microbatches(scheduler.microbatches, scheduler.microbatch_tokens)

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass that cuts large eager steps. Replays stay whole."""

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            if not runner.runs_eagerly(inputs):
                return forward(inputs, whole=whole)
            pieces = self.rule.pieces(inputs.num_tokens, inputs.num_padded_tokens)
            return _in_pieces(runner, inputs, pieces, whole=whole) if pieces else forward(inputs, whole=whole)

        return compute


def _in_pieces(runner: ModelRunner, inputs: ModelInputs, pieces: Sequence[slice], *, whole: bool) -> ComputedPass:
    """Plan all pieces, then run them: hidden states of the wanted tokens, or of all if `whole`."""
    with runner.profiler.scope("plan"):
        plans = [runner.router.plans([cut(batch, piece) for batch in inputs.batches]) for piece in pieces]
        attend = runner.router.bind_plans(plans[0])
        runner.plan_others(inputs)
    with runner.profiler.scope("forward"):
        hidden = _run(runner, inputs, pieces, plans, whole=whole)
    return ComputedPass(attend, hidden, None, {})


def _run(
    runner: ModelRunner, inputs: ModelInputs, pieces: Sequence[slice], plans: Sequence[StepPlans], *, whole: bool
) -> torch.Tensor:
    token_ids, hidden = runner.token_ids(inputs), []
    for piece, own in zip(pieces, plans, strict=True):
        there = places_in(inputs.logits_indices_cpu, piece)
        wanted = None if whole else inputs.logits_indices[there] - piece.start
        some = () if inputs.embeds is None else (inputs.embeds[piece],)
        attend = runner.router.bind_plans(own)
        hidden.append(runner.model.forward(token_ids[piece], inputs.positions[piece], attend, wanted, *some))
    return torch.cat(hidden)
