"""Comparison of a decoder that no test vouches for with transformers' own, before the first request.

A small model of the same class gets a text of two requests in chunks, then token by token, through a cache that follows
the layers that inspection has found. transformers generates with its own cache, in float32 over the same weights. The
numbers after each decoder layer and the logits must agree. What passed is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import frozen

from slotline.plugins.model_families import shrinking, trial_runs
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.registry.cache_folder import cache_folder, write_atomic
from slotline.registry.errors import ModelError, SlotlineError
from slotline.registry.json_file import read_json
from slotline.registry.loading import one_line

TOLERANCE = 2e-3
"""Largest difference that passes, of the largest number that transformers has after the same layer."""
SAME_WEIGHTS = 50_000_000
"""Up to this number of parameters the model's own weights are used."""
LARGEST = 400_000_000
OWN = "its own weights"
FOLDER = "self_checks"
FIX = "use a model family plugin that serves this architecture, and report it to slotline"


@frozen
class Difference:
    """The first place where two traces differ."""

    layer: str
    position: int
    amount: float


def check(found: Checkpoint, state: Mapping[str, torch.Tensor] | None) -> str:
    """Compare a checkpoint's decoder with transformers' own, unless a result is kept.

    Args:
        found: the decoder.
        state: the model's weights by name. None, or those of a large model, are not used: a small model is made.

    Returns:
        A note on the result.

    Raises:
        ModelError: naming the first layer and position that differ, and by how much.
    """
    return kept(found, lambda: _compare(found, state))


def kept(found: Checkpoint, compare: Callable[[], str], kind: str = "") -> str:
    """Return what a comparison says of a checkpoint's decoder, or has said before.

    Args:
        compare: returns a note, or raises.
        kind: tells comparisons of one decoder apart.
    """
    file = kept_file(found, kind)
    if (before := _kept(file)) is not None:
        return f"{before}, kept in {file}"
    said = compare()
    if file is not None:
        try:
            write_atomic(file, json.dumps({"architecture": found.architecture, "said": said}).encode())
        except OSError as error:
            return f"{said}; the result cannot be kept: {one_line(error)}"
    return said


def kept_file(found: Checkpoint, kind: str = "") -> Path | None:
    """Return the file of the result for this configuration and these versions. None without a cache folder."""
    config = {k: v for k, v in found.config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    facts = [f"{found.architecture}{kind}", transformers.__version__, torch.__version__, _own_version()]
    facts += [json.dumps(config, sort_keys=True, default=str)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    try:
        return cache_folder() / FOLDER / f"{found.model_class.__name__}-{digest}.json"
    except OSError:
        return None


def _own_version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:
        return ""


def _kept(file: Path | None) -> str | None:
    try:
        said = None if file is None else read_json(file).get("said")
    except (OSError, ValueError, AttributeError):
        return None
    return said if isinstance(said, str) else None


def _compare(found: Checkpoint, state: Mapping[str, torch.Tensor] | None) -> str:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        reference, traces, of_what = reference_of(found, state)
        difference, worst = first_difference(trial_runs.ours(found, reference, traces), traces, reference)
    if difference is not None:
        raise ModelError(
            f"{found.architecture} in {found.path} fails its self-check: {difference.layer} differs from transformers' "
            f"own first at position {difference.position}, by {difference.amount:.1e} of its largest number",
            fix=FIX,
        )
    return f"self-checked against transformers over {of_what}: the largest difference is {worst:.1e}"


def reference_of(found: Checkpoint, state: Mapping[str, torch.Tensor] | None) -> tuple[Any, list[Any], str]:
    """Return transformers' model, its texts and traces, and what the model is in words.

    Raises:
        ModelError: if transformers runs none of the small models.
    """
    said = ""
    for config, weights, of_what in _candidates(found, state):
        for attention in ("eager", "sdpa"):
            try:
                model = _model(found, config, attention)
                if weights is not None:
                    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
                else:
                    _widen(model)
                return model, [trial_runs.generated(model, length) for length in trial_runs.PROMPTS], of_what
            except (MemoryError, SlotlineError):
                raise
            except Exception as error:  # of transformers' own code, on a configuration that nobody tried
                said = said or one_line(error)
    raise ModelError(
        f"{found.architecture} in {found.path} cannot be checked against transformers, which does not generate with a "
        f"small one: {said}",
        fix=FIX,
    )


def _candidates(found: Checkpoint, state: Mapping[str, torch.Tensor] | None) -> list[tuple[Any, Any, str]]:
    """Return the (configuration, weights or None, words) to try, the best first."""
    config, small = found.config, shrinking.windows(found.config)
    candidates = []
    size = sum(tensor.numel() for tensor in (state or {}).values())
    for changes, weights, of_what in (
        (small, state, OWN),
        (shrinking.small_settings(config) | small, None, "a small copy"),
        (_fewer_layers(config) | small, None, "a copy with fewer layers"),
    ):
        if of_what == OWN and not 0 < size <= SAME_WEIGHTS:
            continue
        try:
            candidates.append((shrinking.changed_copy(config, changes), weights, of_what))
        except Exception:
            continue
    return candidates


def _fewer_layers(config: Any) -> dict[str, Any]:
    names = {*shrinking.KINDS, *shrinking.LAYER_NUMBERS}
    return {name: value for name, value in shrinking.small_settings(config).items() if name in names}


def _model(found: Checkpoint, config: Any, attention: str) -> Any:
    config = deepcopy(config)
    config._attn_implementation = attention
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in found.model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its small copy has {size} parameters")
    return found.model_class(config).float().eval()


def _widen(model: torch.nn.Module) -> None:
    """Let every weight matter: matrices get a deviation of 0.15, vectors some noise."""
    for name, parameter in model.named_parameters():
        if "A_log" in name or not parameter.is_floating_point():
            continue
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif not (parameter.isfinite().all() and 0.1 < float(parameter.std()) < 1):
            parameter.copy_(torch.randn_like(parameter) * 0.15)


def first_difference(ours: list[trial_runs.Trace], texts: list[Any], model: Any) -> tuple[Difference | None, float]:
    """Return the first difference of the traces above the tolerance, and the largest difference."""
    worst = 0.0
    for own, (_, theirs), length in zip(ours, texts, trial_runs.PROMPTS, strict=True):
        for number in sorted(theirs.layers):
            found, expected = own.layers.get(number), theirs.after(number)
            if found is None or torch.cat(found).shape != expected.shape:
                continue  # a layer that a forward calls several times
            name = f"layer {number} ({type(model.base_model.layers[number]).__name__})"
            first, amount = _first_place(torch.cat(found), expected)
            if first is not None:
                return Difference(name, first, amount), amount
            worst = max(worst, amount)
        first, amount = _first_place(torch.stack(own.logits), torch.stack(theirs.logits))
        if first is not None:
            return Difference("the output", length - 1 + first, amount), amount
        worst = max(worst, amount)
    return None, worst


def _first_place(found: torch.Tensor, expected: torch.Tensor) -> tuple[int | None, float]:
    """Return the first row that differs or None, and the largest difference relative to the largest number."""
    expected = expected.nan_to_num(neginf=0.0, posinf=0.0)
    found = torch.where(found.isinf(), torch.zeros_like(found), found)
    scale = expected.abs().max().clamp_min(1e-9)
    rows = (found - expected).abs().amax(-1) / scale  # [num_tokens]
    wrong = (~(rows <= TOLERANCE)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        return first, float(rows[first])
    return None, float(rows.max())
