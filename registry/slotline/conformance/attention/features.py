"""Correct values of declared features: windows, soft caps, sinks, ALiBi, the LSE, other attention types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, Run, check
from slotline.testing.environments.attention_case import Case as AttentionCase
from slotline.testing.environments.attention_choice import (
    build,
    chosen,
    dtype_pairs,
    need_query,
    pairwise,
    prove,
    refusal,
    world,
    writes_cache,
)
from slotline.testing.environments.attention_cross import CROSS, cross_step
from slotline.testing.environments.attention_shapes import SHAPES, Requests
from slotline.testing.subject import Subject

FEATURES: dict[str, tuple[str, Any]] = {
    "window": ("sliding_window", 20),
    "soft_cap": ("soft_cap", 9.0),
    "sinks": ("sinks", True),
    "alibi": ("alibi", True),
}
"""Field of a case -> (capability, value in combinations)."""
WINDOW = {"sliding_window": True}


def by_shape(subject: Subject) -> Iterable[Case]:
    """Return each kind of batch, with the dtype pairs in turn."""
    pairs = dtype_pairs(subject) or (("float32", "float32"),)
    shapes = list(SHAPES)
    rows = max(len(pairs), len(shapes))
    return [
        {"shape": shapes[i % len(shapes)], "dtype": pairs[i % len(pairs)][0], "kv_dtype": pairs[i % len(pairs)][1]}
        for i in range(rows)
    ]


def _shape(run: Run) -> Any:
    shape = run["shape"]
    if shape != "decode":
        need_query(run.subject, 2)
    return SHAPES[shape]


@check(
    Kind.ATTENTION,
    "attention.window.inclusive",
    Level.NUMERICS,
    needs=WINDOW,
    cases=lambda _: [{"window": w, "length": w + d} for w in (1, 16, 20) for d in (-1, 0, 1) if w + d > 0],
    profile="window",
)
def window_inclusive(run: Run) -> None:
    """A window of W tokens shows W keys, the query's own included: lengths W - 1, W and W + 1."""
    length = run["length"]
    prove(run, chosen(run, ((1, length), (1, length), (min(5, length), length))).friendly())


@check(Kind.ATTENTION, "attention.window.batch", Level.NUMERICS, needs=WINDOW, cases=by_shape, profile="window")
def window_batch(run: Run) -> None:
    """A window in each kind of batch, with dtypes in turn."""
    prove(run, chosen(run, _shape(run), window=13).friendly())


@check(
    Kind.ATTENTION,
    "attention.window.pages",
    Level.NUMERICS,
    needs=WINDOW,
    cases=lambda _: [{"pages": n, "off": off} for n in (1, 2) for off in (-1, 0, 1)],
    profile="window",
)
def window_pages(run: Run) -> None:
    """Windows of about one and two pages, for lengths at which they begin at, before and after the edge of a page."""

    def requests(p: int) -> Requests:
        return (*((1, 3 * p + d) for d in (-1, 0, 1, 2)), (5, 4 * p + 2), (p + 1, 3 * p + 1))

    size = chosen(run, requests, window=1).block_size
    window = max(1, run["pages"] * size + run["off"])
    prove(run, chosen(run, requests, window=window, block_size=size).friendly())


@check(
    Kind.ATTENTION,
    "attention.window.long",
    Level.NUMERICS,
    needs=WINDOW,
    profile="window",
)
def window_long(run: Run) -> None:
    """A window in a long context, where whole tiles of keys lie outside, and one that is longer than the context."""
    prove(run, chosen(run, ((1, 700), (1, 130), (20, 400), (150, 300)), window=129).friendly())
    prove(run, chosen(run, ((1, 70), (20, 90)), window=5000).friendly())


@check(Kind.ATTENTION, "attention.soft_cap", Level.NUMERICS, needs={"soft_cap": True}, cases=by_shape)
def soft_cap(run: Run) -> None:
    """Scores become cap * tanh(score / cap), before the mask."""
    prove(run, chosen(run, _shape(run), soft_cap=5.0, amplitude=6.0).friendly())


