"""Inspection and loading of the reference family: a config.json of whole numbers, and one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts, ModelParts
from slotline.registry.errors import ModelError
from slotline.testing.reference.model_family.descriptor import ARCHITECTURE

FIX = "download the checkpoint again"
FILE = "model.safetensors"
DTYPES = ("float32", "bfloat16", "float16")
SOUND = 3
"""Token that stands for one number of a sound."""


@frozen(kw_only=True)
class Config:
    """Sizes of a model. `shared` is the number of last layers that read the cache of the last one before them."""

    vocab_size: int = 96
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    inner_size: int = 48
    max_len: int = 256
    window: int = 0
    soft_cap: int = 0
    sinks: int = 0
    tied: int = 0
    shared: int = 0
    sounds: int = 0

    @property
    def owner(self) -> int:
        """Index of the last layer with a cache of its own."""
        return self.num_layers - self.shared - 1


def read_config(path: Path) -> Config:
    """Return the sizes of a folder.

    Raises:
        ModelError: if it is no checkpoint of this family.
    """
    file = path / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error}", fix=FIX) from error
    if not isinstance(content, dict) or ARCHITECTURE not in (content.pop("architectures", None) or ()):
        raise ModelError(f"{str(file)!r} is of no {ARCHITECTURE}", fix=f"name a folder with a {ARCHITECTURE}")
    for name, value in content.items():
        if type(value) is not int or value < 0 or name not in Config.__annotations__:
            raise ModelError(f"{str(file)!r}: {name} = {value!r} is no size of this family", fix=FIX)
    return Config(**content)


def layers_of(config: Config) -> tuple[AttentionLayer, ...]:
    """Return the attention layers. Every second one has the window, the first of them layer 0."""
    shared = range(config.owner + 1, config.num_layers)
    return tuple(
        AttentionLayer(
            name=f"layers.{index}.attention",
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            head_size_v=config.head_size,
            scale=config.head_size**-0.5,
            window=config.window if config.window and index % 2 == 0 else None,
            soft_cap=float(config.soft_cap) or None,
            sinks=bool(config.sinks),
            kv_kind="sliding" if config.window and index % 2 == 0 else "full",
            shares_kv_with=config.owner if index in shared else None,
        )
        for index in range(config.num_layers)
    )


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint."""
    size, inner = config.hidden_size, config.inner_size
    heads, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, size)}
    for index in range(config.num_layers):
        own = {"norm": (size,), "query": (heads, size), "query_bias": (heads,), "out": (size, heads)}
        if index <= config.owner:
            own |= {"key": (kv, size), "value": (kv, size), "value_bias": (kv,)}
        if config.sinks:
            own["sinks"] = (config.num_heads,)
        own |= {"norm_mlp": (size,), "up": (2 * inner, size), "down": (size, inner)}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in own.items()}
    shapes["norm"] = (size,)
    if not config.tied:
        shapes["head"] = (config.vocab_size, size)
    if config.sounds:
        shapes["ear"] = (size,)
    return shapes


def read_weights(path: Path, config: Config, dtype: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder in a dtype, in host memory.

    Raises:
        ModelError: naming the tensor that is missing, or has another shape.
    """
    from safetensors.torch import load_file

    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is no dtype of this family", fix=f"use {', '.join(DTYPES)}")
    try:
        stored = load_file(path / FILE)
    except Exception as error:  # the reader has errors of its own
        raise ModelError(f"{str(path / FILE)!r} cannot be read: {error}", fix=FIX) from error
    for name, shape in shapes_of(config).items():
        if name not in stored:
            raise ModelError(f"{str(path / FILE)!r} has no tensor {name}", fix=FIX)
        if tuple(stored[name].shape) != shape or not stored[name].is_floating_point():
            found = f"{stored[name].dtype} {list(stored[name].shape)}"
            raise ModelError(f"{name} is {found}, config.json makes it {list(shape)} of real numbers", fix=FIX)
    return {name: stored[name].to(getattr(torch, dtype)) for name in shapes_of(config)}


class ReferenceFamily:
    """Implements `slotline.registry.contracts.ExampleFamily`."""

    def inspect(self, path: Path) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        config = read_config(path)
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes_of(config).items()}
        each = [sum(size for name, size in sizes.items() if name.startswith(f"layers.{index}.")) for index in
                range(config.num_layers)]  # fmt: skip
        head = config.vocab_size * config.hidden_size + config.hidden_size
        embedding = sizes["embedding"] + sizes.get("ear", 0)
        return ModelFacts(
            architecture=ARCHITECTURE,
            path=path,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_model_len=config.max_len,
            dtype="float32",
            layers=layers_of(config),
            num_parameters=sum(sizes.values()),
            eos_token_ids=(1,),
            tasks=("generate", "embed"),
            modalities=(Modality(name="sound", placeholder_token_id=SOUND),) if config.sounds else (),
            parts=ModelParts(
                embedding=embedding, layers=tuple(each), head=head, attention=tuple(range(config.num_layers))
            ),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """See `slotline.registry.contracts.model_family.ModelFamily.capture_refusal`."""
        return None

    def load(self, context: ModelContext) -> Any:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        from slotline.testing.reference.model_family.model import ReferenceModel

        return ReferenceModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.testing.reference.model_family.examples import EXAMPLES

        return EXAMPLES
