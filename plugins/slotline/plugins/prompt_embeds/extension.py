"""Extension of an engine that takes prompts of embeddings: their rows stand where tokens' embeddings would.

The prompt's token ids are zeros that only hold places. Its blocks are hashed with the bytes of its embeddings, so that
equal embeddings share cached prefixes. A step that computes some of them runs eagerly. The first stage of a pipeline
embeds, and the others only follow its schedule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from attrs import evolve

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.llm.prompt_embeds import as_prompt_embeds, refuse_unfinite
from slotline.plugins.prompt_embeds.refusals import prompt_readers, refuse_prompt_readers
from slotline.plugins.prompt_embeds.step_embeds import StepPromptEmbeds, embeds_of
from slotline.registry.contracts import ExtensionContext, Model
from slotline.registry.errors import ConfigError, RequestError

NAME = "prompt_embeds"


class PromptEmbedsExtension:
    """Embeddings of prompts, from the request to the forward pass."""

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        planned = parts.planned
        _refuse_adapted_embedding(parts)
        self._model: Model = parts.model
        self._rows, self._profiler = parts.rows, parts.profiler
        self._width, self._dtype = planned.facts.hidden_size, getattr(torch, planned.plan.dtype)
        self._device = planned.stages.stages[0].device  # that of the token embeddings
        self._embeds_here = planned.place.index("pipeline") == 0
        self._readers = prompt_readers(planned.processors)
        self._lengths = np.zeros(context.max_requests, np.int64)  # of each row's embeddings, 0 for a prompt of tokens

    def prepare_request(self, request: Request) -> None:
        """Check a prompt's embeddings and bring them into the model's dtype.

        Raises:
            RequestError: naming what is wrong with them.
        """
        given = request.inputs.get(NAME)
        if given is None:
            return
        embeds = as_prompt_embeds(given)
        if embeds.shape[1] != self._width:
            raise RequestError(
                f"prompt_embeds has rows of {embeds.shape[1]} numbers, and the model's hidden size is {self._width}",
                fix="compute them with this model's embedding",
            )
        if len(embeds) != len(request.prompt_token_ids):
            raise RequestError(
                f"prompt_embeds has {len(embeds)} rows for {len(request.prompt_token_ids)} tokens",
                fix="give as many token ids, which only hold places",
            )
        if embeds.dtype != self._dtype:
            embeds = embeds.to(self._dtype)
            refuse_unfinite(embeds)
        request.inputs[NAME] = embeds
        request.prompt_known, request.hash_extra = False, partial(_hash_extra, embeds)

    def validate(self, request: Request) -> None:
        """Refuse what cannot be known of such a prompt.

        Raises:
            RequestError: naming the parameter.
        """
        if request.inputs.get(NAME) is not None:
            refuse_prompt_readers(request.params, self._readers)

    def admit(self, request: Request) -> None:
        """Note the length of a prompt that has its row."""
        embeds = request.inputs.get(NAME)
        self._lengths[request.row] = 0 if embeds is None else len(embeds)

    def release(self, row: int) -> None:
        """Forget a row."""
        self._lengths[row] = 0

    def restore(self, requests: Sequence[Request]) -> None:
        """Note the lengths of the unfinished requests alone."""
        self._lengths[:] = 0
        for request in requests:
            if request.row >= 0:
                self.admit(request)

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Return a step, which runs eagerly if it computes embeddings of a prompt."""
        reads = (scheduled.num_computed < self._lengths[scheduled.rows]).any()
        return evolve(scheduled, eager=True) if reads else scheduled

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return a step's inputs with the embeddings that it computes."""
        counts = inputs.num_scheduled
        computed = inputs.seq_lens_cpu[: len(counts)] - counts
        places = np.flatnonzero(computed < self._lengths[inputs.rows]).tolist()
        if not places or inputs.made_up:
            return inputs
        prompts = [(place, self._rows.request(int(inputs.rows[place])).inputs[NAME]) for place in places]
        embeds = embeds_of(inputs, prompts, self._device) if self._embeds_here else None
        found = StepPromptEmbeds(embeds, partial(embeds_of, inputs, prompts, self._device, shift=1))
        return evolve(inputs, extras={**inputs.extras, NAME: found})

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass that begins with the prompts' embeddings in the places of their tokens."""

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            found: StepPromptEmbeds | None = inputs.extras.get(NAME)
            if found is not None and found.embeds is not None:
                with self._profiler.scope("forward"):
                    others = inputs.embeds
                    embed = self._model.embed if others is None else lambda _: others
                    inputs = evolve(inputs, embeds=found.embeds.merged(embed, runner.token_ids(inputs)))
            return forward(inputs, whole=whole)

        return compute


def _hash_extra(embeds: torch.Tensor, start: int, end: int) -> bytes:
    """Return bytes that tell the embeddings among the tokens [start, end) apart. Empty if there are none."""
    if start >= len(embeds):
        return b""
    return hashlib.sha256(embeds[start:end].view(torch.uint8).numpy().data).digest()


def _refuse_adapted_embedding(parts: Parts) -> None:
    """Refuse adapters of the input embedding, which are planned for steps of token ids.

    Raises:
        ConfigError: naming the module.
    """
    config = parts.planned.loaded.config.lora
    named = {path.rpartition(".")[2] for path in getattr(parts.model, "embeddings", {})} if config.name else set()
    if adapted := named.intersection(config.target_modules):
        raise ConfigError(
            f"lora.target_modules names the input embedding {min(adapted)!r} beside prompt_embeds = true",
            fix="leave it out, or set prompt_embeds = false",
        )
