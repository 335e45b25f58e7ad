"""Connection of adapters to a loaded decoder: after its linear layers, merged ones included, and its embedding.

Forward hooks do the work, or the forwards of extended layers. The passes' short forwards check for both and call these
layers as modules, so an adapter's contribution is added wherever the base's product is computed. It comes before other
hooks, such as those that join the outputs of ranks. Without adapters the speed does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn
from torch.utils.hooks import RemovableHandle

from slotline.plugins.model_families.passes.extended_linear import ExtendedLinear
from slotline.plugins.model_families.passes.invariant_linear import KernelLinear, TiledLinear
from slotline.plugins.model_families.passes.merged_projections import MergedProjection, PlainMerged
from slotline.plugins.model_families.passes.packed_linear import PackedLinear, has_hooks
from slotline.plugins.model_families.quantized.slot_linear import SlotLinear
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    from slotline.registry.contracts.model_family import AddShares


@frozen(eq=False)
class Place:
    """One module that makes the outputs of one or several linear layers, side by side, or looks embeddings up."""

    module: nn.Module
    names: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    embeds: bool = False


class Adaptation:
    """Linear layers of a decoder that support adapters.

    Args:
        hf_model: the model after the passes.
        probe: runs the given number of tokens through it. The linear layers that all tokens pass exactly once are
            found, and the embedding likewise. Others (experts, layers whose weights a kernel reads) have no output that
            an adapter could add to.
    """

    PROBE_TOKENS = 3

    def __init__(self, hf_model: nn.Module, probe: Callable[[int], None]) -> None:
        found = _passed_once([*_places(hf_model), *_embedding(hf_model)], probe, self.PROBE_TOKENS)
        self.places = tuple(place for place in found if not place.embeds)
        self.embedding = next((place for place in found if place.embeds), None)
        self._tied = _tied(hf_model)
        self._shared = _shared(hf_model)
        self._extended: dict[tuple[str, ...], ExtendedLinear] = {}
        self._handles: list[RemovableHandle] = []
        self._added: tuple[AddShares | None, bool] = (None, False)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Path -> (in_features, out_features)."""
        return {
            name: (place.in_features, size)
            for place in self.places
            for name, size in zip(place.names, place.out_features, strict=True)
        }

    @property
    def merged(self) -> tuple[tuple[str, ...], ...]:
        """Those that come out of one product, in the order of its columns."""
        return tuple(place.names for place in self.places if len(place.names) > 1)

    @property
    def embeddings(self) -> dict[str, tuple[int, int]]:
        """Path -> (num_embeddings, embedding_dim)."""
        place = self.embedding
        return {} if place is None else {place.names[0]: (place.in_features, place.out_features[0])}

    def stages(self, stage_of: Mapping[int, int]) -> dict[str, int]:
        """Return path -> stage, by the stage of each module's id."""
        every = (*self.places, *(() if self.embedding is None else (self.embedding,)))
        return {name: stage_of[id(place.module)] for place in every for name in place.names}

    @property
    def active(self) -> bool:
        """True if contributions are added."""
        return self._added[0] is not None

    def adapt(self, add: AddShares | None, names: Collection[str], *, single: bool = False) -> None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.adapt`."""
        if (add, single) == self._added:  # not `is`: each look-up of a bound method makes another object
            return
        for handle in self._handles:
            handle.remove()
        for extended in self._extended.values():
            extended.leave()
        self._added, self._handles = (add, single), []
        if add is not None:
            for place in (place for place in self.places if not set(names).isdisjoint(place.names)):
                if place.names in self._extended:
                    self._extended[place.names].enter(add, single=single)
                else:
                    hook = _adding(place.names, add)
                    self._handles.append(place.module.register_forward_hook(hook, prepend=True))
            if self.embedding is not None and self.embedding.names[0] in names:
                hook = _embedding_too(self.embedding, add)
                self._handles.append(self.embedding.module.register_forward_hook(hook, prepend=True))

    @torch.no_grad()
    def extend(
        self, names: tuple[str, ...], rows: int, max_tokens: int, *, single_rows: int = 0
    ) -> torch.Tensor | None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.extend`."""
        module = next((place.module for place in self.places if place.names == names), None)
        if not isinstance(module, nn.Linear | PlainMerged) or has_hooks(module) or id(module.weight) in self._tied:
            return None
        self._extended[names] = ExtendedLinear(module, names, rows, max_tokens, single_rows)
        return self._extended[names].room

    @torch.no_grad()
    def add_to_weight(self, name: str, delta: torch.Tensor) -> None:
        """See `slotline.registry.contracts.model_family.AdaptableModel.add_to_weight`."""
        if name in self.embeddings:
            self._add_to_embedding(name, delta)
            return
        place = next(place for place in self.places if name in place.names)
        index = place.names.index(name)
        start = sum(place.out_features[:index])
        module: Any = place.module.product if isinstance(place.module, TiledLinear) else place.module
        if id(module._parameters.get("weight")) in self._tied:
            raise ModelError(
                f"{name} shares its weight with the embedding, so no adapter can be merged into it",
                fix="set lora.merge = false, or use an adapter without it",
            )
        if isinstance(module, SlotLinear):
            raise ModelError(
                f"{name} has a quantized weight, so no adapter can be merged into it",
                fix="set lora.merge = false, or load the model in full precision",
            )
        weight = module.weight  # a plain copy where it is packed
        rows = weight[start : start + place.out_features[index]]
        rows.copy_((rows.float() + delta.to(rows.device, torch.float32)).to(rows.dtype))
        if isinstance(module, PackedLinear):
            module.packed.copy_(module.pack(weight))

    def _add_to_embedding(self, name: str, delta: torch.Tensor) -> None:
        assert self.embedding is not None
        weight: Any = self.embedding.module.weight
        if id(weight) in self._shared:
            raise ModelError(
                f"{name} shares its weight with the output projection, so no adapter can be merged into it",
                fix="set lora.merge = false, or use an adapter without it",
            )
        weight.copy_((weight.float() + delta.to(weight.device, torch.float32)).to(weight.dtype))


def _adding(names: tuple[str, ...], add: AddShares) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        add(names, inputs[0].flatten(0, -2), output.view(-1, output.shape[-1]))
        return output

    return hook


def _embedding_too(place: Place, add: AddShares) -> Callable[..., torch.Tensor]:
    scale = getattr(place.module, "embed_scale", None)  # Gemma's: what the table gives is multiplied, shares as well

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        ids, rows = inputs[0].reshape(-1), output.view(-1, output.shape[-1])
        if scale is None:
            add(place.names, ids, rows)
        else:
            share = torch.zeros_like(rows)
            add(place.names, ids, share)
            rows += share * (scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else scale)
        return output

    return hook


_NO_ADAPTERS = frozenset({"merged", "dt_proj"})
"""What `MergedProjection` names the product of several; and a layer of Mamba whose weight transformers reads beside its
forward, so that no adapter on it can be trained."""


_LINEAR = (nn.Linear, PackedLinear, KernelLinear, TiledLinear, SlotLinear)


def _places(hf_model: nn.Module) -> list[Place]:
    """Return every module that is or was linear layers, merged ones once."""
    merged: dict[int, list[tuple[int, str, MergedProjection]]] = {}
    found: list[Place] = []
    inside: set[int] = set()  # of layers that were found
    for path, module in hf_model.named_modules():
        if isinstance(module, MergedProjection):
            merged.setdefault(id(module.shared_linear), []).append((module.index, path, module))
        elif type(module) in _LINEAR and id(module) not in inside:
            linear: Any = module
            if isinstance(module, TiledLinear):
                inside.add(id(module.product))
            if path.rpartition(".")[2] not in _NO_ADAPTERS:
                found.append(Place(module, (path,), linear.in_features, (linear.out_features,)))
    for parts in merged.values():
        _, names, siblings = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
        sizes = tuple(sibling.out_features for sibling in siblings)
        found.append(Place(siblings[0].shared_linear, names, siblings[0].in_features, sizes))
    return found


def _embedding(hf_model: Any) -> list[Place]:
    """Return the model's table of input embeddings."""
    table = hf_model.get_input_embeddings()
    path = next((path for path, module in hf_model.named_modules() if module is table), None)
    if not isinstance(table, nn.Embedding) or path is None:
        return []
    return [Place(table, (path,), table.num_embeddings, (table.embedding_dim,), embeds=True)]