@check(Kind.ATTENTION, "attention.sinks", Level.NUMERICS, needs={"sinks": True}, cases=by_shape)
def sinks(run: Run) -> None:
    """A sink takes its share of the softmax, one logit per query head, and has no value."""
    prove(run, chosen(run, _shape(run), sinks=True).friendly())


@check(Kind.ATTENTION, "attention.alibi", Level.NUMERICS, needs={"alibi": True}, cases=by_shape)
def alibi(run: Run) -> None:
    """A score loses the head's slope for each token between query and key, by position, in each kind of batch."""
    prove(run, chosen(run, _shape(run), alibi=True).friendly())


@check(Kind.ATTENTION, "attention.position_bias", Level.NUMERICS, needs={"position_bias": True}, cases=by_shape)
def position_bias(run: Run) -> None:
    """A score gains the head's number for the distance to the key, the last number beyond, in each kind of batch."""
    prove(run, chosen(run, _shape(run), position_bias=True).friendly())


@check(Kind.ATTENTION, "attention.alibi.long", Level.NUMERICS, needs={"alibi": True})
def alibi_long(run: Run) -> None:
    """The same where distances reach the hundreds: the steep heads see a few keys, the flat ones all."""
    prove(run, chosen(run, ((1, 700), (1, 130), (20, 400), (150, 300)), alibi=True).friendly())


def combinations(subject: Subject) -> Iterable[Case]:
    """Return pairwise combinations of at least two declared features."""
    axes: dict[str, list[Any]] = {"shape": ["decode", "mixed"]}
    for name, (capability, value) in FEATURES.items():
        if refusal(subject, {capability: True}) is None:
            axes[name] = [value, False if value is True else None]
    rows = [{name: value for name, value in row.items() if value} for row in pairwise(axes)]
    together = [row for row in rows if len(row) > 2]
    if len(axes) > 2:
        everything = {name: values[0] for name, values in axes.items()}
        together += [row for row in ({**everything, "shape": "mixed"},) if row not in together]
    return together


@check(Kind.ATTENTION, "attention.features.together", Level.NUMERICS, cases=combinations)
def together(run: Run) -> None:
    """Windows, soft caps, sinks and ALiBi work together, but for the limits that are declared."""
    prove(run, chosen(run, _shape(run), amplitude=3.0).friendly())


def _lse(run: Run, **fields: Any) -> None:
    made = world(run, chosen(run, _shape(run), **fields).friendly())
    backend = build(run, made.case)
    out, lse = made.run(backend, writes_cache(run))
    if lse is None:
        raise Failed("forward returned no LSE, and the descriptor declares one")
    expected = (made.case.num_heads, made.batch.num_tokens)
    if tuple(lse.shape) != expected or str(lse.dtype) != "torch.float32":
        raise Failed(f"the LSE is {tuple(lse.shape)} {lse.dtype}, expected {expected} torch.float32")
    made.check(out, lse, run, base=run.subject.capabilities.lse_base)


@check(Kind.ATTENTION, "attention.lse", Level.NUMERICS, needs={"lse": True}, cases=by_shape)
def lse(run: Run) -> None:
    """The LSE is the log-sum-exp of the scores that a query sees, in the declared base."""
    _lse(run)


@check(Kind.ATTENTION, "attention.lse.scores", Level.NUMERICS, needs={"lse": True}, cases=combinations)
def lse_of_features(run: Run) -> None:
    """The LSE counts capped and biased scores, only what a window shows, and a sink as one more key."""
    _lse(run, amplitude=3.0)


@check(
    Kind.ATTENTION,
    "attention.encoder_only",
    Level.NUMERICS,
    needs={"attention_types": "encoder_only"},
    cases=lambda subject: [{"dtype": dtype, "kv_dtype": kv_dtype} for dtype, kv_dtype in dtype_pairs(subject)],
    profile="encoder",
)
def encoder_only(run: Run) -> None:
    """Each token of an encoder sees all tokens of its request, before and after it."""
    requests = ((5, 5), (0, 0), (40, 40), (1, 1))
    prove(run, chosen(run, requests, causal=False, attention_type="encoder_only").friendly())


