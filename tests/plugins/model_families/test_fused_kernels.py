"""The Triton kernels over rows against torch: on the GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from slotline.plugins.model_families.passes import products
from slotline.plugins.model_families.passes.equality import relative_difference
from slotline.plugins.model_families.passes.kernels import ACTIVATIONS, NormWeight

pytest.importorskip("triton")

from slotline.plugins.model_families.passes.fused_kernels import EARLIEST, HOPPER, ROWS_BY_HEAD, TritonKernels
from slotline.plugins.model_families.passes.products import DOT_ROWS, LARGE_DOT_ROWS, LARGE_WEIGHT, PRODUCT_ROWS
from slotline.registry.contracts.attention import CacheSlots, KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if DEVICE == "cuda" else ()))  # not interpreted
ROUNDINGS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EARLY = DEVICE == "cuda" and torch.cuda.get_device_capability() >= EARLIEST
KERNELS = TritonKernels(early=EARLY)
GATES = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] == HOPPER
GATED = TritonKernels(early=EARLY, multiprocessors=3)
"""With so few programs each takes several tiles."""
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 2).to(DEVICE, dtype)


def expected_norm(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """In float64."""
    x, weight = x.double(), weight.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (offset + weight)


def expected_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float64; x [batch, num_tokens, heads, size], cos and sin [batch, num_tokens, rotary_size]."""
    x, cos, sin = x.double(), cos.double()[:, :, None], sin.double()[:, :, None]
    width = cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    first, second = turning.chunk(2, -1)
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return found.dtype == dtype and relative_difference(found, expected) <= ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 5, 72), (2, 3, 4, 16), (1, 2, 3000), (1, 0, 64)])
def test_rms_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    found = KERNELS.rms_norm(x, weight, EPS, offset)
    assert found.shape == x.shape
    if x.numel():
        assert close(found, expected_norm(x, weight, offset), dtype)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(KERNELS.rms_norm(strided, weight, EPS, offset), found)


def test_rms_norm_keeps_a_nan_in_its_row() -> None:
    x = random(3, 64, dtype=torch.float32)
    x[1, 5] = torch.nan
    found = KERNELS.rms_norm(x, random(64, dtype=torch.float32), EPS, 0.0)
    assert found.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_add_rms_norm(inner: bool, outer: bool, dtype: torch.dtype) -> None:
    x, residual = random(1, 5, 72, dtype=dtype), random(5, 1, 72, dtype=dtype).view(1, 5, 72) * 0.7
    before = residual.clone()
    first = NormWeight(random(72, dtype=dtype), EPS, 1.0)
    second = NormWeight(random(72, dtype=dtype) + 1, EPS, 0.0)
    total, normed = KERNELS.add_rms_norm(x, residual, first if inner else None, second if outer else None)
    branch = expected_norm(x, first.weight, 1.0) if inner else x.double()
    assert close(total, residual.double() + branch, dtype)
    assert close(normed, expected_norm(total, second.weight, 0.0) if outer else total, dtype)
    assert torch.equal(residual, before)


