"""Launches that remember the compiled kernel: the same one for the same arguments, Triton's own way for all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from slotline.kernels.triton_launcher import MOST, Boxes, Launcher, cdiv, next_power_of_2


@triton.jit
def add(x, y, out, count, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + at, mask=at < count) + factor * tl.load(y + at, mask=at < count)
    tl.store(out + at, values, mask=at < count)


class Compiling:
    """Stands in for a kernel where there is no GPU to compile for: what was compiled, and what was launched again."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            self.compiled.append((grid, arguments, options))
            return self

        def launch(*arguments: Any) -> None:
            self.again.append((grid, arguments))

        return launch if self.compiled and len(grid) > len(self.compiled[-1][0]) else run


def test_equal_arguments_take_the_compiled_kernel_and_others_do_not() -> None:
    kernel = Compiling()
    launcher = Launcher(kernel)
    x, y = torch.zeros(64), torch.zeros(64)
    launcher((4,), x, 8, 0.5, num_warps=4)
    launcher((4,), y, 8, 0.5, num_warps=4)  # another tensor of the same kind
    assert (len(kernel.compiled), len(kernel.again)) == (1, 1)
    assert kernel.again[0][0] == (4, 1, 1)
    assert kernel.again[0][1][0] is y
    others: list[tuple[Any, ...]] = [
        (x, 16, 0.5, 4),
        (x, 8, 0.25, 4),
        (x.half(), 8, 0.5, 4),
        (x[1:], 8, 0.5, 4),  # not at a multiple of 16 bytes
        (x, 8, 0.5, 8),
        (x, 8.0, 0.5, 4),  # Triton compiles another kernel for a number of another type
        (x, True, 0.5, 4),
        (x, 1, 0.5, 4),
    ]
    for tensor, number, factor, warps in others:
        launcher((4,), tensor, number, factor, num_warps=warps)
    assert (len(kernel.compiled), len(kernel.again)) == (1 + len(others), 1)


def test_what_launched_it_is_had_for_equal_arguments() -> None:
    kernel = Compiling()
    launcher, x = Launcher(kernel), torch.zeros(64)
    assert launcher.remembered((4,), x, 8, 0.5, num_warps=4) is None
    launcher((4,), x, 8, 0.5, num_warps=4)
    launch = launcher.remembered((4,), x, 8, 0.5, num_warps=4)
    assert launch is not None
    launch(x, 9, 0.5)
    assert kernel.again == [((4, 1, 1), (x, 9, 0.5))]
    assert launcher.remembered((4,), x, 9, 0.5, num_warps=4) is None


def test_descriptors_of_another_dtype_take_another_kernel() -> None:
    kernel, boxes = Compiling(), Boxes((16, 32))
    launcher = Launcher(kernel)
    for dtype in (torch.float16, torch.bfloat16, torch.bfloat16):
        launcher((4,), boxes(torch.zeros(64, 32, dtype=dtype), (64, 32), (32, 1)), 8)
    assert (len(kernel.compiled), len(kernel.again)) == (2, 1)


def test_no_more_launches_are_remembered_than_said() -> None:
    launcher = Launcher(Compiling())
    for number in range(MOST + 10):
        launcher((1,), torch.zeros(1), number)
    assert len(launcher._launches) == 10


def test_boxes_are_checked_once_for_a_shape_and_hold_each_their_tensor() -> None:
    boxes = Boxes((16, 32))
    first, second = torch.zeros(64, 32), torch.zeros(64, 32)
    made = [boxes(tensor, (64, 32), (32, 1)) for tensor in (first, second)]
    assert all(one.base is tensor for one, tensor in zip(made, (first, second), strict=True))
    assert made[0].shape == made[1].shape == [64, 32]
    assert made[1].block_shape == [16, 32]
    with pytest.raises(AssertionError):
        boxes(first, (64, 32), (32, 2))  # Triton's own check


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_sizes_are_tritons(n: int, power: int) -> None:
    assert next_power_of_2(n) == power == triton.next_power_of_2(n)
    assert cdiv(n, 3) == triton.cdiv(n, 3)


@pytest.mark.parametrize("size", [1000, 1024])
def test_a_kernel_gives_the_same_however_it_is_launched(size: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    launcher = Launcher(add)
    for factor in (1.0, 2.0, 1.0):
        x, y = torch.randn(size, device=device), torch.randn(size, device=device)
        out = torch.empty_like(x)
        launcher((cdiv(size, 256),), x, y, out, size, factor, 256, num_warps=4)
        torch.testing.assert_close(out, x + factor * y)
