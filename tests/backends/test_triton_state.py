"""The Triton state kernels: interpreted on a CPU against parts of the suite, all of it on a GPU.

The interpreter computes in numpy, which has no bfloat16, and takes minutes for the whole suite.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import evolve
from negotiation_cases import CPU, GPU

pytest.importorskip("triton")

from slotline.backends.torch_state import descriptor as torch_descriptor
from slotline.backends.torch_state.backend import TorchState
from slotline.backends.triton_state import convolution, descriptor, gated_delta, mamba1, mamba2, probe
from slotline.backends.triton_state.backend import TritonState
from slotline.backends.triton_state.rows import Rows
from slotline.plugins.kv_specs.mamba import descriptor as mamba
from slotline.registry.capability import Set
from slotline.registry.contracts.state import STATE_KINDS, StateContext
from slotline.registry.negotiation import Candidate, PlanRequest, group_states, negotiate, why_not
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.check import Check
from slotline.testing.environments.state import Part, Problem, make_problem, surround
from slotline.testing.subject import Subject

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),  # of a decay that is then masked
]

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HERE = (
    "state.values.prefill",
    "state.values.decode",
    "state.values.mixed",
    "state.values.facts",
    "state.values.strong_decay",
    "state.slots.garbage_start",
    "state.padding",
    "state.zero_tokens",
    "state.layout.page",
    "state.chunked.many_pieces",
    "state.chunked.single_token_extension",
    "state.checkpoint.resume",
    "state.rollback.each_position",
    "state.rollback.other_rows",
)
"""Checks that the interpreter runs in a minute or two: every kernel, odd sizes, slots, padding."""

SEGMENTED = ("state.chunked.many_pieces", "state.values.long_prompt", "state.padding.rows")

SIZES: dict[str, dict[str, Any]] = {
    "short_conv": {"channels": 12, "width": 4, "activation": "silu"},
    "mamba1": {"channels": 6, "state_size": 5, "dt_softplus": True},
    "mamba2": {"num_heads": 4, "head_size": 5, "num_groups": 2, "state_size": 12, "dt_softplus": True},
    "gated_delta": {
        "num_k_heads": 1, "num_v_heads": 2, "head_size_k": 12, "head_size_v": 5, "qk_l2norm": True, "scale": 0.3,
    },
}  # fmt: skip


def offered(**changes: Any) -> Any:
    """The descriptor, on this machine's device and with the dtypes that can be had there."""
    pairs = descriptor.capabilities.dtypes.values
    usable = Set(pair for pair in pairs if ON_GPU or "bfloat16" not in pair)
    capabilities = evolve(descriptor.capabilities, **{"devices": Set((DEVICE,)), "dtypes": usable, **changes})
    return evolve(descriptor, capabilities=capabilities, probe=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*STATE_KINDS, "kda"])
@pytest.mark.behaviour(153)
def test_the_kernels_pass_the_suite(kind: str) -> None:
    def chosen(item: Check) -> bool:
        return ON_GPU or item.id.startswith(HERE)

    records = check_plugin(offered(state_kinds=Set((kind,))), device=DEVICE, level=Level.GRAPHS, only=chosen)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) >= len(HERE)
    ratios = {record.key: record.ratio or 0.0 for record in records if record.mandatory}
    assert max(ratios.values()) < 0.75, f"{max(ratios, key=ratios.__getitem__)}: right kernels leave room"