@pytest.mark.spread(23, slow=0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("size", "rotary_size"), [(16, 16), (24, 24), (32, 16), (80, 20)])
@pytest.mark.parametrize("num_tokens", [1, 3, ROWS_BY_HEAD + 2])
def test_rotation_with_and_without_head_norms(
    num_tokens: int, size: int, rotary_size: int, norms: bool, dtype: torch.dtype
) -> None:
    query_heads, key_heads, heads = 4, 1, 7
    states = random(1, num_tokens, heads, size, dtype=dtype)
    angles = random(1, num_tokens, rotary_size // 2, dtype=torch.float32)
    cos, sin = torch.cat((angles, angles + 1), -1).cos().to(dtype), torch.cat((angles, angles + 1), -1).sin().to(dtype)
    expected, turned = states.double(), query_heads + key_heads
    query = NormWeight(random(size, dtype=dtype), EPS, 1.0)
    key = NormWeight(random(size, dtype=dtype) + 1, EPS, 1.0)
    if norms:
        weights = torch.stack([query.weight] * query_heads + [key.weight] * key_heads)  # [turned, size]
        expected[:, :, :turned] = expected_norm(expected[:, :, :turned], weights, 1.0)
        KERNELS.rotate_and_store(states, query, key, query_heads, key_heads, cos, sin, rotary_size)
    else:
        KERNELS.rotate(states, turned, cos, sin, rotary_size)
    expected[:, :, :turned] = expected_rotation(expected[:, :, :turned], cos, sin)
    assert close(states, expected, dtype)


@pytest.mark.spread(7, slow=0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("size", "rotary_size", "layout"), [(16, 16, "NHD"), (80, 20, "HND")])
@pytest.mark.parametrize("num_tokens", [1, ROWS_BY_HEAD + 2])
def test_rotation_that_stores_keys_and_values(
    num_tokens: int, size: int, rotary_size: int, layout: str, norms: bool, dtype: torch.dtype
) -> None:
    query_heads, key_heads, page, blocks = 4, 2, 4, 1 + ROWS_BY_HEAD // 2
    states = random(1, num_tokens, query_heads + 2 * key_heads, size, dtype=dtype)
    angles = random(1, num_tokens, rotary_size, dtype=torch.float32)
    factors = (NormWeight(random(size, dtype=dtype), EPS, 0.0), NormWeight(random(size, dtype=dtype) + 1, EPS, 0.0))
    query, key = factors if norms else (None, None)
    arguments = (query, key, query_heads, key_heads, angles.cos(), angles.sin(), rotary_size)
    expected = states.clone()
    KERNELS.rotate_and_store(expected, *arguments)
    shape = (blocks, page, key_heads, size) if layout == "NHD" else (blocks, key_heads, page, size)
    whole = torch.full((2, *shape), torch.nan, dtype=dtype, device=DEVICE)
    cache = KVCache(*(whole if layout == "NHD" else whole.transpose(2, 3)))
    mapping = torch.randperm(blocks * page - page, generator=torch.Generator().manual_seed(0))[:num_tokens] + page
    if num_tokens > 1:
        mapping[3] = -1
    KERNELS.rotate_and_store(states, *arguments, CacheSlots(cache, mapping.to(DEVICE)))
    assert torch.equal(states, expected)
    written = mapping[mapping >= 0]
    made = expected[0, (mapping >= 0).to(DEVICE)]
    for part, first in ((cache.key, query_heads), (cache.value, query_heads + key_heads)):
        flat = part.reshape(blocks * page, key_heads, size)
        assert torch.equal(flat[written.to(DEVICE)], made[:, first : first + key_heads])
        assert int((~flat.isnan()).sum()) == len(written) * key_heads * size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 48])
def test_angles(width: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 77, 40959, 131071]], device=DEVICE)
    frequencies = (1 / 10000.0 ** (torch.arange(24) / 24)).to(DEVICE)
    expected = positions[..., None].float() * frequencies  # rounded, as transformers does
    expected = torch.cat((expected, expected), -1)[..., :width].double()
    cos, sin = KERNELS.angles(positions, frequencies, 1.5, width, dtype)
    assert close(cos, 1.5 * expected.cos(), dtype)
    assert close(sin, 1.5 * expected.sin(), dtype)


