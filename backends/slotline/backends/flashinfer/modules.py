"""FlashInfer's compiled modules: one for each dtype pair, head size, and use of windows and soft caps."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionContext
from slotline.registry.errors import PluginError

logger = logging.getLogger("slotline")


def specs_of(context: AttentionContext, kernels: tuple[str, ...]) -> list[Any]:
    """Return FlashInfer's descriptions of the modules that a group needs, compiled or not.

    Args:
        context: the group's context. Its layers need the same modules.
        kernels: some of ``fa2`` and ``fa3``.
    """
    from flashinfer.jit import gen_batch_prefill_module

    layer = context.layers[0]
    dtype, kv_dtype = getattr(torch, context.dtype), getattr(torch, context.kv_dtype)
    size, window, cap = layer.head_size, layer.window is not None, layer.soft_cap is not None
    return [
        gen_batch_prefill_module(kernel, dtype, kv_dtype, dtype, torch.int32, size, size, 0, window, cap, False)
        for kernel in kernels
    ]


def compile_kernels(context: AttentionContext, kernels: tuple[str, ...]) -> None:
    """Compile the modules of this group, all at once. FlashInfer keeps the result on disk.

    Each module has its own lock. Processes that need different modules compile in parallel, and a process waits only
    for a module that another one is compiling.

    Raises:
        PluginError: with the compiler's complaint.
    """
    missing = [spec for spec in specs_of(context, kernels) if not spec.is_compiled]
    if not missing:
        return
    logger.info("compiling %d modules of FlashInfer, which takes a minute or more the first time", len(missing))
    try:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda spec: spec.build(verbose=False), missing))
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        raise PluginError(
            f"flashinfer cannot compile its kernels: {lines[-1] if lines else error}",
            fix="run `flashinfer show-config` and see that nvcc fits the driver, or set attention.backend to another",
        ) from error
