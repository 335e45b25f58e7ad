"""Sizes behind powers of two, where tiles, masks and buffers end: shapes of a layer and batches of many sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attrs import evolve

from slotline.conformance.attention.cascade import CASCADE
from slotline.conformance.attention.scales import SCALED, SCALES, by_pair
from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_choice import (
    block_sizes,
    build,
    chosen,
    examine,
    need_query,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_cross import cross_step
from slotline.testing.environments.attention_shapes import Requests, with_empty_rows
from slotline.testing.environments.attention_sizes import (
    TILE,
    batch_of_pages,
    batch_of_shape,
    blocks,
    cut,
    friendly,
    long_world,
    needles,
    shapes,
)
from slotline.testing.environments.attention_variants import share_prefix
from slotline.testing.sizes import behind
from slotline.testing.subject import Subject

SIZES = "sizes"
MOST_REQUESTS, MOST_CHUNK, MOST_DRAFTS, MOST_ROWS, MOST_NODES, MOST_PADDING = 192, 520, 33, 1100, 65, 257
LONG = 1024
"""Lengths beyond this are split, tiled or looped over by every kernel."""
MOST_TOKENS = 70000
"""Tokens of the longest request that a check makes: enough for 257 pages of 256 tokens."""
TABLE_ENTRIES = (1025, 1100, 1536)


def by_size(name: str, maximum: int, start: int, *, whole: bool = False) -> Callable[[Subject], Iterable[Case]]:
    """Return cases with sizes behind powers of two, without the powers themselves unless `whole`."""

    def cases(subject: Subject) -> list[dict[str, Any]]:
        sizes = behind(maximum * (4 if subject.exhaustive else 1), start=start)
        return [{name: size} for size in sizes if whole or size & (size - 1)]

    return cases


@check(Kind.ATTENTION, "attention.sizes.shapes", Level.NUMERICS, cases=shapes, profile=SIZES, cost=0.6)
def shapes_of_layers(run: Run) -> None:
    """Many KV heads, groups to 16, heads of 72 to 384, pages to 256 tokens, in pairs: as many as the time allows."""
    prove(run, friendly(run, batch_of_shape, amplitude=2.0))


@check(
    Kind.ATTENTION,
    "attention.sizes.pages",
    Level.NUMERICS,
    cases=lambda subject: [{"block_size": size} for size in blocks(subject) if size > 32],
    profile=SIZES,
    cost=0.2,
)
def large_pages(run: Run) -> None:
    """Pages of more than 32, 64 and 128 tokens, those that are no power of two among them."""
    prove(run, friendly(run, batch_of_pages))


@check(
    Kind.ATTENTION,
    "attention.sizes.requests",
    Level.NUMERICS,
    cases=by_size("number", MOST_REQUESTS, 64),
    profile=SIZES,
    cost=0.3,
)
def many_requests(run: Run) -> None:
    """Batches of more than 64 and 128 requests: single tokens, and in every other size drafts among them."""
    number = run["number"]
    several = number % 2 == 0 and refusal(run.subject, {"query_len": 3}) is None
    prove(run, friendly(run, tuple((3 if several and i % 5 == 4 else 1, 3 + (7 * i) % 41) for i in range(number))))


@check(
    Kind.ATTENTION,
    "attention.sizes.chunk",
    Level.NUMERICS,
    cases=by_size("query_len", MOST_CHUNK, 256),
    profile=SIZES,
    cost=0.7,
)
def long_chunks(run: Run) -> None:
    """Chunks of more than 256 tokens after a prefix, between shorter ones."""
    (query_len,) = cut(run.subject, (run["query_len"],))
    requests = ((1, 9), (query_len, query_len + 53), (3, 70))
    prove(run, friendly(run, requests, num_kv_heads=1))


@check(
    Kind.ATTENTION,
    "attention.sizes.table",
    Level.NUMERICS,
    cases=lambda _: [{"query_len": 1}, {"query_len": 5}],
    profile=SIZES,
    cost=0.5,
)
def long_tables(run: Run) -> None:
    """Block tables of more than 1,024 entries, of the smallest declared page."""
    (query_len,) = cut(run.subject, (run["query_len"],))
    size = min(block_sizes(run.subject))
    entries = [n for n in TABLE_ENTRIES if n * size <= MOST_TOKENS] or [MOST_TOKENS // size]
    lengths = [n * size - offset for offset, n in enumerate(entries)]
    requests = tuple((query_len, max(length, query_len)) for length in (lengths[0], 3, *lengths[1:]))
    needles(run, long_world(run, requests, block_size=size))


@check(
    Kind.ATTENTION,
    "attention.sizes.length",
    Level.NUMERICS,
    cases=lambda subject: [
        {"query_len": query_len, "first": first}
        for first in ((*behind(8 * LONG, start=LONG),) if subject.exhaustive else (LONG,))
        for query_len in (1, 17)
    ],
    profile=SIZES,
    cost=0.5,
)
def long_lengths(run: Run) -> None:
    """Lengths beyond 1,024 with every remainder of a tile of 64, and with some for several query tokens."""
    first, (query_len,) = run["first"], cut(run.subject, (run["query_len"],))
    remainders = range(64) if query_len == 1 else (0, 15, 31, 36, 62)
    lengths = [first + 1 + each + TILE * (each % 2) for each in remainders]
    needles(run, long_world(run, tuple((query_len, length) for length in lengths), num_kv_heads=1))


@check(
    Kind.ATTENTION,
    "attention.sizes.drafts",
    Level.NUMERICS,
    cases=by_size("query_len", MOST_DRAFTS, 4),
    profile=SIZES,
)
def many_drafts(run: Run) -> None:
    """More than 4, 8, 16 and 32 tokens of each request to verify."""
    (query_len,) = cut(run.subject, (run["query_len"],))
    requests = ((query_len, query_len + 37), (query_len, query_len), (query_len - 1, 70 + query_len), (1, 20))
    prove(run, friendly(run, requests))


@check(
    Kind.ATTENTION,
    "attention.sizes.rows",
    Level.NUMERICS,
    cases=by_size("number", MOST_ROWS, 128),
    profile=SIZES,
    cost=0.2,
)
def many_rows(run: Run) -> None:
    """More than 128, 256, 512 and 1,024 rows of a step, of prompts that are short by themselves."""
    (each,) = cut(run.subject, (37,)) if refusal(run.subject, {"query_len": 37}) is None else (1,)
    whole, rest = divmod(run["number"], each)
    requests = (*((each, each + index % 5) for index in range(whole)), *(((rest, rest + 3),) if rest else ()))
    if len(requests) > 256:
        raise NotApplicable(f"not declared: query len needs {run['number'] // 256 + 1} for so many rows")
    prove(run, friendly(run, requests))


@check(
    Kind.ATTENTION,
    "attention.sizes.window",
    Level.NUMERICS,
    needs={"sliding_window": True},
    cases=lambda subject: [{"window": n} for n in behind(1536, start=128)[1 :: 1 if subject.exhaustive else 3]],
    profile=SIZES,
    cost=0.2,
)
def wide_windows(run: Run) -> None:
    """Windows of more than 128 to more than 1,024 tokens, over requests that are a little longer or much."""
    window = run["window"]
    prove(run, friendly(run, ((1, window), (1, window + 1), (1, 2 * window + 5), (1, 3)), window=window))
    if refusal(run.subject, {"sliding_window": True, "query_len": 40}) is None:
        prove(run, friendly(run, ((40, window + 60), (7, window + 3)), window=window))


def by_feature(subject: Subject) -> Iterable[Case]:
    """Return the features that parts of a long context can get wrong, as far as they are declared."""
    rows: list[dict[str, Any]] = []
    if refusal(subject, {"lse": True}) is None:
        rows.append({"feature": "lse"})
    offers: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
        "soft_cap": {"soft_cap": 5.0, "amplitude": 6.0},
    }
    rows += [{"feature": name, **fields} for name, fields in offers.items() if refusal(subject, {name: True}) is None]
    if refusal(subject, SCALED) is None:
        rows += [{"feature": "kv_scales", **pair} for pair in list(by_pair(subject))[:2]]
    return rows


@check(Kind.ATTENTION, "attention.sizes.features", Level.NUMERICS, cases=by_feature, profile=SIZES, cost=0.3)
def features_of_long_contexts(run: Run) -> None:
    """Sinks, soft caps, ALiBi, scales and the LSE where a context of more than 1,024 keys is cut into parts."""
    fixed = {"kv_scales": SCALES["apart"]} if run["feature"] == "kv_scales" else {}
    batches: tuple[Requests, ...] = (((1, LONG + 1), (1, 3), (1, 1500)), ((5, LONG + 30), (3, 9)))
    for requests in batches:
        if requests[0][0] == 1 or refusal(run.subject, {"query_len": 5}) is None:
            made = long_world(run, requests, **fixed)
            backend = build(run, made.case)
            out, lse = made.run(backend, writes_cache(run))
            if run["feature"] == "lse" and lse is None:
                raise Failed("forward returned no LSE, and the descriptor declares one")
            declared = refusal(run.subject, {"lse": True}) is None
            made.check(out, lse if declared else None, run, base=run.subject.capabilities.lse_base)


@check(
    Kind.ATTENTION,
    "attention.sizes.tree",
    Level.NUMERICS,
    needs={"tree_mask": True},
    cases=by_size("nodes", MOST_NODES, 8),
    profile=SIZES,
)
def large_trees(run: Run) -> None:
    """Trees of more than 8, 16, 32 and 64 drafts, in which each node has two children."""
    (nodes,) = cut(run.subject, (run["nodes"],))
    parents = tuple((node - 1) // 2 if node else -1 for node in range(nodes))
    case = friendly(run, ((nodes, nodes + 40), (1, 17), (nodes, nodes)))
    prove(run, evolve(case, parents=parents, num_nodes=(nodes, 0, nodes)))


LATENT = {"mla": True}
LATENTS: dict[str, Callable[[int], Requests]] = {
    "length": lambda _: tuple((1, LONG + 1 + 3 * index) for index in range(16)),
    "chunk": lambda p: ((1, 9), (257, 257 + p + 3)),
    "requests": lambda _: tuple((1, 1 + (7 * index) % 41) for index in range(97)),
    "drafts": lambda _: ((17, 60), (9, 9), (12, 100)),
}


@check(
    Kind.ATTENTION,
    "attention.sizes.latents",
    Level.NUMERICS,
    needs=LATENT,
    cases=lambda _: [{**LATENT, "batch": name} for name in LATENTS],
    profile=SIZES,
    cost=0.3,
)
def latents(run: Run) -> None:
    """Latents of long requests, of long chunks, of many requests and of many drafts."""
    requests = LATENTS[run["batch"]]
    need_query(run.subject, max(query_len for query_len, _ in requests(16)), **LATENT)
    prove(run, friendly(run, requests))


@check(
    Kind.ATTENTION,
    "attention.sizes.cascade",
    Level.NUMERICS,
    needs=CASCADE,
    cases=lambda _: [{"length": length} for length in (LONG + 1, 1536)],
    profile=SIZES,
    cost=0.3,
)
def long_prefixes(run: Run) -> None:
    """A common prefix of more than 1,024 tokens, of small pages, for more than 32 requests."""
    size = min(block_sizes(run.subject))
    length = -(-run["length"] // size) * size
    made = world(run, chosen(run, tuple((1, length + 1 + index % 7) for index in range(33)), block_size=size))
    share_prefix(made, length, announced=True)
    examine(run, made)


@check(
    Kind.ATTENTION,
    "attention.sizes.encoder",
    Level.NUMERICS,
    needs={"attention_types": "encoder_only"},
    profile=SIZES,
    cost=0.5,
)
def long_texts(run: Run) -> None:
    """An encoder's texts of more than 512 tokens, and many at once."""
    need_query(run.subject, 513, attention_type="encoder_only")
    for requests in (((513, 513), (3, 3), (130, 130)), tuple((1 + index % 9,) * 2 for index in range(97))):
        prove(run, friendly(run, requests, causal=False, attention_type="encoder_only"))


