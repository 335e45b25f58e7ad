"""Our LoRA plugins pass the suite; the Triton kernels under the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from interpreter_patches import products_in_order

from slotline.plugins.lora.grouped import descriptor as grouped
from slotline.plugins.lora.segmented import descriptor as segmented
from slotline.registry.capability import Set
from slotline.registry.contracts import LoraContext
from slotline.testing import check_plugin

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_torch_plugin_passes_every_check():
    assert [(record.id, record.reason) for record in check_plugin(grouped) if record.bad] == []


INTERPRETED = (
    "lora.apply.none",
    "lora.apply.embedding",
    "lora.apply.extended",
    "lora.apply.rslora",
    "lora.apply.strided",
    "lora.batch.extended",
    "lora.batch.invariant",
    "lora.batch.mixed",
    "lora.batch.single",
    "lora.slots.hot_swap",
)
"""All checks take four minutes in the interpreter."""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs the compiled kernels on the GPU")
def test_the_triton_plugin_passes_the_hardest_checks_under_the_interpreter(monkeypatch):
    """Declared for the CPU here, and without bfloat16, which the interpreter does not have."""
    pytest.importorskip("triton")
    products_in_order(monkeypatch)
    monkeypatch.setattr("slotline.plugins.lora.segmented.plugin.MOST_EXTENDED", 100)
    offer = evolve(segmented.capabilities, devices=Set(("cpu",)), dtypes=Set(("float32",)))
    subject = evolve(segmented, capabilities=offer, probe=None)
    records = check_plugin(subject, only=lambda item: item.id in INTERPRETED)
    assert {record.id for record in records} == set(INTERPRETED)
    assert [(record.id, record.reason) for record in records if record.bad] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("plugin", [grouped, segmented], ids=lambda plugin: plugin.name)
def test_both_plugins_pass_every_check_on_the_gpu(plugin, monkeypatch):
    monkeypatch.setattr("slotline.plugins.lora.segmented.plugin.MOST_EXTENDED", 100)
    records = check_plugin(plugin)
    assert {"lora.batch.mixed", "lora.slots.hot_swap"} <= {record.id for record in records}
    assert [(record.id, record.reason) for record in records if record.bad] == []


def merged_case(num_tokens: int, max_rank: int):
    """A merged product of three parts over ranks 3 to 16 in five slots, and what each token gets in plain torch."""
    from slotline.plugins.lora.peft_folder import PeftAdapter, Share
    from slotline.plugins.lora.segmented.plugin import SegmentedLora

    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names, sizes, inner = ("q", "k", "v"), (200, 40, 24), 300
    lora = SegmentedLora(
        LoraContext(
            contract=1,
            modules={name: (inner, size) for name, size in zip(names, sizes, strict=True)},
            merged=(names,),
            max_adapters=5,
            max_rank=max_rank,
            max_tokens=300,
            device=device,
            dtype="float32",
        )
    )
    inputs, out = torch.randn(num_tokens, inner, generator=generator), torch.randn(num_tokens, 264, generator=generator)
    slots, wanted = torch.randint(-1, 5, (num_tokens,), generator=generator), out.clone()
    for slot in range(5):
        shares, begin = {}, 0
        for name, size in zip(names, sizes, strict=True):
            if (slot, name) != (2, "k"):  # one adapter leaves a part alone
                rank = (3, 8, max_rank, 5, 16)[slot]
                a, b = torch.randn(rank, inner, generator=generator), torch.randn(size, rank, generator=generator)
                shares[name] = Share(a, b, 0.5 + slot)
                own = slots == slot
                wanted[own, begin : begin + size] += (inputs[own] @ a.T) @ b.T * (0.5 + slot)
            begin += size
        lora._write(slot, PeftAdapter(shares, max_rank))
    lora.plan(slots.to(device))
    return lora, names, sizes, inputs.to(device), out.to(device), wanted.to(device)


@pytest.mark.parametrize(("num_tokens", "max_rank"), [(1, 16), (70, 16), (300, 16), (70, 128)])
def test_a_merged_product_gets_the_shares_of_its_parts_in_one_call_or_in_three(num_tokens, max_rank):
    pytest.importorskip("triton")
    lora, names, sizes, inputs, out, wanted = merged_case(num_tokens, max_rank)
    together, apart = out.clone(), out.clone()
    lora.apply_merged(names, inputs, together)
    begin = 0
    for name, size in zip(names, sizes, strict=True):
        lora.apply(name, inputs, apart[:, begin : begin + size])
        begin += size
    for result in (together, apart):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-3)
