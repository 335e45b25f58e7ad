"""PEFT folders that a plugin must refuse: each with one fault, and the words that the refusal must contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from slotline.testing.environments.lora import LoraWorld, peft_config


def _no_folder(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(1)) / "not_there", "not_there"


def _no_config(world: LoraWorld) -> tuple[Path, str]:
    folder = world.write(world.adapter(1))
    (folder / "adapter_config.json").unlink()
    return folder, "adapter_config.json"


def _broken_config(world: LoraWorld) -> tuple[Path, str]:
    folder = world.write(world.adapter(1))
    (folder / "adapter_config.json").write_text('{"r": 1,')
    return folder, "adapter_config.json"


def _no_weights(world: LoraWorld) -> tuple[Path, str]:
    folder = world.write(world.adapter(1))
    (folder / "adapter_model.safetensors").unlink()
    return folder, "adapter_model"


def _broken_weights(world: LoraWorld) -> tuple[Path, str]:
    folder = world.write(world.adapter(1))
    (folder / "adapter_model.safetensors").write_bytes(b"not safetensors")
    return folder, "adapter_model"


def _rank(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(world.max_rank + 1)), str(world.max_rank + 1)


def _module(world: LoraWorld) -> tuple[Path, str]:
    return _with_tensors(world, "model.layers.0.mystery_proj", 1, 24, 24), "mystery_proj"


def _layer(world: LoraWorld) -> tuple[Path, str]:
    module = next(iter(world.modules)).replace(".0.", ".97.")
    return _with_tensors(world, module, 1, 24, 24), "layers.97"


def _shape_of_a(world: LoraWorld) -> tuple[Path, str]:
    module, (inner, outer) = next(iter(world.modules.items()))
    return _with_tensors(world, module, 1, inner + 8, outer), module


def _shape_of_b(world: LoraWorld) -> tuple[Path, str]:
    module, (inner, outer) = next(iter(world.modules.items()))
    return _with_tensors(world, module, 1, inner, outer + 8), module


def _rank_of_tensors(world: LoraWorld) -> tuple[Path, str]:
    module, (inner, outer) = next(iter(world.modules.items()))
    return _with_tensors(world, module, world.max_rank + 1, inner, outer), module


def _no_b(world: LoraWorld) -> tuple[Path, str]:
    module, (inner, _) = next(iter(world.modules.items()))
    return _with_tensors(world, module, 1, inner, 0), module


def _with_tensors(world: LoraWorld, module: str, rank: int, inner: int, outer: int) -> Path:
    """Return a folder that declares rank 1 and is good except for one module."""
    good = world.adapter(1, modules=list(world.modules)[1:])
    tensors = {}
    for name, (a, b) in good.weights.items():
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
    tensors[f"base_model.model.{module}.lora_A.weight"] = world.random(rank, inner)
    if outer:
        tensors[f"base_model.model.{module}.lora_B.weight"] = world.random(outer, rank)
    names = sorted({name.rpartition(".")[2] for name in (*good.weights, module)})
    return world.write_files(tensors, {**peft_config(good), "target_modules": names})


def _bias(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(1), bias="lora_only"), "bias"


def _saved_modules(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(1), modules_to_save=["lm_head"]), "modules_to_save"


def _dora(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(1), use_dora=True), "dora"


def _rslora(world: LoraWorld) -> tuple[Path, str]:
    return world.write(world.adapter(1, rslora=True)), "rslora"


FAULTS: Mapping[str, Callable[[LoraWorld], tuple[Path, str]]] = MappingProxyType(
    {
        "no folder": _no_folder,
        "no adapter_config.json": _no_config,
        "broken adapter_config.json": _broken_config,
        "no adapter_model.safetensors": _no_weights,
        "broken adapter_model.safetensors": _broken_weights,
        "rank above max_rank": _rank,
        "unknown target module": _module,
        "unknown layer": _layer,
        "in_features of lora_A": _shape_of_a,
        "out_features of lora_B": _shape_of_b,
        "rank of the tensors": _rank_of_tensors,
        "no lora_B": _no_b,
        "bias": _bias,
        "modules_to_save": _saved_modules,
    }
)
"""What is wrong with a folder -> what writes it, and what the refusal must name."""

VARIANTS: Mapping[str, Callable[[LoraWorld], tuple[Path, str]]] = MappingProxyType({"dora": _dora, "rslora": _rslora})
"""Variants of LoRA, to be refused where they are not declared."""
