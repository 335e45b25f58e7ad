"""Orders in which blocks make way for others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from slotline.plugins.kv_connectors.stores.block_store import Key
from slotline.registry.errors import PluginLoadError
from slotline.registry.loading import import_dotted


class EvictionPolicy(Protocol):
    """Order of the blocks of a store. A class without arguments makes it."""

    def add(self, key: Key) -> None:
        """Take a block that was saved."""
        ...

    def use(self, key: Key) -> None:
        """Note that a block of the order was loaded, or saved again."""
        ...

    def remove(self, key: Key) -> None:
        """Forget a block of the order."""
        ...

    def victims(self) -> Iterator[Key]:
        """Yield all blocks, those first that should go first. The order is not changed meanwhile."""
        ...


class LeastRecentlyUsed:
    """The block goes whose last use is longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        self._order[key] = None

    def use(self, key: Key) -> None:
        self._order.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)


class LeastFrequentlyUsed:
    """The block goes that was used least often, and of those the one whose last use is longest ago.

    Prefixes of many requests stay, for instance system prompts, while long prompts pass that come once.
    """

    def __init__(self) -> None:
        self._uses: dict[Key, int] = {}
        self._keys: dict[int, OrderedDict[Key, None]] = {}  # by number of uses

    def add(self, key: Key) -> None:
        self._put(key, 0)

    def use(self, key: Key) -> None:
        uses = self._uses[key]
        self.remove(key)
        self._put(key, uses + 1)

    def remove(self, key: Key) -> None:
        uses = self._uses.pop(key)
        del self._keys[uses][key]
        if not self._keys[uses]:
            del self._keys[uses]

    def victims(self) -> Iterator[Key]:
        for uses in sorted(self._keys):
            yield from self._keys[uses]

    def _put(self, key: Key, uses: int) -> None:
        self._uses[key] = uses
        self._keys.setdefault(uses, OrderedDict())[key] = None


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}
)
_METHODS = ("add", "use", "remove", "victims")


def policy_of(name: str, key: str) -> EvictionPolicy:
    """Return a policy by its name or by the path of its class.

    Args:
        name: a name of `POLICIES`, or ``package.module:Class``.
        key: of the option, for errors.

    Raises:
        PluginLoadError: if there is none of that name.
    """
    if name not in POLICIES and ":" not in name:
        raise PluginLoadError(
            f"{key} = {name!r} is no policy", fix=f"use {', '.join(map(repr, POLICIES))} or 'package.module:Class'"
        )
    made: EvictionPolicy = (POLICIES[name] if name in POLICIES else import_dotted(name, key))()
    if missing := [method for method in _METHODS if not callable(getattr(made, method, None))]:
        raise PluginLoadError(f"{key} = {name!r} makes no policy: it lacks {', '.join(missing)}")
    return made
