"""Steps before the first request: the largest possible step, a warm-up, and the compilation of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product

import torch
from attrs import frozen

from slotline.builder.dry_runs import draws, forwards, rare_operations, record_launches
from slotline.builder.graph_capture import Recorder, note_lacking
from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.made_up import even_split, made_up_inputs, mixed_split
from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.device.torch_device import compiler_of
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.planner.plan import Planned
from slotline.registry.contracts import Device, KernelCompiler, MissingKernels

_LONG_PROMPT = 4096
"""Tokens of the longest made-up prompt of a warm-up: kernels for prompts may differ by their length."""


@frozen(eq=False)
class Warmup:
    """Makes up steps, runs them, and compiles the kernels that they and later steps launch."""

    planned: Planned
    gatherer: InputPreparer
    runner: ModelRunner

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step, at most those that its requests can have."""
        scheduler = self.planned.loaded.config.scheduler
        return min(scheduler.max_batched_tokens, scheduler.max_requests * self.planned.max_model_len)

    def largest(self, num_tokens: int) -> ModelInputs:
        """Make up a step of `num_tokens` tokens with as many requests as possible."""
        return made_up_inputs(
            self.gatherer,
            even_split(num_tokens, min(self.planned.loaded.config.scheduler.max_requests, num_tokens)),
            vocab_size=self.planned.facts.vocab_size,
            variant=max(self._variants),
            beginning=self._overlaps,
        )

    def warm_up(self) -> None:
        """Run the shapes that a first request meets, so that nothing is compiled or tuned while it waits."""
        for inputs in self._warm_ups():
            with oom_as_capacity_error(f"a step of {inputs.num_tokens} tokens beside the cache", "lower cache.memory"):
                self.runner.run(inputs)
        self.runner.profiler.reset()

    @property
    def compiler(self) -> KernelCompiler | None:
        """The compiler of kernels of the device where tokens are sampled, None if it has none."""
        return compiler_of(self._device)

    def listen(self) -> None:
        """Have the compiler notice what is compiled, also by libraries that were loaded since the last call."""
        if (compiler := self.compiler) is not None:
            compiler.listen()

    def compile_forwards(self) -> None:
        """Compile the kernels of profile and warm-up, several at a time, if a forward pass can be captured."""
        if (compiler := self.compiler) is None or not self._may_be_recorded:
            return
        planned, missing = self.planned, MissingKernels()
        most_requests, vocab_size = planned.loaded.config.scheduler.max_requests, planned.facts.vocab_size
        draw = draws(most_requests, vocab_size, planned.device, self._device.ops)
        steps = self._forwards(chain(self._largest_only(), self._warm_ups()))
        note_lacking(chain((draw,), steps), missing, "profile and warm-up", replayed=False, device=self._device)
        compiler.compile_all(missing)

    def compile_ahead(self, graphs: GraphCapturer | None) -> None:
        """Compile the kernels of captures and later steps, several at a time."""
        if (compiler := self.compiler) is None:
            return
        planned, missing = self.planned, MissingKernels()
        if not planned.stages.divided:
            dtype, limits = getattr(torch, planned.plan.dtype), planned.loaded.config.scheduler
            steps = compiler.steps(limits.max_batched_tokens, limits.max_requests, planned.max_model_len)
            record_launches(self.runner.router, self.gatherer, dtype, steps, missing, self._device)
        if self._may_be_recorded:
            note_lacking(self._forwards(self._prompts()), missing, "prompts", replayed=False, device=self._device)
        if planned.task == "generate":
            with compiler.leaving_out(missing):
                rare_operations(planned.facts.vocab_size, planned.device, self._device.ops)
        if graphs is not None:
            graphs.note_lacking(missing)
        compiler.compile_all(missing)

    @property
    def _may_be_recorded(self) -> bool:
        """A forward pass outside of the graphs can be captured too.

        This is not so with states, an encoder, offloaded weights, or an extension that plans its own kernels. Their
        work for an eager step need not be capturable. Nor is an eager step of ranks with tokens of their own.
        """
        planned, facts = self.planned, self.planned.facts
        if planned.place.layout.data > 1:
            return False
        if not planned.plan.graphs.any_captured or planned.stages.divided or planned.loaded.config.offload_gib:
            return False
        eager = planned.plan.state_groups, self.runner.extensions.plan, facts.modalities, facts.max_encoder_len
        return not any(eager)

    def _forwards(self, steps: Iterator[ModelInputs]) -> Iterator[Callable[[Recorder], object]]:
        """Return the forward passes of steps, without attention that cannot be captured."""
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
        """Yield the largest step, made up when it is taken."""
        yield self.largest(self.most_tokens)

    def _warm_ups(self) -> Iterator[ModelInputs]:
        """Yield the steps of a warm-up, made up one by one."""
        sizes = (1, 16, _LONG_PROMPT) if self._overlaps else (1, 16)
        for variant, size in product(self._variants, sizes):
            yield made_up_inputs(self.gatherer, [min(size, self._longest)], variant=variant)
        lens = mixed_split(min(sizes[1], self._longest), self.planned.loaded.config.scheduler.max_requests)
        if len(lens) > 1:
            yield made_up_inputs(self.gatherer, lens)

    def _prompts(self) -> Iterator[ModelInputs]:
        """Yield prompts of every power of two, made up one by one.

        Kernels over rows may differ by the number of rows.
        """
        sizes = {1 << power for power in range(self._longest.bit_length())}
        for size in sorted({*sizes, self._longest}):
            yield made_up_inputs(self.gatherer, [size])

    @property
    def _variants(self) -> Sequence[int]:
        """The variants that a step may have, in ascending order."""
        return next((variants() for variants in self.runner.extensions.step_variants), (0,))

    @property
    def _longest(self) -> int:
        """The most tokens of a request in a step."""
        return min(self.planned.max_model_len, self.planned.loaded.config.scheduler.max_batched_tokens)
