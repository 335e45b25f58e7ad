"""From a checkpoint to a decoder that is ready to run: read, bound to attention, placed and optimised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen

from slotline.plugins.model_families import (
    binding,
    checkpoint,
    offload,
    own_stage,
    random_weights,
    rope,
    saved_model,
    saved_weights,
    self_check,
    sparse_index,
    stages,
    state_mixers,
    temperature,
)
from slotline.plugins.model_families.decoder import VETTED
from slotline.plugins.model_families.passes.decisions import Decisions
from slotline.plugins.model_families.quantized.division import divide_quantized
from slotline.plugins.model_families.saved_model import Origin
from slotline.plugins.model_families.tensor_parallel import check
from slotline.plugins.model_families.tensor_parallel.collectives import install
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.plugins.model_families.tensor_parallel.joined import Joined
from slotline.plugins.model_families.tensor_parallel.token_division import WHOLE, TokenDivision
from slotline.registry.contracts.lora import ModulePart
from slotline.registry.contracts.model_family import SAVED_WEIGHTS, ModelContext

Load = Callable[[ModelContext], tuple[Any, torch.nn.Module | None]]
"""Returns the decoder in host memory, and the encoder of its other inputs if it takes any."""


@frozen(eq=False)
class Built:
    """A decoder that is ready to run.

    Attributes:
        hf_model: the transformers model.
        holder: the attend callable of its current forward.
        notes: what was done to it, in words.
        origin: what it needs to be saved.
        parts: what a rank has of linear layers and embeddings, by path. Empty for a whole model.
        tokens: division of each step's tokens among ranks.
    """

    hf_model: Any
    holder: binding.AttendHolder
    notes: tuple[str, ...]
    origin: Origin
    parts: Mapping[str, ModulePart] = field(factory=dict)
    tokens: TokenDivision = WHOLE


def build(context: ModelContext, load: Load) -> Built:
    """Read, bind, place and optimise a model.

    Passes run on the device, where they are fast, or before placing if not all weights fit there. They only know
    decoders, so the encoder becomes a part of the model after them.
    """
    if context.load_format == "sharded":
        return _build_saved(context)
    hf_model, encoder = load(context)
    origin = saved_model.origin_of(hf_model, context.dtype)
    checked = _self_checked(hf_model, context)
    joined = None if context.shard is None else _divided(hf_model, context)
    holder, notes = _bind(hf_model, context)
    notes = ((random_weights.NOTE,) if context.load_format == "dummy" else ()) + checked + notes
    notes += () if joined is None else joined.notes
    stage = own_stage.own_stage(hf_model, context.own_stage)
    complete = own_stage.leave_out(hf_model, stage, with_embedding=context.with_embedding)
    parts = stages.parts_of(hf_model, context.device, context.stages)
    stages.separate(hf_model, parts)
    if context.offload_bytes:
        passed = _optimize(hf_model, context.device, context, origin.decisions)
        passed += offload.place(hf_model, parts[0].device, context.offload_bytes)
    elif len(parts) == 1:
        offload.place(hf_model, parts[0].device, 0)
        passed = _optimize(hf_model, context.device, context, origin.decisions)
    else:
        passed = _over_stages(hf_model, parts, context)
    if encoder is not None and (stage is None or stage.is_first):
        hf_model.encoder = encoder.to(parts[0].device)
    tokens = WHOLE if joined is None else _join(hf_model, joined, context)
    complete()
    parts_of_rank = {} if joined is None else joined.parts
    return Built(hf_model, holder, notes + passed, evolve(origin, notes=checked + passed), parts_of_rank, tokens)


def read_plain(context: ModelContext, load: Load) -> Any:
    """Return a model whose tensors have the names and values of one that `build` returned without passes."""
    fresh, encoder = load(context)
    if context.shard is not None:
        _divided(fresh, context)
    rope.freeze(fresh, context.facts.max_model_len)
    temperature.settle(fresh, context.facts.max_model_len)
    sparse_index.settle(fresh, context.facts.max_model_len)
    stage = own_stage.own_stage(fresh, context.own_stage)
    own_stage.leave_out(fresh, stage, with_embedding=context.with_embedding)()
    stages.separate(fresh, stages.parts_of(fresh, context.device, context.stages))
    if encoder is not None and (stage is None or stage.is_first):
        fresh.encoder = encoder
    return fresh


def format_of(path: Path) -> str:
    """Return the `ModelContext.load_format` of a folder with weights."""
    return "sharded" if (path / SAVED_WEIGHTS).is_file() else "hf"


def _build_saved(context: ModelContext) -> Built:
    """Build a model from weights that were saved after the passes: repeat those without checks, then read."""
    saved = saved_weights.read(context)
    hf_model = saved_model.skeleton(context, saved)
    origin = saved_model.origin_of(hf_model, context.dtype)
    origin = evolve(origin, decisions=Decisions(saved.answers, known=True), notes=tuple(saved.notes), lean=saved.lean)
    holder, notes = _bind(hf_model, context)
    device = torch.device("cpu" if context.offload_bytes else context.device)
    saved_model.place_computed(hf_model, device)
    _optimize(hf_model, context.device, context, origin.decisions)
    saved_model.fill(hf_model, saved, context, device)
    notes = (saved_model.NOTE, *saved.notes, *notes)
    if context.offload_bytes:
        notes += offload.place(hf_model, torch.device(context.device), context.offload_bytes)
    return Built(hf_model, holder, notes, origin)


def _divided(hf_model: Any, context: ModelContext) -> Joined:
    """Leave each module only what a rank has of it. Quantized weights are read now."""
    assert context.shard is not None
    return divide(hf_model, context.shard) if context.weights is None else divide_quantized(hf_model, context)


def _join(hf_model: Any, joined: Joined, context: ModelContext) -> TokenDivision:
    """Let ranks join what their parts of a model give."""
    assert context.shard is not None
    assert context.communicator is not None
    facts = context.facts
    names = [*(layer.name for layer in facts.layers), *(layer.name for layer in facts.state_layers)]
    return install(
        hf_model,
        own_stage.own_joined(hf_model, joined),
        context.communicator,
        context.replicas,
        fused=context.optimize,
        mixing=names if context.shard.sequence else None,
    )


def _bind(hf_model: Any, context: ModelContext) -> tuple[binding.AttendHolder, tuple[str, ...]]:
    """Let a model call attention and states, and fix what transformers would choose in each forward."""
    holder = binding.bind(hf_model, context.facts.layers)
    state_mixers.bind(hf_model, context.facts.state_layers, holder)
    notes = rope.freeze(hf_model, context.facts.max_model_len)
    temperature.settle(hf_model, context.facts.max_model_len)
    sparse_index.settle(hf_model, context.facts.max_model_len, context.facts.layers)
    return holder, notes


def _self_checked(hf_model: Any, context: ModelContext) -> tuple[str, ...]:
    """Return a note on the check of a model that the tests do not compare with transformers.

    Raises:
        ModelError: if it gives other numbers.
    """
    if type(hf_model).__name__ in VETTED:
        return ()
    state = None if context.weights is not None else hf_model.state_dict()
    found = checkpoint.read(context.facts.path, quantized=context.weights is not None)
    said = (self_check.check(found, state),)
    return said if context.shard is None else (*said, check.check(found, context.shard, state))


def _over_stages(hf_model: Any, parts: Sequence[stages.Part], context: ModelContext) -> tuple[str, ...]:
    """Place every part of the model and optimise it there. The notes name the stage."""
    notes: tuple[str, ...] = ()
    stages.place(hf_model, parts)
    for index, part in enumerate(parts):
        with stages.only(hf_model, parts, index):
            passed = _optimize(hf_model, str(part.device), context, Decisions())
        notes += tuple(f"stage {index}: {note}" for note in passed)
    return notes


def _optimize(hf_model: Any, device: str, context: ModelContext, decisions: Decisions) -> tuple[str, ...]:
    if not context.optimize:
        return ()
    from slotline.plugins.model_families.passes import optimize

    return optimize(
        hf_model,
        device=device,
        dtype=context.dtype,
        batch_invariant=context.batch_invariant,
        captured=context.captured,
        decisions=decisions,
        held="cpu" if context.offload_bytes else torch.device(device).type,
        products="timed" if context.options is None else context.options.cpu_products,
        joins=context.options is None or context.options.layer_kernel,
    )
