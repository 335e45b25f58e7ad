"""Forward passes by torch.compile, with attention as one operation of torch's.

A compiler traces a forward pass once and writes kernels for what it found. It cannot look into attention, which this
engine plans in each step and gives to a plugin. So attention is an operation that the compiler knows only by the shape
of its output (https://docs.pytorch.org/tutorials/advanced/python_custom_ops.html).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from slotline.plugins.model_families import binding
from slotline.registry.errors import ConfigError, ModelError
from slotline.registry.loading import one_line

if TYPE_CHECKING:
    from slotline.plugins.model_families.loops import Loop

COMPILED_NAME = "slotline_compiled"
"""The attention implementation's name in transformers' configurations."""

_MOST_COMPILED = 64
"""Forms of a forward pass: with and without wanted tokens and embeddings, for one token and for any number."""

_slots: WeakValueDictionary[int, binding.AttentionSlot] = WeakValueDictionary()
"""The slots of compiled models, by the number that their modules have."""


@torch.library.custom_op("slotline::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    slot: int,
) -> torch.Tensor:
    """Compute attention of one layer: [num_tokens, num_heads, head_size_v], of tensors as `AttentionSlot.attend`.

    `inputs` are in the order of the layer's.
    """
    own = _slots[slot]
    names = [each.name for each in own.layer.inputs]
    more = {"inputs": dict(zip(names, inputs, strict=True))} if names else {}
    return own.attend(query, key, value, sinks, **more)


@attend.register_fake
def _shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    slot: int,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:2], value.shape[-1]))


def operation_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    indices: Mapping[str, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers as `binding.slot_attention` does, by the operation."""
    number = module.slotline_number
    more = [indices[name][0] for name in module.slotline_inputs] if indices is not None else []

    def call(*given: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.slotline.attend(*given, more, number)
        return out

    return binding.attended(module, (query, key, value), s_aux, call, mla=module.slotline_latent)


def compiled(hf_model: Any, loop: Loop, backend: str) -> tuple[Loop, tuple[str, ...]]:
    """Return a loop whose calls are compiled whole, and a note on it.

    Args:
        hf_model: a model that `binding.bind` and `latents.hand_on` have seen, without optimising passes.
        backend: of torch.compile.

    Raises:
        ConfigError: if torch has no such backend. The loop raises a ModelError if it cannot be compiled.
    """
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ConfigError(
            f"compile.backend = {backend!r} is no backend of torch.compile",
            fix=f"take one of {', '.join(torch.compiler.list_backends())}",
        )
    binding.register(COMPILED_NAME, operation_attention)
    for module in hf_model.modules():
        if (slot := getattr(module, binding.SLOT_ATTRIBUTE, None)) is not None:
            _slots[id(slot)] = slot
            module.slotline_number, module.slotline_latent = id(slot), slot.layer.mla
            module.slotline_inputs = tuple(each.name for each in slot.layer.inputs)
            module.config._attn_implementation = COMPILED_NAME
    call: Callable[..., torch.Tensor] = torch.compile(loop, fullgraph=True, dynamic=True, backend=backend)

    def run(*inputs: Any) -> torch.Tensor:
        try:
            with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
                return call(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ModelError(
                f"{type(hf_model).__name__} cannot be compiled by {backend!r}: {one_line(error)}",
                fix="set compile.mode = 'none'",
            ) from error

    return run, (f"torch.compile with {backend!r} takes each forward pass whole",)
