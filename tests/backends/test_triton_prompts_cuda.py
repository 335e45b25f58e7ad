"""The kernel for prompts that begin in this step, compiled, against the suite's oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from slotline.backends.triton import backend as triton_backend
from slotline.backends.triton import prompts
from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.prompts import PromptAttention
from slotline.kernels.gluon_support import has_hopper_kernels
from slotline.testing.environments.attention import Case, World

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < prompts.COPY_ENGINE,
    reason="needs a GPU with a copy engine",
)

BATCHES = {
    "whole prompts": ((300, 300), (0, 0), (17, 17), (130, 130), (64, 64), (1, 1), (257, 257)),
    "behind decodes and a chunk": ((1, 33), (1, 300), (40, 90), (300, 300), (128, 128), (65, 65)),
}
CASES: dict[str, dict[str, Any]] = {
    "two to one": {"num_heads": 16, "num_kv_heads": 8},
    "heads of 64": {"num_heads": 8, "num_kv_heads": 2, "head_size": 64},
    "one to one, float16": {"num_heads": 4, "num_kv_heads": 4, "dtype": torch.float16},
    "seven to one": {"num_heads": 28, "num_kv_heads": 4},
    "sixty-four to one": {"num_heads": 64, "num_kv_heads": 1},
    "sinks": {"num_heads": 8, "num_kv_heads": 2, "sinks": True},
    "large scores": {"num_heads": 8, "num_kv_heads": 2, "amplitude": 300.0},
}


@pytest.fixture(params=["for Hopper", "for all"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel serves where both can."""
    if request.param == "for all":
        monkeypatch.setattr(prompts, "_hopper_kernel", lambda *_: None)
    elif not has_hopper_kernels(torch.cuda.get_device_capability()):
        pytest.skip("the kernel is for another GPU or another Triton")
    else:
        from slotline.backends.triton import prompt_hopper

        monkeypatch.setattr(prompt_hopper, "SHORT", 0)  # of short prompts, too
    return str(request.param)


def launched(backend: TritonBackend) -> bool:
    """Whether the kernel for Hopper was; what hands out its blocks must be ready for the next launch."""
    assert backend._prompts is not None
    if (hopper := backend._prompts._hopper) is None:
        return False
    assert hopper._counter.item() == 0
    return bool(hopper._launch.launch._launches)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_prompts_attention_is_the_oracles(
    batch: str, case: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "ENOUGH", 0)  # few programs are enough for a test
    world = World(Case(requests=BATCHES[batch], **{"head_size": 128, "dtype": torch.bfloat16, **CASES[case]}), "cuda")
    backend = TritonBackend(world.case.context("cuda"))
    served: list[int] = []
    original = PromptAttention.forward

    def forward(self: PromptAttention, *arguments: Any) -> None:
        served.append(arguments[5].end)
        original(self, *arguments)

    monkeypatch.setattr(PromptAttention, "forward", forward)
    world.check(*world.run(backend))
    assert served == [len(BATCHES[batch])]
    assert launched(backend) == (kernel == "for Hopper" and case not in ("heads of 64", "seven to one", "sinks"))


def test_another_prompts_bad_numbers_stay_its_own(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "ENOUGH", 0)
    world = World(
        Case(requests=((150, 150), (300, 300)), num_heads=8, num_kv_heads=4, head_size=128, dtype=torch.bfloat16),
        "cuda",
    )
    backend = TritonBackend(world.case.context("cuda"))
    query, key, value = world.new_tokens()
    for states in (key, value):
        states[150:] = torch.nan
    plan, out = backend.plan(world.batch), torch.empty_like(query)
    backend.write(world.layer, key, value, world.cache, plan)
    backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert torch.isfinite(out[:150]).all()
    assert out[150:].isnan().any()
    assert launched(backend) == (kernel == "for Hopper")


def test_launches_of_any_number_of_prompts_share_their_blocks_out(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "ENOUGH", 0)
    backend = None
    for lens in ((2048,), (5,) * 300, (700, 3, 1500, 64, 128, 129), (1024, 1)):
        world = World(Case(requests=tuple((n, n) for n in lens), num_heads=8, num_kv_heads=4, head_size=128,
                           dtype=torch.bfloat16), "cuda")  # fmt: skip
        backend = backend or TritonBackend(world.case.context("cuda"))
        query, key, value = world.new_tokens()
        plan = backend.plan(world.batch)
        assert plan.prompts is not None
        for _ in range(3):  # the later launches are remembered ones
            out = torch.full_like(query, torch.nan)
            lse = backend.forward(world.layer, query, key, value, world.cache, plan, out)
        begin = 0
        for n in lens:
            each = slice(begin, begin + n)
            part = (t[each].transpose(0, 1)[None].float() for t in (query, key, value))
            expected = scaled_dot_product_attention(*part, is_causal=True, scale=world.layer.scale, enable_gqa=True)
            torch.testing.assert_close(out[each].float(), expected[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
            begin += n
        assert torch.isfinite(lse).all()
    assert launched(backend) == (kernel == "for Hopper")
