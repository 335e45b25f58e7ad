"""Multi-head latent attention: keys that contain their values, one KV head for all query heads."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotline.conformance.attention.features import TREES, one_tree, own_trees
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import World
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    dtype_pairs,
    examine,
    group_sizes,
    latent_sizes,
    layouts,
    need_query,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_shapes import SHAPES, decode, mixed
from slotline.testing.environments.attention_variants import leave_stale_needles, redrawn
from slotline.testing.subject import Subject

LATENT = {"mla": True}
HEADS = (16, 5, 128)
"""Query heads that share a latent, besides the usual groups: DeepSeek-V2-Lite's, an odd number, DeepSeek-V3's."""
SCALES = (0.25, 8.0)
"""Of an eight-bit cache; the second is of values, which latents do not have."""


def by_pair(subject: Subject) -> Iterable[Case]:
    """Return each pair of dtypes that is declared together with latents, and layouts in turn."""
    pairs = [pair for pair in dtype_pairs(subject) if refusal(subject, {**LATENT, "dtypes": pair}) is None]
    orders = layouts(subject)
    return [
        {**LATENT, "dtype": dtype, "kv_dtype": kv_dtype, "layout": orders[i % len(orders)]}
        for i, (dtype, kv_dtype) in enumerate(pairs)
    ]


def by_pair_and_batch(subject: Subject) -> Iterable[Case]:
    """Return the same cases with each sort of batch."""
    return [{**case, "batch": name} for case in by_pair(subject) for name in SHAPES]


def by_shape(subject: Subject) -> Iterable[Case]:
    """Return declared sizes of a key, and numbers of heads."""
    groups = [size for size in (*HEADS, *group_sizes(subject)[:2]) if _has(subject, size)]
    sizes = latent_sizes(subject)
    return [
        {**LATENT, "head_size": sizes[i % len(sizes)], "group": groups[i % len(groups)]}
        for i in range(max(len(sizes), len(groups)))
    ]


def _has(subject: Subject, group: int) -> bool:
    return refusal(subject, {**LATENT, "group_sizes": group}) is None


@check(Kind.ATTENTION, "attention.mla", Level.NUMERICS, needs=LATENT, cases=by_pair_and_batch, profile="mixed")
def batches(run: Run) -> None:
    """A key's first numbers are its value, in decode, prefill, chunks, verification and all together."""
    if run["batch"] != "decode":
        need_query(run.subject, 2, **LATENT)
    prove(run, chosen(run, SHAPES[run["batch"]]).friendly())


@check(Kind.ATTENTION, "attention.mla.tree_mask", Level.NUMERICS, needs={**LATENT, "tree_mask": True})
def tree_mask(run: Run) -> None:
    """Drafts in the form of a tree see the latents of known tokens and of their ancestors, one tree or one each."""
    prove(run, one_tree(run, mla=True).friendly())
    if refusal(run.subject, {**LATENT, **TREES}) is None:
        prove(run, own_trees(run, mla=True))


@check(Kind.ATTENTION, "attention.mla.shapes", Level.NUMERICS, needs=LATENT, cases=by_shape)
def shapes(run: Run) -> None:
    """Sizes of the latent and of the part with positions, and any number of heads over them."""
    prove(run, chosen(run, mixed, amplitude=2.0).friendly())


@check(
    Kind.ATTENTION,
    "attention.mla.scale",
    Level.NUMERICS,
    needs=LATENT,
    cases=lambda _: [{**LATENT, "scale": 0.5}, {**LATENT, "scale": 0.02}],
)
def scale(run: Run) -> None:
    """The layer's own scale, which belongs to the expanded heads and not to the latent's size."""
    prove(run, chosen(run, mixed, amplitude=2.0).friendly())


@check(Kind.ATTENTION, "attention.mla.long", Level.NUMERICS, needs=LATENT, cases=by_pair)
def long(run: Run) -> None:
    """Long contexts, whose keys may be split, together with short ones."""
    prove(run, chosen(run, ((1, 1500), (1, 3), (1, 700))).friendly())


@check(Kind.ATTENTION, "attention.mla.scales", Level.NUMERICS, needs={**LATENT, "kv_scales": True}, cases=by_pair)
def scales(run: Run) -> None:
    """In an eight-bit cache the key's scale counts, for what is read as values too."""
    if getattr(torch, run["kv_dtype"]).itemsize > 1:
        raise NotApplicable("the cache is not of eight bits")
    prove(run, chosen(run, mixed, kv_scales=SCALES).friendly())


@check(Kind.ATTENTION, "attention.mla.hostile", Level.HOSTILE, needs=LATENT, cases=by_pair_and_batch)
def hostile(run: Run) -> None:
    """Each new latent is in its slot, no other byte changed, garbage is not read, and `out` keeps its bounds."""
    if run["batch"] != "decode":
        need_query(run.subject, 2, **LATENT)
    prove(run, chosen(run, SHAPES[run["batch"]]))


@check(Kind.ATTENTION, "attention.mla.latents_only", Level.HOSTILE, needs=LATENT, cases=by_pair)
def latents_only(run: Run) -> None:
    """`write` does not store `value`: what it is handed there may be anything."""
    made = _Valueless(chosen(run, mixed), run.subject.device.type)
    examine(run, made)


class _Valueless(World):
    """A world whose model hands over garbage as values."""

    def new_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = super().new_tokens()
        return query, key, torch.full_like(value, torch.nan)


@check(Kind.ATTENTION, "attention.mla.stale", Level.HOSTILE, needs=LATENT, cases=by_pair)
def stale(run: Run) -> None:
    """Latents of others, finite and large, in free blocks and after the end of a request are not seen."""
    made = world(run, chosen(run, decode, poisoned=()))
    leave_stale_needles(made)
    examine(run, made)


@check(Kind.ATTENTION, "attention.mla.layers", Level.STATEFUL, needs=LATENT)
def layers(run: Run) -> None:
    """Two layers under one plan, each with its own latents."""
    made = world(run, chosen(run, mixed, **LATENT))
    backend = build(run, made.case, layers=2)
    plan = backend.plan(made.batch)
    for each in (made, redrawn(made, index=1)):
        out, _ = each.step(backend, plan, writes_cache(run))
        each.check(out, run=run)
