"""The LoRA checks: no broken plugin survives them, no right one fails, and the oracle is that of PEFT."""

from __future__ import annotations

import dataclasses

import attrs
import pytest
import torch
from mutant_trials import until_killed
from peft import LoraConfig

from slotline.conformance.lora.peft_fields import CHANGES, ELSEWHERE, HARMLESS
from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import LoraContext
from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.lora import CORRECT, MUTANTS
from slotline.testing.oracles.lora import Adapter, expected
from slotline.testing.reference.lora import GatheredSlots, PaddedSlots, descriptor, gathered


@pytest.mark.spread(7)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_plugin_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor)
    assert [f"{r.id}: {r.reason}" for r in records if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level != Level.GRAPHS}
    assert all("declared" in reason for reason in skipped), skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    "capabilities",
    [
        {"max_adapters": Max(1)},
        {"max_rank": Max(1)},
        {"max_rank": Max(4), "target_modules": Set(("gate_up_proj",)), "rslora": Flag(False)},
        {"dtypes": Set(("bfloat16",))},
    ],
    ids=["one-adapter", "rank-1", "one-module", "bfloat16-only"],
)
def test_narrow_declarations_are_checked_within_what_they_declare(capabilities):
    narrow = attrs.evolve(descriptor, capabilities=attrs.evolve(descriptor.capabilities, **capabilities))
    bad = [f"{r.id} {dict(r.case)}: {r.reason}" for r in check_plugin(narrow) if r.bad]
    assert [reason for reason in bad if "'rslora'" not in reason] == []  # the reference reads it, declared or not


@pytest.mark.parametrize("name", ["first-slot", "stale-padding", "first-plan", "no-alpha"])
def test_the_engine_sees_what_reaches_the_text(name):
    mutant = next(item for item in MUTANTS if item.name == name)
    (record,) = check_plugin(mutant.descriptor, only=lambda item: item.id == "lora.engine.text")
    assert record.bad
    assert "merged weights" in record.reason


def test_adapters_are_swapped_while_the_engine_runs():
    (record,) = check_plugin(descriptor, only=lambda item: item.id == "lora.engine.text")
    assert record.details["swaps"] >= 3


def test_every_field_of_pefts_configuration_is_set_by_a_check():
    """A field that a new PEFT brings has to be looked at: does it change what PEFT computes?"""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - set(HARMLESS) - set(CHANGES) - ELSEWHERE == set()


def test_there_are_checks_at_every_level():
    assert {item.level for item in all_checks(Kind.LORA) if item.mandatory} >= set(Level) - {Level.CONTRACT}


def test_the_tolerance_takes_what_differs_by_rounding_and_refuses_a_share_that_is_a_tenth_too_large():
    """The scale before or after the products, or float32 in between, is right, a wrong scale is not."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = (torch.randn(s, generator=generator).to(dtype) for s in ((8, 64), (48, 8)))
        inputs, out = (torch.randn(s, generator=generator).to(dtype) for s in ((16, 64), (16, 48)))
        adapter = Adapter({"m": (a, b)}, 8, 12.0)
        wanted = expected("m", [adapter] * 16, inputs, out)
        exact, allowed = wanted.values, wanted.allowed
        for right in (
            out + (inputs @ a.T) @ (b * 1.5).T,
            (out.float() + inputs.float() @ a.float().T @ b.float().T * 1.5).to(dtype),
            out + (inputs * 1.5) @ a.T @ b.T,
        ):
            assert float((right.double() - exact).abs().max()) <= allowed
        wrong = out.double() + 1.1 * (exact - out.double())
        assert float((wrong - exact).abs().max()) > allowed


def test_the_oracle_and_the_reading_of_folders_agree_with_peft(tmp_path):
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(48, 40, bias=False))
    for rslora in (False, True):
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], use_rslora=rslora, init_lora_weights=False)
        wrapped = peft.get_peft_model(model, config).eval()
        wrapped.save_pretrained(tmp_path / str(rslora))
        layer = wrapped.base_model.model[0]
        weights = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
        inputs = torch.randn(5, 48)
        base = inputs @ layer.base_layer.weight.detach().T
        right = expected("0", [Adapter({"0": weights}, 4, 6.0, rslora)] * 5, inputs, base)
        assert float((wrapped(inputs).detach().double() - right.values).abs().max()) <= right.allowed

        context = LoraContext(
            contract=1, modules={"0": (48, 40)}, max_adapters=1, max_rank=8, max_tokens=8, device="cpu", dtype="float32"
        )
        plugin = PaddedSlots(context)
        plugin.plan(torch.tensor([plugin.load("a", str(tmp_path / str(rslora)))] * 5))
        plugin.apply("0", inputs, base)
        assert float((base.double() - right.values).abs().max()) <= right.allowed
        model = wrapped.unload()


class FreshPlan(GatheredSlots):
    """Puts each plan into a tensor of its own: a captured graph goes on reading the first."""

    def __init__(self, context):
        super().__init__(context)
        self.plans = []  # kept alive, or the graph would read what is there afterwards

    def plan(self, slots):
        self.plans.append(self.planned)
        self.planned = torch.full_like(self.planned, -1)
        super().plan(slots)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plan_that_a_captured_graph_does_not_see_is_found():
    records = check_plugin(attrs.evolve(gathered, factory=FreshPlan), level=Level.GRAPHS, stop_at_first=True)
    assert (records[-1].bad, records[-1].id) == (True, "lora.graphs.replay")
    assert "after capture" in records[-1].reason
