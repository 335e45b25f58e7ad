"""Modules of a decoder whose weights are quantized, or could be, with the names of their tensors in the files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from slotline.plugins.model_families import checkpoint, inspection, latents, structure, weight_files, weight_sizes
from slotline.plugins.model_families.tensor_parallel.division import divide
from slotline.registry.contracts.model_family import ModelFacts, Shard
from slotline.registry.contracts.weights import WeightModule

_ENDINGS = ("_blocks", "_scales", "_bias", "_scale_inv", "_scale")
"""Ends of names of tensors of experts that are stored together, e.g. ``experts.gate_up_proj_blocks``."""
_GATES = ("gate_up_proj", "0.gate_up_proj", "0.gate_proj", "0.w1")
"""Names of the first weight of experts: stored together, or one by one in three ways."""
_READ_BESIDE = frozenset({"dt_proj"})
"""Linear layers whose weight transformers reads beside their forward."""
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


def inspect(path: Path, *, weights: bool = True, shard: Shard | None = None) -> ModelFacts:
    """Return the facts of a decoder with `ModelFacts.weight_modules`. Its quantization is served elsewhere.

    Args:
        weights: False for a folder that may hold no weights.
        shard: part of each layer that is looked at, None for the whole model.

    Raises:
        ModelError: if the folder is no checkpoint of a served architecture.
        NegotiationError: if its layers cannot be divided so.
    """
    found = checkpoint.read(path, quantized=True)
    if weights:
        weight_sizes.require_weights(found)
    facts = inspection.facts_of(found, shard)
    with torch.device("meta"):
        model = found.model_class(found.config)
    if shard is not None:
        divide(structure.find_body(model), shard)
    names = {tensor.name for tensor in weight_files.tensors_of(path, found.config, quick=True)}
    return evolve(facts, weight_modules=tuple(weight_modules(model, names)))


def weight_modules(model: Any, names: Collection[str]) -> Iterator[WeightModule]:
    """Yield the linear layers and the mixtures of experts of a model, in its order.

    Args:
        model: a transformers model, on any device.
        names: names of the stored tensors.
    """
    known = stems(names)
    head = model.get_output_embeddings()
    left_out = {id(module.kv_b_proj) for module in model.modules() if latents.is_latent(module)}  # read beside forward
    for name, module in model.named_modules():
        if is_experts(module):
            yield _experts(name, module, known)
        elif type(module) is nn.Linear and id(module) not in left_out and name.rpartition(".")[2] not in _READ_BESIDE:
            yield WeightModule(
                name=name,
                stored=stored_name(name, known),
                kind="head" if module is head else "linear",
                in_features=module.in_features,
                out_features=module.out_features,
            )


def is_experts(module: nn.Module) -> bool:
    """Return True for a mixture whose experts' weights are in two parameters, [experts, ..]."""
    both = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    return all(weight is not None and weight.dim() == 3 for weight in both)


def stored_name(name: str, known: Collection[str]) -> str:
    """Return the name that a module's tensors begin with in the files, "" if there are none."""
    return next((variant for variant in _variants(name) if variant in known), "")


def _experts(name: str, module: Any, known: Collection[str]) -> WeightModule:
    weight = module.gate_up_proj
    inputs, outputs = weight.shape[1:] if getattr(module, "is_transposed", False) else weight.shape[:0:-1]
    limited = hasattr(module, "limit") and hasattr(module, "alpha")
    activation = (
        "swiglu_oai" if limited else _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__, "unknown")
    )
    prefixes = (name, name.replace(".mlp.experts", ".block_sparse_moe.experts"))
    first = (stored_name(f"{prefix}.{gate}", known) for prefix in prefixes for gate in _GATES)
    return WeightModule(
        name=name,
        stored=next(filter(None, first), ""),
        kind="experts",
        in_features=int(inputs),
        out_features=int(outputs),
        experts=int(weight.shape[0]),
        interleaved=not getattr(module, "is_concatenated", True),
        activation=activation,
        constants=(("alpha", float(module.alpha)), ("limit", float(module.limit))) if limited else (),
        bias=bool(getattr(module, "has_bias", False)),
    )


def _variants(name: str) -> Iterator[str]:
    """Yield the names that a module may have in the files."""
    yield name
    bare = name.removeprefix("model.")
    if bare != name:
        yield from (bare, f"model.language_model.{bare}", f"language_model.model.{bare}", f"language_model.{bare}")
    else:
        yield from (f"model.{name}", f"language_model.{name}")


def stems(names: Collection[str]) -> frozenset[str]:
    """Return every beginning of the names that ends before a point, and names of tensors without their endings."""
    found: set[str] = set()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts)))
        found.add(name)
        found.update(name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending))
    return frozenset(found)
