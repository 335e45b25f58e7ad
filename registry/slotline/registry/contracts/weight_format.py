"""The weight-format contract, version 1 (provisional): from a checkpoint's tensors to quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.declared import declared
from slotline.registry.tensor_files import StoredTensor

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class WeightFormatCapabilities:
    """Capabilities that a weight format declares.

    Attributes:
        methods: values of `quant_method` in a checkpoint's quantization configuration that it reads. A format that
            quantizes at load lists the values of `weights.quantize` that it serves.
        schemes: names of the schemes that it gives.
        files: names of files that hold the quantization configuration where config.json has none, such as
            ``quantize_config.json``.
        suffixes: endings of checkpoints that are one file, such as ``.gguf``. The factory is a `FileFormat` then.
        online: it quantizes plain weights while a model is loaded (`OnlineFormat`).
    """

    methods: Set[str]
    schemes: Set[str]
    files: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    online: Flag = Flag(False)


class TensorReader(Protocol):
    """Protocol of a checkpoint's tensors. Each is read from its file when it is asked for, and nothing else."""

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Name, dtype and shape of every tensor, by name."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory.

        Raises:
            slotline.registry.errors.ModelError: if there is none of that name, or the file is broken.
        """
        ...


@frozen(kw_only=True, eq=False)
class WeightFormatContext:
    """Input of a weight format's factory.

    Attributes:
        path: the checkpoint's folder.
        config: the quantization configuration as the checkpoint has it. Empty for a format that quantizes at load.
        tensors: the checkpoint's tensors.
        method: the `quant_method`, or the value of `weights.quantize`.
        options: the plugin's own table.
    """

    contract: int
    path: Path
    config: Mapping[str, Any] = field(factory=dict)
    tensors: TensorReader
    method: str
    options: Any = None


class WeightFormat(Protocol):
    """Product of a weight format's factory: the reader of one checkpoint."""

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        """Return the form of a weight, from the configuration and the descriptions of tensors. None if it is plain.

        Args:
            name: the stored name of the module without ``.weight``, e.g. ``model.layers.0.self_attn.q_proj``. For
                experts that are stored together, that of their first tensor, e.g. ``..mlp.experts.gate_up_proj``.
            kind: ``linear``, ``head`` for the output projection, or ``experts``.

        Raises:
            slotline.registry.errors.ModelError: for a form that no scheme describes, with the name and the numbers.
        """
        ...

    def read(self, name: str, kind: str) -> QuantizedWeight:
        """Read the tensors of a weight for which `scheme_of` gave a scheme.

        Returns:
            A weight [out_features, in_features], or [experts, out_features, in_features] for experts that are stored
            together, in host memory. Outputs that are stored alternately (gate, up, gate, up) stay so.

        Raises:
            slotline.registry.errors.ModelError: for tensors that are missing or have a wrong shape, with their names.
        """
        ...


class OnlineFormat(WeightFormat, Protocol):
    """Protocol of a format that quantizes plain weights while a model is loaded. `read` is not called."""

    def quantize(self, name: str, kind: str, weight: torch.Tensor) -> QuantizedWeight:
        """Return the quantized form of a weight [.., out_features, in_features] of any real dtype."""
        ...


@frozen(kw_only=True, eq=False)
class FormatExample:
    """Form of weights that a format reads, with a writer of it. The conformance suite draws the weights.

    A factory offers its examples by a static method `examples() -> Mapping[str, FormatExample]`, by a name in words. A
    format that reads checkpoints needs one for each scheme that it declares. An engine never calls it.

    Attributes:
        config: the quantization configuration, which leaves out the module ``lm_head``. A function of the names of all
            quantized modules, if it names them.
        scheme: the form of the weights.
        store: from a module's name and a weight of `scheme` to the tensors that a checkpoint holds for it, by their
            whole names. It has the opposite task of `WeightFormat.read`, so write it from the format's description.
        fit: from a weight to a near one that the form holds exactly. None if it holds every weight with scales of eight
            significant bits and whole zero points.
        kind: ``linear`` for weights [out_features, in_features], ``experts`` for [experts, out_features, in_features].
        row_step, column_step: numbers that divide the outputs and the inputs of what it holds.
    """

    config: Mapping[str, Any] | Callable[[tuple[str, ...]], Mapping[str, Any]]
    scheme: WeightScheme
    store: Callable[[str, QuantizedWeight], Mapping[str, torch.Tensor]]
    fit: Callable[[QuantizedWeight], QuantizedWeight] | None = None
    kind: Literal["linear", "experts"] = "linear"
    row_step: int = 1
    column_step: int = 1


class FileFormat(Protocol):
    """Protocol of the factory of a format whose checkpoints are one file."""

    def unpack(self, path: Path, folder: Path) -> None:
        """Write the model into an empty folder: config.json with a quantization configuration, tokenizer, weights.

        It is called once for each file. The host keeps the folder in the cache folder.

        Raises:
            slotline.registry.errors.ModelError: if the file is broken, or its model has parts that cannot be read.
        """
        ...
