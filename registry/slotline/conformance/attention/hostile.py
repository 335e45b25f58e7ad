"""Correct values in surroundings that expose wrong reads: pages, null block, garbage, empty rows, strides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import evolve

from slotline.conformance.attention.index import INDEX, NEEDS
from slotline.registry.contracts.cache_tensors import LATENT_INDEX
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention import BACKEND_THREADS, PLACES, threads
from slotline.testing.environments.attention_choice import (
    block_sizes,
    build,
    chosen,
    dtype_pairs,
    examine,
    head_sizes,
    layouts,
    need_query,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_cross import CROSS, cross_step
from slotline.testing.environments.attention_shapes import (
    SHAPES,
    Requests,
    chunk,
    decode,
    mixed,
    prefill,
    with_empty_rows,
)
from slotline.testing.environments.attention_variants import redrawn, share_prefix
from slotline.testing.subject import Subject

MOST_CACHE_BYTES = 160 << 20
"""The cache of a world with high block ids may take this much."""


def by_shape(subject: Subject) -> Iterable[Case]:
    """Return each kind of batch, with dtype pairs, layouts and features in turn. All combinations if exhaustive."""
    pairs, orders, shapes = dtype_pairs(subject), layouts(subject), list(SHAPES)
    if not pairs:
        raise NotApplicable("none of the declared dtype pairs is known to this torch")
    if subject.exhaustive:
        return [
            {"shape": shape, "dtype": dtype, "kv_dtype": kv_dtype, "layout": layout}
            for shape in shapes
            for dtype, kv_dtype in pairs
            for layout in orders
        ]
    rows = len(shapes) * max(len(orders), -(-len(pairs) // len(shapes)))
    return [
        {
            "shape": shapes[i % len(shapes)],
            "dtype": pairs[i % len(pairs)][0],
            "kv_dtype": pairs[i % len(pairs)][1],
            "layout": orders[(i // len(shapes) + i) % len(orders)],
        }
        for i in range(rows)
    ]


PARTS = ("query", "key", "table", "out")
"""Tensors whose strides are unusual, one at a time."""


def by_part(subject: Subject) -> Iterable[Case]:
    """Return each such tensor in decode and in chunks, and those of latents, with an index too, if declared."""
    kinds: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, PARTS)]
    if refusal(subject, {"mla": True}) is None:
        kinds.append(({"mla": True}, ("query", "out")))
    if refusal(subject, {**NEEDS, "cache_formats": LATENT_INDEX}) is None:
        kinds.append((INDEX, ("query", "table")))
    shapes = ("decode", "chunk")
    return [{"part": part, "shape": shape, **more} for more, parts in kinds for part in parts for shape in shapes]


@check(Kind.ATTENTION, "attention.hostile", Level.HOSTILE, cases=by_shape)
def hostile(run: Run) -> None:
    """Permuted blocks, NaN where nothing may be read, strided K and V, padded rows and empty requests, all at once."""
    shape = run["shape"]
    if shape != "decode":
        need_query(run.subject, 2)
    prove(run, chosen(run, lambda p: with_empty_rows(SHAPES[shape](p))), BACKEND_THREADS)


@check(
    Kind.ATTENTION,
    "attention.pages.unread",
    Level.HOSTILE,
    cases=lambda _: [{"place": place} for place in PLACES],
)
def unread(run: Run) -> None:
    """One place at a time holds NaN, so that a failure says which one is read although it must not be."""
    case = evolve(chosen(run, mixed), poisoned={run["place"]}, stale=False)
    prove(run, case)


@check(
    Kind.ATTENTION,
    "attention.inputs.strided",
    Level.HOSTILE,
    cases=lambda subject: [{"shape": shape, "layout": layout} for shape in SHAPES for layout in layouts(subject)[:1]],
)
def strided_inputs(run: Run) -> None:
    """Query, key and value are slices of wider tensors, each with its own offset and strides."""
    shape = run["shape"]
    if shape != "decode":
        need_query(run.subject, 2)
    prove(run, chosen(run, SHAPES[shape], merged=True))


@check(Kind.ATTENTION, "attention.pages.edges", Level.HOSTILE)
def page_edges(run: Run) -> None:
    """Lengths of p - 1, p and p + 1 tokens, of several pages, and prefixes that end with a page."""

    def requests(p: int) -> Requests:
        lengths = sorted({max(p - 1, 1), p, p + 1, max(2 * p - 1, 1), 2 * p, 2 * p + 1, 4 * p})
        return tuple((1, length) for length in lengths)

    def prefixes(p: int) -> Requests:
        return ((p, p), (p, 2 * p), (p + 1, 2 * p + 1), (3, 2 * p + 3), (2 * p, 3 * p), (max(p - 1, 1), 2 * p))

    prove(run, chosen(run, requests))
    prove(run, chosen(run, prefixes))


@check(Kind.ATTENTION, "attention.pages.many", Level.HOSTILE)
def many_pages(run: Run) -> None:
    """One request of very many pages, together with short ones."""
    prove(run, chosen(run, lambda p: ((1, 60 * p + 1), (1, 2), (1, p))))


@check(
    Kind.ATTENTION,
    "attention.pages.block_size",
    Level.HOSTILE,
    cases=lambda subject: [{"block_size": size} for size in block_sizes(subject)],
)
def each_block_size(run: Run) -> None:
    """Each declared kernel block size, or a few where any will do."""
    prove(run, chosen(run, lambda p: with_empty_rows(mixed(p))))


@check(
    Kind.ATTENTION,
    "attention.pages.layout",
    Level.HOSTILE,
    cases=lambda subject: [{"layout": layout, "strided": s} for layout in layouts(subject) for s in (False, True)],
)
def each_layout(run: Run) -> None:
    """Each declared layout, with K and V as tensors of their own and as views of one buffer with gaps."""
    prove(run, chosen(run, mixed))


@check(Kind.ATTENTION, "attention.pages.manager_block", Level.HOSTILE, cases=lambda _: [{"manager_blocks": 3}])
def manager_block(run: Run) -> None:
    """The manager's block holds several kernel blocks, and a backend counts in kernel blocks."""
    prove(run, chosen(run, mixed))


