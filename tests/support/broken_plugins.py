"""A plugin of each kind whose factory fails, in each way that a factory can; the rest of it is a shipped plugin's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import extension_plugins
from attrs import evolve

from slotline.backends import torch_sdpa, torch_state
from slotline.backends.linear import descriptors as linears
from slotline.core.device import cpu_plugin
from slotline.plugins.communicators import descriptors as communicators
from slotline.plugins.expert_placements import descriptors as expert_placements
from slotline.plugins.kv_connectors import host_memory
from slotline.plugins.kv_specs import full
from slotline.plugins.logits_processors import no_repeat_ngram
from slotline.plugins.lora import grouped
from slotline.plugins.model_families import decoder
from slotline.plugins.response_parsers import descriptors as response_parsers
from slotline.plugins.schedulers import descriptors as schedulers
from slotline.plugins.structured_output import llguidance
from slotline.plugins.weight_formats import descriptors as weight_formats
from slotline.proposers import ngram


def raises(*context: Any) -> Any:
    """A mistake in the plugin."""
    raise KeyError("no such table")


def exits(*context: Any) -> Any:
    """What a library does that believes to be a program."""
    raise SystemExit("this machine is not supported")


def fills(*context: Any) -> Any:
    """More memory than there is."""
    raise MemoryError


armed: list[bool] = []
"""Holds something once the engine is built, for methods of `failing_plugins.py` that fail later."""

_FACTORIES = {"raises": raises, "exits": exits, "absent": "absent_package.module:Factory", "fills": fills}
_SHIPPED = {
    "attention": torch_sdpa,
    "state": torch_state,
    "kv_spec": full,
    "kv_connector": host_memory,
    "drafter": ngram,
    "logits_processor": no_repeat_ngram,
    "lora": grouped,
    "model_family": decoder,
    "structured_output": llguidance,
    "device": cpu_plugin,
    "extension": extension_plugins,
    "linear": SimpleNamespace(descriptor=linears.dequantized),
    "experts": SimpleNamespace(descriptor=linears.dequantized_experts),
    "weight_format": SimpleNamespace(descriptor=weight_formats.online),
    "response_parser": SimpleNamespace(descriptor=response_parsers.hermes),
    "communicator": SimpleNamespace(descriptor=communicators.gloo),
    "expert_placement": SimpleNamespace(descriptor=expert_placements.greedy),
    "scheduler_policy": SimpleNamespace(descriptor=schedulers.fcfs),
}


def __getattr__(name: str) -> Any:
    """`KIND_HOW`."""
    kind, _, how = name.rpartition("_")
    if kind not in _SHIPPED or how not in _FACTORIES:
        raise AttributeError(name)
    return evolve(_SHIPPED[kind].descriptor, name="broken", factory=_FACTORIES[how])
