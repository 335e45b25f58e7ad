"""Detection of a forward's tensors that come from the host. Each copy waits for the device and cannot be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_SOURCES: Mapping[Callable[..., Any], tuple[int, str]] = {
    torch.tensor: (0, "data"),
    torch.as_tensor: (0, "data"),
    torch.asarray: (0, "obj"),
    torch.Tensor.new_tensor: (1, "data"),
    torch.Tensor.to: (0, "self"),
    torch.Tensor.cuda: (0, "self"),
    torch.Tensor.type_as: (0, "self"),
    torch.Tensor.copy_: (1, "src"),
}
"""What makes or moves tensors: where among its arguments stands what it makes them of, and that one's name."""


class HostCopies(TorchFunctionMode):
    """Counts, while it is entered, tensors on a device (the meta device, say) that are made of the host's.

    Attributes:
        count: copies so far. A number of the host's in an operation on a device's tensor is none: kernels take it as an
            argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and count it if it copies."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in _SOURCES and isinstance(found, torch.Tensor) and found.device.type != "cpu":
            place, name = _SOURCES[func]
            self.count += _on_host(args[place] if place < len(args) else kwargs.get(name))
        return found


def _on_host(source: object) -> bool:
    """Return True if numbers or a tensor are on the host."""
    return not isinstance(source, torch.Tensor) or source.device.type == "cpu"
