"""Build the cache specs and ask them for the pool's block size. Nothing is allocated here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slotline.planner.offers import Offers
from slotline.planner.spec_answers import wrong_answers
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import KVSpec, KVSpecContext
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ContractError
from slotline.registry.negotiation import CacheGroupPlan, Plan, PlanRequest, with_pool
from slotline.registry.negotiation.pages import (
    ALIGNMENT,
    LARGEST_SHARED_BLOCK,
    GroupPage,
    optimal_bytes,
    pages_apart,
    share_pages,
)


class SpecBuilder:
    """Builder of a cache group's spec, with the negotiated block size or another."""

    def __init__(
        self,
        loaded: LoadedConfig,
        registry: PluginRegistry,
        offers: Offers,
        kv_dtype: str,
        max_model_len: int,
        max_encoder_len: int = 0,
    ) -> None:
        self._loaded = loaded
        self._registry = registry
        self._offers = offers
        self._kv_dtype = kv_dtype
        self.max_model_len = max_model_len
        self.max_encoder_len = max_encoder_len

    def build(self, group: CacheGroupPlan, *, block_size: int, max_tokens_in_flight: int) -> KVSpec:
        """Build the group's spec for blocks of `block_size` tokens."""
        descriptor = self._offers[Kind.KV_SPEC, group.kv_spec]
        context = KVSpecContext(
            contract=group.contract,
            layers=group.layers,
            block_size=block_size,
            kernel_block_size=group.kernel_block_size,
            layout=group.layout,
            kv_dtype=self._kv_dtype,
            max_model_len=self.longest(group),
            max_tokens_in_flight=max_tokens_in_flight,
            format=group.format,
            options=self._registry.options(self._loaded, descriptor),
        )
        spec: KVSpec = self._registry.build(descriptor, context)
        with self._registry.built.naming():
            self._registry.fit(descriptor, "its spec", wrong_answers(spec, context))
        return spec

    def longest(self, group: CacheGroupPlan) -> int:
        """Return the most tokens that a request has in the group: its own, or an encoder's."""
        return self.max_encoder_len if of_encoder(group.layers) else self.max_model_len

    def pages(self, group: CacheGroupPlan) -> Iterator[GroupPage]:
        """Yield the blocks that the group could have: the negotiated size, then its multiples that the spec accepts."""
        offer = self._offers[Kind.KV_SPEC, group.kv_spec].capabilities
        yield self._page(group, group.block_size)
        if offer.splittable.refusal(True) is not None:
            return  # the kernels' block size was chosen for blocks of the negotiated size
        longest = min(LARGEST_SHARED_BLOCK, self.longest(group))
        for block_size in range(2 * group.block_size, longest + 1, group.block_size):
            if offer.block_sizes.refusal(block_size) is None:
                yield self._page(group, block_size)

    def can_share(self, group: CacheGroupPlan) -> bool:
        """Return True if the group's pages need not be contiguous."""
        offer = self._offers[Kind.KV_SPEC, group.kv_spec].capabilities
        return offer.page_stride.refusal(True) is None

    def _page(self, group: CacheGroupPlan, block_size: int) -> GroupPage:
        spec, length = self.build(group, block_size=block_size, max_tokens_in_flight=1), self.longest(group)
        ratio = block_size // group.kernel_block_size
        own = [checked_page_bytes(spec, layer, ratio, group.kv_spec) for layer in group.layers]
        return GroupPage(
            name=group.name,
            block_size=block_size,
            kernel_block_size=group.kernel_block_size,
            page_bytes=ratio * sum(aligned(size // ratio) for size in own),
            blocks=spec.max_blocks_held(),
            optimal_bytes=sum(
                optimal_bytes(layer, size, block_size, length) for layer, size in zip(group.layers, own, strict=True)
            ),
        )


def of_encoder(layers: Sequence[AttentionLayer]) -> bool:
    """Return True if a cache group's layers read an encoder's keys instead of the sequence's own."""
    return any(layer.attention_type == "cross" for layer in layers)


def plan_pool(plan: Plan, request: PlanRequest, builder: SpecBuilder) -> Plan:
    """Return the plan with a pool whose blocks serve all cache groups, if their specs can share them.

    Raises:
        NegotiationError: if the request is strict and the specs cannot share blocks.
        ContractError: if a spec's pages cannot be cut into kernel blocks.
    """
    groups = plan.cache_groups
    if not groups:
        return plan
    contiguous = tuple(dict.fromkeys(group.kv_spec for group in groups if not builder.can_share(group)))
    if len(groups) == 1 or contiguous:
        pool = pages_apart([next(builder.pages(group)) for group in groups], builder.max_model_len)
    else:
        pool = share_pages([tuple(builder.pages(group)) for group in groups], builder.max_model_len)
    return with_pool(plan, pool, request, contiguous)


def checked_page_bytes(spec: KVSpec, layer: AttentionLayer, ratio: int, name: str) -> int:
    """Return the bytes of a layer's page as the spec gives them, checked to hold `ratio` equal kernel blocks.

    Raises:
        ContractError: if the page cannot be divided into `ratio` kernel blocks.
    """
    size = spec.page_bytes(layer)
    if not isinstance(size, int) or size <= 0 or size % ratio:
        raise ContractError(
            f"kv_spec {name!r} says that a page of layer {layer.name!r} has {size!r} bytes, which cannot be "
            f"{ratio} equal kernel blocks",
            fix="tell the author of the plugin; name another kv_spec in cache.kv_spec until then",
        )
    return size


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of a layer's kernel blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
