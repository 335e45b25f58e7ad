"""Triton's products with quantized weights: each scheme and number of tokens, against the dequantized weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotline.planner.weight_timing import random_weight
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.weights import WeightScheme

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there the kernels are interpreted
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
SCHEMES = {
    "int8 per channel": WeightScheme(name="int8", group=(1, 0)),
    "int8 per tensor": WeightScheme(name="int8", group=(0, 0)),
    "fp8 per channel": WeightScheme(name="fp8", group=(1, 0)),
    "fp8 in blocks": WeightScheme(name="fp8", group=(32, 64)),
    "int8 in groups with offsets": WeightScheme(name="int8", group=(1, 64), symmetric=False),
    "int4 in groups": WeightScheme(name="int4", group=(1, 32)),
    "int4 in groups with offsets": WeightScheme(name="int4", group=(1, 64), symmetric=False),
    "int4 per channel": WeightScheme(name="int4", group=(1, 0)),
}
OUT, IN = 40, 128


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Callable[[WeightScheme], Any]:
    """Builds the plugin's product. The interpreter takes the first of its launches, since it has none to time."""
    from slotline.backends.linear import triton_linear

    def untimed(kernel: Any, configs: Any, keys: list[str]) -> Any:
        chosen = configs[0].kwargs

        class Launch:
            def __getitem__(self, grid: Any) -> Callable[..., Any]:
                return lambda *given, **named: kernel[grid(chosen)](*given, **named, **chosen)

        return Launch()

    def build(scheme: WeightScheme) -> Any:
        dtype = str(DTYPE).removeprefix("torch.")
        sizes = {"in_features": IN, "out_features": OUT}
        return triton_linear.TritonLinear(LinearContext(contract=1, scheme=scheme, dtype=dtype, device=DEVICE, **sizes))

    if DEVICE == "cpu":
        monkeypatch.setattr(triton_linear, "_timed", untimed)
    return build


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_products_are_those_of_the_dequantized_weight(
    scheme: WeightScheme, linear: Callable[[WeightScheme], Any]
) -> None:
    made, weight = linear(scheme), random_weight(scheme, OUT, IN).to(DEVICE)
    packed, dense = made.pack(weight), weight.dequantize()
    for count in (0, 1, 3, 20, 70):
        x = torch.randn(count, IN, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE)
        found, wanted = made.apply(x, packed, OUT), x.float() @ dense.T
        assert found.shape == (count, OUT)
        off = 2e-3 if DEVICE == "cpu" else 2e-2  # scales of groups in float16; products in bfloat16
        torch.testing.assert_close(
            found.float(), wanted, rtol=off, atol=off * float(wanted.abs().max()) if count else off
        )
    assert made.num_bytes(OUT, IN) == sum(tensor.nbytes for tensor in packed.values())


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter drops a carry where it rounds to FP8")
def test_tokens_are_rounded_to_fp8_with_a_scale_of_their_own() -> None:
    from slotline.backends.linear.triton_linear import round_to_fp8

    x = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [100.0], [0.0]])
    rounded, scales = round_to_fp8(x.to(DEVICE))
    assert scales[:2, 0].tolist() == pytest.approx((x[:2].abs().amax(1) / 448).tolist())
    off = (rounded.float() * scales).cpu() - x
    assert (off.abs() <= x.abs() * 2**-4 + scales.cpu() * 2**-9).all()
