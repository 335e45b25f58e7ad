"""The Triton kernels for latents under the interpreter: right on a CPU, in hostile surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from negotiation_cases import GPU, layer, request, spec

pytest.importorskip("triton")

from slotline.backends import triton as triton_backend
from slotline.backends.triton.build import build
from slotline.backends.triton.latents import MANY, TritonLatents
from slotline.kernels import gluon_support as hopper
from slotline.registry.capability import Set
from slotline.registry.errors import PluginError
from slotline.registry.negotiation import Candidate, negotiate
from slotline.registry.probing import probe
from slotline.testing.environments.attention import Case, World

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of log2(0), which is minus infinity here
]

BATCHES = {
    "decode": ((1, 33), (1, 1), (0, 9), (1, 16), (0, 0), (1, 17), (1, 300)),
    "prefill": ((40, 40), (0, 0), (17, 17), (3, 3)),
    "chunk with prefix": ((30, 70), (0, 21), (33, 48), (1, 65)),
    "mixed": ((1, 33), (1, 90), (0, 12), (5, 40), (20, 61)),
    "verify": ((5, 37), (5, 5), (0, 8), (5, 101), (3, 64)),
    "one long": ((1, 700),),
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"dtype": torch.float16},
    "float32": {},
    "no power of two": {"head_size": 36, "head_size_v": 24, "num_heads": 5, "dtype": torch.float16},
    "without positions": {"head_size": 24, "head_size_v": 24, "dtype": torch.float16},
    "tiles within a block": {"block_size": 64, "num_heads": 20, "dtype": torch.float16},
    "large scores": {"amplitude": 300.0, "dtype": torch.float16},
}
LATENT: dict[str, Any] = {"mla": True, "num_kv_heads": 1, "num_heads": 6, "head_size": 40, "head_size_v": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernels_agree_with_the_oracle(batch: str, shape: str) -> None:
    world = World(Case(requests=BATCHES[batch], **{**LATENT, **SHAPES[shape]}))
    backend = build(world.case.context())
    assert isinstance(backend, TritonLatents)
    world.check(*world.run(backend))


@pytest.mark.usefixtures("c_compiler")
def test_explain_says_where_hopper_s_own_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in Gluon, which changes with each release of Triton: it is used with the one that it was run with."""
    for release, capability, expected in (("3.6.0", (9, 0), True), ("3.9.0", (9, 0), False), ("3.6.0", (8, 0), False)):
        monkeypatch.setattr(hopper, "version", lambda _, release=release: release)
        offer = probe(triton_backend.descriptor, evolve(GPU, compute_capability=capability))
        assert ("Hopper's own kernel" in offer.priority_reason) == expected
        for heads, size in ((128, 576), (128, 320), (16, 576)):
            changes = {"num_heads": heads, "num_kv_heads": 1, "head_size": size, "head_size_v": size - 64, "mla": True}
            asked = request(layer(0, kv_kind="mla", **changes), device=evolve(GPU, compute_capability=capability))
            item = Candidate(descriptor=triton_backend.descriptor, version="1", capabilities=offer)
            plan = negotiate(asked, [item], [spec("mla", kv_kinds=Set(("mla",)))])
            assert plan.block_size == (64 if expected and size == 576 else 16)


def plan_of(requests: tuple[tuple[int, int], ...], num_heads: int) -> Any:
    world = World(Case(requests=requests, **{**LATENT, "num_heads": num_heads, "dtype": torch.float16}))
    return build(world.case.context()).plan(world.batch).launches


def test_few_long_requests_split_their_keys_and_many_do_not() -> None:
    (few,), (many,) = plan_of(((1, 4000),), 16), plan_of(((1, 64),) * 64, 16)
    assert (few.splits, few.single, many.splits) == (16, True, 1)


def test_rows_of_heads_and_tokens_share_blocks() -> None:
    (verify,) = plan_of(((4, 64),) * 8, 16)
    assert verify.shape == MANY  # 64 rows in one block
    assert verify.blocks == 8 * 4 * 16 // 64 + 8  # and room for one begun block each


def test_latents_beyond_shared_memory_are_refused_with_their_sizes() -> None:
    case = Case(requests=((1, 4),), **{**LATENT, "head_size": 576, "head_size_v": 448})
    with pytest.raises(PluginError, match="has 448 and 128"):
        build(case.context())
