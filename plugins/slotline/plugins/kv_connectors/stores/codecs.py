"""Forms of blocks in a store: their own bytes, or eight-bit codes with a scale for each token and head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from attrs import frozen

from slotline.plugins.kv_connectors.stores.block_store import Bytes
from slotline.registry.contracts import PLAIN, ConnectorGroup, KVConnectorContext
from slotline.registry.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
_SCALE_BYTES = 4


class Codec(Protocol):
    """Form of blocks in a store. `encode` and `decode` run in any thread."""

    @property
    def sizes(self) -> Sequence[int]:
        """Return the bytes of a block in the store, by group."""
        ...

    def encode(self, group: int, data: Bytes) -> Bytes | None:
        """Return the form of a block [block_bytes], None if it has none."""
        ...

    def decode(self, group: int, stored: Bytes, data: Bytes) -> None:
        """Write the block of a form into `data`, [block_bytes]."""
        ...


@frozen
class OwnBytes:
    """The bytes of blocks, unchanged. Implements `Codec`."""

    sizes: Sequence[int]

    def encode(self, group: int, data: Bytes) -> Bytes | None:
        return data

    def decode(self, group: int, stored: Bytes, data: Bytes) -> None:
        """Do nothing, because a store reads into the row itself."""


@frozen
class Int8Codes:
    """Codes from -127 to 127 of all vectors of a block, then their scales in float32. Implements `Codec`.

    A vector is what a token has in a head, of keys or of values. Its scale is the largest magnitude divided by 127.
    States keep their own bytes, since the error of one token's would go into all later ones.

    Attributes:
        widths: numbers of a vector, by group. 0 for a group of states.
        dtypes: of the caches, by group.
        sizes: bytes of a block in this form, by group.
    """

    widths: Sequence[int]
    dtypes: Sequence[torch.dtype]
    sizes: Sequence[int]

    def encode(self, group: int, data: Bytes) -> Bytes | None:
        if not self.widths[group]:
            return data
        vectors = self._vectors(group, data).float()
        largest = vectors.abs().amax(1)  # [n] float32
        if not bool(torch.isfinite(largest).all()):
            return None
        scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        codes = torch.round(vectors / scales[:, None]).to(torch.int8)
        return np.concatenate([codes.view(torch.uint8).flatten().numpy(), scales.view(torch.uint8).numpy()])

    def decode(self, group: int, stored: Bytes, data: Bytes) -> None:
        if not self.widths[group]:
            return  # the store reads into the row itself
        vectors = self._vectors(group, data)
        number = vectors.numel()
        codes = torch.from_numpy(stored[:number]).view(torch.int8).view(vectors.shape)
        scales = torch.from_numpy(stored[number:].copy()).view(torch.float32)
        vectors.copy_(codes.float() * scales[:, None])

    def _vectors(self, group: int, data: Bytes) -> torch.Tensor:
        """Return a block as [n, width]."""
        return torch.from_numpy(data).view(self.dtypes[group]).view(-1, self.widths[group])


def codec_of(name: str, context: KVConnectorContext, key: str) -> Codec:
    """Return a codec by its name, ``none`` or ``int8``.

    Args:
        context: of the connector.
        key: of the option, for errors.

    Raises:
        ConfigError: if the caches have a form that the codec does not know.
    """
    if name == "none":
        return OwnBytes([group.block_bytes for group in context.groups])
    for group in context.groups:
        if not group.states and (text := _refusal(group)):
            raise ConfigError(f"{key} = {name!r}: {text} ({group.name})", fix=f"set {key} = 'none'")
    widths, dtypes, sizes = list[int](), list[torch.dtype](), list[int]()
    for group in context.groups:
        width = 0 if group.states else group.layers[0].head_size if group.layers else 1
        dtype = getattr(torch, group.kv_dtype)
        number = group.block_bytes // dtype.itemsize
        widths.append(width)
        dtypes.append(dtype)
        sizes.append(number + number // width * _SCALE_BYTES if width else group.block_bytes)
    return Int8Codes(widths, dtypes, sizes)


def identity_of(name: str, context: KVConnectorContext) -> str:
    """Return the name of the blocks of a connector in a codec, [64] hexadecimal digits."""
    whole = context.identity
    return whole if name == "none" else hashlib.sha256(f"{whole}:{name}".encode()).hexdigest()


def _refusal(group: ConnectorGroup) -> str:
    """Return why the blocks of a group are no vectors of one width, empty if they are."""
    sizes = {size for layer in group.layers for size in (layer.head_size, layer.head_size_v)}
    if group.format != PLAIN or any(layer.mla for layer in group.layers):
        return "the caches are not plain keys and values"
    if group.kv_dtype not in DTYPES:
        return f"the caches have dtype {group.kv_dtype}, and one of {', '.join(DTYPES)} is needed"
    if len(sizes) > 1:
        return f"heads have {' and '.join(map(str, sorted(sizes)))} numbers, and all must have the same"
    item = getattr(torch, group.kv_dtype).itemsize
    expected = sum(2 * layer.num_kv_heads * layer.head_size for layer in group.layers) * group.block_size * item
    return "" if expected == group.block_bytes else "the blocks hold more than keys and values"
