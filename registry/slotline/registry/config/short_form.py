"""Short form of tables: a plain value in place of a table sets one of its keys."""

from __future__ import annotations

from slotline.registry.config.fields import table_fields
from slotline.registry.config.schema import Config
from slotline.registry.config.tree import Leaf, Node, Table


def expand_short(tree: Table) -> Table:
    """Expand the short form of tables: ``plugins = [...]`` becomes ``plugins = {inline = [...]}``."""
    items: dict[str, Node] = dict(tree.items)
    for key, item in table_fields(Config).items():
        node = items.get(key)
        if "short" in item.metadata and isinstance(node, Leaf):
            items[key] = Table({item.metadata["short"]: node}, node.origin)
    return Table(items, tree.origin)
