"""Location of a plugin's own options in the file, by kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from slotline.registry.config.faults import Fault, similar
from slotline.registry.config.fields import table_fields
from slotline.registry.config.schema import (
    DrafterConfig,
    KVConnectorConfig,
    LoraConfig,
    ResponseParserConfig,
    StructuredOutputConfig,
)
from slotline.registry.config.structure import dotted
from slotline.registry.config.tree import KeyPath, Node, Table, find
from slotline.registry.descriptor import Kind

PLUGIN_TABLES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.ATTENTION: "backend",
        Kind.STATE: "backend",
        Kind.KV_SPEC: "kv_spec",
        Kind.KV_CONNECTOR: "kv_connector",
        Kind.DRAFTER: "drafter",
        Kind.LOGITS_PROCESSOR: "logits_processors",
        Kind.LORA: "lora",
        Kind.MODEL_FAMILY: "model_family",
        Kind.STRUCTURED_OUTPUT: "structured_output",
        Kind.RESPONSE_PARSER: "response_parser",
        Kind.DEVICE: "devices",
        Kind.EXTENSION: "extensions",
        Kind.LINEAR: "linear",
        Kind.EXPERTS: "experts",
        Kind.WEIGHT_FORMAT: "weight_format",
        Kind.COMMUNICATOR: "communicator",
        Kind.EXPERT_PLACEMENT: "expert_placement",
        Kind.SCHEDULER_POLICY: "scheduler_policy",
    }
)
"""The table whose sub-table `NAME` holds the options of the plugin `NAME` of a kind."""

NAMING_TABLES = frozenset({"extensions", "logits_processors"})
"""Tables whose sub-tables do not only configure a plugin but ask for it, so that an unknown name is an error."""

_OWN_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "drafter": frozenset(table_fields(DrafterConfig)),
        "kv_connector": frozenset(table_fields(KVConnectorConfig)),
        "lora": frozenset(table_fields(LoraConfig)),
        "response_parser": frozenset(table_fields(ResponseParserConfig)),
        "structured_output": frozenset(table_fields(StructuredOutputConfig)),
    }
)


def kinds_of(table: str) -> tuple[Kind, ...]:
    """Return the kinds whose plugins have their own tables in a table."""
    return tuple(kind for kind, outer in PLUGIN_TABLES.items() if outer == table)


def options_path(kind: Kind, name: str) -> KeyPath:
    """Return the key path of a plugin's own table."""
    return PLUGIN_TABLES[kind], name


def plugin_tables(tree: Table) -> Iterator[tuple[str, str, Node]]:
    """Yield each plugin table of the configuration: the outer table, the plugin's name, the node."""
    for table in dict.fromkeys(PLUGIN_TABLES.values()):
        outer = find(tree, (table,))
        for name, node in outer.items.items() if isinstance(outer, Table) else ():
            if name not in _OWN_KEYS.get(table, ()):
                yield table, name, node


def absent_plugins(tree: Table, installed: Mapping[Kind, Collection[str]]) -> Iterator[tuple[bool, Fault]]:
    """Yield, for each table whose plugin is not installed, True if the table requests the plugin, and a fault."""
    for table, name, node in plugin_tables(tree):
        kinds = kinds_of(table)
        names = {known for kind in kinds for known in installed.get(kind, ())}
        if name not in names:
            what = " or ".join(kind.value for kind in kinds)
            message = f"no {what} plugin {name!r} is installed{similar(name, names)}"
            yield table in NAMING_TABLES, Fault(node.origin, dotted((table, name)), message)
