"""Checkpoints with random weights, for timing a model whose weights are not at hand."""

from __future__ import annotations

from pathlib import Path

from slotline.planner.auto_config import auto_config
from slotline.planner.hub import find_hub_model
from slotline.registry.config import LoadedConfig


def model_settings(loaded: LoadedConfig, *, random: bool) -> dict[str, str]:
    """Return the settings that name the model, with random weights if the checkpoint has none.

    Args:
        random: take random weights even if it has its own.
    """
    from slotline.planner.plan import SMALL_MODEL

    hub = find_hub_model(loaded, weights=not random)
    path = hub.folder if hub is not None else loaded.path("model") or SMALL_MODEL
    made_up = (path / "config.json").is_file() and (random or not _has_weights(path))
    return {"model": str(path), **({"load.format": "dummy"} if made_up else {})}


def random_checkpoint(source: Path, target: Path, dtype: str = "auto", *, shards: int = 1) -> Path:
    """Write a checkpoint of `source`'s configuration with seeded random weights into `target`.

    Args:
        shards: about so many files of weights.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = auto_config(source)
    torch.manual_seed(0)
    kept = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # random numbers are faster there
            model = AutoModelForCausalLM.from_config(config, dtype=kept, trust_remote_code=False)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        model.save_pretrained(target, **({"max_shard_size": size // shards + 1} if shards > 1 else {}))
    finally:
        if shown:
            logging.enable_progress_bar()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return target


def _has_weights(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
