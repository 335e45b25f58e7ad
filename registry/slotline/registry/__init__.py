"""Contracts, capabilities, configuration and plugin discovery, shared by plugins and the core.

Importing this package does not import torch. The heavier parts are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slotline.registry.capability import (
    Align,
    Capability,
    Choice,
    Flag,
    GraphSupport,
    Level,
    Limit,
    Max,
    Range,
    Set,
    Support,
)
from slotline.registry.descriptor import HOST_CONTRACTS, ContractRange, Descriptor, DeviceInfo, Kind
from slotline.registry.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    IntegrityError,
    ModelError,
    NegotiationError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
    SlotlineError,
)

if TYPE_CHECKING:
    from slotline.registry.config.json_schema import json_schema
    from slotline.registry.config.load import LoadedConfig, load_config
    from slotline.registry.config.schema import Config, PluginsConfig
    from slotline.registry.config.show import show
    from slotline.registry.config.tree import Origin
    from slotline.registry.discovery import PluginRegistry
    from slotline.registry.hooks import HookHost, PlanNote, Registrar, hookimpl, hookspec
    from slotline.registry.loading import bind_contract, resolve_factory, resolve_options
    from slotline.registry.probing import probe
    from slotline.registry.records import PluginRecord, PluginState

_LAZY = MappingProxyType(
    {
        "Config": "config.schema",
        "HookHost": "hooks",
        "LoadedConfig": "config.load",
        "Origin": "config.tree",
        "PlanNote": "hooks",
        "PluginRecord": "records",
        "PluginRegistry": "discovery",
        "PluginState": "records",
        "PluginsConfig": "config.schema",
        "Registrar": "hooks",
        "bind_contract": "loading",
        "hookimpl": "hooks",
        "hookspec": "hooks",
        "json_schema": "config.json_schema",
        "load_config": "config.load",
        "probe": "probing",
        "resolve_factory": "loading",
        "resolve_options": "loading",
        "show": "config.show",
    }
)

__all__ = [
    "HOST_CONTRACTS",
    "Align",
    "Capability",
    "CapacityError",
    "Choice",
    "Config",
    "ConfigError",
    "ContractError",
    "ContractRange",
    "Descriptor",
    "DeviceInfo",
    "Flag",
    "GraphSupport",
    "HookHost",
    "IntegrityError",
    "Kind",
    "Level",
    "Limit",
    "LoadedConfig",
    "Max",
    "ModelError",
    "NegotiationError",
    "Origin",
    "PlanNote",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginRecord",
    "PluginRegistry",
    "PluginState",
    "PluginsConfig",
    "Range",
    "Registrar",
    "RequestError",
    "Set",
    "SlotlineError",
    "Support",
    "bind_contract",
    "hookimpl",
    "hookspec",
    "json_schema",
    "load_config",
    "probe",
    "resolve_factory",
    "resolve_options",
    "show",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
