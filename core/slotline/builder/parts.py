"""Built parts of an engine that the extensions of features start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen

from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.plugin_construction import build_plugin
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorPipeline, ProcessorSlot
from slotline.planner.plan import Planned
from slotline.registry.contracts import Communicator, KVSpec, Model
from slotline.registry.descriptor import Descriptor
from slotline.registry.output_checks import OutputChecks
from slotline.text.tokenizer import Tokenizer


@frozen(kw_only=True, eq=False)
class CacheMemory:
    """Memory of the caches, which exists after the profile.

    Attributes:
        specs: the spec of each cache group, for what this rank holds of its blocks.
        pages: memory of each layer that owns a cache, by its index. Empty if an extension allocates the caches.
        pool: its blocks, `num_blocks` with the null block.
    """

    specs: Sequence[KVSpec]
    pages: Mapping[int, torch.Tensor]
    pool: BlockPool

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""
        return self.pool.num_blocks


@frozen(kw_only=True, eq=False)
class Parts:
    """Parts that exist before the runner, in `ExtensionContext.parts`.

    Attributes:
        planned: the plan with its descriptors and facts.
        model: the loaded weights.
        rows: the request table.
        groups: block tables, by cache group.
        tokenizer: of the model, None if it has none.
        processors: the built logits processors.
        profiler: times the parts of a step.
        last_tokens: tokens of a step in flight, None if no step is prepared before they are known.
        stagings: for the copies of a step to the device of each stage.
        named: extensions that were built before, by name.
        checks: of the outputs of backends in steps of requests. None for no checks.
        router: attention over the caches, over one block while memory is measured. None before it is built.
        memory: of the caches, once it is there.
        context_group: joins the ranks that share the keys of requests. None if none does.
        communicators: of the groups of ranks that this one is in, by dimension.
        agree: gives the least of the ranks' numbers, of this one's.
        gather: gives the bytes of all ranks in order, of this one's. All give as many.
        of_stages: gives the values of all stages of a pipeline, in order, of this one's.
    """

    planned: Planned
    model: Model
    rows: RequestTable
    groups: tuple[CacheGroup, ...]
    tokenizer: Tokenizer | None
    processors: tuple[ProcessorSlot, ...]
    profiler: StepProfiler
    last_tokens: PlaceholderTokens | None
    stagings: tuple[TransferBuffer, ...]
    named: Mapping[str, Any]
    checks: OutputChecks | None = None
    router: AttentionDispatcher | None = None
    memory: CacheMemory | None = None
    context_group: Communicator | None = None
    communicators: Mapping[str, Communicator] = field(factory=dict)
    agree: Callable[[int], int] = int
    gather: Callable[[bytes], list[bytes]] = lambda value: [value]
    of_stages: Callable[[Any], list[Any]] = lambda value: [value]

    def outside_steps(self, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return one of the model's functions for calls outside of a step, see `FeatureExtension.outside_steps`."""
        for one in self.named.values():
            call = one.outside_steps(call) if hasattr(one, "outside_steps") else call
        return call

    def build(self, descriptor: Descriptor[Any], context: Any, fix: str) -> Any:
        """Build a plugin's object from its context, see `build_plugin`."""
        return build_plugin(self.planned.registry, descriptor, context, fix)


@frozen(kw_only=True, eq=False)
class StepParts:
    """Built parts that a step runs through.

    Attributes:
        parts: what they were built from.
        extensions: methods of the extensions.
        pipeline: the logits processors.
        gatherer: makes a step's inputs.
        runner: runs a step.
        graphs: captures and replays forward passes, None if the plan captures none.
    """

    parts: Parts
    extensions: Extensions
    pipeline: ProcessorPipeline
    gatherer: InputPreparer
    runner: ModelRunner
    graphs: GraphCapturer | None
