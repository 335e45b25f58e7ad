"""Linear layers with room behind their weight, and the kernels that read rows of the wider outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from slotline.plugins.model_families.passes.extended_linear import ExtendedLinear
from slotline.plugins.model_families.passes.kernels import NormWeight

NAMES, ROWS, MOST = ("proj",), 5, 4


class Adds:
    """Adds ten times the first column of the product with the room, and remembers what it was given."""

    def __init__(self) -> None:
        self.inners: list[torch.Tensor | None] = []

    def __call__(
        self, names: tuple[str, ...], inputs: torch.Tensor, out: torch.Tensor, inner: torch.Tensor | None = None
    ) -> None:
        assert names == NAMES
        self.inners.append(inner)
        if inner is not None:
            out += 10 * (inner.sum(0) if inner.dim() == 3 else inner)[:, :1]


@pytest.fixture
def case() -> tuple[nn.Linear, ExtendedLinear, Adds]:
    torch.manual_seed(0)
    with torch.no_grad():
        linear = nn.Linear(8, 6)
        extended, adds = ExtendedLinear(linear, NAMES, ROWS, MOST), Adds()
        extended.room.normal_()
        extended.enter(adds)
    return linear, extended, adds


@torch.no_grad()
@pytest.mark.parametrize("in_parts", [False, True])
def test_few_tokens_are_multiplied_with_the_room_as_well(case, in_parts):
    linear, extended, adds = case
    x = torch.randn(1, MOST, 8)

    def product(x, weight, bias, out_features):
        assert out_features == 6
        halves = [x[..., i : i + 4] @ weight[:, i : i + 4].T for i in (0, 4)]
        return torch.stack([halves[0] + bias, halves[1]])

    out = extended.parts(x, product).sum(0) if in_parts else linear(x)
    wanted = functional.linear(x, linear.weight, linear.bias) + 10 * x @ extended.room[0][:, None]
    torch.testing.assert_close(out, wanted)
    inner = adds.inners[0].sum(0) if in_parts else adds.inners[0]
    torch.testing.assert_close(inner, x[0] @ extended.room.T)


@torch.no_grad()
def test_many_tokens_and_a_product_that_does_not_suit_take_the_usual_way(case):
    linear, extended, adds = case
    x = torch.randn(1, MOST + 1, 8)
    wanted = functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(linear(x), wanted)
    assert torch.equal(extended.parts(x, lambda *_: pytest.fail("too many tokens"))[0], wanted)
    assert adds.inners == [None, None]
    few = x[:, :2]
    assert torch.equal(extended.parts(few, lambda *_: None)[0], linear(few))


@torch.no_grad()
def test_the_module_keeps_its_parameters_and_gets_its_forward_back(case):
    linear, extended, adds = case
    assert linear.weight.shape == (6, 8)
    new, room = torch.randn(6, 8), extended.room.clone()
    linear.weight.copy_(new)  # as reading weights again does
    x = torch.randn(1, 2, 8)
    torch.testing.assert_close(
        linear(x), functional.linear(x, new, linear.bias) + 10 * x @ room[0][:, None], rtol=1e-5, atol=1e-5
    )
    extended.leave()
    torch.testing.assert_close(linear(x), functional.linear(x, new, linear.bias))
    assert len(adds.inners) == 1
    assert set(linear.state_dict()) == {"weight", "bias"}


def test_rows_of_wider_tensors_are_normed_activated_and_turned_in_place():
    pytest.importorskip("triton")
    from slotline.plugins.model_families.passes.fused_kernels import TritonKernels

    device, kernels = "cuda" if torch.cuda.is_available() else "cpu", TritonKernels()
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 1, 3, 80, generator=generator).to(device)  # two parts
    residual = torch.randn(1, 3, 64, generator=generator).to(device)
    outer = NormWeight(torch.ones(64, device=device), 1e-5, 0.0)
    for x in (wide[..., :64], wide[:1, ..., :64]):
        found, wanted = (kernels.add_rms_norm(given, residual, None, outer) for given in (x, x.contiguous()))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    x = wide[0, ..., :64]
    assert torch.equal(kernels.act_and_mul(x, "silu"), kernels.act_and_mul(x.contiguous(), "silu"))
    angles, behind = torch.randn(1, 3, 16, generator=generator).to(device), wide[0, ..., 64:].clone()
    turned = x.contiguous().view(1, 3, 4, 16)
    kernels.rotate(turned, 3, angles.cos(), angles.sin(), 16)
    kernels.rotate(x.view(1, 3, 4, 16), 3, angles.cos(), angles.sin(), 16)
    assert torch.equal(x, turned.view(1, 3, 64))
    assert torch.equal(wide[0, ..., 64:], behind)
