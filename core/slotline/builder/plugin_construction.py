"""Construction of plugins, with a typed error when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slotline.core.device.out_of_memory import is_out_of_memory
from slotline.registry.descriptor import Descriptor
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import CapacityError, SlotlineError
from slotline.registry.loading import label_of


@contextmanager
def oom_as_capacity_error(what: str, fix: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a CapacityError.

    Raises:
        CapacityError: if there is not enough memory. It names `what` and `fix`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SlotlineError) or not is_out_of_memory(error):
            raise
        raise CapacityError(f"{what} does not fit into memory", fix=fix) from error


def build_plugin(
    registry: PluginRegistry, descriptor: Descriptor[Any], context: Any, fix: str, *, optional: bool = False
) -> Any:
    """Build a plugin's object from its context.

    Args:
        fix: the remedy if it takes more memory than there is.
        optional: True if the factory may return None, which is returned then.

    Raises:
        PluginError: if the factory cannot be imported or raises, or the built object lacks methods of the contract. It
            names the plugin, its package and the remedy.
        CapacityError: if there is not enough memory.
    """
    factory = registry.factory(descriptor)
    with registry.building(descriptor), oom_as_capacity_error(label_of(descriptor), fix):
        built = factory(context)
    return None if built is None and optional else registry.accept(descriptor, built)
