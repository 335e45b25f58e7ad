"""Support check for kernels in Gluon, which are made for Hopper."""

from __future__ import annotations

from importlib.metadata import version

HOPPER, GLUON = 9, "3.6."
"""The compute capability's major number, and the release of Triton that the kernels were run with: what they are
written in, Gluon, still changes with each."""


def has_hopper_kernels(compute_capability: tuple[int, int] | None) -> bool:
    """Return True if the kernels in Gluon run on this device with the installed Triton."""
    return compute_capability is not None and compute_capability[0] == HOPPER and version("triton").startswith(GLUON)


def device_has_hopper_kernels(device: str) -> bool:
    """Return the same for a torch device string. Only a GPU is queried."""
    import torch  # what is asked of descriptors does without

    return device.startswith("cuda") and has_hopper_kernels(torch.cuda.get_device_capability(device))