@check(
    Kind.ATTENTION,
    "attention.encoder_only.window",
    Level.NUMERICS,
    needs={"attention_types": "encoder_only", "encoder_window": True},
    profile="encoder",
)
def encoder_window(run: Run) -> None:
    """Each token of an encoder with a window sees as many tokens before it as after it, within its request."""
    for window in (1, 4, 16):
        requests = ((5, 5), (0, 0), (40, 40), (1, 1))
        prove(run, chosen(run, requests, causal=False, attention_type="encoder_only", window=window).friendly())


@check(Kind.ATTENTION, "attention.cross", Level.NUMERICS, needs={"attention_types": "cross"}, profile="encoder")
def cross(run: Run) -> None:
    """Decoder queries see all of the encoder's keys, those that this step stores and those that another did."""
    for requests, beginning in CROSS:
        cross_step(run, chosen(run, requests, causal=False, attention_type="cross", beginning=beginning).friendly())


LOOKS_AHEAD = {"keys_ahead": True}
PICTURES = ((3, 40), (1, 25), (20, 20), (34, 50), (9, 9), (0, 12), (1, 1))
IMAGES = ((2, 4, 17), (3, 10, 30), (3, 31, 40), (3, 40, 48), (4, 0, 9))
"""Images of these requests: within the new tokens, with its first tokens in the cache, two side by side, a request."""


@check(
    Kind.ATTENTION,
    "attention.keys_ahead",
    Level.NUMERICS,
    needs=LOOKS_AHEAD,
    cases=lambda _: [{"window": window} for window in (None, 5, 16)],
    profile="window",
)
def keys_ahead(run: Run) -> None:
    """Tokens of an image see all of it and, with a window, not what lies before the window. Other tokens are causal."""
    need_query(run.subject, max(query_len for query_len, _ in PICTURES), **LOOKS_AHEAD)
    prove(run, chosen(run, PICTURES, keys_ahead=True, images=IMAGES).friendly())


@check(Kind.ATTENTION, "attention.keys_ahead.long", Level.NUMERICS, needs=LOOKS_AHEAD)
def keys_ahead_long(run: Run) -> None:
    """An image of hundreds of tokens, in the middle of a prompt that is larger than a kernel's tiles."""
    need_query(run.subject, 700, **LOOKS_AHEAD)
    prove(run, chosen(run, ((1, 90), (700, 760)), keys_ahead=True, images=((1, 130, 710),)).friendly())


@check(Kind.ATTENTION, "attention.keys_ahead.none", Level.NUMERICS, needs=LOOKS_AHEAD)
def keys_ahead_none(run: Run) -> None:
    """Steps without images are causal, in a layer that would heed them."""
    prove(run, chosen(run, PICTURES, keys_ahead=True).friendly())


@check(Kind.ATTENTION, "attention.keys_ahead.places", Level.HOSTILE, needs=LOOKS_AHEAD)
def keys_ahead_places(run: Run) -> None:
    """The same in pages in any order, with NaN wherever no token is, and blocks before the window freed."""
    need_query(run.subject, max(query_len for query_len, _ in PICTURES), **LOOKS_AHEAD)
    prove(run, chosen(run, PICTURES, keys_ahead=True, images=IMAGES))
    if refusal(run.subject, {**LOOKS_AHEAD, **WINDOW}) is None:
        prove(run, chosen(run, PICTURES, keys_ahead=True, images=IMAGES, window=5, freed_before_window=True))


PARENTS = (-1, 0, 1, -1, 3, 0, 4, 3)
NODES = (((9, 40), 8), ((1, 17), 0), ((5, 5), 4), ((12, 60), 8), ((20, 20), 0), ((1, 9), 0), ((7, 49), 6))
"""Query tokens and length of each request, and its nodes: with and without known tokens among the queries."""


