"""Finds the attention layers of a checkpoint without its weights: by watching a model without memory run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, evolve, field, frozen

from slotline.plugins.model_families import (
    binding,
    checkpoint,
    edges,
    kv_scales,
    latents,
    own_attention,
    positions,
    rope,
    sparse_index,
    state_mixers,
    structure,
    temperature,
    weight_sizes,
)
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.host_copies import HostCopies
from slotline.plugins.model_families.layer_calls import LayerCalls
from slotline.plugins.model_families.lighter_imports import lighter_imports
from slotline.plugins.model_families.tensor_parallel import sequence
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.plugins.model_families.tensor_parallel.expert_parallel import numbers_of_experts
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.unknown_values import UnknownValues
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelFacts, ModelParts, Shard
from slotline.registry.contracts.state import StateLayer
from slotline.registry.errors import ModelError, SlotlineError

INSPECT_NAME = "slotline_inspect"
"""The recording attention function's name in transformers' configurations."""

PROBE_TOKENS = 2


@define(eq=False)
class Recorder:
    """Slot of every attention module during inspection. It collects layers in call order."""

    names: dict[torch.nn.Module, str]
    max_model_len: int
    layers: list[AttentionLayer] = field(factory=list)
    callers: list[torch.nn.Module] = field(factory=list)
    keys: list[torch.Tensor] = field(factory=list)
    handed: list[Any] = field(factory=list)

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        asked: dict[str, Any],
    ) -> None:
        """Record one call. Heads and sizes come from the tensors, the rest from the module's arguments.

        Each call is a separate layer, even if a module is called again (Zamba2 shares its attention blocks). A layer
        that is called with the same keys object as an earlier layer reads that layer's cache (Gemma 3n). One that is
        handed the same index as an earlier layer uses that layer's picks (GLM-5).
        """
        call = sum(module is caller for caller in self.callers)
        scale, mla = asked.get("scaling"), latents.hands_on(module)
        window, chunk = asked.get("sliding_window"), _chunk(module)
        if window is not None and window >= self.max_model_len:
            window = None  # it never hides a key, so every cache and backend will do
        if chunk is not None and chunk >= self.max_model_len:
            chunk = None
        owner = next((index for index, other in enumerate(self.keys) if other is key), None)
        handed = asked.get("indices") if isinstance(asked.get("indices"), dict) and mla else None
        picks = getattr(getattr(module, "config", None), "index_topk", None) if handed is not None else None
        if picks is not None and picks >= self.max_model_len:
            handed = picks = None  # it picks every key
        picker = next((i for i, other in enumerate(self.handed) if other is handed), None) if handed else None
        self.callers.append(module)
        self.keys.append(key)
        self.handed.append(handed)
        self.layers.append(
            AttentionLayer(
                name=binding.name_of(self.names[module], call),
                index=len(self.layers),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=key.shape[3],
                head_size_v=value.shape[3],
                scale=float(scale if scale is not None else 1 / math.sqrt(query.shape[3])),
                # transformers lets query i see keys j with i - W < j <= i: W keys, its own included.
                window=window,
                chunk=chunk,
                soft_cap=asked.get("softcap"),
                sinks=asked.get("s_aux") is not None,
                alibi_slopes=asked.get("alibi_slopes"),
                mla=mla,
                kv_kind="dsa" if picks is not None else _kv_kind(mla, window, chunk),
                shares_kv_with=owner,
                index_topk=picks,
                index_from=picker,
                inputs=sparse_index.inputs_of(module, handed),
                edges=() if owner is not None else edges.edges_of(module, query, value, mla=mla),
            )
        )


def _kv_kind(mla: bool, window: int | None, chunk: int | None) -> str:
    if mla:
        return "mla"
    return "sliding" if window is not None else "full" if chunk is None else "chunked"


def _chunk(module: Any) -> int | None:
    """Return the chunk of a layer that attends within chunks. transformers only sets the mask, by the layer's type."""
    config = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not types or index is None or types[index] != "chunked_attention":
        return None
    chunk: int = config.attention_chunk_size  # type: ignore[union-attr]
    return chunk


def recording_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """Record the call without computing attention, and return an empty tensor [1, num_tokens, num_heads, size]."""
    module.slotline_slot.record(module, query, key, value, asked)
    size = module.v_head_dim if latents.hands_on(module) else value.shape[3]
    return query.new_empty((1, query.shape[2], query.shape[1], size)), None


def inspect(path: Path, *, weights: bool = True, shard: Shard | None = None) -> ModelFacts:
    """Look at a checkpoint without reading weights.

    Args:
        weights: False for a folder that may hold no weights.
        shard: part of each layer that is looked at, None for the whole model.

    Raises:
        ModelError: if the folder is no checkpoint of a served architecture.
        NegotiationError: if its layers cannot be divided so.
    """
    found = checkpoint.read(path)
    if weights:
        weight_sizes.require_weights(found)
    return facts_of(found, shard)


