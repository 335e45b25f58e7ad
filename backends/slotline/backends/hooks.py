"""Plugins of this root: attention and state backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry import Descriptor, hookimpl


@hookimpl
def slotline_attention() -> Iterable[Descriptor[Any]]:
    """Offer the attention backends."""
    from slotline.backends import cpu, flash_attn, flashinfer, flex, torch_sdpa, triton

    return (
        torch_sdpa.descriptor,
        triton.descriptor,
        cpu.descriptor,
        flash_attn.descriptor,
        flash_attn.descriptor_3,
        flashinfer.descriptor,
        flex.descriptor,
    )


@hookimpl
def slotline_state() -> Iterable[Descriptor[Any]]:
    """Offer the state backends."""
    from slotline.backends import torch_state, triton_state

    return (
        torch_state.descriptor,
        triton_state.descriptor,
    )
