"""Settings of `LLM` and `AsyncLLM`: vLLM's short names, and a model given in place of a configuration file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slotline.registry.config import LoadedConfig, load_config
from slotline.registry.errors import ConfigError
from slotline.registry.named_path import as_path, is_single_file
from slotline.registry.safe_repr import safe_repr

_SHORT = {
    "backend": "attention.backend",
    "block_size": "cache.block_size",
    "kv_cache_dtype": "cache.dtype",
    "memory": "cache.memory",
    "enable_prefix_caching": "cache.prefix_caching",
    "max_model_len": "scheduler.max_model_len",
    "max_num_seqs": "scheduler.max_requests",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "seed": "sampling.seed",
    "data": "parallel.data",
    "data_parallel_size": "parallel.data",
    "tensor": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "expert": "parallel.expert",
    "pipeline": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline",
}


def load_settings(
    config: str | Path | LoadedConfig | None, overrides: Sequence[str], settings: Mapping[str, Any]
) -> LoadedConfig:
    """Load a configuration, with settings by name on top.

    Args:
        config: a TOML file, a checkpoint folder or GGUF file, what `load_config` returned, or None.
        overrides: settings in the form `a.b=value`.
        settings: values by dotted key or short name.

    Raises:
        ConfigError: listing every fault, or if two models are named.
    """
    if isinstance(config, LoadedConfig):
        if overrides or settings:
            raise ConfigError("a loaded configuration with settings on top", fix="give them to load_config")
        return config
    values = {_SHORT.get(key, key): value for key, value in settings.items()}
    folder = None if config is None else as_path(config)
    if folder is not None and (os.path.isdir(folder) or is_single_file(folder)):
        if values.get("model"):
            raise ConfigError(
                f"{folder!r} and model={safe_repr(values['model'])} name two models", fix="name one of them"
            )
        values["model"], config = folder, None
    return load_config(config, overrides=overrides, values=values)