@check(
    Kind.ATTENTION,
    "attention.sizes.cross",
    Level.NUMERICS,
    needs={"attention_types": "cross"},
    profile=SIZES,
    cost=0.3,
)
def long_encoded(run: Run) -> None:
    """An encoder's keys of more than 512 and 1,024 tokens, stored in this step and before."""
    for beginning in ((0, 2), ()):
        case = friendly(run, ((1, 513), (1, 5), (3, 1025)), causal=False, attention_type="cross", beginning=beginning)
        cross_step(run, case)


@check(Kind.ATTENTION, "attention.sizes.hostile", Level.HOSTILE, profile=SIZES, cost=0.5)
def hostile_sizes(run: Run) -> None:
    """More than 64 requests, lengths beyond 1,024 and many rows where a wrong read is punished."""
    several = refusal(run.subject, {"query_len": 19}) is None
    requests = tuple((1 + 18 * (several and index % 4 == 3), 19 + (11 * index) % 47) for index in range(65))
    prove(run, chosen(run, with_empty_rows((*requests, (1, LONG + 38), (1, LONG + 64)))))


@check(
    Kind.ATTENTION,
    "attention.sizes.padding",
    Level.HOSTILE,
    cases=by_size("padding", MOST_PADDING, 64),
    profile=SIZES,
)
def much_padding(run: Run) -> None:
    """More than 64, 128 and 256 padded rows, as of a step that was captured for a large batch."""
    prove(run, chosen(run, ((1, 40), (1, 3), (1, 17))))


@check(Kind.ATTENTION, "attention.sizes.reuse", Level.HOSTILE, profile=SIZES, cost=0.5)
def batches_of_all_sizes(run: Run) -> None:
    """One object serves 3, 65, 40, 70 and 5 requests: what was kept for more of them serves fewer."""
    backend = None
    for number, most in ((3, 1100), (65, 90), (40, 60), (70, 200), (5, 300)):
        made = world(run, chosen(run, tuple((1, 1 + (17 * index + number) % most) for index in range(number))))
        backend = build(run, made.case) if backend is None else backend
        examine(run, made, backend)
