"""What to say where memory ends while an engine is built."""

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
    """Around whatever takes memory while an engine is built.

    Raises:
        CapacityError: if there is not enough; names `what` and `fix`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SlotlineError) or not is_out_of_memory(error):
            raise
        raise CapacityError(f"{what} does not fit into memory", fix=fix) from error


def build_plugin(registry: PluginRegistry, descriptor: Descriptor[Any], context: Any, fix: str) -> Any:
    """What a plugin's factory makes of its context.

    Args:
        fix: the remedy where it takes more memory than there is.

    Raises:
        PluginError: if the factory cannot be imported or raises, or what it makes has not the contract's methods; names
            the plugin, who brings it, and the remedy.
        CapacityError: if there is not enough memory.
    """
    factory = registry.factory(descriptor)
    with registry.building(descriptor), oom_as_capacity_error(label_of(descriptor), fix):
        built = factory(context)
    return registry.accept(descriptor, built)
