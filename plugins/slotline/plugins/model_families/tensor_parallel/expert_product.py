"""Sums of a rank's own experts: transformers' forms, and on a GPU one whose steps all leave out other ranks' experts.

transformers' grouped product skips tokens of other experts, but what comes before and behind it copies and activates
their rows too. With two ranks these are half of all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations import moe

from slotline.kernels.triton_launcher import Launcher, cdiv, next_power_of_2
from slotline.kernels.triton_support import has_triton
from slotline.plugins.model_families.passes.target import OLDEST_GPU

Sums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes hidden states [tokens, size], own experts [tokens, k] with their number for one of another rank, and
weights [tokens, k]. Returns the sums [tokens, size]."""

ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
"""Of the kernels, by the class of a mixture's activation."""
BLOCK = 1024
"""Most elements of a row for a program."""


def sums_of(module: Any, *, fused: bool) -> Sums:
    """Return the function for the sums of a divided mixture.

    Args:
        fused: whether our kernels may be used.
    """
    if not hasattr(module, "has_gate"):  # experts with quantized weights, whose plugins skip such tokens
        return partial(_quantized_sums, type(module).forward.__get__(module))
    if fused and takes(module):
        return OwnSums(module)
    looped = module.config._experts_implementation in (None, "eager")  # whose loops do not all skip such tokens
    found: Sums = (moe.grouped_mm_experts_forward if looped else type(module).forward).__get__(module)
    return found


def takes(module: Any) -> bool:
    """Return True for a mixture in bfloat16 on a GPU that computes ``down(act(gate) * up)`` and nothing else."""
    weight = module.down_proj
    plain = module.has_gate and module.is_concatenated and not (module.has_bias or module.has_post_expert_norm)
    gated = type(module)._apply_gate is moe._default_apply_gate and type(module.act_fn).__name__ in ACTIVATIONS
    return bool(plain and gated and weight.dtype is torch.bfloat16 and weight.is_cuda and _is_new(weight.device))


class OwnSums:
    """Sums of a mixture's own experts in grouped products. Nothing is read on the host."""

    def __init__(self, module: Any) -> None:
        from slotline.plugins.model_families.tensor_parallel import expert_kernels

        self._module = module
        self._experts = int(module.num_experts)
        self._activation = ACTIVATIONS[type(module.act_fn).__name__]
        self._numbers = torch.arange(self._experts, dtype=torch.int32, device=module.down_proj.device)
        self._take, self._gate, self._join = map(
            Launcher, (expert_kernels.take_rows, expert_kernels.gate_rows, expert_kernels.join_rows)
        )

    def __call__(self, hidden_states: torch.Tensor, own: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Sums`."""
        hidden_states, weights = hidden_states.contiguous(), weights.contiguous()
        own = own.to(torch.int32).contiguous()  # which sorts faster
        out = torch.empty_like(hidden_states)
        if not own.numel():
            return out.zero_()
        ordered, order = own.view(-1).sort()
        ends = torch.searchsorted(ordered, self._numbers, right=True, out_int32=True)  # of each expert's rows
        rows, places = self._taken(hidden_states, order, ends, own.shape[1])
        rows = self._product(self._gated(self._product(rows, "gate_up_proj", ends), ends), "down_proj", ends)
        block = _block(hidden_states.shape[1])
        grid = (own.shape[0], cdiv(hidden_states.shape[1], block))
        self._join(grid, rows, places, own, weights, out, hidden_states.shape[1], self._experts, own.shape[1], block)
        return out

    def _taken(
        self, x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, choices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the choices in order of their experts, and the place of each choice among them."""
        size, block = x.shape[1], _block(x.shape[1])
        rows = x.new_empty(len(order), size)
        places = torch.empty(len(order), dtype=torch.int32, device=x.device)
        self._take(
            (len(order), cdiv(size, block)), x, order, ends, rows, places, size, self._experts - 1, choices, block
        )
        return rows, places

    def _product(self, rows: torch.Tensor, name: str, ends: torch.Tensor) -> torch.Tensor:
        weight = self._module._parameters[name]
        weight = weight if self._module.is_transposed else weight.transpose(1, 2)
        return functional.grouped_mm(rows, weight, offs=ends)

    def _gated(self, merged: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        size = merged.shape[1] // 2
        block = _block(size)
        out = merged.new_empty(merged.shape[0], size)
        grid = (merged.shape[0], cdiv(size, block))
        self._gate(grid, merged, ends, out, size, self._experts - 1, self._activation, block)
        return out


def _quantized_sums(sums: Sums, hidden_states: torch.Tensor, own: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return sums(hidden_states, own.long(), weights)


def _is_new(device: torch.device) -> bool:
    return has_triton() and torch.cuda.get_device_capability(device) >= OLDEST_GPU


def _block(size: int) -> int:
    return min(next_power_of_2(size), BLOCK)
