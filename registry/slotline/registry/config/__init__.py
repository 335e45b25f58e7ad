"""Configuration: one TOML file, typed by frozen classes, every value with its origin."""

from slotline.registry.config.faults import Fault
from slotline.registry.config.json_schema import json_schema
from slotline.registry.config.load import LoadedConfig, load_config
from slotline.registry.config.plugin_tables import PLUGIN_TABLES, options_path
from slotline.registry.config.reference import reference
from slotline.registry.config.schema import (
    CONFIG_VERSION,
    AttentionConfig,
    CacheConfig,
    Config,
    DrafterConfig,
    GraphMode,
    GraphsConfig,
    KVConnectorConfig,
    LogprobsMode,
    LoraConfig,
    MultimodalConfig,
    ObservabilityConfig,
    PluginsConfig,
    SamplingConfig,
    SchedulerConfig,
    StructuredOutputConfig,
)
from slotline.registry.config.show import show
from slotline.registry.config.tree import Origin
from slotline.registry.config.validators import size_in_bytes

__all__ = [
    "CONFIG_VERSION",
    "PLUGIN_TABLES",
    "AttentionConfig",
    "CacheConfig",
    "Config",
    "DrafterConfig",
    "Fault",
    "GraphMode",
    "GraphsConfig",
    "KVConnectorConfig",
    "LoadedConfig",
    "LogprobsMode",
    "LoraConfig",
    "MultimodalConfig",
    "ObservabilityConfig",
    "Origin",
    "PluginsConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "StructuredOutputConfig",
    "json_schema",
    "load_config",
    "options_path",
    "reference",
    "show",
    "size_in_bytes",
]