@check(
    Kind.ATTENTION,
    "attention.pages.high_ids",
    Level.HOSTILE,
    cases=lambda _: [{"first_block": n} for n in (120, 250, 32760, 65530)],
    cost=0.5,
)
def high_ids(run: Run) -> None:
    """Block ids beyond 127, 255, 32767 and 65535."""
    subject = run.subject
    case = chosen(
        run,
        lambda p: ((1, 12 * p + 1), (1, p), (3, 2 * p + 1)),
        head_size=min(head_sizes(subject)),
        block_size=min(block_sizes(subject)),
        num_kv_heads=1,
    )
    width = case.block_size * 2 * case.head_size * case.cache_dtype.itemsize
    if case.first_block * width > MOST_CACHE_BYTES:
        raise NotApplicable(f"a cache of {case.first_block} of the smallest declared blocks takes too much memory")
    prove(run, case)


@check(Kind.ATTENTION, "attention.pages.shared", Level.HOSTILE)
def shared_prefix(run: Run) -> None:
    """Requests that share the blocks of a prefix each see it."""
    made = world(run, chosen(run, lambda p: ((1, 3 * p + 2), (1, 3 * p + 5), (3, 4 * p), (1, 2 * p + 1))))
    share_prefix(made, 2 * made.case.block_size)
    examine(run, made)


