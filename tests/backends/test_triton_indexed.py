"""The Triton kernels for latents among which an index picks, under the interpreter, in hostile surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

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
    "beyond a tile of counted scores": ((1, 1300),),
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernels_agree_with_the_oracle(batch: str, shape: str) -> None:
    world = IndexedWorld(Case(requests=BATCHES[batch], **{**INDEXED, **SHAPES[shape]}))
    backend = build(world.case.context())
    assert isinstance(backend, TritonIndexed)
    world.check(*world.run(backend))


def test_a_layer_uses_the_picks_of_an_earlier_one() -> None:
    case = Case(requests=BATCHES["mixed"], **INDEXED)
    first, second = IndexedWorld(case), SharingWorld(case)
    backend = build(evolve(case.context(), layers=(first.layer, second.layer)))
    plan = backend.plan(first.batch)
    first.check(*first.step(backend, plan))
    second.check(*second.step(backend, plan))
