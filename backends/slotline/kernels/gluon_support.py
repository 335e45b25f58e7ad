"""Support check for kernels in Gluon, which are made for Hopper, and their launches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from attrs import define, field

logger = logging.getLogger("slotline")

HOPPER = 9
"""The compute capability's major number that the kernels are made for."""
SERVED = "prompts, single tokens, and latents of 512 + 64"
"""What there are kernels for."""


@cache
def why_no_gluon() -> str | None:
    """Return the reason why the installed Triton cannot compile the kernels in Gluon, and a fix. None if it can try.

    It can if it has every name that they use. Gluon is experimental, and its names differ between releases.
    """
    if find_spec("triton") is None:
        return "the package triton is not installed; `pip install triton` makes it available"
    try:
        import_module("slotline.kernels.gluon_compat")
    except (ImportError, AttributeError) as error:
        import triton

        return (
            f"triton {triton.__version__} lacks a name that they use ({error}); `pip install 'triton>=3.6'` brings one "
            "that has it"
        )
    return None


def has_hopper_kernels(compute_capability: tuple[int, int] | None) -> bool:
    """Return True if the kernels in Gluon run on this device with the installed Triton."""
    return compute_capability is not None and compute_capability[0] == HOPPER and why_no_gluon() is None


def device_has_hopper_kernels(device: str) -> bool:
    """Return the same for a torch device string. Only a GPU is queried.

    One warning says why if it is a Hopper GPU, and Triton is the reason.
    """
    import torch  # what is asked of descriptors does without

    if not device.startswith("cuda") or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    reason = why_no_gluon()
    if reason is not None:
        _warn(SERVED, reason)
    return reason is None


@define(eq=False)
class HopperLaunch:
    """Launches of a kernel in Gluon. Where Triton fails to compile it, the kernel for all GPUs does its work.

    Attributes:
        serves: what the kernel computes, for the warning.
        launch: launches it.
        failed: whether Triton failed to compile it.
    """

    serves: str
    launch: Callable[..., object]
    failed: bool = field(default=False, init=False)

    def __call__(self, *arguments: Any, **options: Any) -> bool:
        """Launch the kernel. Return False if it cannot be compiled; a warning says why, once."""
        if self.failed:
            return False
        try:
            self.launch(*arguments, **options)
        except Exception as error:  # whatever a compiler raises
            self.failed = True
            import triton

            text = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
            _warn(self.serves, f"triton {triton.__version__} does not compile them ({text}); another release may")
            logger.debug("the kernel for %s failed", self.serves, exc_info=error)
            return False
        return True


@cache
def _warn(serves: str, reason: str) -> None:
    logger.warning("Hopper's own kernels for %s are not used, and those for all GPUs take longer: %s", serves, reason)
