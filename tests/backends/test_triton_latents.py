"""The Triton kernels for latents under the interpreter: right on a CPU, in hostile surroundings."""

from __future__ import annotations

import sys
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


@pytest.fixture
def gluon_of_triton_3_5(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Triton whose Gluon has no products of the kind that single tokens need, as 3.5 has none."""
    from triton.experimental.gluon.language.nvidia import ampere

    monkeypatch.delattr(ampere, "mma_v2")
    monkeypatch.delitem(sys.modules, "slotline.kernels.gluon_compat", raising=False)
    hopper.why_no_gluon.cache_clear()
    yield
    hopper.why_no_gluon.cache_clear()


def explained(capability: tuple[int, int]) -> tuple[str, list[int]]:
    """What the backend says of itself on such a card, and the sizes of blocks of three latent layers there."""
    offer = probe(triton_backend.descriptor, evolve(GPU, compute_capability=capability))
    item, sizes = Candidate(descriptor=triton_backend.descriptor, version="1", capabilities=offer), []
    for heads, size in ((128, 576), (128, 320), (16, 576)):
        changes = {"num_heads": heads, "num_kv_heads": 1, "head_size": size, "head_size_v": size - 64, "mla": True}
        asked = request(layer(0, kv_kind="mla", **changes), device=evolve(GPU, compute_capability=capability))
        plan = negotiate(asked, [item], [spec("mla", kv_kinds=Set(("mla",)))])
        assert plan.block_size is not None
        sizes.append(plan.block_size)
    return offer.priority_reason, sizes


@pytest.mark.usefixtures("c_compiler")
def test_explain_says_where_hopper_s_own_kernels_serve() -> None:
    reason, sizes = explained((9, 0))
    assert "Hopper's own kernels for prompts, single tokens, and latents of 512 + 64" in reason
    assert sizes == [64, 16, 64]
    reason, sizes = explained((8, 0))
    assert "Hopper" not in reason
    assert sizes == [16, 16, 16]


@pytest.mark.usefixtures("c_compiler", "gluon_of_triton_3_5")
def test_explain_and_one_warning_name_the_kernels_that_triton_lacks_names_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason, sizes = explained((9, 0))
    assert sizes == [16, 16, 16]
    assert "latents of 512 + 64 are not used: triton" in reason
    assert "mma_v2" in reason
    assert "pip install 'triton>=3.6'" in reason
    assert "Hopper" not in explained((8, 0))[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    hopper._warn.cache_clear()
    assert not any(hopper.device_has_hopper_kernels("cuda:0") for _ in range(3))
    (message,) = [record.getMessage() for record in caplog.records if "Hopper" in record.getMessage()]
    assert "mma_v2" in message
    assert "prompts, single tokens" in message


@pytest.mark.parametrize("changes", [{}, {"num_heads": 20, "dtype": torch.float16}])
@pytest.mark.parametrize("own", [False, True])
def test_nodes_of_a_tree_see_the_known_tokens_and_their_own_path(own: bool, changes: dict[str, Any]) -> None:
    tree, bushy = (-1, 0, 1, -1, 3, 0, 4, 3), (-1, -1, -1, 0, 2, 4, 4, 1)
    requests, nodes = ((1, 17), (1, 49), (9, 140), (5, 5), (12, 60)), (0, 7, 8, 4, 8)
    trees: dict[str, Any] = {"request_parents": (tree, bushy, bushy, tree, bushy)} if own else {"parents": tree}
    world = World(Case(requests=requests, num_nodes=nodes, **{**LATENT, **changes, **trees}))
    world.check(*world.run(build(world.case.context())))


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
