"""Connection of a transformers model's attention to the attend callable of the current forward.

transformers looks up an attention function by the name in the model's configuration and calls it with the attention
module. Each attention module carries a slot object. The slot knows its layer's facts and the model's holder of the
current attend callable. There is no global state, so several models are independent.

No mask function is registered under the name: transformers then builds no masks at all, and skips the check for packed
sequences, which would cost a device synchronisation in every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from transformers import AttentionInterface

from slotline.plugins.model_families import latents
from slotline.registry.contracts.attention import AttentionLayer, CacheSlots
from slotline.registry.contracts.attention_edges import EXPANSION, AttentionEdges
from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import Advance, Attend

ATTENTION_NAME = "slotline"
"""The attention implementation's name in transformers' configurations."""

SLOT_ATTRIBUTE = "slotline_slot"
"""The attribute of an attention module that holds its `AttentionSlot`."""


def no_attend(layer: AttentionLayer | StateLayer, *_tensors: Any, **_more: Any) -> torch.Tensor:
    """Refuse a call between forwards.

    Raises:
        ModelError: always.
    """
    raise ModelError(
        f"layer {layer.name!r} was called outside Model.forward, or without what serves its kind",
        fix="call Model.forward with attend, and with advance where the model has state layers",
    )


class AttendHolder:
    """Attend and advance callables of one model's current forward, and the slots that count their calls in it.

    Attributes:
        kept: [n] int64, the tokens that pass the layers that store nothing. None for all.
        edges: what backends take over at the edges of attention, by layer index.
    """

    __slots__ = ("advance", "attend", "edges", "kept", "shared")

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None
        self.edges: Mapping[int, Collection[str]] = {}
        self.attend: Attend = no_attend
        self.advance: Advance = no_attend
        self.shared: list[SharedSlot] = []

    def state(self) -> tuple[Any, ...]:
        """Return what `restore` takes, to leave a forward pass and go on with it later."""
        return self.attend, self.advance, self.kept, [slot.num_calls for slot in self.shared]

    def restore(self, state: tuple[Any, ...]) -> None:
        """Go on with the forward pass of a `state`."""
        self.attend, self.advance, self.kept, calls = state
        self.edges = _edges_of(self.attend)
        for slot, number in zip(self.shared, calls, strict=True):
            slot.num_calls = number

    @contextmanager
    def serving(
        self, attend: Attend, advance: Advance | None = None, kept: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Let the model's layers reach these while the block runs."""
        self.attend, self.advance, self.kept = attend, advance or no_attend, kept
        self.edges = _edges_of(attend)
        for slot in self.shared:
            slot.num_calls = 0
        try:
            yield
        finally:
            self.attend = self.advance = no_attend
            self.kept, self.edges = None, {}


def _edges_of(attend: Any) -> Mapping[int, Collection[str]]:
    """Return what backends take over in a step, by layer index."""
    asked = getattr(attend, "edges", None)  # of a `StoringAttend`
    return {} if asked is None else asked()


@define(eq=False)
class AttentionSlot:
    """Link from an attention module to `attend`.

    Attributes:
        layer: the layer's facts.
        holder: the model's holder. Its `attend` takes (layer, query [num_tokens, num_heads, head_size], key, value
            [num_tokens, num_kv_heads, ...], sinks or None, and `inputs` of layers that have some) and returns
            [num_tokens, num_heads, head_size_v].
    """

    layer: AttentionLayer
    holder: AttendHolder

    def slots(self, key: torch.Tensor) -> CacheSlots | None:
        """Return the place for the layer's new keys like `key`, and the values, in this step."""
        slots = getattr(self.holder.attend, "slots", None)  # of a `StoringAttend`
        return None if slots is None else slots(self.layer, key)

    def takes_wanted(self) -> bool:
        """Return True if `attend` accepts the layer's queries of only the wanted tokens in this step."""
        takes = getattr(self.holder.attend, "takes_wanted", None)  # of a `StoringAttend`
        return takes is not None and self.is_plain() and takes(self.layer)

    def edges(self) -> Collection[str]:
        """Return what the layer's backend takes over at the edges of attention in this step, by name."""
        return self.holder.edges.get(self.layer.index, ())

    def is_plain(self) -> bool:
        """Return True if `attend` accepts the module's states unchanged in this step."""
        return not self.layer.mla and (self.holder.kept is None or self.layer.shares_kv_with is None)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        **said: Any,
    ) -> torch.Tensor:
        """Call the holder's `attend` for the layer, with the options of a `StoringAttend`."""
        return self.holder.attend(self.called(), query, key, value, sinks, **said)

    def called(self) -> AttentionLayer:
        """Return the layer that the module is called for."""
        return self.layer