def one_tree(run: Run, **features: Any) -> AttentionCase:
    """Return a case of requests with and without the nodes of a tree that is the same for all."""
    case = chosen(run, tuple(request for request, _ in NODES), **features)
    return evolve(case, parents=PARENTS, num_nodes=tuple(nodes for _, nodes in NODES))


@check(Kind.ATTENTION, "attention.tree_mask", Level.NUMERICS, needs={"tree_mask": True})
def tree_mask(run: Run) -> None:
    """Drafts in the form of a tree see only the known tokens and their ancestors, and other tokens see as usual."""
    prove(run, one_tree(run).friendly())


@check(
    Kind.ATTENTION,
    "attention.tree_mask.window",
    Level.NUMERICS,
    needs={"tree_mask": True, "sliding_window": True},
    cases=lambda _: [{"window": window} for window in (2, 3, 9)],
    profile="window",
)
def tree_mask_window(run: Run) -> None:
    """Among a tree's nodes a window counts places in a text, not in the cache: one shorter than the tree, too."""
    prove(run, one_tree(run, window=run["window"]).friendly())


@check(Kind.ATTENTION, "attention.tree_mask.alibi", Level.NUMERICS, needs={"tree_mask": True, "alibi": True})
def tree_mask_alibi(run: Run) -> None:
    """Among a tree's nodes ALiBi counts places in a text, not in the cache."""
    prove(run, one_tree(run, alibi=True).friendly())


@check(Kind.ATTENTION, "attention.tree_mask.places", Level.HOSTILE, needs={"tree_mask": True})
def tree_mask_places(run: Run) -> None:
    """The same in pages in any order, with NaN wherever no token is, and with requests in the opposite order."""
    for order in (NODES, NODES[::-1]):
        case = chosen(run, tuple(request for request, _ in order))
        prove(run, evolve(case, parents=PARENTS, num_nodes=tuple(nodes for _, nodes in order)))


TREES = {"tree_mask": True, "request_trees": True}
OWN_TREES = (
    (((9, 40), 8), PARENTS),
    (((1, 17), 0), PARENTS),
    (((5, 21), 8), (-1, -1, 0, 1, 2, 3, 0, 5)),
    (((12, 60), 6), (-1, 0, 0, 0, 1, 2, 3, 4)),
    (((2, 30), 5), (-1, -1, -1, 0, 2, 4, 4, 1)),
    (((1, 49), 7), (-1, 0, 1, 2, 3, 4, -1, 6)),
)
"""Requests and nodes as in `NODES`, each with its parents. Some queries begin after the first nodes."""


def own_trees(run: Run, trees: Sequence[Any] = OWN_TREES, **features: Any) -> AttentionCase:
    """Return a case of requests with a tree each."""
    case = chosen(run, tuple(request for (request, _), _ in trees), **features)
    nodes, parents = (tuple(nodes for (_, nodes), _ in trees), tuple(parents for _, parents in trees))
    return evolve(case, request_parents=parents, num_nodes=nodes)


@check(Kind.ATTENTION, "attention.request_trees", Level.NUMERICS, needs=TREES)
def request_trees(run: Run) -> None:
    """Each request has a tree of its own, of which the first nodes may be in the cache already."""
    prove(run, own_trees(run).friendly())


@check(
    Kind.ATTENTION,
    "attention.request_trees.window",
    Level.NUMERICS,
    needs={**TREES, "sliding_window": True},
    cases=lambda _: [{"window": window} for window in (2, 9)],
    profile="window",
)
def request_trees_window(run: Run) -> None:
    """A window counts places in a text, also from queries that begin in the middle of a tree."""
    prove(run, own_trees(run, OWN_TREES, window=run["window"]).friendly())


@check(Kind.ATTENTION, "attention.request_trees.places", Level.HOSTILE, needs=TREES)
def request_trees_places(run: Run) -> None:
    """The same in pages in any order, with NaN wherever no token is, and with requests in the opposite order."""
    for order in (OWN_TREES, OWN_TREES[::-1]):
        prove(run, own_trees(run, order))
