"""Features that work although they are not declared."""

from __future__ import annotations

import torch

from slotline.conformance.kv_spec.pages import bound, where
from slotline.conformance.kv_spec.prefixes import chain, compare, pool_of
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Family, Level, Run, check
from slotline.testing.environments.kv_spec import (
    Group,
    block_sizes,
    build_group,
    context_of,
    element_bytes,
    group_cases,
    memory_cases,
)
from slotline.testing.subject import Subject


@check(
    Kind.KV_SPEC,
    "kv_spec.underdeclared.prefix_caching",
    Level.NUMERICS,
    needs={"prefix_caching": True},
    cases=group_cases,
    family=Family.UNDERDECLARED,
)
def prefix_caching(run: Run) -> None:
    """Finds cached prefixes, though prefix caching is not declared."""
    group, rng = build_group(run), run.rng
    hashes = chain(rng, 4)
    pool = pool_of(hashes, [True] * 4, rng)
    compare(group, hashes, pool)
    if not group.spec.prefix_hit(hashes, pool.get):
        raise Failed("finds no prefix")


def _splits(subject: Subject) -> list[dict[str, int]]:
    return [{"block_size": size, "kernel_block_size": 1} for size in block_sizes(subject) if size > 1]


@check(
    Kind.KV_SPEC,
    "kv_spec.underdeclared.splittable",
    Level.NUMERICS,
    needs={"splittable": True},
    cases=_splits,
    family=Family.UNDERDECLARED,
)
def splittable(run: Run) -> None:
    """Binds blocks that are split into kernel blocks, though that is not declared."""
    context = context_of(run)
    group = Group(run.subject.build(context), context, exact=False)
    layer = group.layers[0]
    raw = torch.zeros(3 * group.spec.page_bytes(layer), dtype=torch.uint8, device=run.subject.device.type)
    found = tuple(group.spec.bind(raw, layer, 3).key.shape)
    wanted = (3 * group.ratio, 1, layer.num_kv_heads, layer.head_size)
    if found != wanted:
        raise Failed(f"key has shape {found}, wanted {wanted}")


@check(
    Kind.KV_SPEC,
    "kv_spec.underdeclared.one_piece",
    Level.NUMERICS,
    cases=memory_cases,
    family=Family.UNDERDECLARED,
)
def one_piece(run: Run) -> None:
    """A block is one piece of memory that could be copied at once, which the contract does not require."""
    for group, layer, raw, cache in bound(run):
        page = group.spec.page_bytes(layer)
        for name, view in (("key", cache.key), ("value", cache.value)):
            owners = element_bytes(view, raw).flatten(1) // page
            wanted = torch.arange(view.shape[0])[:, None] // group.ratio
            wrong = (owners != wanted).any(dim=1).nonzero().flatten().tolist()
            if wrong:
                found = int(owners[wrong[0]].max())
                raise Failed(
                    f"{where(layer, name)}: kernel block {wrong[0]} is part of block {wrong[0] // group.ratio} and has "
                    f"bytes in page {found}, where a page is {page} bytes"
                )
