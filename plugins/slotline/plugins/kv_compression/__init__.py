"""Descriptor of the extension `kv_compression`: requests keep a part of their tokens in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from slotline.registry.config.validators import AtLeast
from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ConfigError
from slotline.registry.loading import import_dotted

NAME = "kv_compression"
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "keydiff": "slotline.plugins.kv_compression.keydiff:KeyDiff",
        "newest": "slotline.plugins.kv_compression.newest:Newest",
        "snapkv": "slotline.plugins.kv_compression.snapkv:SnapKV",
    }
)
"""Methods that ship, with the paths of their classes."""


def _share(_options: object, _field: object, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"keep is {value!r}", fix="give a share above 0 and up to 1")


@frozen(kw_only=True)
class CompressionOptions:
    """Options of the extension, in `[extensions.kv_compression]`."""

    method: str = field(
        default="keydiff",
        metadata={
            "doc": "what decides which tokens stay: 'keydiff', 'snapkv', 'newest', or the path 'package.module:Class'"
        },
    )
    keep: float = field(
        default=0.5, validator=_share, metadata={"doc": "share of a prompt's tokens that stays in the cache"}
    )
    most: int = field(
        default=0,
        validator=AtLeast(0),
        metadata={"doc": "most tokens of a prompt that stay in the cache, 0 for no limit"},
    )
    interval: int = field(
        default=0,
        validator=AtLeast(0),
        metadata={
            "doc": "a request that holds so many tokens more than `most` is compressed to `most` again; 0 compresses "
            "prompts only"
        },
    )
    first: int = field(
        default=4, validator=AtLeast(0), metadata={"doc": "tokens at the start that stay, whatever the method says"}
    )
    last: int = field(
        default=32, validator=AtLeast(0), metadata={"doc": "newest tokens that stay, whatever the method says"}
    )
    options: Mapping[str, Any] = field(factory=dict, metadata={"doc": "the method's own options"})

    def __attrs_post_init__(self) -> None:
        if self.most and self.most <= self.first + self.last:
            raise ConfigError(
                f"most = {self.most} leaves nothing to choose beside first = {self.first} and last = {self.last}",
                fix=f"set most to at least {self.first + self.last + 1}, or lower first or last",
            )
        if self.interval and not self.most:
            raise ConfigError(f"interval = {self.interval} without most", fix="set most, the tokens to keep")

    @property
    def factory(self) -> Any:
        """Return the method's class.

        Raises:
            PluginLoadError: if there is none of that name, or it cannot be imported.
        """
        what = f"extensions.{NAME}.method = {self.method!r} (known: {', '.join(METHODS)})"
        return import_dotted(METHODS.get(self.method, self.method), what)

    @property
    def reads_scores(self) -> bool:
        """Whether the method reads attention scores, so that attention backends must give them."""
        return bool(getattr(self.factory, "window", 0))


descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name=NAME,
    capabilities=ExtensionCapabilities(order=85, needs_caches=True, frees_tokens=True),
    factory="slotline.plugins.kv_compression.extension:KVCompression",
    options="slotline.plugins.kv_compression:CompressionOptions",
    summary="keeps a part of each request's tokens in the cache and gives the other blocks back",
)
