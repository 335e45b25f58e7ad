"""L2 of weight formats: group borders, odd sizes, extreme codes, several files."""

from __future__ import annotations

import json

import torch
from attrs import evolve
from safetensors.torch import save_file

from slotline.registry.descriptor import Kind
from slotline.registry.tensor_reader import SafetensorsReader
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.weight_format import FormatWorld, MemoryReader, by_example, empty_folder


@check(Kind.WEIGHT_FORMAT, "weight_format.read.sizes", Level.HOSTILE, cases=by_example, cost=0.05)
def read_sizes(run: Run) -> None:
    """Single and odd numbers of outputs and inputs, blocks that end with the weight, as far as the form holds them."""
    world = FormatWorld(run)
    for size in ((1, 32), (7, 96), (33, 160), (130, 64), (19, 352), (149, 90), (5, 33)):
        name, weight = world.names[0], world.weight(*size)
        built = world.build(MemoryReader(world.tensors({name: weight})))
        world.check(built, name, weight, f"{list(weight.codes.shape)} ")


@check(Kind.WEIGHT_FORMAT, "weight_format.read.borders", Level.HOSTILE, cases=by_example, cost=0.02)
def read_borders(run: Run) -> None:
    """With one code everywhere, every number still has the scale of its own group: no border is off by one."""
    world = FormatWorld(run)
    weight = world.weight(70, 512)
    code = torch.ones_like(weight.codes) if weight.codes.dtype.is_floating_point else weight.codes * 0 + 5
    scales = 2.0 ** (torch.arange(weight.scales.numel()) % 7 - 8).view(weight.scales.shape)
    offsets = None if weight.offsets is None else scales * (torch.arange(scales.numel()) % 5 - 2).view(scales.shape)
    weight = world.fitted(evolve(weight, codes=code, scales=scales, offsets=offsets))
    built = world.build(MemoryReader(world.tensors({world.names[0]: weight})))
    world.check(built, world.names[0], weight)


@check(Kind.WEIGHT_FORMAT, "weight_format.read.extremes", Level.HOSTILE, cases=by_example, cost=0.02)
def read_extremes(run: Run) -> None:
    """The lowest and the highest codes keep their value, those of float8 too, subnormal ones among them."""
    world = FormatWorld(run)
    weight, element = world.weight(), world.example.scheme.element
    codes = weight.codes.clone()
    if codes.dtype.is_floating_point:
        bits = codes.view(torch.uint8)
        for row, value in enumerate((0x7E, 0xFE, 0x01, 0x80)):
            bits[..., row, :] = value
    else:
        codes[..., 0, :], codes[..., 1, :] = element.low, element.high
        codes[..., 2, ::2], codes[..., 2, 1::2] = element.low, element.high
    weight = world.fitted(evolve(weight, codes=codes))
    built = world.build(MemoryReader(world.tensors({world.names[0]: weight})))
    world.check(built, world.names[0], weight)


@check(Kind.WEIGHT_FORMAT, "weight_format.read.shards", Level.HOSTILE, cases=by_example, cost=0.05)
def read_shards(run: Run) -> None:
    """The tensors of a module lie in several files of a folder, as large checkpoints have them."""
    world, folder = FormatWorld(run), empty_folder()
    weights = world.weights()
    files: dict[str, dict[str, torch.Tensor]] = {}
    for place, (name, tensor) in enumerate(sorted(world.tensors(weights).items())):
        files.setdefault(f"model-{place % 3 + 1:05}-of-00003.safetensors", {})[name] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    built = world.build(SafetensorsReader(folder), folder)
    for name, weight in weights.items():
        world.check(built, name, weight)