def _passed_once(places: list[Place], probe: Callable[[int], None], num_tokens: int) -> tuple[Place, ...]:
    """Return the modules that all tokens of a probe pass at once, in that order."""
    passed: list[tuple[Place, int]] = []

    def listening(place: Place) -> Callable[..., None]:
        size = 1 if place.embeds else place.in_features
        return lambda module, inputs, output: passed.append((place, inputs[0].numel() // size))

    handles = [place.module.register_forward_hook(listening(place)) for place in places]
    try:
        probe(num_tokens)
    finally:
        for handle in handles:
            handle.remove()
    counts = Counter(id(place) for place, _ in passed)
    return tuple(place for place, tokens in passed if tokens == num_tokens and counts[id(place)] == 1)


def _tied(hf_model: nn.Module) -> frozenset[int]:
    """Return the weights of embeddings, which an output projection may share."""
    tables = (module for module in hf_model.modules() if isinstance(module, nn.Embedding))
    return frozenset(id(weight) for table in tables if (weight := table._parameters.get("weight")) is not None)


def _shared(hf_model: nn.Module) -> frozenset[int]:
    """Return the weights that several modules share."""
    own = [id(tensor) for module in hf_model.modules() for tensor in module._parameters.values() if tensor is not None]
    return frozenset(found for found, count in Counter(own).items() if count > 1)
