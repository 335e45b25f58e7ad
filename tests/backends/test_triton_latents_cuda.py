"""The kernels for latents on a GPU in DeepSeek's own sizes, which Hopper has a kernel of its own for.

Compared with the torch backend on the same GPU, which the suite holds against float64: the suite's own oracle spreads
the keys over 128 heads and would take minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from slotline.backends.torch_sdpa.backend import TorchBackend
from slotline.backends.triton.latents import TritonLatents
from slotline.kernels.gluon_support import has_hopper_kernels
from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_graphs import CapturedStep, GraphPool, cuda_graph
from slotline.testing.environments.attention_variants import redrawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCHES = {
    "decode": ((1, 33), (1, 1), (0, 9), (1, 64), (0, 0), (1, 65), (1, 300)),
    "long": ((1, 5000), (1, 63), (1, 1025)),
    "many": ((1, 700),) * 70,
    "verify": ((4, 37), (4, 4), (4, 64), (4, 901)),
    "mixed": ((1, 33), (1, 90), (0, 12), (5, 40), (150, 150), (33, 161)),
    "prefill": ((400, 400), (0, 0), (17, 17), (129, 600)),
}
DEEPSEEK: dict[str, Any] = {
    "mla": True,
    "num_kv_heads": 1,
    "head_size": 576,
    "head_size_v": 512,
    "block_size": 64,
    "scale": 192**-0.5,
    "dtype": torch.bfloat16,
}


def same(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Each row of the output is right to a rounding of probabilities and values in bfloat16, and so is the LSE."""
    out, exact = found[0].float(), wanted[0].float()
    worst = (out - exact).norm(dim=2) / exact.norm(dim=2).clamp_min(1e-3)
    assert float(worst.max()) < 0.02
    torch.testing.assert_close(found[1], wanted[1], atol=5e-3, rtol=0)


@pytest.mark.parametrize("surroundings", ["a row's distance", "blocks apart", "blocks of 16", "blocks of 128"])
@pytest.mark.parametrize("heads", [16, 128, 40])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_kernels_agree_with_the_oracle(batch: str, heads: int, surroundings: str) -> None:
    changes = {
        "a row's distance": {"strided": False},
        "blocks apart": {"strided": True},  # which no row's distance divides
        "blocks of 16": {"strided": False, "block_size": 16},
        "blocks of 128": {"strided": False, "block_size": 128},
    }[surroundings]
    world = World(Case(requests=BATCHES[batch], **{**DEEPSEEK, "num_heads": heads, **changes}), "cuda")
    backend = TritonLatents(world.case.context("cuda"))
    for made in (world, redrawn(world)):
        same(made.run(backend), made.run(TorchBackend(world.case.context("cuda"))))


def test_hopper_has_a_kernel_of_its_own_for_these_sizes() -> None:
    if not has_hopper_kernels(torch.cuda.get_device_capability()):
        pytest.skip("not a Hopper GPU, or another release of Triton than the kernel is for")
    world = World(Case(requests=BATCHES["decode"], **{**DEEPSEEK, "num_heads": 128, "strided": False}), "cuda")
    backend = TritonLatents(world.case.context("cuda"))
    assert backend._hopper is not None
    world.run(backend)
    assert len(backend._hopper._rows) == 1  # it was launched
    assert not backend._hopper._launch.failed


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_follows_other_lengths_and_tables(heads: int, mixed: bool) -> None:
    case = Case(requests=((4, 500),), **{**DEEPSEEK, "num_heads": heads, "strided": False}, max_query_len=64)
    backend = TritonLatents(case.context("cuda"))
    pool = GraphPool(case, backend, num_blocks=40, longest=600, device="cuda")
    stage = CapturedStep(pool, 4, 4, mixed=mixed, record=cuda_graph)
    numbers = [pool.admit() for _ in range(4)]
    for number, length in zip(numbers, (5, 130, 64, 400), strict=True):
        grown = pool.prepare({number: length})
        grown.run(backend)
    for counts in ((4, 4, 4, 4), (4, 4, 4, 4)) if not mixed else ((1, 9, 3, 3), (1, 1, 1, 13), (16, 0, 0, 0)):
        chosen = {number: count for number, count in zip(numbers, counts, strict=True) if count}
        step = pool.prepare(chosen)
        out = stage.launch(step)[: step.batch.num_tokens]
        wanted, _ = step.run(TorchBackend(case.context("cuda")))
        worst = (out.float() - wanted.float()).norm(dim=2) / wanted.float().norm(dim=2)
        assert float(worst.max()) < 0.02, counts
