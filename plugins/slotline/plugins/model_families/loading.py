"""Reads a checkpoint's weights into a transformers model that calls our attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from slotline.plugins.model_families import (
    binding,
    checkpoint,
    composite,
    inspection,
    logit_score,
    own_stage,
    structure,
    unused_weights,
    weight_files,
    weight_sizes,
)
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.lighter_imports import lighter_imports
from slotline.plugins.model_families.naming import listed
from slotline.plugins.model_families.quantized import load as quantized
from slotline.registry.contracts.model_family import ModelContext
from slotline.registry.errors import ModelError
from slotline.registry.read_ahead import read_ahead

logger = logging.getLogger("slotline")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name, e.g. ``bfloat16``.

    Raises:
        ModelError: if weights cannot have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype {name!r} is no dtype for weights", fix="use float32, bfloat16 or float16")
    return dtype


def load_transformers_model(
    context: ModelContext, found: Checkpoint | None = None, attention: str = binding.ATTENTION_NAME
) -> Any:
    """Return the model in host memory: weights read, cast and checked, evaluation mode, no gradients.

    Args:
        found: the folder's checkpoint, by default read again as a decoder's.
        attention: the attention implementation of all parts of the model.

    Raises:
        ModelError: if weights are missing or do not fit the model.
    """
    path = context.facts.path
    weights = context.weights
    found = found or checkpoint.read(path, quantized=weights is not None)
    text_alone = found.whole is not None and (found := composite.loadable(found)).whole is None
    checkpoint.require_weights(path)
    weight_files.refuse_adapter(path)
    tensors = weight_files.tensors_of(path, found.config)
    files = [tensor.file for tensor in tensors]
    state, dtype, served = None, torch_dtype(context.dtype), found
    if weights is not None and not weights.online:
        composite.refuse_quantized(found)
        read_ahead(files, progress=context.progress)
        found = quantized.with_slots(found, weights, dtype)
        state, tensors = quantized.plain_state(found, tensors, weights, dtype)
    weight_files.refuse_quantized(tensors)
    weight_sizes.refuse_larger(found, tensors)
    binding.register(binding.ATTENTION_NAME, binding.slot_attention)
    if state is None:
        read_ahead(files, progress=context.progress)
    report_of = _Reports()
    try:
        with no_progress_bars(), report_of.kept(), lighter_imports():
            model, report = _from_pretrained(found, state, dtype, found.attention(attention), text_alone=text_alone)
    except MemoryError:
        raise
    except Exception as error:  # readers of several formats, each with errors of its own
        raise weight_files.unreadable(path, error, str(report_of)) from error
    weight_files.refuse_whole_numbers(tensors, report["unexpected_keys"], model)
    left_out = tuple(f"{name}." for name in composite.left_out(model))
    unexpected = {name for name in report["unexpected_keys"] if not f"{name}.".startswith(left_out)}
    if unused := unused_weights.review(model, unexpected, path):
        logger.warning(
            "%s weights in %s have no place in %s: %s", len(unused), path, found.architecture, listed(unused)
        )
    if context.task != "generate" and hasattr(model, "lm_head"):
        logit_score.replace_head(model, context)
        if not hasattr(model, "score"):
            report["missing_keys"] = {key for key in report["missing_keys"] if not key.startswith("lm_head.")}
    _refuse_incomplete(context, report)
    if found.whole is not None:
        model = composite.text_part(model, found, binding.ATTENTION_NAME)
    if weights is not None:
        model.__class__ = served.model_class
    model = structure.find_body(model)
    if weights is not None and context.shard is None:  # a divided model gets them when it is divided
        weights = weights if hasattr(model, "lm_head") else quantized.without_head(weights)
        quantized.put(model, own_stage.own_weights(model, weights, context.own_stage), context)
    return inspection.adopted(model.eval().requires_grad_(False), binding.slot_attention)


def _from_pretrained(
    found: Checkpoint, state: Mapping[str, Any] | None, dtype: torch.dtype, attention: str, *, text_alone: bool
) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model and its report on the weights.

    Args:
        state: the weights by name. None for those in the folder.
        attention: the attention implementation of a decoder.
        text_alone: True if the files hold a whole model, of which this is the text part.
    """
    loaded: tuple[Any, dict[str, Any]] = found.stored_class.from_pretrained(
        found.path if state is None else None,
        state_dict=state,
        config=found.stored_config,
        dtype=dtype,
        attn_implementation="eager" if found.whole else attention,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused by name
        generation_config=GenerationConfig(),  # requests read it, no model does
        **({"key_mapping": dict(composite.TEXT_KEYS)} if text_alone else {}),
    )
    return loaded


def copy_weights(own: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy the tensors of a folder into a loaded model's by name, in place, so that addresses stay.

    Raises:
        ModelError: if names or shapes differ. Nothing has been copied then.
    """
    changed = sorted(n for n in own.keys() | new.keys() if n not in own or n not in new or own[n].shape != new[n].shape)
    if changed:
        raise ModelError(
            f"weights of {path} do not fit the loaded model: {', '.join(changed[:4])}",
            fix="name a checkpoint of the same shapes, or build the engine again",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(new[name])


class _Reports(logging.Filter):
    """Keeps transformers' tables of weights back: what matters of them is said by `load_transformers_model`."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" not in text:
            return True
        self._tables.append(text)
        return False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While transformers loads a model."""
        theirs = logging.getLogger("transformers.modeling_utils")
        theirs.addFilter(self)
        try:
            yield
        finally:
            theirs.removeFilter(self)

    def __str__(self) -> str:
        """Return the tables, for an error message."""
        return "".join(f"\n{table}" for table in self._tables)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Show no progress bars of transformers inside."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _refuse_incomplete(context: ModelContext, report: dict[str, Any]) -> None:
    for what in ("missing_keys", "mismatched_keys"):
        names = sorted(_said(entry) for entry in report.get(what) or ())
        if names:
            raise ModelError(
                f"{what.replace('_keys', '')} weights in {context.facts.path}: {listed(names)}",
                fix="download the checkpoint again, or use the config.json that belongs to these weights",
            )


def _said(entry: str | tuple[str, torch.Size, torch.Size]) -> str:
    """Return a weight's name, with the two shapes if they differ."""
    if isinstance(entry, str):
        return entry
    name, stored, own = entry
    return f"{name} {list(stored)}, where config.json makes it {list(own)}"