@contextmanager
def sizes_that_fit(found: Checkpoint) -> Iterator[None]:
    """Turn errors of a model built from a configuration into typed ones, since transformers does not check all sizes.

    Raises:
        ModelError: in place of whatever the model's own code says of sizes that do not fit.
    """
    try:
        yield
    except SlotlineError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if found.by_inspection:
            if INSPECT_NAME in str(error):
                said = "it takes its attention from a table of its own, outside transformers' interface"
            raise ModelError(
                f"inspection cannot follow {found.architecture} of {found.path}: {said}",
                fix="correct config.json, or use a model family plugin that serves this architecture",
            ) from error
        raise ModelError(
            f"{found.path}/config.json describes no {found.architecture} that runs: {said}",
            fix="correct config.json, or download it again",
        ) from error


@frozen
class _Look:
    """Everything that a look depends on: the class, its settings as JSON and the longest sequence."""

    model_class: Any
    settings: str
    max_model_len: int
    shard: Shard | None
    found: Checkpoint = field(eq=False)


@frozen
class _Seen:
    """Facts that a model without memory shows, as `ModelFacts` has them."""

    layers: tuple[AttentionLayer, ...]
    state_layers: tuple[StateLayer, ...]
    num_parameters: int
    parts: ModelParts | None
    host_copies: int
    default_max_model_len: int | None
    vocab_size: int
    hidden_size: int
    mixtures: tuple[int, ...]
    notes: tuple[str, ...] = ()


def facts_of(found: Checkpoint, shard: Shard | None = None) -> ModelFacts:
    """Return the facts of a decoder's configuration.

    Raises:
        ModelError: if no model can be built from it, or the model does not run.
    """
    with sizes_that_fit(found):
        seen = look_at(found, shard)
    return ModelFacts(
        architecture=found.architecture,
        path=found.path,
        max_model_len=found.max_model_len,
        dtype=found.dtype,
        eos_token_ids=found.eos_token_ids,
        tasks=found.tasks,
        kv_scales=kv_scales.read(found.path, seen.layers),
        **asdict(evolve(seen, notes=found.notes + seen.notes), recurse=False),
    )


def look_at(found: Checkpoint, shard: Shard | None = None) -> _Seen:
    """Return what a model without memory shows of a configuration."""
    settings = found.config.to_json_string(use_diff=False)
    return _seen(_Look(found.model_class, settings, found.max_model_len, shard, found))


@lru_cache(maxsize=64)  # engines of one process often have the same model, as those of `slotline tune`
def _seen(look: _Look) -> _Seen:
    """Build the model without memory, let it run once, and return what it shows."""
    model = _model_without_memory(look.found)
    vocab_size, mixtures = structure.vocab_size(model), numbers_of_experts(model)
    joined = Joined() if look.shard is None else divide(model, look.shard)
    state_layers = state_mixers.find(model)
    limits = (temperature.longest_untuned(model), sparse_index.longest_dense(model))
    with lighter_imports():
        layers, host_copies, chained = _watch(model, look.found, look.max_model_len, state_layers)
    if look.shard is not None and look.shard.sequence:
        _refuse_sequence(model, joined, layers, state_layers, chained=chained)
    return _Seen(
        layers=layers,
        state_layers=state_layers,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parts=_parts(model, layers, state_layers, chained=chained),
        host_copies=host_copies,
        default_max_model_len=min(filter(None, limits), default=None),
        vocab_size=vocab_size,
        hidden_size=structure.hidden_size(model),
        notes=joined.notes,
        mixtures=mixtures,
    )


def _model_without_memory(found: Checkpoint) -> Any:
    """Return the model on the meta device: shapes and dtypes, no storage."""
    binding.register(INSPECT_NAME, recording_attention)
    config = found.config
    config._attn_implementation = found.attention(INSPECT_NAME)
    config._experts_implementation = "batched_mm"  # the only expert loop whose shapes do not depend on routing
    own_attention.refuse_ignored_settings(found.path, config)
    model = structure.find_body(structure.without_memory(found.model_class, config).eval())
    return adopted(model, recording_attention)


def adopted(model: Any, function: Any) -> Any:
    """Return a model whose attention calls `function`, with positions from its forward's argument."""
    positions.quiet(model)
    return positions.pass_on(sparse_index.adopt(own_attention.adopt(model, function)))


