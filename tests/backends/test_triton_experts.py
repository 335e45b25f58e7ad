"""Triton's mixtures with quantized weights: schemes, forms and routes, against the dequantized experts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from slotline.backends.linear.dequantized import DequantizedExperts
from slotline.planner.weight_timing import random_weight
from slotline.registry.contracts.experts import ExpertsContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme, concatenate, stack

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the kernels are interpreted
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
EXPERTS, HIDDEN, INNER = 5, 96, 64
SCHEMES = {
    "int8 per channel": WeightScheme(name="int8", group=(1, 0)),
    "fp8 per tensor": WeightScheme(name="fp8", group=(0, 0)),
    "fp8 in blocks": WeightScheme(name="fp8", group=(32, 32)),
    "int4 in groups": WeightScheme(name="int4", group=(1, 32)),
    "int4 in groups with offsets": WeightScheme(name="int4", group=(1, 32), symmetric=False),
    "mxfp4": WeightScheme(name="mxfp4", group=(1, 32)),
}


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[ExpertsContext], Any]:
    """Builds the plugin's product. The interpreter takes the first of its launches, since it has none to time."""
    from slotline.backends.linear import triton_experts

    def untimed(kernel: Any) -> Any:
        chosen = triton_experts._CONFIGS[0].kwargs

        class Launch:
            def __getitem__(self, grid: Any) -> Callable[..., Any]:
                return lambda *given, **named: kernel[grid(chosen)](*given, **named, **chosen)

        return Launch()

    if DEVICE == "cpu":
        monkeypatch.setattr(triton_experts, "_timed", untimed)
    return triton_experts.TritonExperts


def context_of(scheme: WeightScheme) -> ExpertsContext:
    sizes = {"experts": EXPERTS, "in_features": HIDDEN, "out_features": 2 * INNER}
    return ExpertsContext(contract=1, scheme=scheme, dtype=str(DTYPE).removeprefix("torch."), device=DEVICE, **sizes)


def weights_of(scheme: WeightScheme) -> tuple[QuantizedWeight, QuantizedWeight]:
    def one(outputs: int, inputs: int, seed: int) -> QuantizedWeight:
        weight = random_weight(scheme, outputs, inputs, seed)
        size = float(weight.dequantize().square().sum(1).mean().sqrt())
        shrunk = {
            name: getattr(weight, name) / size for name in ("scales", "offsets") if getattr(weight, name) is not None
        }
        return evolve(weight, **shrunk) if scheme.name != "mxfp4" else weight

    gate_up = [concatenate([one(INNER, HIDDEN, e), one(INNER, HIDDEN, e + 10)]) for e in range(EXPERTS)]
    down = [one(HIDDEN, INNER, e + 20) for e in range(EXPERTS)]
    return stack(gate_up).to(DEVICE), stack(down).to(DEVICE)


def chosen(tokens: int, k: int, *, none: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS + none, generator=generator)[:k] for _ in range(tokens)])
    shares = torch.rand(tokens, k, generator=generator)
    return x.to(DEVICE, DTYPE), ids.to(DEVICE), shares.to(DEVICE, DTYPE)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    off = 3e-3 if DEVICE == "cpu" else 5e-2  # scales of groups in float16; products in bfloat16
    limit = off * float(wanted.float().abs().max()) if wanted.numel() else off
    torch.testing.assert_close(found.float(), wanted.float(), rtol=off, atol=limit)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_mixtures_are_those_of_the_dequantized_experts(
    scheme: WeightScheme, mixture: Callable[[ExpertsContext], Any]
) -> None:
    context, weights = context_of(scheme), weights_of(scheme)
    ours, reference = mixture(context), DequantizedExperts(context)
    packed, wanted = ours.pack(*weights), reference.pack(*weights)
    for tokens, k in ((1, 2), (3, 4), (41, 2)):
        given = chosen(tokens, k)
        same(ours.apply(given[0], packed, *given[1:]), reference.apply(given[0], wanted, *given[1:]))
    assert ours.num_bytes() == sum(tensor.nbytes for tensor in packed.values())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_forms_biases_and_choices_of_none(activation: str, mixture: Callable[[ExpertsContext], Any]) -> None:
    constants = {"alpha": 1.702, "limit": 7.0} if activation == "swiglu_oai" else {}
    context = evolve(
        context_of(SCHEMES["int4 in groups"]), activation=activation, constants=constants, interleaved=True
    )
    weights = weights_of(context.scheme)
    biases = [torch.randn(EXPERTS, size).to(DEVICE, DTYPE) for size in (2 * INNER, HIDDEN)]
    ours, reference = mixture(context), DequantizedExperts(context)
    packed, wanted = ours.pack(*weights, *biases), reference.pack(*weights, *biases)
    for tokens in (0, 1, 33):
        given = chosen(tokens, 3, none=True) if tokens else tuple(part[:0] for part in chosen(1, 3))
        same(ours.apply(given[0], packed, *given[1:]), reference.apply(given[0], wanted, *given[1:]))


def test_a_route_has_each_choice_once_in_a_block_of_its_expert() -> None:
    from slotline.backends.linear.triton_experts import route

    for tokens, k in ((1, 1), (7, 3), (64, 2), (200, 5)):
        ids = chosen(tokens, k, none=True)[1]
        ids[: tokens // 2] = EXPERTS - 1  # one expert has most
        to, flat = route(ids, EXPERTS), ids.flatten()
        rows = to.rows.view(-1, to.block_m)
        found = {int(row): int(expert) for block, expert in zip(rows, to.experts, strict=True) for row in block}
        found.pop(len(flat), None)
        assert found == {place: int(expert) for place, expert in enumerate(flat) if expert < EXPERTS}
        assert int((to.rows < len(flat)).sum()) == len(found)


COMPILING = """
import itertools, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slotline.backends.linear import triton_grouped as kernels
from slotline.backends.linear.triton_experts import _BLOCKS, _CONFIGS

codes = {(kernels.CODES, "*i8"), (kernels.CODES, "*fp8e4nv"), (kernels.INT4, "*u8"), (kernels.MXFP4, "*u8")}
for (kind, of_codes), block in zip(sorted(codes), itertools.cycle(_BLOCKS)):
    config = _CONFIGS[kind]
    scales = "*bf16" if kind == kernels.MXFP4 else "*fp16"
    signature = {"x": "*bf16", "codes": of_codes, "scales": scales, "offsets": scales, "bias": "*bf16", "out": "*bf16"}
    signature |= {"rows": "*i32", "experts": "*i32"} | dict.fromkeys(kernels.grouped.arg_names[8:12], "i32")
    constants = {"num_inputs": 256, "group": 32, "kind": kind, "has_offsets": kind == kernels.INT4, "has_bias": True}
    constants |= {"block_m": block, **config.kwargs}
    source = ASTSource(kernels.grouped, signature | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("cubin" in made.asm and len(made.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_a_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 4, done.stderr
