"""Record of the pool's division in a plan: block sizes, memory, and the cost of a downgrade."""

from __future__ import annotations

from attrs import evolve

from slotline.registry.negotiation.pages import PoolPlan
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note
from slotline.registry.negotiation.request import PlanRequest, Setting
from slotline.registry.negotiation.solve import hold_strictly


def with_pool(plan: Plan, pool: PoolPlan, request: PlanRequest, contiguous: tuple[str, ...] = ()) -> Plan:
    """Return the plan with the block sizes of `pool`.

    Args:
        plan: the plan.
        pool: the division of the pool's memory.
        request: the request of the plan.
        contiguous: the cache specs that cannot share blocks with other groups.

    Raises:
        NegotiationError: if the request is strict and memory is lost because blocks cannot be shared.
    """
    sizes = {page.name: page.block_size for page in pool.groups}
    found = evolve(
        plan,
        pool=pool,
        cache_groups=tuple(evolve(group, block_size=sizes[group.name]) for group in plan.cache_groups),
        groups=tuple(evolve(group, block_size=sizes.get(group.cache_group, group.block_size)) for group in plan.groups),
    )
    if not pool.shared:
        note = _apart(pool, contiguous)
        found = evolve(found, downgrades=(*found.downgrades, note))
        if request.strict:
            hold_strictly(found, request.allow)
    if len(set(sizes.values())) > 1:
        note = _unequal(plan, pool)
        settings = tuple(_resolved(s, note.resolved) if s.key == "cache.block_size" else s for s in found.settings)
        found = evolve(found, notes=(*found.notes, note), settings=settings)
    return found


def _apart(pool: PoolPlan, contiguous: tuple[str, ...]) -> Note:
    return Note(
        code="N332",
        key="cache.kv_spec",
        text=f"each block takes {pool.block_bytes} bytes, whichever group holds it; a request of {pool.max_model_len} "
        f"tokens takes {pool.bytes_per_request} bytes, of which {pool.optimal_bytes_per_request} are read",
        asked="auto",
        resolved="memory apart",
        because=tuple(f"{name}: its pages cannot lie apart in shared blocks (page_stride)" for name in contiguous),
    )


def _unequal(plan: Plan, pool: PoolPlan) -> Note:
    pages = [
        f"{group.name}: {len(group.layers)} layers, {pool.group(group.name).page_bytes} bytes in a block of "
        f"{pool.group(group.name).block_size} tokens"
        for group in plan.cache_groups
    ]
    return Note(
        code="N304",
        key="cache.block_size",
        text=f"a block is {pool.block_bytes} bytes in every group, and so not as many tokens",
        asked=str(plan.block_size),
        resolved=", ".join(f"{page.name} {page.block_size}" for page in pool.groups),
        because=tuple(pages),
    )


def _resolved(setting: Setting, text: str) -> Setting:
    return evolve(setting, resolved=text)
