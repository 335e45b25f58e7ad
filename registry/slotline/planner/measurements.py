"""Measurements in the user's cache folder: one file for each model shape, device and pair of dtypes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from attrs import asdict

from slotline.registry.cache_folder import cache_folder, write_atomic
from slotline.registry.contracts import FORMAT_DTYPES, ModelFacts
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import ConfigError
from slotline.registry.negotiation import Measured, Plan, PlanRequest
from slotline.registry.negotiation.measured import from_json, to_json
from slotline.registry.negotiation.request import AUTO

logger = logging.getLogger("slotline")


def measurement_key(facts: ModelFacts, device: DeviceInfo, dtype: str, kv_dtype: str) -> dict[str, Any]:
    """Return the conditions under which a measurement holds: device, model shape, dtypes and torch version.

    Plugin versions are kept with each run instead, so that a new version of one plugin invalidates only its own runs.
    """
    layers = [{key: value for key, value in asdict(layer).items() if key != "name"} for layer in facts.layers]
    shape: dict[str, Any] = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    shape |= {"parameters": facts.num_parameters}
    if facts.state_layers:
        shape["states"] = [[layer.state_kind, sorted(layer.facts.items())] for layer in facts.state_layers]
    return {
        "device": device.name or device.type,
        "cores": os.cpu_count() if device.type == "cpu" else device.cores,  # a CPU's name says too little
        "architecture": facts.architecture,
        "shape": hashlib.sha256(json.dumps([shape, layers], sort_keys=True).encode()).hexdigest()[:16],
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "torch": str(torch.__version__),
    }


def measurement_file(key: dict[str, Any]) -> Path:
    """Return the file that holds the measurement of a key.

    Raises:
        OSError: if there is no cache folder, see `cache_folder`.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "measurements" / f"{digest}.json"


def asked_cache(request: PlanRequest) -> str:
    """Return what a request's caches hold, in the words of `planned_cache`."""
    if request.cache_format:
        return request.cache_format
    return request.dtype.value if request.cache_dtype == AUTO else request.cache_dtype


def planned_cache(plan: Plan) -> str:
    """Return the format of a plan's caches if `cache.dtype` stands for it, else their dtype. It names measurements."""
    formats = (group.cache_format for group in plan.groups if group.cache_format in FORMAT_DTYPES)
    return next(formats, plan.kv_dtype)


def load_measurements(facts: ModelFacts, device: DeviceInfo, dtype: str, kv_dtype: str) -> Measured | None:
    """Return the measurements of this model on this device. None if there are none, or, with a warning, if broken."""
    key = measurement_key(facts, device, dtype, kv_dtype)
    try:
        file = measurement_file(key)
    except OSError:  # no folder in which anything could have been kept
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return from_json(record, str(file)) if record["key"] == key else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the measurements in %s cannot be read and do not count: %s; run `slotline tune`", file, error)
        return None


def save_measurements(measured: Measured, facts: ModelFacts, device: DeviceInfo) -> Path:
    """Write measurements for later negotiations and return the file.

    Raises:
        ConfigError: if the cache folder cannot be written.
    """
    key = measurement_key(facts, device, measured.dtype, measured.kv_dtype)
    where = "the cache folder"
    try:
        file = measurement_file(key)
        where = str(file.parent)
        write_atomic(file, json.dumps({"key": key, **to_json(measured)}, indent=1).encode())
    except OSError as error:
        raise ConfigError(
            f"measurements cannot be kept in {where}: {error}",
            fix="set SLOTLINE_CACHE to a folder that can be written",
        ) from error
    return file