def test_rotation_with_half_as_many_angles_and_in_float32_for_another_dtype() -> None:
    angles = random(1, 3, 8, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    for dtype in DTYPES:
        states = random(1, 3, 5, 16, dtype=dtype)
        expected = expected_rotation(states, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        KERNELS.rotate(states, 5, cos, sin, 16)
        assert close(states, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [48, 1500])
def test_act_and_mul(n: int, activation: str, dtype: torch.dtype) -> None:
    functions = {
        "silu": functional.silu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "gelu": functional.gelu,
        "relu": functional.relu,
    }
    merged = random(1, 4, 2 * n, dtype=dtype)
    merged[0, 0, 0], merged[0, 1, 3] = 30.0, -30.0
    gate, up = merged.double().chunk(2, -1)
    found = KERNELS.act_and_mul(merged, activation)
    assert found.shape == (1, 4, n)
    assert close(found, functions[activation](gate) * up, dtype)
    merged[0, 2, 1] = torch.nan
    assert KERNELS.act_and_mul(merged, activation).isnan().nonzero().tolist() == [[0, 2, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, PRODUCT_ROWS, PRODUCT_ROWS + 1])
@pytest.mark.parametrize(("n", "k"), [(7, 24), (64, 72), (18, 2500)])
def test_products_of_few_and_of_many_rows(n: int, k: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight, shift = random(1, rows, k, dtype=dtype), random(n, k, dtype=dtype) / k, random(n, dtype=dtype)
    expected = functional.linear(x.double(), weight.double(), shift.double() if bias else None)
    found = KERNELS.linear(x, weight, shift if bias else None)
    assert close(found, expected, dtype)
    residual = random(1, rows, n, dtype=dtype)
    expected += residual.double()
    before, kept = residual.clone(), KERNELS.norms_inside(x)
    total = KERNELS.add_linear(residual, x, weight, shift if bias else None)
    assert kept == (rows <= PRODUCT_ROWS)
    assert torch.equal(residual, before) == kept
    assert relative_difference(total, expected) <= (2 if bias else 1) * ROUNDINGS[dtype]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [2, 17, LARGE_DOT_ROWS + 1, DOT_ROWS])
@pytest.mark.parametrize(("n", "k"), [(70, 72), (64, 640)])
def test_products_on_the_matrix_units(n: int, k: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    products = KERNELS._products
    x, weight = random(1, rows, k, dtype=dtype), random(n, k, dtype=dtype) / k
    shift = random(n, dtype=dtype) if bias else None
    assert products.suits(x, weight)
    expected = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert close(products.dot(x, weight, shift)[0], expected, dtype)
    parts = products.dot(x, weight, shift, in_parts=True)
    assert relative_difference(parts.sum(0), expected) <= ROUNDINGS[dtype]
    gate, up = expected.chunk(2, -1)
    assert close(products.dot(x, weight, shift, "silu")[0], functional.silu(gate) * up, dtype)


def test_large_weights_and_many_rows_are_the_librarys_unless_activated() -> None:
    products, k = KERNELS._products, 64
    x, weight = torch.zeros(DOT_ROWS + 1, k, dtype=torch.float16), torch.empty(LARGE_WEIGHT // k + 1, k, device="meta")
    assert not products.suits(x[:2], weight)
    assert products.suits(x[:LARGE_DOT_ROWS], weight, gated=True)
    assert not products.suits(x[: LARGE_DOT_ROWS + 1], weight, gated=True)
    assert products.suits(x[:DOT_ROWS], weight[1:], gated=True)
    assert not products.suits(x, weight[1:])


@pytest.mark.skipif(not GATES, reason="made for Hopper")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "k", "parts"), [(2, 70, 640, 2), (17, 128, 2056, 3), (32, 300, 640, 1)])
def test_products_of_few_rows_under_large_weights(
    rows: int, n: int, k: int, parts: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "LARGE_WEIGHT", 1 << 10)
    monkeypatch.setattr(products, "FEWEST_ELEMENTS", 256)
    x, weight = random(1, rows, k, dtype=dtype), random(n, k, dtype=dtype) / k
    shift = random(n, dtype=dtype) if bias else None
    expected = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert close(GATED.linear(x, weight, shift), expected, dtype)
    assert GATED._products.suits_single(x, weight) == (n < 300)  # a program for each of three multiprocessors
    found = GATED.linear_parts(x, weight, shift)
    assert len(found) == parts
    assert relative_difference(found.sum(0), expected) <= ROUNDINGS[dtype]
    if not bias:
        logits = GATED.project(x, weight)
        assert logits.dtype == torch.float32
        assert relative_difference(logits, expected) <= 1e-5
    assert not GATED._products.suits_large(x.float(), weight)
    assert not GATED._products.suits_large(random(1, LARGE_DOT_ROWS + 1, k, dtype=dtype), weight)
    assert not KERNELS._products.suits_large(x, weight)  # another device


@pytest.mark.skipif(not GATES, reason="made for Hopper")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 8), (129, 136, 72), (300, 264, 200), (1500, 128, 64)])
def test_gated_products_of_many_rows(rows: int, n: int, k: int, activation: str, dtype: torch.dtype) -> None:
    x, weight = random(1, rows, k, dtype=dtype), random(2 * n, k, dtype=dtype) / k
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    found = GATED._products.gated(x, weight, activation)
    assert found.shape == (1, rows, n)
    assert close(found, active * up, dtype)


