"""L0 of what `inspect` finds: sizes that can be, layers in order, parts that add up, and no weight that is read."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelFacts
from slotline.registry.contracts.state import kind_of
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.model_family import FamilyWorld, by_example, rewrite, tensors_in

TYPES = ("decoder", "encoder_only", "cross")


@check(Kind.MODEL_FAMILY, "model_family.facts.sizes", Level.CONTRACT, cases=by_example, cost=0.1)
def facts_are_sound(run: Run) -> None:
    """Sizes are positive, the dtype is one of torch, special tokens are in the vocabulary, and the folder is named."""
    world = FamilyWorld(run)
    facts = world.inspect()
    if not isinstance(facts, ModelFacts):
        raise Failed(f"inspect returned {type(facts).__name__}, expected ModelFacts")
    for name in ("vocab_size", "hidden_size", "max_model_len", "num_parameters"):
        if not isinstance(getattr(facts, name), int) or getattr(facts, name) < 1:
            raise Failed(f"{name} is {getattr(facts, name)!r}, expected a positive integer")
    if not isinstance(getattr(torch, facts.dtype, None), torch.dtype):
        raise Failed(f"dtype is {facts.dtype!r}, which is no dtype of torch")
    if facts.path != world.folder():
        raise Failed(f"path is {facts.path}, the folder is {world.folder()}")
    tokens = [*facts.eos_token_ids, *((facts.decoder_start,) if any(m.prompt for m in facts.modalities) else ())]
    if outside := [token for token in tokens if not 0 <= token < facts.vocab_size]:
        raise Failed(f"token {outside[0]} is not in the vocabulary of {facts.vocab_size}")
    if facts.default_max_model_len is not None and not 0 < facts.default_max_model_len <= facts.max_model_len:
        raise Failed(f"default_max_model_len is {facts.default_max_model_len}, the most is {facts.max_model_len}")
    if any(m.cross for m in facts.modalities) != (facts.max_encoder_len > 0):
        raise Failed(f"max_encoder_len is {facts.max_encoder_len}, and the modalities are {facts.modalities}")


@check(Kind.MODEL_FAMILY, "model_family.facts.layers", Level.CONTRACT, cases=by_example, cost=0.1)
def layers_are_sound(run: Run) -> None:
    """Layers have indices from 0 on, names of their own, heads that groups divide, and caches that exist."""
    facts = FamilyWorld(run).inspect()
    _in_order("layers", facts.layers)
    _in_order("state_layers", facts.state_layers)
    if not facts.layers and not facts.state_layers:
        raise Failed("the facts have no layers, and a model of no attention and no state needs no engine")
    for layer in facts.layers:
        what = f"layer {layer.index} ({layer.name})"
        if min(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v) < 1:
            raise Failed(f"{what}: heads and their sizes must be positive: {layer}")
        if layer.num_heads % layer.num_kv_heads:
            raise Failed(f"{what}: {layer.num_heads} heads cannot share {layer.num_kv_heads} KV heads evenly")
        if layer.mla and (layer.num_kv_heads != 1 or layer.head_size_v > layer.head_size):
            raise Failed(f"{what}: latents have one KV head, which contains the values: {layer}")
        if layer.attention_type not in TYPES:
            raise Failed(f"{what}: attention_type is {layer.attention_type!r}, expected one of {', '.join(TYPES)}")
        if layer.window is not None and layer.chunk is not None:
            raise Failed(f"{what}: it has a window and a chunk")
        if layer.alibi_slopes is not None and len(layer.alibi_slopes) != layer.num_heads:
            raise Failed(f"{what}: {len(layer.alibi_slopes)} slopes for {layer.num_heads} heads")
        _owner_is_sound(what, layer, facts)
    for state in facts.state_layers:
        if unknown := {tensor.name for tensor in state.tensors} ^ set(kind_of(state).tensors):
            raise Failed(f"state layer {state.index}: its kind has other tensors than it: {sorted(unknown)}")


def _in_order(name: str, layers: Any) -> None:
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise Failed(f"{name} have the indices {[layer.index for layer in layers]}, expected 0, 1, ...")
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        raise Failed(f"two of {name} have the same name: {sorted(n for n in names if names.count(n) > 1)[0]!r}")


def _owner_is_sound(what: str, layer: AttentionLayer, facts: ModelFacts) -> None:
    if layer.shares_kv_with is None:
        return
    if not 0 <= layer.shares_kv_with < layer.index:
        raise Failed(f"{what}: it reads the cache of layer {layer.shares_kv_with}, which is not before it")
    owner = facts.layers[layer.shares_kv_with]
    sizes = ("num_kv_heads", "head_size", "head_size_v", "kv_kind")
    if owner.shares_kv_with is not None or any(getattr(owner, n) != getattr(layer, n) for n in sizes):
        raise Failed(f"{what}: it reads the cache of {owner}, which has none of its form")


@check(Kind.MODEL_FAMILY, "model_family.facts.parts", Level.CONTRACT, cases=by_example, cost=0.1)
def parts_add_up(run: Run) -> None:
    """The parts have all parameters, and each attention and state layer lies in one of them, in order."""
    facts = FamilyWorld(run).inspect()
    parts = facts.parts
    if parts is None:
        if run.subject.capabilities.pipeline.support or run.subject.capabilities.pipeline_ranks.support:
            raise Failed("stages are declared, and the facts have no parts")
        raise NotApplicable("not declared: the facts have no parts")
    total = parts.embedding + sum(parts.layers) + parts.head
    if total < facts.num_parameters or min(parts.embedding, parts.head, *parts.layers) < 0:
        raise Failed(f"the parts have {total} parameters, the model {facts.num_parameters}")
    if total - facts.num_parameters > parts.head:  # a tied projection counts twice
        raise Failed(f"the parts have {total} parameters, the model {facts.num_parameters} and a head of {parts.head}")
    for name, places, layers in (
        ("attention", parts.attention, facts.layers),
        ("states", parts.states, facts.state_layers),
    ):
        if len(places) != len(layers):
            raise Failed(f"parts.{name} has {len(places)} places for {len(layers)} layers")
        if list(places) != sorted(places) or any(not 0 <= place < len(parts.layers) for place in places):
            raise Failed(f"parts.{name} is {places}, expected rising places below {len(parts.layers)}")


@check(Kind.MODEL_FAMILY, "model_family.facts.unread", Level.CONTRACT, cases=by_example, cost=0.2)
def weights_are_not_read(run: Run) -> None:
    """`inspect` gives the same facts again, and for weights that are NaN, since it reads no weights."""
    world = FamilyWorld(run)
    folder = world.copy()
    facts = world.inspect(folder)
    if world.inspect(folder) != facts:
        raise Failed("inspect finds other facts the second time")
    if facts.kv_scales or any(layer.position_bias for layer in facts.layers):
        raise NotApplicable("its facts have numbers of the checkpoint: scales or biases")
    for file in set(tensors_in(folder).values()):
        rewrite(file, lambda tensors: {n: _spoilt(t) for n, t in tensors.items()})
    if world.inspect(folder) != facts:
        raise Failed("inspect finds other facts where the weights are NaN")


def _spoilt(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
