"""Surroundings of a weight format: checkpoints in memory and in files, written by the plugin's own examples."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Iterable, Mapping
from math import lcm
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.weight_format import FormatExample, TensorReader, WeightFormat, WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme, stack
from slotline.registry.errors import ModelError
from slotline.registry.loading import resolve_factory
from slotline.registry.tensor_files import StoredTensor
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.environments.linear import random_weight
from slotline.testing.oracles import linear as oracle
from slotline.testing.subject import Subject

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.down_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
)
EXPERT_MODULES = tuple(f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in (0, 1, 2, 10))
PLAIN = "lm_head"
EXPERTS = 3
EXACT = 4.0
"""Float32 epsilons of the size of a number that a weight may be off: reading rounds nothing else."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def examples_of(subject: Subject) -> dict[str, FormatExample]:
    """Return the examples of a plugin by name.

    Raises:
        NotApplicable: if it has none.
    """
    offered = getattr(resolve_factory(subject.descriptor), "examples", None)
    found = dict(offered()) if callable(offered) else {}
    if not found:
        raise NotApplicable("the factory has no examples()")
    return found


def by_example(subject: Subject) -> Iterable[Case]:
    """Return a case for each example."""
    return [{"example": name} for name in examples_of(subject)]


class MemoryReader:
    """Reader of tensors in memory that hands out the same tensor each time, and records what was read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], broken: str = "") -> None:
        self.tensors, self.broken, self.names = dict(tensors), broken, list[str]()
        self.stored: Mapping[str, StoredTensor] = {
            name: StoredTensor(name=name, dtype=_NAMES[t.dtype], shape=tuple(t.shape), file=Path("model.safetensors"))
            for name, t in tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor. The one that is broken raises as a file does that was cut."""
        self.names.append(name)
        if name == self.broken or name not in self.tensors:
            raise ModelError(f"model.safetensors: {name} cannot be read", fix="download the file again")
        return self.tensors[name]