@define(eq=False)
class SharedSlot(AttentionSlot):
    """Slot of a module that acts as several layers of the model in turn. `layer` is the first.

    Attributes:
        layers: the layers in call order.
        num_calls: number of calls in the current forward.
    """

    layers: tuple[AttentionLayer, ...]
    num_calls: int = 0

    def called(self) -> AttentionLayer:
        """Return the layer of the current call."""
        self.num_calls += 1
        return self.layers[self.num_calls - 1]

    def slots(self, key: torch.Tensor) -> CacheSlots | None:
        """Return None, because nothing is stored early."""
        return None

    def edges(self) -> Collection[str]:
        """Return nothing, because the layer of the next call is not known before."""
        return ()

    def takes_wanted(self) -> bool:
        """Return False, because the layer of the next call is not known before."""
        return False


def name_of(module: str, call: int) -> str:
    """Return the name of the layer that a module acts as in its `call`-th call (from 0) in a forward."""
    return module if call == 0 else f"{module}#{call}"


def module_of(name: str) -> str:
    """Return the module of a layer's name (see `name_of`)."""
    return name.partition("#")[0]


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    indices: Mapping[str, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers. Scale, window and soft cap are known from the layer's facts.

    Args:
        query: [1, num_heads, num_tokens, head_size]. key and value have num_kv_heads. If keys are latents, the query is
            for expanded keys, and the output is that of expanded values.
        s_aux: the sink logits [num_heads] of models that learn them.
        indices: what the model's indexer hands on (see `sparse_index`), by name, [1, num_tokens, ...] each.

    Returns:
        [1, num_tokens, num_heads, head_size_v], and no weights.
    """
    slot = module.slotline_slot
    if slot.holder.kept is not None and query.shape[2] != key.shape[2]:  # keys of a layer that had all tokens
        key, value = (states.index_select(2, slot.holder.kept) for states in (key, value))
    attend = slot.attend
    if slot.layer.inputs and indices is not None:
        attend = partial(attend, inputs={name: states[0] for name, states in indices.items()})
    if slot.layer.mla and EXPANSION in slot.edges():
        edges = AttentionEdges(expansion=latents.expansion_of(module))
        return attended(module, (query, key, value), s_aux, partial(attend, written=True, edges=edges), mla=False)
    return attended(module, (query, key, value), s_aux, attend, mla=slot.layer.mla)


def attended(
    module: Any,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    attend: Callable[..., torch.Tensor],
    *,
    mla: bool,
) -> tuple[torch.Tensor, None]:
    """Return what transformers' module expects of query, key and value as it gives them, see `slot_attention`.

    Args:
        attend: takes query [num_tokens, num_heads, head_size], key, value and sinks.
        mla: whether keys are latents.
    """
    # Views only: transformers made these by transposing [1, num_tokens, heads, size].
    query, key, value = (states.transpose(1, 2)[0] for states in given)
    if mla:
        out = latents.expanded(module, attend(latents.absorbed(module, query), key, value, sinks))
    else:
        out = attend(query, key, value, sinks)
    return out.unsqueeze(0), None  # [1, num_tokens, num_heads, head_size_v]


def register(name: str, function: Any) -> None:
    """Register an attention function with transformers. Registering it again has no effect."""
    AttentionInterface.register(name, function)


def bind(hf_model: torch.nn.Module, layers: Iterable[AttentionLayer]) -> AttendHolder:
    """Give every attention module its slot.

    Raises:
        ModelError: if the model has no module of a layer's name.
    """
    holder, by_module = AttendHolder(), dict[str, list[AttentionLayer]]()
    for layer in layers:
        by_module.setdefault(layer.name.partition("#")[0], []).append(layer)
    for name, own in by_module.items():
        try:
            module = hf_model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                f"the loaded model has no attention module {name!r}",
                fix="inspect the checkpoint again: the facts belong to another model",
            ) from error
        slot = AttentionSlot(own[0], holder)
        if len(own) > 1:
            slot = SharedSlot(own[0], holder, tuple(own))
            holder.shared.append(slot)
        setattr(module, SLOT_ATTRIBUTE, slot)
        if slot.layer.mla:
            latents.hand_on(module)
    return holder
