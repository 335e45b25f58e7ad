"""Launches of Triton kernels with little work on the host, for kernels of ours and of plugins.

Triton inspects each argument of each launch to find the compiled kernel, which takes 30 to 100 us for kernels of many
arguments. A layer of a prompt has five of these launches. Here the compiled kernel is cached by the properties of its
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from attrs import define

MOST = 512
"""Launches, or shapes, that are remembered; then all are forgotten, as under shapes that never come again."""


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two of at least n. `triton.next_power_of_2` takes 10 us on the host."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up (see `next_power_of_2`)."""
    return -(-n // size)


class Launcher:
    """Launches one kernel.

    The first launch with given kinds of arguments is Triton's own. The compiled kernel depends on the tensors' devices,
    dtypes and alignment and on the numbers and their types (1, True and 1.0 are equal but different). A later launch
    must share all of these to use the same kernel. For descriptors (`Boxes`) only device and dtype count, because boxes
    do not change, and addresses are multiples of 16 bytes.

    Args:
        kernel: a function under `triton.jit` or `gluon.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launches: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._tensors: tuple[int, ...] | None = None  # places of tensors among the arguments
        self._boxes: tuple[int, ...] = ()  # and of descriptors
        self._numbers: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch the kernel over a grid.

        Args:
            grid: programs in each dimension.
            arguments: arguments of every parameter of the kernel, in order, compile-time constants included. Tensors,
                or descriptors of tensors, are always at the same places.
            options: Triton's options, e.g. `num_warps`.
        """
        key = self._key(grid, arguments, options)
        launch = self._launches.get(key)
        if launch is not None:
            launch(*arguments)
            return
        if len(self._launches) >= MOST:
            self._launches.clear()
        compiled = self._kernel[grid](*arguments, **options)
        if compiled is not None:  # as it is under Triton's interpreter
            self._launches[key] = compiled[(*grid, 1, 1)]

    def remembered(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Callable[..., None] | None:
        """Return the launch function for these arguments, for callers that only change unspecialised numbers later.

        None if no launch with these arguments is cached, as under Triton's interpreter.
        """
        return self._launches.get(self._key(grid, arguments, options))

    def _key(self, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """Return the key that launches of the same compiled kernel share."""
        if self._tensors is None:
            self._look(arguments)
        found = [grid, *options.values()]
        for place in self._tensors or ():
            tensor = arguments[place]
            found += (tensor.device, tensor.dtype, tensor.data_ptr() & 15)
        for place in self._boxes:
            tensor = arguments[place].base
            found += (tensor.device, tensor.dtype)
        numbers = self._numbers(arguments)
        return (*found, *map(type, numbers), numbers)

    def _look(self, arguments: tuple[Any, ...]) -> None:
        """Learn which of the arguments are tensors."""
        places = range(len(arguments))
        self._tensors = tuple(i for i in places if isinstance(arguments[i], torch.Tensor))
        self._boxes = tuple(i for i in places if hasattr(arguments[i], "block_shape"))
        rest = [i for i in places if i not in self._tensors and i not in self._boxes]
        self._numbers = itemgetter(*rest) if len(rest) > 1 else lambda given: tuple(given[i] for i in rest)


@define(eq=False)
class Launch:
    """One launch of a kernel, as `Launcher.__call__` takes it."""

    launcher: Launcher
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        """Launch it."""
        self.launcher(self.grid, *self.arguments, **self.options)

    def prepared(self) -> Callable[[], None]:
        """Launch it, and what launches the same again with no look at the arguments, which must be kept."""
        self()
        found = self.launcher.remembered(self.grid, *self.arguments, **self.options)
        return self if found is None else partial(found, *map(as_pointer, self.arguments))


def as_pointer(argument: Any) -> Any:
    """Return an address instead of a tensor.

    Triton's launches accept it without inspecting it, which saves 1 us each.
    """
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class Boxes:
    """Descriptors of tensors for the copy engine. What Triton checks of a shape it checks once: it takes 10 us.

    Args:
        box: the shape of a box.
        make: a descriptor of a tensor, its shape, its strides and a box: Gluon's with a layout, or None for Triton's.
    """

    def __init__(self, box: Sequence[int], make: Callable[..., Any] | None = None) -> None:
        if make is None:
            from triton.tools.tensor_descriptor import TensorDescriptor  # here: a CPU has no Triton

            make = TensorDescriptor
        self._box, self._make = list(box), make
        self._checked: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}

    def __call__(self, base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a view of the tensor's memory with a shape and strides. Its address must be a multiple of 16 bytes."""
        like = self._checked.get((shape, strides))
        if like is None:
            if len(self._checked) >= MOST:
                self._checked.clear()
            made = self._make(base, list(shape), list(strides), self._box)
            self._checked[shape, strides] = _with_base(made, None)
            return made
        return _with_base(like, base)


def _with_base(descriptor: Any, base: torch.Tensor | None) -> Any:
    """Return the same descriptor of other memory."""
    made = object.__new__(type(descriptor))
    vars(made).update(vars(descriptor), base=base)
    return made
