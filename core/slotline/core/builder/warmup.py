"""The steps before the first request: the largest that may come, a warm-up, and what compiles their kernels ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product

import torch
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs, even_split
from slotline.core.builder.lora import uses
from slotline.core.builder.plugin_construction import oom_as_capacity_error
from slotline.core.model_runner.graph_capture import Recorder, note_lacking
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.kernel_precompile_plan import draws, forwards, powers_of_two, record_launches
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.kernels import triton_precompile as compiling
from slotline.kernels.triton_support import has_triton
from slotline.planner.plan import Planned
from slotline.registry.contracts import Device

_LONG_PROMPT = 4096
"""Tokens of the longest made-up prompt of a warm-up: kernels for prompts may differ by their length."""


@frozen(eq=False)
class Warmup:
    """Makes steps up, runs them, and compiles what they and later ones launch."""

    planned: Planned
    gatherer: InputPreparer
    runner: ModelRunner

    @property
    def most_tokens(self) -> int:
        """Of a step; it holds no more than its requests have, however large its budget."""
        scheduler = self.planned.loaded.config.scheduler
        return min(scheduler.max_batched_tokens, scheduler.max_requests * self.planned.max_model_len)

    def largest(self, num_tokens: int) -> ModelInputs:
        """A step of so many tokens, by as many requests as there may be."""
        return self.gatherer.dummy(
            even_split(num_tokens, min(self.planned.loaded.config.scheduler.max_requests, num_tokens)),
            vocab_size=self.planned.facts.vocab_size,
            adapters=max(uses(self.planned)),
            beginning=self._overlaps,
        )

    def warm_up(self) -> None:
        """Run the shapes that a first request meets, so that nothing is compiled or tuned while it waits."""
        for inputs in self._warm_ups():
            with oom_as_capacity_error(f"a step of {inputs.num_tokens} tokens beside the cache", "lower cache.memory"):
                self.runner.run(inputs)
        self.runner.profiler.reset()

    def compile_forwards(self) -> None:
        """Compile several at a time what profile and warm-up will launch, where a forward pass can be captured."""
        if not self._may_be_recorded:
            return
        planned, missing = self.planned, compiling.MissingKernels()
        draw = draws(planned.loaded.config.scheduler.max_requests, planned.facts.vocab_size, planned.device)
        steps = self._forwards(chain(self._largest_only(), self._warm_ups()))
        note_lacking(chain((draw,), steps), missing, "profile and warm-up", replayed=False, device=self._device)
        _compile(missing, self.planned.device)

    def compile_ahead(self, graphs: GraphRunner | None) -> None:
        """Compile several at a time what captures and later steps will launch."""
        planned, missing = self.planned, compiling.MissingKernels()
        if not planned.stages.divided:
            dtype, most = getattr(torch, planned.plan.dtype), planned.loaded.config.scheduler.max_batched_tokens
            record_launches(self.runner.router, self.gatherer, dtype, most, missing, self._device)
        if self._may_be_recorded:
            note_lacking(self._forwards(self._prompts()), missing, "prompts", replayed=False, device=self._device)
        if self.runner.pooling is None and has_triton():
            from slotline.core.sampling.triton_logits_ops import rehearse as rehearse_rows

            with compiling.leaving_out(missing):
                rehearse_rows(planned.facts.vocab_size, planned.device)
        if graphs is not None:
            graphs.note_lacking(missing)
        _compile(missing, self.planned.device)

    @property
    def _may_be_recorded(self) -> bool:
        """Whether a forward pass that no graph holds can be captured, as those of graphs are.

        Not with states, adapters, an encoder or weights elsewhere, whose work for such a step need not be capturable.
        """
        planned, facts = self.planned, self.planned.facts
        if not planned.plan.graphs.any_captured or planned.stages.divided or planned.loaded.config.offload_gib:
            return False
        states, adapters = planned.plan.state_groups, self.runner.adapters
        return not states and adapters is None and not facts.modalities and not facts.max_encoder_len

    def _forwards(self, steps: Iterator[ModelInputs]) -> Iterator[Callable[[Recorder], object]]:
        """The forward passes of steps, without attention that cannot be captured."""
        broken = {group.name for group in self.runner.router.groups if not group.any_captured}
        return forwards(self.runner, steps, broken)

    @property
    def _overlaps(self) -> bool:
        """Whether the host goes on while the device works, so that large made-up steps cost little."""
        return bool(self.planned.device_capabilities.streams.support)

    @property
    def _device(self) -> Device:
        return self.planned.hardware[self.planned.device]

    def _largest_only(self) -> Iterator[ModelInputs]:
        """The largest step, made up when it is taken."""
        yield self.largest(self.most_tokens)

    def _warm_ups(self) -> Iterator[ModelInputs]:
        """The steps of a warm-up, made up one by one."""
        sizes = (1, 16, _LONG_PROMPT) if self._overlaps else (1, 16)
        for adapters, size in product(uses(self.planned), sizes):
            yield self.gatherer.dummy([min(size, self._longest)], adapters=adapters)

    def _prompts(self) -> Iterator[ModelInputs]:
        """Prompts of every power of two, made up one by one: kernels of rows may differ by how many there are."""
        for size in powers_of_two(self._longest):
            yield self.gatherer.dummy([size])

    @property
    def _longest(self) -> int:
        """The most tokens of a request in a step."""
        return min(self.planned.max_model_len, self.planned.loaded.config.scheduler.max_batched_tokens)


def _compile(missing: compiling.MissingKernels, device: str) -> None:
    compiling.compile_all(missing, torch.device(device))
