"""Sizes of a configuration against those of the weights, before memory of these sizes is taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slotline.plugins.model_families import checkpoint, structure, weight_files
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.registry.errors import ModelError
from slotline.registry.tensor_files import StoredTensor

_SPARE = 2
"""A model may have this many times the numbers of its files before it is refused here. What transformers makes of a
file's tensors may differ a little in number; tensors that differ in shape are named by the loader."""


def require_weights(found: Checkpoint) -> None:
    """Check that a folder holds weights, and one tensor for each layer of its configuration at least.

    Raises:
        ModelError: if it does not.
    """
    checkpoint.require_weights(found.path)
    refuse_more_layers(found, weight_files.tensors_of(found.path, found.config, quick=True))


def refuse_more_layers(found: Checkpoint, tensors: Iterable[StoredTensor]) -> None:
    """Refuse a configuration of more layers than there are tensors in the files.

    Raises:
        ModelError: naming both numbers.
    """
    count = sum(1 for _ in tensors)
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        layers = getattr(found.config.get_text_config(), name, None)
        if isinstance(layers, int) and layers > count > 0:
            raise ModelError(
                f"{found.path / 'config.json'}: {name} = {layers}, and the weights have {count} tensors",
                fix="use the config.json that belongs to these weights",
            )


def refuse_larger(found: Checkpoint, tensors: Iterable[StoredTensor]) -> None:
    """Refuse a configuration whose model needs far more numbers than the files hold.

    Raises:
        ModelError: naming a tensor that differs, if there is one of that name.
    """
    tensors = tuple(tensors)
    refuse_more_layers(found, tensors)
    model = structure.without_memory(found.model_class, found.config)
    head = model.get_output_embeddings()
    spare = 0 if head is None else sum(parameter.numel() for parameter in head.parameters())
    needed = sum(parameter.numel() for parameter in model.parameters()) - spare
    stored = sum(tensor.numel for tensor in tensors)
    if needed > _SPARE * stored:
        differs = next(_differing(model, tensors), "")
        raise ModelError(
            f"{found.path / 'config.json'} makes a model of {needed} numbers, and its files hold {stored}{differs}",
            fix="use the config.json that belongs to these weights, or download the checkpoint again",
        )


def _differing(model: Any, tensors: Iterable[StoredTensor]) -> Iterator[str]:
    """Return the tensors that have another shape in the model, in words."""
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for tensor in tensors:
        for name in (tensor.name, f"{model.base_model_prefix}.{tensor.name}"):
            if name in own and own[name] != tensor.shape:
                yield f": {name} is {list(tensor.shape)} in {tensor.file.name}, {list(own[name])} by the configuration"