def _unadvanced(layer: StateLayer, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return zeros for a state layer, without computing anything."""
    return torch.empty_like(inputs[state_mixers.output_like(layer)])


def _watch(
    model: Any, found: Checkpoint, max_model_len: int, state_layers: tuple[StateLayer, ...]
) -> tuple[tuple[AttentionLayer, ...], int, bool]:
    """Return the attention layers that one forward calls, the number of its copies from the host, and `chained`."""
    recorder = Recorder({module: name for name, module in model.named_modules()}, max_model_len)
    for module in model.modules():
        setattr(module, binding.SLOT_ATTRIBUTE, recorder)
        if latents.is_latent(module):
            latents.hand_on(module)
    holder = binding.AttendHolder()
    state_mixers.bind(model, state_layers, holder)
    rope.freeze(model, max_model_len)  # the choice of frequencies would read positions, which have no values here
    tokens = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device="meta")  # [1, PROBE_TOKENS]
    given = {"input_ids": tokens, "position_ids": tokens, "use_cache": False}
    given = structure.taking(model.base_model.forward, given)
    calls = LayerCalls(model)
    serving = holder.serving(binding.no_attend, _unadvanced)
    with torch.no_grad(), serving, UnknownValues(), calls.watched(), HostCopies() as copies:
        model.base_model(**given)
    if not found.is_vetted:
        _refuse_unfound(found, model, calls.ran, tuple(recorder.layers), state_layers)
    return tuple(recorder.layers), copies.count, calls.chained


def _parts(
    model: Any, layers: tuple[AttentionLayer, ...], state_layers: tuple[StateLayer, ...], *, chained: bool
) -> ModelParts | None:
    """Return the parts that can be on different devices: the embedding, each decoder layer, the final norm with a head.

    What else is before the layers, such as a norm, counts to the embedding.

    None for a model whose layers or last norm are not found, or whose layers share modules. Its weights stay on one
    device.
    """
    base = model.base_model  # the model itself where it has no head
    own = set(base.children())
    if not {getattr(base, "layers", None), getattr(base, "norm", None)} <= own:
        return None
    heads = () if model is base else [child for child in model.children() if child is not base]
    owners = {module: number for number, layer in enumerate(base.layers) for module in layer.modules()}
    if len(owners) != sum(len(list(layer.modules())) for layer in base.layers):
        return None
    return ModelParts(
        embedding=sum(_count(child) for child in base.children() if child not in (base.layers, base.norm)),
        layers=tuple(map(_count, base.layers)),
        head=_count(base.norm) + sum(map(_count, heads)),
        attention=tuple(owners[model.get_submodule(binding.module_of(layer.name))] for layer in layers),
        chained=chained,
        states=tuple(owners[_mixer(model, layer.name)] for layer in state_layers),
    )


def _refuse_sequence(
    model: Any,
    joined: Joined,
    layers: tuple[AttentionLayer, ...],
    state_layers: tuple[StateLayer, ...],
    *,
    chained: bool,
) -> None:
    """Refuse a model whose hidden states cannot be divided by tokens.

    Raises:
        NegotiationError: with the reason.
    """
    if not chained:
        raise sequence.refusal(model, "its layers read more of the tokens than hidden states")
    mixing = [*(layer.name for layer in layers), *(layer.name for layer in state_layers)]
    sequence.branches(model, joined, mixing)


def _mixer(model: Any, name: str) -> torch.nn.Module:
    """Return the innermost module that a state layer's name leads to: the rest of it names a tensor."""
    module: torch.nn.Module = model
    for part in name.split("."):
        if part not in module._modules:
            break
        module = module.get_submodule(part)
    return module


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _refuse_unfound(
    found: Checkpoint,
    model: Any,
    ran: set[torch.nn.Module],
    layers: tuple[AttentionLayer, ...],
    state_layers: tuple[StateLayer, ...],
) -> None:
    """Refuse a decoder with a layer that ran, and in which neither attention nor a state was found.

    Raises:
        ModelError: naming the first layer.
    """
    names = {module: name for name, module in model.named_modules()}
    places = {binding.module_of(layer.name) for layer in layers} | {layer.name for layer in state_layers}
    decoder_layers = [layer for layer in getattr(model.base_model, "layers", ()) if layer in ran]
    missing = [
        layer
        for layer in decoder_layers
        if not any(place == names[layer] or place.startswith(f"{names[layer]}.") for place in places)
    ]
    if missing or not places:
        where = f"decoder layer {names[missing[0]]!r} ({type(missing[0]).__name__})" if missing else "it"
        raise ModelError(
            f"{found.architecture} computes attention outside transformers' interface, or keeps a state that no mixer "
            f"of this family knows: in {where} neither was found ({len(missing)} of {len(decoder_layers)} layers)",
            fix="use a model family plugin that serves this architecture",
        )