@pytest.mark.spread(1)
@pytest.mark.parametrize(("kind", "module", "segments"), [("mamba1", mamba1, (3, 8)), ("mamba2", mamba2, (32, 64))])
def test_segments_of_long_prompts_give_the_same(
    kind: str, module: ModuleType, segments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of one chunk and of two: prompts that end inside one and at its end, and rows without tokens."""
    for segment in segments:
        monkeypatch.setattr(module, "SEGMENT", segment)
        monkeypatch.setattr(module, "ENOUGH", 10**6)
        records = check_plugin(
            offered(state_kinds=Set((kind,)), dtypes=Set((("float32", "float32"),))),
            device=DEVICE,
            only=lambda item: item.id in SEGMENTED,
        )
        assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
        assert [record.outcome for record in records] == [Outcome.PASSED] * 3


@pytest.mark.parametrize("channels", [12, 520, 13])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_convolution_read_in_words_is_the_one_read_in_numbers(
    channels: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a request that starts, a padded row, requests that share a program or do not, and channels that are no
    whole words, which words do not serve.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (5, channels), "weight": (channels, width), "bias": (channels,)}
    inputs = {name: torch.randn(size, generator=generator).half().to(DEVICE) for name, size in sizes.items()}
    before = torch.randn(7, channels, width - 1, generator=generator).half().to(DEVICE)
    rows = Rows(
        starts=torch.arange(6, device=DEVICE).int(),
        slots=torch.tensor([3, 0, -1, 5, 6], device=DEVICE).int(),
        has_state=torch.tensor([1, 1, 1, 0, 1], device=DEVICE).to(torch.int8),
        first=0,
        end=5,
        num_tokens=5,
        cores=1,
    )
    facts = {"channels": channels, "width": width, "activation": "silu"}
    tensors = (inputs["x"], inputs["weight"], inputs["bias"], before, inputs["x"])
    assert convolution.in_words(facts, tensors) == (channels != 13)
    found = []
    for words, few in ((channels != 13, 5), (channels != 13, 6), (False, 6)):
        monkeypatch.setattr(convolution, "in_words", lambda *_, words=words: words)
        monkeypatch.setattr(convolution, "FEW", few)
        state, out = before.clone(), torch.full_like(inputs["x"], float("nan"))
        convolution.Convolution().decode(facts, inputs, {"conv": state}, out, rows)
        found.append((out, state))
    for out, state in found[:2]:
        torch.testing.assert_close(out, found[2][0], rtol=2e-3, atol=2e-3)
        assert torch.equal(state, found[2][1])


@pytest.mark.parametrize(("channels", "size"), [(6, 5), (64, 16), (80, 16)])
def test_mambas_programs_give_the_same_whether_they_are_few_or_many(
    channels: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks that are full, and with channels and columns too many."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (4, channels), "dt": (4, channels), "B": (4, size), "C": (4, size), "z": (4, channels)}
    shapes |= {"A": (channels, size), "D": (channels,), "dt_bias": (channels,)}
    inputs = {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    inputs["A"] = -inputs["A"].abs()
    before = torch.randn(7, channels, size, generator=generator).to(DEVICE)
    rows = Rows(
        starts=torch.arange(5, device=DEVICE).int(),
        slots=torch.tensor([3, -1, 5, 0], device=DEVICE).int(),
        has_state=torch.tensor([1, 1, 0, 1], device=DEVICE).to(torch.int8),
        first=0,
        end=4,
        num_tokens=4,
        cores=1,
    )
    facts = {"channels": channels, "state_size": size, "dt_softplus": True}
    found = []
    for few in (16, 0):
        monkeypatch.setattr(mamba1, "FEW", few)
        state, out = before.clone(), torch.full_like(inputs["x"], float("nan"))
        mamba1.Mamba1().decode(facts, inputs, {"ssm": state}, out, rows)
        found.append((out, state))
    torch.testing.assert_close(found[0], found[1])
    assert torch.equal(found[0][1][[1, 2, 4, 6]], before[[1, 2, 4, 6]])


def outputs(
    factory: Callable[[StateContext], Any], problem: Problem, parts: list[Part], captured: list[Part] | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each row's outputs and the states after. With `captured`, all that the host knows is that batch."""
    around = surround(subject_of(factory), [problem], num_slots=8)
    first = [Part(part.slot, (problem.tokens(3, seed=part.slot),), False) for part in parts if part.slot >= 0]
    around.run(first)
    batch = around.batch(parts)
    if captured is not None:
        known = around.batch(captured)
        tensors = {name: getattr(batch, name) for name in ("query_start_loc", "slots", "has_initial_state")}
        batch = evolve(known, **tensors)
    inputs, _ = around.inputs(0, parts)
    output = around.backend.forward(problem.layer, inputs, around.state(0), around.backend.plan(batch))
    assert torch.isfinite(output).all()
    (state,) = around.state(0).values()
    return list(output.split([part.count for part in parts])), state[[part.slot for part in parts if part.slot >= 0]]


def subject_of(factory: Callable[[StateContext], Any]) -> Subject:
    made = evolve(torch_descriptor, factory=factory)
    return Subject(descriptor=made, device=GPU if ON_GPU else CPU, capabilities=made.capabilities, contract=1)


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_captured_forward_takes_lengths_and_slots_from_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched for four padded rows of four tokens, it serves whatever the tensors then hold."""
    monkeypatch.setattr("slotline.backends.triton_state.backend.is_replayed", lambda: True)
    problem = make_problem(kind, ("float32", "float32"), SIZES[kind])
    captured = [Part(-1, (problem.tokens(4, seed=row),), False) for row in range(4)]
    parts = [
        Part(slot, (problem.tokens(count, seed=9 + count),), True) for slot, count in ((5, 9), (2, 1), (7, 3), (-1, 3))
    ]
    got, got_state = outputs(TritonState, problem, parts, captured)
    want, want_state = outputs(TorchState, problem, parts, None)
    for mine, theirs in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not got[3].any()
    torch.testing.assert_close(got_state, want_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16"] + ["bfloat16"] * ON_GPU)
@pytest.mark.parametrize("size", [64, 128])
def test_large_heads_of_the_delta_rule_have_longer_chunks(size: int, dtype: str) -> None:
    """One prompt of some chunks and a part of one, behind three tokens. Compared in the norm: halves are rounded."""
    facts = SIZES["gated_delta"] | {"head_size_k": size, "head_size_v": size, "scale": size**-0.5}
    problem = make_problem("gated_delta", (dtype, "float32"), facts)
    parts = [Part(2, (problem.tokens(150, seed=1),), True)]
    assert gated_delta._chunk(facts, gated_delta.FEW) == 64
    got, got_state = outputs(TritonState, problem, parts, None)
    want, want_state = outputs(TorchState, problem, parts, None)
    for mine, theirs in ((got[0], want[0]), (got_state, want_state)):
        mine, theirs = mine.double(), theirs.double()
        assert float((mine - theirs).norm() / theirs.norm()) < 0.01


def test_auto_takes_the_kernels_on_a_gpu_and_torch_on_a_cpu() -> None:
    layer = make_problem("mamba2", ("float32", "float32"), SIZES["mamba2"]).layer
    candidates = [Candidate(descriptor=item, distribution="slotline") for item in (torch_descriptor, descriptor)]
    for device, expected in ((GPU, "triton"), (CPU, "torch")):
        request = PlanRequest(device=device, groups=(), state_groups=group_states([layer]))
        plan = negotiate(request, (), (Candidate(descriptor=mamba, distribution="slotline"),), candidates)
        assert plan.state_groups[0].backend == expected
        other = {"triton": "torch", "torch": "triton"}[expected]
        assert ("priority: 10, triton has 50" if other == "torch" else "N101") in why_not(plan, other)


@pytest.mark.usefixtures("c_compiler")
def test_a_gpu_without_bfloat16_is_told() -> None:
    assert "compute capability 8.0" in str(probe(evolve(GPU, compute_capability=(7, 5))))
    assert probe(GPU) == descriptor.capabilities