def test_gated_products_are_the_librarys_unless_they_fill_the_device_and_lie_as_the_copy_engine_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "GATED_ROWS", 4)
    monkeypatch.setattr(products, "TILES", 0.5)
    x, weight = (torch.zeros(shape, dtype=torch.float16) for shape in ((4, 64), (32, 64)))
    suits = TritonKernels(multiprocessors=2)._products.suits_many
    assert suits(x, weight, None)
    assert not KERNELS._products.suits_many(x, weight, None)  # another device
    assert not TritonKernels(multiprocessors=4)._products.suits_many(x, weight, None)  # most of it would be idle
    assert not suits(x, weight, weight[0])
    assert not suits(x.float(), weight.float(), None)
    assert not suits(x[:3], weight, None)
    assert not suits(x, torch.zeros(33, 64, dtype=torch.float16), None)
    assert not suits(x, torch.zeros(40, 64, dtype=torch.float16), None)  # the result's rows would begin anywhere
    assert not suits(x[:, :63], torch.zeros(32, 63, dtype=torch.float16), None)


@pytest.mark.skipif(not GATES, reason="made for Hopper")
def test_an_mlp_of_a_long_prompt_takes_the_gated_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "GATED_ROWS", DOT_ROWS + 1)
    monkeypatch.setattr(products, "TILES", 0.5)
    kernels, seen = TritonKernels(early=EARLY, multiprocessors=2), list[str]()
    gated = kernels._products.gated
    monkeypatch.setattr(kernels._products, "gated", lambda x, w, name: seen.append(name) or gated(x, w, name))
    x, weight = (random(*shape, dtype=torch.float16) for shape in ((1, 140, 64), (32, 64)))
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    assert close(kernels.gated_linear(x, weight, None, "silu"), functional.silu(gate) * up, torch.float16)
    assert seen == ["silu"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_of_parts(dtype: torch.dtype) -> None:
    parts, residual = random(4, 1, 5, 72, dtype=torch.float32), random(1, 5, 72, dtype=dtype)
    norm = NormWeight(random(72, dtype=dtype), EPS, 0.0)
    total, normed = KERNELS.add_rms_norm(parts, residual, norm, norm)
    assert close(total, residual.double() + expected_norm(parts.double().sum(0), norm.weight, 0.0), dtype)
    assert close(normed, expected_norm(total, norm.weight, 0.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_projections_to_float32(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(1, rows, 72, dtype=dtype), random(301, 72, dtype=dtype)
    found = KERNELS.project(x, weight)
    assert found.dtype == torch.float32
    kept = DEVICE == "cuda" or rows == 1
    assert relative_difference(found, x.double() @ weight.double().T) <= (1e-5 if kept else ROUNDINGS[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, PRODUCT_ROWS, PRODUCT_ROWS + 1])
@pytest.mark.parametrize(("n", "k"), [(14, 24), (36, 2500)])
def test_products_of_normed_rows(
    n: int, k: int, rows: int, bias: bool, activation: str | None, dtype: torch.dtype
) -> None:
    x, weight, shift = random(1, rows, k, dtype=dtype), random(n, k, dtype=dtype) / k, random(n, dtype=dtype)
    norm = NormWeight(random(k, dtype=dtype), EPS, 1.0)
    expected = expected_norm(x, norm.weight, 1.0) @ weight.double().T + (shift.double() if bias else 0)
    if activation is None:
        found = KERNELS.linear(x, weight, shift if bias else None, norm)
    else:
        found = KERNELS.gated_linear(x, weight, shift if bias else None, activation, norm)
        gate, up = expected.chunk(2, -1)
        expected = functional.silu(gate) * up
    roundings = 1 if KERNELS.norms_inside(x) else 4  # of the norm, and of gate and up
    assert close(found, expected, dtype) or relative_difference(found, expected) <= roundings * ROUNDINGS[dtype]