class FormatWorld:
    """Checkpoints of one example.

    Args:
        run: with the case `example`.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.example = run, examples_of(run.subject)[run["example"]]
        self.generator = torch.Generator().manual_seed(run.seed)
        self.kind = self.example.kind
        self.names = EXPERT_MODULES if self.kind == "experts" else MODULES

    def sizes(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the next sizes that the form holds. Blocks need not divide the weight, groups of inputs do."""
        example, group = self.example, self.example.scheme.group
        columns = lcm(example.column_step, group[1] if group[0] == 1 and group[1] else 1)
        return -(-out_features // example.row_step) * example.row_step, -(-in_features // columns) * columns

    def weight(self, out_features: int = 48, in_features: int = 128) -> QuantizedWeight:
        """Return a random weight that the form holds, of the next sizes."""
        shape = self.sizes(out_features, in_features)
        count = EXPERTS if self.kind == "experts" else 1
        drawn = [storable(random_weight(self.example.scheme, *shape, self.generator)) for _ in range(count)]
        return self.fitted(stack(drawn) if self.kind == "experts" else drawn[0])

    def weights(self) -> dict[str, QuantizedWeight]:
        """Return weights of several modules of different sizes."""
        sizes = ((48, 128), (80, 256), (64, 128), (32, 64))
        return {name: self.weight(*size) for name, size in zip(self.names, sizes, strict=True)}

    def fitted(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Return the nearest weight that the form holds."""
        return weight if self.example.fit is None else self.example.fit(weight)

    def tensors(self, weights: Mapping[str, QuantizedWeight]) -> dict[str, torch.Tensor]:
        """Return the stored tensors of modules, with a plain output projection."""
        found: dict[str, torch.Tensor] = {f"{PLAIN}.weight": torch.ones(8, 64, dtype=torch.bfloat16)}
        for name, weight in weights.items():
            stored = self.example.store(name, weight)
            if strange := [key for key in stored if not key.startswith(name)]:
                raise Failed(f"the example stores {strange[0]} for the module {name}: its names must begin with that")
            found |= {key: tensor.contiguous() for key, tensor in stored.items()}
        return found

    def build(self, tensors: TensorReader, path: Path | None = None) -> WeightFormat:
        """Return the plugin's reader of a checkpoint."""
        built: WeightFormat = self.run.subject.build(context_of(self.run.subject, self.example, tensors, path))
        return built

    def check(self, format_: WeightFormat, name: str, wanted: QuantizedWeight, what: str = "") -> None:
        """Read a module and compare it with the float64 oracle.

        Raises:
            Failed: naming the element with the largest error.
        """
        scheme = format_.scheme_of(name, self.kind)
        if scheme != self.example.scheme:
            raise Failed(f"{what}{name}: scheme_of gave {scheme}, the example says {self.example.scheme}")
        self.compare(format_.read(name, self.kind), wanted, f"{what}{name}")

    def compare(self, found: QuantizedWeight, wanted: QuantizedWeight, what: str) -> None:
        """Compare a weight with the one that was stored."""
        if not isinstance(found, QuantizedWeight) or found.scheme != wanted.scheme:
            raise Failed(f"{what}: read returned {getattr(found, 'scheme', found)!r:.90}, not {wanted.scheme}")
        if found.codes.shape != wanted.codes.shape:
            raise Failed(f"{what}: the weight is {list(found.codes.shape)}, stored was {list(wanted.codes.shape)}")
        try:
            found.check(what)
        except ModelError as error:
            raise Failed(str(error)) from error
        for index, (one, other) in enumerate(zip(_each(found), _each(wanted), strict=True)):
            exact, size = oracle.weight_of(other), oracle.magnitude_of(other)
            off = (oracle.weight_of(one) - exact).abs()
            bound = EXACT * torch.finfo(torch.float32).eps * size + 1e-30
            worst = int(torch.nan_to_num(off / bound, nan=float("inf")).argmax())
            row, column = divmod(worst, exact.shape[1])
            where = f"{what}: " + (f"expert {index}, " if self.kind == "experts" else "")
            self.run.measure(
                error=float(off[row, column]),
                allowed=float(bound[row, column]),
                what=f"{where}output {row} of {exact.shape[0]}, input {column} of {exact.shape[1]}",
            )


def context_of(
    subject: Subject, example: FormatExample | None, tensors: TensorReader, path: Path | None = None
) -> WeightFormatContext:
    """Return a build context. Without an example it is that of a format that quantizes at load."""
    method = next(iter(sorted(subject.capabilities.methods.values or ("",))))
    config: Mapping[str, Any] = {}
    if example is not None:
        names = EXPERT_MODULES if example.kind == "experts" else MODULES
        config = example.config(names) if callable(example.config) else example.config
        method = str(config.get("quant_method", method))
    return WeightFormatContext(contract=1, path=path or empty_folder(), config=config, tensors=tensors, method=method)


def empty_folder() -> Path:
    """Return an empty folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="slotline-format-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def storable(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with scales of eight significant bits, and offsets of whole zero points."""
    scales, element = weight.scales.bfloat16().float(), weight.scheme.element
    if weight.offsets is None:
        return evolve(weight, scales=scales)
    points = (weight.offsets / weight.scales).round().clamp(-element.high, element.high)
    return evolve(weight, scales=scales, offsets=points * scales)


def _each(weight: QuantizedWeight) -> list[QuantizedWeight]:
    """Return the weights of the experts, or the weight alone."""
    if weight.codes.dim() == 2:
        return [weight]
    return [
        evolve(
            weight,
            codes=weight.codes[index],
            scales=weight.scales[index],
            offsets=None if weight.offsets is None else weight.offsets[index],
        )
        for index in range(weight.codes.shape[0])
    ]


def online_scheme(format_: Any, name: str) -> WeightScheme:
    """Return the scheme that a format gives a plain linear layer.

    Raises:
        NotApplicable: if it leaves the layer plain.
    """
    scheme: WeightScheme | None = format_.scheme_of(name, "linear")
    if scheme is None:
        raise NotApplicable(f"{name} stays plain")
    return scheme
