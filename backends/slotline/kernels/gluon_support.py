"""Where kernels in Gluon, which are made for Hopper, may run."""

from __future__ import annotations

from importlib.metadata import version

HOPPER, GLUON = 9, "3.6."
"""The compute capability's major number, and the release of Triton that the kernels were run with: what they are
written in, Gluon, still changes with each."""


def has_hopper_kernels(compute_capability: tuple[int, int] | None) -> bool:
    """Whether the kernels in Gluon run on such a device with the Triton that is installed."""
    return compute_capability is not None and compute_capability[0] == HOPPER and version("triton").startswith(GLUON)


def device_has_hopper_kernels(device: str) -> bool:
    """The same of a torch device string; only a GPU is asked what it is."""
    import torch  # what is asked of descriptors does without

    return device.startswith("cuda") and has_hopper_kernels(torch.cuda.get_device_capability(device))
