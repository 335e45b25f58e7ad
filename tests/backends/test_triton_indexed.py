"""The Triton kernels for latents among which an index picks, under the interpreter, in hostile surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton import index_scores
from slotline.backends.triton.build import build
from slotline.backends.triton.indexed import TritonIndexed
from slotline.testing.environments.attention import Case
from slotline.testing.environments.attention_index import IndexedWorld, SharingWorld

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of log2(0), which is minus infinity here
]

BATCHES = {
    "decode": ((1, 33), (1, 1), (0, 9), (1, 16), (0, 0), (1, 17), (1, 300)),
    "prefill": ((40, 40), (0, 0), (17, 17), (3, 3)),
    "mixed": ((1, 33), (1, 90), (0, 12), (5, 40), (20, 61)),
    "verify": ((5, 37), (5, 5), (0, 8), (5, 101), (3, 64)),
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"dtype": torch.float16},
    "float32": {},
    "no power of two": {
        "head_size": 36,
        "head_size_v": 24,
        "num_heads": 5,
        "index_heads": 3,
        "index_size": 20,
        "index_topk": 19,
        "dtype": torch.float16,
    },
    "many heads": {"block_size": 64, "num_heads": 20, "index_heads": 20, "dtype": torch.float16, "index_topk": 70},
    "one key": {"index_topk": 1},
    "equal scores": {"index_amplitude": 0.0, "index_topk": 20},
}
INDEXED: dict[str, Any] = {
    "mla": True,
    "num_kv_heads": 1,
    "num_heads": 6,
    "head_size": 40,
    "head_size_v": 32,
    "index_topk": 12,
    "cache_format": "latent_index",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.spread(13, slow=0)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernels_agree_with_the_oracle(batch: str, shape: str) -> None:
    world = IndexedWorld(Case(requests=BATCHES[batch], **{**INDEXED, **SHAPES[shape]}))
    backend = build(world.case.context())
    assert isinstance(backend, TritonIndexed)
    world.check(*world.run(backend))


@pytest.mark.spread(3, slow=1)
@pytest.mark.parametrize("amplitude", [1.0, 0.0])
@pytest.mark.parametrize("tile", [8, 32, 128])
def test_the_best_of_tiles_are_listed_and_picked_among(
    tile: int, amplitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scores, "PICK_TILE", tile)
    requests = ((1, 33), (1, 500), (1, 1), (1, 129), (3, 400), (2, 12))
    world = IndexedWorld(Case(requests=requests, **INDEXED, index_amplitude=amplitude))
    world.check(*world.run(build(world.case.context())))


@pytest.mark.parametrize("rows", [1, 20])
def test_scores_are_made_in_pieces_where_memory_is_short(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_scores, "MOST_BYTES", 4 * 128 * rows)
    case = Case(requests=BATCHES["mixed"], **INDEXED)
    context = evolve(case.context(), max_model_len=128, max_tokens=64)
    room = index_scores.workspace(context)
    assert room == 4 * 128 * rows
    for memory in (None, torch.zeros(room, dtype=torch.uint8)):
        world = IndexedWorld(case)
        backend = build(evolve(context, workspace=memory))
        world.check(*world.run(backend))
        assert memory is None or memory.any()


def test_a_layer_uses_the_picks_of_an_earlier_one() -> None:
    case = Case(requests=BATCHES["mixed"], **INDEXED)
    first, second = IndexedWorld(case), SharingWorld(case)
    backend = build(evolve(case.context(), layers=(first.layer, second.layer)))
    plan = backend.plan(first.batch)
    first.check(*first.step(backend, plan))
    second.check(*second.step(backend, plan))


PARENTS = (-1, 0, 1, -1, 3, 0, 4, 3)
BUSHY = (-1, -1, -1, 0, 2, 4, 4, 1)
VERIFIED = (((1, 17), 0), ((1, 49), 7), ((9, 40), 8), ((5, 5), 4), ((12, 60), 8), ((9, 9), 8), ((2, 30), 5))
"""Requests and their nodes, of which the first may be in the cache already."""


@pytest.mark.parametrize(
    ("trees", "most", "tile"),
    [("one", 12, None), ("own", 45, None), ("own", 12, 32), ("one", 45, 32), ("own", 1, None)],
)
def test_nodes_of_a_tree_pick_among_their_path(
    trees: str, most: int, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(index_scores, "PICK_TILE", tile)
    requests, nodes = zip(*VERIFIED, strict=True)
    tree = {"parents": PARENTS} if trees == "one" else {"request_parents": (PARENTS, BUSHY) * 3 + (BUSHY,)}
    case = Case(requests=requests, num_nodes=nodes, **{**INDEXED, **tree, "index_topk": most})
    first, second = IndexedWorld(case), SharingWorld(case)
    backend = build(evolve(case.context(), layers=(first.layer, second.layer)))
    plan = backend.plan(first.batch)
    first.check(*first.step(backend, plan))
    second.check(*second.step(backend, plan))
