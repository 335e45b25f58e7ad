"""How small arrays of the host get to a device, for parts of ours and of plugins that have no staging buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on the device.

    A copy from ordinary memory would keep the host waiting until the forward pass in front of it is over, so what goes
    to another device goes by pinned memory; torch gives that to no one else before it was read.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
