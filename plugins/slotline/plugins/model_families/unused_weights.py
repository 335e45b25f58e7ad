"""Weights that a checkpoint holds and its model has no place for: some are expected, whole layers are refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from slotline.plugins.model_families.naming import listed
from slotline.registry.errors import ModelError

_EXPECTED = re.compile(
    r"(^|\.)(mtp|mtp_layers|mtp_block|nextn_predict_layers)\."  # layers that predict further tokens: a drafter's
    r"|(^|\.)lm_head\."  # tied, or of a model of which only the hidden states are wanted
    r"|inv_freq$|(^|\.)masked_bias$|(attn|attention)\.bias$"  # buffers that configurations tell
    r"|(^|[._])(q|k|v|kv|prob)_scale$|_zero_point$"  # of an eight-bit cache
)
_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)(\.|$)")
_PREDICTS_FURTHER = (".eh_proj.", ".shared_head.")
"""What a layer behind the last one has, if it is no layer of the model but one that predicts further tokens."""


def review(model: torch.nn.Module, unused: Collection[str], path: Path) -> tuple[str, ...]:
    """Return the unused names that are not expected.

    Args:
        model: as transformers loaded it.
        unused: names of the weights without a place.
        path: the checkpoint's folder, for the message.

    Raises:
        ModelError: if whole layers are among them: the model would run truncated. Or if adapters are.
    """
    unused = [name for name in unused if not _EXPECTED.search(name)]
    if adapters := sorted(name for name in unused if _ADAPTER.search(name)):
        raise ModelError(
            f"{path} holds adapters among the model's own weights, which would be left out: {listed(adapters)}",
            fix="save each adapter in a folder of its own, as PEFT does, and name it in requests, or merge it",
        )
    behind = _behind_the_last(model, unused)
    further = [layer for layer, names in behind.items() if any(mark in n for n in names for mark in _PREDICTS_FURTHER)]
    expected = {name for layer in further for name in behind.pop(layer)}
    if behind:
        lists = sorted({layer[0] for layer in behind})
        sizes = ", ".join(f"{len(model.get_submodule(name))} of {name}" for name in lists)  # type: ignore[arg-type]
        layers = [f"{name}.{index}" for name, index in sorted(behind)]
        raise ModelError(
            f"the weights of {path} hold more layers than its config.json makes ({sizes}): "
            f"{listed(layers)}, {sum(map(len, behind.values()))} tensors",
            fix="correct num_hidden_layers in config.json, or download the config.json that belongs to these weights; "
            "if the model is meant to be shorter, remove those tensors",
        )
    return tuple(sorted(name for name in unused if name not in expected))


def _behind_the_last(model: torch.nn.Module, unused: Iterable[str]) -> dict[tuple[str, int], list[str]]:
    """Return unused weights of layers after the last one of a list of layers, by the list's name and layer index."""
    lists = {name: len(m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    base = f"{getattr(model, 'base_model_prefix', '')}."  # which checkpoints of the bare body leave out
    known = {name.removeprefix(base): name for name in lists} | {name: name for name in lists}
    found: dict[tuple[str, int], list[str]] = {}
    for weight in unused:
        parts = weight.split(".")
        for place, part in enumerate(parts):
            name = known.get(".".join(parts[:place]))
            if part.isdigit() and name is not None and int(part) >= lists[name]:
                found.setdefault((name, int(part)), []).append(weight)
                break
    return found
