"""Scheduler, cache and rows without a model: a step's tokens are whatever the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define, field

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.core.scheduler.integrity import check_integrity
from slotline.core.scheduler.scheduler import Scheduler
from slotline.plugins.kv_specs.full_cache import FullSpec
from slotline.plugins.multimodal.encoder_cache import EncoderCache
from slotline.plugins.multimodal.features import Feature
from slotline.plugins.multimodal.item_scheduler import ItemScheduler, StepItems
from slotline.plugins.schedulers import descriptors as policies
from slotline.registry.contracts import KVSpecContext, SchedulerPolicyContext
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.descriptor import Descriptor
from slotline.registry.loading import resolve_factory
from slotline.registry.policy_queue import BuiltPolicy


def request(name: str, prompt: list[int], arrival: int = 0, priority: int = 0, **params: object) -> Request:
    """A request that nobody has queued."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        arrival=arrival,
        priority=priority,
    )


def cache_of(
    num_blocks: int,
    *,
    block_size: int | tuple[int, ...] = 4,
    kernel_block_size: int | None = None,
    max_requests: int = 4,
    max_model_len: int = 32,
    prefix_caching: bool = True,
) -> KVCacheManager:
    """A cache with a group of full attention for each block size, and `num_blocks` usable blocks."""
    groups = []
    for index, size in enumerate((block_size,) if isinstance(block_size, int) else block_size):
        kernel = kernel_block_size or size
        context = KVSpecContext(
            contract=1,
            layers=(),
            block_size=size,
            kernel_block_size=kernel,
            layout="NHD",
            kv_dtype="float32",
            max_model_len=max_model_len,
        )
        groups.append(CacheGroup(index, FullSpec(context), size, kernel, max_requests, max_model_len))
    return KVCacheManager(BlockPool(num_blocks + 1), groups, prefix_caching=prefix_caching)


@define(eq=False)
class Bench:
    """A scheduler and what it schedules; `step` plays the model."""

    num_blocks: int = 16
    max_requests: int = 4
    max_model_len: int = 32
    max_batched_tokens: int = 16
    block_size: int | tuple[int, ...] = 4
    chunked_prefill: bool = True
    prefix_caching: bool = True
    encoder_cache: EncoderCache | None = None
    policy: Descriptor[Any] = policies.priority
    options: Any = None  # of the policy
    rows: RequestTable = field(init=False)
    cache: KVCacheManager = field(init=False)
    items: ItemScheduler | None = field(default=None, init=False)
    taken: StepItems = field(factory=StepItems, init=False)  # by the last step
    scheduler: Scheduler = field(init=False)
    arrivals: int = 0

    def __attrs_post_init__(self) -> None:
        self.rows = RequestTable(self.max_requests, self.max_model_len)
        self.cache = cache_of(
            self.num_blocks,
            block_size=self.block_size,
            max_requests=self.max_requests,
            max_model_len=self.max_model_len,
            prefix_caching=self.prefix_caching,
        )
        extensions = NO_EXTENSIONS
        if self.encoder_cache is not None:
            self.items = ItemScheduler(
                self.rows,
                self.encoder_cache,
                max_batched_tokens=self.max_batched_tokens,
                chunked_prefill=self.chunked_prefill,
                looks_ahead=False,
            )
            extensions = Extensions.of([("multimodal", "items", self.items)])
        self.scheduler = Scheduler(
            self.rows,
            self.cache,
            max_batched_tokens=self.max_batched_tokens,
            chunked_prefill=self.chunked_prefill,
            extensions=extensions,
            policy=self.built_policy(),
        )

    def built_policy(self) -> BuiltPolicy:
        """The policy, as the builder of an engine makes it."""
        context = SchedulerPolicyContext(
            contract=1,
            max_requests=self.max_requests,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            options=self.options,
        )
        made = resolve_factory(self.policy)(context)
        return BuiltPolicy(policy=made, capabilities=self.policy.capabilities, label=self.policy.name)

    def add(
        self,
        name: str,
        prompt: list[int] | int,
        *,
        priority: int = 0,
        features: tuple[Feature, ...] = (),
        inputs: dict[str, Any] | None = None,
        **params: object,
    ) -> Request:
        """Queue a request; a number stands for so many tokens of its own."""
        tokens = [1000 * (self.arrivals + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        made = request(name, tokens, self.arrivals, priority, **params)
        made.inputs |= {"features": features, **(inputs or {})}
        for prepare in self.scheduler.extensions.prepare_request:
            prepare(made)
        self.arrivals += 1
        self.scheduler.add(made)
        return made

    def step(self, sample: Callable[[Request], int] = lambda _: 7) -> SchedulerOutput:
        """Schedule, pretend to compute, append a token to each complete row; what is too long leaves."""
        schedule = self.scheduler.schedule()
        if self.items is not None:
            schedule, self.taken = self.items.take(schedule)
        rows = self.rows
        rows.num_computed_tokens[schedule.rows] += schedule.num_scheduled
        self.cache.commit(rows, schedule.rows, rows.num_computed_tokens[schedule.rows])
        complete = schedule.rows[rows.num_computed_tokens[schedule.rows] == rows.num_tokens[schedule.rows]]
        tokens = np.array([sample(rows.request(row)) for row in complete.tolist()], np.int32)
        rows.append(complete, tokens)
        done = complete[rows.num_tokens[complete] >= rows.length_limit[complete]]
        for row in done.tolist():
            rows.request(row).output_token_ids = rows.output_token_ids(row)
        if len(done):
            self.scheduler.remove_running([rows.request(row) for row in done.tolist()])
        self.check()
        return schedule

    def check(self) -> None:
        """Check what the integrity checker of an engine does."""
        check_integrity(self.scheduler)
        for check in self.scheduler.extensions.check:
            check()

    def encode(self) -> StepItems:
        """Run a step and return its items."""
        self.step()
        return self.taken

    def names(self, schedule: SchedulerOutput) -> list[str]:
        """The scheduled requests that still hold their row, in batch order."""
        found = (self.rows.requests[row] for row in schedule.rows.tolist())
        return [r.request_id for r in found if r is not None]