@check(
    Kind.ATTENTION,
    "attention.window.freed",
    Level.HOSTILE,
    needs={"sliding_window": True},
    profile="window",
)
def freed_before_window(run: Run) -> None:
    """Blocks that lie before every query's window were freed: the table says null block there, which is never read."""

    def requests(p: int) -> Requests:
        return ((1, 6 * p + 3), (1, 3 * p), (4, 5 * p + 1), (p + 2, 6 * p), (1, 2))

    size = chosen(run, requests, window=1).block_size
    for window in (1, max(size // 2, 1), size, 2 * size + 1):
        prove(run, chosen(run, requests, window=window, block_size=size, freed_before_window=True))


@check(
    Kind.ATTENTION,
    "attention.features.hostile",
    Level.HOSTILE,
    cases=lambda subject: [
        {name: value, "shape": shape}
        for name, capability, value in (
            ("window", "sliding_window", 11),
            ("soft_cap", "soft_cap", 5.0),
            ("sinks", "sinks", True),
            ("head_size_v", "different_value_head", max(head_sizes(subject)[0] // 2, 1)),
        )
        if refusal(subject, {capability: True}) is None
        for shape in ("decode", "mixed")
    ],
)
def hostile_features(run: Run) -> None:
    """Each declared feature where a wrong read is punished."""
    prove(run, chosen(run, lambda p: with_empty_rows(SHAPES[run["shape"]](p))))


@check(Kind.ATTENTION, "attention.rows.empty", Level.HOSTILE)
def empty_rows(run: Run) -> None:
    """Requests without query tokens, or without any token, are at the front, in the middle and at the end."""
    for requests in (
        ((0, 7), (1, 9), (0, 0), (0, 30), (1, 20), (0, 1)),
        ((1, 9), (0, 4), (8, 8), (0, 0), (3, 20)),
        ((0, 0), (0, 0), (1, 1)),
    ):
        prove(run, chosen(run, requests))


@check(Kind.ATTENTION, "attention.rows.padding", Level.HOSTILE, cases=lambda _: [{"padding": n} for n in (1, 64)])
def padding(run: Run) -> None:
    """Rows after the last token hold NaN in the inputs. Their outputs are finite, and nothing else changes."""
    prove(run, chosen(run, decode))
    prove(run, chosen(run, prefill))


@check(Kind.ATTENTION, "attention.batch.empty", Level.HOSTILE)
def empty_batch(run: Run) -> None:
    """A batch in which no request has a query token is accepted."""
    prove(run, chosen(run, ((0, 0), (0, 7))))
    prove(run, chosen(run, ((0, 7),), padding=0))


@check(Kind.ATTENTION, "attention.encoder_only.hostile", Level.HOSTILE, needs={"attention_types": "encoder_only"})
def hostile_encoder(run: Run) -> None:
    """An encoder reads only its own new tokens: neither padding nor the contents of a cache."""
    prove(run, chosen(run, ((5, 5), (0, 0), (40, 40), (1, 1)), causal=False, attention_type="encoder_only"))


@check(Kind.ATTENTION, "attention.cross.hostile", Level.HOSTILE, needs={"attention_types": "cross"})
def cross(run: Run) -> None:
    """Cross-attention stores and reads only an encoder's keys: neither padding nor other contents of the cache."""
    for requests, beginning in CROSS:
        cross_step(run, chosen(run, requests, causal=False, attention_type="cross", beginning=beginning))


@check(Kind.ATTENTION, "attention.strides.parts", Level.HOSTILE, profile="mixed")
def parts_of_wider_tensors(run: Run) -> None:
    """query, key and value may be parts of one fused projection, and out a part of a wider tensor."""
    made = world(run, chosen(run, chunk, padding=0))
    case, layer = made.case, made.layer
    backend = build(run, case)
    tensors = made.new_tokens()
    fused = torch.cat([tensor.flatten(1) for tensor in tensors], 1)
    flat = fused.split([tensor[0].numel() for tensor in tensors], 1)
    query, key, value = (part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(flat, tensors, strict=True))
    wide = torch.full((len(query), case.num_heads * layer.head_size_v + 64), 7.0, dtype=case.dtype, device=query.device)
    out = wide[:, :-64].unflatten(1, (case.num_heads, layer.head_size_v))
    with threads(1):
        plan = backend.plan(made.batch)
        if not writes_cache(run):
            backend.write(layer, key, value, made.cache, plan)
        backend.forward(layer, query, key, value, made.cache, plan, out, made.sinks)
    made.check(out, run=run)
    if not bool((wide[:, -64:] == 7.0).all()):
        raise Failed("forward wrote beside out, which is a part of a wider tensor")


@check(
    Kind.ATTENTION,
    "attention.strides.any",
    Level.HOSTILE,
    cases=by_part,
    profile="mixed",
)
def any_strides(run: Run) -> None:
    """With any_strides: a query or a key expanded over heads, a table that is a slice, out by head and with gaps."""
    if not run.subject.capabilities.any_strides:
        raise NotApplicable("tokens and heads lie behind each other: any_strides is not declared")
    if run["shape"] != "decode":
        need_query(run.subject, 2)
    made = world(run, chosen(run, SHAPES[run["shape"]], padding=0))
    case, heads, part = made.case, made.layer.num_heads, run["part"]
    if part == "query":
        made.queries = [query[:, :1].expand(-1, heads, -1) for query in made.queries]
    if part == "key":
        made.keys = [key[:, :1].expand(-1, case.num_kv_heads, -1) for key in made.keys]
        for request in range(len(case.requests)):
            made.store(request)
    if part == "table":
        made.batch = evolve(made.batch, block_table=_slice_of(made.block_table))
    query, key, value = made.new_tokens()
    query = query[:, :1].clone().expand(-1, heads, -1) if part == "query" else query
    key = key[:, :1].clone().expand(-1, case.num_kv_heads, -1) if part == "key" else key
    wide = query.new_full((heads + 1, len(query) + 2, made.layer.head_size_v + 8), 7.0)
    inner = wide[1:, 1:-1, :-8]
    out = inner.transpose(0, 1) if part == "out" else query.new_empty(len(query), heads, made.layer.head_size_v)
    backend, more = build(run, case), made.inputs()
    with threads(1):
        plan = backend.plan(made.batch)
        if not writes_cache(run):
            backend.write(made.layer, key, value, made.cache, plan, **more)
        backend.forward(made.layer, query, key, value, made.cache, plan, out, made.sinks, **more)
    made.check(out, run=run)
    inner.fill_(7.0)
    if not bool((wide == 7.0).all()):
        raise Failed("forward wrote between the heads of out, or beside it")


def _slice_of(table: torch.Tensor) -> torch.Tensor:
    """Return a block table as a slice of columns of a wider one, which holds null blocks."""
    wide = table.new_zeros(table.shape[0] + 1, table.shape[1] + 7)
    inner = wide[1:, 5:-2]
    return inner.copy_(table)


@check(Kind.ATTENTION, "attention.layers.share_plan", Level.HOSTILE)
def layers_share_a_plan(run: Run) -> None:
    """One plan serves all layers of a group, each with its own cache and tokens, in any order."""
    first = world(run, chosen(run, mixed))
    second = redrawn(first, 1)
    backend = build(run, first.case, layers=2)
    with threads(1):
        plan = backend.plan(first.batch)
    for made in (first, second):
        out, _ = made.step(backend, plan, writes_cache(run))
        made.check(out, run=run)
